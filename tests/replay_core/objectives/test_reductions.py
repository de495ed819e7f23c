from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from replay_core.objectives import reductions

_VALUES_BT = np.array([[1.0, 2.0, 3.0], [10.0, 99.0, 99.0]])
_MASK_BT = np.array([[1, 1, 1], [1, 0, 0]])


def test_two_responses_worked_by_hand() -> None:
    assert reductions.masked_sum(_VALUES_BT, _MASK_BT) == 16.0
    assert reductions.token_mean(_VALUES_BT, _MASK_BT) == 4.0, "(1 + 2 + 3 + 10) / 4"
    assert reductions.sequence_mean(_VALUES_BT, _MASK_BT) == 6.0, "(2 + 10) / 2"


@pytest.mark.parametrize("outside", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("reduce", [reductions.masked_sum, reductions.token_mean, reductions.sequence_mean])
def test_what_stands_outside_the_mask_never_counts(reduce, outside: float) -> None:  # type: ignore[no-untyped-def]
    spoiled_BT = np.where(_MASK_BT != 0, _VALUES_BT, outside)
    assert reduce(spoiled_BT, _MASK_BT) == reduce(_VALUES_BT, _MASK_BT)
    assert reduce(torch.from_numpy(spoiled_BT), torch.from_numpy(_MASK_BT)) == reduce(_VALUES_BT, _MASK_BT)


def test_an_empty_mask_gives_zero() -> None:
    for reduce in (reductions.masked_sum, reductions.token_mean, reductions.sequence_mean):
        assert reduce(_VALUES_BT, _MASK_BT * 0) == 0
        assert reduce(torch.from_numpy(_VALUES_BT), torch.from_numpy(_MASK_BT * 0)) == 0


@given(st.lists(st.lists(st.tuples(st.floats(-5, 5), st.booleans()), min_size=4, max_size=4), min_size=1, max_size=6))
def test_numpy_and_torch_give_the_same_numbers(rows: list[list[tuple[float, bool]]]) -> None:
    values_BT = np.array([[cell[0] for cell in row] for row in rows])
    mask_BT = np.array([[cell[1] for cell in row] for row in rows])
    for reduce in (reductions.masked_sum, reductions.token_mean, reductions.sequence_mean):
        from_torch = reduce(torch.from_numpy(values_BT), torch.from_numpy(mask_BT))
        np.testing.assert_allclose(reduce(values_BT, mask_BT), float(from_torch), rtol=1e-12, atol=1e-12)


def test_sums_of_sequences_and_a_constant_denominator() -> None:
    assert reductions.sequence_sum_mean(_VALUES_BT, _MASK_BT) == 8.0, "(1 + 2 + 3 + 10) / 2 responses"
    assert reductions.token_sum_over(_VALUES_BT, _MASK_BT, 32) == 0.5, "16 / 32"
    torch_BT = torch.from_numpy(_VALUES_BT), torch.from_numpy(_MASK_BT)
    assert reductions.sequence_sum_mean(*torch_BT) == 8.0
    assert reductions.token_sum_over(*torch_BT, 32) == 0.5
