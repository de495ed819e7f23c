"""Text that is drawn anew only when it says something else, and laid out anew only when it needs another height."""

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


class Lines(Static):
    """As many lines as its text has. The style sheet gives their width; a text that does not wrap says `no_wrap`."""

    def __init__(self, text: str = "", *, id: str) -> None:
        super().__init__(text, markup=False, id=id)
        self._put: Text | None = None

    def put(self, text: Text) -> None:
        if text == self._put:
            return
        before, self._put = self._put, text
        same_height = (
            before is not None
            and before.no_wrap
            and text.no_wrap
            and before.plain.count("\n") == text.plain.count("\n")
        )
        self.update(text, layout=not same_height)
