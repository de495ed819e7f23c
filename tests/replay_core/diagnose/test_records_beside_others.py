"""A reward beside what it is made of: right answers, a raw score, a penalty on length, and rows that are copies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replay_core.diagnose.algorithm import Algorithm, measures_groups
from replay_core.diagnose.collected import parting
from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import (
    Fields,
    causes,
    grpo,
    healthy,
    look,
    masks,
    of,
    seen,
    set_advantages,
    set_rewards,
)

#: Which of the healthy batch's sixteen answers are right.
RIGHT = np.array([1, 0, 0, 1, 0, 0, 1, 0, 1, 1, 0, 0, 0, 1, 0, 0], dtype=np.float32)


def _scored(scores_B: Any, **more: Any) -> Fields:
    fields = {**healthy(), **more}
    set_rewards(fields, scores_B)
    set_advantages(fields, grpo(np.asarray(scores_B, dtype=float), np.repeat(np.arange(4), 4)))
    return fields


@pytest.mark.parametrize(
    ("scores_B", "words"),
    [
        (np.roll(RIGHT, 1), "high where acc of the answer 1 row before is 1, not of its own"),
        (np.roll(RIGHT, -2), "high where acc of the answer 2 rows after is 1"),
        (np.roll(RIGHT, 4), "high where acc of the answer 4 rows before is 1"),
        (1 - RIGHT, "token_scores is high just where acc is 0"),
        (1.2 - 1.2 * RIGHT, "scores are turned around"),
    ],
)
def test_scores_of_other_answers_show_beside_what_is_right(tmp_path: Path, scores_B: Any, words: str) -> None:
    found = of(seen(tmp_path, _scored(scores_B, acc=RIGHT), "D100"), "D100")
    assert found is not None
    assert found.severity == "error"
    assert words in found.claim


@pytest.mark.parametrize(
    "scores_B",
    [RIGHT, 0.2 + RIGHT, 2 * RIGHT - 1, RIGHT * 0.5 + 0.5 * np.roll(RIGHT, 1) * RIGHT, np.roll(RIGHT, 1) * 0 + 1,
     np.random.default_rng(3).permutation(RIGHT)],
)  # fmt: skip
def test_scores_of_their_own_answers_and_of_none_are_quiet(tmp_path: Path, scores_B: Any) -> None:
    assert of(seen(tmp_path, _scored(scores_B, acc=RIGHT), "D100"), "D100") is None


def test_a_reward_in_place_of_one_that_is_not_a_number_is_told(tmp_path: Path) -> None:
    raw_B = np.where(np.arange(16) % 3 == 0, np.nan, np.linspace(0.1, 1, 16)).astype(np.float32)
    found = of(seen(tmp_path, _scored(np.nan_to_num(raw_B), raw_rewards=raw_B), "D21"), "D21")
    assert found is not None
    assert found.severity == "warning"
    assert "6 of 16 samples" in found.claim
    assert "counts as wrong" in found.claim


@pytest.mark.parametrize("what", ["other rewards", "a mean in their place", "two reward functions"])
def test_numbers_that_are_missing_for_a_reason_are_no_fault(tmp_path: Path, what: str) -> None:
    raw_B = np.where(np.arange(16) % 3 == 0, np.nan, np.linspace(0.1, 1, 16)).astype(np.float32)
    scores_B = np.nan_to_num(raw_B)
    if what == "other rewards":
        scores_B = scores_B + np.linspace(0, 1, 16, dtype=np.float32)
    elif what == "a mean in their place":
        scores_B = np.where(np.isnan(raw_B), np.linspace(0.2, 0.8, 16), raw_B)
    else:
        # The one that says nothing of a sample is not meant for it: the other scores it.
        scores_B = np.where(np.isnan(raw_B), np.arange(16) % 2, raw_B)
    found = of(seen(tmp_path, _scored(scores_B, raw_rewards=raw_B), "D21"), "D21")
    assert found is None or found.severity == "info"


def _penalty(lengths_B: Any, *, turned: bool) -> Any:
    """DAPO's, of a limit of 24 and a buffer of 16; turned around, its difference is the wrong way round."""
    over_B = (lengths_B - 24 if turned else 8 - lengths_B) / 16
    return np.clip(over_B, -1, 0).astype(np.float32)


@pytest.mark.parametrize("turned", [True, False])
def test_a_penalty_on_long_answers_falls_on_long_ones(tmp_path: Path, turned: bool) -> None:
    fields = healthy()
    overlong_B = _penalty(masks(fields).sum(1), turned=turned)
    found = of(seen(tmp_path, _scored(RIGHT + overlong_B, overlong_penalty=overlong_B), "D105"), "D105")
    assert (found is not None) == turned
    assert found is None or "falls on short ones: overlong_penalty is -1 at 7 tokens" in found.claim


def test_a_penalty_that_no_length_makes_is_not_judged(tmp_path: Path) -> None:
    overlong_B = -np.random.default_rng(0).random(16).astype(np.float32)
    assert of(seen(tmp_path, _scored(RIGHT, overlong_penalty=overlong_B), "D105"), "D105") is None


def _doubled(order: Any) -> Fields:
    return {
        key: value[order] if isinstance(value, np.ndarray) else [value[row] for row in order]
        for key, value in healthy().items()
    }


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ([*range(16), *range(16)], "the second half of the batch is a copy of the first: 16 samples"),
        ([row for row in range(16) for _ in range(2)], "32 of 32 samples stand in their group twice"),
        ([*range(16), 0, 1, 4, 5], "8 of 20 samples stand in their group twice"),
    ],
)
def test_rows_that_are_copies_under_their_own_group_are_told(tmp_path: Path, order: list[int], words: str) -> None:
    (found,) = causes(seen(tmp_path, _doubled(order), "D75"))
    assert words in found.claim


def test_later_passes_over_a_batch_are_no_copies(tmp_path: Path) -> None:
    """Each pass is a record of its own, with the rows and the log-probabilities of the first."""
    fields = healthy()
    recorder = Recorder(tmp_path / "d")
    for step in range(2):
        with recorder.step(step) as record:
            for micro in range(2):
                record("forward_data", micro=micro, **fields)
    assert causes(look(tmp_path / "d", "D75")) == []


def test_answers_that_are_drawn_twice_by_chance_are_no_copies(tmp_path: Path) -> None:
    fields = _doubled([0, 0, 2, 3, 4, 4, 6, 7, 8, 8, 10, 11, 12, 13, 14, 15])
    # As probable as answers of one word are: two of four are often the same.
    fields["rollout_log_probs"] = np.where(masks(fields), -0.08, 0.0).astype(np.float32)
    assert causes(seen(tmp_path, fields, "D75")) == []


@pytest.mark.parametrize("off", [[1], [0], [0, 1]])
def test_rows_of_one_rank_that_part_name_the_rank(off: list[int]) -> None:
    rank_B = np.repeat([0, 1, 2], 8)
    rows = [np.where(np.isin(rank_B, off), 0.2 * step, 1e-7) + 1e-8 for step in range(6)]
    found = parting(rows, None, [rank_B] * len(rows))
    assert found is not None
    assert found.ranks == (off, [rank for rank in (0, 1, 2) if rank not in off])
    assert f"in the rows of rank{'s' * (len(off) > 1)} {off[0]}" in found.where


def test_rows_of_every_rank_that_part_name_none() -> None:
    rank_B = np.repeat([0, 1], 8)
    rows = [np.where(np.arange(16) % 2 == 0, 0.2 * step, 1e-7) + 1e-8 for step in range(6)]
    found = parting(rows, None, [rank_B] * len(rows))
    assert found is not None
    assert found.is_in_part
    assert found.ranks is None


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        ({"adv_estimator": "gae", "rollout_n": 1}, False),
        ({"adv_estimator": "reinforce_plus_plus", "rollout_n": 1}, False),
        ({"adv_estimator": "gae", "rollout_n": 5}, False),
        ({"algorithm": "ppo", "rollout_n": 1}, False),
        ({"algorithm": "ppo", "rollout_n": 8}, True),  # the loss's name: advantages may be of groups
        ({"algorithm": "ppo"}, True),
        ({"adv_estimator": "reinforce_plus_plus_baseline", "rollout_n": 8}, True),
        ({"adv_estimator": "grpo", "algorithm": "ppo", "rollout_n": 8}, True),
        ({}, True),
    ],
)
def test_whose_rewards_an_advantage_is_measured_against(facts: dict[str, Any], told: bool) -> None:
    assert measures_groups(Algorithm(facts)) == told


def _forwarded(**more: Any) -> Fields:
    """The healthy batch after an update: old log-probabilities, and a policy that has moved from them."""
    fields = healthy()
    moved = np.random.default_rng(5).normal(0, 0.1, fields["old_log_probs"].shape) * masks(fields)
    fields["log_probs"] = (fields["old_log_probs"] + moved).astype(np.float32)
    return {**fields, **more}


def _ratio(fields: Fields, logs: Any) -> Any:
    return (np.exp(logs) * masks(fields)).astype(np.float32)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda new, old, ref: new, "the policy's probability itself"),
        (lambda new, old, ref: (new - old) * np.log(2), "2 to the difference"),
        (lambda new, old, ref: (new - old) / 2, "the root of new over old"),
        (lambda new, old, ref: new - ref, "the policy over its reference"),
        (lambda new, old, ref: new - old, ""),
    ],
)
def test_a_ratio_that_is_another_figure_is_named(tmp_path: Path, made: Any, words: str) -> None:
    fields = _forwarded()
    fields["prob_ratio"] = _ratio(fields, made(fields["log_probs"], fields["old_log_probs"], fields["ref_log_prob"]))
    found = of(seen(tmp_path, fields, "D61"), "D61")
    assert (found is not None) == bool(words)
    assert found is None or words in found.claim


def test_a_ratio_of_whole_responses_is_worth_knowing(tmp_path: Path) -> None:
    fields = _forwarded()
    mask_BT = masks(fields)
    logs = (fields["log_probs"] - fields["old_log_probs"]) * mask_BT
    mean_B = logs.sum(1) / mask_BT.sum(1)
    fields["prob_ratio"] = _ratio(fields, np.broadcast_to(mean_B[:, None], logs.shape))
    found = of(seen(tmp_path, fields, "D61"), "D61")
    assert found is not None
    assert found.severity == "info"


def _along(weights_BT: Any) -> Fields:
    fields = healthy()
    made_B = grpo(np.where(np.arange(16) % 3 == 0, 1.0, 0.0) + np.arange(16) % 2, np.repeat(np.arange(4), 4))
    fields["advantages"] = (made_B[:, None] * weights_BT * masks(fields)).astype(np.float32)
    fields["returns"] = fields["advantages"].copy()
    return fields


def test_advantages_that_are_discounted_from_the_end_or_stop_early_are_told(tmp_path: Path) -> None:
    mask_BT = masks(healthy())
    left_BT = mask_BT[:, ::-1].cumsum(1)[:, ::-1] - 1
    place_BT = mask_BT.cumsum(1)
    for name, weights_BT, words in (
        ("discounted", 0.9**left_BT, "grow along the response: each is 1.111 times"),
        ("half", place_BT <= mask_BT.sum(1, keepdims=True) / 2, "end before the response does"),
        ("whole", np.ones(mask_BT.shape), ""),
    ):
        recorder = Recorder(tmp_path / name, flags={"adv_estimator": "grpo"})
        with recorder.step(0) as record:
            record("trajectory", **_along(weights_BT))
        found = of(look(tmp_path / name, "D78"), "D78")
        assert (found is not None) == bool(words), name
        assert found is None or words in found.claim


def _summed(directory: Path, factor: float) -> Path:
    recorder = Recorder(directory)
    for step in range(5):
        with recorder.step(step) as record:
            pg = 0.03 * (-1) ** step + 0.01 * step
            record("loss", micro=0, pg_loss=np.float32(pg), loss=np.float32(factor * pg))
    return directory


@pytest.mark.parametrize(("factor", "severity"), [(-1.0, "error"), (-4.0, "error"), (1.0, None)])
def test_a_loss_that_is_negated_where_it_is_summed_up(tmp_path: Path, factor: float, severity: str | None) -> None:
    found = of(look(_summed(tmp_path / "d", factor), "D49"), "D49")
    assert (None if found is None else found.severity) == severity
    assert found is None or "wrong sign" in found.claim


def test_advantages_of_the_step_before_show_in_every_pass_over_a_rollout(tmp_path: Path) -> None:
    """Two passes hold each sample twice: a std over n - 1 is another one then."""
    recorder = Recorder(tmp_path / "d")
    draw = np.random.default_rng(2)
    groups_B, before_B = np.repeat(np.arange(4), 4), None
    for step in range(4):
        fields = healthy()
        rewards_B = draw.integers(0, 5, 16) / 4
        set_rewards(fields, rewards_B)
        set_advantages(fields, grpo(rewards_B if before_B is None else before_B, groups_B))
        before_B = rewards_B
        with recorder.step(step) as record:
            for micro in range(2):
                record("forward_data", micro=micro, **fields)
    found = of(look(tmp_path / "d", "D76"), "D76")
    assert found is not None
