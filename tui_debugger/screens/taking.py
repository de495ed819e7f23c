"""What is taken from the screen: the answer as a document, as text on the clipboard, a replay's log."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from tui_debugger import paths
from tui_debugger.answer import answer_of
from tui_debugger.screens.asking import Asking
from tui_debugger.screens.moving import Moving

if TYPE_CHECKING:
    from tui_debugger.panes.findings import FindingsPane
    from tui_debugger.panes.inspect import InspectPane
    from tui_debugger.panes.log import LogPane


class Taking(Moving, Asking):
    """The actions export, copy and log."""

    _findings: FindingsPane
    _inspect: InspectPane
    _log: LogPane

    def log_line(self, line: str) -> None:
        raise NotImplementedError

    def action_export(self) -> None:
        if self.session.state.live and self.session.state.busy is not None:
            self.say(f"{self.session.state.busy} · e writes it when it has ended")
            return
        self.work(self._export(), "export")

    async def _export(self) -> None:
        try:
            # A long list takes a second to write: the keys go on meanwhile.
            findings = self.active == "findings"
            written = await asyncio.to_thread(self.session.export, paths.here(), findings=findings)
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
