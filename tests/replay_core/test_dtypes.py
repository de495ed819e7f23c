"""The table of dtypes, held against torch's own and that of ml_dtypes."""

from __future__ import annotations

import ml_dtypes
import pytest
import torch

from replay_core.dtypes import DTYPES, EPS, coarsest, family, finest, named
from replay_core.pages import numpy_dtype


@pytest.mark.parametrize("name", DTYPES)
def test_sizes_and_resolutions_are_those_of_the_libraries(name: str):
    dtype = getattr(torch, name)
    assert DTYPES[name].itemsize == dtype.itemsize
    if DTYPES[name].eps is not None:
        info = ml_dtypes.finfo(numpy_dtype(name))
        assert (DTYPES[name].eps, DTYPES[name].smallest_normal) == (info.eps, info.smallest_normal)


@pytest.mark.parametrize("word", ["bf16", "torch.bfloat16", "bfloat16", " bf16"])
def test_a_dtype_goes_by_its_other_names(word: str):
    assert named(word) == "bfloat16"
    assert named("auto") == "auto"


def test_the_coarser_of_two_dtypes_is_the_one_with_the_greater_eps():
    assert coarsest("float32", "bfloat16", "float16") == "bfloat16"
    assert finest("float8_e5m2", "complex64") == "float32"
    assert family("int64") == "float64"
    assert list(EPS.values()) == sorted(EPS.values())
