"""Opening what the user names: a dump, a pair, a run in several directories, a saved document."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replay_core.errors import RldbgError
from replay_core.jobs import Job
from replay_core.replay.flags import IN_PANE, settings_known
from tui_debugger import remembered, snapshot
from tui_debugger.flows.comparing import Comparing
from tui_debugger.flows.diagnosing import Diagnosing
from tui_debugger.flows.errands import Errands
from tui_debugger.flows.listing import listed_run
from tui_debugger.flows.looking import Looking
from tui_debugger.health import Health
from tui_debugger.parity_view import ParityView
from tui_debugger.state import Matrix, Part, Scope
from tui_debugger.steps_compared import StepsCompared
from tui_debugger.tolerance import Tolerance

if TYPE_CHECKING:
    from replay_core.documents.diagnosis import DiagnosisDocument
    from replay_core.documents.run import RecordLine, RunDocument


class Opening:
    """Opens, and comes back to where the user was last time."""

    def __init__(self, errands: Errands, comparing: Comparing, looking: Looking, diagnosing: Diagnosing) -> None:
        self._errands, self.state = errands, errands.state
        self._comparing, self._looking, self._diagnosing = comparing, looking, diagnosing

    async def open(
        self,
        a: Path | None,
        b: Path | None,
        scope: Scope | None = None,
        listed: RunDocument | None = None,
        more: Sequence[Path] = (),
    ) -> None:
        """Open one dump, or a pair and look for the first divergence.

        Args:
            listed: A's run document, when known.
            more: the other directories of A's run.
        """
        state = self.state
        state.opened.health, state.opened.ruled, state.job.trouble, state.trail = Health(), {}, None, ""
        state.opened.a_path, state.opened.b_path, state.opened.snapshot, state.opened.saved = a, b, None, None
        state.opened.more = tuple(map(str, more))
        if more:
            self._errands.log(f"{1 + len(more)} paths, one run: rldbg --compare A B compares two")
        state.opened.a = state.opened.b = state.tensors.record = state.tensors.comparison = (
            state.inspection.document
        ) = None
        state.tensors.rows, state.tensors.shown, state.tensors.shows_record = [], [], True
        state.compared, state.tolerance = None, Tolerance()
        self._looking.closer.give_up()
        state.opened.steps = StepsCompared()
        # A marked tensor says where it lies: it waits for its partner in whatever is opened next.
        state.marks = [mark for mark in state.marks if mark.kind == "tensor"]
        self._errands.changed(Part.START, Part.TENSORS, Part.INSPECT)
        if a is None:
            return
        if snapshot.is_document(a):
            await self._errands.guard(self._open_snapshot(a))
            self._errands.changed(Part.START)
            return
        state.opened.a = await self._errands.guard(listed_run(self._errands, a, listed))
        self._errands.changed(Part.START)
        if state.opened.a is None:
            return
        self._take_settings(state.opened.a)
        records = state.opened.a.get("records") or []
        before = remembered.place(a, b, state.opened.more)
        # A record that belongs to no step is rarely what a person came for.
        stepped = (i for i, record in enumerate(records) if record["key"].get("step") is not None)
        first = next(stepped, 0)
        asked = scope or _scope_of(before, records)
        state.opened.scope = asked or (Scope.of(records[first]["key"]) if records else Scope())
        self._errands.changed(Part.RUNS, Part.ANSWER, Part.FLAGS)
        if b is not None:
            state.tolerance = Tolerance.restored(before.get("tolerance"))
            if not state.tolerance.is_table:
                self._errands.tell(f"judged by {state.tolerance}, as last time; esc: by the table's own", "warning")
            await self._comparing.compare_with(b, scope)
            await self._back_to(before)
        elif records:
            wanted = (i for i, record in enumerate(records) if asked is not None and asked.covers(record["key"]))
            await self._looking.show_record(next(wanted, first), before.get("tensor"))
        self._diagnosing.look_behind()

    async def open_another(self, a: Path, b: Path | None = None, more: Sequence[Path] = ()) -> None:
        """Open what the user names while something may be open: a path that is no dump leaves that as it is, and what
        was replayed of the former run does not go with the new one."""
        state, listed = self.state, None
        if state.opened.a is not None and not snapshot.is_document(a):
            job = Job("open", {"path": str(a), **({"more": list(map(str, more))} if more else {})})
            trouble = state.job.trouble
            listed = await self._errands.guard(self._errands.run(job, f"opening {a}"))
            if listed is None:
                state.job.trouble = trouble  # of another path than the one that is shown
                self._errands.changed(Part.ANSWER)
                return
        if state.replay.dump is not None:
            state.replay.dump = state.replay.model = None
        state.replay.matrix, state.replay.cells, state.replay.document = Matrix(state.replay.matrix.axes), [], None
        self._errands.changed(Part.MATRIX, Part.FLAGS, Part.TELEMETRY)
        await self.open(a, b, listed=listed, more=more)

    async def _open_snapshot(self, path: Path) -> None:
        """Show a saved document; what it names is inspected as long as its dumps are still there."""
        state = self.state
        document = snapshot.read(path)
        state.opened.snapshot, state.opened.saved = path, document
        self._errands.log(f"{path}: a saved {document['kind']} of {document['created']}")
        if document["kind"] == "comparison":
            state.opened.a, state.opened.b = (snapshot.side_as_run(document, side) for side in ("a", "b"))
            state.opened.steps = StepsCompared.of_document(document)
            first = document["first_divergence"]
            only = {name: int(value) for name, value in document["selection"].items() if snapshot.is_number(value)}
            state.opened.scope = Scope.of(only or (first and first["a_key"]) or {})
            state.tolerance = Tolerance.of_document(document)
            self._errands.changed(Part.RUNS)
            await self._comparing.show(document)
        elif document["kind"] == "replay":
            state.replay.matrix.document, state.replay.matrix.cells = document, snapshot.cells_of(document)
            if document["matrix"]:
                state.replay.matrix.axes = snapshot.axes_text(document["matrix"]["axes"])
            state.opened.a = snapshot.plan_as_run(document)
            self._errands.changed(Part.RUNS, Part.MATRIX, Part.ANSWER)
            state.replay.matrix.is_wanted = True
            self._errands.changed(Part.MATRIX)
        elif document["kind"] == "parity":
            state.parity = ParityView(document=document, is_wanted=True, is_saved=True)
            self._errands.changed(Part.PARITY)
        elif document["kind"] == "diagnosis":
            await self._open_diagnosis(document)
        elif document["kind"] == "run":
            state.opened.a = document
            self._errands.changed(Part.RUNS, Part.ANSWER)
        elif document["kind"] == "record":
            state.opened.a = snapshot.record_as_run(document)
            state.tensors.show_record(document)
            self._errands.changed(Part.RUNS, Part.TENSORS, Part.ANSWER)
            await self._looking.inspect()

    async def _open_diagnosis(self, document: DiagnosisDocument) -> None:
        """Show a saved diagnosis; its findings lead into the dump it is of, while that is still there."""
        state = self.state
        state.opened.health.document = document
        try:
            state.opened.a = await self._errands.run(
                Job("open", {"path": document["path"]}), f"opening {document['path']}"
            )
        except RldbgError as error:
            state.opened.a = snapshot.diagnosis_as_run(document)
            self._errands.log(f"only the findings, not what they are of: {error}")
        state.opened.scope = Scope(next(iter(document["steps"]), None))
        self._errands.changed(Part.RUNS, Part.ANSWER, Part.FLAGS)
        self._errands.tell(
            "a saved diagnosis: 7 lists its findings, enter goes to one, E diagnoses again", "information"
        )

    def _take_settings(self, run: RunDocument) -> None:
        recorded = settings_known(run["flags"])
        for name in IN_PANE:
            # A dump of rows replayed alone must not make every later replay one.
            if name in recorded and name not in self.state.replay.flags_given and name != "rows_per_forward":
                self.state.replay.flags[name] = recorded[name]

    def place(self) -> dict[str, Any]:
        """Where the user is, for the next session."""
        state = self.state
        first = state.tensors.comparison["first_divergence"] if state.tensors.comparison else None
        return {
            "scope": state.opened.scope.params(),
            "tensor": state.tensors.row.name if state.tensors.row is not None else None,
            "first": first and first["name"],
            "filter": state.tensors.filter,
            "sort": state.tensors.sort,
            "tolerance": None if state.tolerance.is_table else state.tolerance._asdict(),
        }

    async def _back_to(self, before: remembered.Place) -> None:
        """Select the tensor looked at last time, unless the first divergence is another one now: that is news."""
        state = self.state
        now = state.tensors.comparison["first_divergence"] if state.tensors.comparison else None
        if not before or before.get("first") != (now and now["name"]) or before.get("tensor") is None:
            return
        index = next((i for i, row in enumerate(state.tensors.rows) if row.name == before["tensor"]), None)
        if index is not None and index != state.tensors.selected:
            state.tensors.selected = index
            self._errands.changed(Part.TENSORS)
            self._errands.tell("where you were last time; d goes to the first divergence", "information")
            await self._looking.inspect()


def _scope_of(before: remembered.Place, records: list[RecordLine]) -> Scope | None:
    """The scope looked at last time, while the run still has it."""
    known = before.get("scope")
    if not isinstance(known, dict):
        return None
    scope = Scope(known.get("step"), known.get("rank"), known.get("micro"))
    return scope if any(scope.covers(record["key"]) for record in records) else None
