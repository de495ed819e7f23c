"""Rewards that a trained run was paid in another order than its samples, and the order that is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.diagnose import forms
from benchmarks.diagnose.trainer import Recipe, train
from tests.replay_core.diagnose.batches import look
from tests.replay_core.diagnose.updating import Recipe as Small
from tests.replay_core.diagnose.updating import told

pytestmark = pytest.mark.long


def _recipe(fault: str, judge: str, warm: int) -> Recipe:
    return Recipe("run", fault=fault, judge=judge, steps=6, kept=6, group=6, warm=warm, seed=1)


@pytest.mark.parametrize("form", ["native", "slime"])
@pytest.mark.parametrize(("judge", "warm"), [("exact", 120), ("shaped", 120), ("exact", 400), ("shaped", 400)])
def test_rewards_sorted_by_length_are_found_and_named(form: str, judge: str, warm: int, tmp_path: Path) -> None:
    run = forms.DUMPS[form](train(_recipe("scores-by-length", judge, warm)), tmp_path / form)
    first = look(run, "D130", "D56").findings[0]
    assert (first.id, first.severity) == ("D130", "error")
    assert "in order of the length of the response, shortest first" in first.claim


@pytest.mark.parametrize("fault", ["", "judge-of-length", "judge-of-prompts", "constant-judge"])
@pytest.mark.parametrize("warm", [60, 400])
def test_rewards_of_their_own_samples_are_left_alone(fault: str, warm: int, tmp_path: Path) -> None:
    run = forms.native(train(_recipe(fault, "exact", warm)), tmp_path / "run")
    assert not look(run, "D130").findings


@pytest.mark.parametrize("size", [6, 10])
def test_a_healthy_policy_that_repeats_itself_is_left_alone(size: int, tmp_path: Path) -> None:
    assert not told(tmp_path, Small("", schooled=True, size=size), "D130")
