"""Faults of the update and of what it is given, in runs that are really trained; and the healthy ones beside them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from replay_core.diagnose.case import Case
from replay_core.diagnose.engine import diagnose
from replay_core.dumps import open_run
from tests.replay_core.diagnose.updating import Recipe, run, told

pytestmark = pytest.mark.long  # they train, or record whole runs

#: What these runs are held against.
RULES = ("D01", "D03", "D04", "D07", "D23", "D28", "D43", "D49", "D50", "D55", "D57", "D68", "D75", "D88", "L15", "L22")


FAULTS = [
    (Recipe("undivided", micros=4, mean="token_mean"), "D28", "each loss is 4 times what the run states"),
    (Recipe("undivided", micros=3, kl=0.1, lr=1e-2, epochs=2, pg=False), "D28", "each loss is 3 times"),
    (Recipe("own-tokens", mean="token_sum", micros=4, size=8), "D28", "and the run states token_sum"),
    (Recipe("own-tokens", mean="token_sum", micros=3, pg=False), "D28", "and the run states token_sum"),
    (
        Recipe("own-means", mean="token_sum", micros=4, worded="token-mean"),
        "D28",
        "each micro-batch is divided by its own tokens",
    ),
    (Recipe("never-zeroed"), "D68", "gradients pile up"),
    (Recipe("never-zeroed", adam=False, lr=0.05), "D68", "gradients pile up"),
    (Recipe("never-zeroed", max_norm=1.0, epochs=2), "D68", "gradients pile up"),
    (Recipe("never-zeroed", max_norm=0.5, keeps_clipped=True, minis=2), "D68", "as clipping left it"),
    (Recipe("never-zeroed", max_norm=0.5, minis=2, steps=5), "D68", "as clipping left it"),
    (Recipe("other-parameters", checkpoints=True), "D57", "checkpoints of 7 steps are one"),
    (Recipe("other-parameters"), "D55", "the policy never changes"),
    (Recipe("lora-dead", lora=True), "D23", "no gradient reaches it"),
    (Recipe("micro-dropped", micros=3), "D88", "8 of 24 samples are in none of the 2 micro-batches"),
    (Recipe("reused", lr=2e-2), "D75", "the rollouts of step 1 are trained on again in steps 2, 3, 4, 5, 6"),
    (Recipe("overlong-turned", overlong=True, size=8), "D07", "cut-off responses is turned around"),
    (
        Recipe("kl-unweighted", kl=0.05, lr=1e-2),
        "D49",
        "weighs 1 in the loss, and the run states a coefficient of 0.05",
    ),
    (Recipe("loader-restarts"), "D43", "steps 3, 4, 5 have those of steps 0, 1, 2, in the same order"),
    (Recipe("loader-stands"), "D43", "steps 2, 3, 4, 5, 6 have the same prompts"),
    (Recipe("other-bound", max_norm=0.1), "L15", "is clipped at 0.001, and the run states 0.1"),
    (Recipe("warm-up-restarts"), "L22", "warm-up begins again at step 3"),
    (Recipe("corrected-twice", weighed="token", lr=2e-2), "D50", "the rollout is corrected for twice"),
    (Recipe("weight-twice", weighed="token", lr=2e-2), "D50", "the importance weight stands in it twice"),
    (Recipe("weight-turned", weighed="token", lr=2e-2), "D50", "the importance weight is upside down"),
    (Recipe("unweighed", weighed="token", lr=2e-2), "D50", "importance weights (TIS) are stated, and not applied"),
    (Recipe("mask-turned", weighed="token_mask"), "D50", "the importance mask rejects every token"),
    (Recipe("mask-strided", size=8), "D07", "have no token in the loss, every 3rd row"),
    (Recipe("neighbours-mean", size=10, groups=6), "D04", "the mean reward of the group before"),
    (Recipe("rate-leaps"), "L22", "leaps 40 times at step 2"),
]


@pytest.mark.parametrize(
    ("recipe", "rule", "words"), FAULTS, ids=[f"{one.fault}-{number}" for number, (one, *_) in enumerate(FAULTS)]
)
def test_the_first_finding_is_the_line_that_is_wrong(recipe: Recipe, rule: str, words: str, tmp_path: Path) -> None:
    first = told(tmp_path, recipe)[0]
    assert first.id == rule
    assert words in first.claim


HEALTHY = {
    "micro-batches and a KL": Recipe(micros=4, kl=0.05),
    "a KL that is recorded with its coefficient": Recipe("kl-recorded-weighted", micros=4, kl=0.05, lr=1e-2),
    "the same without pg_loss": Recipe(kl=0.05, epochs=2, pg=False, lr=1e-2),
    "tokens weigh alike": Recipe(mean="token_mean", micros=4),
    "a sum over the step's tokens": Recipe(mean="token_sum", epochs=2),
    "the same without its pg_loss": Recipe(mean="token_sum", micros=3, pg=False),
    "a mean over the mini-batch's tokens, in a word": Recipe(mean="token_sum", micros=4, worded="token-mean"),
    "a mean over each micro-batch's own tokens, as is stated": Recipe(
        "own-means-stated", mean="token_sum", micros=4, worded="token-mean"
    ),
    "a mean over tokens, which many trainers take of each micro-batch": Recipe(
        "own-means", mean="token_sum", micros=4, worded="token-mean", stated="grpo"
    ),
    "micro-batches of equally many tokens": Recipe(
        "own-means", mean="token_sum", micros=4, worded="token-mean", limit=1
    ),
    "epochs of one batch": Recipe(epochs=4, lr=1e-2),
    "gradients of large batches": Recipe(size=32, groups=16, lr=1e-2),
    "plain steps": Recipe(adam=False, lr=0.5),
    "an adapter": Recipe(lora=True),
    "gradients that are clipped": Recipe(max_norm=0.05, steps=8),
    "gradients that are recorded clipped": Recipe(max_norm=0.05, minis=2, keeps_clipped=True),
    "some gradients that are recorded clipped": Recipe(max_norm=0.3, minis=2, keeps_clipped=True, lr=1e-2),
    "gradients that are hardly clipped": Recipe(max_norm=0.4, steps=8),
    "cut-off responses left out": Recipe(overlong=True, size=8),
    "groups without a spread left out": Recipe(filtered=True),
    "checkpoints": Recipe(checkpoints=True),
    "importance weights": Recipe(weighed="token", lr=2e-2),
    "importance weights that are a mask": Recipe(weighed="token_mask", lr=2e-2),
    "a small data set, shuffled": Recipe(shuffled=True, steps=10),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_wrong_with(name: str, tmp_path: Path) -> None:
    assert told(tmp_path, replace(HEALTHY[name], seed=3), *RULES) == []


def test_a_run_that_states_older_samples_may_use_them_again(tmp_path: Path) -> None:
    assert told(tmp_path, Recipe("reused", off_policy=True), "D75") == []


@pytest.mark.parametrize("rate", [1e-2, 0.1], ids=str)
def test_gradients_of_one_batch_are_alike_and_pile_up_nowhere(rate: float, tmp_path: Path) -> None:
    found = told(tmp_path, Recipe(one_batch=True, steps=10, lr=rate), "D68", "D75")
    # A test on one batch has no other samples at all.
    assert [(one.id, one.severity) for one in found] == [("D75", "warning")]


@pytest.mark.parametrize(
    ("resets", "severity"),
    [((3, 6), "info"), ((4,), "warning"), ((2, 6), "warning")],
    ids=["on a schedule", "once", "unevenly"],
)
def test_a_reference_that_is_the_policy_again(resets: tuple[int, ...], severity: str, tmp_path: Path) -> None:
    """The first step's rate is 0, so that the two are apart in one step only before the first reset."""
    kept = open_run(run(tmp_path / "d", Recipe(kl=0.03, lr=2e-2, resets=resets, warm_up=3)))
    (found,) = diagnose(Case(kept), ["D46"]).findings
    assert found.severity == severity
    assert "the reference is the policy again" in found.claim


def test_a_filter_that_is_stated_and_turned_round_is_the_first_cause_of_equal_rewards(tmp_path: Path) -> None:
    kept = open_run(run(tmp_path / "d", Recipe("filter-turned", filtered=True)))
    (found,) = (one for one in diagnose(Case(kept), ["D01"]).findings if one.severity == "error")
    assert found.steps == tuple(range(7))
    assert found.cause.startswith("the filter of groups that is stated (dynamic sampling) keeps")
