"""Panels of metrics that a console draws, rooms on the left: open-instruct's."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from replay_core.dumps.panels import Panels
from tests.replay_core.diagnose.logs import part_of

STEP = """\
╭─────────────────────────── Metrics ───────────────────────────╮
│  loss       policy_avg: -0.07 | kl_avg: 0.00e+00              │
│  objective  verifiable_reward: 0.24 | kl2_avg:                │
│             1.50e-02                                          │
│  other      episode: 192 | global_step: 192 |                 │
│             training_step: 7 | scores: 0.24 | lr: 2.60e-06    │
│  val        sequence_lengths: 1,138.11 | stop_rate: 0.99      │
╰───────────────────────────────────────────────────────────────╯
"""
EVALUATION = """\
╭─────────────────────────── Metrics ───────────────────────────╮
│  eval  scores: 0.35 | sequence_lengths: 231.50                │
╰───────────────────────────────────────────────────────────────╯
"""


def read(text: str) -> list[tuple[int | None, dict[str, float]]]:
    panels = Panels()
    told = [panels.take(line) for line in text.splitlines()]
    return [(step, values) for step, values in told if values]


def test_a_panel_is_one_step_and_its_rooms_are_in_the_names() -> None:
    ((step, values),) = read(STEP)
    assert step == 7
    assert values == {
        "loss/policy_avg": -0.07, "loss/kl_avg": 0.0, "objective/verifiable_reward": 0.24, "objective/kl2_avg": 0.015,
        "episode": 192.0, "scores": 0.24, "lr": 2.6e-6, "val/sequence_lengths": 1138.11, "val/stop_rate": 0.99,
    }  # fmt: skip


def test_an_evaluations_panel_is_of_the_step_before() -> None:
    assert [step for step, _ in read(STEP + EVALUATION)] == [7, 7]
    assert read(EVALUATION) == []


def test_the_rewards_of_training_and_evaluation_are_two(tmp_path: Path) -> None:
    log = part_of(tmp_path, STEP + EVALUATION)
    assert [(one.name, one.finite) for one in log.all("held_out")] == [("eval/scores", [0.35])]
    assert log.all("reward")[0].finite == [0.24]
    assert not log.is_counted


def test_another_programs_panel_is_none() -> None:
    assert read(STEP.replace(" Metrics ", " Welcome ")) == []
    assert read(STEP.replace("│  objective  ", "Traceback  ")) == []


@given(st.lists(st.sampled_from([*STEP.splitlines(), "│", "│ x", "╰", ""]), max_size=20))
def test_no_order_of_lines_is_too_strange(lines: list[str]) -> None:
    assert all(step is not None for step, _ in read("\n".join(lines)))
