"""Fixed: text of a size that the style sheet gives, drawn anew only when it says something else."""

from __future__ import annotations

from rich.text import Text
from textual.widgets import Static


class Fixed(Static):
    """A line or a few of text. What it says never lays out the screen again."""

    def __init__(self, *, id: str, classes: str | None = None) -> None:
        super().__init__("", markup=False, id=id, classes=classes)
        self._put = Text()

    def put(self, text: Text) -> None:
        if text != self._put:
            self._put = text
            self.update(text, layout=False)
