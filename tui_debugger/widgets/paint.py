"""Token colours for text that widgets build themselves: the theme decides, the code only names."""

from __future__ import annotations

from functools import lru_cache

from rich.style import Style
from textual.color import Color
from textual.widget import Widget

_BOLD = frozenset({"first", "strong"})

_OF_VERDICT = {
    "DIFF": "diff", "NAN": "nan", "SHAPE": "shape", "MISSING": "missing", "CLOSE": "close", "SAME": "same",
    "PADDING": "padding", "BAD": "missing",
}  # fmt: skip


def paint(widget: Widget, token: str) -> Style:
    """The style of a token on this widget, without a background of its own; the plain one for no token."""
    # Not by component classes: every widget would have every token styled again at each change of a class.
    return _style(widget.app.theme_variables.get(token), token in _BOLD)


@lru_cache(maxsize=256)
def _style(colour: str | None, bold: bool) -> Style:
    return Style(color=Color.parse(colour).rich_color if colour else None, bold=bold or None)


def verdict_token(word: str) -> str:
    return _OF_VERDICT.get(word, "muted")
