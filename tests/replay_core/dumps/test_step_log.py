"""The log of a GRPO trainer: every form of its lines, and back."""

from __future__ import annotations

import pytest

from replay_core.dumps.step_log import lines_of, parse
from tests.fixtures import FIXTURES


@pytest.mark.parametrize("name", ["train_1da2900_normal.log", "train_547c4bf_normal.log"])
def test_a_genuine_log_comes_back_line_by_line(name: str) -> None:
    text = (FIXTURES / "grpo_notes" / name).read_text()
    iterations = list(parse(text.splitlines()))
    assert [(one.step, len(one.micros), one.numbered) for one in iterations] == [(n, 4, True) for n in range(4)]
    assert "\n".join(line for one in iterations for line in lines_of(one)) == text.rstrip("\n")


def test_the_zero_loss_bug_is_in_the_numbers() -> None:
    text = (FIXTURES / "grpo_notes" / "train_1da2900_normal.log").read_text()
    last = list(parse(text.splitlines()))[3]
    assert last.loss["loss"] == 0.0
    first = last.micros[0].values()
    assert first["num_masked"] == 0.0
    assert first["rewards_std"] == 0.0006
    assert [micro.values()["pg_loss"] for micro in last.micros] == [0, 0, -0.038478, 0]


def test_the_seeds_own_lines_are_read() -> None:
    (one,) = parse(
        [
            "[Micro 0] 1. Iteration start: mem=120 MB, time=0.000s",
            "[Micro 0] 3. Samples scored: mem=130 MB, time=0.512s, rewards=0.4938±0.0006",
            "WARNING: All advantages are near zero! rewards_grouped=[...]",
            "[Micro 0] 4. Loss computed: mem=140 MB, time=0.9s, pg_loss=-0.012000, kl=nan, total=1e-3",
            "5. Optimizer step finished: mem=140 MB, time=3.204s total",
            "iter 7: loss 0.1235 (main 0.1235, critic 0.0000), time 21747.97ms",
        ]
    )
    values = one.micros[0].values()
    assert (one.step, values["rewards"], values["rewards_std"], values["total"]) == (7, 0.4938, 0.0006, 0.001)
    assert values["kl"] != values["kl"]
    assert values["mem.samples_scored"] == 130
    assert one.micros[0].warnings == [(2, "All advantages are near zero! rewards_grouped=[...]")]
    assert one.loss == {"loss": 0.1235, "main": 0.1235, "critic": 0.0, "time_ms": 21747.97}


def test_losses_on_lines_of_their_own_belong_to_the_stage_before() -> None:
    (one,) = parse(
        [
            "  [Micro 1] 6. Loss computed: mem=0MB, time=0.1s",
            "    pg_loss=0.103000, kl_penalty=-0.000800, total=0.025000",
            "    avg_seq_log_prob=-87.761681, avg_advantage=0.000000, avg_kl=-0.008000",
            "  [Micro 1] 7. Backward: mem=0MB, time=0.2s",
        ]
    )
    values = one.micros[0].values()
    assert (values["pg_loss"], values["kl_penalty"], values["avg_seq_log_prob"]) == (0.103, -0.0008, -87.761681)
    assert not one.is_complete


def test_iterations_the_log_does_not_number_are_counted() -> None:
    lines = ["[Micro 0] 1. Iteration start: mem=0MB, time=0s", "[Micro 1] 1. Iteration start: mem=0MB, time=0s"]
    iterations = list(parse([*lines, *lines, *lines]))
    assert [(one.step, len(one.micros), one.numbered) for one in iterations] == [
        (0, 2, False), (1, 2, False), (2, 2, False),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "line",
    [
        "",
        "\x00" * 99,
        "[Micro 99999999999999999999] 1. x: y=1",
        "iter 1: loss",
        "iter x: loss 1",
        "[Micro 0] 1.",
        "=" * 9999,
    ],
)
def test_garbage_is_passed_over(line: str) -> None:
    assert list(parse([line])) == []


def test_a_logger_prefix_and_colours_do_not_hide_a_line() -> None:
    (one,) = parse(["\x1b[32mINFO\x1b[0m iter 3: loss 0.5 (main 0.5, critic 0.0), time 1.5ms, mfu 2.5%"])
    assert (one.step, one.loss["mfu"]) == (3, 2.5)
