"""Integers of 64 bits, which doubles do not tell apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from replay_core.measure.distribution import Distribution
from replay_core.measure.integers import exact_difference
from replay_core.measure.pair import figures

_IDS = [1_200_000_000_000_000_001, 1_119_021_634_053_362_427, -1_200_000_000_000_000_001]


def test_ids_that_are_100_apart_differ_by_100() -> None:
    a = np.array([_IDS], dtype=np.int64)
    found = figures([(a, a + 100)], exact=True, limits=(99.0, 0.0))
    assert (found.mismatched, found.max_abs, found.beyond) == (3, 100.0, 3)
    assert found.total.mean_signed == 100.0
    assert Distribution().look(a, a - 1).tolist() == [[1.0, 1.0, 1.0]]


@pytest.mark.parametrize(("a", "b", "dtypes"), [
    (-(2**63), 2**63 - 1, ("int64", "int64")),
    (2**64 - 1, 2**64 - 3, ("uint64", "uint64")),
    (-(2**63), 2**64 - 1, ("int64", "uint64")),
    (2**62 + 7, 5, ("int64", "int32")),
])  # fmt: skip
def test_no_difference_wraps_around(a: int, b: int, dtypes: Any) -> None:
    found = exact_difference(np.array([[a]], dtype=dtypes[0]), np.array([[b]], dtype=dtypes[1]))
    assert found is not None
    assert found.tolist() == [[float(b - a)]]


def test_what_doubles_hold_is_left_to_them() -> None:
    small = np.array([[2**53, -(2**53)]], dtype=np.int64)
    assert exact_difference(small, small + 0) is None
    assert exact_difference(small.astype(np.int32), small) is None
    assert exact_difference(small.astype(np.float64), small) is None
