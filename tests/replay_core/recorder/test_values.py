"""What the index says of a tensor: the compiled loop and torch say the same."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from replay_core import hashes, kernel
from replay_core.recorder import Recorder, values

DTYPES = (
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool,
)  # fmt: skip
ODD = {
    "plain": (),
    "zeros of both signs": (0.0, -0.0),
    "infinities and NaN": (math.inf, -math.inf, math.nan, math.nan),
    "subnormal": (1e-40, -6e-8, 5e-324),
}


@pytest.mark.skipif(kernel.loaded() is None, reason="a C compiler and Linux are needed")
@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_compiled_loop_says_what_torch_says(dtype: torch.dtype, odd: str):
    generator = torch.Generator().manual_seed(0)
    tensor = torch.randn(3, 20_001, generator=generator, dtype=torch.float64) * 5 + 2
    tensor.view(-1)[: len(ODD[odd])] = torch.tensor(ODD[odd], dtype=torch.float64)
    tensor = (tensor if dtype.is_floating_point else tensor.nan_to_num(0, 3, 3).abs()).to(dtype)
    found, expected = values._counted(tensor), values._by_torch(tensor)
    assert found is not None
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert found[name] == (pytest.approx(value, rel=1e-9) if type(value) is float else value), name


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(4, 4)[:, ::2], torch.ones(3, dtype=torch.complex64), torch.ones(3, dtype=torch.int16),
        torch.full((3,), 1e300, dtype=torch.float64), torch.ones(3).to(torch.float8_e4m3fn),
    ],
    ids=["strided", "complex", "int16", "squares past a double", "float8"],
)  # fmt: skip
def test_what_the_loop_does_not_know_is_left_to_torch(tensor: torch.Tensor):
    assert values._counted(tensor) is None
    assert values.statistics(tensor)["max"] == float(
        tensor.abs().max() if tensor.is_complex() else tensor.double().max()
    )


def test_of_nothing_and_of_nothing_finite_there_are_no_figures():
    for tensor, count in ((torch.empty(0), 0), (torch.full((5,), math.nan), 5)):
        found = values.statistics(tensor)
        assert (found["count"], found["nan"], found["zero"], found["mean"]) == (count, count, 0, None)
        assert found == values._by_torch(tensor)


@pytest.mark.parametrize("level", ["hash", "stats"])
def test_what_is_told_where_it_stands_is_what_a_copy_says(level: str):
    weight = torch.randn(6, 5, dtype=torch.bfloat16)
    fields = {
        "transposed": weight.t(),
        "a part": torch.arange(12.0)[3:9:2],
        "nothing": torch.zeros(0, 4),
        "rows": [torch.arange(3), torch.arange(5)],
        "nested": {"x": torch.ones(2, dtype=torch.bool), "note": "a text"},
        "conjugated": torch.tensor([1 + 2j]).conj(),
        "again": weight,
    }
    said = []
    for told in (None, level):
        snapshots = values.Snapshots(owned=True, told=told)
        kept = snapshots.take(fields, "all")
        assert (snapshots.nbytes == 0) is (told is not None), "nothing waits in memory"
        said.append([
            values.describe(name, leaf, order, stats=level == "stats", bare=True)
            for order, (name, leaf) in enumerate(values.leaves(kept))
        ])  # fmt: skip
    assert said[1] == said[0]


def test_what_is_told_is_told_before_the_trainer_changes_it():
    value = torch.ones(4)
    snapshots = values.Snapshots(owned=True, told="hash")
    told = snapshots.take_now(value, "x")
    before = values.digest(value)
    value.zero_()
    assert (told.digest, snapshots.take(told, "x")) == (before, told)


def test_tensors_deep_within_lists_have_one_digest_at_every_level():
    value = {"parts": [[torch.ones(2)], [torch.zeros(3)]]}
    said = []
    for told in (None, "hash", "stats"):
        ((name, leaf),) = values.leaves(values.Snapshots(owned=True, told=told).take(value, "all"))
        said.append(values.describe(name, leaf, 0, stats=False, bare=True)["digest"])
    assert len(set(said)) == 1


@pytest.mark.parametrize("kind", ["xxh3", "sha256"])
def test_a_digest_that_takes_longer_than_a_copy_is_left_to_the_writer(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(hashes, "taken", lambda: kind)
    value = torch.ones(4)
    with Recorder(tmp_path, level="hash", asynchronous=True) as recorder:
        kept = recorder.snapshots().take(value, "x")
        assert isinstance(kept, values.Noted) is (kind == "xxh3")
        with recorder.step(0) as record:
            record("loss", loss=value)
    assert f'"digest": "{kind}:' in (tmp_path / "index_rank0.jsonl").read_text()
