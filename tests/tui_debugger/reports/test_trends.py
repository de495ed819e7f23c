"""Trends as text, from a diagnosis document's series."""

from __future__ import annotations

from typing import Any

from tui_debugger.reports.trends import ROWS, trends_lines
from tui_debugger.trend_rows import SHOWN


def series(signal: str = "loss", run: str = "a.log", **changes: Any) -> Any:
    one = {
        "signal": signal, "name": f"actor/{signal}", "run": run, "steps": [1, 2, 3, 4], "values": [1.0, 2.0, 9.0, 2.5],
        "marks": [2], "sparkline": "▁▂█▂", "expected": [], "share": None,
    }  # fmt: skip
    return {**one, **changes}


def test_a_line_has_name_sparkline_ends_and_what_stands_out() -> None:
    (blank, head, line) = trends_lines([series()])
    assert (blank, head) == ("", "trends:")
    assert line.split() == ["actor/loss", "▁▂█▂", "1", "→", "2.5", "stands", "out:", "step", "3"]


def test_two_points_are_no_trend() -> None:
    assert trends_lines([series(values=[1.0, 2.0], steps=[1, 2], marks=[])]) == []


def test_what_is_left_out_is_counted_and_all_of_it_can_be_had() -> None:
    every = [series(signal) for signal in (*SHOWN, "ess")]
    lines = trends_lines(every)
    assert lines[1] == f"trends ({len(every) - ROWS} more with --all):"
    assert len(lines) == 2 + ROWS
    assert len(trends_lines(every, show_all=True)) == 2 + len(every)


def test_both_names_of_one_signal_are_one_line_and_two_runs_two() -> None:
    assert len(trends_lines([series(), series(name="other")])) == 3
    assert len(trends_lines([series(), series(run="b.log")])) == 4


def test_expected_stands_beside_seen_where_it_does_not_hold() -> None:
    row = {
        "what": "sampling", "expected": [0.5, 1.0], "unit": "s", "seen": {"min": 1.0, "median": 4.0, "max": 5.0},
        "holds": False, "source": "GRPO notes", "correction": None,
    }  # fmt: skip
    kl = {**row, "what": "KL", "expected": [None, None], "unit": "", "holds": None, "correction": "may be negative"}
    lines = trends_lines([series(expected=[row, kl])])
    assert lines[-2:] == ["expected / seen:", "  sampling: 0.5 to 1 s / 4 s  (GRPO notes)"]
    assert trends_lines([series(expected=[row, kl])], show_all=True)[-1] == (
        "  KL: - / 4  (GRPO notes; corrected: may be negative)"
    )
