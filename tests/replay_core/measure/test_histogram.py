"""Counts per power of two."""

from __future__ import annotations

from replay_core.measure.histogram import log2_histogram
from replay_core.records import Inline, TensorRef


def test_every_element_is_counted_once() -> None:
    values = [0.0, 1.0, -1.5, 2.0, 0.5, 5e-324, float("nan"), float("inf"), 3.0]
    found = log2_histogram(TensorRef("x", "float64", (len(values),), Inline(values)))
    assert found == {
        "zeros": 1,
        "nonfinite": 2,
        "negative": 1,
        "bins": [
            {"exponent": -1074, "count": 1},
            {"exponent": -1, "count": 1},
            {"exponent": 0, "count": 2},
            {"exponent": 1, "count": 2},
        ],
    }
