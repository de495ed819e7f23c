"""Faults that the demo's trainer really makes, named from what it recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from replay_core.demo.faults import FAULTS, check
from replay_core.demo.train import train_demo
from replay_core.diagnose.case import Case
from replay_core.diagnose.engine import diagnose
from replay_core.dumps import open_run
from replay_core.errors import RequestError

NAMED = {
    "zero-reward-variance": "D01",
    "packing-leak": "D16",
    "temperature": "D10",
    "logprob-shift": "D08",
    "stale-weights": "D12",
    "pad-in-mask": "D18",
    "nan": "D21",
    "eos-untrained": "D19",
}


def test_every_fault_has_a_name_to_be_found_under() -> None:
    assert set(NAMED) == set(FAULTS)


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_first(fault: str, seed: int, tmp_path: Path) -> None:
    train_demo(tmp_path / "run", steps=3, seed=seed, fault=fault)
    found = diagnose(Case(open_run(tmp_path / "run"))).findings
    assert (found[0].id, found[0].severity) == (NAMED[fault], "error")
    others = [one.id for one in found if one.severity != "info" and one.downstream_of is None]
    assert others == [NAMED[fault]]


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_the_demo_without_a_fault_is_clean(seed: int, tmp_path: Path) -> None:
    train_demo(tmp_path / "run", steps=4, seed=seed)
    found = diagnose(Case(open_run(tmp_path / "run")))
    assert [(one.id, one.claim) for one in found.findings if one.severity != "info"] == []
    assert {"D01", "D04", "D08", "D09", "D10", "D12", "D14", "D16", "D18", "D19", "D21", "D28"} <= set(found.checked)


def test_an_unknown_fault_is_a_wrong_request(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="gremlins"):
        check("gremlins")
    with pytest.raises(RequestError):
        train_demo(tmp_path / "run", fault="gremlins")
    assert not (tmp_path / "run").exists()
