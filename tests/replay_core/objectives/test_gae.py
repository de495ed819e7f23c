"""Against sums written out by hand, and numpy against torch."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from replay_core.objectives.gae import gae


def test_three_actions_as_the_recursion_writes_them():
    rewards_BT, values_BT = np.array([[0.0, 0.0, 1.0]]), np.array([[0.5, 0.2, 0.4]])
    last = 1.0 - 0.4
    middle = (0.9 * 0.4 - 0.2) + 0.9 * 0.5 * last
    first = (0.9 * 0.2 - 0.5) + 0.9 * 0.5 * middle
    advantages_BT, returns_BT = gae(rewards_BT, values_BT, gamma=0.9, lam=0.5)
    np.testing.assert_allclose(advantages_BT, [[first, middle, last]])
    np.testing.assert_allclose(returns_BT, [[first + 0.5, middle + 0.2, 1.0]])


def test_lambda_one_makes_returns_the_discounted_reward_to_go():
    rewards_BT, values_BT = np.array([[1.0, 2.0, 4.0]]), np.array([[9.0, -3.0, 5.0]])
    _, returns_BT = gae(rewards_BT, values_BT, gamma=0.5, lam=1.0)
    np.testing.assert_allclose(returns_BT, [[1 + 1 + 1, 2 + 2, 4]])


def test_without_a_mask_a_value_in_the_padding_reaches_the_last_token():
    rewards_BT, values_BT = np.array([[0.0, 1.0, 0.0]]), np.array([[0.1, 0.2, 7.0]])
    mask_BT = np.array([[1, 1, 0]])
    as_roll, _ = gae(rewards_BT, values_BT, gamma=1.0, lam=0.95)
    masked, _ = gae(rewards_BT, values_BT, mask_BT, gamma=1.0, lam=0.95)
    assert masked[0, 1] == 1.0 - 0.2
    assert masked[0, 2] == 0.0
    np.testing.assert_allclose(as_roll[0, 1], 1.0 + 7.0 - 0.2 + 0.95 * -7.0)


def test_a_hole_in_the_mask_is_passed_over():
    rewards_BT, values_BT = np.array([[0.0, 0.0, 1.0]]), np.array([[0.5, 99.0, 0.4]])
    advantages_BT, returns_BT = gae(rewards_BT, values_BT, np.array([[1, 0, 1]]), gamma=0.9, lam=0.5)
    last = 1.0 - 0.4
    np.testing.assert_allclose(advantages_BT, [[0.9 * 0.4 - 0.5 + 0.9 * 0.5 * last, 0.0, last]])
    assert returns_BT[0, 1] == 0.0


@given(st.integers(0, 2**31), st.floats(0, 1), st.floats(0, 1))
def test_numpy_and_torch_agree(seed: int, gamma: float, lam: float):
    draw = np.random.default_rng(seed)
    rewards_BT, values_BT = draw.standard_normal((2, 3, 6))
    mask_BT = draw.integers(0, 2, (3, 6))
    for mask in (None, mask_BT):
        ours = gae(rewards_BT, values_BT, mask, gamma=gamma, lam=lam)
        rewards, values = (torch.from_numpy(one) for one in (rewards_BT, values_BT))
        theirs = gae(rewards, values, None if mask is None else torch.from_numpy(mask), gamma=gamma, lam=lam)
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(one, other.numpy(), atol=1e-12)
