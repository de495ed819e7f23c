"""`?`: every key, from the actions, and what the words mean."""

from __future__ import annotations

from typing import ClassVar

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from tui_debugger import actions, paths
from tui_debugger.screens.ask import AskScreen
from tui_debugger.screens.keyed import PatientScreen
from tui_debugger.widgets.paint import paint

_WORDS = (
    ("SAME", "same", "equal in every element; bitwise where it says so"),
    ("CLOSE", "close", "within the tolerance of its kind; ? after it marks a suspect"),
    ("DIFF", "diff", "beyond it: a bug until shown otherwise"),
    ("NAN", "nan", "one side has a nan or inf where the other has none"),
    ("SHAPE", "shape", "cannot be laid over each other"),
    ("MISSING", "missing", "only one side has it"),
    ("PADDING", "padding", "differs only where the attention mask is 0"),
    ("✗E", "first", "in Steps: an error was found there; 7 Findings says which, f shows its evidence"),
    ("▲W2", "missing", "in Steps: two warnings, or problems met while reading"),
    ("✓", "muted", "in Steps: diagnosed, and no rule that could look found a warning"),
    ("+", "key", "marked with space; = compares two marked"),
)

_ABOUT = (
    "First means first in the order of computation. A is the baseline, d = b - a. origin is the smallest module "
    "whose inputs agree and whose output does not. A replay is compared with each row alone: no padding, no packing."
)


class HelpScreen(ModalScreen[None], PatientScreen[None]):
    CSS_PATH = paths.styles_dir() / "on_top.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,question_mark,f1", "dismiss", show=False),
        Binding("j,down", "scroll('down')", show=False),
        Binding("k,up", "scroll('up')", show=False),
        Binding("space,pagedown,ctrl+d", "scroll('page_down')", show=False),
        Binding("pageup,ctrl+u", "scroll('page_up')", show=False),
        Binding("g,home", "scroll('home')", show=False),
        Binding("G,end", "scroll('end')", show=False),
        Binding("slash", "search", show=False),
    ]

    def __init__(self, listed: tuple[actions.Action, ...] = actions.ACTIONS, screen: str = "debugger") -> None:
        """`screen`: the one that is open, whose keys are listed."""
        super().__init__()
        self._actions = actions.of_screen(screen, listed)
        self._screen = screen
        self._wanted = ""

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="help", can_focus=False) as page:
            name = actions.PANE_TITLES.get(self._screen)
            page.border_title = f"Help · the keys of {name}" if name else "Help"
            page.border_subtitle = "/ searches · j k g G scroll · esc closes"
            yield Static("", markup=False, id="help-text")

    def on_mount(self) -> None:
        self.query_one("#help-text", Static).update(self._text())

    def action_scroll(self, where: str) -> None:
        page = self.query_one("#help", VerticalScroll)
        getattr(page, f"scroll_{where}")(animate=False)

    def _text(self) -> RenderableType:
        parts: list[RenderableType] = []
        for heading, listed in actions.groups(self._actions).items():
            table = self._table(parts, heading)
            for action in listed:
                where = f" (in {actions.PANE_TITLES[action.pane]})" if action.pane else ""
                if action.keys and self._fits(f"{action.all_keys} {action.help}{where}"):
                    table.add_row(Text(action.all_keys, paint(self, "key")), Text(f"{action.help}{where}"))
            if not table.row_count:
                del parts[-2:]
        table = self._table(parts, "Verdicts")
        for word, token, meaning in _WORDS:
            if self._fits(f"{word} {meaning}"):
                table.add_row(Text(word, paint(self, token)), Text(meaning))
        if not table.row_count:
            del parts[-2:]
        if self._wanted:
            parts.insert(0, Text(f"only what says {self._wanted}; / and nothing shows all\n", paint(self, "muted")))
        return Group(*parts, Text(f"\n{_ABOUT}"))

    def _fits(self, said: str) -> bool:
        return self._wanted.lower() in said.lower()

    def action_search(self) -> None:
        def go(text: str | None) -> None:
            self._wanted = text or ""
            self.query_one("#help-text", Static).update(self._text())

        self.app.push_screen(AskScreen("Search the keys", "a word: a key, or what it does"), go)

    def _table(self, parts: list[RenderableType], heading: str) -> Table:
        """A heading and an empty table under it: what is added wraps beside its key, not below it."""
        table = Table.grid(padding=(0, 2, 0, 2))
        table.add_column(width=10, no_wrap=True)
        table.add_column()
        blank = "\n" if parts else ""
        parts += [Text(f"{blank}{heading}", paint(self, "strong")), table]
        return table
