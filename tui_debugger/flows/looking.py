"""Looking at one record and one tensor of what is open: the flow behind panes 2 and 3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from replay_core.jobs import Job
from tui_debugger import format as fmt
from tui_debugger.flows.closer import Closer, inspected_sides
from tui_debugger.flows.errands import Errands
from tui_debugger.flows.latest import Latest
from tui_debugger.state import Mark, Part, Scope
from tui_debugger.tensor_rows import TensorRow
from tui_debugger.together import named

#: Values the inspector asks for around a place.
WINDOW = 32


class Looking:
    """Shows records and inspects tensors. Of several looks asked for while one runs, only the latest is taken."""

    def __init__(self, errands: Errands, closer: Closer) -> None:
        self._errands, self.state, self.closer = errands, errands.state, closer
        self._inspections = Latest()
        self._records = Latest()

    async def show_record(self, index: int, tensor: str | None = None) -> None:
        """Show a record's own tensors. While one is read, only the latest asked for waits."""
        await self._records.do(lambda: self._show_record(index, tensor))

    async def show_place(self, where: Mapping[str, Any]) -> bool:
        """Show what a finding points to: its record, tensor, sample and position. False where A has no such record."""
        index = self.record_at(where)
        if index is None:
            return False
        await self.show_record(index, where.get("tensor"))
        if where.get("sample") is not None and self.state.tensors.row is not None and self.state.tensors.shows_record:
            await self.inspect(token=[where["sample"], where.get("position")])
        return True

    def record_at(self, where: Mapping[str, Any]) -> int | None:
        """The record of A that a finding points to: of those that contradict nothing it says, the likest."""
        best: tuple[int, int] | None = None
        for index, record in enumerate(self.state.opened.a["records"] if self.state.opened.a else ()):
            key = record["key"]
            parts = [(key.get(n), where.get(n)) for n in ("step", "micro", "rank", "role", "stage")]
            parts.append((str(record.get("path")), where.get("path")))
            if any(have is not None and want is not None and have != want for have, want in parts):
                continue
            score = sum(have is not None and have == want for have, want in parts)
            if score and (best is None or score > best[0]):
                best = score, index
        return None if best is None else best[1]

    async def _show_record(self, index: int, tensor: str | None) -> None:
        state = self.state
        assert state.opened.a is not None
        record = state.opened.a["records"][index]
        job = Job("record", {**named(state.opened, state.opened.a["path"]), "key": record["key"], "stats": False})
        document = await self._errands.guard(self._errands.run(job, f"reading {fmt.scope(record['key'])}"))
        if document is not None:
            state.opened.scope = Scope.of(record["key"])
            state.tensors.show_record(document)
            state.tensors.select_named(tensor)
            self._errands.changed(Part.TENSORS, Part.ANSWER, Part.RUNS)
            await self.inspect()

    async def inspect(
        self, at: list[int] | None = None, part: str | None = None, token: list[int | None] | None = None
    ) -> None:
        """Show statistics and values of the selected tensor. While one inspection runs, only the latest waits.

        `token` is [sample, position or None] in place of a raw index.
        """
        self.state.inspection.place_asked = at is not None or part is not None or token is not None
        self.state.inspection.here = at
        self.closer.give_up()
        params = self._inspection_of_selected(at)
        if params is not None:
            await self._inspections.do(lambda: self._inspect({**params, "part": part, "token": token}))

    async def _inspect(self, params: dict[str, Any]) -> None:
        job = Job("inspect", {**params, "tokens": self.state.inspection.sheet == "tokens"})
        document = await self._errands.guard(self._errands.quietly(job))
        if document is not None and not self._inspections.is_superseded:
            self.state.inspection.document = document
            self._errands.changed(Part.INSPECT)
            await self.closer.look(params["a"], params.get("b"))

    async def inspect_places(
        self, a: Mapping[str, Any], b: Mapping[str, Any], at_a: list[int], at_b: list[int]
    ) -> None:
        """Two tensors side by side, each from a place of its own on, whatever the list shows."""
        self.state.inspection.place_asked, self.state.inspection.here = True, at_a
        self.closer.give_up()
        params = {"a": a, "b": b, "at": None, "at_a": at_a, "at_b": at_b, "count": WINDOW, "judge": False}
        await self._inspections.do(lambda: self._inspect(params))

    async def open_strip(self) -> None:
        """Inspect the place under the strip's cursor."""
        place, document = self.closer.place, self.state.inspection.document
        if place is not None and document is not None and document["kind"] == "tensor":
            a, b = inspected_sides(self.state.opened, document)
            await self.inspect_places(a, b, place["raw_a"], place["raw_b"])

    def _inspection_of_selected(self, at: list[int] | None) -> dict[str, Any] | None:
        state, row = self.state, self.state.tensors.row
        if row is None:
            state.inspection.document = None
            self._errands.changed(Part.INSPECT)
            return None
        sides = self.sides(row)
        if not sides:
            state.inspection.document = {"kind": "note", "entry": dict(row.entry)}
            self._errands.changed(Part.INSPECT)
            return None
        if len(sides) == 1:
            return {"a": next(iter(sides.values())), "b": None, "at": at, "count": WINDOW}
        raw = row.entry.get("index") or {}
        if row.is_first:
            first = self.state.tensors.comparison and self.state.tensors.comparison["first_divergence"]
            raw = first["index"] if first else raw
        # The verdict is known already: judging the pair again would read the whole micro-batch.
        starts = {"at": at, "at_a": raw.get("raw_a"), "at_b": raw.get("raw_b")}
        return {**sides, **starts, "count": WINDOW, "judge": False}

    def sides(self, row: TensorRow) -> dict[str, dict[str, Any]]:
        """What names the tensor of a line on either side, for an inspection; empty where nothing can be read."""
        state = self.state
        if state.tensors.shows_record:
            if (
                state.tensors.record is None
                or state.opened.a is None
                or row.entry.get("problem")
                or row.entry.get("value") is not None
            ):
                return {}
            return {
                "a": {
                    **named(state.opened, state.opened.a["path"]),
                    "key": state.tensors.record["key"],
                    "name": row.name,
                }
            }
        # While the comparison still runs, what was judged can be looked at already.
        runs = (
            (state.tensors.comparison["a"], state.tensors.comparison["b"])
            if state.tensors.comparison
            else (state.opened.a, state.opened.b)
        )
        paths = {side: run["path"] if run else None for side, run in zip(("a", "b"), runs, strict=True)}
        names = row.entry.get("names") or [row.name, row.name]
        return {
            side: {**named(state.opened, paths[side]), "key": key, "name": name or row.name}
            for side, name in zip(("a", "b"), names, strict=True)
            if (key := row.entry.get(f"{side}_key")) is not None
        }

    async def inspect_pair(self, one: Mark, other: Mark) -> None:
        """Two marked tensors side by side, whatever their names and records."""
        params = {"a": dict(one.what), "b": dict(other.what), "at": None, "count": WINDOW}
        await self._inspections.do(lambda: self._inspect(params))
