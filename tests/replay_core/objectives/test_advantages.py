from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replay_core.objectives.advantages import (
    best_margin,
    group_centred,
    group_centred_batch_scaled,
    group_centred_over_batch_std,
    group_centred_upweighted,
    group_normalised,
    leave_one_out,
    leave_one_out_normalised,
    length_weighted_centred,
    normalised,
    whitened,
)


def test_a_group_worked_by_hand() -> None:
    # Rewards 1, 2, 3: mean 2, sample std sqrt((1 + 0 + 1) / 2) = 1.
    advantages_B = group_normalised(np.array([1.0, 2.0, 3.0]), np.array([7, 7, 7]), epsilon=0.0)
    np.testing.assert_allclose(advantages_B, [-1.0, 0.0, 1.0])


def test_the_biased_std_divides_by_n() -> None:
    # Population std of 1, 2, 3 is sqrt(2 / 3).
    advantages_B = group_normalised(np.array([1.0, 2.0, 3.0]), np.array([0, 0, 0]), unbiased=False, epsilon=0.0)
    np.testing.assert_allclose(advantages_B, [-math.sqrt(1.5), 0.0, math.sqrt(1.5)])


def test_groups_are_told_apart_by_id_wherever_their_rows_lie() -> None:
    rewards_B, ids_B = np.array([1.0, 10.0, 3.0, 30.0]), np.array([5, -2, 5, -2])
    half = 1 / math.sqrt(2)
    np.testing.assert_allclose(group_normalised(rewards_B, ids_B, epsilon=0.0), [-half, -half, half, half])


@pytest.mark.parametrize("unbiased", [True, False])
def test_equal_rewards_and_lone_responses_have_no_advantage(unbiased: bool) -> None:
    advantages_B = group_normalised(np.array([0.5, 0.5, 3.0]), np.array([0, 0, 1]), unbiased=unbiased)
    np.testing.assert_array_equal(advantages_B, [0.0, 0.0, 0.0])


def test_it_agrees_with_torch_std() -> None:
    rewards_GN = torch.tensor([[0.1, 0.9, 0.4], [1.0, 0.0, 0.0]], dtype=torch.float64)
    expected_GN = (rewards_GN - rewards_GN.mean(1, keepdim=True)) / (rewards_GN.std(1, keepdim=True) + 1e-6)
    torch.testing.assert_close(
        group_normalised(rewards_GN.reshape(-1), torch.tensor([0, 0, 0, 1, 1, 1])).view(2, 3), expected_GN
    )


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(-100, 100, width=32), st.integers(-3, 3)), min_size=1, max_size=40), st.booleans())
def test_numpy_and_torch_give_the_same_numbers(rows: list[tuple[float, int]], unbiased: bool) -> None:
    rewards_B, ids_B = np.array([row[0] for row in rows]), np.array([row[1] for row in rows])
    from_numpy_B = group_normalised(rewards_B, ids_B, unbiased=unbiased)
    from_torch_B = group_normalised(torch.from_numpy(rewards_B), torch.from_numpy(ids_B), unbiased=unbiased)
    assert from_torch_B.dtype == torch.float64
    np.testing.assert_allclose(from_numpy_B, from_torch_B.numpy(), rtol=1e-6, atol=1e-6)
    for group in set(ids_B.tolist()):
        assert abs(from_numpy_B[ids_B == group].sum()) < 1e-6


def test_the_dtype_of_the_rewards_is_kept() -> None:
    assert group_normalised(np.array([1, 2], dtype=np.float32), np.array([0, 0])).dtype == np.float32
    assert group_normalised(torch.tensor([1.0, 2.0]), torch.tensor([0, 0])).dtype == torch.float32


#: Two groups, means 2 and 10; the batch has mean 6.
_REWARDS_B, _GROUPS_B = np.array([1.0, 3.0, 9.0, 11.0]), np.array([0, 0, 1, 1])


def test_dr_grpo_only_centres() -> None:
    np.testing.assert_array_equal(group_centred(_REWARDS_B, _GROUPS_B), [-1, 1, -1, 1])


def test_leave_one_out_subtracts_the_mean_of_the_others() -> None:
    # Of 1, 2, 6: the others' means are 4, 3.5, 1.5.
    advantages_B = leave_one_out(np.array([1.0, 2.0, 6.0]), np.array([0, 0, 0]))
    np.testing.assert_allclose(advantages_B, [-3.0, -1.5, 4.5])


@pytest.mark.parametrize("unbiased", [True, False])
def test_leave_one_out_normalised_divides_by_the_std_of_the_others(unbiased: bool) -> None:
    rewards_B, groups_B = np.array([1.0, 2.0, 6.0, 4.0, 0.5, 0.5, 3.0]), np.array([0, 0, 0, 0, 1, 1, 1])
    expected = []
    for at, (reward, group) in enumerate(zip(rewards_B, groups_B, strict=True)):
        others = np.delete(rewards_B, at)[np.delete(groups_B, at) == group]
        expected.append((reward - others.mean()) / (others.std(ddof=int(unbiased)) + 1e-3))
    found_B = leave_one_out_normalised(rewards_B, groups_B, unbiased=unbiased, epsilon=1e-3)
    np.testing.assert_allclose(found_B, expected, rtol=1e-6)
    assert found_B[-1] == pytest.approx(2500.0)


def test_leave_one_out_leaves_a_group_of_one_its_reward() -> None:
    np.testing.assert_array_equal(leave_one_out(np.array([5.0]), np.array([0])), [5.0])


@pytest.mark.parametrize(("unbiased", "squares"), [(True, 68 / 3), (False, 17)])
def test_the_batch_as_baseline(unbiased: bool, squares: float) -> None:
    # Deviations -5, -3, 3, 5: squares sum to 68.
    advantages_B = normalised(_REWARDS_B, unbiased=unbiased, epsilon=0.0)
    np.testing.assert_allclose(advantages_B, np.array([-5, -3, 3, 5]) / math.sqrt(squares))


@pytest.mark.parametrize(("unbiased", "squares"), [(True, 4 / 3), (False, 1)])
def test_centred_in_the_group_then_scaled_by_the_batch_of_those(unbiased: bool, squares: float) -> None:
    advantages_B = group_centred_batch_scaled(_REWARDS_B, _GROUPS_B, unbiased=unbiased, epsilon=0.0)
    np.testing.assert_allclose(advantages_B, np.array([-1, 1, -1, 1]) / math.sqrt(squares))


@pytest.mark.parametrize(("unbiased", "squares"), [(True, 68 / 3), (False, 17)])
def test_centred_in_the_group_over_the_std_of_all_rewards(unbiased: bool, squares: float) -> None:
    advantages_B = group_centred_over_batch_std(_REWARDS_B, _GROUPS_B, unbiased=unbiased, epsilon=0.0)
    np.testing.assert_allclose(advantages_B, np.array([-1, 1, -1, 1]) / math.sqrt(squares))


def test_an_epsilon_is_added_to_the_std() -> None:
    # Std of 1, 3 over n is 1.
    np.testing.assert_allclose(normalised(np.array([1.0, 3.0]), unbiased=False, epsilon=1.0), [-0.5, 0.5])


def test_the_variants_are_the_same_for_torch() -> None:
    rewards_B, groups_B = torch.from_numpy(_REWARDS_B), torch.from_numpy(_GROUPS_B)
    np.testing.assert_allclose(normalised(rewards_B), normalised(_REWARDS_B))
    for variant in (group_centred, leave_one_out, group_centred_batch_scaled, group_centred_over_batch_std):
        np.testing.assert_allclose(variant(rewards_B, groups_B), variant(_REWARDS_B, _GROUPS_B))


def test_whitening_counts_a_response_as_often_as_it_has_tokens() -> None:
    # Scores 1 (three tokens) and 5 (one token): mean 2, squares 1+1+1+9 = 12, over n - 1 = 3: variance 4.
    scores_B, tokens_B = np.array([1.0, 5.0]), np.array([3.0, 1.0])
    np.testing.assert_allclose(whitened(scores_B, tokens_B, epsilon=0.0), [-0.5, 1.5])
    np.testing.assert_allclose(whitened(scores_B, tokens_B, unbiased=False, epsilon=0.0), np.array([-1, 3]) / 3**0.5)


def test_a_baseline_weighted_by_length() -> None:
    # (3 x 1 + 1 x 5) / 4 = 2; the other group is a lone response: nothing is left of it.
    advantages_B = length_weighted_centred(np.array([1.0, 5.0, 7.0]), np.array([0, 0, 1]), np.array([3.0, 1.0, 2.0]))
    np.testing.assert_allclose(advantages_B, [-1.0, 3.0, 0.0])


def test_gpg_weighs_up_by_the_share_of_rewarded_responses() -> None:
    # Two of four have a reward: twice r - mean.
    rewards_B = np.array([1.0, 0.0, 1.0, 0.0])
    np.testing.assert_allclose(group_centred_upweighted(rewards_B, np.zeros(4)), [1.0, -1.0, 1.0, -1.0])


def test_the_best_of_a_group_has_its_lead_over_the_second() -> None:
    advantages_B = best_margin(np.array([0.2, 0.9, 0.6, 1.0, 1.0, 3.0]), np.array([0, 0, 0, 1, 1, 2]))
    np.testing.assert_allclose(advantages_B, [0.0, 0.3, 0.0, 0.0, 0.0, 0.0], atol=1e-12)
