"""A finding that the same log refutes is not told: an evaluation's greedy generation, norms that groups without a
spread explain, a rise in the middle of a run, a clock called after the reward.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from replay_core.diagnose.signal_names import named
from tests.replay_core.diagnose.logs import Metrics, diagnosed, diagnosed_path, only, told, trl, worrying, written

GREEDY = "UserWarning: `do_sample` is set to `False`. However, `temperature` is set to `0.7`.\n"


def test_greedy_generation_beside_groups_that_have_a_spread_is_an_evaluations(tmp_path: Path) -> None:
    assert "L29" not in dict(told(diagnosed(tmp_path, trl([{}] * 12) + GREEDY)))


def test_greedy_generation_of_groups_without_a_spread_is_the_trainings(tmp_path: Path) -> None:
    dead: Metrics = {"reward_std": 0.0, "frac_reward_zero_std": 1.0, "grad_norm": 0.0, "loss": 0.0}
    assert only(diagnosed(tmp_path, GREEDY + trl([dead] * 12)), "L29").severity == "warning"


def test_greedy_generation_behind_the_end_of_training_is_an_evaluations(tmp_path: Path) -> None:
    end = "{'train_runtime': 812.5, 'train_loss': 0.01, 'epoch': 1.0}\n"
    bare: Metrics = {"reward_std": None, "frac_reward_zero_std": None, "rewards/accuracy/std": None}
    assert "L29" not in dict(told(diagnosed(tmp_path, trl([bare] * 4) + end + GREEDY)))
    assert "L29" in dict(told(diagnosed(tmp_path, GREEDY + trl([bare] * 4) + end)))


def _of_single_groups(count: int, seed: int = 5) -> list[Metrics]:
    """Lines of ten updates of one group each: the norm is the last update's, the share of groups the line's mean."""
    rng = random.Random(seed)
    found: list[Metrics] = []
    for _ in range(count):
        hard = rng.choice((0.1, 0.4, 0.6, 0.8))
        dead = [rng.random() < hard for _ in range(10)]
        share = sum(dead) / 10
        found.append({"frac_reward_zero_std": share, "grad_norm": 0.0 if dead[-1] else 0.3, "reward_std": 1 - share,
                      "reward": round(rng.random(), 3), "rewards/accuracy/std": None})  # fmt: skip
    return found


def test_norms_of_0_that_groups_without_a_spread_explain_are_worth_knowing_even_where_those_are_few(
    tmp_path: Path,
) -> None:
    steps = _of_single_groups(160)
    assert any(step["grad_norm"] == 0 and 0 < (step["frac_reward_zero_std"] or 0) < 0.25 for step in steps)
    assert only(diagnosed(tmp_path, trl(steps)), "D23").severity == "info"


def test_norms_of_0_of_lines_in_which_every_group_has_a_spread_are_not_explained(tmp_path: Path) -> None:
    lost: Metrics = {"frac_reward_zero_std": 0.0, "grad_norm": 0.0}
    steps = [lost if n % 2 else step for n, step in enumerate(_of_single_groups(80))]
    assert only(diagnosed(tmp_path, trl(steps)), "D23").severity == "error"


def test_a_largest_advantage_of_0_is_no_lost_gradient(tmp_path: Path) -> None:
    head = "step,actor_pg_loss,actor_grad_norm,critic_advantages_max,critic_advantages_min,frac_zero_std\n"
    rows = "".join(f"{n},0.1,{0.0 if n % 3 else 0.2},{0.0 if n % 3 else 1.2},0.0,0.25\n" for n in range(1, 25))
    assert "D23" not in dict(told(diagnosed_path(written(tmp_path, head + rows, "metrics.csv"))))


def test_groups_that_are_all_wrong_are_not_all_that_have_no_spread() -> None:
    assert named("group_reward_all_zero_rate") is None
    found = named("group_reward_zero_std_rate")
    assert found is not None
    assert found.signal == "frac_zero_std"


@pytest.mark.parametrize(
    ("name", "signal"),
    [("timing_s_reward", "phase_seconds"), ("timing_s_gen", "phase_seconds"), ("timing_s_step", "step_seconds"),
     ("reward_latency_ms", None), ("timing_s_agent_loop_slowest_prompt_length", None)],
)  # fmt: skip
def test_a_clock_is_no_reward_whatever_stands_for_the_slash(name: str, signal: str | None) -> None:
    found = named(name)
    assert (None if found is None else found.signal) == signal


def test_a_norm_that_grows_as_groups_come_to_have_a_spread_does_not_explode(tmp_path: Path) -> None:
    rng = random.Random(1)
    steps: list[Metrics] = []
    for n in range(120):
        share = 1.0 if rng.random() > n / 60 else 0.0
        steps.append({"frac_reward_zero_std": share, "grad_norm": 1e-5 if share else 0.2 + rng.random() / 20,
                      "reward": n / 200, "reward_std": 0.0 if share else 0.3})  # fmt: skip
    assert "L02" not in dict(told(diagnosed(tmp_path, trl(steps))))


def test_a_norm_that_grows_with_a_spread_all_along_explodes(tmp_path: Path) -> None:
    steps: list[Metrics] = [{"grad_norm": 0.2 * 1.04**n} for n in range(120)]
    assert only(diagnosed(tmp_path, trl(steps)), "L02").severity == "warning"


def _levels(*levels: float, each: int = 40) -> list[Metrics]:
    rng = random.Random(2)
    return [{"reward": round(rng.gauss(level, 0.1), 4), "rewards/accuracy/mean": None,
             "completions/clipped_ratio": max(0.0, round(rng.gauss(0.3, 0.02), 3))}
            for level in levels for _ in range(each)]  # fmt: skip


def test_a_reward_that_rose_and_fell_back_is_not_one_that_does_not_rise(tmp_path: Path) -> None:
    found = only(diagnosed(tmp_path, trl(_levels(1.5, 1.5, 2.0, 1.5, 1.5))), "L40")
    assert found.severity == "info"
    assert "the reward rose and fell back: reward is 1.49 in the first third, 2.02 about step 111" in found.claim


def test_a_reward_that_may_rise_by_little_is_worth_knowing(tmp_path: Path) -> None:
    found = only(diagnosed(tmp_path, trl(_levels(1.5, 1.48, 1.52))), "L40")
    assert found.severity == "info"
    assert "rises by little, if at all" in found.claim
    rests = diagnosed(tmp_path, trl(_levels(1.5, 1.48, 1.5)))
    assert any("does not rise" in one.claim for one in worrying(rests))


def test_an_entropy_that_is_low_from_the_first_step_on_has_not_collapsed(tmp_path: Path) -> None:
    found = only(
        diagnosed(tmp_path, trl([{"entropy": 0.042 + n % 3 / 1000, "reward": 0.6 - n / 50} for n in range(20)])), "D25"
    )
    assert "it hardly samples, from the first step on" in found.claim
    assert "nothing has fallen" in found.cause
    fell = only(diagnosed(tmp_path, trl([{"entropy": 0.8 / (n + 1)} for n in range(40)])), "D25")
    assert "it hardly samples any more" in fell.claim


def _never_right(lucky: int) -> str:
    dead: Metrics = {"reward": 0.0, "reward_std": 0.0, "frac_reward_zero_std": 1.0, "grad_norm": 0.0, "loss": 0.0,
                     "rewards/accuracy/mean": 0.0, "rewards/accuracy/std": 0.0, "entropy": 0.042}  # fmt: skip
    once: Metrics = {"reward": 0.008, "reward_std": 0.04, "frac_reward_zero_std": 0.9, "entropy": 0.042}
    return trl([once if n in range(20, 20 + lucky) else dead for n in range(48)])


def test_a_task_that_is_hardly_ever_solved_is_no_policy_that_hardly_samples(tmp_path: Path) -> None:
    found = only(diagnosed(tmp_path, _never_right(2)), "D01")
    assert "hardly samples" not in found.claim
    assert "the task is hardly ever solved" in found.cause
    assert "hardly samples" in only(diagnosed(tmp_path, _never_right(0)), "D01").claim


def test_a_kl_that_grows_as_the_reward_falls_is_named_beside_it(tmp_path: Path) -> None:
    rng = random.Random(3)

    def steps(kl: float) -> str:
        return trl(
            [
                {
                    "reward": 0.5 - max(0, n - 12) / 50 + rng.gauss(0, 0.01),
                    "kl": kl * n,
                    "rewards/accuracy/mean": None,
                    "grad_norm": 0.3 + rng.random() / 10,
                }
                for n in range(30)
            ]
        )

    assert "kl grows from 0.03 to 0.73 with it" in only(diagnosed(tmp_path, steps(0.03)), "L08").claim
    assert "nothing that is logged beside it" in only(diagnosed(tmp_path, steps(0.002)), "L08").claim
