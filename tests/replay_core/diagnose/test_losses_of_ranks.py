"""Losses of ranks that divide by their own samples, and of packs that are not the rollout's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from replay_core.diagnose.finding import Finding
from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import look, of


def _run(folder: Path, by: float) -> Finding | None:
    """by: what a rank's sum of sequence means is divided by; it has four of the eight samples of an update."""
    rng = np.random.default_rng(2)
    recorder = Recorder(folder)
    for rank in (0, 1):
        for step in range(4):
            with recorder.step(step, rank=rank) as record:
                for micro, rows in enumerate((3, 1)):
                    ids = rng.integers(3, 900, (rows, 8))
                    mask = (np.arange(5) < rng.integers(2, 6, (rows, 1))).astype(np.float32)
                    loss = rng.normal(size=(rows, 5)).astype(np.float32) * mask
                    valid = np.concatenate([np.ones((rows, 3), np.int64), mask.astype(np.int64)], axis=1)
                    record("forward_data", micro=micro, epoch=0, minibatch=0, input_ids=ids, attention_mask=valid,
                           response_mask=mask, advantages=-loss)  # fmt: skip
                    record("loss", micro=micro, epoch=0, minibatch=0, token_loss=loss,
                           pg_loss=float((loss.sum(1) / mask.sum(1)).sum() / by))  # fmt: skip
    return of(look(folder, "D28"), "D28")


@pytest.mark.parametrize(("by", "is_right"), [(8, True), (4, True), (2, False)])
def test_a_rank_s_mean_over_its_own_samples_is_right(by: float, is_right: bool, tmp_path: Path) -> None:
    found = _run(tmp_path / "d", by)
    assert found is not None
    assert (found.severity == "info") == is_right


def _packs(lengths: list[int], rows: list[np.ndarray]) -> list[list[np.ndarray]]:
    ends = np.cumsum(lengths).tolist()
    return [rows[end - size : end] for size, end in zip(lengths, ends, strict=True)]


def test_a_pack_of_the_forward_is_not_that_of_the_rollout(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    recorder = Recorder(tmp_path / "d", flags={"loss_agg_mode": "seq-mean-token-sum-norm", "loss_divisor": 6})
    for step in range(3):
        rows = [rng.integers(3, 900, 9) for _ in range(8)]
        with recorder.step(step) as record:
            for stage, lengths in (("trajectory", [5, 3]), ("forward_data", [4, 4])):
                for micro, pack in enumerate(_packs(lengths, rows)):
                    bounds = np.arange(len(pack) + 1, dtype=np.int32) * 9
                    ids, mask = np.concatenate(pack), np.tile([0, 0, 0, 1, 1, 1, 1, 1, 1], len(pack))
                    record(stage, micro=micro, input_ids=ids, cu_seqlens=bounds, loss_mask=mask.astype(np.float32))
                    if stage == "forward_data":
                        loss = rng.normal(size=ids.size).astype(np.float32) * mask
                        record("loss", micro=micro, token_loss=loss, pg_loss=float(loss.sum() / 6 / 8))
    found = of(look(tmp_path / "d", "D28"), "D28")
    assert found is None or found.severity == "info"
