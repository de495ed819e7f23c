"""Steps that are made as is meant, and settings in whose words, defaults or numbers a rule could read otherwise."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replay_core.diagnose.algorithm import Algorithm
from replay_core.diagnose.finding import Finding
from replay_core.diagnose.rules import whitening
from tests.replay_core.diagnose.batches import look
from tests.replay_core.diagnose.test_maths_of_a_step import Made


def said(path: Path, made: Made, *rules: str, steps: int = 3) -> list[Finding]:
    return [one for one in look(made.write(path / "dump", steps), *rules).findings if one.severity != "info"]


ACTOR = {"use_kl_loss": False, "kl_loss_type": "low_var_kl"}
FIXED = {"type": "fixed", "kl_coef": 0.05, "horizon": 10000, "target_kl": 0.1}


@pytest.mark.parametrize("told", [{"actor": ACTOR}, {"kl_ctrl": FIXED}])
def test_a_kl_in_the_rewards_is_read_by_its_own_words(told: dict[str, Any], tmp_path: Path) -> None:
    untold = ("kl_coef",) if "kl_ctrl" in told else ()
    assert not said(tmp_path / "well", Made("rpp", told=told, untold=untold), "D51")
    (wrong,) = said(tmp_path / "wrong", Made("rpp", "beta", told=told, untold=untold), "D51")
    assert "weighs 0.5, and the run states 0.05" in wrong.claim
    adaptive = {"kl_ctrl": {**FIXED, "type": "adaptive"}}
    assert not said(tmp_path / "adaptive", Made("rpp", "beta", told=adaptive, untold=("kl_coef",)), "D51")


def test_a_kl_in_the_loss_is_not_read_by_the_penalty_in_the_rewards(tmp_path: Path) -> None:
    told = {"use_kl_in_reward": True, "kl_penalty": "kl"}
    assert not said(tmp_path, Made("grpo", told=told), "D29")
    (wrong,) = said(tmp_path / "wrong", Made("grpo", "abs", told=told), "D29")
    assert "the run states k3" in wrong.claim


@pytest.mark.parametrize(("wrong", "beta"), [("no beta", 0.05), ("", 2e-9)])
def test_a_kl_is_none_beside_what_is_stated(wrong: str, beta: float, tmp_path: Path) -> None:
    every = said(tmp_path, Made("rpp", wrong, beta=beta), "D51")
    assert [one.claim.startswith("no KL is subtracted from the rewards") for one in every] == [True] * bool(wrong)


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("settings", [{"shared": True}, {"equal": True, "kl_times": 0.3}])
def test_a_kl_loss_that_is_right_is_not_averaged_over_padding(
    settings: dict[str, Any], steps: int, tmp_path: Path
) -> None:
    every = said(tmp_path, Made("grpo", **settings), "D28", steps=steps)
    assert not [one.claim for one in every if "padding" in one.claim]


def test_a_width_is_told_from_two_steps_on(tmp_path: Path) -> None:
    assert not said(tmp_path / "one", Made("grpo", "padded kl"), "D28", steps=1)
    assert said(tmp_path / "two", Made("grpo", "padded kl"), "D28", steps=2)


@pytest.mark.parametrize("word", ["token_norm", "batch-normalized", "seq-mean-token-sum-norm"])
def test_a_constant_is_stated_by_its_own_words_alone(word: str, tmp_path: Path) -> None:
    told = {"loss_agg_mode": word, "max_response_length": 4096}
    every = said(tmp_path, Made("grpo", told=told), "D28")
    assert [one.claim for one in every if "constant of 4096" in one.claim] == [
        one.claim for one in every if word.startswith("seq")
    ]
    assert bool(every) == word.startswith("seq")


@pytest.mark.parametrize(("told", "is_error"), [
    ({"no_advantage_std_norm": True}, False), ({"normalize_advantages": False}, False), ({"norm_adv": False}, False),
    ({"normalize_advantage": True}, False), ({"whiten_advantages": True}, True), ({"normalize_advantages": True}, True),
    ({}, True),
])  # fmt: skip
@pytest.mark.parametrize("algorithm", ["rpp", "rppb"])
def test_whitening_is_demanded_where_it_is_stated_of_what_is_recorded(
    algorithm: str, told: dict[str, Any], is_error: bool, tmp_path: Path
) -> None:
    every = said(tmp_path, Made(algorithm, "raw", told=told), "D04", "D107")
    assert bool([one.claim for one in every if "are not whitened over the batch" in one.claim]) == is_error
    assert bool(every) == is_error


@pytest.mark.parametrize(("told", "is_error"), [
    ({"policy_loss_type": "importance_sampling"}, False), ({"loss_type": "reinforce"}, False), ({}, True),
    ({"loss_mode": "vanilla"}, True),
])  # fmt: skip
def test_a_default_range_beside_a_loss_without_one_is_no_error(
    told: dict[str, Any], is_error: bool, tmp_path: Path
) -> None:
    every = said(tmp_path, Made("grpo", "unclipped", told=told), "D50")
    assert [one.id for one in every if "loss is not clipped" in one.claim] == [one.id for one in every]
    assert bool(every) == is_error


@pytest.mark.parametrize(("facts", "range_"), [
    ({"epsilon": 1e-3}, None), ({"epsilon": 1e-8, "clip_ratio": 0.2}, (0.2, 0.2)), ({"epsilon": 0.2}, (0.2, 0.2)),
    ({"clip_eps": 0.1, "epsilon": 0.2}, (0.1, 0.1)), ({"epsilon": 3e-4, "loss_type": "gspo"}, (3e-4, 3e-4)),
    ({"epsilon": 0.2, "epsilon_high": 0.28}, (0.2, 0.28)),
])  # fmt: skip
def test_an_epsilon_is_a_range_where_it_is_as_wide_as_one(
    facts: dict[str, Any], range_: tuple[float, float] | None
) -> None:
    assert Algorithm({"flags": facts}).clip_range == range_


@pytest.mark.parametrize("wrong", ["all 0", "squashed"])
def test_rewards_that_are_not_the_raw_ones_are_not_cut_off(wrong: str, tmp_path: Path) -> None:
    assert not look(Made("grpo", wrong).write(tmp_path / "dump"), "D108").findings


def test_parts_of_a_large_batch_are_looked_at_at_once() -> None:
    rng = np.random.default_rng(0)
    rows = np.repeat(np.arange(4000), 100)
    x = rng.normal(size=rows.size)
    begun = time.process_time()
    assert whitening._of_parts(rng.normal(size=rows.size), x, rows, 1e-3, "response") is None
    assert time.process_time() - begun < 1.0


def test_a_loss_of_log_probabilities_where_a_clipped_ratio_is_stated_is_called_what_it_is(tmp_path: Path) -> None:
    every = said(tmp_path, Made("grpo", "no ratio"), "D50")
    assert [("-A log p" in one.claim, "0 and 0" in one.claim) for one in every] == [(True, False)]
