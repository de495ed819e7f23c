"""1 Steps: the records of A, by step, micro-batch and dump point. Only the lines on screen are drawn."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rich.style import Style
from rich.text import Text
from textual import on

from tui_debugger import format as fmt
from tui_debugger.actions import pane_title
from tui_debugger.health import MARKS, problem_step, worse
from tui_debugger.messages import RecordHighlighted, RecordOpened
from tui_debugger.state import Scope, State
from tui_debugger.steps_compared import StepsCompared
from tui_debugger.widgets.paint import paint, verdict_token, write_border
from tui_debugger.widgets.rows import Rows

_EMPTY = "The records of a dump stand here, by step. o opens one."


class Spot(NamedTuple):
    """What a line stands for: a scope, its records, and the one record when there is just one."""

    depth: int
    label: str
    scope: Scope
    records: tuple[int, ...]
    opens: bool = False
    """Whether there are lines below it to open."""

    @property
    def record(self) -> int | None:
        return self.records[0] if len(self.records) == 1 else None


class Problems:
    """How many problems a run has at which record and step: by the file they name, and by the step they speak of."""

    def __init__(self, problems: Sequence[Mapping[str, Any]], records: Sequence[Mapping[str, Any]]) -> None:
        by_path = {str(record.get("path")): index for index, record in enumerate(records)} if problems else {}
        self._records: Counter[int] = Counter()
        self._steps: Counter[int | None] = Counter()
        for problem in problems:
            index = by_path.get(str(problem.get("where")))
            said = problem_step(f"{problem.get('what')}")
            if index is not None:
                self._records[index] += 1
            if index is not None or said is not None:
                self._steps[records[index]["key"].get("step") if index is not None else said] += 1

    def of_record(self, index: int) -> int:
        return self._records[index]

    def of_step(self, step: int | None) -> int:
        return self._steps[step]


def _alike(one: Spot, other: Spot) -> bool:
    """Whether two lines, of the same run before and after it grew, stand for the same thing."""
    same_place = (one.depth, one.scope) == (other.depth, other.scope)
    return same_place and (not one.records or not other.records or one.records[0] == other.records[0])


def _matcher(text: str) -> Callable[[str], object] | None:
    if not text:
        return None
    try:
        return re.compile(text, re.IGNORECASE).search
    except re.error:
        return re.compile(re.escape(text), re.IGNORECASE).search


class StepsPane(Rows):
    BORDER_TITLE = pane_title("steps")
    head_lines = 0

    def __init__(self) -> None:
        super().__init__(id="steps", empty=_EMPTY)
        self._drawn: object = None
        self._records: list[Mapping[str, Any]] = []
        self._compared = StepsCompared()
        self._is_pair = False
        self._stages: set[str | None] = set()
        self._filter = ""
        self._wrong = Problems([], [])
        self._health: dict[int | None, tuple[str, int]] = {}
        self._marked: set[str] = set()
        self._lines: list[Spot] = []
        self._peeked: list[int] = []
        self._open: set[Scope] = set()
        #: The step that the cursor was put on last for what is looked at, and those that the keys came by since.
        self._followed: int | None = None
        self._asked: set[int | None] = set()

    def show(self, state: State) -> None:
        """Draw the run; what is open stays open while only verdicts change."""
        self._compared, self._is_pair = state.opened.steps, bool(state.of_two)
        self._marked = {mark.name for mark in state.marks if mark.kind == "record"}
        self._health = state.opened.health.at_steps()
        if state.opened.a is None:
            self._drawn, self._records = None, []
            self._lines, self._peeked = [], state.opened.peeked
            write_border(self, subtitle=f"{len(self._peeked):,} steps, reading" if self._peeked else "")
            self.set_count(len(self._peeked), min(self.cursor, len(self._peeked)))
            return
        if self._drawn is not state.opened.a or self._filter != state.opened.step_filter:
            drawn = self._drawn
            # A run that is followed grows: what is open stays open, and the cursor where it is.
            is_new = not (isinstance(drawn, dict) and drawn.get("path") == state.opened.a.get("path"))
            self._drawn, self._filter = state.opened.a, state.opened.step_filter
            self._plant(state, is_new=is_new)
        shown, total = sum(len(spot.records) for spot in self._lines if not spot.depth), len(self._records)
        write_border(self, subtitle=f"{shown:,} of {total:,} records" if self._filter else f"{total:,} records")
        self._follow(state.opened.scope)
        self.refresh()

    def _plant(self, state: State, *, is_new: bool) -> None:
        assert state.opened.a is not None
        self._records = list(state.opened.a.get("records") or [])
        self._wrong = Problems(state.opened.a.get("problems") or [], self._records)
        self._stages = {record["key"].get("stage") for record in self._records if record["key"].get("step") is not None}
        by_step: dict[int | None, list[int]] = {}
        wanted = _matcher(state.opened.step_filter)
        for index, record in enumerate(self._records):
            if wanted is None or wanted(self._said(index)):
                by_step.setdefault(record["key"].get("step"), []).append(index)
        if is_new:
            self._open = {Scope(step) for step in by_step if len(by_step) == 1 or step == state.opened.scope.step}
        here = self.here
        steps = sorted(by_step, key=lambda step: (step is None, step or 0))
        self._lines = []
        for step in steps:
            name = "no step" if step is None else f"step {step}"
            spot = Spot(0, name, Scope(step), tuple(by_step[step]), len(by_step[step]) > 1)
            self._lines.append(spot)
            if spot.opens and spot.scope in self._open:
                self._lines += self._below(spot)
        same = (row for row, spot in enumerate(self._lines) if here is not None and _alike(spot, here))
        self.set_count(len(self._lines), next(same, min(self.cursor, max(0, len(self._lines) - 1))))

    def _below(self, spot: Spot) -> list[Spot]:
        """The lines under one: ranks and micro-batches, or the dump points of a single one, and what is open."""
        groups: dict[Scope, list[int]] = {}
        for index in spot.records:
            groups.setdefault(Scope.of(self._records[index]["key"]), []).append(index)
        depth = spot.depth + 1
        if len(groups) == 1 and (spot.depth or spot.scope in groups):
            return [Spot(depth, self._stage(index), spot.scope, (index,)) for index in spot.records]
        lines: list[Spot] = []
        for scope, indexes in groups.items():
            parts = (("rank", scope.rank), ("micro", scope.micro))
            label = " ".join(f"{name} {value}" for name, value in parts if value is not None)
            if scope == spot.scope or not label:
                lines += [Spot(depth, self._stage(index), scope, (index,)) for index in indexes]
                continue
            alone = f" {self._telling(indexes[0])}".rstrip() if len(indexes) == 1 else ""
            below = Spot(depth, label + alone, scope, tuple(indexes), len(indexes) > 1)
            lines.append(below)
            if below.opens and below.scope in self._open:
                lines += self._below(below)
        return lines

    def _follow(self, scope: Scope) -> None:
        """Put the cursor on the step that is looked at, without telling anybody."""
        here = self.here
        if here is not None and here.scope.step == scope.step:
            self._followed = scope.step
            self._asked.clear()
            return
        if self.has_focus and (scope.step == self._followed or scope.step in self._asked):
            return  # the keys went on while a step they had passed was read
        self._followed = scope.step
        row = self._row_of(scope.step)
        if row is not None:
            self.move_cursor(row)

    def _row_of(self, step: int | None) -> int | None:
        return next((row for row, spot in enumerate(self._lines) if spot.scope.step == step), None)

    # ── what a line says ─────────────────────────────────────────────────────────────────────────

    def _said(self, index: int) -> str:
        """What the filter looks at: `step 3 rank 0 micro 1 modules PROBLEM DIFF`."""
        key = self._records[index]["key"]
        parts = [fmt.scope(key), str(key.get("role")), str(key.get("stage"))]
        if self._wrong.of_record(index) or self._wrong.of_step(key.get("step")):
            parts.append("PROBLEM")
        parts.append(self._health.get(key.get("step"), ("", 0))[0].upper())
        return " ".join([*parts, self._compared.said(key.get("step"))])

    def _stage(self, index: int) -> str:
        role = self._records[index]["key"].get("role")
        fields = self._records[index].get("fields")
        count = f" ({len(fields)})" if fields else ""
        prefix = f"{role}/" if role not in (None, "actor") else ""
        return f"{prefix}{self._records[index]['key'].get('stage')}{count}"

    def _telling(self, index: int) -> str:
        """What tells a lone record from the others: its role, and its stage where the dump has several."""
        if len(self._stages) > 1:
            return self._stage(index)
        role = self._records[index]["key"].get("role")
        return "" if role == "actor" else str(role or "")

    def line(self, row: int, width: int) -> Text:
        if not self._lines:
            return Text(f"   step {self._peeked[row]}")
        spot = self._lines[row]
        arrow = ("▾ " if spot.scope in self._open else "▸ ") if spot.opens else "  "
        text = Text(" " + "  " * spot.depth + arrow)
        text.append(fmt.safe(spot.label))
        if not spot.depth and (said := self._compared.said(spot.scope.step)):
            text.append("  ")
            text.append(said, paint(self, verdict_token(said)))
            if apart := self._apart(spot.scope.step):
                text.append(f" {apart}")
        mark = self._mark(spot)
        if mark is not None:
            text.append("  ")
            text.append(*mark)
        if str(spot.scope) in self._marked and (not spot.depth or spot.scope.micro is not None):
            text.append("  +", paint(self, "key"))
        return text

    def _apart(self, step: int | None) -> int:
        """How many tensors of the step diverge."""
        entry = self._compared.found.get(step)
        counts = entry["counts"] if entry else None
        return sum(counts[word] for word in ("NAN", "SHAPE", "DIFF")) if counts else 0

    def _mark(self, spot: Spot) -> tuple[str, Style] | None:
        """What is wrong there: the worst severity as a shape and a letter, and how many. None where nobody looked."""
        wrong = sum(map(self._wrong.of_record, spot.records)) if spot.depth else self._wrong.of_step(spot.scope.step)
        severity, count = ("warning" if wrong else ""), wrong
        if not spot.depth:
            if not wrong and spot.scope.step not in self._health:
                return None
            found, found_count = self._health.get(spot.scope.step, ("", 0))
            severity, count = worse(severity, found), count + found_count
            if not severity and (self._is_pair or self._compared.said(spot.scope.step)):
                return None  # where two are compared a ✓ would read as a verdict
        elif not wrong:
            return None
        word, token = MARKS[severity]
        return f"{word}{count if count > 1 else ''}", paint(self, token)

    # ── keys ─────────────────────────────────────────────────────────────────────────────────────

    @property
    def here(self) -> Spot | None:
        """What the cursor is on."""
        return self._lines[self.cursor] if self.cursor < len(self._lines) else None

    def go_to(self, step: int | None, path: str = "") -> bool:
        """Put the cursor on a step, or open the record of a file; False where there is none."""
        index = next((i for i, record in enumerate(self._records) if path and str(record.get("path")) == path), None)
        if index is not None:
            step = self._records[index]["key"].get("step")
        row = self._row_of(step)
        if row is None:
            return False
        self.move_cursor(row)
        if index is not None:
            self.post_message(RecordOpened(index, Scope.of(self._records[index]["key"])))
        return True

    @on(Rows.Highlighted)
    def _highlighted(self, event: Rows.Highlighted) -> None:
        event.stop()
        spot = self.here
        if spot is None or not spot.records:
            return
        if isinstance(event, Rows.Chosen):
            self._chosen(spot)
        elif self.has_focus:
            self._asked.add(spot.scope.step)
            # Of a step or micro-batch of several records the first is looked at.
            self.post_message(RecordHighlighted(spot.records[0], spot.scope))

    def _chosen(self, spot: Spot) -> None:
        row = self.cursor
        if spot.opens and spot.scope not in self._open:
            self._open.add(spot.scope)
            self._lines[row + 1 : row + 1] = self._below(spot)
        elif spot.opens:
            self._open.discard(spot.scope)
            later = range(row + 1, len(self._lines))
            end = next((i for i in later if self._lines[i].depth <= spot.depth), len(self._lines))
            del self._lines[row + 1 : end]
        self.set_count(len(self._lines), row)
        self.post_message(RecordOpened(spot.record, spot.scope))
