"""A plot of a series: whatever stands out is drawn, whatever is not finite is a cross, and it fits its size."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.style import Style

from tui_debugger.trend_rows import numbers
from tui_debugger.widgets.plot import bars, plot


def paint(token: str) -> Style:
    return Style(meta={"token": token})


anything = st.floats(allow_nan=True, allow_infinity=True, width=64)


@example([-8.98846567431158e307], 20, 4, False)
@given(st.lists(anything, min_size=1, max_size=300), st.integers(20, 150), st.integers(4, 30), st.booleans())
def test_a_plot_never_leaves_its_size(values: list[float], width: int, height: int, plain: bool) -> None:
    lines = plot(
        values, list(range(len(values))), (width, height), paint, marks={0}, cursor=len(values) - 1, plain=plain
    )
    assert len(lines) <= height
    assert all(line.cell_len <= width for line in lines)
    text = "".join(line.plain for line in lines)
    assert not plain or not any(0x2800 <= ord(char) < 0x2900 for char in text)


@given(st.lists(anything, min_size=1, max_size=500), st.integers(1, 60))
def test_bars_never_leave_their_width(values: list[float], width: int) -> None:
    assert 0 < bars(values, (), width, paint).cell_len <= width


@pytest.mark.long
@given(st.integers(0, 9_999))
def test_a_single_spike_among_ten_thousand_values_is_seen(at: int) -> None:
    values = [0.1] * 10_000
    values[at] = 50.0
    line = bars(values, {at}, 40, paint)
    assert line.plain.count("█") == 1
    lit = [span.start for span in line.spans if span.style == paint("first")]
    assert line.plain.index("█") in lit or "█" in "".join(line.plain[i] for i in lit)
    drawn = plot(values, range(10_000), (80, 10), paint, marks={at})
    assert "●" in drawn[0].plain
    assert any(0x2800 <= ord(char) < 0x2900 or char == "●" for char in drawn[4].plain)


def test_a_value_that_is_not_finite_is_a_cross_and_does_not_vanish() -> None:
    values = numbers([1.0, "nan", 2.0, None, "inf"] + [1.5] * 200)
    assert math.isnan(values[1])
    assert values[4] == math.inf
    assert "×" in bars(values, (), 20, paint).plain
    assert "×" in "".join(line.plain for line in plot(values, range(205), (60, 8), paint))
    assert plot([math.nan], [0], (60, 8), paint)[0].plain == "no finite value"


def test_the_axis_names_the_first_step_and_evenly_spaced_ones() -> None:
    axis = plot([float(i) for i in range(300)], range(100, 400), (120, 10), paint)[-1].plain.split()
    assert axis[:3] == ["step", "100", "150"]
    gaps = {int(b) - int(a) for a, b in itertools.pairwise(axis[1:])}
    assert len(gaps) == 1


def test_a_bound_that_lies_inside_is_drawn() -> None:
    lines = plot([0.0, 10.0], [0, 1], (60, 12), paint, bounds=(5.0, None, 99.0))
    assert sum("╌╌╌" in line.plain for line in lines) == 1


def test_a_constant_runs_where_its_label_stands() -> None:
    drawn = [line.plain for line in plot([0.6, 0.6, 0.6], [0, 1, 2], (40, 8), lambda _token: Style(), plain=True)]
    (labelled,) = [line for line in drawn if "0.6" in line]
    assert "***" in labelled
    assert sum("***" in line for line in drawn) == 1
