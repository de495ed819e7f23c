"""The line under the tensors where their filter is written."""

from __future__ import annotations

from textual.events import Key

from tui_debugger.messages import FilterClosed
from tui_debugger.widgets.line_input import LineInput


class FilterInput(LineInput):
    """Hidden until it is asked for; esc takes the filter away."""

    def __init__(self) -> None:
        super().__init__(placeholder="regular expression, e.g. ^DIFF|o_proj", id="filter", compact=True)
        self.display = False

    def on_key(self, event: Key) -> None:
        if event.key == "escape":
            event.stop()
            event.prevent_default()
            self.post_message(FilterClosed(keep=False))
