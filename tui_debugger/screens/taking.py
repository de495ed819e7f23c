"""What is taken from the screen: the answer as a document, as text on the clipboard, a replay's log."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

from tui_debugger import paths, snapshot
from tui_debugger.answer import answer_of
from tui_debugger.screens.stage import Stage

if TYPE_CHECKING:
    from replay_core.documents.kinds import Document
    from tui_debugger.panes.findings import FindingsPane
    from tui_debugger.panes.inspect import InspectPane
    from tui_debugger.panes.log import LogPane


#: A comparison whose end an export waits for is looked at this often; idle for so many looks it was cancelled.
_LOOK_S, _IDLE_LOOKS = 0.05, 20


#: What is written, and the ending of its file's name.
_ENDINGS = {"json": "json", "html": "html", "markdown": "md"}


class Writing(NamedTuple):
    """What is written, and into which file; under a new name in the working directory where none is given."""

    form: str
    file: Path | None = None


def writing_of(text: str) -> Writing | None:
    """A form, or a file whose ending names one; None of anything else."""
    if text.lower() in _ENDINGS:
        return Writing(text.lower())
    file = Path(text).expanduser()
    form = next((form for form, ending in _ENDINGS.items() if file.suffix.lower() == f".{ending}"), None)
    return None if form is None or file.stem.startswith(".") else Writing(form, file)


def _written(documents: Sequence[Document], place: Writing) -> list[Path]:
    made = snapshot.as_json
    if place.form != "json":
        from tui_debugger.handout.comment import comment  # who writes JSON does not wait for it
        from tui_debugger.handout.html_page import page

        made = page if place.form == "html" else comment
    if place.file is not None:
        return snapshot.write_as(place.file, documents, made)
    return snapshot.write_each(paths.here(), documents, made, _ENDINGS[place.form])


class Taking:
    """The actions export, copy and log."""

    def __init__(self, stage: Stage) -> None:
        self._stage, self._state = stage, stage.state
        self._export_waits = False

    def do_export(self) -> None:
        findings = self._stage.panes.active == "findings"
        if not snapshot.documents(self._state, findings=findings) and not self._state.tensors.live:
            self._stage.say("nothing to export: open a dump first")
            return
        self.ask_place(lambda place: self._begin(findings, place))

    def ask_place(self, then: Callable[[Writing], None]) -> None:
        """Ask for whom it is written, or where: enter alone is JSON under a new name."""

        def go(text: str) -> None:
            place = writing_of(text.strip())
            if place is None:
                known = ", ".join(_ENDINGS)
                self._stage.say(f"neither a form ({known}) nor a file ending in .json, .html or .md: {text}", "error")
                return
            then(place)

        hint = (
            "json, html (a page for a colleague), markdown (a comment for an issue), or a file: answer.html\n"
            "rldbg FILE opens json and html"
        )
        self._stage.ask("Write as", hint, go, "json", path=True, known=tuple(_ENDINGS))

    def _begin(self, findings: bool, place: Writing) -> None:
        state = self._state
        if not (state.tensors.live and state.job.busy is not None):
            self._stage.work(self._export(findings, place), "export")
            return
        self._stage.say(f"{state.job.busy} · written when it has ended")
        if not self._export_waits:
            self._export_waits = True
            self._stage.work(self._export_when_ended(findings, place), "export")

    async def _export_when_ended(self, findings: bool, place: Writing) -> None:
        state, idle = self._state, 0
        try:
            # Between the end of the job and its answer on the screen nothing is busy for a moment.
            while state.tensors.live and idle < _IDLE_LOOKS:
                idle = 0 if state.job.busy is not None else idle + 1
                await asyncio.sleep(_LOOK_S)
        finally:
            self._export_waits = False
        if state.tensors.live:
            self._stage.say("the comparison did not come to its end: nothing was written", "warning")
        else:
            await self._export(findings, place)

    async def _export(self, findings: bool, place: Writing) -> None:
        documents = snapshot.documents(self._state, findings=findings)
        await self.write(documents, "nothing to export: open a dump first", place)

    async def write(self, documents: Sequence[Document], lacking: str, place: Writing) -> None:
        """Write documents, or say what is lacking. A long list takes a second: the keys go on meanwhile."""
        try:
            written = await asyncio.to_thread(_written, documents, place)
        except FileExistsError as error:
            self._stage.say(f"there is a file already, which stays: {error.filename}", "error")
            return
        except (OSError, ValueError) as error:
            self._stage.say(f"cannot export: {error}", "error")
            return
        self._stage.say("wrote " + "\n".join(map(str, written)) if written else lacking)
        for path in written:
            self._stage.session.errands.log(f"wrote {path}")

    def do_copy(self) -> None:
        pane = self._stage.panes.pane
        text = cast("InspectPane | FindingsPane", pane).text if pane and pane.id in ("inspect", "findings") else ""
        self.copy(text or answer_of(self._state).sentence)

    def copy(self, text: str) -> None:
        self._stage.work(self._copy(text), "copy")

    async def _copy(self, text: str) -> None:
        self._stage.screen.app.copy_to_clipboard(text)
        from tui_debugger import clipboard

        in_tmux = await clipboard.tmux_buffer(text)
        self._stage.say(clipboard.said(in_tmux, clipboard.keep_copy(text)))

    def do_open_log(self) -> None:
        self.show_log(self._state.replay.cells[-1]["log"] if self._state.replay.cells else None)

    def show_log(self, path: str | None = None) -> None:
        """A log over the whole screen: of a file, or of this session."""
        from tui_debugger.screens.logview import LogScreen  # as late as the others

        kept = cast("LogPane", self._stage.screen.query_one("#log")).kept
        self._stage.put_on_top(LogScreen(Path(path)) if path else LogScreen(None, kept))
