"""Gradient norms of several ranks: one where gradients are averaged, each its own where they are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from replay_core.diagnose.finding import Finding
from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import look, of


def _run(folder: Path, own: float, *, same: bool = False, steps: int = 5, **flags: Any) -> Finding | None:
    """own: by how much rank 1's norm is larger. same: both ranks hold the same samples, as under tensor parallelism."""
    draw = np.random.default_rng(7)
    with Recorder(folder, flags=flags) as recorder:
        for step in range(steps):
            norm = float(draw.uniform(0.5, 2.0))
            ids_BT = draw.integers(3, 40, (2, 6, 8))
            for rank in (0, 1):
                ids = ids_BT[0 if same else rank]
                held = np.ones_like(ids)
                mask = held.copy()
                mask[:, :3] = 0
                with recorder.step(step, rank=rank) as record:
                    record("forward_data", input_ids=ids, attention_mask=held, response_mask=mask, micro=0,
                           log_probs=np.full((6, 7), -1.0, np.float32))  # fmt: skip
                    record("optimizer", grad_norm=norm * (1 + own * rank), lr=1e-3, micro=0)
    return of(look(folder), "D66")


def test_norms_of_gradients_that_are_not_averaged(tmp_path: Path) -> None:
    found = _run(tmp_path / "d", 0.3)
    assert found is not None
    assert (found.severity, found.steps) == ("warning", (0, 1, 2, 3, 4))
    assert "in all 5 updates" in found.claim


def test_norms_that_are_one_but_for_rounding(tmp_path: Path) -> None:
    assert _run(tmp_path / "d", 1e-6) is None


def test_norms_of_shards_are_worth_knowing(tmp_path: Path) -> None:
    found = _run(tmp_path / "d", 0.3, strategy="fsdp2")
    assert found is not None
    assert found.severity == "info"


def test_ranks_that_share_their_samples_hold_parts_of_one_model(tmp_path: Path) -> None:
    assert _run(tmp_path / "d", 0.3, same=True) is None


def test_few_updates_say_nothing(tmp_path: Path) -> None:
    assert _run(tmp_path / "d", 0.3, steps=3) is None
