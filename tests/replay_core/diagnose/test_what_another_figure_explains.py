"""Healthy runs whose figures look odd alone: an entropy that falls as the task is learnt, a gap that is the one to the
reference, rates that are printed as 0, shares in percent.
"""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from tests.replay_core.diagnose.logs import Metrics, diagnosed, diagnosed_path, told, trl, verl, worrying


def _learning(early: bool = False, learns: bool = True) -> list[Metrics]:
    rng = random.Random(3)
    return [
        {
            "actor/entropy": 0.07 + 0.95 * math.exp(-n / (2 if early else 18)),
            "critic/score/mean": 0.3 + (0.45 * (1 - math.exp(-n / 25)) if learns else 0.0) + rng.uniform(-0.08, 0.08),
            "actor/grad_norm": 0.3 + rng.uniform(-0.05, 0.05),
        }
        for n in range(100)
    ]


@pytest.mark.parametrize(
    ("early", "learns", "severity"), [(False, True, "info"), (False, False, "warning"), (True, False, "warning")]
)
def test_an_entropy_that_falls_as_the_task_is_learnt_has_not_collapsed(
    early: bool, learns: bool, severity: str, tmp_path: Path
) -> None:
    assert dict(told(diagnosed(tmp_path, verl(_learning(early, learns)))))["D25"] == severity


def test_an_entropy_that_falls_while_a_harder_stage_is_learnt_has_not_collapsed(tmp_path: Path) -> None:
    rng = random.Random(4)
    steps: list[Metrics] = [
        {
            "actor/entropy": 0.07 + 0.6 * math.exp(-n / 25),
            "critic/score/mean": (0.7 + n / 400 if n < 80 else 0.25 + (n - 80) / 130) + rng.uniform(-0.05, 0.05),
            "actor/grad_norm": 0.3 + rng.uniform(-0.05, 0.05),
        }
        for n in range(120)
    ]
    assert dict(told(diagnosed(tmp_path, verl(steps)))).get("D25", "info") == "info"


def _openrlhf(of_engine: bool) -> str:
    lines = []
    for n in range(40):
        kl = 0.008 * n
        of = {"kl": kl, "logprobs_diff": kl * 1.1 if of_engine else kl, "reward": 0.3 + n / 100, "actor_lr": 1e-6}
        lines.append(f"INFO ppo_trainer.py:547] Global step {n + 1}: {of}")
    return "\n".join(lines) + "\n"


def test_a_difference_that_is_the_kl_to_the_reference_is_none_of_the_engine(tmp_path: Path) -> None:
    found = dict(told(diagnosed(tmp_path, _openrlhf(of_engine=False))))
    assert not {"D09", "D12"} & set(found)


def test_another_difference_is_the_engines(tmp_path: Path) -> None:
    assert {"D09", "D12"} & set(dict(told(diagnosed(tmp_path, _openrlhf(of_engine=True)))))


def _panels(rate: str) -> str:
    text = "INFO - grpo_fast.py:1402 - learning_rate=0.0008 num_mini_batches=2\n"
    for n in range(1, 21):
        text += (
            "\u256d" + "\u2500" * 20 + " Metrics " + "\u2500" * 20 + "\u256e\n"
            f"\u2502  objective    verifiable_reward: {0.3 + n / 100:.2f} | kl2_avg: 0.0{n % 5}   \u2502\n"
            f"\u2502  other        training_step: {n} | scores: {0.3 + n / 100:.2f} | lr: {rate}   \u2502\n"
            f"\u2502  policy       clipfrac_avg: 0.0{n % 5 + 1} | entropy_avg: {0.9 - n / 100:.2f}   \u2502\n"
            "\u2570" + "\u2500" * 49 + "\u256f\n"
        )
    return text


def test_a_rate_that_a_panel_rounds_to_0_is_none(tmp_path: Path) -> None:
    assert not {"D14", "L07"} & set(dict(told(diagnosed(tmp_path, _panels("0.00")))))


def test_a_share_that_is_logged_in_percent_is_no_negative_one(tmp_path: Path) -> None:
    steps: list[Metrics] = [{"train/baseline_reward/pct_mixed": 62.5 + n % 3} for n in range(20)]
    assert "L30" not in dict(told(diagnosed(tmp_path, verl(steps))))


_TIME = "slurmstepd: error: *** JOB 51 ON gpu-a04 CANCELLED AT 2026-11-05T04:59:44 DUE TO TIME LIMIT ***\n"


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_job_that_another_goes_on_with_has_not_died(goes_on: bool, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    spoke = "INFO 11-05 04:{:02d}:00 [block_pool.py:378] Successfully reset prefix cache\n"
    first = trl([{}] * 20)
    text = spoke.format(10) + first + spoke.format(59) + _TIME
    (tmp_path / "run" / "slurm-51.out").write_text(text)
    if goes_on:
        more = " Continuing training from global step 20\n" + trl([{}] * 20, first=21)
        (tmp_path / "run" / "slurm-52.out").write_text(more)
    found = diagnosed_path(tmp_path / "run")
    assert dict(told(found))["L06"] == ("info" if goes_on else "error")
    assert not any("without a line" in one.claim for one in found.findings)


def _drawn(more: bool) -> str:
    lines = []
    for n in range(1, 61):
        batches = 2 + n // 10 if more else 2
        lines.append(f"{'=' * 25} Step {n}/60 {'=' * 25}")
        lines += [
            f"Generation sample buffer size: 80 is smaller than train_prompts_size: 128. Processed {k} batches so far "
            "out of 10."
            for k in range(1, batches)
        ]
        took = 20 * (2 + n // 10) + n % 3
        lines += ["\U0001f4ca Training Results:", f"  \u2022 Loss: 0.00{n % 7 + 1}", f"  \u2022 Avg Reward: 0.4{n % 9}",
                  f"  \u2022 Mean Generation Length: 4.1{n % 5}", "\u23f1\ufe0f  Timing:",
                  f"  \u2022 Total step time: {took + 30}.0s", f"  \u2022 generation: {took}.0s (60.0%)"]  # fmt: skip
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("more", [True, False])
def test_steps_that_generate_more_batches_are_longer_by_as_much(more: bool, tmp_path: Path) -> None:
    assert dict(told(diagnosed(tmp_path, _drawn(more))))["D37"] == ("info" if more else "warning")


def test_a_kl_that_wavers_through_0_has_not_started_again(tmp_path: Path) -> None:
    rng = random.Random(6)
    steps: list[Metrics] = [
        {
            "actor/reward_kl_penalty": 0.012 + rng.uniform(-0.004, 0.004),
            "critic/score/mean": 0.4 + rng.uniform(-0.1, 0.1),
        }
        for _ in range(60)
    ]
    steps[40] = {"actor/reward_kl_penalty": 6e-5, "critic/score/mean": 0.4}
    steps[41] = {"actor/reward_kl_penalty": 4e-3, "critic/score/mean": 0.4}
    assert "L24" not in dict(told(diagnosed(tmp_path, verl(steps))))


def test_a_loss_that_is_the_entropy_bonus_has_no_kl_term_beside_it(tmp_path: Path) -> None:
    rng = random.Random(8)
    lines = ["2026-11-18 03:57:11 INFO train.py cfg: algo=grpo lr=0.00128 kl=0.0 ent=0.05"]
    for n in range(1, 80):
        entropy = 1.0 + 1.94 * (1 - math.exp(-n / 12)) + rng.uniform(-0.01, 0.01)
        kl = 3.0 * (1 - math.exp(-n / 14))
        pg = rng.uniform(-0.01, 0.01)
        lines.append(
            f"2026-11-18 03:58:11 INFO step={n} loss={pg - (0.1 + 0.1 * kl) * entropy:.5f} pg_loss={pg:.5f} "
            f"reward={0.27 * math.exp(-n / 5):.4f} entropy={entropy:.4f} kl={kl:.5f} grad_norm=0.4{n % 10} lr=1.280e-03"
        )
    assert worrying(diagnosed(tmp_path, "\n".join(lines) + "\n"))[0].id == "D25"


def test_prompts_of_areals_names_that_stay_to_all_digits_are_the_same(tmp_path: Path) -> None:
    lines = [
        "{'ppo_actor/prompt_len/avg': 5.375, 'ppo_actor/prompt_len/max': 7.0, 'ppo_actor/prompt_len/min': 4.0, "
        f"'rollout/reward': {0.3 + n % 7 / 50 + n / 90:.4f}, 'step': {n}}}"
        for n in range(1, 31)
    ]
    assert dict(told(diagnosed(tmp_path, "\n".join(lines) + "\n")))["L61"] == "warning"


@pytest.mark.parametrize("holds", [True, False])
def test_a_reward_that_falls_in_training_alone_tells_of_the_data(holds: bool, tmp_path: Path) -> None:
    rng = random.Random(9)
    steps: list[Metrics] = []
    for n in range(84):
        reward = (0.3 + n / 100 if n < 40 else 0.24) + rng.uniform(-0.06, 0.06)
        step: dict[str, float | None] = {"critic/score/mean": reward, "actor/entropy": 0.14 + 0.8 * math.exp(-n / 18)}
        step["actor/grad_norm"] = 0.3 + rng.uniform(-0.05, 0.05)
        if n % 7 == 6:
            step["val-core/synthetic/reverse/acc/mean@1"] = min(0.7, 0.4 + n / 100) if holds or n < 40 else 0.3
        steps.append(step)
    found = worrying(diagnosed(tmp_path, verl(steps)))
    assert ("ground truths are others" in found[0].claim) == holds
