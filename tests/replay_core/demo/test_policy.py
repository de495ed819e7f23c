from __future__ import annotations

import torch

from replay_core.demo.policy import build_policy, sample, score
from replay_core.demo.task import END, LONGEST_RESPONSE, PAD

_PROMPTS = [[1, 10], [1, 2, 3, 10], [4, 5, 10]]


def test_prompts_are_padded_left_and_responses_right() -> None:
    rollout = sample(build_policy(0), _PROMPTS, torch.Generator().manual_seed(0))
    assert rollout.input_ids_BS.shape == (3, 4 + LONGEST_RESPONSE)
    assert rollout.input_ids_BS[0, :4].tolist() == [PAD, PAD, 1, 10]
    assert rollout.attention_mask_BS[0, :4].tolist() == [0, 0, 1, 1]
    assert not rollout.response_mask_BS[:, :4].any()
    for row in range(3):
        response = rollout.response(row)
        assert END not in response[:-1]
        assert response[-1] == END or len(response) == LONGEST_RESPONSE
        tail = slice(4 + len(response), None)
        assert (rollout.input_ids_BS[row, tail] == PAD).all()
        assert not rollout.attention_mask_BS[row, tail].any()


def test_the_sampler_and_the_scorer_agree_on_the_log_probability_of_what_was_sampled() -> None:
    policy = build_policy(0)
    rollout = sample(policy, _PROMPTS, torch.Generator().manual_seed(0))
    logprobs_BT, entropy_BT = score(policy, rollout.input_ids_BS, rollout.attention_mask_BS)
    mask_BT = rollout.response_mask_BS[:, 1:]
    torch.testing.assert_close(rollout.logprobs_BT, (logprobs_BT * mask_BT).detach(), atol=1e-5, rtol=1e-5)
    assert (entropy_BT[mask_BT == 1] >= 0).all()


def test_building_a_policy_is_repeatable_and_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    first, second = build_policy(3), build_policy(3)
    assert torch.equal(before, torch.get_rng_state())
    for name, weight in first.state_dict().items():
        assert torch.equal(weight, second.state_dict()[name])
