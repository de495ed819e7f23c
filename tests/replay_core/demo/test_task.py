from __future__ import annotations

import random

import pytest

from replay_core.demo import task
from replay_core.demo.task import END, PAD, SYMBOLS, Exercise

_EQUALS = SYMBOLS.index("=")


@pytest.mark.parametrize(
    ("response", "earned"),
    [
        ([1, 3, 8, END], 1.0),
        ([3, 8, 1, END], 0.8),
        ([1, 3, 8], 0.7),
        ([3, END], 0.4 + 0.3 / 3 + 0.1),
        ([3, 3, 3, 3, 3, 3], 0.4 + 0.3 / 6),
        ([3, 5, END], 0.4 / 2 + 0.3 / 3 + 0.1),
        ([_EQUALS, END], 0.1),
        ([END], 0.0),
        ([], 0.0),
    ],
)
def test_the_reward_of_an_answer_worked_by_hand(response: list[int], earned: float) -> None:
    assert task.reward(Exercise((3, 8, 1)), response) == pytest.approx(earned)


def test_a_digit_counts_as_often_as_it_stands_in_the_prompt() -> None:
    assert task.reward(Exercise((3, 3)), [3, 3, END]) == pytest.approx(1.0)
    assert task.reward(Exercise((3, 4)), [3, 3, END]) == pytest.approx(0.4 + 0.15 + 0.1)


def test_prompts_have_different_lengths_and_one_seed_draws_one_set() -> None:
    problems = task.draw(50, random.Random(0))
    assert {len(problem.tokens) for problem in problems} == {2, 3, 4, 5}
    assert problems == task.draw(50, random.Random(0))


def test_text_shows_the_end_and_hides_padding() -> None:
    assert task.text([1, 3, 8, END, PAD]) == "138."
    assert task.text(Exercise((3, 8, 1)).tokens) == "381=" == Exercise((3, 8, 1)).text
