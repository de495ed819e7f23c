"""Token colours for text that widgets build themselves: the theme decides, the code only names."""

from __future__ import annotations

from functools import lru_cache

from rich.style import Style
from textual.color import Color
from textual.content import Content
from textual.geometry import Region
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


def write_border(widget: Widget, title: str | None = None, subtitle: str | None = None) -> None:
    """Write on a widget's border what is new there; None leaves what it says.

    Textual draws the whole widget again for every title it is given, changed or not, and reads a text as markup. Here
    the line of the border is drawn, and no other.
    """
    for name, said in (("border_title", title), ("border_subtitle", subtitle)):
        if said is None or getattr(widget, name) == (content := Content(said)).markup:
            continue
        outer, inner = widget.outer_size, widget.content_offset
        if not outer:
            setattr(widget, name, content)
            continue
        setattr(widget, f"_{name}", content)  # where textual keeps it
        line = 0 if name == "border_title" else outer.height - 1
        widget.refresh(Region(-inner.x, line - inner.y, outer.width, 1))
