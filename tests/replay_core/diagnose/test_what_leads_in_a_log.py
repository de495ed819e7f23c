"""Logs whose cause stands beside what follows from it: a bonus, a loss scale, a length, a format."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import numpy as np
import pytest

from replay_core.diagnose.leaps import leap_in
from replay_core.diagnose.signals import Point, Series
from tests.replay_core.diagnose.logs import diagnosed, only, trl, verl, worrying


def _openrlhf(**series: list[float]) -> str:
    """Steps as OpenRLHF's trainer prints them."""
    steps = [dict(zip(series, values, strict=True)) for values in zip(*series.values(), strict=True)]
    return "".join(
        f"(PPOTrainer pid=9) 2026-10-04 09:{n:02d}:30.114 | INFO     | openrlhf.trainer.ppo_trainer:fit:388 - "
        f"✨ Global step {n}: {step}\n"
        for n, step in enumerate(steps, 1)
    )


def _wavering(start: float, end: float, steps: int, noise: float, seed: int = 0) -> list[float]:
    values = np.linspace(start, end, steps) + np.random.default_rng(seed).normal(0, noise, steps)
    return [round(float(value), 4) for value in values]


def test_a_loss_that_is_the_entropy_bonus_leads_over_the_reward_that_it_costs(tmp_path: Path) -> None:
    entropy = [0.74, 1.1, 1.5, 1.7, 2.1, *_wavering(2.2, 2.5, 15, 0.01)]
    reward = [0.55, 0.28, 0.12, 0.09, *[0.04] * 4, *[0.0] * 12]
    text = _openrlhf(policy_loss=[-each for each in entropy], entropy_loss=entropy, reward=reward,
                     actor_grad_norm=_wavering(2, 0.5, 20, 0.1))  # fmt: skip
    first = diagnosed(tmp_path, text).findings[0]
    assert first.id == "D25"
    assert "the loss is the entropy bonus" in first.claim


def test_a_reward_that_falls_leads_over_the_groups_without_a_spread_that_follow(tmp_path: Path) -> None:
    reward = [*_wavering(0.5, 0.02, 12, 0.05), *[0.0, 0.0, 0.0, 0.02, 0.0, 0.0, 0.02, 0.0]]
    reward = [max(each, 0.0) for each in reward]
    text = _openrlhf(
        policy_loss=[0.02 * (each > 0) for each in reward], reward=reward,
        group_reward_std=[0.8 * each for each in reward], actor_grad_norm=[0.9 * (each > 0) for each in reward],
        kl=[0.06 * n + 0.004 for n in range(20)],
    )  # fmt: skip
    found = diagnosed(tmp_path, text)
    assert found.findings[0].id == "L08"
    assert only(found, "D01").downstream_of == "L08"
    assert "L01" not in [one.id for one in found.findings]


def test_groups_without_a_spread_are_nothing_where_a_critic_is_trained(tmp_path: Path) -> None:
    """PPO's groups are of one response each."""
    reward = _wavering(0.5, 0.02, 12, 0.05)
    logged = {"policy_loss": [1e-9] * 12, "reward": reward, "group_reward_std": [0.0] * 12,
              "actor_grad_norm": _wavering(1.4, 0.5, 12, 0.1)}  # fmt: skip
    without = diagnosed(tmp_path, _openrlhf(**logged))
    assert "D01" in [one.id for one in without.findings]
    with_critic = diagnosed(tmp_path, _openrlhf(**logged, critic_loss=_wavering(5e-3, 3e-3, 12, 1e-3)))
    assert "D01" not in [one.id for one in with_critic.findings]


def test_gradients_of_a_loss_of_ordinary_size_hold_a_loss_scale(tmp_path: Path) -> None:
    norms = _wavering(6.5e4, 6.6e4, 12, 8e3)
    losses = _wavering(0.02, 0.03, 12, 0.02)
    text = verl([{"actor/grad_norm": norm, "actor/pg_loss": loss, "response_length/mean": 5.0}
                 for norm, loss in zip(norms, losses, strict=True)])  # fmt: skip
    first = diagnosed(tmp_path, text).findings[0]
    assert first.id == "L11"
    assert "the loss scale of fp16, 65536" in first.claim


def test_gradients_of_a_loss_that_is_as_large_are_a_sum(tmp_path: Path) -> None:
    norms, losses = _wavering(6.5e4, 6.6e4, 12, 8e3), _wavering(4e3, -3e3, 12, 900)
    text = verl([{"actor/grad_norm": norm, "actor/pg_loss": loss, "response_length/mean": 5.0}
                 for norm, loss in zip(norms, losses, strict=True)])  # fmt: skip
    assert "fp16" not in " ".join(one.claim for one in diagnosed(tmp_path, text).findings)
    assert "L37" in [one.id for one in diagnosed(tmp_path, text).findings]


def test_responses_of_one_length_in_all_steps_run_to_the_limit(tmp_path: Path) -> None:
    rewards = _wavering(0.2, 0.4, 12, 0.05)
    steps = [{"reward": each, "completions/mean_length": 14.0, "completions/max_length": 14.0,
              "completions/clipped_ratio": 0.44} for each in rewards]  # fmt: skip
    first = diagnosed(tmp_path, trl(steps)).findings[0]
    assert (first.id, first.severity) == ("D20", "warning")
    assert "every response is 14 tokens long in every step" in first.claim


def test_a_share_that_is_cut_among_lengths_that_waver_is_no_more_than_that(tmp_path: Path) -> None:
    rewards, lengths = _wavering(0.2, 0.4, 12, 0.05), _wavering(9, 10, 12, 0.5)
    steps = [{"reward": each, "completions/mean_length": length, "completions/max_length": 14.0,
              "completions/clipped_ratio": 0.44} for each, length in zip(rewards, lengths, strict=True)]  # fmt: skip
    assert worrying(diagnosed(tmp_path, trl(steps))) == []


#: A format that is learnt in two steps, and one that is never.
LEARNT, NEVER = [0.54, 0.67, *[1.0, 0.96, 1.0, 0.92, 1.0, 1.0, 0.96, 1.0] * 3], [0.5, 0.6] * 13
FALLS = [0.54, 0.3, 0.2, 0.25, 0.17, 0.2, 0.04, 0.2, 0.08, 0.0, 0.04, 0.12, *[0.0, 0.04] * 7]


@pytest.mark.parametrize(
    ("form", "right", "leads"),
    [(LEARNT, FALLS, True), (NEVER, FALLS, False), (LEARNT, FALLS[::-1], False), ([1.0] * 26, FALLS, False)],
)
def test_a_format_that_is_learnt_at_once_while_answers_are_lost(
    tmp_path: Path, form: list[float], right: list[float], leads: bool
) -> None:
    steps = [{"rewards/format_reward/mean": a, "rewards/accuracy_reward/mean": b, "reward": a + 0.1 * b,
              "rewards/accuracy/mean": None, "rewards/accuracy/std": None, "entropy": 0.6}
             for a, b in zip(form, right, strict=True)]  # fmt: skip
    ids = [one.id for one in diagnosed(tmp_path, trl(steps)).findings]
    assert ("L12" in ids) == leads
    assert not leads or ids[0] == "L12"


def test_groups_of_one_response_have_no_spread_and_advantages_all_the_same(tmp_path: Path) -> None:
    """A critic's baseline, or the batch's: what is logged of each group's spread tells nothing of advantages."""
    for estimator, silent in (("gae", True), ("reinforce_plus_plus", True), ("grpo", False)):
        folder = tmp_path / estimator
        folder.mkdir()
        lines: list[dict[str, object]] = [{"config": {"adv_estimator": estimator, "rollout_n": 1 if silent else 8}}]
        lines += [{"step": n, "reward": value, "reward_std": 0.0, "grad_norm": 0.9, "loss": 1e-8}
                  for n, value in enumerate(_wavering(0.4, 0.6, 10, 0.05))]  # fmt: skip
        text = "".join(json.dumps(line) + "\n" for line in lines)
        path = folder / "metrics.jsonl"
        path.write_text(text)
        ids = [one.id for one in diagnosed(folder, text).findings]
        assert ("D01" in ids) != silent, (estimator, ids)


def _leaping(after: float, size: int = 36, every: int = 1) -> list[dict[str, float | None]]:
    reward = [*_wavering(0.95, 0.95, size // 2, 0.004), *_wavering(after, after, size // 2, 0.004, 1)]
    reward[3] = after - 0.02  # One step so low before it: no figure breaks off.
    entropy, length = _wavering(0.7, 0.7, size, 0.01, 2), _wavering(200, 200, size, 3, 3)
    names = ("actor/entropy", "response_length/mean", "actor/ppo_kl", "actor/kl_loss")
    return [
        {**dict.fromkeys(names), "critic/score/mean": reward[n], "response_length/mean": length[n],
         "actor/entropy": entropy[n] if n % every == every - 1 else None}
        for n in range(size)
    ]  # fmt: skip


@pytest.mark.parametrize("every", [1, 3, 9])
def test_only_what_was_looked_at_goes_on_as_before(tmp_path: Path, every: int) -> None:
    """Figures that are logged every few steps are compared around the leap; too few of them are not named."""
    found = only(diagnosed(tmp_path, verl(_leaping(0.2, every=every))), "L08")
    assert found.severity == "warning"
    assert "response_length/mean" in found.claim
    assert ("actor/entropy" in found.claim) == (every < 9)


def test_a_leap_that_leaves_most_of_the_reward_is_worth_knowing(tmp_path: Path) -> None:
    found = only(diagnosed(tmp_path, verl(_leaping(0.90))), "L08")
    assert found.severity == "info"


@pytest.mark.parametrize("at", [300, 1203, 1990])
def test_a_leap_in_a_long_series_is_found_in_little_time(at: int) -> None:
    noise = np.random.default_rng(0).normal(0, 0.01, 2000)
    points = tuple(Point(n, float(0.8 - 0.5 * (n >= at) + noise[n])) for n in range(2000))
    began = time.process_time()
    leap = leap_in(Series("reward", "reward", None, "", points))
    assert time.process_time() - began < 2.5
    assert leap is not None
    assert leap.at.step == at


def test_a_reward_that_falls_from_the_first_step_on_suspects_a_sign(tmp_path: Path) -> None:
    draw = random.Random(6)

    def run(falls_from: int) -> list[dict[str, float]]:
        return [{"critic/score/mean": 0.5 - 0.012 * max(0, n - falls_from) + draw.random() / 12} for n in range(40)]

    found = only(diagnosed(tmp_path, verl(run(0))), "L08")
    assert "from the first steps on" in found.claim
    assert "wrong sign" in found.cause
    assert "from the first steps on" not in only(diagnosed(tmp_path, verl(run(18))), "L08").claim


@pytest.mark.parametrize(("bound", "words"), [(1.0, "the loss is a sum"), (1e-6, "max_grad_norm is far too small")])
def test_gradients_far_above_an_ordinary_bound_are_of_a_sum(bound: float, words: str, tmp_path: Path) -> None:
    text = f"max_grad_norm: {bound}\n" + trl([{"grad_norm": 130.0 + n} for n in range(12)])
    found = only(diagnosed(tmp_path, text), "L15")
    assert words in found.cause


@pytest.mark.parametrize(("rate", "severity"), [(1.1e-6, "info"), (2e-6, "warning")])
def test_a_rate_that_is_off_by_little_is_worth_knowing(rate: float, severity: str, tmp_path: Path) -> None:
    text = "learning_rate: 1.0e-06\n" + trl([{"learning_rate": rate}] * 12)
    assert only(diagnosed(tmp_path, text), "D124").severity == severity


def test_an_overflow_that_lines_of_the_loss_scale_tell_of_leads_over_its_gradient(tmp_path: Path) -> None:
    def text(said: bool) -> str:
        lines = _openrlhf(
            policy_loss=_wavering(0.1, 0.05, 12, 0.01), reward=_wavering(0.3, 0.31, 12, 0.02),
            actor_grad_norm=[float("inf")] * 12,
        ).splitlines(keepends=True)  # fmt: skip
        scales = [
            f"[2026-10-04 09:{n:02d}:30,114] [INFO] [loss_scaler.py:183:update_scale] [deepspeed] OVERFLOW! Rank 0 "
            f"Skipping step. Attempted loss scale: {4096 >> n}, reducing to {2048 >> n}\n"
            for n in range(12)
        ]
        return "".join(scale * said + line for scale, line in zip(scales, lines, strict=True))

    every = diagnosed(tmp_path, text(True)).findings
    found = every[0]
    assert (found.id, found.severity) == ("D21", "error")
    assert "fp16 gradients overflow" in found.claim
    assert not any(one.id == "L29" and "overflow" in one.claim for one in every)
    assert "from 4096 to 1" in found.claim
    assert "fp16" not in diagnosed(tmp_path, text(False)).findings[0].claim


@pytest.mark.parametrize("after", [0.05, 0.17])
def test_answers_that_are_lost_as_a_format_is_learnt_early_in_a_long_run(after: float, tmp_path: Path) -> None:
    draw = random.Random(8)
    steps = [
        {
            "rewards/exact_answer/mean": (0.2 if n < 5 else after) * draw.uniform(0.5, 1.5),
            "rewards/tags_format/mean": min(0.05 + 0.16 * n, 0.99) * draw.uniform(0.99, 1.0),
        }
        for n in range(70)
    ]
    steps = [each | {"reward": sum(each.values())} for each in steps]
    found = [one.id for one in worrying(diagnosed(tmp_path, trl(steps)))]
    assert ("L12" in found) is (after < 0.1)


@pytest.mark.parametrize("end", [1.0, 2.4])
@pytest.mark.parametrize("names", [("moe/aux_loss", "moe/max_expert_load"), ("load_balancing_loss", "max_vio")])
def test_a_router_that_gets_unbalanced_is_named(end: float, names: tuple[str, str], tmp_path: Path) -> None:
    losses, loads = _wavering(1.0, end, 30, 0.04, 1), _wavering(1.2, 1.2 * end, 30, 0.05, 2)
    steps = [{names[0]: one, names[1]: other} for one, other in zip(losses, loads, strict=True)]
    found = [one for one in worrying(diagnosed(tmp_path, verl(steps))) if one.id == "L64"]
    assert [one.severity for one in found] == ["warning"] * (end > 1)
    assert all("the router gets unbalanced" in one.claim and names[1] in one.claim for one in found)


@pytest.mark.parametrize(("end", "severity"), [(0.0, []), (0.03, []), (0.2, ["warning"]), (0.4, ["error"])])
def test_responses_that_come_back_aborted_are_told(end: float, severity: list[str], tmp_path: Path) -> None:
    steps = [{"response/aborted_ratio": max(0.0, end * (step - 5) / 24)} for step in range(30)]
    found = [one for one in worrying(diagnosed(tmp_path, verl(steps))) if one.id == "L65"]
    assert [one.severity for one in found] == severity


@pytest.mark.parametrize(("kl", "age", "is_told"), [(0.09, 0.0, True), (-0.06, 0.0, True), (0.004, 0.0, False),
                                                    (0.09, 2.0, False)])  # fmt: skip
def test_a_mismatch_where_no_sample_is_old_is_the_engines(kl: float, age: float, is_told: bool, tmp_path: Path) -> None:
    steps = [
        {"ppo_actor/update/behave_approx_kl/avg": each, "ppo_actor/update/version_stats/sample_staleness/avg": age}
        for each in _wavering(kl, kl, 20, 0.001)
    ]
    found = [one.claim for one in worrying(diagnosed(tmp_path, verl(steps))) if one.id == "D09"]
    assert bool(found) is is_told
    assert all("no sample is old" in claim for claim in found)
