from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from replay_core.objectives import policy_loss


def test_the_ratio_is_new_over_old() -> None:
    np.testing.assert_allclose(policy_loss.ratio(np.log(np.array([0.6])), np.log(np.array([0.3]))), [2.0])


def test_the_four_corners_of_clipping_worked_by_hand() -> None:
    ratio_T, advantage_T = np.array([1.5, 1.5, 0.5, 0.5, 1.1]), np.array([1.0, -1.0, 1.0, -1.0, 2.0])
    # Pushed further than allowed: the clipped term. Pulled back: the plain one.
    np.testing.assert_allclose(policy_loss.clipped(ratio_T, advantage_T), [-1.2, 1.5, -0.5, 0.8, -2.2])
    np.testing.assert_array_equal(policy_loss.is_clipped(ratio_T, advantage_T), [True, False, False, True, False])


def test_the_two_clip_ranges_are_separate() -> None:
    ratio_T, advantage_T = np.array([1.5, 0.5]), np.array([1.0, -1.0])
    np.testing.assert_allclose(policy_loss.clipped(ratio_T, advantage_T, clip_low=0.1, clip_high=0.28), [-1.28, 0.9])


def test_the_gradient_is_zero_exactly_where_clipping_decides() -> None:
    logprobs_T = torch.tensor([0.5, 0.5, -0.8, -0.8, 0.05], requires_grad=True)
    advantages_T = torch.tensor([1.0, -1.0, 1.0, -1.0, 2.0])
    ratio_T = policy_loss.ratio(logprobs_T, torch.zeros(5))
    policy_loss.clipped(ratio_T, advantages_T).sum().backward()
    assert logprobs_T.grad is not None
    assert ((logprobs_T.grad == 0) == policy_loss.is_clipped(ratio_T, advantages_T)).all()


@given(st.lists(st.tuples(st.floats(0.01, 5), st.floats(-3, 3)), min_size=1, max_size=20), st.floats(0.01, 0.5))
def test_numpy_and_torch_give_the_same_numbers(rows: list[tuple[float, float]], clip: float) -> None:
    ratio_T, advantage_T = np.array([row[0] for row in rows]), np.array([row[1] for row in rows])
    tensors = torch.from_numpy(ratio_T), torch.from_numpy(advantage_T)
    loss_T = policy_loss.clipped(ratio_T, advantage_T, clip_low=clip, clip_high=clip)
    np.testing.assert_allclose(loss_T, policy_loss.clipped(*tensors, clip_low=clip, clip_high=clip).numpy(), rtol=1e-12)
    assert (loss_T >= -advantage_T * ratio_T).all(), "clipping never makes a token look better"
    np.testing.assert_array_equal(
        policy_loss.is_clipped(ratio_T, advantage_T, clip_low=clip, clip_high=clip),
        policy_loss.is_clipped(*tensors, clip_low=clip, clip_high=clip).numpy(),
    )
