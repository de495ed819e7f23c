"""Noise from one tensor on, a fault from a later one: tolerance names the fault, bits name the noise."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from benchmarks.inputs import Inputs
from tests.builders import compare_paths


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Ten tensors of 4 MB: 1 ulp of noise from the third, 1 % of rows wrong by 5 % from the seventh."""
    inputs = Inputs(tmp_path_factory.mktemp("noisy"), 0.05)
    assert inputs.pairs == 10
    return inputs.modules(), inputs.noisy()


@pytest.mark.long
def test_the_fault_is_first_by_tolerance(dumps: tuple[Path, Path]):
    compared = compare_paths(*dumps)
    assert compared.first is not None
    assert compared.first.name == "layers.6.output"
    assert "rows" in compared.first.reason
    assert [row.verdict.value for row in compared.tensors] == ["SAME"] * 2 + ["CLOSE"] * 4 + ["DIFF"] * 4


@pytest.mark.long
def test_the_noise_is_first_bitwise(dumps: tuple[Path, Path]):
    compared = compare_paths(*dumps, exact=True)
    assert compared.first is not None
    assert compared.first.name == "layers.2.output"
    assert compared.tally.first_difference is compared.first


def test_no_more_than_the_chunks_in_hand_is_held(dumps: tuple[Path, Path]):
    compare_paths(*dumps)
    tracemalloc.start()
    compare_paths(*dumps)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 30 << 20


def test_a_comparison_keeps_no_array_as_long_as_a_tensor(dumps: tuple[Path, Path]):
    for row in compare_paths(*dumps).tensors:
        assert row.figures is not None
        kept = [row.figures.rows.d2, row.figures.rows.max, row.figures.columns.a2]
        assert not any(array.size for array in kept)
        assert len(row.figures.kept.get("lines", [])) < 64
