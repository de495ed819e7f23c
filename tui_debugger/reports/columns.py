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
    taken = [[width_of(cell) for cell in row] for row in rows]
    widths = [max(column) for column in zip(*taken, strict=True)]
    lines = []
    for row, mine in zip(rows, taken, strict=True):
        cells = []
        for i, cell in enumerate(row):
            blank = " " * (widths[i] - mine[i])
            cells.append(blank + cell if i in right else cell + blank)
        lines.append((" " * gap).join(cells).rstrip())
    return lines


def width_of(text: str) -> int:
    """How many cells of a terminal a text takes. rich.cells knows more and costs the start of a command."""
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(letter) in "WF" for letter in text)
    return len(text) + wide - sum(unicodedata.combining(letter) > 0 for letter in text)
