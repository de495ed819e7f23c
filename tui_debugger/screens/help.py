"""`?`: every key, from the actions, and what the words mean."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from tui_debugger import actions
from tui_debugger.widgets.paint import TOKEN_CLASSES, paint

_WORDS = (
    ("SAME", "same", "bitwise equal"),
    ("CLOSE", "close", "within the tolerance of its kind; ? after it marks a suspect"),
    ("DIFF", "diff", "beyond it: a bug until shown otherwise"),
    ("NAN", "nan", "one side has a nan or inf where the other has none"),
    ("SHAPE", "shape", "cannot be laid over each other"),
    ("MISSING", "missing", "only one side has it"),
    ("PADDING", "padding", "differs only where the attention mask is 0"),
)

_ABOUT = (
    "First means first in the order of computation. A is the baseline, d = b - a. origin is the smallest module "
    "whose inputs agree and whose output does not. A replay is compared with each row alone: no padding, no packing."
)


class HelpScreen(ModalScreen[None]):
    COMPONENT_CLASSES: ClassVar[set[str]] = set(TOKEN_CLASSES)
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,question_mark,f1", "dismiss", show=False),
        Binding("j,down", "scroll('down')", show=False),
        Binding("k,up", "scroll('up')", show=False),
        Binding("space,pagedown,ctrl+d", "scroll('page_down')", show=False),
        Binding("pageup,ctrl+u", "scroll('page_up')", show=False),
    ]

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="help", can_focus=False) as page:
            page.border_title = "Help"
            page.border_subtitle = "esc closes · j k scroll"
            yield Static("", markup=False, id="help-text")

    def on_mount(self) -> None:
        self.query_one("#help-text", Static).update(self._text())

    def action_scroll(self, where: str) -> None:
        page = self.query_one("#help", VerticalScroll)
        getattr(page, f"scroll_{where}")(animate=False)

    def _text(self) -> Text:
        text = Text()
        for heading, listed in actions.groups().items():
            text.append(f"{heading}\n", paint(self, "strong"))
            for action in listed:
                keys = "  ".join([action.key_text, *action.keys[1:]])
                where = f" (in {actions.PANE_TITLES[action.pane]})" if action.pane else ""
                text.append(f"  {keys:<12}", paint(self, "key"))
                text.append(f"{action.help}{where}\n")
            text.append("\n")
        text.append("Verdicts\n", paint(self, "strong"))
        for word, token, meaning in _WORDS:
            text.append(f"  {word:<12}", paint(self, token))
            text.append(f"{meaning}\n")
        text.append(f"\n{_ABOUT}")
        return text
