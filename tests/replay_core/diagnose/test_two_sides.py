"""What two sides hold of the same samples: forwards that are random, prompts built twice, groups
under one id, masks that begin late, targets on another scale, references of old log-probabilities.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import (
    GROUPS,
    healthy,
    look,
    masks,
    noise,
    of,
    seen,
    set_advantages,
    set_rewards,
)

Batch = dict[str, Any]


@pytest.mark.parametrize(("random", "found"), [("both", True), ("old", False), ("neither", False)])
def test_two_forwards_of_the_same_weights_that_disagree_are_not_deterministic(
    random: str, found: bool, tmp_path: Path
) -> None:
    fields = healthy()
    truth = fields["rollout_log_probs"]
    fields["old_log_probs"] = truth + noise(fields, 0.3, 1) * (random != "neither")
    fields["log_probs"] = truth + noise(fields, 0.3, 2) * (random == "both")
    finding = of(seen(tmp_path, fields, "D09"), "D09")
    assert (finding is not None and "two forwards of the trainer" in finding.claim) == found


def _recorded(folder: Path, steps: dict[int, Batch], sampled: Batch | None = None) -> Path:
    recorder = Recorder(folder)
    for step, batch in steps.items():
        with recorder.step(step, rank=0) as write:
            if sampled is not None:
                write("trajectory", sampled)
            write("forward_data", batch, micro=0)
    recorder.close()
    return folder


def _batch(seed: int, rows: int = 12, prompt: int = 4, tokens: int = 5) -> Batch:
    """Prompts of their own, each row one more response; log-probabilities beside responses alone."""
    draw = torch.Generator().manual_seed(seed)
    ids_BS = torch.randint(10, 90, (rows, prompt + tokens), generator=draw)
    response_BS = torch.zeros_like(ids_BS)
    response_BS[:, prompt:] = 1
    logp_BT = -3 * torch.rand(rows, prompt + tokens - 1, generator=draw) - 0.1
    return {
        "input_ids": ids_BS, "attention_mask": torch.ones_like(ids_BS), "response_mask": response_BS,
        "log_probs": logp_BT * response_BS[:, 1:], "rollout_log_probs": logp_BT * response_BS[:, 1:],
        "sample_id": torch.arange(rows),
    }  # fmt: skip


@pytest.mark.parametrize(("mine", "words"), [(slice(1, None), "1 token shorter"), (slice(0, None), "")])
def test_prompts_that_alone_differ_are_said_to(mine: slice, words: str, tmp_path: Path) -> None:
    sampled = _batch(3)
    trained = {name: value[:, mine] if value.ndim > 1 else value for name, value in sampled.items()}
    if words:
        trained["log_probs"] = trained["rollout_log_probs"] = sampled["log_probs"][:, 1:]
    finding = of(look(_recorded(tmp_path / "run", {0: trained}, sampled), "D27"), "D27")
    assert (finding is not None) == bool(words)
    assert finding is None or (words in finding.claim and "built twice" in finding.cause)


@pytest.mark.parametrize(("late", "found"), [(1, True), (0, False)])
def test_a_mask_that_leaves_out_the_first_sampled_token_is_late(late: int, found: bool, tmp_path: Path) -> None:
    batch = _batch(5)
    batch["response_mask"][:, : 4 + late] = 0
    finding = of(look(_recorded(tmp_path / "run", {0: batch}), "D48"), "D48")
    assert (finding is not None) == found
    assert finding is None or "shifted by +1" in finding.claim


@pytest.mark.parametrize(
    ("groups", "found"),
    [(GROUPS // 2, True), (GROUPS, False), (np.array([0, 0, 1, 1])[GROUPS] * (np.arange(16) < 12), False)],
    ids=["two prompts each", "one prompt each", "uneven"],
)
def test_whole_groups_under_one_id_are_named(groups: Any, found: bool, tmp_path: Path) -> None:
    fields = healthy()
    fields["uid"] = [f"g{group}" for group in groups]
    finding = of(seen(tmp_path, fields, "D42"), "D42")
    assert (finding is not None and "every group mixes prompts: 2 of them" in finding.claim) == found


@pytest.mark.parametrize(("times", "plus", "found"), [(2.5, -1.0, True), (1.0, 0.0, False)])
def test_value_targets_on_another_scale_than_values_are_named(
    times: float, plus: float, found: bool, tmp_path: Path
) -> None:
    fields = healthy()
    set_rewards(fields, np.random.default_rng(4).random(16))
    set_advantages(fields, np.zeros(16))
    mask_BT = masks(fields)
    values_BT = np.random.default_rng(5).random(mask_BT.shape) * mask_BT
    made_BT = np.zeros(mask_BT.shape)
    for row, inside in enumerate(mask_BT):
        run = following = 0.0
        for at in np.flatnonzero(inside)[::-1]:
            run = fields["token_level_rewards"][row, at] + following - values_BT[row, at] + 0.95 * run
            made_BT[row, at], following = run, values_BT[row, at]
    fields["values"] = values_BT.astype(np.float32)
    fields["returns"] = ((times * (made_BT + values_BT) + plus) * mask_BT).astype(np.float32)
    finding = of(seen(tmp_path, fields, "D44"), "D44")
    assert finding is not None
    assert ("returns are normalised: 2.5 x GAE's -1" in finding.claim) == found, finding.claim


@pytest.mark.parametrize("moves", [True, False])
def test_old_log_probabilities_that_stand_while_the_engines_move_are_stale(moves: bool, tmp_path: Path) -> None:
    steps = {}
    for step in range(4):
        batch = _batch(7)  # the same samples: what one model says of them tells whether it moved
        batch["rollout_log_probs"] = batch["rollout_log_probs"] * (1 + 0.2 * step * moves)
        steps[step] = batch
    finding = of(look(_recorded(tmp_path / "run", steps), "D55"), "D55")
    assert finding is not None
    assert finding.claim.startswith("old log-probabilities are stale") == moves


@pytest.mark.parametrize(("agree", "found"), [(4, False), (0, True), (11, True)], ids=["a third", "none", "nearly all"])
def test_a_batch_recorded_whole_may_hold_later_mini_batches(agree: int, found: bool, tmp_path: Path) -> None:
    batch = _batch(9)
    batch["old_log_probs"] = batch["log_probs"].clone()
    batch["old_log_probs"][agree:] -= 0.3 * batch["response_mask"][agree:, 1:]
    finding = of(look(_recorded(tmp_path / "run", {0: batch}), "D14"), "D14")
    assert (finding is not None) == found


@pytest.mark.parametrize(("back", "found"), [(1, True), (0, False)])
def test_a_reward_before_the_end_is_named_where_a_critic_learns_from_it(back: int, found: bool, tmp_path: Path) -> None:
    fields = healthy()
    mask_BT = masks(fields)
    fields["token_level_scores"] = np.zeros_like(fields["token_level_scores"])
    for row, inside in enumerate(mask_BT):
        fields["token_level_scores"][row, np.flatnonzero(inside)[-1 - back]] = 0.1 + row
    fields["token_level_rewards"] = fields["token_level_scores"].copy()
    fields["values"] = np.random.default_rng(5).random(mask_BT.shape).astype(np.float32) * mask_BT
    finding = of(seen(tmp_path, fields, "D53"), "D53")
    assert (finding is not None and "before the last token" in finding.claim) == found


@pytest.mark.parametrize(("temperature", "found"), [(0.6, True), (1.8, True), (1.0, False)])
def test_a_reference_at_another_temperature_is_told_at_step_one(
    temperature: float, found: bool, tmp_path: Path
) -> None:
    batch = _batch(13, rows=24)
    batch["log_probs"] = -0.05 - 0.15 * batch["log_probs"].abs() * batch["response_mask"][:, 1:]
    # One other token has the rest.
    now_BT, rest_BT = batch["log_probs"] / temperature, torch.log(-torch.expm1(batch["log_probs"])) / temperature
    batch["ref_log_probs"] = now_BT - torch.logaddexp(now_BT, rest_BT)
    finding = of(look(_recorded(tmp_path / "run", {1: batch}), "D15"), "D15")
    assert (finding is not None and "different temperatures" in finding.claim) == found
