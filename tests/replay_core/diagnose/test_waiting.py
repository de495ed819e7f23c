"""Logs that go no further, and figures that break from one step to the next."""

from __future__ import annotations

from pathlib import Path

import pytest

from replay_core.diagnose.finding import Finding
from tests.replay_core.diagnose.logs import diagnosed, trl, verl

STEP = "14:17:26 SUCCESS Step 9 | Time: 31.20s | Loss: 0.0021 | Entropy: 0.3421 | Grad. Norm: 0.0821 | LR: 1.00e-06\n"


def first(folder: Path, text: str) -> Finding:
    return next(one for one in diagnosed(folder, text).findings if one.severity != "info")


def ids(folder: Path, text: str) -> list[str]:
    return [one.id for one in diagnosed(folder, text).findings if one.severity != "info"]


def waiting(minutes: int, lines: int) -> str:
    return "".join(
        f"{14 + n * minutes // 60}:{20 + n * minutes % 60 % 40:02d}:51 INFO Waiting for new policy...\n"
        for n in range(lines)
    )


def test_hours_of_waiting_after_the_last_step(tmp_path: Path) -> None:
    found = first(tmp_path, STEP + waiting(40, 8))
    assert found.id == "L26"
    assert "8 lines" in found.claim


def test_waiting_between_steps_is_how_runs_work(tmp_path: Path) -> None:
    assert ids(tmp_path, (waiting(40, 8) + STEP) * 2) == []
    assert ids(tmp_path, STEP + waiting(1, 4)) == []


def test_weights_that_are_not_a_number_come_before_what_they_write(tmp_path: Path) -> None:
    bad = {"kl": float("nan"), "entropy": float("nan"), "grad_norm": float("nan"), "reward": 0.0, "reward_std": 0.0,
           "completions/clipped_ratio": 1.0}  # fmt: skip
    found = first(tmp_path, trl([{}, {}, *[bad] * 4]).replace("nan", "nan"))
    assert found.id == "D21"


def test_a_mismatch_that_leaps_is_told_from_where_it_does(tmp_path: Path) -> None:
    steps = [{"sampling/sampling_logp_difference/mean": 0.012}] * 6
    found = first(tmp_path, trl([*steps, *[{"sampling/sampling_logp_difference/mean": 2.7}] * 2, *steps[:2]]))
    assert found.id == "D09"
    assert "from step 7 on" in found.claim


def test_a_gradient_that_does_not_come_back(tmp_path: Path) -> None:
    norms = [0.31, 0.33, 0.35, 0.3, 0.32, 0.34, 0.31, 48.0, 311.0, 88.0, 12.0]
    found = first(tmp_path, verl([{"actor/grad_norm": norm} for norm in norms]))
    assert found.id == "L02"
    assert "does not come back" in found.claim
    assert ids(tmp_path, verl([{"actor/grad_norm": norm} for norm in [*norms, 0.33, 0.31]])) == []


def test_a_kl_that_falls_to_nothing_is_a_restart(tmp_path: Path) -> None:
    kl = [0.0, 0.09, 0.27, 0.18, 0.16, 0.25, 0.31, 0.38, 0.28, 0.32, 0.23, 0.28, 0.0, 0.008, 0.018, 0.029]
    entropy = [0.76, 0.67, 0.68, 0.63, 0.57, 0.52, 0.51, 0.5, 0.46, 0.44, 0.49, 0.41, 0.75, 0.75, 0.73, 0.72]
    steps = [{"kl": a, "entropy": b} for a, b in zip(kl, entropy, strict=True)]
    assert first(tmp_path, trl(steps)).id == "L24"
    moved = [{"kl": a, "entropy": 0.6 - n / 100} for n, a in enumerate(kl)]
    assert "L24" not in ids(tmp_path, trl(moved))  # a new reference takes the KL back, and nothing else


def test_a_short_run_whose_kl_is_0_again_in_the_middle(tmp_path: Path) -> None:
    kl, entropy = [0.0, 0.012, 0.044, 0.06, 0.0, 0.008, 0.016], [1.33, 1.29, 1.22, 1.19, 1.4, 1.31, 1.3]
    lengths = [310.0, 300.0, 280.0, 270.0, 311.0, 308.0, 300.0]
    steps = [
        {"kl": a, "entropy": b, "completions/mean_length": c} for a, b, c in zip(kl, entropy, lengths, strict=True)
    ]
    found = first(tmp_path, trl(steps))
    assert found.id == "L24"
    assert "the policy is its reference again at step 5" in found.claim
    # What the policy does goes on: its reference is a new one.
    goes_on = [{"kl": a, "entropy": 0.6 - n / 50, "completions/mean_length": 300.0 - n} for n, a in enumerate(kl)]
    assert "L24" not in ids(tmp_path, trl(goes_on))
    # A step without a sample that counts has no KL, and the next one has what it had.
    assert "L24" not in ids(tmp_path, trl([{**one, "kl": 0.05 * (n not in (0, 4))} for n, one in enumerate(steps)]))


@pytest.mark.parametrize(("kept", "told"), [(0.6, True), (0.97, False)])
def test_a_policy_that_breaks_within_two_updates(kept: float, told: bool, tmp_path: Path) -> None:
    kl = [0.0, 0.88, 1.87, 2.93, 1.95, 4.34, 3.35]
    steps = [{"kl": far, "reward": 0.5 * (kept if n else 1)} for n, far in enumerate(kl)]
    assert ("L10" in ids(tmp_path, trl(steps))) == told


def test_statistics_in_brackets_are_of_what_stands_before_them(tmp_path: Path) -> None:
    lines = "".join(
        f"iter {n} | reward 78.7{n} (std 221.1{n % 2}) | acc 0.{n}1 | loss 0.01 | gnorm 0.4{n} | len 4.{n}\n"
        for n in range(9)
    )
    assert ids(tmp_path, lines) == ["D86"]


def test_batches_of_an_epoch_are_steps(tmp_path: Path) -> None:
    line = "Epoch:[1/1]({}/400) reward:{} kl_ref:{} loss:0.00{} grad_norm:0.33 lr:3e-07 len:214\n"
    text = "".join(line.format(20 * n, 0.4 + n / 50, n / 1000, n) for n in range(1, 10))
    assert diagnosed(tmp_path, text).findings == ()


def test_a_learning_iteration_in_a_block_set_to_the_right(tmp_path: Path) -> None:
    text = """################################################################################
                     Learning iteration 10108/50000

          Mean value_function loss: inf
               Mean surrogate loss: 0.0012
                       Mean reward: 16.13
"""
    found = first(tmp_path, text)
    assert (found.id, found.where.step) == ("D21", 10108)
