"""The closer look at a pair: how its differences are spread, read in the background while the keys go on."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from replay_core.errors import RldbgError
from replay_core.jobs import Job, ignore
from tui_debugger.flows.errands import Errands
from tui_debugger.state import Opened, Part
from tui_debugger.together import named

if TYPE_CHECKING:
    from replay_core.documents.difference import DifferenceDocument, StripCell, StripPlace
    from replay_core.documents.tensor import TensorDocument

#: What nobody needs to look closer at.
_PLAIN = frozenset({"SAME", "MISSING", "SHAPE", ""})
AXES = ("row", "channel")


class Closer:
    """Asks for the figures of tier 2. Moving on gives up what is still being read."""

    def __init__(self, errands: Errands) -> None:
        self._errands, self.state = errands, errands.state
        self._asked: asyncio.Future[DifferenceDocument] | None = None

    def give_up(self) -> None:
        if self._asked is not None:
            self._asked.cancel()
        self.state.inspection.closer, self.state.inspection.strip_at = None, None

    async def look(self, a: dict[str, Any], b: dict[str, Any] | None) -> None:
        """Ask how the inspected pair's differences are spread; an error stands in the place of the answer."""
        state = self.state
        row = None if state.tensors.shows_record else state.tensors.row
        if b is None or state.inspection.sheet != "values" or (row is not None and row.verdict in _PLAIN):
            return
        job = Job(
            "difference", {"a": a, "b": b, "axis": state.inspection.strip_axis, "cells": state.inspection.strip_cells}
        )
        state.inspection.closer = {"kind": "reading", "message": ""}
        self._errands.changed(Part.INSPECT)
        asked = self._asked = asyncio.ensure_future(self._errands.engine.run(job, ignore))
        try:
            state.inspection.closer = await asked
        except RldbgError as error:
            state.inspection.closer = {"kind": "problem", "message": error.message} if self._asked is asked else None
        except asyncio.CancelledError:
            if self._asked is asked and not asked.cancelled():
                asked.cancel()
                raise
            return
        if self._asked is asked:
            self._asked = None
            self._errands.changed(Part.INSPECT)

    async def turn(self) -> None:
        """The strip along the other axis."""
        state = self.state
        state.inspection.strip_axis = AXES[1 - AXES.index(state.inspection.strip_axis)]
        document = state.inspection.document
        self.give_up()
        if document is not None and document["kind"] == "tensor" and document["b"]:
            await self.look(*inspected_sides(state.opened, document))

    def move(self, by: int) -> None:
        """Move the strip's cursor; the first move stands on the stretch that differs most."""
        strip = self.strip
        if not strip:
            return
        here = self.state.inspection.strip_at
        if here is None:
            here = max(range(len(strip)), key=lambda cell: _far(strip[cell]["rel_l2"]))
        else:
            here = max(0, min(len(strip) - 1, here + by))
        self.state.inspection.strip_at = here
        self._errands.changed(Part.INSPECT)

    @property
    def strip(self) -> list[StripCell]:
        found = self.state.inspection.closer
        return found["strip"] if found is not None and found["kind"] == "difference" else []

    @property
    def place(self) -> StripPlace | None:
        """Where in the stretch under the cursor |d| is greatest."""
        strip, at = self.strip, self.state.inspection.strip_at
        return strip[at]["at"] if at is not None and at < len(strip) else None


def _far(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else float("inf") if value == "inf" else -1.0


def inspected_sides(opened: Opened, document: TensorDocument) -> tuple[dict[str, Any], dict[str, Any]]:
    """What names the two inspected tensors."""
    a, b = (
        {"key": side["key"], "name": side["name"], **named(opened, side["path"])}
        for side in (document["a"], document["b"] or document["a"])
    )
    return a, b
