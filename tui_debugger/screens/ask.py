"""One question, one line: a path to compare with, a model, an index."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.suggester import Suggester
from textual.widgets import Input, Static

from tui_debugger import format as fmt
from tui_debugger import paths
from tui_debugger.screens.keyed import PatientScreen
from tui_debugger.widgets.line_input import LineInput

#: Entries listed under the line; what is left out is counted.
_LISTED = 8


def completions(value: str, known: Sequence[str] = ()) -> list[str]:
    """What the line may become: the known words that begin so, then the entries of the folder it names."""
    words = [word for word in known if word.startswith(value)]
    folder, _, begun = value.rpartition("/")
    try:
        with os.scandir(Path(folder + "/" if folder or value.startswith("/") else ".").expanduser()) as entries:
            names = sorted(
                entry.name + ("/" if entry.is_dir() else "") for entry in entries
                if entry.name.startswith(begun) and (begun or not entry.name.startswith("."))
            )  # fmt: skip
    except OSError:
        names = []
    return words + [value[: len(value) - len(begun)] + name for name in names]


def _begun_alike(texts: Sequence[str]) -> str:
    """The letters that all of them begin with."""
    low, high = min(texts, default=""), max(texts, default="")
    return low[: next((i for i, pair in enumerate(zip(low, high, strict=False)) if pair[0] != pair[1]), len(low))]


class Completing(Suggester):
    """Suggests the first completion; right arrow takes it."""

    def __init__(self, known: Sequence[str]) -> None:
        super().__init__(use_cache=False, case_sensitive=True)
        self._known = known

    async def get_suggestion(self, value: str) -> str | None:
        return next(iter(completions(value, self._known)), None) if value else None


class AskScreen(ModalScreen[str | None], PatientScreen[str | None]):
    """Asks; answers with the text, or None on escape."""

    CSS_PATH = paths.styles_dir() / "on_top.tcss"

    BINDINGS = [
        Binding("escape", "dismiss", show=False),
        # Before textual moves the focus by it: there is one line to type into.
        Binding("tab", "complete", show=False, priority=True),
    ]

    def __init__(
        self, question: str, hint: str, value: str = "", *, is_path: bool = False, known: Sequence[str] = ()
    ) -> None:
        """`known`: words that may be meant where a path is asked for: names of models."""
        super().__init__()
        self._question = question
        self._hint = hint
        self._value = value
        self._is_path = is_path
        self._known = tuple(known)

    def compose(self) -> ComposeResult:
        with Vertical(id="ask") as box:
            box.border_title = self._question
            box.border_subtitle = f"{'tab completes · ' if self._is_path else ''}enter takes it · esc leaves"
            yield LineInput(self._value, suggester=Completing(self._known) if self._is_path else None, compact=True)
            yield Static(self._hint, markup=False, id="ask-hint")

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self.dismiss(event.value.strip() or None)

    def action_complete(self) -> None:
        """As a shell does: as far as everything that may be meant agrees, and then a list of it."""
        if not self._is_path:
            return
        line = self.query_one(LineInput)
        found = completions(line.value, self._known)
        if len(common := _begun_alike(found)) > len(line.value):
            line.value = common
            line.cursor_position = len(common)
        shown = [one.rstrip("/").rpartition("/")[2] + "/" * one.endswith("/") for one in found[:_LISTED]]
        more = f"\nand {len(found) - _LISTED:,} more" if len(found) > _LISTED else ""
        listed = "\n".join(map(fmt.safe, shown)) + more if len(found) > 1 else "" if found else "nothing begins so"
        self.query_one("#ask-hint", Static).update("\n".join(part for part in (self._hint, listed) if part))
