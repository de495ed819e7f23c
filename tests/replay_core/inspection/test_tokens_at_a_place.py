"""A sample token by token, from the place that is looked at: of packed rows the index's first number is no sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from replay_core import workbench
from replay_core.inspection import tokens
from replay_core.workbench import open_run


def _looked(folder: Path, **asked: Any) -> Any:
    cu = torch.tensor([0, 3, 7, 12])
    fields = {"input_ids": torch.arange(12)[None], "cu_seqlens": cu, "log_probs": -torch.rand(1, 12)}
    torch.save(fields, folder / "a.pt")
    record = open_run(folder / "a.pt").records[0]
    pointed = {"path": str(folder / "a.pt"), "key": record.key.to_mapping(), "name": "log_probs"}
    return workbench.inspect(pointed, pointed, judge=False, tokens=True, **asked)["tokens"]  # type: ignore[arg-type]


def test_a_packed_places_sample_is_opened_at_its_token(tmp_path: Path) -> None:
    for asked in ({"at": [0, 8]}, {"at_a": [0, 8], "at_b": [0, 8]}):
        found = _looked(tmp_path, **asked)
        assert (found["sample"], found["position"], found["first"]) == (2, 2, 0)  # of the next token
        assert found["ids"] == [7, 8, 9, 10, 11]


def test_a_token_behind_those_that_fit_is_among_those_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "MAX_TOKENS", 2)
    found = _looked(tmp_path, at=[0, 10])
    assert (found["first"], found["ids"], found["left_out"]) == (3, [10, 11], 3)
    assert all(len(column["values"]) == 2 for column in found["columns"])
