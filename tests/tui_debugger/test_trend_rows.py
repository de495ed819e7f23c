"""Which signal a person sees first, and what its line says."""

from __future__ import annotations

from typing import Any

from tests.tui_debugger.scripted import document
from tests.tui_debugger.test_health import finding
from tui_debugger.trend_rows import expected, trends


def series(name: str, values: list[Any], marks: tuple[int, ...] = (), rows: tuple[Any, ...] = ()) -> dict[str, Any]:
    return {
        "signal": name, "name": name, "framework": None, "formula": None, "run": "a.log", "values": values,
        "steps": list(range(len(values))), "marks": list(marks), "sparkline": "", "expected": list(rows), "share": None,
    }  # fmt: skip


def row(low: float | None, high: float | None, seen: float, holds: bool | None) -> dict[str, Any]:
    return {
        "what": "iteration", "signal": "x", "expected": [low, high], "unit": "ms", "holds": holds,
        "seen": {"min": seen, "median": seen, "max": seen}, "source": "a table", "correction": None,
    }  # fmt: skip


def test_what_stands_out_comes_first_and_what_never_moves_last() -> None:
    listed = trends(
        [
            series("lr", [1.0, 1.0]), series("odd_name", [1.0, 2.0]), series("loss", [1.0, 2.0]),
            series("grad_norm", [1.0, 9.0], marks=(1,)), series("iter_ms", [1.0, 2.0], rows=(row(5, 9, 1, False),)),
            series("kl", [0.0, 0.1]),
        ],
        [{**finding("D29"), "where": {"tensor": "kl"}}],
    )  # fmt: skip
    assert [one.name for one in listed] == ["kl", "grad_norm", "iter_ms", "loss", "odd_name", "lr"]
    assert [one.said for one in listed[:2]] == ["see D29", "stands out at step 1"]
    assert not listed[-1].moves


def test_evidence_that_expected_something_else_points_to_its_signal() -> None:
    genuine = document("diagnosis_log")
    first, *rest = trends(genuine["series"], genuine["findings"])
    assert (first.name, first.found) == ("num_masked", ("D07",))
    assert all(not one.found for one in rest)


def test_expected_stands_beside_seen() -> None:
    assert expected(row(5, 9, 1, False)) == "iteration: expected 5 to 9 ms, seen 1"
    assert expected(row(None, 9, 1, True)) == "iteration: expected at most 9 ms, seen 1"
    assert expected(row(None, None, 1, None)) == "iteration: expected nothing certain ms, seen 1"


def test_a_series_of_nothing_is_left_out_and_a_nan_moves() -> None:
    assert trends([series("loss", [])]) == []
    assert trends([series("loss", ["nan", 1.0])])[0].moves
    assert trends([series("loss", ["nan", 1.0])])[0].first_to_last == "nan → 1"
