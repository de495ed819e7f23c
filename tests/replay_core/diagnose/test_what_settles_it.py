"""What is told of a run where two figures go together, and what settles of what they are made."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from replay_core.diagnose import trends
from tests.replay_core.diagnose.batches import of
from tests.replay_core.diagnose.logs import HEALTHY_TRL, diagnosed, trl, verl

N = 48


def _hacked(weight: float = 1.0, parts: bool = True) -> str:
    """A part that is paid most grows in the first steps, and answers are lost; then both rest."""
    steps = []
    for at in range(N):
        right = max(0.0, 0.12 - 0.01 * at) + (0.004 if at % 5 == 0 and at < 20 else 0.0)
        other = min(1.5, 0.5 + 0.08 * at) - 0.001 * (at % 3)
        steps.append({
            "reward": other + weight * right, "entropy": 0.3, "kl": None, "rewards/accuracy/mean": right,
            "rewards/accuracy/std": None, **({"rewards/reasoning_steps/mean": other} if parts else {}),
        })  # fmt: skip
    return trl(steps)


def test_parts_that_add_up_exclude_a_turned_sign_and_the_one_that_is_paid_for_is_named(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, _hacked())
    assert of(found, "L32") is None
    leads = of(found, "L12")
    assert leads is not None
    assert "rewards/reasoning_steps/mean is what is paid for" in leads.claim
    assert "rewards/reasoning_steps/mean" in leads.cause


def _turned(sign: float, wavers: float = 0.05) -> str:
    draw = random.Random(4)
    right = [0.5 - 0.004 * at + wavers * draw.gauss(0, 1) for at in range(N)]
    form = [0.2 + 0.01 * draw.random() for _ in right]
    return trl([
        {"reward": sign * a + b, "rewards/accuracy/mean": a, "rewards/format/mean": b, "rewards/accuracy/std": None}
        for a, b in zip(right, form, strict=True)
    ])  # fmt: skip


def test_a_part_with_a_negative_weight_is_a_turned_sign(tmp_path: Path) -> None:
    found = of(diagnosed(tmp_path, _turned(-1.0)), "L32")
    assert found is not None
    assert "sign is turned" in found.claim
    (tmp_path / "right").mkdir()
    assert of(diagnosed(tmp_path / "right", _turned(1.0)), "L32") is None


def test_a_correlation_of_a_few_large_changes_tells_nothing(tmp_path: Path) -> None:
    """Without its parts: the first six steps move far against each other, the others by chance, or not at all."""
    draw = random.Random(9)
    steps = []
    for at in range(N):
        right = max(0.02, 0.62 - 0.1 * at) + (0.01 * draw.gauss(0, 1) if at < 18 else 0.0)
        steps.append({"reward": min(1.5, 0.5 + 0.17 * at) + 0.01 * draw.gauss(0, 1), "rewards/accuracy/mean": right,
                      "rewards/accuracy/std": None})  # fmt: skip
    assert of(diagnosed(tmp_path, trl(steps)), "L32") is None


def test_groups_whose_answers_are_lost_are_not_too_easy(tmp_path: Path) -> None:
    def text(end: float) -> str:
        return trl([
            {"reward": 0.4 + 0.02 * at, "frac_reward_zero_std": min(1.0, 0.1 + 0.05 * at), "rewards/accuracy/std": None,
             "rewards/accuracy/mean": 0.4 + (end - 0.4) * at / N, "reward_std": 0.01}
            for at in range(N)
        ])  # fmt: skip

    found = of(diagnosed(tmp_path, text(0.0)), "D74")
    assert found is not None
    assert "too easy by now" not in found.cause
    (tmp_path / "learns").mkdir()
    found = of(diagnosed(tmp_path / "learns", text(0.9)), "D74")
    assert found is not None
    assert found.severity == "info"
    assert "too easy by now" in found.cause


MEGATRON = (
    " [2026-01-12 01:{at:02}:11] iteration {at:8}/    5000 | elapsed time per iteration (ms): 4200.1 | "
    "learning rate: 3.0E-05 | lm loss: 2.5E+00 | loss scale: {scale:.1f} | grad norm: 0.9 | "
    "number of skipped iterations: {skipped:3} | number of nan iterations:   0 |\n"
)


def _megatron(fails_from: int) -> str:
    scale, text = 2.0**32, ""
    for at in range(1, 60):
        skipped = at <= 5 or at >= fails_from
        scale = max(1.0, scale / 2) if skipped else scale
        text += MEGATRON.format(at=at, scale=scale, skipped=int(skipped))
    return text


def test_steps_that_are_skipped_are_told_since_that_lasts(tmp_path: Path) -> None:
    found = of(diagnosed(tmp_path, _megatron(22)), "L84")
    assert found is not None
    assert found.steps[0] == 22
    assert "38 of the 38 lines from step 22 on" in found.claim
    assert "from 1.342e+08 to 1" in found.claim
    (tmp_path / "settles").mkdir()
    assert of(diagnosed(tmp_path / "settles", _megatron(99)), "L84") is None


def test_logged_steps_without_numbers_are_no_run_that_ends_before_its_first(tmp_path: Path) -> None:
    begins = "   \\\\   /|    Num examples = 7,473 | Num Epochs = 1 | Total steps = 24\n"
    lines = "".join(f"{dict(HEALTHY_TRL)}\n" for _ in range(24))
    assert of(diagnosed(tmp_path, begins + lines), "L42") is None
    (tmp_path / "before").mkdir()
    found = of(diagnosed(tmp_path / "before", begins), "L42")
    assert found is not None
    assert "before the first step of 24" in found.claim


AREAL = """\
(AReaL) 20260608-{clock} StatsLogger INFO: Epoch 1/1 Step {n}/28 Train step {n}/28 done.
╒════════════════════════════╤═════════════╤════════════════════════╤═════════════╕
│ ppo_actor/update/grad_norm │  2.1704e-01 │ rollout/reward         │  2.7083e-01 │
├────────────────────────────┼─────────────┼────────────────────────┼─────────────┤
│ eval-rollout/reward        │  5.2000e-01 │                        │             │
╘════════════════════════════╧═════════════╧════════════════════════╧═════════════╛
"""
TIMES_OUT = """\
(AReaL) 20260608-07:12:31.747 WorkflowExecutor INFO: Finish and accept rollout. Submit: 408.
(AReaL) 20260608-{clock} Platform ERROR: Traceback (most recent call last):
  File "/workspace/areal/core/workflow_executor.py", line 1034, in wait
    raise TimeoutError(
TimeoutError: Timed out waiting for 12 rollouts, only received 10.
"""


@pytest.mark.parametrize(("clock", "silent"), [("09:12:31.747", "2 hours"), ("07:12:33.747", None)])
def test_the_silence_before_an_end_is_told(clock: str, silent: str | None, tmp_path: Path) -> None:
    text = "".join(AREAL.format(clock=f"07:12:{2 * n:02}.003", n=n) for n in range(1, 13))
    found = of(diagnosed(tmp_path, text + TIMES_OUT.format(clock=clock)), "L06")
    assert found is not None
    assert "after step 12" in found.claim
    assert (silent is not None) == ("without a line" in found.claim)
    assert silent is None or f"after {silent} without a line" in found.claim


@pytest.mark.parametrize("size", [1, 8])
def test_raw_advantages_of_stated_groups_are_of_groups_that_are_broken(size: int, tmp_path: Path) -> None:
    states = f"(TaskRunner pid=1) {{'actor_rollout_ref': {{'rollout': {{'n': {size}, 'name': 'vllm'}}}},\n" \
             "(TaskRunner pid=1)  'algorithm': {'adv_estimator': 'grpo'}}\n"  # fmt: skip
    steps = verl([{"critic/advantages/max": 1.0, "critic/advantages/min": 0.0} for _ in range(12)])
    found = of(diagnosed(tmp_path, states + steps), "D04")
    assert found is not None
    assert found.severity == "error"
    assert ("although groups of 8 responses are stated" in found.cause) == (size > 1)


@pytest.mark.parametrize("end", [0.001, 0.6])
def test_an_entropy_that_is_used_up_before_the_reward_is_lost_is_told_first(end: float, tmp_path: Path) -> None:
    steps = [
        {"actor/entropy": max(end, 0.6 - 0.1 * at), "critic/score/mean": max(0.0, 0.5 - 0.06 * at) if at > 2 else 0.5,
         "response_length/clip_ratio": min(1.0, 0.14 * at)}
        for at in range(N)
    ]  # fmt: skip
    found = of(diagnosed(tmp_path, verl(steps)), "L08")
    assert found is not None
    assert found.claim.startswith("the entropy collapses") == (end < 0.1)
    assert ("an entropy bonus that outweighs the rest" in found.cause) == (end > 0.1)


@pytest.mark.parametrize("stops", [True, False])
def test_a_sync_that_takes_no_time_is_evidence_of_old_weights(stops: bool, tmp_path: Path) -> None:
    draw, text = random.Random(2), ""
    for at in range(N):
        apart = 0.0005 + 0.05 * max(0, at - 12) + 1e-4 * draw.random()
        text += verl([{"training/rollout_actor_probs_pearson_corr": None, "actor/lr": 1e-6, "rollout_corr/k3_kl": None,
                       "training/rollout_probs_diff_mean": apart}], first=at)  # fmt: skip
        seconds = 0.0 if stops and at >= 12 else 1.5
        text += f"(Actor pid=1) timer.py:32 - Timer update_weights end (elapsed time: {seconds}s)\n"
    found = of(diagnosed(tmp_path, text), "D12")
    assert found is not None
    assert ("their sync takes no time" in found.cause) == stops
    assert any(one.name == "seconds that update_weights takes" for one in found.evidence) == stops


def test_steps_in_which_both_rest_do_not_go_together() -> None:
    rests, other = [5.0, 3.0, 4.0, *[0.0] * 20], [3.0, 5.0, 4.0, *[1.0] * 10, 2.0, *[1.0] * 9]
    assert abs(trends.together(rests, other)) < 0.9
    assert trends.together([1.0] * 20, [2.0] * 20) == 0
    assert trends.together([float(at) for at in range(20)], [float(-at) for at in range(20)]) == pytest.approx(-1)
