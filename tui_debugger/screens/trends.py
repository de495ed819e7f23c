"""`C`: what the run logged, over its steps: a line per signal, the chosen one as a plot, what stands out first."""

from __future__ import annotations

import os
from typing import ClassVar

from rich.text import Text
from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import Static

from tui_debugger import format as fmt
from tui_debugger import paths
from tui_debugger.answer import answer_of
from tui_debugger.health import WORDS, causes
from tui_debugger.screens.keyed import Overlay
from tui_debugger.screens.pane_layout import move
from tui_debugger.screens.stage import Stage
from tui_debugger.trend_rows import Trend, trends
from tui_debugger.widgets.bars import KeyBar
from tui_debugger.widgets.fixed import Fixed
from tui_debugger.widgets.headline import Headline, TitleLine
from tui_debugger.widgets.paint import paint
from tui_debugger.widgets.plot import bars, plot
from tui_debugger.widgets.rows import Rows

_EMPTY = (
    "Nothing over steps: no loss, reward or time is recorded here. rldbg diagnose also reads a training log, metrics "
    "as .jsonl, TensorBoard event files and offline runs of wandb: open one with o, or record training_metrics."
)
_WAITING = "Reading what was logged ..."
#: Further findings listed under the answer on a tall screen.
_FINDINGS = 4
_NAME, _RANGE = 30, 22


class TrendRows(Rows):
    """The signals, each a line: name, first and last value, bars, why it stands out."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left", "screen.do('point', 'previous')", show=False),
        Binding("right", "screen.do('point', 'next')", show=False),
    ]

    def __init__(self) -> None:
        super().__init__(id="trend-rows", empty=_WAITING)
        self.trends: list[Trend] = []
        self._several_runs = False

    def show(self, listed: list[Trend], *, waits: bool) -> None:
        self.empty = _WAITING if waits else _EMPTY
        here = self.trend
        self.trends = listed
        self._several_runs = len({one.run for one in listed}) > 1
        same = (i for i, one in enumerate(listed) if here is not None and (one.name, one.run) == (here.name, here.run))
        self.set_count(len(listed), next(same, 0))

    @property
    def trend(self) -> Trend | None:
        return self.trends[self.cursor] if self.cursor < len(self.trends) else None

    def _sizes(self, width: int) -> tuple[int, int, int]:
        """Cells of the name, of first and last value, of the bars."""
        name = _NAME if width >= 110 else 20
        room = width - 4 - name - 1 - _RANGE - 2
        longest = max((len(one.values) for one in self.trends), default=0)
        return name, _RANGE, max(4, min(4 * longest, 48, room if width < 110 else room * 3 // 5))

    def heading(self, width: int) -> Text:
        name, ends, _ = self._sizes(width)
        return Text(f"    {'signal':<{name}} {'first → last':>{ends}}  over the steps")

    def line(self, row: int, width: int) -> Text:
        one = self.trends[row]
        name, ends, room = self._sizes(width)
        text = Text("› " if row == self.cursor else "  ")
        text.append("▲ " if one.stands_out else "  ", paint(self, "first"))
        label = fmt.safe(one.name)
        if self._several_runs:
            label = f"{fmt.safe(os.path.basename(one.run))}: {label}"
        quiet = "" if one.moves or one.stands_out else "muted"
        text.append(f"{fmt.middle(label, name):<{name}} ", paint(self, "strong" if one.stands_out else quiet))
        text.append(f"{fmt.middle(one.first_to_last, ends):>{ends}}  ", paint(self, quiet))
        text.append_text(bars(one.values, one.marks, room, lambda token: paint(self, quiet or token)))
        left = width - text.cell_len - 2
        if one.said and left > 12:
            text.append(f"  {fmt.end(fmt.safe(one.said), left)}", paint(self, "first"))
        return text


class PlotPanel(Fixed):
    """Where the chosen signal is plotted; it is drawn again when it gets another size."""

    def on_resize(self, _event: events.Resize) -> None:
        screen = self.screen
        if isinstance(screen, TrendsScreen):
            screen.draw_plot()


class TrendsScreen(Overlay):
    """The signals over the debugger's panes."""

    CSS_PATH = paths.styles_dir() / "trends.tcss"

    KEYS_OF = "trends"
    VERTICAL_BREAKPOINTS = [(0, "-short"), (36, "-tall")]

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage)
        self._point: int | None = None
        self._drawn: object = None

    def compose(self) -> ComposeResult:
        yield TitleLine()
        yield Headline()
        yield Static("", markup=False, id="trend-findings")
        yield TrendRows()
        yield PlotPanel(id="trend-plot")
        yield KeyBar(self.actions)

    def on_mount(self) -> None:
        self.query_one(TrendRows).focus()
        self._draw_state()

    # ── drawing ──────────────────────────────────────────────────────────────────────────────────

    def _draw_state(self) -> None:
        state = self.stage.state
        health = state.opened.health
        self.query_one(TitleLine).show(state)
        self.query_one(Headline).show(state)
        self.query_one(KeyBar).show("trends", state.job.busy is not None)
        rows = self.query_one(TrendRows)
        if self._drawn is not health.document or not health.document:
            grown = self._drawn is not None
            self._drawn = health.document
            rows.show(trends(health.series, health.findings), waits=health.document is None and not health.trouble)
            if not grown:
                self._point = self._telling()
            self._draw_findings()
        self.draw_plot()

    def _draw_findings(self) -> None:
        """What else was found, where the screen is tall."""
        health = self.stage.state.opened.health
        at_top = health.worst
        listed = [one for one in causes(health.findings) if one != at_top]
        room = _FINDINGS if self.has_class("-tall") else 1
        panel = self.query_one("#trend-findings", Static)
        panel.display = bool(listed)
        text = Text(no_wrap=True, overflow="ellipsis", end="")
        for number, one in enumerate(listed[:room]):
            word, token = WORDS[one["severity"]]
            text.append("\n" if number else "")
            text.append(f"{word:<6}", paint(self, token))
            text.append(fmt.safe(f"{one['id']} {one['claim']}"))
        if len(listed) > room:
            text.append(f"\nand {len(listed) - room} more in 7 Findings", paint(self, "muted"))
        panel.update(text)

    def draw_plot(self) -> None:
        panel = self.query_one(PlotPanel)
        one = self.query_one(TrendRows).trend
        panel.display = one is not None
        if one is None:
            return
        width, height = panel.content_size
        if height < 4:
            return  # not laid out yet: its first size draws it
        point = self._at(one)
        lines = [fmt.safe(line) for line in one.about()][: max(1, height - 7)]
        text = Text(no_wrap=True, overflow="ellipsis", end="")
        text.append(f"{fmt.safe(one.name)}", paint(self, "strong"))
        text.append(f" · step {fmt.NONE if one.steps[point] is None else one.steps[point]} = ", paint(self, "muted"))
        text.append(fmt.number(one.values[point], 5), paint(self, "first" if point in one.marks else "strong"))
        if one.said:
            text.append(f" · {fmt.safe(one.said)}", paint(self, "first"))
        bounds = [bound for row in one.entry["expected"] for bound in row["expected"]]
        drawn = plot(
            one.values, one.steps, (width, height - 1 - len(lines)), lambda token: paint(self, token),
            marks=one.marks, cursor=point, bounds=bounds, plain=self.app.has_class("-ascii"),
        )  # fmt: skip
        for line in drawn:
            text.append("\n").append_text(line)
        for about in lines:
            text.append(f"\n{fmt.end(about, width)}", paint(self, "muted"))
        panel.put(text)

    def _at(self, one: Trend) -> int:
        last = len(one.values) - 1
        return last if self._point is None else max(0, min(self._point, last))

    def _telling(self) -> int | None:
        """The point to begin at: the first that stands out, else the last there is."""
        one = self.query_one(TrendRows).trend
        return min(one.marks) if one is not None and one.marks else None

    @on(Rows.Highlighted)
    def _highlighted(self, event: Rows.Highlighted) -> None:
        event.stop()
        if isinstance(event, Rows.Chosen):
            self._go()
            return
        self._point = self._telling()
        self.draw_plot()

    # ── actions ──────────────────────────────────────────────────────────────────────────────────

    def do_point(self, direction: str) -> None:
        one = self.query_one(TrendRows).trend
        if one is None:
            return
        stride = max(1, len(one.values) // 200)
        self._point = max(0, min(len(one.values) - 1, self._at(one) + (stride if direction == "next" else -stride)))
        self.draw_plot()

    def do_anomaly(self, direction: str) -> None:
        one = self.query_one(TrendRows).trend
        here = self._at(one) if one is not None else 0
        marks = sorted(one.marks) if one is not None else []
        beyond = [mark for mark in marks if (mark > here if direction == "next" else mark < here)]
        if not beyond:
            self.stage.say(f"no {direction} value of it stands out")
            return
        self._point = beyond[0] if direction == "next" else beyond[-1]
        self.draw_plot()

    def _go(self) -> None:
        """To the step under the cursor."""
        one = self.query_one(TrendRows).trend
        if one is None:
            return
        step = one.steps[self._at(one)]
        if step is None or not self.stage.screen.requests.go_to_step(step):
            self.stage.say("it belongs to no step" if step is None else f"the run has no record of step {step}")
            return
        self.stage.come_to_front()
        self.stage.panes.focus("steps")

    def do_open(self) -> None:
        self._go()

    def do_finding(self) -> None:
        self.stage.screen.examining.show_finding(self.stage.state.opened.health.worst)

    def do_trends(self) -> None:
        self.app.pop_screen()

    def do_move(self, where: str) -> None:
        move(self.query_one(TrendRows), where)

    def do_copy(self) -> None:
        one = self.query_one(TrendRows).trend
        said = f"{one.name}: {one.first_to_last}{' · ' + one.said if one.said else ''}" if one is not None else ""
        self.stage.screen.taking.copy(said or answer_of(self.stage.state).sentence)
