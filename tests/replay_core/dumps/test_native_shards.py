"""One step of one model, recorded under torchrun by two ranks: by DDP, which holds all of it, and by FSDP2's shards."""

from __future__ import annotations

import shutil
from pathlib import Path

from replay_core.compare import compare_runs
from replay_core.dumps import open_run
from tests.fixtures import FIXTURES

DDP, FSDP2 = FIXTURES / "native" / "ddp", FIXTURES / "native" / "fsdp2"


def test_shards_of_the_ranks_are_laid_together_and_are_what_ddp_computed() -> None:
    found = compare_runs(open_run(DDP), open_run(FSDP2))
    assert found.agrees, found.first
    assert found.counts["SHAPE"] == found.counts["MISSING"] == 0
    gradients = [row for row in found.tensors if row.name.startswith("grad.")]
    assert len(gradients) == 20
    assert all(row.verdict.value in ("SAME", "CLOSE") for row in gradients)


def test_a_tensor_of_which_a_rank_is_missing_is_said_to_be_so(tmp_path: Path) -> None:
    shutil.copytree(FSDP2, tmp_path / "dump")
    for file in (tmp_path / "dump").glob("*/step_*_rank1*"):
        file.unlink()
    (tmp_path / "dump/index_rank1.jsonl").unlink()
    (record,) = open_run(tmp_path / "dump").select(stage="gradient")
    ref = next(ref for ref in record.tensors() if ref.name.startswith("grad."))
    assert not ref.is_readable
    assert "shard at mesh [1] is missing" in ref.source.why  # type: ignore[union-attr]
