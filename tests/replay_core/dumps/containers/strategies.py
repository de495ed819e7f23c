"""Hypothesis strategies for what people put into `torch.save`."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import torch
from hypothesis import strategies as st

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
]  # fmt: skip


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 4), max_size=5))
    dtype = draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    itemsize = torch.empty((), dtype=dtype).element_size()
    high = 2 if dtype is torch.bool else 256
    raw = torch.randint(0, high, (*shape, itemsize), dtype=torch.uint8, generator=generator)
    tensor = raw.view(dtype).reshape(shape)
    view = draw(st.sampled_from(["plain", "transposed", "sliced", "expanded", "parameter", "strided"]))
    if view == "transposed" and tensor.dim() > 1:
        return tensor.transpose(0, -1)
    if view == "sliced" and tensor.dim() and tensor.shape[0] > 1:
        return tensor[1:]
    if view == "strided" and tensor.dim() and tensor.shape[-1] > 1:
        return tensor[..., ::2]
    if view == "expanded":
        return tensor.unsqueeze(0).expand(3, *tensor.shape)
    if view == "parameter":
        return torch.nn.Parameter(tensor, requires_grad=False)
    return tensor


def arrays() -> st.SearchStrategy[np.ndarray]:
    dtypes = ["<f4", ">f4", "<i8", ">i2", "u1", "?", "<f2", "<c8", "<u4", "<U3", "O"]
    shapes = st.lists(st.integers(0, 5), min_size=1, max_size=3)

    def build(dtype: str, shape: list[int], fortran: bool) -> np.ndarray:
        array = (np.arange(int(np.prod(shape))).reshape(shape) % 200).astype(dtype)
        return np.asfortranarray(array) if fortran and array.dtype.kind not in "OU" else array

    return st.builds(build, st.sampled_from(dtypes), shapes, st.booleans())


numbers = st.one_of(st.integers(), st.floats(), st.booleans(), st.none())
numpy_scalars = st.builds(
    lambda code, number: np.dtype(code).type(number),
    st.sampled_from(["f4", "f8", "i8", "i4", "u1", "?", "f2"]),
    st.integers(0, 200),
)
leaves = st.one_of(numbers, st.text(max_size=20), st.binary(max_size=400).filter(lambda b: len(b) < 256),
                   tensors(), arrays(), numpy_scalars)  # fmt: skip
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=8), st.integers(-5, 5)), inner, max_size=4),
        st.lists(st.tuples(st.text(max_size=8), inner), max_size=3).map(OrderedDict),
        st.lists(st.integers(-(2**40), 2**40), min_size=5, max_size=60),
        inner.map(lambda value: [value, {"again": value}]),
    ),
    max_leaves=12,
)
