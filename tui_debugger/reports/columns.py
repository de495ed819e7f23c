"""Aligned columns of plain text."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

from tui_debugger.format import safe


def columns(rows: Sequence[Sequence[str]], *, right: frozenset[int] = frozenset(), gap: int = 2) -> list[str]:
    """Rows as lines with every column as wide as its widest cell; the columns in `right` are flushed right."""
    if not rows:
        return []
    rows = [[safe(cell) for cell in row] for row in rows]
    widths = [max(width_of(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        blanks = [" " * (width - width_of(cell)) for cell, width in zip(row, widths, strict=True)]
        cells = [
            blank + cell if i in right else cell + blank
            for i, (cell, blank) in enumerate(zip(row, blanks, strict=True))
        ]
        lines.append((" " * gap).join(cells).rstrip())
    return lines


def width_of(text: str) -> int:
    """How many cells of a terminal a text takes. rich.cells knows more and costs the start of a command."""
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(letter) in "WF" for letter in text)
    return len(text) + wide - sum(unicodedata.combining(letter) > 0 for letter in text)
