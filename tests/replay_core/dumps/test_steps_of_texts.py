"""Which step a figure of a text is of: by a notebook's table, by what a line begins with, by the rows around a wrong
one; what each answer earned, listed; and how far a text says that its run came.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from replay_core import pages
from replay_core.dumps import open_run
from replay_core.dumps.console_lines import console_line
from replay_core.dumps.log_lines import line_of
from replay_core.dumps.log_progress import StepsSaid


def told(path: Path, name: str) -> list[tuple[int | None, float]]:
    """(step, value) of a figure, in the order of steps."""
    found = [
        (record.key.step, float(pages.array(ref))) for record in open_run(path).records for ref in record.tensors()
        if ref.name == name
    ]  # fmt: skip
    return sorted(found, key=lambda each: -1 if each[0] is None else each[0])


def written(folder: Path, text: str, name: str = "cell.log") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def notebook(rows: int, table: int) -> str:
    head = "Step\tTraining Loss\n" + "".join(f"{10 * at}\t-0.000000\n" for at in range(1, table))
    lines = "".join(
        f"{{'loss': -0.0, 'grad_norm': 0.0{at}, 'reward': 0.{at}, 'kl': 0.001, 'epoch': 0.{at}}}\n"
        for at in range(1, rows + 1)
    )
    again = "Step\tTraining Loss\n" + "".join(f"{10 * at}\t-0.000000\n" for at in range(1, table + 1))
    return head + lines + again + "{'train_runtime': 109.2, 'train_loss': -2e-07, 'epoch': 0.9}\n"


def test_rows_of_a_notebook_take_the_steps_of_its_table(tmp_path: Path) -> None:
    path = written(tmp_path, notebook(8, 8))
    assert told(path, "reward") == [(10 * at, at / 10) for at in range(1, 9)]
    assert told(path, "train_runtime") == [(80, 109.2)]
    assert not [note for note in open_run(path).notes if "counted" in note]


def test_rows_that_are_not_as_many_are_counted(tmp_path: Path) -> None:
    assert told(written(tmp_path, notebook(7, 5)), "reward")[0][0] != 10


def test_a_line_says_first_which_step_it_is_of(tmp_path: Path) -> None:
    text = "".join(
        f"INFO worker: wake up took 0.{at} s\n[{at}/1000]  loss: -0.{at}, kl-penalty: 0.0{at}, entropy: 0.9\n"
        for at in range(6)
    )
    assert [step for step, _ in told(written(tmp_path, text), "kl-penalty")] == [0, 1, 2, 3, 4, 5]


def test_batches_of_epochs_begin_anew_and_are_counted(tmp_path: Path) -> None:
    text = "".join(f"[{at}/3]  loss: 0.{at}, kl: 0.0{at}\n" for _ in range(2) for at in (1, 2, 3))
    assert len(told(written(tmp_path, text), "loss")) == 6


def test_what_each_answer_earned_is_the_mean_of_its_step() -> None:
    step, values = console_line("[step 3/200] correct=2/4 rewards=['0.80', '0.40', '0.00', '0.00'] loss=0.0020")
    assert (step, values) == (3, {"rewards": pytest.approx(0.3), "loss": 0.002})
    _, values = console_line("step 4 | rewards: [1, 0, 1, 1] | loss 0.5")
    assert values["rewards"] == 0.75
    _, values = console_line("step 5 | prompts: [1, 2] | loss 0.5")
    assert values == {"loss": 0.5}


def lines(steps: list[int]) -> str:
    return "".join(json.dumps({"step": step, "loss": 0.1, "reward": 0.01 * at}) + "\n" for at, step in enumerate(steps))


def test_a_wrong_step_between_its_neighbours_is_put_right(tmp_path: Path) -> None:
    steps = list(range(1, 61))
    steps[29] = 30999
    path = written(tmp_path, lines(steps), "own.jsonl")
    assert [step for step, _ in told(path, "reward")] == list(range(1, 61))
    assert any("step 30 is written as 30999" in note for note in open_run(path).notes)


def test_steps_that_are_often_others_are_left_as_they_are(tmp_path: Path) -> None:
    steps = [step if step % 4 else 1000 + step for step in range(1, 61)]
    assert told(written(tmp_path, lines(steps), "own.jsonl"), "reward")[-1][0] == 1060


def far(*texts: str) -> StepsSaid:
    said = StepsSaid()
    for number, text in enumerate(texts, 1):
        said.take(line_of(number, text))
    return said


def test_a_counter_that_rises_goes_before_a_bar_that_is_back_at_its_beginning() -> None:
    inner = "  0%|          | 0/64 [00:00<?, ?it/s]"
    told_ = far(*(text for at in range(6) for text in (inner, f"[{at}/1000]  loss: 0.{at}"))).told()
    assert told_ is not None
    assert (told_.at, told_.of) == (5, 1000)


def test_a_text_that_ends_inside_a_bar_before_any_step_is_told_of() -> None:
    bar = "Validation:  30%|███       | 3/10 episodes"
    assert far("Starting PPO Training", bar).ends() is not None
    assert far("Starting PPO Training", bar, "all is well").ends() is None
    assert far("Evaluating the base model", bar).ends() is None
