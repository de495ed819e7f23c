from __future__ import annotations

import json
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay_core.export.numbers import clean, number

LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
TREES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4)
)


@given(TREES)
def test_a_cleaned_tree_is_strict_json_and_comes_back(tree: Any):
    assert json.loads(json.dumps(clean(tree), allow_nan=False)) == clean(tree)


@given(st.floats())
def test_a_number_is_itself_or_its_word(value: float):
    said = number(value)
    assert float(said) == value or math.isnan(value)  # type: ignore[arg-type]
    assert isinstance(said, str) == (not math.isfinite(value))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (np.float32("nan"), "nan"),
        (np.float64("-inf"), "-inf"),
        (np.int64(2**62 + 1), 2**62 + 1),
        (np.uint64(2**64 - 1), 2**64 - 1),
        (np.bool_(True), True),
        (ml_dtypes.bfloat16(1.5), 1.5),
        (ml_dtypes.float8_e4m3fn("nan"), "nan"),
        (1 + 2j, "(1+2j)"),
        (np.complex64(1 + 2j), "(1+2j)"),
        (True, True),
        (2**70, 2**70),
    ],
)
def test_numbers_of_every_library(value: Any, said: Any):
    assert number(value) == said
    assert type(number(value)) is type(said)


def test_arrays_and_tuples_become_lists_and_keys_texts():
    assert clean({1: (np.arange(2), np.array([[np.nan]])), None: np.array(3.0)}) == {
        "1": [[0, 1], [["nan"]]],
        "None": 3.0,
    }
