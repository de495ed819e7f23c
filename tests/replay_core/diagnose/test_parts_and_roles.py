"""Parts of a reward, the one role of a run, a critic that moves too far, and since when a figure is what it is: each
fault beside its healthy relative.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from replay_core.diagnose.finding import Diagnosis
from replay_core.diagnose.signal_names import named
from tests.replay_core.diagnose.logs import diagnosed, only, told, trl, verl, worrying


def _ids(found: Diagnosis) -> list[str]:
    return [one.id for one in worrying(found)]


# ---- a critic


def _critic(far: float, clipped: float = 0.57, extremes: float | None = None) -> str:
    """extremes: how far the largest and least values lie, where the mean does not."""
    wide = 1.2 * far if extremes is None else extremes
    draw = random.Random(5)
    lines = []
    for n in range(40):
        mean = 0.5 + far * (-1) ** n * (n % 4 == 3) + draw.gauss(0, 0.05)
        lines.append({
            "critic/vf_clipfrac": clipped + draw.gauss(0, 0.01), "critic/values/mean": mean,
            "critic/values/max": mean + 0.3 + wide, "critic/values/min": mean - 0.3 - wide,
            "critic/returns/mean": 0.5 + draw.gauss(0, 0.02), "critic/returns/max": 1.0, "critic/returns/min": 0.0,
            "critic/vf_explained_var": -20.0 - n % 3 if far else -0.2 + 0.01 * n, "critic/vf_loss": 2.0 + draw.random(),
        })  # fmt: skip
    return verl(lines)


def test_a_critic_whose_values_leave_the_returns_is_not_held_still(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, _critic(3.0))
    assert ("D63", "error") in told(found)
    assert "D71" not in [one.id for one in found.findings]


def test_a_critic_that_is_clipped_within_its_returns_is_held_still(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, _critic(0.0))
    assert "D71" in _ids(found)
    assert "D63" not in _ids(found)


def test_a_critic_with_a_few_values_far_off_is_clipped_all_the_same(tmp_path: Path) -> None:
    assert "D71" in _ids(diagnosed(tmp_path, _critic(0.0, extremes=5.0)))


# ---- one role


def _role(tests: list[float], easy: float = 1.0) -> str:
    draw, lines = random.Random(3), [f"step:0 - val/pass@1:{tests[0]} - val/num_tasks:116\n"]
    for n in range(1, 65):
        share = min(1.0, n / 40)
        mean = min(1.0, 0.36 + 0.64 * share + draw.gauss(0, 0.02) * (share < 1))
        done = round(8 * easy * share) / 8
        dead = done == 1
        line = {
            "reward/solver/mean": mean, "reward/solver/std": 0.0 if dead else 0.4, "reward/solver/max": 1.0,
            "batch/solver/fractions/effective": 1 - done, "batch/solver/fractions/too_easy": done,
            "batch/solver/fractions/too_hard": 0.0, "actor/pg_loss": 0.0 if dead else draw.gauss(0, 0.02),
            "actor/grad_norm": 0.0 if dead else 0.4 + draw.gauss(0, 0.02), "actor/entropy": 1.5 - 0.01 * n,
            "actor/lr": 5e-6, "episode/response_tokens": 8 + draw.gauss(0, 0.4),
        }  # fmt: skip
        if n % 8 == 0:
            line["val/pass@1"] = tests[n // 8]
        lines.append(f"step:{n} - " + " - ".join(f"{key}:{value}" for key, value in line.items()) + "\n")
    return "".join(lines)


def test_prompts_that_are_learnt_by_heart_lead_over_steps_without_a_loss(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, _role([0.32, 0.16, 0.14, 0.09, 0.06, 0.08, 0.12, 0.08, 0.13]))
    first = found.findings[0]
    assert (first.id, first.severity) == ("L20", "error")
    assert "learnt by heart" in first.claim
    assert "reward/solver/mean" in first.claim


def test_a_role_whose_validation_rises_has_learnt(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, _role([0.32, 0.38, 0.41, 0.47, 0.5, 0.52, 0.55, 0.57, 0.6], easy=0.5))
    assert _ids(found) == []


@pytest.mark.parametrize("name", ["reward/format/mean", "reward/length_penalty/mean"])
def test_a_part_of_a_reward_is_no_reward_of_one_role(name: str, tmp_path: Path) -> None:
    draw = random.Random(8)
    text = "".join(
        f"step:{n} - {name}:{-0.3 - 0.004 * n if 'penalty' in name else min(1.0, 0.3 + 0.03 * n)} - "
        f"actor/pg_loss:{draw.gauss(0, 0.02)} - actor/grad_norm:{0.4 + draw.gauss(0, 0.02)} - "
        f"actor/entropy:{1.5 - 0.005 * n} - actor/lr:5e-6 - val/pass@1:{0.3 + 0.003 * n + draw.gauss(0, 0.005)}\n"
        for n in range(1, 61)
    )
    assert _ids(diagnosed(tmp_path, text)) == []


@pytest.mark.parametrize(
    ("name", "is_told"),
    [("val/pass@1", True), ("eval/accuracy", True), ("test/refusals/accuracy", True),
     ("val/reward_hacking_rate", False), ("test/score_gap", False),
     ("val/rewards/format_penalty", False), ("val/no_success", False), ("eval_rewards/rejected", False)],
)  # fmt: skip
def test_what_is_better_the_less_it_is_is_not_lost(name: str, is_told: bool, tmp_path: Path) -> None:
    draw, steps = random.Random(8), list[dict[str, float]]()
    for n in range(1, 81):
        steps.append({"critic/score/mean": min(0.97, 0.3 + 0.02 * n) + draw.gauss(0, 0.01)})
        if n % 8 == 1:
            steps[-1][name] = 0.5 if n == 1 else 0.15 + 0.03 * draw.random()
    assert ("L20" in _ids(diagnosed(tmp_path, verl(steps)))) == is_told


def test_rewards_of_several_environments_are_no_reward_of_one_role(tmp_path: Path) -> None:
    lines = [{"reward/math/mean": 0.4 + 0.001 * n, "reward/code/mean": 0.2 + 0.001 * n} for n in range(20)]
    text = "".join(
        f"step:{n} - " + " - ".join(f"{key}:{value}" for key, value in line.items()) + "\n"
        for n, line in enumerate(lines)
    )
    assert "L20" not in _ids(diagnosed(tmp_path, text))


@pytest.mark.parametrize(
    ("name", "signal"),
    [("batch/solver/fractions/too_easy", "solve_all"), ("batch/judge/fractions/too_hard", "solve_none"),
     ("batch/solver/fractions/effective", "frac_zero_std"), ("log_probs/chosen", "pair_logps"),
     ("rollout/log_probs", "policy_logprob")],
)  # fmt: skip
def test_names(name: str, signal: str) -> None:
    found = named(name)
    assert found is not None
    assert found.signal == signal


# ---- a term for length


def _lengths(each: float, *, grows: bool, falls: bool = True, right_is: str = "verifiable_reward") -> str:
    draw, lines = random.Random(8), []
    for n in range(60):
        length = (9 + 27 * min(1.0, n / 12) if grows else 12) + draw.gauss(0, 0.5)
        right = (0.4 if not falls or n < 3 else 0.06 if n < 14 else 0.4 + 0.005 * n) + draw.gauss(0, 0.005)
        lines.append(
            f"{{'episode': {n}, 'training_step': {n}, 'scores': {right + each * length}, "
            f"'val/sequence_lengths': {length}, 'objective/{right_is}': {right}, "
            f"'objective/length_reward': {each * length}, 'loss/policy_avg': {draw.gauss(0, 0.02)}, "
            f"'policy/entropy_avg': {1.8 - 0.01 * n}, 'optim/grad_norm': {0.4 + draw.gauss(0, 0.02)}, 'lr': 3e-06}}\n"
        )
    return "".join(lines)


@pytest.mark.parametrize(("falls", "severity"), [(True, "error"), (False, "warning")])
def test_a_score_that_is_mostly_length(falls: bool, severity: str, tmp_path: Path) -> None:
    found = only(diagnosed(tmp_path, _lengths(0.03, grows=True, falls=falls)), "L57")
    assert found.severity == severity
    assert "objective/length_reward is 0.03 for each token in all 60 steps" in found.claim
    assert ("verifiable_reward falls" in found.claim) == falls


def test_wrong_answers_that_become_fewer_are_no_right_ones_that_fall(tmp_path: Path) -> None:
    found = only(diagnosed(tmp_path, _lengths(0.03, grows=True, right_is="incorrect_reward")), "L57")
    assert found.severity == "warning"


@pytest.mark.parametrize(("each", "grows"), [(0.001, True), (-0.005, True), (0.05, False)])
def test_a_small_term_for_length_a_penalty_and_one_that_is_not_gone_along_with(
    each: float, grows: bool, tmp_path: Path
) -> None:
    found = diagnosed(tmp_path, _lengths(each, grows=grows, falls=False))
    assert "L57" not in _ids(found)


# ---- a cap that is stated, and since when


def _stale(ages: list[float], most: float, stated: str) -> str:
    name = "ppo_actor/update/version_stats/sample_staleness_theta_max"
    steps = [{name: age, "ppo_actor/update/behave_imp_weight/max": most + n % 3} for n, age in enumerate(ages)]
    return f"config: actor.eps_clip=0.2, {stated}\n" + trl(steps)


def test_weights_whose_cap_is_stated_are_cut(tmp_path: Path) -> None:
    ages = [float(n % 2) for n in range(40)]
    assert "L31" in _ids(diagnosed(tmp_path, _stale(ages, 40.0, "rollout.max_head_offpolicyness=2")))
    capped = tmp_path / "capped"
    capped.mkdir()
    assert "L31" not in _ids(diagnosed(capped, _stale(ages, 40.0, "actor.behave_imp_weight_cap=2.0")))


def test_the_age_of_samples_is_told_since_it_is_past_its_bound(tmp_path: Path) -> None:
    ages = [1.0] * 20 + [2.0 + 0.4 * n for n in range(30)]
    found = only(diagnosed(tmp_path, _stale(ages, 1.0, "rollout.max_head_offpolicyness=2")), "D31")
    assert found.steps[0] == 22


def test_calls_that_fail_are_told_since_they_do(tmp_path: Path) -> None:
    steps = [
        {"tools/call_frequency": 1.1, "tools/failure_frequency": (0.03 if n < 20 else 0.98) + 0.001 * (n % 3)}
        for n in range(50)
    ]
    found = only(diagnosed(tmp_path, trl(steps)), "L82")
    assert (found.steps[0], len(found.steps)) == (21, 30)


# ---- a reference that is the policy


def _pairs(slope: float) -> str:
    draw = random.Random(2)
    return "".join(
        f"Step {n} | loss:0.6931471824645996 lr:2e-05 rewards/chosen:0.0 rewards/rejected:0.0 rewards/accuracies:0.0 "
        f"rewards/margins:0.0 log_probs/chosen:{-15 - slope * n + draw.gauss(0, 0.5)} "
        f"log_probs/rejected:{-21 - 2 * slope * n + draw.gauss(0, 0.5)}\n"
        for n in range(1, 61)
    )


@pytest.mark.parametrize(("slope", "words"), [(0.1, "the reference moves with the policy"), (0.0, "nothing is learnt")])
def test_log_probs_tell_whether_a_weight_is_trained(slope: float, words: str, tmp_path: Path) -> None:
    found = only(diagnosed(tmp_path, _pairs(slope)), "D72")
    assert words in found.claim
    assert ("no weight is trained" in found.cause) == (slope == 0)
