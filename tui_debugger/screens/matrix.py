"""`m`: every combination of flags as a cell: what it did, whether it agrees, the way to its divergences or log."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.widgets import Static

from replay_core.errors import RldbgError
from replay_core.replay.axes import Axes
from replay_core.replay.flags import Flags
from tui_debugger import format as fmt
from tui_debugger import paths
from tui_debugger.answer import NO_DUMP
from tui_debugger.cells import label, recording_parts, sentence
from tui_debugger.screens.ask import AskScreen
from tui_debugger.screens.keyed import Overlay
from tui_debugger.screens.logview import LogScreen
from tui_debugger.screens.pane_layout import move
from tui_debugger.screens.stage import Stage
from tui_debugger.state import Mark, Matrix
from tui_debugger.widgets.bars import KeyBar
from tui_debugger.widgets.paint import paint
from tui_debugger.widgets.rows import Rows

if TYPE_CHECKING:
    from replay_core.documents.replay import CellEntry

_EMPTY = "No cell."
_NONE_RUN = (
    "No cell has run. r runs each of these in a child process of its own, and holds it against each row alone; "
    "a chooses other axes."
)
#: Cells of a line before its settings, and the fewest these take.
_BEFORE, _NAMED = 28, 24
#: Lines of the answer below its first.
_BELOW = 2
#: Column -> cells it takes; what does not fit leaves from the right.
_COLUMNS = (("load", 7), ("compile", 8), ("steady", 7), ("peak", 9), ("ran", 30))
_TRUTH = {True: ("AGREES", "same"), False: ("DIFFERS", "first"), None: ("-", "muted")}


class MatrixRows(Rows):
    """The cells, each a line: outcome and agreement in words, then its settings and what they cost."""

    def __init__(self) -> None:
        super().__init__(id="matrix-rows", empty=_EMPTY)
        self._matrix = Matrix()
        self._marked: set[str] = set()
        self._to_run: list[dict[str, Any] | None] = []
        self._axes: dict[str, int] = {}

    def show(self, matrix: Matrix, marked: set[str], to_run: list[dict[str, Any] | None]) -> None:
        self._matrix, self._marked, self._to_run = matrix, marked, to_run
        values = {} if matrix.is_one_replay else dict(Axes.parse(matrix.axes).values)
        # A value tells a cell from its neighbour: a column is as wide as its widest.
        self._axes = {name: max(len(name), *(len(fmt.setting(value)) for value in values[name])) for name in values}
        self.set_count(len(matrix.cells) + len(to_run), matrix.at)

    def _fitting(self, width: int) -> list[tuple[str, int]]:
        """The figures there is room for behind the values of the axes."""
        room, taken = width - _BEFORE - max(_NAMED, sum(size + 1 for size in self._axes.values())), []
        for name, size in _COLUMNS:
            if room < size + 1:
                break
            room -= size + 1
            taken.append((name, size))
        return taken

    def heading(self, width: int) -> Text:
        columns = self._fitting(width)
        settings = "".join(f"{name:<{size}} " for name, size in self._axes.items()) or "configuration"
        text = Text(f"   # outcome     agrees     {settings}")
        text.append(" " * max(0, width - text.cell_len - sum(size + 1 for _, size in columns)))
        for name, size in columns:
            text.append(f" {name:>{size}}")
        return text

    def line(self, row: int, width: int) -> Text:
        number = row + self._matrix.first_number
        mark = "+" if str(row) in self._marked else " "
        text = Text(f"{mark}{'›' if row == self.cursor else ' '}{number:>2} ")
        if row >= len(self._matrix.cells):
            outcome = "runs now" if self._matrix.runs and row == len(self._matrix.cells) else "to run"
            flags = self._to_run[row - len(self._matrix.cells)]
            text.append(f"{outcome:<12}{'-':<11}{'each row alone' if flags is None else self._values(flags)}")
            text.stylize(paint(self, "muted"))
            return text
        cell = self._matrix.cells[row]
        columns = self._fitting(width)
        outcome = "recorded" if cell["part"] == "recording" else str(cell["outcome"])
        bad = outcome in ("failed", "crashed")
        text.append(f"{outcome:<12}", paint(self, "diff" if bad else "missing" if outcome == "unavailable" else ""))
        agrees = cell["agreement"]["agrees"]
        word, token = ("BASELINE", "key") if cell["part"] == "reference" else _TRUTH[agrees]
        text.append(f"{word:<11}", paint(self, token))
        room = max(1, width - text.cell_len - sum(size + 1 for _, size in columns))
        text.append(f"{fmt.end(self._said(cell), room):<{room}}")
        for name, size in columns:
            text.append(f" {fmt.middle(_figure(cell, name), size):>{size}}", paint(self, "muted"))
        return text

    def _said(self, cell: CellEntry) -> str:
        if cell["part"] == "recording":
            return f"the recording{': ' + fmt.safe(cell['recorded'][0]['field']) if cell['recorded'] else ''}"
        if cell["part"] == "reference":
            return "each row alone"
        name = self._values(cell["flags"]) if self._axes else label(cell)
        return name if cell["same_as"] is None else f"{name}= {cell['same_as']}"

    def _values(self, flags: Mapping[str, Any]) -> str:
        """The values of the axes, each in its column."""
        return "".join(f"{fmt.setting(flags.get(name)):<{size}} " for name, size in self._axes.items())


def _figure(cell: CellEntry, name: str) -> str:
    if name == "peak":
        return fmt.mib(cell["memory"]["peak_mib"]) if cell["memory"] else ""
    if name == "ran":
        ran = (cell["effective"] or {}).get("attention")
        return "" if ran is None else str(ran).replace("_scaled_dot_product_", "")
    took: Mapping[str, object] = cell["time"] or {}
    value = took.get(f"{name}_s")
    return "" if value is None else fmt.seconds(value)


class MatrixScreen(Overlay):
    """The cells of the matrix over the debugger's panes."""

    CSS_PATH = paths.styles_dir() / "matrix.tcss"

    KEYS_OF = "matrix"

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage)

    @property
    def matrix(self) -> Matrix:
        return self.stage.state.replay.matrix

    def compose(self) -> ComposeResult:
        yield Static("", markup=False, id="matrix-title")
        yield Static("", markup=False, id="matrix-answer")
        yield MatrixRows()
        yield Static("", markup=False, id="matrix-cell")
        yield KeyBar(self.actions)

    def on_mount(self) -> None:
        self.query_one(MatrixRows).focus()
        self._draw_state()

    def _draw_state(self) -> None:
        state = self.stage.state
        marked = {mark.name for mark in state.marks if mark.kind == "cell"}
        rows = self.query_one(MatrixRows)
        base = Flags.from_mapping(state.replay.flags)
        rows.show(self.matrix, marked, self.matrix.to_run(base) if state.opened.a is not None else [])
        title = Text(" rldbg ", style=paint(self, "strong"), no_wrap=True, overflow="ellipsis", end="")
        one = self.matrix.is_one_replay
        title.append(" replay " if one else " matrix ", paint(self, "key"))
        # First what stands nowhere else: the axes are columns as well.
        where = f"{state.opened.scope} · " if str(state.opened.scope) else ""
        cells = self.matrix.cells
        asked = ", ".join(label(cell) for cell in cells if cell["part"] == "cell") if one else self.matrix.axes
        title.append(f"{where}{asked}", paint(self, "muted"))
        self.query_one("#matrix-title", Static).update(title)
        self.query_one("#matrix-answer", Static).update(self._answer())
        self._show_cell(rows.cursor)
        self.query_one(KeyBar).show("matrix", state.job.busy is not None)

    def _answer(self) -> Text:
        """The answer first: what breaks agreement, what does not run, or how far it is."""
        matrix, state = self.matrix, self.stage.state
        text = Text(no_wrap=True, overflow="ellipsis", end="")
        if matrix.runs:
            text.append(" RUN ", paint(self, "key"))
            total = Axes.parse(matrix.axes).size
            busy = state.job.busy
            text.append(f" {len(matrix.asked)} of {total} cells · {(busy and busy.doing) or 'starting'}")
            if busy is not None:
                text.append(f"\n {busy.how_long}", paint(self, "muted"))
            return text
        if state.job.trouble and matrix.document is None:
            text.append(" ERROR ", paint(self, "missing"))
            text.append(f" {fmt.safe(state.job.trouble)}")
            return text.append(f"\n {fmt.safe(state.job.trouble_help)}", paint(self, "muted"))
        if not matrix.cells and state.opened.a is None:
            text.append(" READY ", paint(self, "muted"))
            return text.append(f" {NO_DUMP}: esc, then o opens one")
        if not matrix.cells:
            text.append(" READY ", paint(self, "key"))
            return text.append(f" {Axes.parse(matrix.axes).size} cells beside the recording and each row alone")
        asked = matrix.asked
        off = [cell for cell in asked if cell["agreement"]["agrees"] is False]
        down = [cell for cell in asked if cell["outcome"] in ("failed", "crashed")]
        gone = [cell for cell in asked if cell["outcome"] == "unavailable"]
        if matrix.document is None:
            done = sum(cell["agreement"]["agrees"] is True for cell in asked)
            text.append(" CANCELLED ", paint(self, "missing"))
            said = f" {len(asked)} of {Axes.parse(matrix.axes).size} cells ran: {done} agree, {len(off)} differ"
            return text.append(said)
        recording = recording_parts(matrix.document)
        agreed = ("RECORDING", "first") if recording else ("AGREES", "same")
        word, token = ("DIFFERS", "first") if off else ("FAILED", "diff") if down else agreed
        if not asked or len(gone) == len(asked):
            word, token = "NONE", "missing"
        text.append(f" {word} ", paint(self, token))
        agreeing = sum(cell["agreement"]["agrees"] is True for cell in asked)
        parts = [f"{agreeing} agree"]
        parts += [
            f"{len(listed)} {what}"
            for listed, what in ((off, "differ"), (down, "failed"), (gone, "unavailable"))
            if listed
        ]
        text.append(f" {' · '.join(parts)} of {len(asked)} cell{'s' if len(asked) > 1 else ''}")
        if recording:
            text.append(f"\n {fmt.safe(recording)}", paint(self, "strong"))
        found = matrix.document["matrix"] if matrix.document else None
        sets = ((found["breaking"], "breaks agreement"), (found["failing"], "does not run")) if found else ()
        for smallest, what in sets:
            for toggles in smallest[:2]:
                text.append(f"\n {what}: ", paint(self, "muted"))
                text.append(fmt.flags(toggles) or "nothing: the baseline settings already do", paint(self, "strong"))
        if text.plain.count("\n") < _BELOW and (cause := next((one["cause"] for one in off if one["cause"]), None)):
            text.append(f"\n {cause['kind']}: ", paint(self, "missing"))
            text.append(fmt.safe(cause["sentence"]))
        return text

    @on(Rows.Highlighted)
    def _highlighted(self, event: Rows.Highlighted) -> None:
        event.stop()
        if isinstance(event, Rows.Chosen):
            self.do_open()
        else:
            self.matrix.at = event.row
            self._show_cell(event.row)

    def _show_cell(self, row: int) -> None:
        """Why the cell under the cursor is as it is."""
        text = Text(no_wrap=False, end="")
        if row < len(self.matrix.cells):
            cell = self.matrix.cells[row]
            first, error, cause = cell["agreement"]["first_divergence"], cell["error"], cell["cause"]
            if first:
                text.append("first at ", paint(self, "first"))
                text.append(f"{fmt.safe(first['name'])} {fmt.place(first['index'])}", paint(self, "strong"))
                text.append(f"  {fmt.safe(first['why'])}\n", paint(self, "muted"))
            if cause:
                text.append(f"{cause['kind']}: ", paint(self, "missing"))
                text.append(f"{fmt.safe(cause['sentence'])}\n")
            if error:
                text.append(f"{error['type']}: ", paint(self, "missing"))
                text.append(f"{fmt.safe(error['message'])}\n")
                if error["hint"]:
                    text.append(f"hint: {fmt.safe(error['hint'])}\n", paint(self, "muted"))
            if by_digest := sentence(cell):
                text.append(f"{by_digest}\n", paint(self, "muted"))
            if cell["same_as"] is not None:
                text.append(f"the same kernels ran as in cell {cell['same_as']}\n", paint(self, "muted"))
            text.append("enter: its divergences" if cell["dump"] else "enter: its log", paint(self, "muted"))
        elif self.stage.state.opened.a is not None and not self.matrix.runs:
            text.append(_NONE_RUN, paint(self, "muted"))
        self.query_one("#matrix-cell", Static).update(text)

    # ── actions ──────────────────────────────────────────────────────────────────────────────────

    @property
    def _cell(self) -> CellEntry | None:
        row = self.query_one(MatrixRows).cursor
        return self.matrix.cells[row] if row < len(self.matrix.cells) else None

    def do_run_matrix(self) -> None:
        state = self.stage.state
        if state.job.busy is not None:
            self.stage.say(f"{state.job.busy} · ctrl+c cancels")
            return
        self.stage.work(self.stage.session.replaying.run_matrix(), "job")

    def do_axes(self) -> None:
        def go(text: str | None) -> None:
            if text is None:
                return
            try:
                Axes.parse(text)
            except RldbgError as error:
                self.app.notify(fmt.error_line(error), severity="error", markup=False)
                return
            self.matrix.axes, self.matrix.at = text, 0
            self.matrix.cells, self.matrix.document = [], None  # those were of other axes
            self.redraw()

        hint = "name=value,value ...: the first value of each is its baseline"
        self.app.push_screen(AskScreen("Axes of the matrix", hint, self.matrix.axes), go)

    def do_open(self) -> None:
        cell, baseline = self._cell, self.matrix.baseline
        if cell is None:
            self.stage.say("this cell has not run: r runs all of them")
            return
        if not cell["dump"]:
            self.do_open_log()
            return
        if baseline is None or cell["part"] == "reference":
            self.stage.say("the baseline agrees with itself: choose another cell, or mark two and press =")
            return
        self._leave_for_tensors()
        self.stage.work(self.stage.session.replaying.compare_cells(baseline, cell), "compare")

    def _leave_for_tensors(self) -> None:
        """Back to the debugger, at the list that the answer will stand in: a narrow screen shows one pane."""
        self.stage.come_to_front()
        self.stage.panes.focus("tensors")

    def do_open_log(self) -> None:
        log = self._cell and self._cell["log"]
        if not log:
            self.stage.say("this cell has no log of its own")
            return
        self.app.push_screen(LogScreen(Path(log)))

    def do_capsule(self) -> None:
        self.stage.screen.requests.ask_capsule(self._cell)

    def do_mark(self) -> None:
        cell = self._cell
        if cell is None or not cell["dump"]:
            self.stage.say("a cell that did not run left nothing to compare")
            return
        row = self.query_one(MatrixRows).cursor
        self.stage.state.toggle_mark(Mark("cell", str(row), cell))
        self.redraw()

    def do_pair(self) -> None:
        if len(self.stage.state.marks) == 2:
            self._leave_for_tensors()
        self.stage.screen.marking.do_pair()

    def do_move(self, where: str) -> None:
        move(self.query_one(MatrixRows), where)

    def do_copy(self) -> None:
        self.stage.screen.taking.copy(self._answer().plain)
