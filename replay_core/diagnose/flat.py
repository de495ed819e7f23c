"""Samples laid end to end: every token has a sample and a position, and sums go by sample."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replay_core.diagnose.sheets import Sheet

Array = NDArray[Any]


class Flat:
    """The tokens of a sheet's samples, end to end [N]."""

    def __init__(self, spine: Sheet) -> None:
        self.spine = spine

    def __len__(self) -> int:
        return len(self.spine)

    def forget(self) -> None:
        """Drop what is as long as the tokens."""
        for name in ("sample_N", "position_N"):
            self.__dict__.pop(name, None)

    @cached_property
    def lengths_B(self) -> Array:
        """Tokens of each sample."""
        return np.array([self.spine.parts[part].lengths[row] for part, row in self.spine.index], dtype=np.int64)

    @cached_property
    def starts_B(self) -> Array:
        """Where each sample's tokens begin in the flat arrays."""
        return np.cumsum(self.lengths_B) - self.lengths_B

    @cached_property
    def spans(self) -> list[slice]:
        """Where each sample's tokens lie in the flat arrays."""
        return [slice(int(at), int(at + size)) for at, size in zip(self.starts_B, self.lengths_B, strict=True)]

    @cached_property
    def sample_N(self) -> Array:
        """The sample of every token."""
        return np.repeat(np.arange(len(self)), self.lengths_B)

    @cached_property
    def position_N(self) -> Array:
        """The place of every token in its sample."""
        places: Array = np.arange(int(self.lengths_B.sum())) - np.repeat(self.starts_B, self.lengths_B)
        return places

    def sum(self, values_N: Array) -> Array:
        """Each sample's sum [B]."""
        return np.bincount(self.sample_N, weights=values_N, minlength=len(self))

    def count(self, chosen_N: Array) -> Array:
        """How many tokens of each sample are chosen [B]."""
        return np.bincount(self.sample_N[chosen_N], minlength=len(self))

    def mean(self, values_N: Array, chosen_N: Array) -> Array:
        """Each sample's mean over the chosen tokens [B], NaN where there is none."""
        total_B = np.bincount(self.sample_N[chosen_N], weights=values_N[chosen_N], minlength=len(self))
        count_B = self.count(chosen_N)
        return np.where(count_B > 0, total_B / np.maximum(count_B, 1), np.nan)

    def extremes(self, values_N: Array, chosen_N: Array) -> tuple[Array, Array]:
        """Each sample's smallest and largest chosen value [B], NaN where there is none."""
        low_B, high_B = np.full(len(self), np.inf), np.full(len(self), -np.inf)
        with np.errstate(invalid="ignore"):  # a NaN among them is its sample's answer
            np.minimum.at(low_B, self.sample_N[chosen_N], values_N[chosen_N])
            np.maximum.at(high_B, self.sample_N[chosen_N], values_N[chosen_N])
        none_B = self.count(chosen_N) == 0
        return np.where(none_B, np.nan, low_B), np.where(none_B, np.nan, high_B)

    def last(self, chosen_N: Array) -> Array:
        """The position of each sample's last chosen token [B], -1 where there is none."""
        last_B = np.full(len(self), -1, dtype=np.int64)
        np.maximum.at(last_B, self.sample_N[chosen_N], self.position_N[chosen_N])
        return last_B

    def first(self, chosen_N: Array) -> Array:
        """The position of each sample's first chosen token [B]; its length where there is none."""
        first_B: Array = self.lengths_B.copy()
        np.minimum.at(first_B, self.sample_N[chosen_N], self.position_N[chosen_N])
        return first_B


def ranges_G(values_B: Array, group_B: Array) -> Array:
    """How far apart the values of each group are."""
    groups = np.bincount(group_B).size
    low_G, high_G = np.full(groups, np.inf), np.full(groups, -np.inf)
    np.minimum.at(low_G, group_B, values_B)
    np.maximum.at(high_G, group_B, values_B)
    apart_G: Array = high_G - low_G
    return apart_G


def groups_of(group_B: Array) -> list[Array]:
    """Which samples [B] are of each group, group by group."""
    return [group_B == group for group in np.unique(group_B)]
