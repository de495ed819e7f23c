"""One tensor in many places: DTensor shards, sharded weights, columns laid end to end; and numpy's own files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from replay_core import pages
from replay_core.dumps import open_run
from replay_core.dumps.columns import join
from replay_core.dumps.dtensor import assembled
from replay_core.records import Inline, TensorRef
from tests.builders import save_file
from tests.replay_core.dumps.test_dialects import fields_of


def shard(
    kind: Any, coordinate: tuple[int, ...], mesh: tuple[int, ...], local: torch.Tensor, shape: tuple[int, ...]
) -> Any:
    """A DTensor as the container hands it over."""
    places = tuple(
        {"__class__": f"torch.distributed.tensor.placement_types.{name}", "state": {"dim": dim}} for name, dim in kind
    )
    axes = tuple({"state": {"shape": (size,)}} for size in mesh)
    spec = {
        "mesh": {"state": {"_layout": {"state": {"axes": axes}}, "_coordinate_on_dim": coordinate}},
        "placements": places,
    }
    ref = TensorRef("", "float32", tuple(local.shape), _inline(local))
    return {"__class__": "torch.distributed.tensor.DTensor", "shape": shape, "local": ref, "spec": {"state": spec}}


def _inline(local: torch.Tensor) -> Any:
    return Inline(local.contiguous().numpy().tobytes())


@pytest.mark.parametrize(
    "kind",
    [
        [("Shard", 0), ("Shard", 1)],
        [("Shard", 1), ("Shard", 0)],
        [("Shard", 0), ("Shard", 0)],
        [("Replicate", 0), ("Shard", 0)],
        [("Shard", 1), ("Replicate", 0)],
    ],
)
def test_shards_of_a_2d_mesh_make_the_tensor(kind: list[tuple[str, int]]) -> None:

    whole = torch.arange(35.0).reshape(5, 7)
    shards = {}
    for rank in range(4):
        place, local = (rank // 2, rank % 2), whole
        for axis, (name, dim) in enumerate(kind):
            if name == "Shard":
                local = local.chunk(2, dim)[place[axis]]
        shards[rank] = shard(kind, place, (2, 2), local, (5, 7))
    np.testing.assert_array_equal(pages.array(assembled(shards)), whole.numpy())
    del shards[3], shards[2]
    if kind[0][0] == "Shard":
        assert "is missing" in str(assembled(shards).source)


def test_other_reductions_and_strided_shards_of_an_unknown_cut_are_not_put_together() -> None:
    for name, said in (("_MaskPartial", "MaskPartial"), ("_StridedShard", "strided shard")):
        shards = {rank: shard([(name, 0)], (rank,), (2,), torch.ones(2, 2), (4, 2)) for rank in range(2)}
        assert said in str(assembled(shards).source)


@pytest.mark.parametrize("how", ["sum", "avg", "max", "min"])
def test_parts_of_a_sum_are_added_up(how: str) -> None:
    torch.manual_seed(0)
    parts = torch.randn(2, 4, 6)
    expected = {"sum": parts.sum(0), "avg": parts.mean(0), "max": parts.amax(0), "min": parts.amin(0)}[how]
    shards = {}
    for rank in range(4):
        place = rank // 2, rank % 2
        shards[rank] = shard([("Partial", 0), ("Shard", 0)], place, (2, 2), parts[place[0]].chunk(2)[place[1]], (4, 6))
        shards[rank]["spec"]["state"]["placements"][0]["state"] = {"reduce_op": how}
    found = assembled(shards)
    np.testing.assert_allclose(pages.array(found), expected.numpy(), rtol=1e-6)
    del shards[3]
    assert "is missing" in str(assembled(shards).source), "a part that is not there is no sum without it"


def local_of(whole: torch.Tensor, placements: Any, coordinate: list[int]) -> torch.Tensor:
    """A rank's piece: FSDP's strided cut comes after tensor parallelism's."""
    cuts = [(axis, placed) for axis, placed in enumerate(placements) if hasattr(placed, "dim")]
    local = whole
    for axis, placed in sorted(cuts, key=lambda cut: type(cut[1]).__name__ == "_StridedShard"):
        pieces = local.chunk(2, placed.dim)
        local = pieces[coordinate[axis]] if coordinate[axis] < len(pieces) else local.narrow(placed.dim, 0, 0)
    return local.clone()


def test_torchs_own_shards_of_a_2d_mesh(tmp_path: Path) -> None:
    """Four ranks' files as torch writes them (no rank needs another to save): uneven, negative, replicated, strided."""
    from torch import distributed
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, init_device_mesh
    from torch.distributed.tensor.placement_types import _StridedShard
    from torch.testing._internal.distributed import fake_pg as fake

    whole = {"even": torch.randn(8, 4), "odd": torch.randn(7, 5).bfloat16(), "short": torch.randn(3)}
    layouts = {"s0s0": (Shard(0), Shard(0)), "rs0": (Replicate(), Shard(0)), "s1r": (Shard(-1), Replicate()),
               "fsdp_tp": (_StridedShard(0, split_factor=2), Shard(0)), "sum": (Replicate(), Partial())}  # fmt: skip
    for rank in range(4):
        distributed.init_process_group("fake", store=fake.FakeStore(), rank=rank, world_size=4)
        try:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            place = mesh.get_coordinate()
            held = {
                f"{kind}_{name}": DTensor.from_local(
                    local_of(tensor, placed, place), mesh, placed, shape=tensor.shape, stride=tensor.stride()
                )
                for kind, placed in layouts.items()
                for name, tensor in whole.items()
            }
            save_file(tmp_path / f"model_world_size_4_rank_{rank}.pt", held)
        finally:
            distributed.destroy_process_group()
    found = fields_of(open_run(tmp_path))
    unread = {name: str(ref.source) for name, ref in found.items() if not ref.is_readable}
    assert set(unread) == {"param.fsdp_tp_odd", "param.fsdp_tp_short"}
    assert "uneven" in unread["param.fsdp_tp_odd"]
    for name, ref in found.items():
        if ref.is_readable:
            times = 2 if "sum_" in name else 1  # each of two ranks holds all of it as its part
            expected = times * whole[name.rpartition("_")[2]].float().numpy()
            np.testing.assert_array_equal(pages.array(ref).astype(np.float32), expected)


def test_torchs_own_dtensor_file_is_read(tmp_path: Path) -> None:
    """One rank of two, written by torch itself: the second shard is missing, and that is said."""
    from torch import distributed
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))
        tensor = DTensor.from_local(torch.arange(6.0).reshape(2, 3), mesh, [Shard(0)])
        save_file(tmp_path / "model_world_size_1_rank_0.pt", {"w": tensor, "step": 1})
    finally:
        distributed.destroy_process_group()
    run = open_run(tmp_path)
    assert run.dialect == "dtensor"
    np.testing.assert_array_equal(pages.array(fields_of(run)["param.w"]), np.arange(6.0).reshape(2, 3))


def test_checkpoints_of_several_steps_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    """verl: global_step_N/{actor,critic}/model_world_size_W_rank_R.pt."""
    from torch import distributed
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))
        tensor = DTensor.from_local(torch.arange(6.0).reshape(2, 3), mesh, [Shard(0)])
        for folder in ("global_step_5/actor", "global_step_5/critic", "global_step_10/actor"):
            save_file(tmp_path / folder / "model_world_size_1_rank_0.pt", {"w": tensor})
            save_file(tmp_path / folder / "extra_state_world_size_1_rank_0.pt", {"lr": torch.ones(1)})
    finally:
        distributed.destroy_process_group()
    for file in tmp_path.rglob("*.pt"):
        os.utime(file, (1, 1))
    run = open_run(tmp_path)
    weights = {(record.key.step, record.key.role) for record in run.records if record.key.stage == "param"}
    assert weights == {(5, "actor"), (5, "critic"), (10, "actor")}
    assert {record.key.step for record in run.records if record.key.stage == "tensors"} == {5, 10}
    assert run.problems == []


def test_sharded_weights_are_one_record(tmp_path: Path) -> None:
    from safetensors.torch import save_file as save_safetensors

    save_safetensors({"model.a.weight": torch.ones(2)}, tmp_path / "model-00001-of-00002.safetensors")
    places = {
        "model.a.weight": "model-00001-of-00002.safetensors",
        "model.b.weight": "model-00002-of-00002.safetensors",
        "model.c.weight": "../../secret.safetensors",
    }
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    run = open_run(tmp_path)
    assert (run.dialect, len(run.records)) == ("weights", 1)
    found = fields_of(run)
    assert pages.array(found["param.a.weight"]).tolist() == [1, 1]
    assert not found["param.b.weight"].is_readable
    assert "leads out of the directory" in str(found["param.c.weight"].source)


@pytest.mark.parametrize("compressed", [False, True])
def test_numpy_files(tmp_path: Path, compressed: bool) -> None:
    arrays = {
        "input_ids": np.arange(6).reshape(2, 3),
        "f": np.asfortranarray(np.eye(3, 2)),
        "b": np.arange(3, dtype=">i4"),
        "scalar": np.float32(2),
        "words": np.array(["a", "bcd"]),
    }
    (np.savez_compressed if compressed else np.savez)(
        tmp_path / "x.npz", **arrays, objects=np.array([{"a": 1}, "b"], dtype=object)
    )
    np.save(tmp_path / "y.npy", arrays["f"])
    found = {ref.name: ref for ref in open_run(tmp_path / "x.npz").records[0].tensors()}
    for name, values in arrays.items():
        np.testing.assert_array_equal(pages.array(found[name]), values)
    assert found["objects.0.a"].source == Inline(1)
    assert found["objects.1"].source == Inline("b")
    run = open_run(tmp_path)
    assert (run.dialect, [record.key.micro for record in run.records]) == ("file", [0, 1])


def test_a_long_column_is_read_in_even_chunks() -> None:
    parts = [TensorRef("", "int64", (n,), Inline(list(range(n)))) for n in (5, 0, 7, 1, 11)]
    column = join("x", parts)
    assert column is not None
    assert column.rows == (5, 0, 7, 1, 11)
    whole = [number for n in column.rows for number in range(n)]
    chunks = list(pages.flat_chunks(column, 4))
    assert [start for start, _ in chunks] == list(range(0, 24, 4))
    assert [int(number) for _, chunk in chunks for number in chunk] == whole == pages.array(column).tolist()


@pytest.mark.parametrize(("kind", "copies"), [([("Replicate", 0), ("Shard", 0)], 1), ([("Replicate", 0)] * 2, 3)])
def test_what_other_ranks_hold_of_a_replicated_tensor_stays_beside_it(kind: list[tuple[str, int]], copies: int) -> None:
    shards = {}
    for rank in range(4):
        place, local = (rank // 2, rank % 2), torch.arange(35.0).reshape(5, 7) + 100 * rank
        for axis, (name, dim) in enumerate(kind):
            if name == "Shard":
                local = local.chunk(2, dim)[place[axis]]
        shards[rank] = shard(kind, place, (2, 2), local, (5, 7))
    found = assembled(shards)
    assert [copy.shape for copy in found.copies] == [(5, 7)] * copies
    assert pages.array(found)[0, 0] == 0
    assert [pages.array(copy)[0, 0] for copy in found.copies] == ([200] if copies == 1 else [100, 200, 300])
    del shards[3]
    assert len(assembled(shards).copies) == copies - 1  # of what is not there nobody can say anything


def test_names_of_one_file_in_an_index_are_read_once_and_stand_once(tmp_path):
    from safetensors.numpy import save_file as save

    save({f"w{i}": np.full(2, i, np.float32) for i in range(4)}, tmp_path / "s0.safetensors")
    for number in range(1, 4):
        os.link(tmp_path / "s0.safetensors", tmp_path / f"s{number}.safetensors")
    places = {f"w{i}": f"s{i}.safetensors" for i in range(4)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (record,) = open_run(tmp_path).records
    assert len(record.tensors()) == 4
    assert {ref.name: pages.array(ref).tolist() for ref in record.tensors()} == {f"w{i}": [i, i] for i in range(4)}


def test_shards_of_a_set_that_are_one_file_stand_once_and_it_is_said(tmp_path):
    from safetensors.numpy import save_file as save

    save({"w": np.ones(2, np.float32)}, tmp_path / "model-00001-of-00002.safetensors")
    os.link(tmp_path / "model-00001-of-00002.safetensors", tmp_path / "model-00002-of-00002.safetensors")
    (record,) = open_run(tmp_path).records
    assert [ref.name for ref in record.tensors()] == ["w"]
    assert "the same file as model-00001-of-00002.safetensors" in record.problems[0].what
