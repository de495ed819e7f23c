"""A critic beyond what is paid, answers that are learnt and lost, a run that begins anew, weights that begin at random,
a bonus that outweighs, and zeros that are rounded.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from replay_core.diagnose.finding import Diagnosis
from tests.replay_core.diagnose.logs import diagnosed, only, trl, verl


def ids(diagnosis: Diagnosis) -> list[str]:
    return [found.id for found in diagnosis.findings]


def around(value: float, noise: float, rng: random.Random) -> float:
    return round(value + rng.uniform(-noise, noise), 5)


def critic(*, grows: float, reward: float = 0.8) -> str:
    rng = random.Random(5)
    return verl([
        {"critic/score/mean": around(reward, 0.05, rng), "critic/score/max": None, "critic/score/min": None,
         "critic/values/mean": around(0.3 + grows * at, 0.05, rng),
         "critic/returns/mean": around(0.35 + grows * at, 0.05, rng)} for at in range(40)
    ])  # fmt: skip


def test_values_and_returns_that_go_beyond_all_that_is_paid_run_away(tmp_path: Path) -> None:
    found = only(diagnosed(tmp_path, critic(grows=0.2)), "D63")
    assert found.severity == "error"
    assert "the critic runs away" in found.claim


@pytest.mark.parametrize(("grows", "reward"), [(0.01, 0.8), (0.2, 8.0)])
def test_values_and_returns_within_what_is_paid_do_not(tmp_path: Path, grows: float, reward: float) -> None:
    assert "D63" not in ids(diagnosed(tmp_path, critic(grows=grows, reward=reward)))


def answers(right: list[float], form: list[float]) -> str:
    rng = random.Random(7)
    return trl([
        {"rewards/accuracy/mean": around(a, 0.02, rng), "rewards/format/mean": around(b, 0.02, rng),
         "reward": around(b + 0.3 * a, 0.02, rng)} for a, b in zip(right, form, strict=True)
    ])  # fmt: skip


RISE, FALL = [0.45 + 0.005 * at for at in range(60)], [0.75 - 0.012 * at for at in range(40)]


def test_answers_that_were_learnt_and_are_lost_again_while_the_form_goes_on_to_rise_are_told(tmp_path: Path) -> None:
    form = [0.5] * 60 + [0.5 + 0.008 * at for at in range(40)]
    assert "while rewards/accuracy/mean falls" in only(diagnosed(tmp_path, answers(RISE + FALL, form)), "L12").claim


@pytest.mark.parametrize(
    "form", [[0.5] * 100, [0.5 + 0.004 * at for at in range(60)] + [0.74 - 0.004 * at for at in range(40)]]
)
def test_answers_that_are_lost_beside_a_form_that_does_not_gain_are_no_trade(tmp_path: Path, form: list[float]) -> None:
    found = [one for one in diagnosed(tmp_path, answers(RISE + FALL, form)).findings if one.id == "L12"]
    assert all(
        "while rewards/accuracy/mean falls" not in one.claim or "format" not in one.claim.split(" rises")[0]
        for one in found
    )


def begun_anew(*, back: bool) -> str:
    rng = random.Random(9)
    lines = []
    for at in range(100):
        since = at - 50 if back and at >= 50 else at
        lines.append({
            "kl": None, "reward": around(0.35 + 0.35 * min(since, 40) / 40, 0.06, rng),
            "entropy": around(1.62 - 0.2 * min(since, 40) / 40, 0.02, rng),
            "rewards/accuracy/mean": None, "completions/mean_length": around(12, 0.6, rng),
        })  # fmt: skip
    return trl(lines)


@pytest.mark.parametrize("back", [True, False])
def test_reward_and_entropy_that_go_their_first_way_again_tell_of_first_weights(tmp_path: Path, back: bool) -> None:
    assert ("L24" in ids(diagnosed(tmp_path, begun_anew(back=back)))) == back


NEW = "Some weights of LM were not initialized from the model checkpoint at /m and are newly initialized: ['{}']\n"


@pytest.mark.parametrize(("name", "said"), [("lm_head.weight", True), ("score.weight", False)])
def test_a_policy_of_noise_whose_head_was_newly_initialized_begins_at_random(
    tmp_path: Path, name: str, said: bool
) -> None:
    rng = random.Random(2)
    steps = [{"entropy": around(3.45, 0.01, rng), "reward": 0.0, "reward_std": 0.0, "rewards/accuracy/mean": 0.0,
              "completions/clipped_ratio": around(0.45, 0.03, rng)} for _ in range(20)]  # fmt: skip
    found = only(diagnosed(tmp_path, NEW.format(name) + trl(steps)), "D20")
    assert ("begins at random" in found.claim) == said
    assert ("newly initialized" in found.cause) == said


@pytest.mark.parametrize(("bonus", "severity"), [("0.26", "error"), ("0.01", "warning")])
def test_a_bonus_that_no_recipe_has_is_the_cause_of_a_reward_that_is_lost(
    tmp_path: Path, bonus: str, severity: str
) -> None:
    rng = random.Random(4)
    text = trl([
        {"entropy": around(1.6 + 1.0 * min(at, 25) / 25, 0.02, rng), "rewards/accuracy/mean": None,
         "reward": around(max(0.45 - 0.02 * at, 0.02), 0.01, rng)} for at in range(40)
    ])  # fmt: skip
    assert only(diagnosed(tmp_path, f"entropy_coeff={bonus}\n{text}"), "D25").severity == severity


def panels(rates: str) -> str:
    rng = random.Random(6)
    top, end = "\u256d" + "\u2500" * 20 + " Metrics " + "\u2500" * 20 + "\u256e", "\u2570" + "\u2500" * 49 + "\u256f"
    return "".join(
        f"{top}\n\u2502  optim  grad_norm: {0.4 + rng.random() / 9:.2f}  \u2502\n"
        f"\u2502  other  training_step: {at} | scores: {0.3 + at / 100:.2f} | lr: {rates}  \u2502\n"
        f"\u2502  loss   policy_avg: {rng.random() / 9:.2f} | total_avg: {rng.random() / 9:.2f}  \u2502\n{end}\n"
        for at in range(1, 31)
    )


def test_a_rate_of_two_decimals_is_no_rate_of_zero(tmp_path: Path) -> None:
    assert "L07" not in ids(diagnosed(tmp_path, panels("0.00")))


def test_a_loss_of_few_steps_that_is_printed_as_zero_is_a_small_one(tmp_path: Path) -> None:
    rng = random.Random(8)
    lines = (
        f"step {at} | Loss: {0.0 if at == 2 else 0.01 + rng.random() / 50:.4f} "
        f"| Reward: {0.2 + at / 100 + rng.random() / 99:.4f}\n"
        for at in range(1, 31)
    )
    assert "L01" not in ids(diagnosed(tmp_path, "".join(lines)))


def test_losses_of_two_decimals_that_come_to_a_few_hundredths_are_not_known_to_be_zero(tmp_path: Path) -> None:
    assert "D02" not in ids(diagnosed(tmp_path, panels("0.00").replace("avg: 0.1", "avg: -0.0")))


def test_a_phase_that_grows_without_longer_answers_is_named_by_its_own_name(tmp_path: Path) -> None:
    rng = random.Random(1)
    lines = (
        f"[{at:04d}] rew={0.3 + rng.random() / 9:.3f} len={12 + rng.random():.1f}/18 ent=1.5 | t_gen={12 + at}.0s "
        f"t_train=5.5s t_step={19 + at}.0s tok/s=9 mem=24.1G\n" for at in range(1, 61)
    )  # fmt: skip
    assert only(diagnosed(tmp_path, "".join(lines)), "D37").claim.startswith("t_gen grows")
