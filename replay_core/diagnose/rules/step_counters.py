"""The recorded state of the optimizer, and of what goes along with it: no update takes back what others counted."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from msgspec import Struct

from replay_core import pages
from replay_core.diagnose.algorithm import stated_by
from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Finding, Where, finding, shown
from replay_core.diagnose.rule import rule, skip_if
from replay_core.errors import RldbgError
from replay_core.records import Inline, Record, TensorRef
from replay_core.regexes import regex

#: Settings that begin an optimizer anew on purpose.
_ON_PURPOSE = ("reset_optimizer", "reset_optimizer_states", "optimizer_reset", "reset_optim", "relora")
#: What trainers call the update, or the step, at which a run goes on from a checkpoint.
_RESUMED_AT = ("resumed_at", "resume_step", "resumed_step", "resume_at", "resumed_at_step", "resume_global_step")
_RESUMED_FROM = (
    "resumed_from", "resume_from", "resume_from_checkpoint", "resume_from_path", "resume_path",
    "resumed_from_checkpoint",
)  # fmt: skip

#: What counts, by what it belongs to. A bare `step` is a counter of the optimizer in a record of its own alone.
_IN_ITS_RECORD = regex(r"(?i)(?:^|[./])(?:steps?|t|state_steps?|num_updates|iterations?)$")
_COUNTERS = {
    "the learning rate's schedule": regex(
        r"(?i)(?:^|[./_])(?:lr_?)?sched(?:uler)?[./_](?:state[./_])?_?(?:last_epoch|step_count|steps?|num_updates)$"
        r"|(?:^|[./])_?(?:last_epoch|step_count)$"
    ),
    "the moving average of the weights (EMA)": regex(
        r"(?i)(?:^|[./_])ema(?:_model)?[./_](?:num_updates|n_averaged|steps?|updates|decay_steps?|step_count)$"
    ),
    "the data's position": regex(
        r"(?i)(?:^|[./])(?:(?:total_)?(?:consumed|seen)_(?:train_)?samples|(?:samples|prompts)_(?:seen|consumed))$"
    ),
    "the optimizer": regex(
        r"(?i)(?:^|[./])(?:adam_?w?_?steps?|optim(?:izer)?_?(?:state_)?steps?|opt_steps?|optimizer_updates?"
        r"|(?:num|n)_(?:optimizer_)?updates|updates?_counts?|state[./]steps?|adam_?t)$"
    ),
}  # fmt: skip
_CAUSES = {
    "the learning rate's schedule": "the schedule's state was not loaded with the checkpoint: the rate warms up, or "
    "falls, over again",
    "the moving average of the weights (EMA)": "the average was made anew from the weights of that step, and its "
    "decay begins as at the first update",
    "the data's position": "the data loader's state was not loaded: what was trained on already comes again",
}
_OPTIMIZER = "the optimizer"
#: What decays, by its own rate, from one update to the next; Adam's is .9 at least.
_SQUARES = regex(r"(?i)(?:^|[./_])(?:exp_avg_sq|exp_avg_sqs|adam_v|second_moments?|moment2|nu)(?:$|[./_])")
#: Of the numbers that had a square, the share that must be left, and how many fewer are left where all decay.
_LEFT, _LOST, _DECAYS, _FEWEST = 0.7, 0.5, 0.02, 32


class _Back(Struct, frozen=True):
    """A counter that is less than it was."""

    what: str
    step: int
    name: str
    was: float
    now: float
    record: Record


def begins_on_purpose(case: Case) -> bool:
    """Whether a run states that it begins its optimizer anew at times."""
    return any(case.algorithm.value(each) for each in _ON_PURPOSE)


@rule("D161", "the optimizer's state goes back", link="optimizer", scope="case", lasts=True,
      explains=("L02", "L08", "L10", "D25", "D150"),
      source="OpenPipe/ART#72, tinker-feedback#127: weights are loaded, the optimizer's state is not")  # fmt: skip
def gone_back(case: Case) -> Finding | None:
    """The step counters of the recorded optimizer state (`….step`, `adam_step`, `optimizer_step`, `num_updates`), and
    those of the schedule (`scheduler.last_epoch`), the moving average (`ema.num_updates`) and the data
    (`consumed_samples`), by rank: a warning where all of a record's are less than in the record before it. Nothing but
    a state that is made anew, or is loaded from an earlier checkpoint, takes a counter back. Where none goes back, the
    squares of Adam's second moments (`exp_avg_sq`): each update leaves nine tenths of them at least, so that a
    record in which more than half have lost 30 % is of another state, if in no other record 2 % have. Worth knowing of
    a run that states that it resets its optimizer.
    """
    found: list[_Back] = []
    looked = 0
    before: dict[tuple[Any, ...], tuple[tuple[int, ...], dict[str, float]]] = {}
    for record in _in_order(case):
        order = _order(record)
        for what, now in _counters(record).items():
            key = record.key.rank, record.key.role, what
            last_order, last = before.get(key, (order, {}))
            shared = sorted(now.keys() & last.keys())
            if shared and last_order < order:
                looked += 1
                if all(now[name] < last[name] for name in shared):
                    name = shared[0]
                    found.append(_Back(what, order[0], name, last[name], now[name], record))
            before[key] = order, {**last, **now}
    of_optimizer = [each for each in found if each.what == _OPTIMIZER]
    # Counters may be loaded, and the moments that go with them not.
    if not of_optimizer:
        moments = _SecondMoments(case)
        looked += moments.looked
        if moments.found is not None:
            return _of_moments(case, *moments.found)
    skip_if(not looked, "needs the step counters of the optimizer's state, or its second moments, in two steps")
    if not found:
        return None
    one = (of_optimizer or found)[0]
    others = sorted({each.what for each in found} - {one.what})
    along = f", and so does {' and '.join(others)}" if others else ""
    return finding(
        "info" if begins_on_purpose(case) else "warning",
        f"{one.what}'s state begins anew at step {one.step}: its step counters go from {one.was:g} back to "
        f"{one.now:g}{along}{_resumed(case, one.step)}"
        if one.what == _OPTIMIZER
        else f"{one.what} begins anew at step {one.step}: {one.name} goes from {one.was:g} back to {one.now:g}{along}"
        f"{_resumed(case, one.step)}",
        Where.of(one.record, one.name),
        shown("step counter" if one.what == _OPTIMIZER else one.name, one.now, f"> {one.was:g}", one.record.path.name),
        shown("in the record before", one.was),
        shown("records compared", looked),
        cause=_CAUSES.get(one.what, _MADE_ANEW),
        next_step="save and load optimizer.state_dict() with the weights, or warm the rate up again after a resume"
        if one.what == _OPTIMIZER
        else "save its state with the weights, and load it on resume",
        steps=sorted({each.step for each in found if each.what == one.what}),
    )


_MADE_ANEW = (
    "the optimizer was made anew and its state was not loaded (a resume that restores the weights alone, a checkpoint "
    "without the optimizer), or was loaded from an earlier checkpoint: Adam's moments are of few batches, its bias "
    "correction begins again, and the first updates are as large as the rate allows"
)


def _of_moments(case: Case, record: Record, name: str, lost: float, steps: list[int]) -> Finding:
    step = steps[0]
    return finding(
        "info" if begins_on_purpose(case) else "warning",
        f"the optimizer's state begins anew at step {step}: {lost:.0%} of Adam's second moments are less than any "
        f"decay leaves of them in an update{_resumed(case, step)}",
        Where.of(record, name),
        shown("second moments that lost 30 % and more", lost, f"<= {_LOST:g}", record.path.name),
        cause=_MADE_ANEW,
        next_step="save and load optimizer.state_dict() with the weights, or warm the rate up again after a resume",
        steps=steps,
    )


def _resumed(case: Case, step: int) -> str:
    """Where the run itself says that it goes on from a checkpoint there."""
    at = case.algorithm.number(*_RESUMED_AT)
    source = case.algorithm.value(*_RESUMED_FROM) or stated_by(case.run).get("resumed_from")
    if at is None or int(at) not in (step, step - 1):
        return ""
    named = f" from {source}" if isinstance(source, str) else ""
    return f", where the run was resumed{named}"


def _order(record: Record) -> tuple[int, ...]:
    key = record.key
    return tuple(-1 if each is None else each for each in (key.step, key.epoch, key.minibatch, key.micro))


def _in_order(case: Case) -> list[Record]:
    """Records that may hold what an optimizer keeps, as the updates follow each other."""
    return sorted(
        (each for each in case.records()
         if each.key.step is not None and each.key.stage in ("optimizer", "training_metrics", "loss", "gradient")),
        key=_order,
    )  # fmt: skip


def _counters(record: Record) -> dict[str, dict[str, float]]:
    """What counts updates, by what it belongs to and by name: each parameter's own counter, or one for all."""
    found: dict[str, dict[str, float]] = {}
    for ref in record.tensors():
        if ref.is_text or ref.numel != 1 or len(ref.shape) > 1 or not ref.is_readable:
            continue
        name = ref.name.removeprefix("metrics.")
        what = next((what for what, pattern in _COUNTERS.items() if pattern.search(name)), None)
        if what is None and record.key.stage == "optimizer" and _IN_ITS_RECORD.search(name):
            what = _OPTIMIZER
        value = None if what is None else _number(ref)
        if what is not None and value is not None and math.isfinite(value) and value >= 0:
            found.setdefault(what, {})[ref.name] = value
    return found


def _number(ref: TensorRef) -> float | None:
    if isinstance(ref.source, Inline):
        value = ref.source.value
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return None
        return float(value)
    try:
        return float(pages.array(ref).reshape(-1)[0])
    except (RldbgError, ValueError, TypeError):
        return None


class _SecondMoments:
    """Adam's second moments from record to record: whether one lost what no decay takes."""

    def __init__(self, case: Case) -> None:
        self.looked = 0
        self.found: tuple[Record, str, float, list[int]] | None = None
        lost: list[tuple[float, Record, str]] = []
        before: dict[tuple[Any, ...], tuple[int, dict[str, Any]]] = {}
        for record in _in_order(case):
            if record.key.stage != "optimizer":
                continue
            now = dict(_squares(record))
            key, step = (record.key.rank, record.key.role), record.key.step or 0
            last = before.get(key)
            if last is not None and step - last[0] <= 1:
                share = _lost(last[1], now)
                if share is not None:
                    lost.append((share, record, next(iter(now))))
            if now:
                before[key] = step, now
            record.release()
        self.looked = len(lost)
        fallen = [each for each in lost if each[0] > _LOST]
        rest = [each[0] for each in lost if each[0] <= _LOST]
        # Where every other record loses some, the moments are of another kind, or records lie many updates apart.
        if fallen and len(rest) >= 2 * len(fallen) and max(rest) <= _DECAYS:
            share, record, name = fallen[0]
            self.found = record, name, share, sorted({each[1].key.step or 0 for each in fallen})


def _squares(record: Record) -> Iterator[tuple[str, Any]]:
    for ref in record.tensors():
        if _SQUARES.search(ref.name) and ref.is_readable and not ref.is_text and ref.numel > 1:
            yield ref.name, np.asarray(pages.array(ref), dtype=np.float64).reshape(-1)


def _lost(before: dict[str, Any], now: dict[str, Any]) -> float | None:
    """The share of the squares that are less than an update leaves of them; None where there are too few."""
    lost, every = 0, 0
    for name in before.keys() & now.keys():
        if before[name].shape != now[name].shape:
            continue
        had = np.isfinite(before[name]) & (before[name] > 0) & np.isfinite(now[name])
        every += int(had.sum())
        lost += int((now[name][had] < _LEFT * before[name][had]).sum())
    return lost / every if every >= _FEWEST else None
