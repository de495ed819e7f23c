"""Advantages that are no known variant: the formula that makes them is named. On the genuine healthy batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import (
    GROUPS,
    Fields,
    grpo,
    healthy,
    look,
    masks,
    of,
    seen,
    set_advantages,
    set_rewards,
    why_skipped,
)

REWARDS = np.round(np.random.default_rng(4).random(16), 3)


def made(advantages: Callable[[Any], Any]) -> Fields:
    fields = healthy()
    set_rewards(fields, REWARDS)
    set_advantages(fields, advantages(REWARDS))
    return fields


def by_group(pick: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda r: r - np.concatenate([[pick(group)] * 4 for group in r.reshape(4, 4)])


@pytest.mark.parametrize(
    ("formula", "severity", "words"),
    [
        (by_group(lambda r: r[0]), "warning", "the group's first response"),
        (by_group(lambda r: r[-1]), "warning", "the group's last response"),
        (by_group(np.max), "warning", "the group's best reward"),
        (by_group(lambda r: np.sort(r)[-2]), "warning", "the group's second best reward"),
        (by_group(np.median), "warning", "the group's median reward"),
        (lambda r: r / np.repeat(r.reshape(4, 4).std(1, ddof=1), 4), "warning", "nothing is subtracted"),
        (lambda r: grpo(r.reshape(2, 8).T.reshape(-1), GROUPS), "error", "other samples' rewards"),
        (lambda r: np.abs(grpo(r, GROUPS)), "error", "without their sign"),
        (lambda r: 5 * grpo(r, GROUPS), "warning", "5 times what they should be"),
        (lambda r: np.maximum(grpo(r, GROUPS), 0), "warning", "none is negative"),
        (lambda r: np.clip(grpo(r, GROUPS), -0.6, 0.6), "warning", "cut off at -0.6 and 0.6"),
        (lambda r: 1.3 * grpo(r, GROUPS) + 0.4, "warning", "and moved"),
    ],
    ids=[
        "first",
        "last",
        "best",
        "second",
        "median",
        "no mean",
        "ranks",
        "absolute",
        "times",
        "positive",
        "clamped",
        "moved",
    ],
)
def test_the_formula_that_makes_the_advantages_is_named(
    formula: Callable[[Any], Any], severity: str, words: str, tmp_path: Path
) -> None:
    finding = of(seen(tmp_path, made(formula), "D04"), "D04")
    assert finding is not None
    assert (finding.severity, words in finding.claim) == (severity, True), finding.claim


def test_rewards_less_the_kl_to_the_reference_are_no_mistake(tmp_path: Path) -> None:
    """RLOO and REINFORCE++ take the KL of a response off its reward, and dumps keep the reward as it was."""
    fields = made(lambda r: r)
    draw = np.random.default_rng(2).normal(0, 0.3, fields["old_log_probs"].shape).astype(np.float32)
    fields["ref_log_prob"] = fields["old_log_probs"] + draw * masks(fields)
    shaped = REWARDS - 0.05 * ((fields["old_log_probs"] - fields["ref_log_prob"]) * masks(fields)).sum(1)
    set_advantages(fields, by_group(np.mean)(shaped) * 4 / 3)
    diagnosis = seen(tmp_path, fields, "D04")
    assert of(diagnosis, "D04") is None
    assert "less 0.05 x KL" in why_skipped(diagnosis, "D04")


@pytest.mark.parametrize(("scaled", "severity"), [(False, None), (True, "error")])
def test_a_sum_over_slots_is_dr_grpos_where_its_advantages_are(
    scaled: bool, severity: str | None, tmp_path: Path
) -> None:
    """A run that calls itself GRPO, trains with r - mean and divides by a constant is Dr. GRPO; with r - mean over
    the std it divides by padding.
    """
    draw = np.random.default_rng(6)
    recorder = Recorder(tmp_path / "run", flags={"loss": {"kind": "grpo", "clip_low": 0.2, "clip_high": 0.2}})
    for step in range(3):
        rewards_B = draw.random(8)
        groups_B = np.arange(8) // 4
        a_B = grpo(rewards_B, groups_B) if scaled else rewards_B - rewards_B.reshape(2, 4).mean(1).repeat(4)
        with recorder.step(step) as write:
            for micro in range(2):
                rows = slice(4 * micro, 4 * micro + 4)
                mask_BS = torch.ones(4, 9 + step, dtype=torch.int64)
                for row, length in enumerate(draw.integers(3, 7, 4)):
                    mask_BS[row, 2 + int(length) :] = 0
                response_BS = mask_BS.clone()
                response_BS[:, :2] = 0
                ids_BS = torch.from_numpy(draw.integers(10, 30, mask_BS.shape)) * mask_BS
                a_BT = torch.from_numpy(a_B[rows])[:, None] * response_BS[:, 1:]
                logprobs_BT = -torch.rand(a_BT.shape, generator=torch.Generator().manual_seed(step))
                write("forward_data", input_ids=ids_BS, attention_mask=mask_BS, response_mask=response_BS,
                      rewards=torch.from_numpy(rewards_B[rows]), group_ids=torch.from_numpy(groups_B[rows]),
                      advantages=a_BT, log_probs=logprobs_BT, old_log_probs=logprobs_BT, micro=micro)  # fmt: skip
                write("loss", pg_loss=-a_BT.sum() / (4 * 12), token_loss=-a_BT, micro=micro)
    recorder.close()
    finding = of(look(tmp_path / "run", "D28"), "D28")
    assert (finding.severity if finding is not None and finding.severity != "info" else None) == severity, finding


def test_rounding_that_is_divided_by_a_std_without_an_epsilon_is_named(tmp_path: Path) -> None:
    def noisy(r: Any) -> Any:
        made_B = grpo(r, GROUPS)
        made_B[:4] = [1.5, -0.9, 12.0, -12.6]
        return made_B

    fields = made(noisy)
    rewards = REWARDS.copy()
    rewards[:4] = 0.5
    set_rewards(fields, rewards)
    finding = of(seen(tmp_path, fields, "D04"), "D04")
    assert finding is not None
    assert "without an epsilon" in finding.claim


def test_advantages_of_the_step_before_are_named_and_those_of_their_own_step_are_not(tmp_path: Path) -> None:
    for late in (True, False):
        recorder = Recorder(tmp_path / f"late-{late}")
        draw = np.random.default_rng(8)
        every = [draw.random(8) for _ in range(5)]
        for step in range(1, 5):
            a_B = grpo(every[step - late], np.arange(8) // 4)
            response_BS = torch.ones(8, 7, dtype=torch.int64)
            response_BS[:, :2] = 0
            with recorder.step(step) as write:
                write("forward_data", input_ids=torch.from_numpy(draw.integers(10, 30, (8, 7))),
                      attention_mask=torch.ones(8, 7, dtype=torch.int64), response_mask=response_BS,
                      rewards=torch.from_numpy(every[step]), group_ids=torch.arange(8) // 4,
                      advantages=torch.from_numpy(a_B)[:, None] * response_BS[:, 1:],
                      log_probs=-torch.rand(8, 6, generator=torch.Generator().manual_seed(step)), micro=0)  # fmt: skip
        recorder.close()
        assert (of(look(tmp_path / f"late-{late}", "D76"), "D76") is not None) == late


@pytest.mark.parametrize(("later", "found"), [(1, True), (10, False)])
def test_one_step_with_the_advantages_of_the_one_before_will_do(later: int, found: bool, tmp_path: Path) -> None:
    """Of a dump of single steps two may stand side by side; steps that do not tell nothing."""
    recorder = Recorder(tmp_path / "run")
    draw = np.random.default_rng(8)
    every = {step: draw.random(12) for step in (3, 3 + later, 40, 60)}
    before = every[3]
    for step, rewards_B in every.items():
        response_BS = torch.ones(12, 7, dtype=torch.int64)
        response_BS[:, :2] = 0
        with recorder.step(step) as write:
            write("forward_data", input_ids=torch.from_numpy(draw.integers(10, 30, (12, 7))),
                  attention_mask=torch.ones(12, 7, dtype=torch.int64), response_mask=response_BS,
                  rewards=torch.from_numpy(rewards_B), group_ids=torch.arange(12) // 4,
                  advantages=torch.from_numpy(grpo(before if step == 3 + later else draw.random(12),
                                                   np.arange(12) // 4))[:, None] * response_BS[:, 1:],
                  log_probs=-torch.rand(12, 6, generator=torch.Generator().manual_seed(step)), micro=0)  # fmt: skip
    recorder.close()
    assert (of(look(tmp_path / "run", "D76"), "D76") is not None) == found


@pytest.mark.parametrize("times", [-1.0, -2.0])
def test_a_whole_loss_of_exactly_minus_one_has_its_sign_turned(times: float, tmp_path: Path) -> None:
    """Other terms in it would leave no exact -1 in every micro-batch; another factor may be theirs."""
    recorder = Recorder(tmp_path / "run")
    draw = np.random.default_rng(3)
    for step in range(3):
        with recorder.step(step) as write:
            for micro in range(2):
                response_BS = torch.ones(4, 8, dtype=torch.int64)
                response_BS[:, :2] = 0
                for row, length in enumerate(draw.integers(2, 6, 4)):
                    response_BS[row, 2 + int(length) :] = 0
                a_BT = torch.from_numpy(draw.normal(0, 1, 4))[:, None] * response_BS[:, 1:]
                lp_BT = -torch.rand(4, 7, generator=torch.Generator().manual_seed(step))
                write("forward_data", input_ids=torch.from_numpy(draw.integers(10, 30, (4, 8))),
                      attention_mask=torch.ones(4, 8, dtype=torch.int64), response_mask=response_BS,
                      advantages=a_BT, log_probs=lp_BT, old_log_probs=lp_BT, micro=micro)  # fmt: skip
                write("loss", loss=-times * a_BT.sum() / response_BS.sum(), micro=micro)
    recorder.close()
    finding = of(look(tmp_path / "run", "D28"), "D28")
    assert (finding is not None and finding.severity == "error") == (times == -1.0), finding


@pytest.mark.parametrize("groups", [2, 4])
def test_samples_that_stand_under_two_groups_are_named(groups: int, tmp_path: Path) -> None:
    fields = healthy()
    if groups == 2:
        for name, value in fields.items():
            if isinstance(value, np.ndarray) and len(value) == 16 and name not in ("uid", "group_id"):
                value[8:] = value[:8]
    assert (of(seen(tmp_path, fields, "D75"), "D75") is not None) == (groups == 2)


@pytest.mark.parametrize(
    ("noise", "epsilon", "found"),
    [(2e-6, 1e-6, True), (2e-6, 1e-2, False), (0.0, 1e-6, False), (0.2, 1e-6, False)],
    ids=["taught", "drowned by the epsilon", "none", "a real difference"],
)
def test_noise_that_is_divided_by_its_own_std_is_taught(
    noise: float, epsilon: float, found: bool, tmp_path: Path
) -> None:
    rewards = np.array([1, 0, 0, 1, 1, 1, 1, 1, 0, 1, 0, 0, 1, 1, 0, 1], dtype=np.float64)
    rewards[4:8] += noise * np.array([0.0, 1.0, -1.0, 0.5])
    fields = healthy()
    set_rewards(fields, rewards)
    spread = np.repeat(rewards.reshape(4, 4).std(1, ddof=1), 4)
    set_advantages(fields, (rewards - np.repeat(rewards.reshape(4, 4).mean(1), 4)) / (spread + epsilon))
    told = of(seen(tmp_path, fields, "D04"), "D04")
    assert told is not None
    assert (told.severity == "warning" and "noise in the rewards" in told.claim) is found, told.claim


@pytest.mark.parametrize(
    ("flags", "severity"),
    [
        ({"adv_estimator": "grpo", "norm_adv_by_std_in_grpo": False}, "error"),
        ({"loss_type": "dr_grpo", "scale_rewards": "none"}, "error"),
        ({"adv_estimator": "opo"}, "info"),
        # A loss that is called so says little of the baseline; nor does a run that states none.
        ({"loss_type": "dr_grpo"}, "info"),
        ({}, "info"),
    ],
)
def test_a_baseline_by_length_is_opos_alone(flags: dict[str, Any], severity: str, tmp_path: Path) -> None:
    draw = np.random.default_rng(3)
    lengths, rewards = draw.integers(2, 9, 16), draw.random(16).astype(np.float32)
    mask = (np.arange(8) < lengths[:, None]).astype(np.int64)
    means = (rewards * lengths).reshape(4, 4).sum(1) / lengths.reshape(4, 4).sum(1)
    spread = ((rewards - np.repeat(means, 4))[:, None] * mask).astype(np.float32)
    ids = np.concatenate([np.repeat(draw.integers(10, 90, (4, 3)), 4, axis=0), draw.integers(10, 90, (16, 8))], axis=1)
    attention = np.concatenate([np.ones((16, 3), np.int64), mask], axis=1)
    with Recorder(tmp_path / "d", flags=flags) as recorder, recorder.step(0) as write:
        write("batch_inputs", {"input_ids": ids * attention, "attention_mask": attention, "response_mask": mask,
                               "rewards": rewards, "advantages": spread, "uid": [str(row // 4) for row in range(16)]},
              alignment=dict.fromkeys(("response_mask", "advantages"), "response"))  # fmt: skip
    found = of(look(tmp_path / "d", "D04"), "D04")
    assert found is not None
    assert (found.severity, "weighted by length (OPO)" in found.claim) == (severity, True), found.claim
