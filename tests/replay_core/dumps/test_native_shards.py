"""One step of one model, recorded under torchrun by two ranks: by DDP, which holds all of it, and by FSDP2's shards."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from replay_core import pages
from replay_core.compare import compare_runs
from replay_core.dumps import open_run
from replay_core.recorder import Recorder
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


@pytest.mark.parametrize("how", ["sum", "avg"])
def test_parts_of_a_sum_that_ranks_recorded_are_their_sum(how: str, tmp_path: Path) -> None:
    from torch import distributed
    from torch.distributed.tensor import DTensor, Partial, init_device_mesh
    from torch.testing._internal.distributed import fake_pg as fake

    parts = torch.randn(2, 3, 5)
    for rank in range(2):
        distributed.init_process_group("fake", store=fake.FakeStore(), rank=rank, world_size=2)
        try:
            held = DTensor.from_local(parts[rank], init_device_mesh("cpu", (2,)), [Partial(how)])
            with Recorder(tmp_path / "dump") as recorder, recorder.step(0, rank=rank) as step:
                step("gradient", {"grad.w": held})
        finally:
            distributed.destroy_process_group()
    records = open_run(tmp_path / "dump").select(stage="gradient")
    for record in records:
        (ref,) = [ref for ref in record.tensors() if ref.name == "grad.w"]
        expected = parts.sum(0) if how == "sum" else parts.mean(0)
        np.testing.assert_allclose(pages.array(ref), expected.numpy(), rtol=1e-6)
    assert len(records) == 2


@pytest.mark.parametrize("said", ["as recorded", "_StridedShard(dim=0, sf=2)"])
def test_shards_of_fsdp_over_tensor_parallelism_are_laid_as_they_were_cut(said: str, tmp_path: Path) -> None:
    """FSDP cuts what each tensor-parallel rank has, though its axis of the mesh stands before."""
    from torch import distributed
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh
    from torch.distributed.tensor.placement_types import _StridedShard
    from torch.testing._internal.distributed import fake_pg as fake

    whole = torch.randn(8, 3)
    for rank in range(4):
        local = whole.chunk(2)[rank % 2].chunk(2)[rank // 2].contiguous()
        distributed.init_process_group("fake", store=fake.FakeStore(), rank=rank, world_size=4)
        try:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            placements = [_StridedShard(0, split_factor=2), Shard(0)]
            held = DTensor.from_local(local, mesh, placements, shape=whole.shape, stride=whole.stride())
            with Recorder(tmp_path / "dump") as recorder, recorder.step(0, rank=rank) as step:
                step("param", {"param.w": held})
        finally:
            distributed.destroy_process_group()
        index = tmp_path / "dump" / f"index_rank{rank}.jsonl"
        if said != "as recorded":  # by torch before 2.10
            index.write_text(index.read_text().replace("_S(0, 2)", said))
    records = open_run(tmp_path / "dump").select(stage="param")
    assert len(records) == 4
    for record in records:
        (ref,) = record.tensors()
        np.testing.assert_array_equal(pages.array(ref), whole.numpy())
