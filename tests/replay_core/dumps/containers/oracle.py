"""What torch and pickle read, against what we read: the same structure, the same bits."""

from __future__ import annotations

from collections import OrderedDict
from math import prod
from typing import Any

import ml_dtypes
import numpy as np
import torch

from replay_core.dtypes import ITEMSIZE
from replay_core.records import FileBytes, Inline, TensorRef


def values(ref: TensorRef) -> np.ndarray:
    """The tensor's values, read the slow and obvious way."""
    name = ref.dtype
    dtype = np.dtype(getattr(ml_dtypes, name)) if hasattr(ml_dtypes, name) else np.dtype(name)
    if isinstance(ref.source, Inline):
        return np.frombuffer(ref.source.value, dtype).reshape(ref.shape)
    assert isinstance(ref.source, FileBytes), ref
    with open(ref.source.path, "rb") as file:
        file.seek(ref.source.offset)
        data = file.read(ref.source.nbytes)
    assert len(data) == ref.source.nbytes
    if ref.source.big_endian:
        dtype = dtype.newbyteorder(">")
    flat = np.frombuffer(data, dtype)
    if ref.source.strides is None:
        assert ref.source.nbytes == prod(ref.shape) * ITEMSIZE[name]
        return flat.reshape(ref.shape).astype(dtype.newbyteorder("="))
    steps = tuple(stride * dtype.itemsize for stride in ref.source.strides)
    plain = flat.view(f"V{dtype.itemsize}")  # as_strided knows no ml_dtypes
    strided = np.lib.stride_tricks.as_strided(plain, ref.shape, steps)
    return np.ascontiguousarray(strided).view(dtype).reshape(ref.shape).astype(dtype.newbyteorder("="))


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    # A single element may carry any stride and still be contiguous; a fresh tensor carries its own.
    tensor = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
    return bytes(tensor.reshape(-1).view(torch.uint8).numpy().tobytes()) if tensor.numel() else b""


def assert_same(ours: Any, theirs: Any) -> None:
    """Fail unless the tree is what the oracle loaded."""
    if isinstance(theirs, torch.Tensor):
        assert isinstance(ours, TensorRef)
        assert ours.dtype == str(theirs.dtype).removeprefix("torch.")
        assert ours.shape == tuple(theirs.shape)
        assert values(ours).tobytes() == tensor_bytes(theirs)
    elif isinstance(theirs, np.ndarray) and theirs.dtype.kind in "OUS":
        assert ours == theirs.tolist()
    elif isinstance(theirs, np.ndarray):
        assert isinstance(ours, TensorRef)
        assert ours.dtype == theirs.dtype.newbyteorder("=").name
        assert ours.shape == theirs.shape
        assert values(ours).tobytes() == theirs.astype(theirs.dtype.newbyteorder("=")).tobytes()
    elif isinstance(theirs, np.generic):
        assert ours == theirs.item() or (ours != ours and theirs != theirs)
    elif isinstance(theirs, (dict, OrderedDict)):
        assert type(ours) is dict
        assert list(ours) == list(theirs)
        for key, value in theirs.items():
            assert_same(ours[key], value)
    elif isinstance(theirs, (list, tuple)):
        assert isinstance(ours, (list, tuple))
        assert len(ours) == len(theirs)
        assert isinstance(ours, list) == isinstance(theirs, list)
        for mine, other in zip(ours, theirs, strict=True):
            assert_same(mine, other)
    else:
        assert ours == theirs or (ours != ours and theirs != theirs)
        assert type(ours) is type(theirs) or isinstance(theirs, bytes)
