"""`W`: why engine and trainer disagree: the answer, the tokens, a line per cause with what it leaves, the floor."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from tui_debugger import format as fmt
from tui_debugger import paths
from tui_debugger.screens.keyed import PatientScreen
from tui_debugger.widgets.paint import paint

if TYPE_CHECKING:
    from replay_core.documents.mismatch import GapCause, MismatchDocument
    from replay_core.documents.parts import Number
    from tui_debugger.screens.stage import Stage
    from tui_debugger.screens.taking import Writing

#: Narrower screens have no room for every figure of a cause; the document has them.
_NARROW = 110
_CAUSES, _SEQUENCES = 14, 8
_WORDS = {True: ("AGREES", "same"), False: ("MISMATCH", "first"), None: ("NOT ANSWERED", "missing")}


class MismatchScreen(ModalScreen[None], PatientScreen[None]):
    """The answer to a mismatch, as one page.

    Args:
        with_model: asks for a model, and asks again with it.
    """

    CSS_PATH = paths.styles_dir() / "on_top.tcss"

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,W", "dismiss", show=False),
        Binding("y", "copy", show=False),
        Binding("e", "export", show=False),
        Binding("M", "model", show=False),
        Binding("j,down", "scroll('down')", show=False),
        Binding("k,up", "scroll('up')", show=False),
        Binding("space,pagedown,ctrl+d", "scroll('page_down')", show=False),
        Binding("pageup,ctrl+u", "scroll('page_up')", show=False),
        Binding("g,home", "scroll('home')", show=False),
        Binding("G,end", "scroll('end')", show=False),
    ]

    def __init__(self, stage: Stage, document: MismatchDocument, with_model: Callable[[], None]) -> None:
        super().__init__()
        self._stage, self._document, self._with_model = stage, document, with_model

    def compose(self) -> ComposeResult:
        word, token = _WORDS[self._document["agrees"]]
        with VerticalScroll(id="mismatch", classes=f"-{token}", can_focus=False) as page:
            step = "" if self._document["step"] is None else f" · step {self._document['step']}"
            page.border_title = f"{word}{step}"
            page.border_subtitle = "M with a model · y copies the answer · e writes the JSON · esc"
            yield Static("", markup=False, id="mismatch-text")

    def on_mount(self) -> None:
        self._draw()

    def on_resize(self, _event: events.Resize) -> None:
        self._draw()

    def _draw(self) -> None:
        text = self.query_one_optional("#mismatch-text", Static)
        if text is not None:
            text.update(self._text())

    def _text(self) -> RenderableType:
        doc = self._document
        parts: list[RenderableType] = [Text(fmt.safe(doc["headline"]), paint(self, "strong"))]
        parts += [Text(f"lacks {fmt.safe(one)}", paint(self, "missing")) for one in doc["lacks"]]
        gap, floor = doc["gap"], doc["floor"]
        if gap is not None:
            parts.append(Text(
                f"trainer - rollout: mean |d| {_n(gap['mean'])}, p99 {_n(gap['p99'])}, max {_n(gap['max'])}, "
                f"k3 {_n(gap['k3'])}, mean e^|d| {_n(gap['multiplier'])}; {gap['tokens']} tokens of "
                f"{doc['samples']} samples",
                paint(self, "muted"),
            ))  # fmt: skip
        if floor is not None:
            parts.append(Text(f"floor {_n(floor['floor'])} nats ({floor['dtype']}), left {_n(floor['left'])}: "
                              f"{_n(floor['ratio'])} x", paint(self, "muted")))  # fmt: skip
        if doc["tokens"]:
            parts.append(self._heading("Tokens"))
            for fault in doc["tokens"]:
                texts = "" if fault["texts"] is None else f": {fault['texts'][0]!r} against {fault['texts'][1]!r}"
                token = "first" if fault["is_fault"] else "muted"
                parts.append(Text(fmt.safe(f"  {fault['what']}{texts}"), paint(self, token)))
        listed = [one for one in doc["causes"] if one["left"] is not None or one["named"]]
        if listed:
            parts += [self._heading("What is left of the gap, were this the cause"), self._causes(listed[:_CAUSES])]
        sequences = [one for one in doc["sequences"] if one["is_outlier"] or one["versions"]][:_SEQUENCES]
        if sequences:
            parts.append(self._heading("Sequences, furthest off first"))
        for one in sequences:
            spans = "; ".join(f"{span['begin']} to {span['end'] - 1} {span['weights']}" for span in one["versions"])
            said = (
                f"  sample {one['sample']}: {_n(one['mean'])} over {one['tokens']} tokens, {_share(one['share'])} of it"
            )
            parts.append(Text(fmt.safe(f"{said}{'; tokens ' if spans else ''}{spans}")))
        routing = doc["routing"]
        if routing is not None:
            said = f"{_share(routing['observed'])} of {routing['tokens']} choices of experts"
            expected = routing["expected"]
            by_rounding = "" if expected is None else f"; rounding alone turns {_share(expected)}"
            parts.append(Text(f"\n{said} are not those of this model's live router{by_rounding}"))
        parts += [self._heading("Next"), *(Text(f"  {fmt.safe(one)}", paint(self, "key")) for one in doc["next"])]
        parts += [Text(f"\n{fmt.safe(one)}", paint(self, "muted")) for one in doc["notes"]]
        return Group(*parts)

    def _heading(self, said: str) -> Text:
        return Text(f"\n{said}", paint(self, "strong"))

    def _causes(self, listed: list[GapCause]) -> Table:
        """The named first; a narrow screen has what it explains, what it leaves, whose it is and what."""
        narrow = self.app.size.width < _NARROW
        heads = ["", "explains", "mean |d|", *([] if narrow else ["tokens", "max", "k3", "e^|d|"]), "side", "cause"]
        table = Table.grid(padding=(0, 2, 0, 0))
        for _ in heads:
            table.add_column()
        table.add_row(*(Text(head, paint(self, "muted")) for head in heads))
        for one in listed:
            left = one["left"]
            figures = ["-"] * 4 if left is None else [_n(left[name]) for name in ("mean", "max", "k3", "multiplier")]
            more = [] if narrow else [_share(one["tokens_explained"]), *figures[1:]]
            style = paint(self, "first" if one["named"] else "strong" if (_value(one["share"]) >= 0.5) else "muted")
            cells = ["›" if one["named"] else " ", _share(one["share"]), figures[0], *more, one["side"], one["name"]]
            table.add_row(*(Text(fmt.safe(cell), style) for cell in cells))
        return table

    def action_scroll(self, where: str) -> None:
        getattr(self.query_one("#mismatch", VerticalScroll), f"scroll_{where}")(animate=False)

    def action_copy(self) -> None:
        self._stage.screen.taking.copy(self._document["headline"])

    def action_export(self) -> None:
        taking = self._stage.screen.taking

        def go(place: Writing) -> None:
            self._stage.work(taking.write([self._document], "nothing to export yet", place), "export")

        taking.ask_place(go)

    def action_model(self) -> None:
        self.dismiss()
        self._with_model()


def _value(share: Number | None) -> float:
    return share if isinstance(share, float) else 0.0


def _n(value: Number | None) -> str:
    return "-" if value is None else value if isinstance(value, str) else f"{value:.3g}"


def _share(value: Number | None) -> str:
    if value is None or isinstance(value, str):
        return value or "-"
    return "more" if value < 0 else f"{value:.0%}"
