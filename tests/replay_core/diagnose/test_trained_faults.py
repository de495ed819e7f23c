"""Runs that an independent trainer really trained, one line of it wrong, beside the same run without: an untrained
policy is enough for what shows in single steps. `make bench-diagnose` counts many more.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pytest

from benchmarks.diagnose import forms
from benchmarks.diagnose.trainer import Recipe, Trained, train
from replay_core.diagnose.finding import Finding
from tests.replay_core.diagnose.batches import causes, look
from tests.replay_core.diagnose.logs import diagnosed_path

pytestmark = pytest.mark.long


@lru_cache(maxsize=2)
def trained(recipe: Recipe) -> Trained:
    """A run of the recipe: tests that stand beside each other write the same one in several forms."""
    return train(recipe)


def found(directory: Path, form: str = "verl", **recipe: object) -> list[Finding]:
    """Warnings and errors of a short run, but for what an untrained policy is: it answers alike, and does not stop."""
    settings = {"warm": 0, "steps": 3, "kept": 3, "prompts": 4, "limit": 10, "name": "run", **recipe}
    said = causes(look(forms.DUMPS[form](trained(Recipe(**settings)), directory / form)))  # type: ignore[arg-type]
    return [one for one in said if one.id not in ("D01", "D03", "D20")]


FAULTS: list[tuple[str, str, dict[str, object]]] = [
    ("native", "D41", {"fault": "tools-counted"}),
    ("slime", "D27", {"fault": "retokenised"}),
    ("native", "D27", {"fault": "retokenised"}),
    ("verl", "D42", {"fault": "mixed-groups"}),
    ("TRL", "D47", {"fault": "doubled-bos"}),
    ("verl", "D44", {"fault": "targets-are-advantages", "algorithm": "ppo"}),
    ("verl", "D44", {"fault": "targets-shifted", "algorithm": "ppo"}),
    ("verl", "D44", {"fault": "gae-without-next", "algorithm": "ppo"}),
    ("native", "D28", {"fault": "times-world-size"}),
    ("native", "D50", {"fault": "loss-turned"}),
    ("verl", "D46", {"fault": "wrong-parameters"}),
    ("native", "D50", {"fault": "ratio-inverted", "lr": 4e-3, "minibatches": 2}),
    ("native", "D50", {"fault": "smaller-loss", "lr": 6e-3, "epochs": 3}),
    ("verl", "D51", {"fault": "kl-rewarded", "algorithm": "ppo", "kl": 0.05, "lr": 2e-3}),
    ("verl", "D52", {"fault": "gae-turned", "algorithm": "ppo"}),
    ("native", "D52", {"fault": "values-kept", "algorithm": "ppo"}),
    ("verl", "D52", {"fault": "gae-late", "algorithm": "ppo"}),
    ("native", "D48", {"fault": "mask-shifted"}),
    ("TRL", "D48", {"fault": "mask-shifted"}),
    ("slime", "D12", {"fault": "sync-stops", "lr": 4e-3, "steps": 7, "kept": 7}),
    ("TRL", "D16", {"fault": "packing-leak"}),
    ("verl", "D11", {"fault": "top-k"}),
    ("verl", "D10", {"fault": "temperature"}),
]


@pytest.mark.parametrize(("form", "id", "recipe"), FAULTS, ids=[f"{one[2]['fault']}-{one[0]}" for one in FAULTS])
def test_a_line_that_is_wrong_is_the_first_thing_said(
    form: str, id: str, recipe: dict[str, object], tmp_path: Path
) -> None:
    said = found(tmp_path, form, **recipe)
    assert [one.id for one in said][:1] == [id], [one.claim for one in said]


def test_a_run_on_one_batch_is_worth_knowing_and_no_warning(tmp_path: Path) -> None:
    recipe = Recipe("run", fault="same-prompts", steps=4, kept=4, warm=0, prompts=4, limit=10)
    told = look(forms.DUMPS["slime"](train(recipe), tmp_path / "slime"), "D43", "D46").findings
    assert [(one.id, one.severity) for one in told] == [("D43", "info")]


def test_a_term_that_is_subtracted_is_found_in_what_was_logged(tmp_path: Path) -> None:
    recipe = Recipe("run", fault="kl-subtracted", kl=0.2, lr=2e-3, steps=12, kept=1, prompts=4)
    first = diagnosed_path(forms.DUMPS["native"](train(recipe), tmp_path / "native")).findings[0]
    assert (first.id, first.severity) == ("D49", "error")
    assert "the KL term is subtracted from the loss" in first.claim


@pytest.mark.parametrize(
    ("form", "fault", "words"),
    [
        ("verl", "dropout", "dropout"),
        ("TRL", "dropout", "dropout"),
        ("slime", "positions-count-padding", "left padding"),
        ("verl", "other-template", "prompt"),
        ("TRL", "engine-doubles-bos", "another prompt"),
    ],
)
def test_what_differs_between_samples_tells_the_cause_of_a_mismatch(
    form: str, fault: str, words: str, tmp_path: Path
) -> None:
    first = found(tmp_path, form, fault=fault, warm=240)[0]
    assert first.id == "D09"
    assert words in first.cause


@pytest.mark.parametrize("form", list(forms.DUMPS))
@pytest.mark.parametrize(
    "recipe",
    [
        {},
        {"tools": True},
        {"algorithm": "ppo", "kl": 0.02, "epochs": 2},
        {"algorithm": "drgrpo", "minibatches": 2},
        {"algorithm": "cispo", "minibatches": 2, "clip_low": 1.0},
        {"lag": 2, "steps": 5, "kept": 5},
    ],
    ids=["grpo", "tools", "ppo", "drgrpo", "cispo", "async"],
)
def test_a_run_that_is_well_is_not_called_ill(recipe: dict[str, object], form: str, tmp_path: Path) -> None:
    said = found(tmp_path, form, **recipe)
    assert not said, [one.claim for one in said]
