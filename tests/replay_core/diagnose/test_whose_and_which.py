"""Whose masks, advantages and rewards a run takes, and which weights and logits its engine writes with: runs that are
really trained, with one line wrong, and the same runs without it.
"""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from replay_core.diagnose.rules import old_weights
from tests.replay_core.diagnose.updating import Recipe, told

pytestmark = pytest.mark.long  # they train, or record whole runs

RULES = ("D09", "D12", "D14", "D16", "D17", "D19", "D35", "D55", "D81", "D104", "L32")


FAULTS = [
    (Recipe("end-is-pad", schooled=True, ends=(5, 8, 11)), "D19", "the end token (EOS) is the pad token, 1"),
    (Recipe("end-is-pad", schooled=True, ends=(6, 9, 11), size=8, micros=3, seed=3), "D19", "masked out as padding"),
    (Recipe("mask-at-mark", schooled=True), "D81", "the mask ends at the token 8"),
    (Recipe("mask-at-mark", schooled=True, groups=8, seed=5), "D81", "the mask ends at the token 8"),
    (Recipe("next-mask", schooled=True), "D35", "the mask of the update belongs to other samples"),
    (Recipe("next-mask", schooled=True, micros=3, seed=2), "D35", "row 8 rows after (a micro-batch away)"),
    (Recipe("first-advantages"), "D35", "12 of 24 rows they are those of the row 12 rows before"),
    (Recipe("first-advantages", groups=6, seed=4), "D35", "advantages of the update belong to other samples"),
    (Recipe("packed", memory=True), "D14", "in every sample but the first of each pack"),
    (Recipe("packed", memory=True, micros=4, size=10, seed=1), "D14", "attention crosses samples"),
    (Recipe("penalty"), "D09", "a repetition penalty"),
    (Recipe("penalty", groups=8, limit=12, kl=0.01, seed=1), "D09", "a repetition penalty"),
    (Recipe("penalty", groups=2, size=4, limit=6, steps=9), "D09", "a repetition penalty"),
    (Recipe("engine-ahead", lr=5e-3, kl=0.01), "D12", "times as far from the reference"),
    (Recipe("engine-ahead", lr=5e-3, lora=True, seed=6), "D12", "the adapter (LoRA) is applied twice"),
    (
        Recipe("two-late", lr=2e-2, versions=True, schooled=True, micros=1, size=10, groups=8),
        "D12",
        "not of the weights that their version names",
    ),
    (
        Recipe("three-late", lr=1e-2, versions=True, checkpoints=True, size=10, groups=8, steps=10, seed=3),
        "D12",
        "samples are older than their weight version says, by 2",
    ),
    (
        Recipe("stays", lr=1e-2, versions=True, checkpoints=True, size=10, groups=8, steps=10, seed=3),
        "D12",
        "they stay those of step",
    ),
    (
        Recipe("stays", lr=1e-2, versions=True, checkpoints=True, size=10, groups=8, steps=9, weighed="token"),
        "D12",
        "they stay those of step",
    ),
    (Recipe("swapped", lr=6e-2, groups=12, limit=8), "D09", "on the first 3 tokens of responses"),
    (Recipe("refreshed", kl=0.05, lr=1e-2), "D55", "the reference is the policy of the step before"),
    (Recipe("cast", parts=True, schooled=True), "D104", "each is its sum, cut off, from step 1 on"),
    (Recipe("rolled", parts=True), "D104", "the row 1 row before, from step 2 on"),
    (Recipe("as-they-finish", parts=True, size=10), "D104", "the functions' sums, in another order, from step 1"),
    (Recipe("one-far", rloo=True, parts=True, size=10), "D86", "outweighs the batch: -60"),
    (Recipe("part-lost", parts=True, weights=True, schooled=True), "D104", "reward_goes_on has no part in the reward"),
    (Recipe("cut-paid", parts=True, size=10, groups=6), "L32", "responses that are cut off have one reward, 1"),
]


@pytest.mark.parametrize(
    ("recipe", "rule", "words"), FAULTS, ids=[f"{one.fault}-{number}" for number, (one, *_) in enumerate(FAULTS)]
)
def test_the_first_finding_is_the_line_that_is_wrong(recipe: Recipe, rule: str, words: str, tmp_path: Path) -> None:
    first = told(tmp_path, recipe)[0]
    assert first.id == rule
    assert words in first.claim


HEALTHY = {
    "ends after some digits": Recipe(schooled=True, ends=(5, 8, 11)),
    "counts up": Recipe(schooled=True, micros=3, seed=2),
    "sees all tokens before": Recipe(memory=True, size=10, seed=1),
    "moves far": Recipe(lr=6e-2, versions=True, groups=8, kl=0.01),
    "an adapter": Recipe(lr=5e-3, lora=True, seed=6),
    "rewards of two parts": Recipe(parts=True, schooled=True, size=10),
    "weights of rewards stated": Recipe(parts=True, weights=True, size=10, seed=4),
    "epochs": Recipe(epochs=3, lr=1e-2, limit=12),
}


@pytest.mark.parametrize("recipe", HEALTHY.values(), ids=HEALTHY)
def test_runs_without_a_fault_are_silent(recipe: Recipe, tmp_path: Path) -> None:
    assert not told(tmp_path, recipe, *RULES)


def test_weights_that_do_not_move_tell_no_age() -> None:
    """A warm-up from 0 leaves checkpoints alike: what parts there is infinitely far from what they make."""
    weights = {step: np.full(4, float(step > 2), np.float32) for step in range(5)}
    parted: list[Any] = [(SimpleNamespace(mean=0.1), step, 0) for step in (1, 2, 3)]
    assert old_weights._spread(parted, weights) == math.inf
    assert old_weights._spread(parted[2:] * 2, weights) == 1


def test_samples_as_old_as_their_version_says_are_fine(tmp_path: Path) -> None:
    recipe = Recipe("one-late", lr=1e-2, versions=True, checkpoints=True, size=10, groups=8, steps=10, seed=3)
    assert [one for one in told(tmp_path, recipe) if one.id == "D12"] == []
