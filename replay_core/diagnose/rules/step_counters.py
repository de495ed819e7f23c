"""The step counters of the optimizer's recorded state: each update adds one, and nothing takes any away."""

from __future__ import annotations

import math

from replay_core import pages
from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Finding, Where, finding, shown
from replay_core.diagnose.rule import rule, skip_if
from replay_core.records import Record

#: Settings that begin an optimizer anew on purpose.
_ON_PURPOSE = ("reset_optimizer", "reset_optimizer_states", "optimizer_reset", "reset_optim", "relora")


def begins_on_purpose(case: Case) -> bool:
    """Whether a run states that it begins its optimizer anew at times."""
    return any(case.algorithm.value(each) for each in _ON_PURPOSE)


@rule("D161", "the optimizer's step counters go back", link="optimizer", scope="case", lasts=True,
      explains=("L02", "L08", "L10", "D25"),
      source="OpenPipe/ART#72, tinker-feedback#127: weights are loaded, the optimizer's state is not")  # fmt: skip
def gone_back(case: Case) -> Finding | None:
    """The step counters of the recorded optimizer state (`….step`, one for each parameter), by rank: a warning where
    all of a record's are less than in the recorded step before it. Nothing but a state that is made anew, or is loaded
    from an earlier checkpoint, takes a counter back, and the moments that stand beside it are as young. Worth knowing
    of a run that states that it resets its optimizer.
    """
    before: dict[tuple[int | None, str | None], tuple[int, dict[str, float]]] = {}
    found: list[tuple[int, float, float, Record, str]] = []
    looked = 0
    for record in sorted(case.records(), key=lambda one: -1 if one.key.step is None else one.key.step):
        key = record.key
        if key.step is None or key.stage != "optimizer":
            continue
        now = _counters(record)
        last = before.get((key.rank, key.role))
        if not now:
            continue
        if last is not None and last[0] < key.step and (shared := sorted(now.keys() & last[1].keys())):
            looked += 1
            if all(now[name] < last[1][name] for name in shared):
                found.append((key.step, last[1][shared[0]], now[shared[0]], record, shared[0]))
        before[key.rank, key.role] = key.step, {**(last[1] if last is not None else {}), **now}
    skip_if(not looked, "needs the step counters of the optimizer's state in two steps")
    if not found:
        return None
    step, was, now_at, record, name = found[0]
    return finding(
        "info" if begins_on_purpose(case) else "warning",
        f"the optimizer's state begins anew at step {step}: its step counters go from {was:g} back to {now_at:g}",
        Where.of(record, name),
        shown("step counter", now_at, f"> {was:g}", record.path.name),
        shown("in the record before", was),
        shown("records compared", looked),
        cause="the optimizer was made anew and its state was not loaded (a resume that restores the weights alone, a "
        "checkpoint without the optimizer), or was loaded from an earlier checkpoint: Adam's moments are of few "
        "batches, its bias correction begins again, and the first updates are as large as the rate allows",
        next_step="save and load optimizer.state_dict() with the weights, or warm the rate up again after a resume",
        steps=sorted({each[0] for each in found}),
    )


def _counters(record: Record) -> dict[str, float]:
    """How many updates each parameter has had, as the optimizer counts them."""
    found = {}
    for ref in record.tensors():
        if (
            ref.name.endswith(".step")
            and ref.numel == 1
            and not ref.is_text
            and ref.is_readable
            and len(ref.shape) <= 1
        ):
            value = float(pages.array(ref).reshape(-1)[0])
            if math.isfinite(value) and value >= 0:
                found[ref.name] = value
    return found
