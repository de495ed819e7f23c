"""What happens when a user acts: jobs are sent, answers change the state, the screen is told which part.

No textual here. Opening, looking and comparing; replays are in `replaying.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from replay_core.errors import RldbgError
from replay_core.jobs import Document, Job, Partial
from tui_debugger import format as fmt
from tui_debugger import remembered, snapshot
from tui_debugger.closer import Closer
from tui_debugger.diagnosing import Diagnosing
from tui_debugger.errands import Latest
from tui_debugger.filtering import AT_ONCE, listed
from tui_debugger.flag_choices import asked_flags
from tui_debugger.health import Health
from tui_debugger.parities import Paritying
from tui_debugger.state import Busy, Mark, Part, Scope, run_line
from tui_debugger.tensor_rows import TensorRow
from tui_debugger.tolerance import Tolerance

#: Values the inspector asks for around a place.
WINDOW = 32

_PROBLEMS_LOGGED = 50


class Session(Paritying, Closer, Diagnosing):
    """The flows of one screen."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._references = {}
        self._inspections = Latest()
        self._records = Latest()

    # ── opening ──────────────────────────────────────────────────────────────────────────────────

    async def open(
        self, a: Path | None, b: Path | None, scope: Scope | None = None, listed: Document | None = None
    ) -> None:
        """Open one dump, or a pair and look for the first divergence; `listed` is A's run document, when known."""
        state = self.state
        state.health = Health()
        state.a_path, state.b_path, state.snapshot = a, b, None
        state.a = state.b = state.record = state.comparison = state.inspected = None
        state.rows, state.shown, state.shows_record = [], [], True
        state.compared, state.tolerance = None, Tolerance()
        self.give_up_closer()
        state.step_verdicts.clear()
        state.marks.clear()
        self._changed(Part.START, Part.TENSORS, Part.INSPECT)
        if a is None:
            return
        if snapshot.is_document(a):
            await self._guard(self._open_snapshot(a))
            self._changed(Part.START)
            return
        state.a = await self._guard(self._open(a, listed))
        self._changed(Part.START)
        if state.a is None:
            return
        self._take_settings(state.a)
        records = state.a.get("records") or []
        before = remembered.place(a, b)
        # A record that belongs to no step is rarely what a person came for.
        stepped = (i for i, record in enumerate(records) if record["key"].get("step") is not None)
        first = next(stepped, 0)
        asked = scope or _scope_of(before, records)
        state.scope = asked or (Scope.of(records[first]["key"]) if records else Scope())
        self._changed(Part.RUNS, Part.ANSWER, Part.FLAGS)
        if b is not None:
            state.tolerance = Tolerance.restored(before.get("tolerance"))
            if not state.tolerance.is_table:
                self._tell(f"judged by {state.tolerance}, as last time; esc: by the table's own", "warning")
            await self.compare_with(b, scope)
            self._back_to(before)
        elif records:
            wanted = (i for i, record in enumerate(records) if asked is not None and asked.covers(record["key"]))
            await self.show_record(next(wanted, first), before.get("tensor"))
        self.look_behind()

    async def _open(self, path: Path, listed: Document | None = None) -> Document:
        run = listed or await self._run(Job("open", {"path": str(path)}), f"opening {path}")
        self._log(f"{path}: {run_line(run)}")
        problems = run.get("problems") or []
        for problem in problems[:_PROBLEMS_LOGGED]:
            self._log(f"problem: {problem.get('where')}: {problem.get('what')}")
        if len(problems) > _PROBLEMS_LOGGED:
            self._log(
                f"and {len(problems) - _PROBLEMS_LOGGED} problems more: 7 lists them, and so does rldbg ls {path}"
            )
        for note in run.get("notes") or []:
            self._log(f"note: {note}")
        return run

    async def _open_snapshot(self, path: Path) -> None:
        """Show a saved document; what it names is inspected as long as its dumps are still there."""
        state = self.state
        document = snapshot.read(path)
        state.snapshot = path
        self._log(f"{path}: a saved {document['kind']} of {document.get('created')}")
        if document["kind"] == "comparison":
            state.a, state.b = (snapshot.side_as_run(document, side) for side in ("a", "b"))
            state.scope = Scope.of((document.get("first_divergence") or {}).get("a_key") or {})
            self._changed(Part.RUNS)
            await self._show_comparison(document)
        elif document["kind"] == "replay":
            state.matrix.document, state.matrix.cells = document, list(document["cells"])
            if (document.get("matrix") or {}).get("axes"):
                state.matrix.axes = snapshot.axes_text(document["matrix"]["axes"])
            state.a = snapshot.plan_as_run(document)
            self._changed(Part.RUNS, Part.MATRIX, Part.ANSWER)
            self._tell("a saved replay: m shows its cells", "information")
        elif document["kind"] == "parity":
            self.show_parity(document)
        elif document["kind"] == "run":
            state.a = document
            self._changed(Part.RUNS, Part.ANSWER)
        else:
            state.a = snapshot.record_as_run(document)
            state.show_record(document)
            self._changed(Part.RUNS, Part.TENSORS, Part.ANSWER)
            await self.inspect()

    def _take_settings(self, run: Document) -> None:
        recorded = asked_flags(run)
        for name in self.state.flags:
            # A dump of rows replayed alone must not make every later replay one.
            if name in self.state.flags_given or name == "rows_per_forward":
                continue
            if recorded.get(name) is not None:
                self.state.flags[name] = recorded[name]

    # ── coming back ──────────────────────────────────────────────────────────────────────────────

    async def judge_by(self, tolerance: Tolerance) -> None:
        """Judge again; the closer look does not keep it waiting."""
        self.give_up_closer()
        await super().judge_by(tolerance)
        if self.judging_by is None and self.state.comparison is not None:
            await self.inspect()

    def place(self) -> dict[str, Any]:
        """Where the user is, for the next session."""
        state = self.state
        first = (state.comparison or {}).get("first_divergence") or {}
        return {
            "scope": state.scope.params(),
            "tensor": state.row.name if state.row is not None else None,
            "first": first.get("name"),
            "filter": state.filter,
            "sort": state.sort,
            "tolerance": None if state.tolerance.is_table else asdict(state.tolerance),
        }

    def _back_to(self, before: remembered.Place) -> None:
        """Select the tensor looked at last time, unless the first divergence is another one now: that is news."""
        state = self.state
        now = (state.comparison or {}).get("first_divergence") or {}
        if not before or before.get("first") != now.get("name") or before.get("tensor") is None:
            return
        index = next((i for i, row in enumerate(state.rows) if row.name == before["tensor"]), None)
        if index is not None and index != state.selected:
            state.selected = index
            self._changed(Part.TENSORS, Part.INSPECT)
            self._tell("where you were last time; d goes to the first divergence", "information")

    # ── looking ──────────────────────────────────────────────────────────────────────────────────

    async def show_record(self, index: int, tensor: str | None = None) -> None:
        """Show a record's own tensors. While one is read, only the latest asked for waits."""
        await self._records.do(lambda: self._show_record(index, tensor))

    async def show_place(self, where: Mapping[str, Any]) -> bool:
        """Show what a finding points to: its record, tensor, sample and position. False where A has no such record."""
        index = self.record_at(where)
        if index is None:
            return False
        await self.show_record(index, where.get("tensor"))
        if where.get("sample") is not None and self.state.row is not None and self.state.shows_record:
            await self.inspect(token=[where["sample"], where.get("position")])
        return True

    async def _show_record(self, index: int, tensor: str | None) -> None:
        state = self.state
        assert state.a is not None
        record = state.a["records"][index]
        job = Job("record", {"path": state.a["path"], "key": record["key"], "stats": False})
        state.scope = Scope.of(record["key"])
        document = await self._guard(self._run(job, f"reading {fmt.scope(record['key'])}"))
        if document is not None:
            state.show_record(document)
            state.select_named(tensor)
            self._changed(Part.TENSORS, Part.ANSWER, Part.RUNS)
            await self.inspect()

    async def inspect(
        self, at: list[int] | None = None, part: str | None = None, token: list[int | None] | None = None
    ) -> None:
        """Show statistics and values of the selected tensor. While one inspection runs, only the latest waits.

        `token` is [sample, position or None] in place of a raw index.
        """
        self.state.place_asked = at is not None or part is not None or token is not None
        self.state.here = at
        self.give_up_closer()
        params = self._inspection_of_selected(at)
        if params is not None:
            await self._inspections.do(lambda: self._inspect({**params, "part": part, "token": token}))

    async def _inspect(self, params: dict[str, Any]) -> None:
        job = Job("inspect", {**params, "tokens": self.state.sheet == "tokens"})
        document = await self._guard(self.engine.run(job, self._on_log))
        if document is not None and not self._inspections.is_superseded:
            self.state.inspected = document
            self._changed(Part.INSPECT)
            await self.look_closer(params["a"], params.get("b"))

    async def inspect_places(self, a: dict[str, Any], b: dict[str, Any], at_a: list[int], at_b: list[int]) -> None:
        """Two tensors side by side, each from a place of its own on, whatever the list shows."""
        self.state.place_asked, self.state.here = True, at_a
        self.give_up_closer()
        params = {"a": a, "b": b, "at": None, "at_a": at_a, "at_b": at_b, "count": WINDOW, "judge": False}
        await self._inspections.do(lambda: self._inspect(params))

    def _inspection_of_selected(self, at: list[int] | None) -> dict[str, Any] | None:
        state, row = self.state, self.state.row
        if row is None:
            state.inspected = None
            self._changed(Part.INSPECT)
            return None
        sides = self.sides(row)
        if not sides:
            state.inspected = {"kind": "note", "entry": dict(row.entry)}
            self._changed(Part.INSPECT)
            return None
        if len(sides) == 1:
            return {"a": next(iter(sides.values())), "b": None, "at": at, "count": WINDOW}
        raw = row.entry.get("index") or {}
        if row.is_first:
            raw = (self.state.comparison or {}).get("first_divergence", {}).get("index") or raw
        # The verdict is known already: judging the pair again would read the whole micro-batch.
        starts = {"at": at, "at_a": raw.get("raw_a"), "at_b": raw.get("raw_b")}
        return {**sides, **starts, "count": WINDOW, "judge": False}

    def sides(self, row: TensorRow) -> dict[str, dict[str, Any]]:
        """What names the tensor of a line on either side, for an inspection; empty where nothing can be read."""
        state = self.state
        if state.shows_record:
            if (
                state.record is None
                or state.a is None
                or row.entry.get("problem")
                or row.entry.get("value") is not None
            ):
                return {}
            return {"a": {"path": state.a["path"], "key": state.record["key"], "name": row.name}}
        document = state.comparison
        if document is None:
            # The comparison still runs: what was judged can be looked at already.
            document = {"a": state.a or {}, "b": state.b or {}}
        names = row.entry.get("names") or [row.name, row.name]
        return {
            side: {"path": document[side].get("path"), "key": key, "name": name or row.name}
            for side, name in zip(("a", "b"), names, strict=True)
            if (key := row.entry.get(f"{side}_key")) is not None
        }

    async def inspect_pair(self, one: Mark, other: Mark) -> None:
        """Two marked tensors side by side, whatever their names and records."""
        params = {"a": dict(one.what), "b": dict(other.what), "at": None, "count": WINDOW}
        await self._inspections.do(lambda: self._inspect(params))

    # ── comparing ────────────────────────────────────────────────────────────────────────────────

    async def compare_with(self, b: Path, scope: Scope | None = None) -> None:
        """Open B; compare the scope asked for, or step after step until one diverges."""
        state = self.state
        if state.a is None:
            self._fail(RldbgError("no dump is open: nothing to compare with", hint="o opens one, or: rldbg A B"))
            return
        run = await self._guard(self._open(b))
        if run is None:
            return
        state.b, state.b_path = run, b
        state.step_verdicts.clear()
        self._changed(Part.RUNS)
        if scope is not None and scope != Scope():
            await self.compare(scope)
            return
        theirs = run.get("steps") or []
        shared = [step for step in state.a.get("steps") or [] if step in theirs]
        for step in shared or [None]:
            document = await self.compare(Scope(step))
            if document is None or document.get("first_divergence"):
                break

    async def compare(self, scope: Scope) -> Document | None:
        """Compare one scope of the open pair and select its first divergence."""
        state = self.state
        if state.a is None or state.b is None:
            return None
        state.scope = scope
        params = {"a": state.a["path"], "b": state.b["path"], **scope.params()}
        document = await self._guard(self._compared(params, f"comparing {scope}".rstrip()))
        if document is not None:
            state.step_verdicts[scope.step] = fmt.comparison_answer(document).word
            await self._show_comparison(document)
        return document

    async def compare_scopes(self, one: Scope, other: Scope) -> None:
        """Compare one marked place of A with another: of B, where a second dump is open, else of A itself."""
        state = self.state
        if state.a is None:
            return
        state.scope = one
        b = state.b or state.a
        params = {"a": state.a["path"], "b": b["path"], **one.params(), "scope_b": other.params()}
        document = await self._guard(self._compared(params, f"comparing {one} with {other}"))
        if document is not None:
            state.step_verdicts.clear()
            await self._show_comparison(document)

    async def _compared(self, params: dict[str, Any], what: str) -> Document:
        """A comparison whose rows come as they are judged: a hundred thousand in one piece would stop the keys."""
        state = self.state
        final: list[Document] = []
        state.compared = None
        state.begin_live()
        self._changed(Part.TENSORS)

        def take(part: Document) -> None:
            if part.get("first_divergence"):
                self._on_event(Partial(part))
            elif "rows" in part:
                state.add_live(part["rows"])
                self._changed(Part.TENSORS)
            elif "tensors" in part:
                final.extend(part["tensors"])

        job = Job("compare", {**params, **state.tolerance.compare_params(), "stream": True})
        document = await self._run(job, what, on_part=take)
        state.compared = dict(params)
        if state.tolerance.exact:
            return await self._rejudged(params)
        return {**document, "tensors": final or document.get("tensors") or []}

    async def _show_comparison(self, document: Document, *, keep_row: bool = False) -> None:
        state = self.state
        here = state.selected if keep_row and not state.shows_record else None
        entries = document.get("tensors") or []
        own = Busy("listing what was compared", unit=f"{len(entries):,} tensors")
        if state.busy is None and len(entries) > AT_ONCE:
            state.busy = own  # nothing is answered yet: the answer says so
        try:
            found = await listed(state, document, partial(self._changed, Part.ANSWER))
        finally:
            if state.busy is own:
                state.busy = None
        state.show_comparison(document, found)
        if here is not None and here < len(state.rows):
            self.state.selected = here
        self._changed(Part.RUNS, Part.TENSORS, Part.ANSWER)
        answer = self.state.answer()
        self._log(answer.sentence if answer.token == "first" else f"{self.state.scope}: {answer.sentence}".lstrip(": "))
        if not keep_row:
            await self.inspect()

    # ── exporting ────────────────────────────────────────────────────────────────────────────────

    def export(self, folder: Path) -> list[Path]:
        """Write what is shown, and the replay behind it, as JSON; nothing is overwritten."""
        return [snapshot.write_new(folder, document) for document in snapshot.documents(self.state)]


def _scope_of(before: remembered.Place, records: list[Document]) -> Scope | None:
    """The scope looked at last time, while the run still has it."""
    known = before.get("scope")
    if not isinstance(known, dict):
        return None
    scope = Scope(known.get("step"), known.get("rank"), known.get("micro"))
    return scope if any(scope.covers(record["key"]) for record in records) else None
