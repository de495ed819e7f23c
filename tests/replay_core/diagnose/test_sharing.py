"""Faults of how a batch is shared out and its terms are put together, in runs that are really trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from replay_core.diagnose.case import Case
from replay_core.diagnose.engine import diagnose
from replay_core.diagnose.finding import Finding
from replay_core.diagnose.signals import Signals
from replay_core.dumps import open_run
from tests.replay_core.diagnose.sharing import Shared, run

pytestmark = pytest.mark.long  # they train, or record whole runs

#: What these runs are held against.
RULES = ("D04", "D14", "D28", "D42", "D49", "D50", "D59", "D60", "D64", "D65", "D66", "D75")


def _told(folder: Path, recipe: Shared, *rules: str) -> list[Finding]:
    """What is found loud, first things first."""
    kept = open_run(run(folder / "d", recipe))
    found = diagnose(Case(kept, Signals.of(kept)), rules).findings
    return [one for one in found if one.severity != "info"]


FAULTS = [
    (Shared("kl-summed", kl=0.05, lr=2e-2), "D28", "the KL loss is a sum over each response's tokens"),
    (Shared("longest", kind="dr_grpo", micros=3, limit=24), "D28", "times the longest response of the micro-batch"),
    (Shared("weights-twice", tis=True, lr=2e-2), "D50", "the importance weight stands in it twice"),
    (Shared("uncapped", kind="cispo", epochs=3, lr=4e-2), "D50", "the bare ratio, and never cut off"),
    (Shared("steps-between", micros=4, lr=2e-2), "D14", "the weights change within an update"),
    (Shared("taken-late", minis=3, lr=4e-2), "D60", "refreshed before every mini-batch"),
    (Shared("ratio-to-engine", micros=3, epochs=2, lr=2e-2, noise=0.02), "D50", "the ratio is taken to the rollout's"),
    (Shared("one-seed"), "D64", "every response of a group stands in it 2 times"),
    (Shared("not-reduced", ranks=2, lr=4e-2), "D66", "the ranks train models of their own"),
    (Shared("own-statistics", kind="reinforce++", ranks=2), "D04", "normalised over each rank's own rows"),
    (Shared("half-groups"), "D04", "in parts of 3 that follow each other"),
    (Shared("every-other"), "D04", "one row to each in turn"),
    (Shared("noise-taught", binary=True), "D04", "groups of equal rewards have advantages"),
    (Shared("filled-up"), "D75", "the last 4 samples of the batch are its first 4"),
]


@pytest.mark.parametrize(("recipe", "rule", "words"), FAULTS, ids=[one.fault for one, *_ in FAULTS])
def test_the_first_finding_is_the_line_that_is_wrong(recipe: Shared, rule: str, words: str, tmp_path: Path) -> None:
    first = _told(tmp_path, recipe, *RULES)[0]
    assert (first.id, words in first.claim) == (rule, True), first.claim


HEALTHY = {
    "a KL": Shared(kl=0.05, lr=2e-2),
    "Dr. GRPO": Shared(kind="dr_grpo", micros=3, kl=0.02),
    "importance weights": Shared(tis=True, lr=2e-2),
    "CISPO": Shared(kind="cispo", epochs=3, lr=4e-2),
    "mini-batches": Shared(minis=3, micros=3, lr=4e-2),
    "epochs": Shared(epochs=3, micros=3, lr=2e-2),
    "ranks": Shared(ranks=2, lr=4e-2),
    "REINFORCE++ on ranks": Shared(kind="reinforce++", ranks=2),
    "binary rewards": Shared(binary=True),
    "an engine of other kernels": Shared(epochs=2, micros=3, lr=2e-2, noise=0.02),
    "longer answers": Shared(kind="dr_grpo", micros=3, limit=24),
    "cut-off responses left out": Shared(binary=True, overlong=True),
    "pairs": Shared(size=2, groups=12),
    "nothing is stated": Shared(stated=False, minis=2, lr=2e-2),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_wrong_with(name: str, tmp_path: Path) -> None:
    said = _told(tmp_path, replace(HEALTHY[name], seed=3), *RULES)
    assert said == [], [one.claim for one in said]
