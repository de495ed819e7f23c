"""The few operations that numpy and torch spell differently."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

#: A numpy array or a torch tensor.
Array = Any


def library(array: Array) -> Any:
    """The module whose functions take this array: numpy, or the torch that made the tensor."""
    return sys.modules["torch"] if type(array).__module__.partition(".")[0] == "torch" else np


def group_index(ids_B: Array) -> tuple[Array, int]:
    """Ids of any kind as numbers 0..G-1, and G."""
    # Numbers without a gap are so already, and a sort would find it out ten times as slowly.
    if (
        library(ids_B) is np
        and ids_B.dtype == np.int64
        and 0 <= ids_B.min(initial=0) <= ids_B.max(initial=0) < len(ids_B)
    ):
        counts_G = np.bincount(ids_B)
        if counts_G.all():
            return ids_B, len(counts_G)
    unique_G, index_B = library(ids_B).unique(ids_B, return_inverse=True)
    return index_B.reshape(-1), len(unique_G)


def group_sum(values_B: Array, index_B: Array, groups: int) -> Array:
    """The sum of each group's values [G], in the values' own dtype."""
    if library(values_B) is np:
        return np.bincount(index_B, weights=values_B, minlength=groups).astype(values_B.dtype)
    return values_B.new_zeros(groups).index_add(0, index_B, values_B)
