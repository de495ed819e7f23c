"""The series of a diagnosis as text: sparklines, what stands out, what was expected beside what was seen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tui_debugger import format as words
from tui_debugger.trend_rows import SHOWN

if TYPE_CHECKING:
    from replay_core.documents.diagnosis import ExpectedRow, SeriesEntry

#: Fewer points are no trend.
POINTS = 3
#: Signals listed without `--all`.
ROWS = 8
_NAME = 28


def trends_lines(series: list[SeriesEntry], *, show_all: bool = False) -> list[str]:
    """Lines of the report, none where nothing has a trend."""
    long = [one for one in series if len(one["values"]) >= POINTS]
    first: dict[tuple[str, str], SeriesEntry] = {}
    for one in long:
        if one["signal"] in SHOWN:
            first.setdefault((one["run"], one["signal"]), one)
    chosen = long if show_all else sorted(first.values(), key=lambda one: SHOWN.index(one["signal"]))
    lines = [_line(one) for one in (chosen if show_all else chosen[:ROWS])]
    expected = [row for one in series for row in one["expected"] if show_all or row["holds"] is False]
    if lines:
        left = len(long) - len(lines)
        lines = ["", "trends" + (f" ({left} more with --all)" if left else "") + ":", *lines]
    if expected:
        lines += ["", "expected / seen:", *(_expected(row) for row in expected)]
    return lines


def _line(one: SeriesEntry) -> str:
    values, steps = one["values"], one["steps"]
    marks = [steps[position] for position in one["marks"]]
    text = (
        f"  {one['name'][:_NAME]:<{_NAME}} {one['sparkline']}  {words.number(values[0])} → {words.number(values[-1])}"
    )
    if marks:
        text += "  stands out: step " + ", ".join(map(str, marks[:4])) + (" …" if len(marks) > 4 else "")
    return text


def _expected(row: ExpectedRow) -> str:
    low, high = row["expected"]
    wanted = "-" if high is None else f"{words.number(low)} to {words.number(high)} {row['unit']}"
    text = f"  {row['what']}: {wanted} / {words.number(row['seen']['median'])} {row['unit']}".rstrip()
    return text + (
        f"  ({row['source']}; corrected: {row['correction']})" if row["correction"] else f"  ({row['source']})"
    )
