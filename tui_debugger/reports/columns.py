"""Aligned columns of plain text."""

from __future__ import annotations

from collections.abc import Sequence

from tui_debugger.format import safe


def columns(rows: Sequence[Sequence[str]], *, right: frozenset[int] = frozenset(), gap: int = 2) -> list[str]:
    """Rows as lines with every column as wide as its widest cell; the columns in `right` are flushed right."""
    if not rows:
        return []
    rows = [[safe(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append((" " * gap).join(cells).rstrip())
    return lines
