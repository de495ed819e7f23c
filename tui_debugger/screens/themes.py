"""Choose a theme: the screen wears the one under the cursor; esc takes the former back."""

from __future__ import annotations

from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import ModalScreen
from textual.widgets import OptionList

from tui_debugger import paths, remembered, theming
from tui_debugger.screens.keyed import PatientScreen


class ThemeScreen(ModalScreen[None], PatientScreen[None]):
    CSS_PATH = paths.styles_dir() / "on_top.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "leave", show=False),
        Binding("j", "move('down')", show=False),
        Binding("k", "move('up')", show=False),
    ]

    def compose(self) -> ComposeResult:
        self._before = self.app.theme
        ours = {theme.name for theme in theming.load_themes()[0]}
        self._names = sorted(ours) + sorted(set(self.app.available_themes) - ours)
        options = OptionList(*self._names, id="theme-list", markup=False)
        options.border_title = "Theme"
        options.border_subtitle = "enter keeps it · esc leaves"
        options.highlighted = self._names.index(self._before)
        yield options

    def action_move(self, where: str) -> None:
        getattr(self.query_one(OptionList), f"action_cursor_{where}")()

    @on(OptionList.OptionHighlighted)
    def _preview(self, event: OptionList.OptionHighlighted) -> None:
        self.app.theme = self._names[event.option_index]

    @on(OptionList.OptionSelected)
    def _keep(self, event: OptionList.OptionSelected) -> None:
        self.app.theme = self._names[event.option_index]
        remembered.keep_theme(self.app.theme)
        self.dismiss()

    def action_leave(self) -> None:
        self.app.theme = self._before
        self.dismiss()
