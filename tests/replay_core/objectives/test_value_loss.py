"""Value losses against numbers computed by hand, and the three frameworks' means against each other."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from replay_core.objectives import value_loss

VALUES_BT = np.array([[1.0, 2.0, 3.0], [0.0, 5.0, 5.0]])
RETURNS_BT = np.array([[2.0, 2.0, 1.0], [1.0, 0.0, 0.0]])
OLD_BT = np.array([[0.5, 2.0, 1.5], [0.0, 5.0, 5.0]])
MASK_BT = np.array([[1, 1, 1], [1, 0, 0]])


def test_the_clipped_error_is_the_larger_of_the_two():
    plain_BT = value_loss.squared_error(VALUES_BT, RETURNS_BT, OLD_BT)
    np.testing.assert_allclose(plain_BT, [[1, 0, 4], [1, 25, 25]])
    # clip .2: 1.0 may not leave .7, 3.0 not 1.7: (.7 - 2)^2 is more than 1, (1.7 - 1)^2 less than 4
    clipped_BT = value_loss.squared_error(VALUES_BT, RETURNS_BT, OLD_BT, 0.2)
    np.testing.assert_allclose(clipped_BT, [[1.3**2, 0, 4], [1, 25, 25]])


def test_where_clipping_decides_there_is_no_gradient():
    values_BT = torch.tensor(VALUES_BT, requires_grad=True)
    returns_BT, old_BT = torch.tensor(RETURNS_BT), torch.tensor(OLD_BT)
    value_loss.squared_error(values_BT, returns_BT, old_BT, 0.2).sum().backward()
    decides_BT = value_loss.is_clipped(values_BT.detach(), returns_BT, old_BT, 0.2)
    assert decides_BT.tolist() == [[True, False, False], [False, False, False]]
    assert values_BT.grad is not None
    assert values_BT.grad[decides_BT].tolist() == [0.0]


def test_the_three_reductions_by_hand():
    error_BT = value_loss.squared_error(VALUES_BT, RETURNS_BT, OLD_BT)
    assert value_loss.roll(error_BT, MASK_BT) == pytest.approx(0.5 * ((1 + 0 + 4) / 3 + 1) / 2)
    assert value_loss.areal(error_BT, MASK_BT) == pytest.approx((0.5 + 0 + 2 + 0.5) / 4)
    assert value_loss.openrlhf(error_BT, MASK_BT) == pytest.approx(0.5 * (1 + 0 + 4 + 1) / 4)


def test_they_agree_where_all_responses_are_of_one_length():
    error_BT = value_loss.squared_error(VALUES_BT, RETURNS_BT, OLD_BT)
    results = [reduce(error_BT, np.ones_like(MASK_BT)) for reduce in value_loss.REDUCTIONS.values()]
    np.testing.assert_allclose(results, results[0])


@pytest.mark.parametrize("name", value_loss.REDUCTIONS)
def test_nothing_to_count_is_zero_and_a_nan_outside_the_mask_does_not_count(name: str):
    reduce = value_loss.REDUCTIONS[name]
    error_BT = torch.tensor([[1.0, float("nan")]])
    assert float(reduce(error_BT, torch.tensor([[1, 0]]))) == pytest.approx(0.5)
    assert float(reduce(error_BT, torch.zeros(1, 2))) == 0.0
