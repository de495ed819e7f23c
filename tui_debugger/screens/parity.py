"""`P`, `rldbg parity`: two critics' values on the same tokens: whether they agree where it counts, and why not."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual import events, on
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.widgets import Static

from tui_debugger import format as fmt
from tui_debugger import paths
from tui_debugger.actions import PARITY_PARTS
from tui_debugger.panes import parity_sheets as sheets
from tui_debugger.parity_view import ParityView
from tui_debugger.screens.keyed import Overlay
from tui_debugger.screens.pane_layout import move
from tui_debugger.screens.stage import Stage
from tui_debugger.widgets.bars import KeyBar
from tui_debugger.widgets.paint import paint
from tui_debugger.widgets.plots import scatter, two_histograms
from tui_debugger.widgets.rows import Rows

if TYPE_CHECKING:
    from replay_core.documents.parity import BatchEntry, WorstValue

_NUMBERS = {name: number for number, name in enumerate(PARITY_PARTS, 1)}
_NOTHING = "No values yet. The log (l) says what happened; r runs it again."


def _title(name: str) -> str:
    return f"{_NUMBERS[name]} {PARITY_PARTS[name]}"


class ParityAnswer(Static):
    """The word and the cause, then its sentence, wrapped; what else is true below, as far as there is room."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"headline--badge"}

    def __init__(self) -> None:
        super().__init__("", markup=False, id="headline")
        self._answer = fmt.Answer("PARITY", "muted", "")

    def show(self, answer: fmt.Answer) -> None:
        self._answer = answer
        for token in ("first", "close", "same", "missing", "muted", "padding"):
            self.set_class(token == answer.token, f"-{token}")
        self._draw()

    def on_resize(self, _event: events.Resize) -> None:
        self._draw()

    def _draw(self) -> None:
        answer, width = self._answer, max(20, self.content_size.width or self.size.width - 3)
        badge = f" {answer.word} "
        text = Text(no_wrap=True, overflow="ellipsis", end="")
        text.append(badge, self.get_component_rich_style("headline--badge"))
        text.append(f" {fmt.safe(answer.where)}", paint(self, "strong"))
        for fact in answer.facts:
            text.append(f" · {fmt.safe(fact)}")
        lines: list[tuple[str, str]] = []
        for number, note in enumerate(answer.notes):
            token = "" if number == 0 else "muted"
            lines += [(line, token) for line in fmt.wrapped(fmt.safe(note), width - 1)]
        for line, token in lines:
            text.append(f"\n {line}", paint(self, token))
        self.update(text)


class ParitySheet(VerticalScroll, can_focus=True):
    """One part of the screen: text that is drawn anew at every size."""

    def __init__(self, name: str) -> None:
        super().__init__(Static("", markup=False), id=f"parity-{name}", classes="part")
        self._part = name
        self._view = ParityView()
        self.border_title = _title(name)

    def show(self, view: ParityView) -> None:
        self._view = view
        self._draw()

    def on_resize(self, _event: events.Resize) -> None:
        self._draw()

    def on_mount(self) -> None:
        self._draw()

    def _draw(self) -> None:
        body = self.query_one_optional(Static)
        if body is None:
            return  # drawn when it is mounted
        width, height = max(20, self.size.width - 1), max(4, self.size.height)
        batch = self._view.batch
        if batch is None:
            said = self._view.awaited if self._view.runs else _NOTHING
            body.update(Text(said, style=paint(self, "muted")))
        else:
            body.update(self.sheet(batch, width, height))

    def sheet(self, batch: BatchEntry, width: int, height: int) -> Text:
        view = self._view
        assert view.document is not None
        if self._part == "measures":
            both = batch["train"] is not None
            self.border_subtitle = ("t: eval or train" if both else "eval mode") + f" · {batch['dtype']}"
            return sheets.measures(self, view, width)
        if self._part == "scatter":
            return self._scatter(batch, width, height)
        if self._part == "differences":
            self.border_subtitle = "b - a"
            return two_histograms(self, batch["histogram"], width, height, str(batch["counted"]))
        if self._part == "drift":
            self.border_subtitle = f"over {batch['counted']} tokens" if batch["steps"] else ""
            return sheets.drift(self, batch, width)
        if self._part == "bands":
            return sheets.bands(self, batch["expectations"], width)
        return sheets.controls(self, view.document, width)

    def _scatter(self, batch: BatchEntry, width: int, height: int) -> Text:
        found, only = batch["scatter"], self._view.only_counted
        counted = "response" if batch["counted"] == "response" else "valid"
        points = [point for point in found["points"] if not only or point[2] == counted]
        sampled = f"{found['shown']:,} of {found['total']:,} values" if found["sampled"] else ""
        which = f"v: {'all' if only else 'those that count'}"
        self.border_subtitle = " · ".join(part for part in (sampled, which) if part)
        return scatter(self, points, width, height, ascii=self.app.has_class("-ascii"))


class WorstRows(Rows):
    """The tokens that part most; enter goes to one in the critics' own dumps."""

    def __init__(self) -> None:
        super().__init__(id="parity-worst", empty="No token that counts differs.")
        self.add_class("part")
        self._worst: list[WorstValue] = []
        self.border_title = _title("worst")

    def show(self, view: ParityView) -> None:
        batch = view.batch
        self._worst = batch["worst"] if batch else []
        self.empty = "No token that counts differs." if batch else view.awaited if view.runs else _NOTHING
        self.border_subtitle = "enter: to the token" if self._worst else ""
        no_text = bool(self._worst) and all(one["text"] is None for one in self._worst)
        self.border_title = _title("worst") + (" · ids only: no tokenizer beside the dump" if no_text else "")
        self.set_class(not self._worst, "-none")
        self.set_count(len(self._worst), self.cursor)

    @property
    def chosen(self) -> WorstValue | None:
        return self._worst[self.cursor] if self.cursor < len(self._worst) else None

    def heading(self, width: int) -> Text:
        return Text(f"  {'row':>4}{'pos':>6}{'A':>12}{'B':>12}{'b - a':>11}{'token':>8}  text")

    def line(self, row: int, width: int) -> Text:
        one = self._worst[row]
        text = Text("› " if row == self.cursor else "  ")
        text.append(f"{one['row']:>4}{one['position']:>6}", paint(self, "muted"))
        text.append(f"{fmt.number(one['a'], 5):>12}{fmt.number(one['b'], 5):>12}")
        text.append(f"{fmt.number(one['d'], 3):>11}", paint(self, "diff"))
        text.append(f"{'' if one['token'] is None else one['token']:>8}  ", paint(self, "muted"))
        if one["text"] is None:
            return text
        own = fmt.safe(repr(one["text"]))
        room = width - text.cell_len - len(own) - 1
        before = fmt.safe(one["before"] or "")
        if room > 4 and before:
            text.append(f"{before if len(before) <= room else '…' + before[1 - room :]} ", paint(self, "muted"))
        return text.append(own, paint(self, "key"))


class ParityTabs(Static):
    """`1 Measures  2 Scatter …`; only narrow screens show it."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"tabs--active"}

    def show(self, active: str) -> None:
        text = Text(no_wrap=True, end="")
        for name, number in _NUMBERS.items():
            style = self.get_component_rich_style("tabs--active") if name == active else paint(self, "muted")
            text.append(f" {number} {PARITY_PARTS[name]} ", style)
        self.update(text)


class ParityScreen(Overlay):
    """The answer, and seven parts below it; a narrow terminal shows one at a time."""

    CSS_PATH = paths.styles_dir() / "parity.tcss"

    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (120, "-wide")]
    VERTICAL_BREAKPOINTS = [(0, "-short"), (36, "-tall")]
    KEYS_OF = "parity"
    AUTO_FOCUS = ""

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage)
        self.active = "measures"
        self.alone = False

    @property
    def view(self) -> ParityView:
        return self.stage.state.parity

    def compose(self) -> ComposeResult:
        # textual sets it after the first paint, which would show all parts in the room of one.
        self.set_class(self.app.size.width < self.HORIZONTAL_BREAKPOINTS[1][0], "-narrow")
        yield Static("", markup=False, id="parity-title")
        yield ParityAnswer()
        yield ParityTabs("", markup=False, id="tab-line")
        with Horizontal(id="parity-columns"):
            with Vertical(id="parity-left"):
                yield ParitySheet("measures")
                yield ParitySheet("drift")
                yield WorstRows()
                yield ParitySheet("controls")
            with Vertical(id="parity-right"):
                yield ParitySheet("scatter")
                yield ParitySheet("differences")
                yield ParitySheet("bands")
        yield KeyBar(self.actions)

    def on_mount(self) -> None:
        self._focus_part("measures")
        self._draw_state()

    def _draw_state(self) -> None:
        view, state = self.view, self.stage.state
        for part in self.query(ParitySheet):
            part.show(view)
        self.query_one(WorstRows).show(view)
        busy = state.job.busy
        self.query_one(ParityAnswer).show(view.answer(busy, busy.how_long) if busy else view.answer())
        self.query_one("#parity-title", Static).update(self._title_line())
        self.query_one(KeyBar).show("parity", state.job.busy is not None)

    def _title_line(self) -> Text:
        view = self.view
        text = Text(" rldbg ", style=paint(self, "strong"), no_wrap=True, overflow="ellipsis", end="")
        text.append(" parity ", paint(self, "key"))
        document, batch = view.document, view.batch
        if document is None or batch is None:
            return text
        for side, critic in (("A", document["a"]), ("B", document["b"])):
            text.append(" ↔ " if side == "B" else "", paint(self, "muted"))
            text.append(f"{side} ", paint(self, "key"))
            text.append(fmt.safe(critic["backend"]))
        text.append(f" · batch {fmt.safe(batch['name'])} ({view.number + 1} of {len(view.batches)})")
        if view.is_saved:
            text.append(f" · saved {document['created']}", paint(self, "muted"))
        return text

    # ── where the focus is ───────────────────────────────────────────────────────────────────────

    def _focus_part(self, name: str) -> None:
        self.active = name
        for part in PARITY_PARTS:
            self.query_one(f"#parity-{part}").set_class(part == name, "-active")
        for column in self.query("#parity-left, #parity-right"):
            column.set_class(bool(column.query(".-active")), "-has-active")
        self.set_class(self.alone, "-alone")
        self.query_one(ParityTabs).show(name)
        self.query_one(f"#parity-{name}").focus()

    def do_part(self, name: str) -> None:
        self._focus_part(name)

    def do_next_pane(self, direction: str) -> None:
        names = list(PARITY_PARTS)
        self._focus_part(names[(names.index(self.active) + (1 if direction == "next" else -1)) % len(names)])

    def do_maximise(self) -> None:
        self.alone = not self.alone
        self._focus_part(self.active)

    def on_descendant_focus(self) -> None:
        name = (self.focused.id or "").removeprefix("parity-") if self.focused else ""
        if name in PARITY_PARTS and name != self.active:
            self._focus_part(name)

    # ── actions ──────────────────────────────────────────────────────────────────────────────────

    def do_batch(self, direction: str) -> None:
        if len(self.view.batches) < 2:
            self.stage.say("there is one batch only" if self.view.batches else "there is nothing yet")
        self.view.turn(1 if direction == "next" else -1)
        self.query_one(WorstRows).move_cursor(0)
        self.redraw()

    def do_mode(self) -> None:
        if self.view.batch is not None and self.view.batch.get("train") is None:
            self.stage.say("no values of train mode were recorded")
            return
        self.view.mode = "train" if self.view.mode == "eval" else "eval"
        self.redraw()

    def do_points(self) -> None:
        self.view.only_counted = not self.view.only_counted
        self.redraw()

    @on(Rows.Highlighted)
    def _highlighted(self, event: Rows.Highlighted) -> None:
        event.stop()
        if isinstance(event, Rows.Chosen):
            self.do_open()

    def do_open(self) -> None:
        worst, batch = self.query_one(WorstRows).chosen, self.view.batch
        if self.active != "worst" and worst is not None:
            self._focus_part("worst")
            self.stage.say("enter again goes to the token under the cursor")
            return
        if worst is None or batch is None:
            self.stage.say("no token that counts differs")
            return
        self.app.pop_screen()
        self.stage.work(self.stage.session.parities.open_value(batch, worst), "compare")
        self.stage.panes.focus("inspect")

    def do_run_parity(self) -> None:
        stage = self.stage
        if stage.state.job.busy is not None:
            stage.say(f"{stage.state.job.busy} · ctrl+c cancels")
        elif not self.view.request:
            stage.say("a saved document is not run again: rldbg parity CONFIG_A CONFIG_B")
        else:
            request = {name: value for name, value in self.view.request.items() if name != "out"}
            stage.work(stage.session.parities.run(request), "job")

    def do_back(self) -> None:
        if self.alone:
            self.do_maximise()
        else:
            super().do_back()

    def do_move(self, where: str) -> None:
        move(self.focused, where)

    def do_export(self) -> None:
        taking, document, lacking = self.stage.screen.taking, self.view.document, "nothing to export yet"
        if document is None:
            self.stage.say(lacking)
            return
        taking.ask_place(lambda place: self.stage.work(taking.write([document], lacking, place), "export"))

    def do_copy(self) -> None:
        answer = self.view.answer(self.stage.state.job.busy)
        self.stage.screen.taking.copy(" · ".join([answer.sentence, *answer.notes]))

    def do_open_log(self) -> None:
        self.stage.screen.taking.show_log()
