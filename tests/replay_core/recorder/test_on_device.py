"""What is told of a tensor where it lies. Every device computes it by the same calls; here it is the host."""

from __future__ import annotations

import math

import pytest
import torch

from replay_core import fold
from replay_core.hashes import digest_of
from replay_core.recorder import on_device
from replay_core.recorder.values import Noted, Snapshots, describe, raw, statistics
from tests.replay_core.recorder.on_a_device import seconds_of_the_host_and_of_both

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

VALUES = {
    "bfloat16": torch.randn(300_001).bfloat16(),
    "float16": torch.randn(7, 9).half(),
    "float32 with what is no number": torch.tensor([math.nan, math.inf, -math.inf, -math.inf, 0.0, -0.0, 3.0, -1e30]),
    "float64": torch.randn(1000, dtype=torch.float64) * 1e-200,
    "nothing finite": torch.full((5,), math.nan),
    "far from 0": torch.randn(10_000) + 1e6,
    "int64": torch.randint(-(2**40), 2**40, (999,)),
    "int32": torch.tensor([2**31 - 1, -(2**31), 16_777_217], dtype=torch.int32),
    "bool": torch.rand(50) > 0.5,
    "complex64": torch.randn(100, dtype=torch.complex64),
    "float8": torch.randn(100).to(torch.float8_e4m3fn),
    "beyond float64": torch.tensor([1e300, -1e300], dtype=torch.float64),
    "empty": torch.empty(0),
    "one number": torch.tensor(2.5),
    "a view": torch.randn(40, 50).t()[3:],
}


@pytest.fixture(autouse=True)
def _as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own condition of CUDA: more than 16 rows."""
    right = torch._int_mm

    def int_mm(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        assert rows.shape[0] > 16
        return right(rows, columns)

    monkeypatch.setattr(torch, "_int_mm", int_mm)


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_digest_and_statistics_are_those_a_reader_takes_of_the_same_bytes(values: torch.Tensor) -> None:
    snapshots = Snapshots(owned=False, told="stats")
    noted = snapshots._told_there(torch, values, stats=True)
    snapshots.ready()
    dense = values.contiguous()
    assert noted.digest == digest_of([raw(dense)], "fold")
    expected = statistics(dense)
    assert noted.stats is not None
    assert noted.stats.keys() == expected.keys()
    for name, figure in expected.items():
        close = 1e-6 if name == "std" else 1e-9
        assert noted.stats[name] == (pytest.approx(figure, rel=close) if isinstance(figure, float) else figure), name
    field = describe("x", noted, 0, stats=True)
    assert (field["dtype"], field["shape"]) == (str(values.dtype).removeprefix("torch."), list(values.shape))


def test_statistics_of_chunks_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.cat([torch.randn(1000) * 3 + 5, torch.tensor([math.nan, math.inf]), torch.zeros(10)])
    whole = on_device.joined(on_device.moments(torch, values).tolist(), values.numel())
    monkeypatch.setattr(on_device, "CHUNK", 97)
    values_of = on_device.joined(on_device.moments(torch, values).tolist(), values.numel())
    assert values_of == pytest.approx(whole, rel=1e-12)


def test_what_is_told_is_of_the_values_before_the_trainer_changed_them() -> None:
    snapshots = Snapshots(owned=True, told="hash")
    for count in (10_000, 100_000):
        values = torch.arange(count)
        before = values.clone()
        noted = snapshots._told_there(torch, values, stats=False)
        values += 1
        (told,) = (one for held in snapshots._there.values() for one in held)
        kept = {part.untyped_storage().data_ptr() for part in told.parts}
        assert values.untyped_storage().data_ptr() not in kept, "the trainer's memory is free before the writer has run"
        snapshots.ready()
        assert noted.digest == digest_of([raw(before)], "fold")
        assert noted.stats is None
        assert 0 < snapshots.nbytes < 70_000


def test_all_that_a_record_was_told_comes_in_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    snapshots = Snapshots(owned=True, told="stats")
    rows = [torch.randn(count) for count in (20_000, 70_000, 5_000_000)]
    noted = [snapshots._told_there(torch, one, stats=True) for one in rows]
    copies = []

    def copy(_self: Snapshots, _torch: object, value: torch.Tensor, *, is_own: bool) -> torch.Tensor:
        copies.append(is_own)
        return value

    monkeypatch.setattr(Snapshots, "_to_host", copy)
    snapshots.forget()
    assert copies == [True]
    snapshots.ready()
    for one, values in zip(noted, rows, strict=True):
        assert one.digest == digest_of([raw(values)], "fold")
        assert one.stats is not None
        assert one.stats["l2"] == pytest.approx(statistics(values)["l2"], rel=1e-9)


def test_where_there_is_no_room_for_one_copy_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_args: object, **_named: object) -> torch.Tensor:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    snapshots, rows = Snapshots(owned=True, told="hash"), [torch.randn(20_000), torch.randn(90_000)]
    noted = [snapshots._told_there(torch, one, stats=False) for one in rows]
    monkeypatch.setattr(Snapshots, "_to_host", full)
    snapshots.forget()
    snapshots.ready()
    assert [one.digest for one in noted] == [digest_of([raw(values)], "fold") for values in rows]
    assert snapshots._there_bytes == 0


def test_a_device_that_folds_wrongly_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_device, "_folds", {})
    assert on_device.can_fold(torch, torch.device("cpu"))
    right = torch._int_mm
    monkeypatch.setattr(on_device, "_folds", {})
    monkeypatch.setattr(torch, "_int_mm", lambda a, b: right(a, b) + 1)
    assert not on_device.can_fold(torch, torch.device("cpu"))
    monkeypatch.setattr(on_device, "_folds", {})
    monkeypatch.delattr(torch, "_int_mm")
    assert not on_device.can_fold(torch, torch.device("cpu"))


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_devices_digests_are_those_of_the_host_and_nobody_waits(dtype: torch.dtype) -> None:
    assert on_device.can_fold(torch, torch.device("cuda", 0))
    values = torch.randn(1 << 22, device="cuda").to(dtype)
    on_host = values.cpu()
    snapshots, taken = Snapshots(owned=True, told="stats"), []

    def take() -> None:
        taken.append(snapshots.take(values * 1, "values"))
        snapshots.forget()

    take()  # memory is pinned, which is waited for
    snapshots.ready()
    host_s, both_s = seconds_of_the_host_and_of_both(take)
    assert host_s < both_s / 2, "the host waited for the device"
    snapshots.ready()
    for noted in taken:
        assert noted.digest == digest_of([raw(on_host)], "fold")
        assert noted.stats["l2"] == pytest.approx(statistics(on_host)["l2"], rel=1e-9)


@pytest.mark.parametrize("count", [69_632, 69_633, 73_727, 4_456_448, 4_456_449, 4_460_544])
def test_rows_that_are_left_are_as_many_as_a_device_multiplies(count: int) -> None:
    assert fold.left_on_device(torch, torch.zeros(count, dtype=torch.uint8)).numel() <= fold.ENOUGH


def test_rows_of_two_kinds_are_joined_to_another_kind() -> None:
    rows = [torch.ones(3), torch.zeros(5)]
    on_host = describe("x", rows, 0, stats=False)["digest"]
    noted = [Noted("float32", (n,), f"{kind}:{'0' * 32}") for n, kind in ((3, "xxh3"), (5, "fold"))]
    assert on_host.startswith("xxh3:")
    assert describe("x", noted, 0, stats=False)["digest"].startswith("fold:")
    assert describe("x", {"deep": [noted]}, 0, stats=False, bare=True)["digest"].startswith("fold:")
