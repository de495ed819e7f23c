from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from replay_core import pages
from replay_core.dumps import open_run
from replay_core.measure.statistics import statistics
from replay_core.records import Inline, TensorRef
from tests.builders import save_file

VALUES = st.lists(
    st.floats(width=32) | st.sampled_from([0.0, -0.0, float("nan"), float("inf"), float("-inf")]), max_size=40
)


@given(VALUES)
def test_statistics_are_numpys_over_the_finite_values(values: list[float]):
    found = statistics(TensorRef("x", "float64", (len(values),), Inline(values)))
    array = np.array(values, dtype=np.float64)
    finite = array[np.isfinite(array)]
    assert (found.numel, found.nan) == (array.size, int(np.isnan(array).sum()))
    assert (found.pos_inf, found.neg_inf) == (int((array == np.inf).sum()), int((array == -np.inf).sum()))
    assert found.zeros == int((finite == 0).sum())
    if not finite.size:
        assert found.min is found.max is found.mean is found.std is found.l2 is None
        return
    assert (found.min, found.max) == (finite.min(), finite.max())
    assert found.mean == pytest.approx(finite.mean(), rel=1e-9, abs=1e-30)
    assert found.std == pytest.approx(finite.std(), rel=1e-6, abs=abs(finite).max() * 1e-9)
    assert found.l2 == pytest.approx(np.linalg.norm(finite), rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64])
def test_chunks_add_up_to_the_whole(dtype: torch.dtype, tmp_path: Path):
    """More than one chunk, read from a real file."""
    values = (torch.randn(3 * pages.CHUNK + 17, generator=torch.Generator().manual_seed(0)) * 5).to(dtype)
    record = open_run(save_file(tmp_path / "x.pt", {"x": values})).records[0]
    found = statistics(record.tensors()[0])
    whole = values.double()
    assert found.numel == values.numel()
    assert (found.min, found.max) == (whole.min(), whole.max())
    assert found.mean == pytest.approx(float(whole.mean()), rel=1e-9)
    assert found.std == pytest.approx(float(whole.std(correction=0)), rel=1e-9)
    assert found.l2 == pytest.approx(float(whole.norm()), rel=1e-9)


def test_a_mean_far_from_zero_does_not_spoil_the_deviation():
    values = [1e8 + (i % 2) for i in range(1000)]
    assert statistics(TensorRef("x", "float64", (1000,), Inline(values))).std == pytest.approx(0.5)
