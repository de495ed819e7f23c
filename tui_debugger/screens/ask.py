"""One question, one line: a path to compare with, a model, an index."""

from __future__ import annotations

import os
from pathlib import Path

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.suggester import Suggester
from textual.widgets import Input, Static

from tui_debugger.widgets.line_input import LineInput


class PathSuggester(Suggester):
    """Completes directory entries; right arrow takes the suggestion."""

    def __init__(self) -> None:
        super().__init__(use_cache=False, case_sensitive=True)

    async def get_suggestion(self, value: str) -> str | None:
        if not value:
            return None
        folder, _, begun = value.rpartition("/")
        try:
            with os.scandir(Path(folder + "/" if folder or value.startswith("/") else ".").expanduser()) as entries:
                names = sorted(
                    entry.name + ("/" if entry.is_dir() else "") for entry in entries if entry.name.startswith(begun)
                )
        except OSError:
            return None
        return value[: len(value) - len(begun)] + names[0] if names else None


class AskScreen(ModalScreen[str | None]):
    """Asks; answers with the text, or None on escape."""

    BINDINGS = [Binding("escape", "dismiss", show=False)]

    def __init__(self, question: str, hint: str, value: str = "", *, is_path: bool = False) -> None:
        super().__init__()
        self._question = question
        self._hint = hint
        self._value = value
        self._is_path = is_path

    def compose(self) -> ComposeResult:
        with Vertical(id="ask") as box:
            box.border_title = self._question
            box.border_subtitle = "enter takes it · esc leaves"
            yield LineInput(self._value, suggester=PathSuggester() if self._is_path else None, compact=True)
            yield Static(self._hint, markup=False, id="ask-hint")

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self.dismiss(event.value.strip() or None)
