"""Lines of home-made trainers: a step's number, then names and numbers in whatever punctuation."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay_core.dumps import open_run
from replay_core.dumps.console_lines import console_line, epoch_line, source_line

FORMS = (
    "iter 3: loss 0.5, reward 0.25, kl 1e-3",
    "[iter 00003] reward=0.25 kl=0.001 loss=0.5",
    "step 3 | loss 0.5 | reward 0.25 | kl 0.001",
    "step: 3, loss: 0.5, reward: 0.25, kl: 1.0e-3",
    "step=3 loss=0.5 reward=0.25 kl=0.001",
    "2026-01-01 10:00:03,123 - trainer - INFO - Step 3: loss = 0.5, reward = 0.25, kl = 0.001",
    "Step 3/100 - loss: 0.5 - reward: 0.25 - kl: 0.001",
    "Epoch 0 | Step 3 | loss 0.5 | reward 0.25 | kl 0.001",
    "Iteration 3/8: reward=0.25, loss=0.5, kl=0.001",
    "[train] step=   3  loss=0.5  reward=0.25  kl=.001  (1.3s)",
    "update 3 (loss 0.5, reward 0.25, kl 0.001)",
    "loss=0.5 reward=0.25 kl=0.001 step=3",
    "it 0003 | loss +0.5 | reward 0.25 | kl 0.001",
    "step\t3\tloss\t0.5\treward\t0.25\tkl\t0.001",
    "GRPO:   3%|▎         | 3/100 [00:41<22:10, 13.71s/it, loss=0.5, reward=0.25, kl=0.001]",
    "  3%|3         | 3/100 [00:41<22:10, loss=0.5, reward=0.25, kl=0.001]",
    "  3%|3         | 3/100 [1:00:41<?, ?it/s, loss=0.5, reward=0.25, kl=.001]",
)


@pytest.mark.parametrize("line", FORMS)
def test_a_line_of_a_home_made_trainer_is_read(line: str) -> None:
    assert console_line(line) == (3, pytest.approx({"loss": 0.5, "reward": 0.25, "kl": 0.001}))


def test_names_of_several_words_units_thousands_and_what_is_no_number_are_read() -> None:
    step, values = console_line("Step 12/400 | Grad Norm: nan | Mean reward: -0.5 | time 5.3s | tokens: 1,234,567")
    assert step == 12
    assert values == pytest.approx(
        {"Grad Norm": math.nan, "Mean reward": -0.5, "time": 5.3, "tokens": 1234567.0}, nan_ok=True
    )


def test_a_share_in_hundredths_is_a_share_unless_its_name_says_so() -> None:
    line = "SUCCESS Step 7 |   52s | Reward 0.25 | Truncation 8.3% | Error 0.0 % | clip_pct: 12%"
    assert console_line(line) == (
        7, pytest.approx({"Reward": 0.25, "Truncation": 0.083, "Error": 0.0, "clip_pct": 12.0}))  # fmt: skip
    assert console_line("step=7 loss=0.5 cut=12.5%, lr=1e-6") == (
        7,
        pytest.approx({"loss": 0.5, "cut": 0.125, "lr": 1e-6}),
    )


def test_what_one_environment_has_of_a_step_is_named_after_it(tmp_path: Path) -> None:
    line = "\t\t ╰─ i3-math | Ratio 29.2% | Reward 0.35 | Turns 1.0"
    assert source_line(line) == pytest.approx({"i3-math/Ratio": 0.292, "i3-math/Reward": 0.35, "i3-math/Turns": 1.0})
    assert source_line("  ╰─ saved | 3 files | 12%") == {}
    log = tmp_path / "run.log"
    log.write_text(f"10:02:48 SUCCESS Step 7 | 49s | Reward 0.25\n{line}\n")
    (record,) = open_run(log).records
    assert record.key.step == 7
    assert {"Reward", "i3-math/Reward"} <= {ref.name for ref in record.tensors()}


@pytest.mark.parametrize(
    "line",
    [
        "Saved checkpoint of step 300 in 5.1 s",
        "step 3 of the setup: 4 files",
        "step=100 lr=1e-6 kl_coef=0.01 target_kl=0.1 loss_scale=65536",
        "max_steps=100 loss=0.5",
        "step 0.5 reward 3",
        "version 3 loss 0.5",
        "Loading:  3%|▎   | 3/100 [00:41<22:10, 13.71s/it, shard=0.5]",
        "GET /index.html?step=3 200 0.3",
        "",
    ],
)
def test_prose_and_settings_are_no_metrics(line: str) -> None:
    assert console_line(line) == (None, {})


def test_epochs_number_a_log_only_where_nothing_else_does(tmp_path: Path) -> None:
    assert epoch_line("epoch 2: loss=0.5") == (2, {"loss": 0.5})
    epochs, both = tmp_path / "epochs.log", tmp_path / "both.log"
    epochs.write_text("epoch 1: loss=0.5\nepoch 2: loss=0.4\n")
    both.write_text("step 1 loss=0.5\nstep 2 loss=0.4\nepoch 1: loss=9\n")
    assert [record.key.step for record in open_run(epochs).records] == [1, 2]
    losses = [ref.source for record in open_run(both).records for ref in record.tensors()]
    assert [getattr(source, "value", None) for source in losses] == [0.5, 0.4]


def test_a_known_form_goes_before_a_trainers_own(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text("step 3 reward=0.1 kl=0.2\nstep:3 - reward:0.5 - actor/pg_loss:0.1\n")
    (record,) = open_run(log).records
    values = {ref.name: getattr(ref.source, "value", None) for ref in record.tensors()}
    assert values == {"reward": 0.5, "actor/pg_loss": 0.1, "kl": 0.2}


@given(st.text(max_size=300))
def test_no_line_is_too_strange(line: str) -> None:
    step, values = console_line(line)
    assert (step is None) == (not values)


@pytest.mark.parametrize(
    "line",
    ["step 1 " + "a " * 20000, "step" * 15000, "step 1" + " a=" * 20000, "step" + " " * 60000,
     "step 1 " + "a." * 30000, "step 1 " + "x 1," * 15000, "step 1 a" + " " * 60000],
)  # fmt: skip
def test_a_hostile_line_takes_no_time(line: str) -> None:
    assert console_line(line) == (None, {})
