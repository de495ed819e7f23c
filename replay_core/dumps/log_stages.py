"""Several runs in one text log, and stages of one script: where each begins, and which is read.

A sweep that is piped into one file numbers its steps anew with every run: the last is read. Demonstrations that are
learnt before answers are paid for are another curve: what stands before the first reward is left out. Epochs that begin
anew with the same figures may be either, and are read as one: that is said. Nothing is left out that has numbers which
are not finite, that is far longer than what would be read, or that was ended from outside and begun again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from msgspec import Struct

from replay_core.dumps.metrics import A_RUN, runs_in
from replay_core.regexes import regex

#: Rows of a stage that is one, and the names that rows of one kind share.
_A_STAGE, _ALIKE = 2, 0.5
#: What is read of several runs is no smaller part of the longest.
_NO_REMNANT = 0.5
_PAID = regex(r"(?i)^(?:train/)?rewards?(?:$|_mean$|_std$|/(?!chosen|rejected|margins|accuracies))")
_EPOCH = regex(r"(?i)\bepochs?\W{0,4}(\d{1,9})")
#: A run that sets how many epochs it takes begins none.
_BEGUN = regex(r"(?i)(?<![\w.])epoch\W{0,4}(\d{1,9})")


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


class RolloutUpdates:
    """Rollouts and the updates of each, where one log counts both: slime's `rollout 3: {...}` and, `k` times as often,
    `step 7: {... 'train/step': 7}`.

    updates = RolloutUpdates()
    for line in lines: updates.take(line.number, line.text, step)
    updates.numbered()      # of a line and the number it says, the number of the update that it goes with
    """

    def __init__(self) -> None:
        self._rollouts: dict[int, int] = {}
        self._counts: dict[int, int] = {}
        self._last: int | None = None

    def take(self, line: int, text: str, step: int) -> None:
        """A line of metrics that says its number."""
        if (said := _COUNTS.search(text)) is None:
            return
        if said[1] != "step":
            self._rollouts[line] = step
            self._last = step if said[1] == "rollout" else self._last
        elif self._last is not None:
            known = self._counts.get(self._last)
            self._counts[self._last] = step if known is None else known

    def numbered(self) -> Callable[[int, int], int] | None:
        """None where each rollout has one update, and where their numbers do not go together."""
        firsts = [(at, first) for at, first in self._counts.items() if at]
        per = {first // at for at, first in firsts}
        if len(firsts) < 2 or len(per) > 1 or any(first % at for at, first in firsts) or min(per) < 2:
            return None
        (by,) = per
        return lambda line, step: step * by if line in self._rollouts else step


#: What slime prints before a mapping: of a rollout, and of an update.
_COUNTS = regex(r"\b(rollout|perf|eval|passrate|multi_turn|step) \d{1,12}: \{")


def epoch_in(text: str) -> float | None:
    """The epoch that a line numbers; None where it numbers none."""
    found = _EPOCH.search(text)
    return None if found is None else float(found[1])


def epoch_begun(text: str) -> float | None:
    """The epoch that a line without metrics begins."""
    found = _BEGUN.search(text)
    return None if found is None else float(found[1])


class Runs(Struct, frozen=True):
    """Several runs of one log whose rows number their steps: the rows of each."""

    of: list[Sequence[ToldRow]]

    def gaps(self) -> list[tuple[int, int]]:
        """The lines between each and the next: the last of the one, the first of the other."""
        return [(one[-1].line, other[0].line) for one, other in pairwise(self.of)]

    def are_epochs(self, marks: Sequence[tuple[int, float]]) -> bool:
        """Whether a line before each numbers an epoch, each a higher one. `marks`: such lines, with their epochs."""
        before = [max((mark for mark in marks if mark[0] < run[0].line), default=None) for run in self.of]
        if None in before[1:]:
            return False
        first = 0.0 if before[0] is None else before[0][1]
        numbers = [first, *(mark[1] for mark in before[1:] if mark is not None)]
        return (before[0] is not None or numbers[1] <= 1) and all(one < other for one, other in pairwise(numbers))

    def in_words(self, what: str) -> str:
        lines = ", ".join(str(run[0].line) for run in self.of)
        return f"the log holds {len(self.of)} {what} one after another (lines {lines})"

    def last(self, not_finite: Sequence[int]) -> Split | None:
        """Where what is read begins; None where others cannot be left out. `not_finite`: lines with such numbers."""
        *others, last = self.of
        if len(last) < _NO_REMNANT * max(map(len, others)) or min(not_finite, default=last[0].line) < last[0].line:
            return None
        return Split(last[0].line, last[0].step, f"{self.in_words('runs')}: the last is read")

    def numbered_on(self) -> Callable[[int, int], int]:
        """Of a line and the step that it numbers, the step where each run goes on from the one before."""
        starts, by = [(self.of[0][0].line, 0)], 0
        for one, other in pairwise(self.of):
            by += max(row.step for row in one) + 1 - other[0].step
            starts.append((other[0].line, by))

        def number(line: int, step: int) -> int:
            return step + next((more for first, more in reversed(starts) if line >= first), 0)

        return number


def several_runs(rows: Sequence[ToldRow]) -> Runs | None:
    """The runs of rows that number their steps; None of one run, of epochs that number their own steps, and of rows of
    another kind (an evaluation's).
    """
    if not rows or len({row.stream for row in rows}) > 1 or len({row.epoch for row in rows}) > 1:
        return None
    runs = runs_in([row.step for row in rows])
    if len(runs) < 2 or any(end - first < A_RUN for first, end in runs):
        return None
    if not all(rows[first].is_like(rows[0]) for first, _ in runs):
        return None
    return Runs([rows[first:end] for first, end in runs])


def paid_stage(rows: Sequence[ToldRow], not_finite: Sequence[int]) -> Split | None:
    """Where answers begin to be paid for behind a stage of demonstrations, of rows whose steps are counted: the epoch
    falls back, and no row before has a reward. `not_finite`: lines with numbers that are not.
    """
    if len({row.stream for row in rows}) > 1:
        return None
    at = next((at for at, row in enumerate(rows) if row.is_paid), 0)
    before = [row.epoch for row in rows[:at] if row.epoch is not None]
    epoch = rows[at].epoch if rows else None
    if at < _A_STAGE or len(rows) - at < _A_STAGE or len(before) < _A_STAGE or epoch is None or epoch >= before[-1]:
        return None
    if len(rows) - at < _NO_REMNANT * at or min(not_finite, default=rows[at].line) < rows[at].line:
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
