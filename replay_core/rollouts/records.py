"""Which records of a run are its rollouts, whatever framework wrote them."""

from __future__ import annotations

from replay_core.errors import RequestError
from replay_core.records import Record, Run
from replay_core.rollouts.batch import is_tokens

#: Where rollouts are kept: the first of these that a step has, and that holds tokens.
ROLLOUT_STAGES = ("trajectory", "prepared_trajectories", "datums", "batch_inputs", "tensors")


def rollout_records(run: Run) -> dict[int | None, list[Record]]:
    """Step -> the records that may be its rollouts. Evaluations are none."""
    by_step: dict[int | None, list[Record]] = {}
    for record in run.records:
        if record.key.stage in ROLLOUT_STAGES and record.key.role not in ("eval", "rerun"):
            by_step.setdefault(record.key.step, []).append(record)
    return by_step


def with_tokens(records: list[Record]) -> list[Record]:
    """Of one step's records, those of the first stage, and of the role nearest to the sampler, that holds tokens.

    Raises:
        RequestError: none does: texts alone cannot be trained on.
    """
    order = sorted(records, key=lambda r: (ROLLOUT_STAGES.index(r.key.stage), r.key.role != "rollout"))
    for first in order:
        if any(is_tokens(ref) for ref in first.tensors()):
            return [r for r in records if (r.key.stage, r.key.role) == (first.key.stage, first.key.role)]
    raise RequestError(
        f"step {records[0].key.step} was recorded without tokens",
        file=str(records[0].path),
        expected="token ids, such as input_ids or tokens",
        found=", ".join(ref.name for ref in records[0].tensors()),
        hint="texts would have to be tokenised again, and might not come out the same",
    )


def spans(steps: list[int]) -> str:
    """`0..3, 6` of [0, 1, 2, 3, 6]."""
    parts: list[str] = []
    for at, step in enumerate(steps):
        if at and step == steps[at - 1] + 1:
            parts[-1] = parts[-1].partition("..")[0] + f"..{step}"
        else:
            parts.append(str(step))
    return ", ".join(parts) or "none"
