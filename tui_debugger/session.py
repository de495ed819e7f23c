"""What happens when a user acts: jobs are sent, answers change the state, the screen is told which part.

No textual here. Opening, looking and comparing; replays are in `replaying.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from replay_core.errors import RldbgError
from replay_core.jobs import Document, Job, Partial
from replay_core.replay.flags import IN_PANE, settings_known
from tui_debugger import format as fmt
from tui_debugger import remembered, snapshot
from tui_debugger.answer import NO_DUMP, answer_of, run_line
from tui_debugger.filtering import AT_ONCE, listed
from tui_debugger.health import Health
from tui_debugger.looking import Looking
from tui_debugger.parities import Paritying
from tui_debugger.state import Busy, Matrix, Part, Scope
from tui_debugger.together import named, sides
from tui_debugger.tolerance import Tolerance

_PROBLEMS_LOGGED = 50


class Session(Looking, Paritying):
    """The flows of one screen."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._references = {}

    # ── opening ──────────────────────────────────────────────────────────────────────────────────

    async def open(
        self,
        a: Path | None,
        b: Path | None,
        scope: Scope | None = None,
        listed: Document | None = None,
        more: Sequence[Path] = (),
    ) -> None:
        """Open one dump, or a pair and look for the first divergence.

        Args:
            listed: A's run document, when known.
            more: the other directories of A's run.
        """
        state = self.state
        state.health, state.trouble = Health(), None
        state.a_path, state.b_path, state.snapshot, state.saved = a, b, None, None
        state.more = tuple(map(str, more))
        if more:
            self._log(f"{1 + len(more)} paths, one run: rldbg --compare A B compares two")
        state.a = state.b = state.record = state.comparison = state.inspected = None
        state.rows, state.shown, state.shows_record = [], [], True
        state.compared, state.tolerance = None, Tolerance()
        self.give_up_closer()
        state.step_verdicts.clear()
        # A marked tensor says where it lies: it waits for its partner in whatever is opened next.
        state.marks = [mark for mark in state.marks if mark.kind == "tensor"]
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
        before = remembered.place(a, b, state.more)
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

    async def open_another(self, a: Path, b: Path | None = None, more: Sequence[Path] = ()) -> None:
        """Open what the user names while something may be open: a path that is no dump leaves that as it is, and what
        was replayed of the former run does not go with the new one."""
        state, listed = self.state, None
        if state.a is not None and not snapshot.is_document(a):
            job = Job("open", {"path": str(a), **({"more": list(map(str, more))} if more else {})})
            trouble = state.trouble
            listed = await self._guard(self._run(job, f"opening {a}"))
            if listed is None:
                state.trouble = trouble  # of another path than the one that is shown
                self._changed(Part.ANSWER)
                return
        if state.replay_dump is not None:
            state.replay_dump = state.model = None
        state.matrix, state.cells, state.plan = Matrix(state.matrix.axes), [], {}
        self._changed(Part.MATRIX, Part.FLAGS, Part.TELEMETRY)
        await self.open(a, b, listed=listed, more=more)

    async def _open(self, path: Path, listed: Document | None = None) -> Document:
        run = listed or await self._run(Job("open", named(self.state, str(path))), f"opening {path}")
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
        state.snapshot, state.saved = path, document
        self._log(f"{path}: a saved {document['kind']} of {document.get('created')}")
        if document["kind"] == "comparison":
            state.a, state.b = (snapshot.side_as_run(document, side) for side in ("a", "b"))
            state.scope = Scope.of((document.get("first_divergence") or {}).get("a_key") or {})
            state.tolerance = Tolerance.of_document(document)
            self._changed(Part.RUNS)
            await self._show_comparison(document)
        elif document["kind"] == "replay":
            state.matrix.document, state.matrix.cells = document, snapshot.cells_of(document)
            if (document.get("matrix") or {}).get("axes"):
                state.matrix.axes = snapshot.axes_text(document["matrix"]["axes"])
            state.a = snapshot.plan_as_run(document)
            self._changed(Part.RUNS, Part.MATRIX, Part.ANSWER)
            state.matrix.is_wanted = True
            self._changed(Part.MATRIX)
        elif document["kind"] == "parity":
            self.show_parity(document)
        elif document["kind"] == "diagnosis":
            await self._open_diagnosis(document)
        elif document["kind"] == "run":
            state.a = document
            self._changed(Part.RUNS, Part.ANSWER)
        else:
            state.a = snapshot.record_as_run(document)
            state.show_record(document)
            self._changed(Part.RUNS, Part.TENSORS, Part.ANSWER)
            await self.inspect()

    async def _open_diagnosis(self, document: Document) -> None:
        """Show a saved diagnosis; its findings lead into the dump it is of, while that is still there."""
        state = self.state
        state.health.document = document
        try:
            state.a = await self._run(Job("open", {"path": document["path"]}), f"opening {document['path']}")
        except RldbgError as error:
            state.a = snapshot.diagnosis_as_run(document)
            self._log(f"only the findings, not what they are of: {error}")
        state.scope = Scope(next(iter(document["steps"]), None))
        self._changed(Part.RUNS, Part.ANSWER, Part.FLAGS)
        self._tell("a saved diagnosis: 7 lists its findings, enter goes to one, E diagnoses again", "information")

    def _take_settings(self, run: Document) -> None:
        recorded = settings_known(run.get("flags"))
        for name in IN_PANE:
            # A dump of rows replayed alone must not make every later replay one.
            if name in recorded and name not in self.state.flags_given and name != "rows_per_forward":
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

    # ── comparing ────────────────────────────────────────────────────────────────────────────────

    async def compare_with(self, b: Path, scope: Scope | None = None) -> None:
        """Open B; compare the scope asked for, or step after step until one diverges."""
        state = self.state
        if state.a is None:
            self._tell(f"{NO_DUMP}, nothing to compare with: o opens one", "warning")
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
        params = {**sides(state, state.a["path"], state.b["path"]), **scope.params()}
        document = await self._guard(self._compared(params, f"comparing {scope}".rstrip()))
        if document is not None:
            state.judged(scope, fmt.comparison_answer(document).word)
            await self._show_comparison(document)
        return document

    async def compare_scopes(self, one: Scope, other: Scope) -> None:
        """Compare one marked place of A with another: of B, where a second dump is open, else of A itself."""
        state = self.state
        if state.a is None:
            return
        state.scope = one
        b = state.b or state.a
        params = {**sides(state, state.a["path"], b["path"]), **one.params(), "scope_b": other.params()}
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
        answer = answer_of(self.state)
        self._log(answer.sentence if answer.token == "first" else f"{self.state.scope}: {answer.sentence}".lstrip(": "))
        if not keep_row:
            await self.inspect()

    # ── exporting ────────────────────────────────────────────────────────────────────────────────

    def export(self, folder: Path, *, findings: bool = False) -> list[Path]:
        """Write what is shown as JSON: with a comparison the replay behind it, with a record its run's diagnosis, and
        with `findings` the diagnosis alone. Nothing is overwritten."""
        found = snapshot.documents(self.state, findings=findings)
        return [snapshot.write_new(folder, document) for document in found]


def _scope_of(before: remembered.Place, records: list[Document]) -> Scope | None:
    """The scope looked at last time, while the run still has it."""
    known = before.get("scope")
    if not isinstance(known, dict):
        return None
    scope = Scope(known.get("step"), known.get("rank"), known.get("micro"))
    return scope if any(scope.covers(record["key"]) for record in records) else None
