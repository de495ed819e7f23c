"""Scores and what is made of them: the genuine healthy batch with one line of a reward's way wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from replay_core.diagnose.finding import Finding
from tests.replay_core.diagnose.batches import GROUPS, causes, grpo, healthy, look, rewards, seen, set_advantages
from tests.replay_core.diagnose.logs import HEALTHY_VERL, diagnosed, verl


def first(found: list[Finding]) -> tuple[str, str]:
    return found[0].id, found[0].claim


def test_a_healthy_batch_has_no_such_finding(tmp_path: Path) -> None:
    assert not causes(seen(tmp_path, healthy(), "D85", "D86", "D87", "D53"))


def test_rewards_of_the_row_before_are_other_samples_scores(tmp_path: Path) -> None:
    batch = healthy()
    moved = np.roll(rewards(batch), 1)
    batch["token_level_rewards"] = np.zeros_like(batch["token_level_scores"])
    for row, value in enumerate(moved):
        batch["token_level_rewards"][row, np.flatnonzero(batch["response_mask"][row])[-1]] = value + row * 1e-3
    batch["token_level_scores"] = batch["token_level_scores"].copy()
    for row, value in enumerate(np.roll(moved + np.arange(16) * 1e-3, -1)):
        batch["token_level_scores"][row, np.flatnonzero(batch["response_mask"][row])[-1]] = value
    id, claim = first(causes(seen(tmp_path, batch, "D85")))
    assert id == "D85"
    assert "moved on by 1" in claim


def test_one_reward_that_outweighs_all_others_is_told_with_its_sample(tmp_path: Path) -> None:
    batch = healthy()
    scores = rewards(batch) + np.linspace(0, 0.3, 16)
    scores[4] = 5000.0
    batch["token_level_scores"] = np.zeros_like(batch["token_level_scores"])
    for row, value in enumerate(scores):
        batch["token_level_scores"][row, np.flatnonzero(batch["response_mask"][row])[-1]] = value
    batch["token_level_rewards"] = batch["token_level_scores"].copy()
    (cause,) = causes(seen(tmp_path, batch, "D86"))
    assert cause.where.sample == 4
    assert "5000" in cause.claim


def test_scores_in_the_last_column_lie_in_the_padding(tmp_path: Path) -> None:
    batch = healthy()
    scores = np.zeros_like(batch["token_level_scores"])
    short = batch["response_mask"].sum(1) < scores.shape[1]
    assert short.sum() > 8
    scores[:, -1] = 1 + np.arange(16)
    batch["token_level_scores"] = batch["token_level_rewards"] = scores
    set_advantages(batch, grpo(scores.sum(1), GROUPS))
    assert causes(seen(tmp_path, batch, "D53"))[0].severity == "warning"


def test_a_log_whose_mean_one_sample_makes(tmp_path: Path) -> None:
    steps = [
        {"critic/score/mean": 78.7 + n * 0.01, "critic/score/max": 5000.2 + n % 2, "critic/score/min": 0.1}
        for n in range(10)
    ]
    assert "D86" in [one.id for one in diagnosed(tmp_path, verl(steps)).findings if one.severity == "warning"]


def test_a_judge_that_dies_comes_before_the_equal_rewards_it_leaves(tmp_path: Path) -> None:
    steps = [{"critic/score/mean": 0.6 + n % 3 * 0.02} for n in range(8)]
    dead = {
        "critic/score/mean": 0.0,
        "critic/score/max": 0.0,
        "critic/advantages/max": 0.0,
        "critic/advantages/min": 0.0,
    }
    found = diagnosed(tmp_path, verl([*steps, *[dead] * 6])).findings
    assert found[0].id == "L17"
    assert "from step 9 on" in found[0].claim
    assert {one.downstream_of for one in found if one.id in ("D01", "L08")} == {"L17"}


def test_a_reward_that_was_never_much_has_no_judge_that_died(tmp_path: Path) -> None:
    steps = [{"critic/score/mean": value} for value in (0.1, 0.0, 0.2, 0.0, 0.1, 0.05, 0.0, 0.0, 0.0, 0.0)]
    assert "L17" not in [one.id for one in diagnosed(tmp_path, verl(steps)).findings]


def completions(folder: Path, change: str = "", *, functions: int = 2) -> Path:
    """A table as TRL writes it after every logged step: 6 prompts, 8 answers each."""
    draw = np.random.default_rng(3)
    for step in (1, 2, 3):
        each = [draw.uniform(0, 1, 48) * (draw.uniform(0, 1, 48) > 0.3) for _ in range(functions)]
        groups = np.repeat(np.arange(6), 8)
        advantages = grpo(sum(each), groups)
        if change == "half":
            advantages[:24] = 0
        elif change == "turned":
            advantages = np.abs(advantages)
        elif change == "other":
            advantages = np.roll(advantages, 1)
        elif change == "weighed":
            advantages = grpo(each[0] + 0.2 * each[-1], groups)
        columns = {"step": [step] * 48, "prompt": [f"what is {step} + {g}?" for g in groups],
                   "completion": [f"it is {n}" for n in range(48)]}  # fmt: skip
        columns |= {f"reward_{n}": one.tolist() for n, one in enumerate(each)}
        pq.write_table(
            pa.table({**columns, "advantage": advantages.tolist()}), folder / f"completions_0000{step}.parquet"
        )
    return folder


@pytest.mark.parametrize(
    ("change", "words"),
    [("half", "are 0 in 3 of 6 groups"), ("turned", "no advantage is negative"), ("other", "belong to other samples")],
)
def test_a_table_of_completions_is_recomputed_from_its_reward_functions(
    change: str, words: str, tmp_path: Path
) -> None:
    found = causes(look(completions(tmp_path, change)))
    assert found[0].id == "D04"
    assert words in found[0].claim


@pytest.mark.parametrize("change", ["", "weighed"])
def test_a_table_whose_weights_are_not_known_is_no_mistake(change: str, tmp_path: Path) -> None:
    assert not causes(look(completions(tmp_path, change)))


def test_a_value_loss_beyond_its_values_and_returns(tmp_path: Path) -> None:
    critic = {
        "critic/values/mean": 0.1, "critic/values/max": 0.4, "critic/values/min": -0.2, "critic/returns/mean": 0.6,
        "critic/returns/max": 1.0, "critic/returns/min": 0.0,
    }  # fmt: skip
    assert HEALTHY_VERL["critic/score/max"] == 1.0
    bad = diagnosed(tmp_path, verl([{**critic, "critic/vf_loss": 180.0 + n} for n in range(4)])).findings
    assert bad[0].id == "D90"
    fine = diagnosed(tmp_path, verl([{**critic, "critic/vf_loss": 0.2 + n / 100} for n in range(4)])).findings
    assert "D90" not in [one.id for one in fine]


@pytest.mark.parametrize("order", ["by prompt", "interleaved", "shuffled"])
def test_rows_that_are_taken_for_groups_by_their_place_are_of_one_prompt(order: str, tmp_path: Path) -> None:
    draw = np.random.default_rng(4)
    for step in (1, 2):
        prompt_B = np.repeat(np.arange(6), 8)
        prompt_B = {
            "by prompt": prompt_B,
            "interleaved": np.tile(np.arange(6), 8),
            "shuffled": draw.permutation(prompt_B),
        }[order]
        rewards_B = draw.uniform(0, 1, 48)
        columns = {"step": [step] * 48, "prompt": [f"what is {step} + {g}?" for g in prompt_B],
                   "completion": [f"it is {n}" for n in range(48)], "reward_1": rewards_B.tolist(),
                   "advantage": grpo(rewards_B, np.arange(48) // 8).tolist()}  # fmt: skip
        pq.write_table(pa.table(columns), tmp_path / f"completions_0000{step}.parquet")
    found = causes(look(tmp_path))
    assert [one.id for one in found] == ([] if order == "by prompt" else ["D42"])
    assert not found or "in blocks of 8 rows" in found[0].claim


@pytest.mark.parametrize("same", [True, False])
def test_a_table_of_completions_that_are_one_text_says_so(same: bool, tmp_path: Path) -> None:
    for step in (1, 2):
        groups = np.repeat(np.arange(6), 8)
        rewards_B = (groups % 2).astype(float)
        texts = [f"it is {g if same else n} of them" for n, g in enumerate(groups)]
        columns = {"step": [step] * 48, "prompt": [f"what is {step} + {g}?" for g in groups], "completion": texts,
                   "reward_1": rewards_B.tolist(), "advantage": [0.0] * 48}  # fmt: skip
        pq.write_table(pa.table(columns), tmp_path / f"completions_0000{step}.parquet")
    found = causes(look(tmp_path))
    assert found[0].id == "D03"
    assert ("the same text" in found[0].claim) == same
