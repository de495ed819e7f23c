"""Which records of a run are its rollouts, whatever framework wrote them."""

from __future__ import annotations

from pathlib import Path

from replay_core.errors import RequestError, SelectionError
from replay_core.records import Record, RecordKey, Run
from replay_core.rollouts.batch import COMPUTED, is_tokens, last_part

#: Where rollouts are kept: the first of these that a step has, and that holds tokens.
ROLLOUT_STAGES = ("trajectory", "prepared_trajectories", "datums", "batch_inputs", "tensors", "forward_data")


def rollout_records(run: Run) -> dict[int | None, list[Record]]:
    """Step -> the records that may be its rollouts. Evaluations are none."""
    by_step: dict[int | None, list[Record]] = {}
    for record in run.records:
        if record.key.stage in ROLLOUT_STAGES and record.key.role not in ("eval", "rerun"):
            by_step.setdefault(record.key.step, []).append(record)
    return by_step


def with_tokens(records: list[Record], *, computed: bool = False) -> list[Record]:
    """Of one step's records, those of the first stage, and of the role nearest to the sampler, that holds tokens.

    Args:
        computed: the first that holds what the trainer computed too, if one does.

    Raises:
        RequestError: none does: texts alone cannot be trained on.
    """
    nearest = {"rollout": 0, "actor": 1, None: 1}
    order = sorted(records, key=lambda r: (ROLLOUT_STAGES.index(r.key.stage), nearest.get(r.key.role, 2)))
    having = [record for record in order if any(is_tokens(ref) for ref in record.tensors())]
    if having:
        whole = (r for r in having if computed and any(last_part(ref) in COMPUTED for ref in r.tensors()))
        first = next(whole, having[0]).key
        return [r for r in records if (r.key.stage, r.key.role) == (first.stage, first.role)]
    raise WithoutTokensError(
        f"step {records[0].key.step} was recorded without tokens",
        file=str(records[0].path),
        expected="token ids, such as input_ids or tokens",
        found=", ".join(ref.name for ref in records[0].tensors()),
        hint="texts would have to be tokenised again, and might not come out the same",
    )


class WithoutTokensError(RequestError):
    """A step's rollouts are texts."""


def of_one_run(records: list[Record], path: Path) -> list[Record]:
    """The records, if no two have the same key.

    Raises:
        SelectionError: the path holds several runs; whose rollouts are meant nobody said.
    """
    first: dict[RecordKey, Record] = {}
    for record in records:
        twin = first.setdefault(record.key, record)
        if twin is not record:
            raise SelectionError(
                f"the path holds several recordings of {record.key}",
                file=str(path),
                expected="the dump of one run",
                found=f"{_below(twin.path, path)} and {_below(record.path, path)}",
                hint="name one of the runs by its own path",
            )
    return records


def _below(file: Path, path: Path) -> Path:
    return file.relative_to(path) if file.is_relative_to(path) else file
