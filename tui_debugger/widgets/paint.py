"""Token colours for text that widgets build themselves: the style sheet decides, the code only names."""

from __future__ import annotations

from rich.style import Style
from textual.widget import Widget

#: Component classes every painted widget has; `styles/app.tcss` gives them their colours.
TOKEN_CLASSES = frozenset(
    {
        "t-first",
        "t-diff",
        "t-nan",
        "t-shape",
        "t-missing",
        "t-close",
        "t-same",
        "t-padding",
        "t-muted",
        "t-key",
        "t-strong",
    }
)

_OF_VERDICT = {
    "DIFF": "diff", "NAN": "nan", "SHAPE": "shape", "MISSING": "missing", "CLOSE": "close", "SAME": "same",
    "PADDING": "padding", "BAD": "missing",
}  # fmt: skip


def paint(widget: Widget, token: str) -> Style:
    """The style of a token on this widget, without a background of its own; the plain one for no token."""
    if not token:
        return Style()
    return widget.get_component_rich_style(f"t-{token}", partial=True)


def verdict_token(word: str) -> str:
    return _OF_VERDICT.get(word, "muted")
