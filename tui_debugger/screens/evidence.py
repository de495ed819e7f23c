"""`f`: one finding in full: what it claims, the numbers it rests on, the likely cause, what to do next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from tui_debugger import format as fmt
from tui_debugger import paths
from tui_debugger.health import WORDS, in_steps
from tui_debugger.screens.examining import can_do
from tui_debugger.screens.keyed import PatientScreen
from tui_debugger.widgets.paint import paint

if TYPE_CHECKING:
    from tui_debugger.screens.stage import Stage


#: Narrower screens have no room for a table of evidence.
_NARROW = 110


def _seen(piece: Mapping[str, Any]) -> str:
    value = piece["value"]
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return fmt.number(value, 5) if is_number else fmt.safe(value)


class EvidenceScreen(ModalScreen[None], PatientScreen[None]):
    CSS_PATH = paths.styles_dir() / "on_top.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,f", "dismiss", show=False),
        Binding("enter", "go", show=False),
        Binding("y", "copy", show=False),
        Binding("r", "do", show=False),
        Binding("x", "explain", show=False),
        Binding("j,down", "scroll('down')", show=False),
        Binding("k,up", "scroll('up')", show=False),
        Binding("space,pagedown,ctrl+d", "scroll('page_down')", show=False),
        Binding("pageup,ctrl+u", "scroll('page_up')", show=False),
        Binding("g,home", "scroll('home')", show=False),
        Binding("G,end", "scroll('end')", show=False),
        Binding("d", "first", show=False),
    ]

    def __init__(self, stage: Stage, finding: Mapping[str, Any]) -> None:
        super().__init__()
        self._stage = stage
        self._finding = finding
        self._explained = ""

    def compose(self) -> ComposeResult:
        word, token = WORDS[self._finding["severity"]]
        with VerticalScroll(id="evidence", classes=f"-{token}", can_focus=False) as page:
            page.border_title = f"{word} {self._finding['id']}"
            page.border_subtitle = self._keys
            yield Static("", markup=False, id="evidence-text")

    @property
    def _keys(self) -> str:
        do = "r does the next step · " if can_do(self._finding["next_step"]) else ""
        return f"enter goes there · {do}y copies it · x explains the rule · esc"

    def on_mount(self) -> None:
        self.query_one("#evidence-text", Static).update(self._text())

    def _text(self) -> RenderableType:
        finding = self._finding
        parts: list[RenderableType] = [Text(fmt.safe(finding["claim"]), paint(self, "strong")), self._where()]
        # Cause and next step first: on a small screen the evidence is a page further down.
        parts += [self._heading("Likely cause"), Text(f"  {fmt.safe(finding['cause'])}")]
        parts += [self._heading("Next step"), Text(f"  {fmt.safe(finding['next_step'])}", paint(self, "key"))]
        if finding["evidence"]:
            narrow = self.app.size.width < _NARROW
            parts += [self._heading("Evidence"), self._narrow_evidence() if narrow else self._evidence()]
        downstream = [one for one in self._stage.state.opened.health.findings if one["echo_of"] == finding["id"]]
        if downstream:
            parts.append(self._heading("What follows from it"))
            parts += [Text(f"  {one['id']} {fmt.safe(one['claim'])}") for one in downstream]
        if finding["echo_of"]:
            parts.append(Text(f"\nThis follows from {finding['echo_of']}.", paint(self, "muted")))
        parts.append(Text(f"\nRule from: {fmt.safe(finding['source'])}", paint(self, "muted")))
        if self._explained:
            parts += [self._heading("The rule"), Text(fmt.safe(self._explained, lines=True))]
        return Group(*parts)

    def _where(self) -> Text:
        where = self._finding["where"]
        parts = [in_steps(self._finding["steps"]) or fmt.scope(where)]
        parts += [f"{name} {where[name]}" for name in ("sample", "position", "line") if where.get(name) is not None]
        parts.insert(1, str(where.get("tensor") or ""))
        text = Text(" · ".join(fmt.safe(part) for part in parts if part), paint(self, "muted"))
        if where.get("path"):
            text.append(f"\n{fmt.safe(where['path'])}")
        return text

    def _heading(self, said: str) -> Text:
        return Text(f"\n{said}", paint(self, "strong"))

    def _narrow_evidence(self) -> Text:
        """A piece of evidence per line, where it comes from under it."""
        text = Text()
        for number, piece in enumerate(self._finding["evidence"]):
            text.append("\n" if number else "")
            text.append(f"  {fmt.safe(piece['name'])} = ")
            text.append(_seen(piece), paint(self, "first" if piece["expected"] is not None else "strong"))
            if piece["expected"] is not None:
                text.append(f"  expected {fmt.safe(piece['expected'])}", paint(self, "same"))
            if piece["source"]:
                text.append(f"\n    from {fmt.safe(piece['source'])}", paint(self, "muted"))
        return text

    def _evidence(self) -> Table:
        table = Table.grid(padding=(0, 2, 0, 2))
        for _ in range(4):
            table.add_column()
        muted = paint(self, "muted")
        table.add_row(*(Text(head, muted) for head in ("", "seen", "expected", "from")))
        for piece in self._finding["evidence"]:
            unlike = piece["expected"] is not None
            table.add_row(
                Text(fmt.safe(piece["name"])),
                Text(_seen(piece), paint(self, "first" if unlike else "strong")),
                Text(fmt.safe(piece["expected"] or ""), paint(self, "same")),
                Text(fmt.safe(piece["source"] or ""), muted),
            )
        return table

    # ── keys ─────────────────────────────────────────────────────────────────────────────────────

    def action_scroll(self, where: str) -> None:
        getattr(self.query_one("#evidence", VerticalScroll), f"scroll_{where}")(animate=False)

    def action_go(self) -> None:
        self.dismiss()
        self._stage.screen.examining.go_to_finding(self._finding)

    def action_first(self) -> None:
        self.dismiss()
        self._stage.screen.search.do_first()

    def action_copy(self) -> None:
        self._stage.screen.taking.copy(self._finding["next_step"])

    def action_do(self) -> None:
        if not can_do(self._finding["next_step"]):
            self._stage.say("the screen cannot do this step by itself: y copies it")
            return
        self.dismiss()
        self._stage.screen.examining.take_next_step(self._finding["next_step"])

    def action_explain(self) -> None:
        self._stage.work(self._explain(), "explain")

    async def _explain(self) -> None:
        self._explained = await self._stage.session.diagnosing.explain(self._finding["id"])
        if self.is_attached:
            self.query_one("#evidence-text", Static).update(self._text())
            self.query_one("#evidence", VerticalScroll).scroll_end(animate=False)
