"""Runs whose engine and trainer, or judge, part: what the data can tell of the cause is said as one cause."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from replay_core.diagnose.finding import Finding
from tests.replay_core.diagnose.batches import causes
from tests.replay_core.diagnose.disagreeing import run
from tests.replay_core.diagnose.logs import diagnosed_path

pytestmark = pytest.mark.long  # they train, or record whole runs

LONG = pytest.mark.long


def found(folder: Path, fault: str = "", **settings: Any) -> list[Finding]:
    return causes(diagnosed_path(run(folder / "run", fault, **settings)))


FAULTS: list[Any] = [
    ("gathered-late", {"nemo": True}, "D09", "the trainer gathers each token from the logits one place too late"),
    ("raw-logprobs", {"temperature": 1.4}, "D10", "the engine reports raw log-probabilities"),
    ("raw-logprobs", {"temperature": 1.4, "since": 3, "steps": 7}, "D10", "raw log-probabilities, since step 3"),
    ("divided-twice", {"temperature": 0.6}, "D10", "tokens were sampled at the rollout's"),
    ("retokenised", {"since": 2}, "D09", "their tokens are not the sampled ones"),
    ("engine-stops", {"since": 3, "steps": 8, "lr": 3e-3, "seed": 1}, "D12", "does not follow the trainer's"),
    ("experts-reordered", {"experts": 4, "since": 2}, "D30", "experts stand in another order"),
    ("bos-doubled", {}, "D47", "in the trainer's rows alone"),
    ("tools-counted", {}, "D41", "they stand inside of responses"),
    ("end-stripped", {}, "D19", "the end token (EOS) is stripped"),
    ("replayed-by-token", {"experts": 4, "replay": True}, "D112", "not those of the token before"),
    ("replayed-by-row", {"experts": 4, "replay": True, "prompts": 12}, "D112", "not those of the row before"),
    ("window", {}, "D09", "exact where fewer than 7 tokens stand before"),
    ("rows-rolled", {}, "D79", "rollout log-probabilities are in the wrong rows"),
    ("judge-dies", {"since": 3}, "L17", "the judge is constant from step 3 on"),
    ("form-twice", {"since": 3, "names": True}, "D104", "form_reward is counted twice in the reward from step 3 on"),
    ("rewards-permuted", {"since": 3, "size": 8, "digits": 2, "steps": 8}, "D56", "rewards belong to other samples"),
    pytest.param("gathered-late", {"since": 3, "steps": 7}, "D09", "gathers each token", marks=LONG),
    pytest.param("engine-quantised", {"since": 3, "steps": 7, "lr": 3e-4, "seed": 2}, "D12", "and not old ones",
                 marks=LONG),
    pytest.param("raw-logprobs", {"temperature": 0.6}, "D10", "reports raw log-probabilities", marks=LONG),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "settings", "id", "words"), FAULTS)
def test_the_one_cause_is_said(fault: str, settings: dict[str, Any], id: str, words: str, tmp_path: Path) -> None:
    said = found(tmp_path, fault, **settings)
    assert [one.id for one in said][:1] == [id], [one.claim for one in said]
    assert words in said[0].claim


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1.4, "nemo": True},
        {"fault": "tools"},
        {"experts": 4, "replay": True},
        {"experts": 4, "replay": True, "lag": 2, "lr": 3e-3},
        {"lag": 1, "lr": 2e-3, "names": True},
        pytest.param({"experts": 4, "lr": 3e-3}, marks=LONG),
        pytest.param({"size": 8, "digits": 2, "steps": 8, "seed": 1}, marks=LONG),
        pytest.param({"lr": 5e-3}, marks=LONG),
    ],
    ids=str,
)
def test_the_same_run_without_it_has_nothing_to_say(settings: dict[str, Any], tmp_path: Path) -> None:
    assert [one.claim for one in found(tmp_path, **settings)] == []
