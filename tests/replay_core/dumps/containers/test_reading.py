"""Whatever torch.save and pickle.dump write reads equal to torch.load and pickle.load."""

from __future__ import annotations

import pickle
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replay_core.dumps.containers import read_container, read_nested
from replay_core.errors import DumpError, NotADumpError, TruncatedError
from replay_core.records import FileBytes, TensorRef, Unreadable
from tests.fixtures import FIXTURES
from tests.replay_core.dumps.containers.oracle import assert_same, values
from tests.replay_core.dumps.containers.strategies import trees

quick = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.long
@quick
@given(tree=trees, zipped=st.booleans(), protocol=st.sampled_from([2, 2, 3, 4, 5]))
def test_what_torch_save_writes_reads_as_torch_load_reads_it(
    tmp_path: Path, tree: Any, zipped: bool, protocol: int
) -> None:
    path = tmp_path / "file.bin"
    torch.save(tree, path, _use_new_zipfile_serialization=zipped, pickle_protocol=protocol)
    content = read_container(path)
    assert content.container == ("torch_zip" if zipped else "torch_legacy")
    assert not content.problems
    assert_same(content.tree, tree)
    with suppress(AttributeError):  # torch itself cannot load a legacy stream of uint16 or fp8
        assert_same(content.tree, torch.load(path, weights_only=False))


@pytest.mark.long
@quick
@given(tree=trees, protocol=st.integers(2, 5))
def test_what_pickle_dump_writes_reads_as_pickle_load_reads_it(tmp_path: Path, tree: Any, protocol: int) -> None:
    path = tmp_path / "file.bin"
    path.write_bytes(pickle.dumps(tree, protocol))
    content = read_container(path)
    assert content.container == "pickle"
    assert_same(content.tree, tree)
    with suppress(AttributeError):
        assert_same(content.tree, pickle.loads(path.read_bytes()))


@pytest.mark.parametrize("zipped", [True, False])
def test_tensors_that_share_a_storage_point_at_the_same_bytes(tmp_path: Path, zipped: bool) -> None:
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    path = tmp_path / "shared.pt"
    torch.save({"base": base, "row": base[2], "column": base[:, 3]}, path, _use_new_zipfile_serialization=zipped)
    tree = read_container(path).tree
    start = tree["base"].source.offset
    assert tree["base"].source == FileBytes(path, start, 96)
    assert tree["row"].source == FileBytes(path, start + 48, 24)
    assert tree["column"].source == FileBytes(path, start + 12, 76, (6,))


def test_an_expanded_tensor_declares_only_the_bytes_it_touches(tmp_path: Path) -> None:
    torch.save(torch.ones(1).expand(1000, 1000), tmp_path / "e.pt")
    ref = read_container(tmp_path / "e.pt").tree
    assert ref.shape == (1000, 1000)
    assert (ref.source.nbytes, ref.source.strides) == (4, (0, 0))


def test_a_state_dict_of_hundreds_of_tensors_reads_equal(tmp_path: Path) -> None:
    dtypes = [torch.float32, torch.bfloat16]
    state = {f"layer.{i}.weight": torch.randn(i % 7, 3, dtype=dtypes[i % 2]) for i in range(400)}
    state |= {f"view.{i}": state["layer.6.weight"][:, i % 3] for i in range(9)}
    torch.save(state, tmp_path / "state.pt")
    assert_same(read_container(tmp_path / "state.pt").tree, state)


def test_a_module_state_dict_keeps_its_order(tmp_path: Path) -> None:
    state = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)).state_dict()
    torch.save(state, tmp_path / "state.pt")
    content = read_container(tmp_path / "state.pt")
    assert_same(content.tree, dict(state))
    assert content.notes == ("attributes set on a dictionary or a tensor are left out",)


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        (lambda: torch.eye(3).to_sparse(), "sparse"),
        (lambda: torch.eye(3).to_sparse_csr(), "sparse"),
        (lambda: torch.quantize_per_tensor(torch.ones(2, 3), 0.1, 0, torch.qint8), "quantised"),
        (lambda: torch.ones(2, dtype=torch.complex64).conj(), "conj bit: save it with .resolve_conj()"),
        (lambda: torch.ones(2, 3, device="meta"), "meta device"),
        (lambda: torch.zeros(2, 3).to(torch.complex32), "complex32"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_numpy_cannot_hold_is_unreadable_and_the_rest_still_reads(tmp_path: Path, tensor: Any, why: str) -> None:
    torch.save({"odd": tensor(), "plain": torch.arange(3)}, tmp_path / "odd.pt")
    tree = read_container(tmp_path / "odd.pt").tree
    assert isinstance(tree["odd"].source, Unreadable)
    assert why in tree["odd"].source.why
    assert values(tree["plain"]).tolist() == [0, 1, 2]


class Labelled(torch.Tensor):
    """A tensor subclass that rldbg has never heard of."""


def test_an_unknown_tensor_subclass_is_unreadable_by_name(tmp_path: Path) -> None:
    torch.save([torch.ones(2, 3).as_subclass(Labelled), 1], tmp_path / "s.pt")
    ref, one = read_container(tmp_path / "s.pt").tree
    assert one == 1
    assert ref.shape == (2, 3)
    assert "Labelled" in ref.source.why


def test_long_bytes_come_out_as_an_unread_uint8_tensor(tmp_path: Path) -> None:
    path = tmp_path / "b.pkl"
    path.write_bytes(pickle.dumps({"raw": bytes(range(256)) * 9}, 4))
    ref = read_container(path).tree["raw"]
    assert (ref.dtype, ref.shape) == ("uint8", (2304,))
    assert values(ref).tobytes() == bytes(range(256)) * 9


def test_a_torch_zip_held_in_bytes_reads_with_offsets_of_the_outer_file(tmp_path: Path) -> None:
    inner, path = tmp_path / "inner.pt", tmp_path / "outer.pkl"
    torch.save({"x": torch.arange(5.0)}, inner)
    path.write_bytes(pickle.dumps([inner.read_bytes(), "tail"], 4))
    assert read_container(path).container == "pickle"
    ref = read_container(path).tree[0]
    nested = read_nested(ref).tree["x"]
    assert nested.source.path == path
    assert values(nested).tolist() == [0, 1, 2, 3, 4]


def test_numpy_float64_with_permuted_axes_reads_equal(tmp_path: Path) -> None:
    array = np.arange(24.0).reshape(2, 3, 4).transpose(1, 0, 2)
    path = tmp_path / "a.pkl"
    path.write_bytes(pickle.dumps(array, 5))
    assert_same(read_container(path).tree, array)


def test_dtypes_and_devices_and_sizes_come_out_as_text_and_tuples(tmp_path: Path) -> None:
    torch.save({"d": torch.bfloat16, "v": torch.device("cuda", 1), "s": torch.Size([2, 3])}, tmp_path / "m.pt")
    assert read_container(tmp_path / "m.pt").tree == {"d": "torch.bfloat16", "v": "cuda:1", "s": (2, 3)}


@pytest.mark.parametrize(("data", "found"), [(b"<>", "<>"), (b"\x89PNG\r\n", "PNG"), (b"\x80\x00", "x80"), (b"x", "x")])
def test_a_file_of_another_kind_is_named_by_its_first_bytes(tmp_path: Path, data: bytes, found: str) -> None:
    path = tmp_path / "liar.pt"
    path.write_bytes(data)
    with pytest.raises(NotADumpError, match=r"first bytes") as caught:
        read_container(path)
    assert found in str(caught.value.found)


def test_an_empty_file_is_truncated(tmp_path: Path) -> None:
    path = tmp_path / "empty.pt"
    path.touch()
    with pytest.raises(TruncatedError, match="empty"):
        read_container(path)


def test_a_missing_file_and_a_directory_are_dump_errors(tmp_path: Path) -> None:
    for path in (tmp_path / "none.pt", tmp_path):
        with pytest.raises(DumpError, match="cannot"):
            read_container(path)


def test_reading_headers_imports_neither_torch_nor_numpy(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.pt", "b.pt", "c.pkl")]
    torch.save({"x": torch.ones(3)}, paths[0])
    torch.save({"x": torch.ones(3)}, paths[1], _use_new_zipfile_serialization=False)
    paths[2].write_bytes(pickle.dumps({"x": torch.ones(3), "y": np.ones(3)}))
    code = (
        "import sys; from replay_core.dumps.containers import read_container\n"
        "for path in sys.argv[1:]: read_container(path)\n"
        "print([name for name in ('torch', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, *map(str, paths)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


GENUINE = ["openrlhf", "nexrl", "areal", "slime", "trl", "sglang_dumper", "roll_critic", "grpo_notes", "open_instruct"]


@pytest.mark.parametrize("framework", GENUINE)
def test_genuine_files_read_equal_to_their_own_loader(framework: str) -> None:
    paths = sorted(p for p in (FIXTURES / framework).rglob("*") if p.suffix in (".pt", ".pkl") and p.is_file())
    assert paths
    for path in paths:
        content = read_container(path)
        theirs = pickle.loads(path.read_bytes()) if path.suffix == ".pkl" else torch.load(path, weights_only=False)
        assert_same(content.tree, theirs)


@pytest.mark.parametrize("name", ["verl/train_batch_step1.dp", "roll/rollout_mock/train/step_000002.pkl"])
def test_a_data_proto_holds_a_torch_zip_that_reads_in_place(name: str) -> None:
    path = FIXTURES / name
    tree = read_container(path).tree
    assert tree["__class__"].endswith(".DataProto")
    inner = read_nested(tree["state"][0])
    assert inner.container == "torch_zip"
    refs: list[TensorRef] = []

    def gather(value: Any) -> None:
        if isinstance(value, TensorRef):
            refs.append(value)
        elif isinstance(value, dict):
            for item in value.values():
                gather(item)
        elif isinstance(value, (list, tuple)):
            for item in value:
                gather(item)

    gather(inner.tree)
    assert refs
    assert all(values(ref).shape == ref.shape for ref in refs)
