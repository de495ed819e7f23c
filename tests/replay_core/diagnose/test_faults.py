"""Each fault alone in an otherwise healthy genuine batch: named first, and nothing beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.replay_core.diagnose.batches import (
    END,
    PAD,
    PROMPT,
    Fields,
    causes,
    grpo,
    healthy,
    masks,
    noise,
    rewards,
    seen,
    set_advantages,
    set_rewards,
)

Change = Callable[[Fields], None]
LOGPROBS = ("old_log_probs", "rollout_log_probs", "ref_log_prob")


FAULTS: dict[str, tuple[str, str, Change]] = {}


def fault(id: str, severity: str) -> Callable[[Change], Change]:
    def register(change: Change) -> Change:
        FAULTS[change.__name__] = (id, severity, change)
        return change

    return register


# ---- rewards, groups, advantages


@fault("D01", "error")
def a_constant_judge(batch: Fields) -> None:
    set_rewards(batch, [0.1] * 16)
    set_advantages(batch, [0.0] * 16)


@fault("D03", "error")
def a_reward_of_the_prompt_alone(batch: Fields) -> None:
    set_rewards(batch, np.repeat([0.1, 0.5, 0.7, 1.0], 4))
    set_advantages(batch, [0.0] * 16)


@fault("D04", "error")
def interleaved_groups(batch: Fields) -> None:
    set_advantages(batch, grpo(rewards(batch), np.arange(16) % 4))


@fault("D04", "error")
def a_turned_sign(batch: Fields) -> None:
    set_advantages(batch, -batch["advantages"][:, 0])


@fault("D04", "error")
def advantages_of_other_samples(batch: Fields) -> None:
    set_advantages(batch, np.random.default_rng(0).permutation(batch["advantages"][:, 0]))


@fault("D04", "error")
def advantages_cleared(batch: Fields) -> None:
    set_advantages(batch, [0.0] * 16)


@fault("D04", "warning")
def advantages_scaled_and_moved(batch: Fields) -> None:
    set_advantages(batch, 3.7 * batch["advantages"][:, 0] + 0.2)


@fault("D05", "error")
def uid_unique_per_sample(batch: Fields) -> None:
    batch["uid"] = [f"u{row}" for row in range(16)]
    set_advantages(batch, rewards(batch))


@fault("D05", "error")
def uid_unique_and_nothing_left(batch: Fields) -> None:
    batch["uid"] = [f"u{row}" for row in range(16)]
    set_advantages(batch, [0.0] * 16)


@fault("D06", "error")
def a_lone_response_divided_by_its_own_std(batch: Fields) -> None:
    batch["uid"] = ["a"] * 15 + ["b"]
    set_advantages(batch, grpo(rewards(batch), np.array([0] * 15 + [1])))
    batch["advantages"][15] = np.nan


# ---- tokens and masks


@fault("D07", "error")
def an_empty_mask(batch: Fields) -> None:
    batch["response_mask"][:] = 0


@fault("D07", "error")
def a_mask_cut_to_its_first_token(batch: Fields) -> None:
    batch["response_mask"][:, 1:] = 0


@fault("D07", "warning")
def some_samples_without_a_token(batch: Fields) -> None:
    batch["response_mask"][4:7] = 0


@fault("D18", "error")
def a_mask_of_the_padded_length(batch: Fields) -> None:
    batch["response_mask"][:] = 1


@fault("D18", "error")
def padding_with_values_of_its_own(batch: Fields) -> None:
    batch["response_mask"][:] = 1
    for name in LOGPROBS:
        batch[name] = np.where(batch[name] == 0, np.float32(-5), batch[name])
    batch["advantages"] = np.repeat(batch["advantages"][:, :1], batch["advantages"].shape[1], 1)


@fault("D18", "error")
def both_masks_of_the_padded_length(batch: Fields) -> None:
    batch["response_mask"][:] = 1
    batch["attention_mask"][:, PROMPT:] = 1


@fault("D18", "error")
def no_padding_known_at_all(batch: Fields) -> None:
    batch["response_mask"][:] = 1
    batch["attention_mask"][:] = 1


@fault("D48", "error")
def a_mask_shifted_right(batch: Fields) -> None:
    batch["response_mask"] = np.roll(batch["response_mask"], 1, 1)


@fault("D19", "error")
def a_mask_shifted_left(batch: Fields) -> None:
    batch["response_mask"] = np.roll(batch["response_mask"], -1, 1)
    batch["response_mask"][:, -1] = 0


@fault("D19", "error")
def eos_not_in_mask(batch: Fields) -> None:
    batch["response_mask"] = batch["response_mask"] * (batch["responses"] != END)
    for name in (*LOGPROBS, "advantages", "returns", "entropys"):
        batch[name] = batch[name] * batch["response_mask"]


@fault("D20", "warning")
def every_response_cut_off(batch: Fields) -> None:
    draw = np.random.default_rng(0)
    batch["responses"] = draw.integers(4, 300, (16, 24))
    batch["input_ids"][:, PROMPT:] = batch["responses"]
    batch["attention_mask"][:, PROMPT:] = 1
    batch["position_ids"] = np.clip(np.cumsum(batch["attention_mask"], 1) - 1, 0, None)
    batch["response_mask"][:] = 1
    batch["advantages"] = np.repeat(batch["advantages"][:, :1], 24, 1)
    batch["old_log_probs"] = -draw.random((16, 24)).astype(np.float32) * 4
    batch["rollout_log_probs"] = batch["old_log_probs"] + noise(batch, 0.004)
    batch["ref_log_prob"] = batch["old_log_probs"] + noise(batch, 0.1, 3)


@fault("D20", "error")
def every_response_cut_off_and_worth_nothing(batch: Fields) -> None:
    every_response_cut_off(batch)
    set_rewards(batch, [0.0] * 16)
    set_advantages(batch, [0.0] * 16)


@fault("D26", "error")
def exclamation_marks(batch: Fields) -> None:
    batch["responses"] = np.where(masks(batch), 0, PAD)
    batch["input_ids"][:, PROMPT:] = batch["responses"]


# ---- packing


@fault("D17", "error")
def positions_that_begin_again_inside(batch: Fields) -> None:
    batch["position_ids"][:, 25:] -= 5


@fault("D17", "warning")
def positions_that_count_padding(batch: Fields) -> None:
    batch["position_ids"] = np.tile(np.arange(44), (16, 1))


@fault("D16", "error")
def a_leak_in_packs_of_three(batch: Fields) -> None:
    moved = noise(batch, 0.3)
    moved[::3] = 0
    batch["old_log_probs"] = batch["old_log_probs"] + moved


@fault("D16", "error")
def a_leak_in_rows_filled_to_one_length(batch: Fields) -> None:
    lengths, starts, filled = batch["attention_mask"].sum(1), [0], 0
    for row, length in enumerate(lengths):
        if filled + length > 100:
            starts.append(row)
            filled = 0
        filled += length
    moved = noise(batch, 0.3)
    moved[starts] = 0
    batch["old_log_probs"] = batch["old_log_probs"] + moved


@fault("D16", "error")
def a_leak_in_one_row_for_all(batch: Fields) -> None:
    moved = noise(batch, 0.3)
    moved[0] = 0
    batch["old_log_probs"] = batch["old_log_probs"] + moved


# ---- rollout against trainer


@fault("D08", "error")
def rollout_one_late(batch: Fields) -> None:
    batch["rollout_log_probs"] = np.roll(batch["rollout_log_probs"], 1, 1)


@fault("D08", "error")
def rollout_one_early(batch: Fields) -> None:
    batch["rollout_log_probs"] = np.roll(batch["rollout_log_probs"], -1, 1) * masks(batch)


@fault("D08", "error")
def trainer_one_late(batch: Fields) -> None:
    batch["old_log_probs"] = np.roll(batch["old_log_probs"], 1, 1) * masks(batch)


@fault("D09", "warning")
def a_noisy_engine(batch: Fields) -> None:
    batch["old_log_probs"] = batch["old_log_probs"] + noise(batch, 0.08)


@fault("D09", "error")
def a_very_noisy_engine(batch: Fields) -> None:
    batch["old_log_probs"] = batch["old_log_probs"] + noise(batch, 0.4)


@fault("D09", "error")
def another_model(batch: Fields) -> None:
    draw = np.random.default_rng(0).random((16, 24))
    batch["rollout_log_probs"] = (-6 * draw * masks(batch)).astype(np.float32)


@fault("D10", "error")
def a_hotter_engine(batch: Fields) -> None:
    batch["rollout_log_probs"] = (batch["old_log_probs"] * 0.6 - 0.4) * masks(batch) + noise(batch, 0.1)


@fault("D10", "error")
def a_slightly_colder_engine(batch: Fields) -> None:
    batch["rollout_log_probs"] = (batch["old_log_probs"] * 1.2 + 0.3) * masks(batch) + noise(batch, 0.05)


@fault("D11", "warning")
def top_p_renormalised(batch: Fields) -> None:
    kept = np.random.default_rng(0).uniform(0.8, 0.97, batch["old_log_probs"].shape)
    batch["rollout_log_probs"] = ((batch["old_log_probs"] - np.log(kept)) * masks(batch) + noise(batch, 0.004)).astype(
        np.float32
    )


@fault("D12", "error")
def an_engine_with_the_initial_weights(batch: Fields) -> None:
    batch["rollout_log_probs"] = batch["ref_log_prob"] + noise(batch, 0.005)


@fault("D31", "warning")
def samples_of_twenty_updates_ago(batch: Fields) -> None:
    batch["weight_version"] = np.array([0] * 8 + [20] * 8)


# ---- policy, reference, ratio


@fault("D14", "warning")
def another_forward_for_the_ratio(batch: Fields) -> None:
    batch["log_probs"] = batch["old_log_probs"] + noise(batch, 0.05)


@fault("D14", "error")
def dropout_in_the_update(batch: Fields) -> None:
    batch["log_probs"] = batch["old_log_probs"] + noise(batch, 0.5)


@fault("D29", "error")
def k3_with_its_arguments_swapped(batch: Fields) -> None:
    moved = batch["old_log_probs"] - batch["ref_log_prob"]
    batch["kl"] = (np.expm1(moved) - moved) * masks(batch)


@fault("D30", "error")
def a_layer_without_routing(batch: Fields) -> None:
    experts = np.random.default_rng(0).integers(0, 8, (16, 44, 3, 2))
    experts[:, :, 1] = 0
    batch["routed_experts"] = experts


# ---- numbers that are none


@fault("D21", "error")
def a_nan_reward(batch: Fields) -> None:
    batch["token_level_scores"][3, 2] = np.nan


@fault("D21", "error")
def a_nan_in_the_rollout(batch: Fields) -> None:
    batch["rollout_log_probs"][7, 1] = np.nan


@fault("D21", "error")
def an_infinite_advantage(batch: Fields) -> None:
    batch["advantages"][7, 1] = np.inf


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_first_and_alone(name: str, tmp_path: Path) -> None:
    id, severity, change = FAULTS[name]
    batch = healthy()
    change(batch)
    found = causes(seen(tmp_path, batch))
    assert [(one.id, one.severity) for one in found] == [(id, severity)], [one.claim for one in found]
    assert found[0].claim
    assert found[0].cause
    assert found[0].next_step.startswith("rldbg ")
    assert found[0].evidence
