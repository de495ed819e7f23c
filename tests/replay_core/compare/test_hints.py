"""Hints stand where they apply, and nowhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from replay_core import workbench
from tests.builders import write_pair


def hints(tmp_path: Path, a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    found: list[str] = workbench.compare_dumps(*write_pair(tmp_path, a, b))["hints"]
    return found


def test_equal_runs_need_no_hint(tmp_path: Path):
    assert hints(tmp_path, {"loss": {"loss": 1.0}}, {"loss": {"loss": 1.0 + 9e-6}}) == []


def test_a_shape_mismatch_leads_to_padding_and_max_length(tmp_path: Path):
    found = hints(tmp_path, {"modules": {"x": torch.ones(2, 5)}}, {"modules": {"x": torch.ones(2, 8)}})
    assert len(found) == 1
    assert all(word in found[0] for word in ("shape mismatch (x)", "pad alike", "max_length"))


def test_a_loss_that_is_off_leads_to_entropy_precision_and_seed(tmp_path: Path):
    a = {"loss": {"loss": 1.0, "pg_loss": 0.5, "entropy_loss": 0.5}}
    b = {"loss": {"loss": 1.001, "pg_loss": 0.5, "entropy_loss": 0.501}}
    found = hints(tmp_path, a, b)
    assert len(found) == 1
    assert all(word in found[0] for word in ("0.001", "entropy_coeff", "precision", "seed", "entropy_loss differ"))
    assert "pg_loss" not in found[0]
    assert "record is_loss_debug" in found[0]


def test_a_stage_that_is_missing_leads_to_what_enables_it(tmp_path: Path):
    a = {"loss": {"loss": 1.0}, "forward_data": {"entropy": torch.ones(2)}, "is_loss_debug": {"x": 1.0}}
    found = hints(tmp_path, a, {"loss": {"loss": 1.0}})
    assert len(found) == 2
    assert "forward_data is missing in b: debug.dump_options.forward_data: true" in found[0]
    assert "WEAVER_DEBUG_DUMP_OPTIONS=is_loss_debug (with WEAVER_DEBUG_DUMP_ENABLED=1)" in found[1]
