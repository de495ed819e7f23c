"""Labels beside token ids: of their own place, of the next, and of others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from replay_core.diagnose.finding import Finding
from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import look, of


def _run(folder: Path, by: int, *, packed: bool = False, alike: bool = False, named: str = "labels") -> Finding | None:
    """by: how many places later the token of a label lies; alike: all tokens are one."""
    draw = torch.Generator().manual_seed(0)
    with Recorder(folder) as recorder:
        for step in range(3):
            ids = torch.full((6, 20), 7) if alike else torch.randint(3, 60, (6, 20), generator=draw)
            mask = (torch.arange(20) >= 6) & (torch.arange(20) < torch.randint(14, 20, (6, 1), generator=draw))
            full = torch.where(mask, ids, -100)
            labels = torch.full_like(full, -100)
            if by >= 0:
                labels[:, : 20 - by] = full[:, by:]
            else:
                labels[:, -by:] = full[:, :by]
            held = {"input_ids": ids, named: labels}
            if packed:
                held = {name: each.reshape(1, -1) for name, each in held.items()}
            with recorder.step(step) as record:
                record("forward_data", micro=0, **held)
    return of(look(folder, "D142"), "D142")


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("by", "words"), [(2, "shifted twice"), (-1, "the wrong way"), (3, "by 3 places")])
def test_labels_of_other_places_are_told(by: int, words: str, packed: bool, tmp_path: Path) -> None:
    found = _run(tmp_path / "d", by, packed=packed)
    assert found is not None
    assert found.severity == "error"
    assert words in found.claim


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("named", ["labels", "target_ids"])
@pytest.mark.parametrize("by", [0, 1])
def test_labels_of_a_token_or_the_next_are_right(by: int, named: str, packed: bool, tmp_path: Path) -> None:
    assert _run(tmp_path / "d", by, packed=packed, named=named) is None


def test_equal_tokens_tell_no_place(tmp_path: Path) -> None:
    assert _run(tmp_path / "d", 2, alike=True) is None
