"""6 Telemetry: memory and time of the replay that runs, and of those that ran."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.widgets import Sparkline

from tui_debugger import format as fmt
from tui_debugger.actions import pane_title
from tui_debugger.cells import label
from tui_debugger.state import State
from tui_debugger.widgets.fixed import Lines
from tui_debugger.widgets.paint import paint, verdict_token

if TYPE_CHECKING:
    from replay_core.documents.replay import CellEntry

_EMPTY = "Memory and time of a replay stand here\nwhile it runs. Press r to replay."


class TelemetryPane(VerticalScroll, can_focus=True):
    BORDER_TITLE = pane_title("telemetry")

    def __init__(self) -> None:
        super().__init__(id="telemetry")
        # Who quits before the pane is whole leaves it without children: nothing here asks the tree for them.
        self._now, self._cells_told = Lines(_EMPTY, id="telemetry-now"), Lines(id="telemetry-cells")
        self._line = Sparkline([], id="telemetry-line")
        self._line.display = False

    def compose(self) -> ComposeResult:
        yield from (self._now, self._line, self._cells_told)

    def on_mount(self) -> None:
        self._now.put(Text(_EMPTY, style=paint(self, "muted")))

    def show(self, state: State) -> None:
        """Draw what a sample changed: it comes every second, and lays out nothing."""
        line = self._line
        if line.display != (len(state.job.samples) > 1):
            line.display = len(state.job.samples) > 1
        if state.job.samples:
            last = state.job.samples[-1]
            gpu = [sample.gpu_mib for sample in state.job.samples if sample.gpu_mib is not None]
            data = gpu or [sample.host_mib for sample in state.job.samples]
            phase = f"\n{state.job.busy.doing or state.job.busy.what}" if state.job.busy is not None else ""
            span = f"{'gpu' if gpu else 'host'} {fmt.mib(min(data))} to {fmt.mib(max(data))}"
            # The pane is narrow, and the device's memory is what runs out.
            self._now.put(
                Text.assemble(
                    ("gpu ", paint(self, "muted")), f"{fmt.mib(last.gpu_mib)}   ",
                    ("host ", paint(self, "muted")), f"{fmt.mib(last.host_mib)}   ",
                    ("cpu ", paint(self, "muted")), f"{last.cpu_percent:.0f}%",
                    (f"{phase}\n{span} in {fmt.seconds(last.elapsed_s)}", paint(self, "muted")),
                    no_wrap=True,
                )
            )  # fmt: skip
            line.data = data
        self._cells_told.put(self._cells(state))

    def _cells(self, state: State) -> Text:
        text = Text(no_wrap=True)
        for what, took in state.job.phases[-4:] if state.job.busy is not None else ():
            text.append(f"{fmt.middle(what, 30):<30} ", paint(self, "muted"))
            text.append(f"{fmt.seconds(took)}\n")
        shown = state.cell
        if shown is not None:
            self._cell(text, shown)
        held = shown or state.tensors.comparison
        for sample in (held["segments"] if held else None) or []:
            if not sample["sample"]:
                text.append("sample  tokens  worst token   rel l2\n", paint(self, "muted"))
            worst = sample["worst_token"]
            text.append(
                f"{sample['sample']!s:>6}  {sample['tokens']!s:>6}  {(worst and worst['position'])!s:>11}"
                f"  {fmt.number(worst and worst['rel_l2'], 3):>7}\n"
            )
        for cell in state.replay.cells:
            if cell is not shown:
                self._cell(text, cell)
        return text

    def _cell(self, text: Text, cell: CellEntry) -> None:
        time, memory, agrees = cell["time"], cell["memory"], cell["agreement"]["agrees"]
        word = "" if agrees is None else "SAME" if agrees else "DIFF"
        text.append(fmt.safe(label(cell)), paint(self, "strong"))
        if word:
            text.append("  ")
            text.append("agrees" if word == "SAME" else "differs", paint(self, verdict_token(word)))
        elif cell["outcome"] != "ran":
            text.append(f"  {cell['outcome']}", paint(self, "missing"))
        text.append("\n")
        for what, value in (
            ("load", fmt.seconds(time and time["load_s"])), ("compile", fmt.seconds(time and time["compile_s"])),
            ("run", fmt.seconds(time and time["steady_s"])), ("peak", fmt.mib(memory and memory["peak_mib"])),
        ):  # fmt: skip
            if value not in (fmt.NONE, "n/a"):
                text.append(f"  {what} ", paint(self, "muted"))
                text.append(value)
        text.append("\n")
