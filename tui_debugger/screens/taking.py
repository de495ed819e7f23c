"""What is taken from the screen: the answer as a document, as text on the clipboard, a replay's log."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from tui_debugger import paths, snapshot
from tui_debugger.answer import answer_of
from tui_debugger.screens.asking import Asking
from tui_debugger.screens.moving import Moving

if TYPE_CHECKING:
    from tui_debugger.panes.findings import FindingsPane
    from tui_debugger.panes.inspect import InspectPane
    from tui_debugger.panes.log import LogPane


#: A comparison whose end an export waits for is looked at this often; idle for so many looks it was cancelled.
_LOOK_S, _IDLE_LOOKS = 0.05, 20


class Taking(Moving, Asking):
    """The actions export, copy and log."""

    _findings: FindingsPane
    _inspect: InspectPane
    _log: LogPane
    _export_waits = False

    def log_line(self, line: str) -> None:
        raise NotImplementedError

    def action_export(self) -> None:
        findings, state = self.active == "findings", self.session.state
        if not (state.live and state.busy is not None):
            self.work(self._export(findings), "export")
            return
        self.say(f"{state.busy} · written when it has ended")
        if not self._export_waits:
            self._export_waits = True
            self.work(self._export_when_ended(findings), "export")

    async def _export_when_ended(self, findings: bool) -> None:
        state, idle = self.session.state, 0
        try:
            # Between the end of the job and its answer on the screen nothing is busy for a moment.
            while state.live and idle < _IDLE_LOOKS:
                idle = 0 if state.busy is not None else idle + 1
                await asyncio.sleep(_LOOK_S)
        finally:
            self._export_waits = False
        if state.live:
            self.say("the comparison did not come to its end: nothing was written", "warning")
        else:
            await self._export(findings)

    async def _export(self, findings: bool) -> None:
        documents = snapshot.documents(self.session.state, findings=findings)
        try:
            # A long list takes a second to write: the keys go on meanwhile.
            written = await asyncio.to_thread(snapshot.write_each, paths.here(), documents)
        except (OSError, ValueError) as error:
            self.say(f"cannot export: {error}", "error")
            return
        names = "\n".join(str(path) for path in written)
        self.say(f"wrote {names}" if written else "nothing to export: open a dump first")
        for path in written:
            self.log_line(f"wrote {path}")

    def action_copy(self) -> None:
        named = {
            "inspect": lambda: self._inspect.text,
            "findings": lambda: self._findings.text,
        }
        self.copy(named.get(self.active, str)() or answer_of(self.session.state).sentence)

    def copy(self, text: str) -> None:
        self.work(self._copy(text), "copy")

    async def _copy(self, text: str) -> None:
        self.app.copy_to_clipboard(text)
        from tui_debugger import clipboard

        in_tmux = await clipboard.tmux_buffer(text)
        self.say(clipboard.said(in_tmux, clipboard.keep_copy(text)))

    def action_open_log(self) -> None:
        from tui_debugger.screens.logview import LogScreen  # as late as the others

        cell = self.session.state.cells[-1].document if self.session.state.cells else {}
        log = cell.get("log")
        self.app.push_screen(LogScreen(Path(log)) if log else LogScreen(None, self._log.kept))
