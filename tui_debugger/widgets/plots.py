"""Points and bars as text: told apart by glyph as well as by colour, so that a monochrome terminal loses nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.text import Text
from textual.widget import Widget

from tui_debugger import format as fmt
from tui_debugger.widgets.paint import paint

if TYPE_CHECKING:
    from replay_core.documents.parity import ValueHistogram

#: Braille dots of a cell by (row, column) of its 4 x 2.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_EIGHTHS = " ▁▂▃▄▅▆▇█"
#: What a point is about -> colour, glyph, glyph in ASCII. Of several in a cell the first named is drawn.
REGIONS = {"response": ("key", "⣿", "o"), "valid": ("close", "+", "+"), "padding": ("padding", "×", "x")}
_LABEL = 9
_LARGEST = 1e300


def scatter(widget: Widget, points: Sequence[Sequence[Any]], width: int, height: int, *, ascii: bool = False) -> Text:
    """A against B on one scale, with the line where they are equal.

    Args:
        points: [a, b, region].
    """
    text = Text(no_wrap=True)
    # The difference of the two ends has to be a number too.
    points = [point for point in points if all(abs(float(value)) < _LARGEST for value in point[:2])]
    if not points:
        return text.append("no point", paint(widget, "muted"))
    columns, rows = max(8, width - _LABEL - 1), max(4, height - 3)
    values = [float(value) for a, b, _ in points for value in (a, b)]
    low, high = min(values), max(values)
    if low == high:
        low, high = low - 0.5, high + 0.5
    cells: dict[tuple[int, int], dict[str, int]] = {}
    for a, b, region in points:
        x = min(2 * columns - 1, int((float(a) - low) / (high - low) * 2 * columns))
        y = min(4 * rows - 1, int((high - float(b)) / (high - low) * 4 * rows))
        cell = cells.setdefault((y // 4, x // 2), {})
        cell[region] = cell.get(region, 0) | _DOTS[y % 4][x % 2]
    muted = paint(widget, "muted")
    for row in range(rows):
        label = fmt.number(high, 3) if row == 0 else fmt.number(low, 3) if row == rows - 1 else "B" if row == 1 else ""
        text.append(f"{label:>{_LABEL - 1}} │", muted)
        for column in range(columns):
            _draw_cell(widget, text, cells.get((row, column)), _on_line(row, column, rows, columns), ascii)
        text.append("\n")
    text.append(" " * (_LABEL) + "└" + "─" * columns + "\n", muted)
    left, right = fmt.number(low, 3), fmt.number(high, 3)
    text.append(f"{'':<{_LABEL + 1}}{left}{'A':>{max(2, columns - len(left) - len(right) - 1)}} {right}\n", muted)
    for region, (token, glyph, plain) in REGIONS.items():
        count = sum(one == region for _, _, one in points)
        if count:
            text.append(f"{plain if ascii else glyph}", paint(widget, token))
            text.append(f" {region} {count}  ", muted)
    return text.append("/ A=B" if ascii else "╱ A=B", muted)


def _on_line(row: int, column: int, rows: int, columns: int) -> bool:
    return int((rows - row - 0.5) / rows * columns) == column or int((column + 0.5) / columns * rows) == rows - 1 - row


def _draw_cell(widget: Widget, text: Text, cell: dict[str, int] | None, on_line: bool, ascii: bool) -> None:
    if not cell:
        text.append(("/" if ascii else "╱") if on_line else " ", paint(widget, "muted"))
        return
    region = next((name for name in REGIONS if name in cell), "padding")
    token, glyph, plain = REGIONS[region]
    dots = region == "response" and not ascii
    text.append(chr(0x2800 + cell[region]) if dots else plain if ascii else glyph, paint(widget, token))


def bars(widget: Widget, counts: Sequence[int], width: int, height: int, token: str) -> list[Text]:
    """Counts as upright bars `height` lines high, stretched or folded to the width."""
    if not counts or height < 1:
        return []
    wide = max(1, width // len(counts))
    if width < len(counts):
        counts = [sum(counts[i * len(counts) // width : (i + 1) * len(counts) // width]) for i in range(width)]
        wide = 1
    top = max(max(counts), 1)
    eighths = [0 if not count else max(1, round(8 * height * count / top)) for count in counts]
    lines = []
    for row in range(height):
        above = 8 * (height - 1 - row)
        line = "".join(_EIGHTHS[max(0, min(8, level - above))] * wide for level in eighths)
        lines.append(Text(line, paint(widget, token), no_wrap=True))
    return lines


def two_histograms(widget: Widget, histogram: ValueHistogram | None, width: int, height: int, counted: str) -> Text:
    """Differences b - a: of the tokens that count above, of the rest below, each on a scale of its own."""
    text = Text(no_wrap=True)
    muted = paint(widget, "muted")
    if not histogram or not histogram["edges"] or not histogram["counted"] or not histogram["others"]:
        return text.append("no difference is a number", muted)
    edges = [float(edge) for edge in histogram["edges"]]
    both = [(counted, histogram["counted"], "key"), ("the rest", histogram["others"], "padding")]
    shown = [one for one in both if sum(one[1])] or both[:1]
    each = max(1, (height - 1 - len(shown)) // len(shown))
    drawn = max(1, width // len(both[0][1])) * len(both[0][1]) if width >= len(both[0][1]) else width
    for name, counts, token in shown:
        text.append(f"{name}", paint(widget, token))
        text.append(f" {sum(counts):,}, at most {max(counts):,} in a bar\n", muted)
        for line in bars(widget, counts, width, each, token):
            text.append_text(line).append("\n")
    text.append_text(_axis(widget, edges[0], edges[-1], drawn))
    return text


def _axis(widget: Widget, low: float, high: float, width: int) -> Text:
    """Both ends, and 0 where it lies between them."""
    left, right = fmt.number(low, 3), fmt.number(high, 3)
    line = [" "] * max(width, len(left) + len(right) + 1)
    line[: len(left)] = left
    line[len(line) - len(right) :] = right
    at = int(-low / (high - low) * width) if low < 0 < high else -1
    if len(left) < at < len(line) - len(right) - 1:
        line[at] = "0"
    return Text("".join(line), paint(widget, "muted"), no_wrap=True)
