"""A step of many ranks that is compared a few ranks at a time comes to what it comes to as a whole."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from replay_core import workbench
from replay_core.compare import apart
from replay_core.compare.pairing.folding import FieldFolder
from replay_core.dumps import open_run
from replay_core.jobs import Event, Partial
from replay_core.recorder import Recorder

RANKS, STEPS = 5, 2


def _fields(rank: int, step: int, dice: random.Random, side: str) -> dict[str, dict[str, Any]]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    modules = {}
    for layer in range(4):
        for part in ("inputs.0", "output"):
            modules[f"layers.{layer}.{part}"] = torch.randn(3, 8, generator=generator)
    gradients = {f"layers.{layer}.weight": torch.randn(4, 8, generator=generator) for layer in range(4)}
    if side == "b":
        for name, values in modules.items():
            kind = dice.choice(["same", "same", "same", "noise", "wrong", "nan"] if step else ["same", "same", "noise"])
            if kind == "noise":
                modules[name] = values * (1 + 1e-7)
            elif kind == "wrong":
                values[dice.randrange(3)] *= 1.5
            elif kind == "nan":
                values[1, dice.randrange(8)] = float("nan")
        if dice.random() < 0.5:
            del modules[f"layers.{dice.randrange(4)}.output"]
        factor = 2.0 if dice.random() < 0.5 else 1.0
        gradients = {name: values * factor for name, values in gradients.items()}
    return {"modules": modules, "gradient": gradients}


def _dump(path: Path, side: str, seed: int, *, ids: list[int] | None = None) -> Path:
    """ids: which samples the ranks have; None: the records hold no tokens."""
    dice = random.Random(seed)
    for rank in range(RANKS):
        recorder = Recorder(path / side)
        for step in range(STEPS):
            with recorder.step(step, rank=rank) as record:
                if ids is not None:
                    tokens = torch.arange(12).reshape(3, 4) + 100 * ids[rank]
                    record("batch_inputs", {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}, micro=0)
                fields = _fields(rank, step, dice, side)
                record("modules", fields["modules"], micro=0)
                record("gradient", fields["gradient"])
    return path / side


def _told(document: Any) -> dict[str, Any]:
    return {name: list(value) if name == "tensors" else value for name, value in document.items() if name != "created"}


@pytest.mark.parametrize("seed", range(4))
def test_ranks_that_face_their_own_are_compared_a_few_at_a_time(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = _dump(tmp_path, "a", seed), _dump(tmp_path, "b", seed)
    whole: list[Event] = []
    few: list[Event] = []
    expected = _told(workbench.compare_dumps(a, b, on_event=whole.append))
    groups: list[int] = []
    known = apart.StepOpening.groups
    monkeypatch.setattr(apart.StepOpening, "groups", lambda self: _counted(known(self), groups))
    monkeypatch.setattr(apart, "MOST_HELD", 30)
    assert _told(workbench.compare_dumps(a, b, is_rejudged=False, on_event=few.append)) == expected
    assert groups == [RANKS] * STEPS, "no two ranks were held at once"
    firsts = [[one for one in events if isinstance(one, Partial)] for events in (whole, few)]
    assert firsts[0] == firsts[1], "the first divergence is said once, and is the first of all ranks"
    assert expected["counts"]["SAME"]
    assert expected["first_divergence"] is not None


def _counted(groups: list[Any], counts: list[int]) -> list[Any]:
    counts.append(len(groups))
    return groups


@pytest.mark.parametrize("ids", [[0, 1, 2, 4, 3], [4, 3, 2, 1, 0], [0, 1, 2, 3, 9]])
def test_ranks_that_share_samples_are_compared_together(
    ids: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = _dump(tmp_path, "a", 0, ids=list(range(RANKS))), _dump(tmp_path, "b", 0, ids=ids)
    expected = _told(workbench.compare_dumps(a, b))
    groups: list[int] = []
    known = apart.StepOpening.groups
    monkeypatch.setattr(apart.StepOpening, "groups", lambda self: _counted(known(self), groups))
    monkeypatch.setattr(apart, "MOST_HELD", 30)
    assert _told(workbench.compare_dumps(a, b, is_rejudged=False)) == expected
    assert groups == [1] * STEPS


def test_fields_that_were_folded_are_the_same_and_open_no_file(tmp_path: Path) -> None:
    record = next(one for one in open_run(_dump(tmp_path, "a", 0)).records if one.key.stage == "modules")
    before = record.tensors()
    folder = FieldFolder()
    record.fold(folder.fold)
    assert not record.is_read
    record.path.unlink()
    assert record.tensors() == before
    record.release()
    with pytest.raises(Exception, match=r"not there|No such file|gone|absent"):
        record.tensors()
