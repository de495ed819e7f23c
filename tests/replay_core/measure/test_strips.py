"""Where a pair differs along its axes: against plain numpy, and at a glance of what is too large to read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from replay_core.dumps import open_run
from replay_core.measure import strips
from replay_core.measure.statistics import statistics
from replay_core.pages import CHUNK
from replay_core.records import TensorRef
from tests.builders import write_dump


def _ref(folder: Path, values: torch.Tensor) -> TensorRef:
    run = open_run(write_dump(folder, {"modules": {"x": values}}))
    found = run.records[0].get("x")
    assert found is not None
    return found


def test_each_axis_has_the_relative_difference_of_its_stretches(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(3, 10, 200, generator=generator)
    b = a.clone()
    b[1, 4:] += 0.1
    b[:, :, 130] *= 2
    found = strips.difference_strips(_ref(tmp_path / "a", a), _ref(tmp_path / "b", b))
    assert found is not None
    d, x = (b.double() - a.double()).numpy(), a.double().numpy()
    for axis, strip in enumerate(found["axes"]):
        others = tuple(other for other in range(3) if other != axis)
        squares, base = (d * d).sum(axis=others), (x * x).sum(axis=others)
        places = np.arange(a.shape[axis]) * len(strip["rel_l2"]) // a.shape[axis]
        for bucket, value in enumerate(strip["rel_l2"]):
            here = places == bucket
            assert value == pytest.approx(np.sqrt(squares[here].sum() / base[here].sum()), rel=1e-9)
    assert found["looked_at"] == a.numel()
    counted = found["histogram"]["zeros"] + sum(entry["count"] for entry in found["histogram"]["bins"])
    assert counted == a.numel()
    assert found["histogram"]["zeros"] == int((a == b).sum())


def test_a_turned_phase_is_a_difference_though_no_magnitude_changed(tmp_path: Path) -> None:
    a = torch.ones(4, 8, dtype=torch.complex64)
    b = a.clone()
    b[2] *= 1j
    found = strips.difference_strips(_ref(tmp_path / "a", a), _ref(tmp_path / "b", b))
    assert found is not None
    assert found["axes"][0]["rel_l2"] == pytest.approx([0, 0, 2**0.5, 0])


def test_a_packs_batch_axis_of_one_is_no_strip_and_shapes_must_match(tmp_path: Path) -> None:
    a = torch.ones(1, 6, 4)
    found = strips.difference_strips(_ref(tmp_path / "a", a), _ref(tmp_path / "b", a + 1))
    assert found is not None
    assert [axis["axis"] for axis in found["axes"]] == [1, 2]
    assert strips.difference_strips(_ref(tmp_path / "c", a), _ref(tmp_path / "d", torch.ones(1, 5, 4))) is None


def test_what_is_not_finite_is_counted_and_leaves_the_sums(tmp_path: Path) -> None:
    a = torch.ones(4, 4)
    b = a.clone()
    b[0, 0], b[3, 3] = float("nan"), float("inf")
    found = strips.difference_strips(_ref(tmp_path / "a", a), _ref(tmp_path / "b", b))
    assert found is not None
    assert found["histogram"]["nonfinite"] == 2
    assert all(value == 0 for axis in found["axes"] for value in axis["rel_l2"])


@pytest.mark.parametrize("shape", [(1, 64, 4000), (4000, 64), (2, 2, 64000), (256000,)])
def test_a_large_pair_is_looked_at_in_part_and_says_how_much(
    tmp_path: Path, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strips, "LARGEST", 20_000)
    monkeypatch.setattr("replay_core.pages.CHUNK", 4_000)
    a = torch.ones(shape)
    found = strips.difference_strips(_ref(tmp_path / "a", a), _ref(tmp_path / "b", a * 1.5))
    assert found is not None
    assert 0 < found["looked_at"] < a.numel() / 4
    for axis in found["axes"]:
        assert {value for value in axis["rel_l2"] if value is not None} == {0.5}


def test_statistics_of_a_sample_say_how_much_they_looked_at(tmp_path: Path) -> None:
    ref = _ref(tmp_path, torch.arange(CHUNK * 9, dtype=torch.float32))
    whole, sample = statistics(ref), statistics(ref, chunks=3)
    assert whole.numel == ref.numel
    assert sample.numel == CHUNK * 3
    assert (sample.min, sample.max) == (whole.min, whole.max)  # the first and the last piece are among them
    assert sample.mean == pytest.approx(whole.mean, rel=0.01)
    assert statistics(ref, chunks=9) == whole
