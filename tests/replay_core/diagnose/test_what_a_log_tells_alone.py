"""What a log of numbers alone tells, and what it does not: collapses, tossed gradients, zeros and teachers."""

from __future__ import annotations

from pathlib import Path

from tests.replay_core.diagnose.logs import diagnosed, told, trl, verl, worrying


def test_answers_that_were_lost_before_the_second_line_lead_over_entropy(tmp_path: Path) -> None:
    steps = [{"completions/mean_length": 53.0, "entropy": 0.95, "reward": 1.7, "frac_reward_zero_std": 0.3}]
    steps += [
        {"completions/mean_length": 2.5 + n % 3, "completions/max_length": 9.0, "entropy": 0.4 / (n + 1),
         "reward": 2.5 + 0.3 * (n % 2), "frac_reward_zero_std": 0.7 + 0.1 * (n % 3), "grad_norm": 0.4 + 0.1 * (n % 4)}
        for n in range(30)
    ]  # fmt: skip
    found = diagnosed(tmp_path, trl(steps))
    assert told(found)[0] == ("L09", "warning")
    assert "collapses to" in found.findings[0].claim


def test_short_answers_from_the_first_line_on_are_no_collapse(tmp_path: Path) -> None:
    steps = [{"completions/mean_length": 3.0 + n % 2, "reward": 0.3 + 0.01 * n} for n in range(30)]
    assert "L09" not in [id for id, _ in told(diagnosed(tmp_path, trl(steps)))]


def test_a_gradient_that_is_tossed_about_is_more_than_a_spike(tmp_path: Path) -> None:
    steps = [{"grad_norm": 20000.0 * n if n in (9, 11, 13, 15) else 2.0 + 0.3 * (n % 4)} for n in range(40)]
    assert ("L02", "warning") in told(diagnosed(tmp_path, trl(steps)))
    assert ("L02", "warning") not in told(
        diagnosed(tmp_path, trl([{"grad_norm": 60.0 if n in (9, 17) else 2.0 + n % 3} for n in range(40)]))
    )


def test_a_loss_of_0_in_some_steps_of_a_run_that_learns_is_worth_knowing_alone(tmp_path: Path) -> None:
    text = "".join(
        f"[run] {n:3d}/40 | loss={0.0 if n % 2 else -9.5 - n % 3:.4f} | reward={0.3 + 0.015 * n:.3f}\n"
        for n in range(1, 41)
    )
    assert ("L01", "info") in told(diagnosed(tmp_path, text))


def test_a_kl_that_falls_from_its_first_step_on_has_a_teacher(tmp_path: Path) -> None:
    falling = [
        {"actor/kl_loss": 0.56 - 0.004 * n, "actor/ppo_kl": 0.0003, "actor/pg_clipfrac": 0.002} for n in range(30)
    ]
    found = [one for one in diagnosed(tmp_path, verl(falling)).findings if one.id == "D15"]
    assert [one.severity for one in found] == ["info"]
    assert "teacher" in found[0].cause
    growing = [
        {"actor/kl_loss": 0.56 + 0.004 * n, "actor/ppo_kl": 0.0003, "actor/pg_clipfrac": 0.002} for n in range(30)
    ]
    assert ("D15", "warning") in told(diagnosed(tmp_path, verl(growing)))


def test_a_loss_scale_that_is_tried_now_and_then_is_no_fault(tmp_path: Path) -> None:
    line = "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536, reducing to 32768\n"
    early = "".join((line if n in (1, 2, 3, 4, 5, 6, 8, 9, 70) else "") + trl([{}], n) for n in range(1, 121))
    assert "L29" not in [one.id for one in worrying(diagnosed(tmp_path, early))]
    always = "".join((line if n % 4 == 0 else "") + trl([{}], n) for n in range(1, 121))
    assert "L29" in [one.id for one in worrying(diagnosed(tmp_path, always))]
