"""What happens when a user holds two critics against each other: both run in children, or recorded values are read."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replay_core.errors import ExitCode, JobCancelledError, RldbgError
from replay_core.jobs import Job
from tui_debugger import paths
from tui_debugger.flows.errands import Errands
from tui_debugger.flows.looking import Looking
from tui_debugger.flows.opening import Opening
from tui_debugger.parity_view import ParityView
from tui_debugger.state import Part, Scope

if TYPE_CHECKING:
    from replay_core.documents.parity import BatchEntry, ParityDocument, WorstValue


class Parities:
    """Parity runs, and the way from a token of theirs to the tensor it is in."""

    def __init__(self, errands: Errands, opening: Opening, looking: Looking) -> None:
        self._errands, self.state = errands, errands.state
        self._opening, self._looking = opening, looking

    async def run(self, request: Mapping[str, Any]) -> None:
        """Run (or read) a parity and show it.

        Args:
            request: `recorded` with `a`, `b` and `threshold`, or what the job `parity` takes.
        """
        state = self.state
        view = state.parity = ParityView(request=dict(request), runs=True, is_wanted=True)
        state.job.samples.clear()
        self._errands.changed(Part.PARITY)
        try:
            view.document = await self._errands.guard(self._parity(view))
        finally:
            view.runs = False
            self._errands.changed(Part.PARITY, Part.ANSWER)
        if view.document is not None:
            for note in view.document["notes"]:
                self._errands.log(str(note))
            self._errands.log(view.answer().sentence)

    async def _parity(self, view: ParityView) -> ParityDocument:
        params = dict(view.request)
        recorded = bool(params.pop("recorded", False))
        if not recorded:
            params.setdefault("out", str(paths.new_replay_dir("parity")))
        kind, what = ("recorded_parity", "reading values") if recorded else ("parity", "parity")
        try:
            document: ParityDocument = await self._errands.run(Job(kind, params), what, is_replay=not recorded)
            return document
        except (asyncio.CancelledError, JobCancelledError):
            view.failed, view.why_failed = ExitCode.INTERRUPTED, "cancelled: r runs it again"
            raise
        except RldbgError as error:
            of = f": {error.file}" if error.file and error.file not in error.message else ""
            view.failed, view.why_failed, view.what_helps = error.exit_code, f"{error.message}{of}", error.hint or ""
            raise

    async def open_value(self, batch: BatchEntry, worst: WorstValue) -> None:
        """Open the critics' own dumps on the tensor of values, at a token of it."""
        a, b = batch["sources"]["a"], batch["sources"]["b"]
        if not a or not b:
            self._errands.tell("the document does not say where these values lie", "warning")
            return
        state = self.state
        scope = Scope.of(a["key"])
        if a["path"] == b["path"]:
            await self._opening.open(Path(a["path"]), None)
            records = state.opened.a["records"] if state.opened.a else []
            index = next((i for i, record in enumerate(records) if record["key"] == a["key"]), None)
            if index is not None:
                await self._looking.show_record(index, a["name"])
        else:
            await self._opening.open(Path(a["path"]), Path(b["path"]), scope)
            state.tensors.select(a["name"], a["key"])
        if state.opened.a is None:
            return
        self._errands.changed(Part.TENSORS)
        self._errands.tell("a token of the parity's; P goes back to it", "information")
        places = [worst["row"], worst["column"]], [worst["row_b"], worst["column"]]
        await self._looking.inspect_places(a, b, *places)
