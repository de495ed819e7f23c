"""Shards that the recorder wrote, of ranks that are in several meshes, each with a place of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from replay_core import pages
from replay_core.dumps import open_run
from replay_core.recorder import Recorder

WHOLE = torch.arange(24.0).reshape(6, 4)


def recorded(directory: Path, meshes: list[list[int]], held: list[torch.Tensor], placed: str) -> Path:
    """held: by rank, the tensor that its mesh has. Every rank writes its part."""
    from torch import distributed
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.testing._internal.distributed import fake_pg as fake

    for rank, tensor in enumerate(held):
        distributed.init_process_group("fake", store=fake.FakeStore(), rank=rank, world_size=len(held))
        try:
            (own,) = (members for members in meshes if rank in members)
            mesh: Any = DeviceMesh("cpu", own)
            mine = tensor.chunk(len(own))[own.index(rank)] if placed == "Shard" else tensor
            placement = Shard(0) if placed == "Shard" else Replicate()
            value = DTensor.from_local(mine.contiguous(), mesh, [placement], shape=tensor.shape, stride=(4, 1))
            with Recorder(directory) as recorder, recorder.step(0, rank=rank) as record:
                record("gradient", {"grad.w": value}, micro=None)
        finally:
            distributed.destroy_process_group()
    return directory


def read(directory: Path) -> dict[int, Any]:
    return {
        record.key.rank or 0: pages.array(ref) for record in open_run(directory).records for ref in record.tensors()
        if ref.name == "grad.w"
    }  # fmt: skip


@pytest.mark.parametrize("meshes", [[[0, 1], [2, 3]], [[0, 2], [1, 3]]])
def test_a_rank_has_what_its_own_mesh_makes(meshes: list[list[int]], tmp_path: Path) -> None:
    of_mesh = {rank: number for number, members in enumerate(meshes) for rank in members}
    held = [WHOLE + 100 * of_mesh[rank] for rank in range(4)]
    found = read(recorded(tmp_path, meshes, held, "Shard"))
    for rank in range(4):
        np.testing.assert_array_equal(found[rank], held[rank].numpy())


def test_a_rank_has_its_own_copy_of_what_is_replicated(tmp_path: Path) -> None:
    held = [WHOLE, WHOLE + 1]
    found = read(recorded(tmp_path, [[0, 1]], held, "Replicate"))
    for rank in range(2):
        np.testing.assert_array_equal(found[rank], held[rank].numpy())
