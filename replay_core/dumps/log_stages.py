"""Several runs in one text log, and stages of one script: where each begins, and which is read.

A sweep that is piped into one file numbers its steps anew with every run: the last is read. Demonstrations that are
learnt before answers are paid for are another curve: what stands before the first reward is left out. Epochs that begin
anew with the same figures may be either, and are read as one: that is said.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from replay_core.dumps.metrics import A_RUN, runs_in
from replay_core.regexes import regex

#: Rows of a stage that is one, and the names that rows of one kind share.
_A_STAGE, _ALIKE = 2, 0.5
_PAID = regex(r"(?i)^(?:train/)?rewards?(?:$|_mean$|_std$|/(?!chosen|rejected|margins|accuracies))")
_EPOCH = regex(r"(?i)\bepochs?\W{0,4}(\d{1,9})")


class ToldRow(Struct, frozen=True):
    """A row of metrics of one stream: its line, its step (counted or said), its epoch, and the names it has."""

    line: int
    step: int
    epoch: float | None
    names: frozenset[str]
    stream: str = ""

    @property
    def is_paid(self) -> bool:
        return any(map(_PAID.search, self.names))

    def is_like(self, other: ToldRow) -> bool:
        return len(self.names & other.names) >= _ALIKE * len(self.names | other.names)


class Split(Struct, frozen=True):
    """Where what is read begins, and what is said of it."""

    line: int
    step: int
    note: str


def epoch_in(text: str) -> float | None:
    """The epoch that a line numbers; None where it numbers none."""
    found = _EPOCH.search(text)
    return None if found is None else float(found[1])


def last_run(rows: Sequence[ToldRow]) -> Split | None:
    """Where the last of several runs begins whose rows number their steps; None of one run, of epochs that number their
    own steps, and of rows of another kind (an evaluation's).
    """
    if not rows or len({row.stream for row in rows}) > 1 or len({row.epoch for row in rows}) > 1:
        return None
    runs = runs_in([row.step for row in rows])
    starts = [rows[first] for first, _ in runs]
    if len(runs) < 2 or any(end - first < A_RUN for first, end in runs):
        return None
    if not all(start.is_like(rows[0]) for start in starts):
        return None
    lines = ", ".join(str(start.line) for start in starts)
    note = f"the log holds {len(runs)} runs one after another (lines {lines}): the last is read"
    return Split(starts[-1].line, starts[-1].step, note)


def paid_stage(rows: Sequence[ToldRow]) -> Split | None:
    """Where answers begin to be paid for behind a stage of demonstrations, of rows whose steps are counted: the epoch
    falls back, and no row before has a reward.
    """
    if len({row.stream for row in rows}) > 1:
        return None
    at = next((at for at, row in enumerate(rows) if row.is_paid), 0)
    before = [row.epoch for row in rows[:at] if row.epoch is not None]
    epoch = rows[at].epoch if rows else None
    if at < _A_STAGE or len(rows) - at < _A_STAGE or len(before) < _A_STAGE or epoch is None or epoch >= before[-1]:
        return None
    note = (
        f"lines {rows[0].line} to {rows[at - 1].line} are of a stage without rewards, before line {rows[at].line}: "
        "they are no part of what is read"
    )
    return Split(rows[at].line, rows[at].step, note)


def begins_anew(rows: Sequence[ToldRow]) -> str:
    """That epochs begin anew with the same figures, in words; empty where they do not."""
    told = [row for row in rows if row.epoch is not None]
    if len({row.stream for row in told}) > 1:
        return ""
    starts, first = [], 0
    for at in range(1, len(told)):
        epoch, before, begun = told[at].epoch or 0.0, told[at - 1].epoch or 0.0, told[first].epoch or 0.0
        if at - first >= A_RUN and epoch <= begun < before and told[at].is_like(told[first]):
            starts.append(at)
            first = at
    if not starts or len(told) - first < A_RUN:
        return ""
    lines = ", ".join(str(told[at].line) for at in starts)
    return f"epochs begin anew at line {lines}: {len(starts) + 1} runs or stages are read as one curve"
