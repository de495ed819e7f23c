"""Slices as people write them."""

from __future__ import annotations

import pytest

from replay_core.errors import RequestError
from replay_core.measure.window import MAX_VALUES, parse_slices, sliced
from replay_core.records import Inline, TensorRef

MATRIX = TensorRef("m", "int64", (3, 4), Inline(list(range(12))))
RAGGED = TensorRef("r", "int64", (6,), Inline([10, 11, 20, 21, 22, 30]), rows=(2, 3, 1))


def test_spans_of_a_matrix() -> None:
    part = sliced(MATRIX, parse_slices("0:2,:2"))
    assert (part["shape"], part["values"], part["start"]) == ([2, 2], [0, 1, 4, 5], [0, 0])
    assert sliced(MATRIX, parse_slices("-1:"))["values"] == [8, 9, 10, 11]


def test_a_row_of_ragged_rows() -> None:
    part = sliced(RAGGED, parse_slices("1,1:"))
    assert (part["row"], part["start"], part["values"]) == (1, [1], [21, 22])


@pytest.mark.parametrize("text", ["", "a", "1:2:3", "0,0,0", "9,:", "3:2", "1.5"])
def test_a_slice_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(RequestError):
        sliced(MATRIX, parse_slices(text))


def test_no_such_row() -> None:
    with pytest.raises(RequestError, match="no such row"):
        sliced(RAGGED, parse_slices("3,:"))


def test_more_than_a_screenful_is_cut_and_counted() -> None:
    long = TensorRef("l", "bool", (MAX_VALUES + 5,), Inline(b"\1" * (MAX_VALUES + 5)))
    assert sliced(long, parse_slices(":"))["left_out"] == 5
