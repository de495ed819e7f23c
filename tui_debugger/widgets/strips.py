"""Heat strips and histograms as text: a height for everybody, a colour for who sees it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text
from textual.widget import Widget

from tui_debugger.widgets.paint import paint

_BARS = " ▁▂▃▄▅▆▇█"
#: A heat strip's lowest step begins here: below lies what float32 calls noise.
_COLDEST = 1e-8


def heat(widget: Widget, values: Sequence[Any], width: int) -> Text:
    """One character per stretch, taller and redder with its relative difference, on a scale of decades."""
    cells = _folded(values, max(1, width))
    text = Text()
    for value in cells:
        level = _level(value)
        token = "muted" if value is None or level == 0 else "close" if level < 4 else "diff" if level < 7 else "first"
        text.append("·" if value is None else _BARS[level] if level else "·" if value else " ", paint(widget, token))
    return text


def _level(value: Any) -> int:
    number = _number(value)
    if not number or number < _COLDEST:
        return 0
    if math.isinf(number):
        return 8
    return max(1, min(8, int(math.log10(number / _COLDEST))))


def _number(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, str):
        return math.inf
    return abs(float(value))


def _folded(values: Sequence[Any], width: int) -> list[Any]:
    """At most `width` values: of those that share a cell the largest, since a strip must not hide one."""
    if len(values) <= width:
        return list(values)
    folded: list[Any] = []
    for cell in range(width):
        start = cell * len(values) // width
        part = values[start : max((cell + 1) * len(values) // width, start + 1)]
        known = [value for value in part if value is not None]
        folded.append(max(known, key=lambda value: _number(value) or 0.0) if known else None)
    return folded


def histogram(widget: Widget, document: Mapping[str, Any], width: int) -> Text:
    """Counts by power of two as bars, from the smallest exponent to the largest."""
    bins = {int(entry["exponent"]): int(entry["count"]) for entry in document.get("bins") or []}
    text = Text()
    if not bins:
        return text
    low, high = min(bins), max(bins)
    span = [bins.get(exponent, 0) for exponent in range(low, high + 1)]
    left, right = f"2^{low} ", f" 2^{high}"
    room = max(4, width - len(left) - len(right))
    folded = _summed(span, room)
    top = max(folded)
    text.append(left, paint(widget, "muted"))
    for count in folded:
        text.append(_BARS[0 if not count else max(1, round(8 * count / top))], paint(widget, "key"))
    text.append(right, paint(widget, "muted"))
    return text


def _summed(values: list[int], width: int) -> list[int]:
    if len(values) <= width:
        return values
    return [sum(values[cell * len(values) // width : (cell + 1) * len(values) // width]) for cell in range(width)]
