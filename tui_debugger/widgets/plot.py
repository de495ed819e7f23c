"""A series as text: one line of bars, or a plot in braille dots (or plain stars) with its axes. Pure but for colours.

Nothing vanishes: where several steps share a cell its extremes are drawn, and a value that is not finite is a ×.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any

from rich.style import Style
from rich.text import Text

from tui_debugger import format as fmt

_BARS = "▁▂▃▄▅▆▇█"
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
#: Cells taken by the labels of the vertical axis.
_LABEL = 9

Paint = Callable[[str], Style]


def bars(values: Sequence[float], marks: Collection[int], width: int, paint: Paint) -> Text:
    """One line of bars, the values that stand out in another colour."""
    text = Text()
    finite = [value for value in values if math.isfinite(value)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    middle = sorted(finite)[len(finite) // 2] if finite else 0.0
    # A few values are drawn wide: what is four steps long is no speck.
    wide = max(1, min(4, width // max(1, len(values))))
    for cell in _cells(len(values), width):
        inside = [values[i] for i in cell]
        marked = any(i in marks for i in cell)
        if not all(map(math.isfinite, inside)):
            text.append("×" * wide, paint("nan"))
            continue
        # Of the values in a cell the one farthest from the middle: a spike is what is looked for.
        value = max(inside, key=lambda each: abs(each - middle))
        text.append(_BARS[_level(value, low, high, len(_BARS))] * wide, paint("first" if marked else "key"))
    return text


def _cells(count: int, width: int) -> list[range]:
    """The positions that each of at most `width` cells stands for."""
    if count <= width:
        return [range(i, i + 1) for i in range(count)]
    return [range(i * count // width, max((i + 1) * count // width, i * count // width + 1)) for i in range(width)]


def _level(value: float, low: float, high: float, levels: int) -> int:
    # Halves: the difference of two numbers of opposite sign may be none.
    spread = high / 2 - low / 2
    if spread <= 0:
        return 0
    return max(0, min(levels - 1, int((value / 2 - low / 2) / spread * levels)))


def plot(
    values: Sequence[float],
    steps: Sequence[Any],
    size: tuple[int, int],
    paint: Paint,
    *,
    marks: Collection[int] = (),
    cursor: int | None = None,
    bounds: Sequence[float | None] = (),
    plain: bool = False,
) -> list[Text]:
    """The lines of a plot of `size` (width, height) with its axes.

    Args:
        marks: positions that stand out, drawn as ●.
        cursor: a position that a vertical line runs through.
        bounds: expected limits, drawn as dashed lines where they lie within the plot.
        plain: stars in place of braille.
    """
    width, height = max(8, size[0] - _LABEL), max(2, size[1] - 1)
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return [Text("no finite value", style=paint("nan"))]
    lowest, highest = min(finite), max(finite)
    low, high = lowest, highest
    if low == high:  # a level line runs through the middle, and is labelled there
        low, high = low - max(1.0, abs(low)), high + max(1.0, abs(high))
        low, high = max(low, -sys.float_info.max), min(high, sys.float_info.max)
    grid: list[list[tuple[str, str]]] = [[(" ", "")] * width for _ in range(height)]
    column = _columns(len(values), width)
    if cursor is not None:
        for row in grid:
            row[column(cursor)] = ("│", "muted")
    for bound in bounds:
        if bound is not None and low < bound < high:
            row = grid[height - 1 - _level(bound, low, high, height)]
            row[:] = [("╌", "padding") if cell[0] == " " else cell for cell in row]
    if plain:
        _stars(grid, values, low, high, width)
    else:
        _braille(grid, values, low, high, width)
    for position, value in enumerate(values):
        if not math.isfinite(value):
            grid[height - 1][column(position)] = ("×", "nan")
        elif position in marks or position == cursor:
            level = _level(value, low, high, height)
            grid[height - 1 - level][column(position)] = ("●", "first" if position in marks else "strong")
    return [*_framed(grid, lowest, highest, paint), _axis(steps, column, width, paint)]


def _columns(count: int, width: int) -> Callable[[int], int]:
    """The column of a position: the first at the left edge, the last at the right one."""
    if count < 2:
        return lambda _position: 0
    return lambda position: round(position * (width - 1) / (count - 1))


def _path(values: Sequence[float], width: int) -> list[tuple[float, float] | None]:
    """Lowest and highest value of each of `width` columns, lines between points included; None in a gap."""
    count = len(values)
    found: list[tuple[float, float] | None] = [None] * width

    def see(at: int, value: float) -> None:
        before = found[at]
        found[at] = (value, value) if before is None else (min(before[0], value), max(before[1], value))

    column = _columns(count, width)
    for position, value in enumerate(values):
        if not math.isfinite(value):
            continue
        see(column(position), value)
        after = values[position + 1] if position + 1 < count else math.nan
        if math.isfinite(after):
            start, end = column(position), column(position + 1)
            for at in range(start + 1, end):
                share = (at - start) / (end - start)
                see(at, value * (1 - share) + after * share)
    return found


def _braille(grid: list[list[tuple[str, str]]], values: Sequence[float], low: float, high: float, width: int) -> None:
    tall = len(grid) * 4
    dots = [[0] * width for _ in grid]
    before: int | None = None
    for at, span in enumerate(_path(values, width * 2)):
        if span is None:
            before = None
            continue
        bottom, top = (_level(value, low, high, tall) for value in span)
        # The line goes on from where the column before left it.
        start = bottom if before is None else min(bottom, before + 1)
        end = top if before is None else max(top, before - 1)
        reach = range(start, end + 1)
        before = (bottom + top) // 2
        for level in reach:
            row = tall - 1 - level
            dots[row // 4][at // 2] |= _DOTS[row % 4][at % 2]
    for y, line in enumerate(dots):
        for x, bits in enumerate(line):
            if bits:
                grid[y][x] = (chr(0x2800 + bits), "key")


def _stars(grid: list[list[tuple[str, str]]], values: Sequence[float], low: float, high: float, width: int) -> None:
    height = len(grid)
    for at, span in enumerate(_path(values, width)):
        if span is None:
            continue
        for level in range(_level(span[0], low, high, height), _level(span[1], low, high, height) + 1):
            grid[height - 1 - level][at] = ("*", "key")


def _framed(grid: list[list[tuple[str, str]]], low: float, high: float, paint: Paint) -> list[Text]:
    lines = []
    labels = {0: high, len(grid) - 1: low} if high > low else {len(grid) - 1 - _level(1, 0, 2, len(grid)): high}
    for y, row in enumerate(grid):
        label = fmt.number(labels[y], 3) if y in labels else ""
        text = Text(f"{fmt.end(label, _LABEL - 2):>{_LABEL - 2}} ", paint("muted"), no_wrap=True, end="")
        text.append("┤" if label else "│", paint("muted"))
        for char, token in row:
            text.append(char, paint(token))
        lines.append(text)
    return lines


def _stride(count: int, labels: int) -> int:
    """The least of 1, 2, 5, 10, 20 ... that puts no more than so many labels on an axis."""
    stride = 1
    for digit in itertools.cycle((2, 2.5, 2)):
        if count <= stride * max(1, labels):
            return stride
        stride = round(stride * digit)
    raise AssertionError


def _axis(steps: Sequence[Any], column: Callable[[int], int], width: int, paint: Paint) -> Text:
    """Step numbers under their columns, as many as fit."""
    line = [" "] * width
    free = 0
    count = len(steps)
    for position in range(0, count, _stride(count, width // 10)):
        label = fmt.NONE if steps[position] is None else str(steps[position])
        at = min(column(position), width - len(label))
        if at >= free:
            line[at : at + len(label)] = label
            free = at + len(label) + 2
    return Text(f"{'step':>{_LABEL - 2}}  {''.join(line)}".rstrip(), paint("muted"), no_wrap=True, end="")
