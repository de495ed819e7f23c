"""What one trainer does on purpose and another by mistake: said where the dump tells, and no error where it cannot."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.diagnose import forms
from benchmarks.diagnose.trainer import Recipe, Trained, train
from tests.replay_core.diagnose import copying
from tests.replay_core.diagnose.batches import (
    GROUPS,
    causes,
    grpo,
    healthy,
    look,
    masks,
    of,
    rewards,
    seen,
    set_advantages,
    set_rewards,
)

SMALL = {"warm": 0, "steps": 3, "kept": 3, "prompts": 4, "limit": 10}


def trained(**recipe: object) -> Trained:
    return train(Recipe("run", **{**SMALL, **recipe}))  # type: ignore[arg-type]


@pytest.mark.long
def test_a_loss_that_megatrons_schedule_will_divide_is_no_error(tmp_path: Path) -> None:
    path = forms.native(trained(fault="accumulation-forgotten", warm=240), tmp_path / "native")
    one = of(look(path, "D28"), "D28")
    assert one is not None
    assert one.severity == "info"
    assert "times its micro-batches (2)" in one.claim
    assert "a plain loop that accumulates gradients makes them that many times too large" in one.cause


def test_a_factor_that_no_count_of_micro_batches_is_stays_an_error(tmp_path: Path) -> None:
    one = of(look(forms.native(trained(fault="times-world-size"), tmp_path / "native"), "D28"), "D28")
    assert one is not None
    assert one.severity == "error"


def test_cispo_without_a_lower_bound_is_clipped_as_it_states(tmp_path: Path) -> None:
    run = trained(algorithm="cispo", minibatches=2, lr=2e-2, clip_low=0.2, clip_high=3.0)
    for done in run.kept:
        for micro in done.micros:
            here = micro.tensors
            here["token_loss"] = -here["ratio"].clip(max=4.0) * here["advantages"] * here["logprobs"]
    assert any((micro.tensors["ratio"] < 0.7).any() for done in run.kept for micro in done.micros)
    told = look(forms.native(run, tmp_path / "native"), "D50").findings
    assert [one.claim for one in told if "is clipped at" in one.claim] == []


def test_a_clip_range_that_is_not_the_stated_one_is_still_told(tmp_path: Path) -> None:
    run = trained(minibatches=2, lr=2e-2, clip_low=0.1, clip_high=0.1)
    for done in run.kept:
        for micro in done.micros:
            here = micro.tensors
            kept = torch.maximum(
                -here["advantages"] * here["ratio"], -here["advantages"] * here["ratio"].clip(0.7, 1.3)
            )
            here["token_loss"] = kept
    told = look(forms.native(run, tmp_path / "native"), "D50").findings
    assert any("is clipped at 1 - 0.3 and 1 + 0.3" in one.claim for one in told)


def test_responses_that_are_left_out_whole_are_no_prompts(tmp_path: Path) -> None:
    run = trained()
    for done in run.kept:
        cut = done.fields["truncated"].bool()
        cut[::3] = True
        done.fields["mask"] = done.fields["mask"] * ~cut[:, None]
    diagnosis = look(forms.native(run, tmp_path / "native"), "D42", "D07")
    assert of(diagnosis, "D42") is None
    one = of(diagnosis, "D07")
    assert one is not None
    assert "samples have no token in the loss" in one.claim


def test_advantages_that_are_divided_by_their_length_are_called_that(tmp_path: Path) -> None:
    fields = healthy()
    fields["response_mask"][::2, 12:] = 0
    advantages_B = grpo(rewards(fields), GROUPS)
    set_advantages(fields, advantages_B / masks(fields).sum(1))
    one = of(seen(tmp_path, fields, "D04"), "D04")
    assert one is not None
    assert one.claim.startswith("advantages are divided by the length of their response")
    assert one.severity == "info"
    set_advantages(fields, advantages_B)
    whole = of(seen(tmp_path, fields, "D04"), "D04")
    assert whole is not None
    assert whole.severity == "info"


def test_a_reference_at_another_temperature_is_called_that(tmp_path: Path) -> None:
    (one,) = causes(look(copying.run(tmp_path / "run", "reference-tempered"), "D15"))
    assert "policy and reference are at different temperatures" in one.claim
    gain = next(each.value for each in one.evidence if "temperature" in each.name)
    assert isinstance(gain, float)
    assert 0.45 < gain < 0.55


@pytest.mark.parametrize(("apart", "found"), [(0.9, True), (0.3, False)])
def test_another_reference_is_found_where_steps_are_counted_from_1(apart: float, found: bool, tmp_path: Path) -> None:
    run = trained(kl=0.01)
    for done in run.kept:
        draw = np.random.default_rng(0).normal(0, apart, done.fields["ref"].shape)
        done.fields["ref"] = done.fields["ref"] - torch.from_numpy(np.abs(draw)).float() * 1.25
    one = of(look(forms.verl(run, tmp_path / "verl"), "D15"), "D15")
    assert (one is not None) is found
    if one is not None:
        assert "at step 1" in one.claim


@pytest.mark.parametrize("with_them", [True, False])
def test_rejected_responses_that_enter_the_baseline_are_named(with_them: bool, tmp_path: Path) -> None:
    fields, rejected = healthy(), [1, 2, 7, 13]
    rewards_B = np.round(np.random.default_rng(3).random(16), 3)
    set_rewards(fields, rewards_B)
    fields["response_mask"][rejected] = 0
    kept = [sample for sample in range(16) if sample not in rejected]
    advantages_B = grpo(rewards_B, GROUPS)
    if not with_them:
        advantages_B[kept] = grpo(rewards_B[kept], GROUPS[kept])
    set_advantages(fields, advantages_B)
    one = of(seen(tmp_path, fields, "D07"), "D07")
    assert one is not None
    assert one.severity == "warning"
    assert ("still enter their group's mean and std" in one.claim) == with_them
    assert "4 of 16 samples have no token in the loss" in one.claim


def test_every_second_row_without_a_token_is_a_wrong_mask(tmp_path: Path) -> None:
    fields = healthy()
    rewards_B = np.round(np.random.default_rng(3).random(16), 3)
    set_rewards(fields, rewards_B)
    fields["response_mask"][::2] = 0
    set_advantages(fields, grpo(rewards_B, GROUPS))
    one = of(seen(tmp_path, fields, "D07"), "D07")
    assert one is not None
    assert one.claim == "8 of 16 samples have no token in the loss, every 2nd row"
