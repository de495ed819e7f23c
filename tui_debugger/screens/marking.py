"""Marking two tensors, steps, micro-batches or cells, and comparing what is marked."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from tui_debugger.panes.start import StartList
from tui_debugger.panes.steps import StepsPane
from tui_debugger.screens.stage import Stage
from tui_debugger.state import Mark, Part, Scope

if TYPE_CHECKING:
    from replay_core.documents.replay import CellEntry


class Marking:
    """The actions on marks."""

    def __init__(self, stage: Stage) -> None:
        self._stage, self._session, self._state = stage, stage.session, stage.state

    def do_mark(self) -> None:
        screen, active = self._stage.screen, self._stage.panes.active
        row, spot = self._state.tensors.row, screen.query_one(StepsPane).here
        if active == "steps" and spot is not None and self._state.opened.a is not None:
            self._mark(Mark("record", str(spot.scope), spot.scope.params()))
        elif active == "steps":
            self._stage.say("nothing to mark: o opens a dump")
        elif active == "tensors" and row is not None and not screen.query_one(StartList).display:
            sides = self._session.looking.sides(row)
            side = sides.get("a") or sides.get("b")
            if side is None:
                self._stage.say("nothing of it can be read: it cannot be compared")
                return
            self._mark(Mark("tensor", row.name, side))
        else:
            self._stage.say(
                "space marks a tensor in 2, a step or micro-batch in 1, a cell in the matrix; = compares two"
            )

    def _mark(self, mark: Mark) -> None:
        self._state.toggle_mark(mark)
        if len(self._state.marks) == 2:
            self._stage.say(f"two marked: = compares {self._state.marks[0].name} with {self._state.marks[1].name}")
        self._stage.redraw(Part.TENSORS, Part.RUNS)

    def do_pair(self) -> None:
        if len(self._state.marks) != 2:
            self._stage.say(
                "mark two first: space marks a tensor in 2, a step or micro-batch in 1, a cell in the matrix"
            )
            return
        one, other = self._state.marks
        if one.kind == "tensor":
            self._stage.work(self._session.looking.inspect_pair(one, other), "inspect")
            self._stage.panes.focus("inspect")
        elif one.kind == "record":
            self._stage.work(self._session.comparing.compare_scopes(Scope(**one.what), Scope(**other.what)), "compare")
            self._stage.panes.focus("tensors")
        else:
            self._stage.work(
                self._session.replaying.compare_cells(cast("CellEntry", one.what), cast("CellEntry", other.what)),
                "compare",
            )
