"""What one tensor looks like: counts, extremes, moments. One chunked pass, memory independent of size."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct

from replay_core.measure import native
from replay_core.pages import flat_chunks, spread_chunks
from replay_core.records import TensorRef

if TYPE_CHECKING:
    from replay_core.documents.record import StatisticsEntry

F64 = np.ndarray[Any, np.dtype[np.float64]]


class Statistics(Struct, frozen=True):
    """Figures over every element, padding included. min, max, mean, std and l2 are over the finite ones."""

    numel: int
    nan: int
    pos_inf: int
    neg_inf: int
    zeros: int
    min: float | None
    max: float | None
    mean: float | None
    std: float | None
    l2: float | None

    def to_mapping(self) -> StatisticsEntry:
        # By hand: `asdict` copies every figure of a record's thousands of tensors.
        return {
            "numel": self.numel, "nan": self.nan, "pos_inf": self.pos_inf, "neg_inf": self.neg_inf,
            "zeros": self.zeros, "min": self.min, "max": self.max, "mean": self.mean, "std": self.std, "l2": self.l2,
        }  # fmt: skip


def statistics(ref: TensorRef, chunks: int | None = None) -> Statistics:
    """Statistics of a tensor. Sums run in float64; std is the population's, by Chan's merge of chunks.

    With `chunks` a large tensor is sampled: that many pieces, evenly spread; `numel` says how many elements were
    looked at, and l2 is theirs alone.

    Raises:
        DumpError: its bytes cannot be read.
    """
    whole, looked_at = Accumulated(), 0
    for _, chunk in flat_chunks(ref) if chunks is None else spread_chunks(ref, chunks):
        looked_at += chunk.size
        found = native.moments(chunk)
        whole.join(by_numpy(chunk) if found is None else Accumulated(*found))
    return whole.statistics(looked_at)


class Accumulated(Struct):
    """What is added up over chunks. Extremes, mean and sums are of the finite elements."""

    finite: float = 0
    nan: float = 0
    pos_inf: float = 0
    neg_inf: float = 0
    zeros: float = 0
    low: float = math.inf
    high: float = -math.inf
    mean: float = 0.0
    #: Sum of squares around the mean.
    deviation: float = 0.0
    squares: float = 0.0

    def join(self, more: Accumulated) -> None:
        """Add those of a further chunk (Chan)."""
        self.nan, self.pos_inf, self.neg_inf = (
            self.nan + more.nan, self.pos_inf + more.pos_inf, self.neg_inf + more.neg_inf,
        )  # fmt: skip
        if not more.finite:
            return
        self.zeros += more.zeros
        self.low, self.high = min(self.low, more.low), max(self.high, more.high)
        delta, total = more.mean - self.mean, self.finite + more.finite
        self.deviation += more.deviation + delta * delta * self.finite * more.finite / total
        self.mean += delta * more.finite / total
        self.squares += more.squares
        self.finite = total

    def statistics(self, numel: int) -> Statistics:
        """As figures of so many elements."""
        nan, pos_inf, neg_inf, zeros = map(int, (self.nan, self.pos_inf, self.neg_inf, self.zeros))
        if not self.finite:
            return Statistics(numel, nan, pos_inf, neg_inf, zeros, None, None, None, None, None)
        std, l2 = math.sqrt(self.deviation / self.finite), math.sqrt(self.squares)
        return Statistics(numel, nan, pos_inf, neg_inf, zeros, self.low, self.high, self.mean, std, l2)


def by_numpy(chunk: np.ndarray[Any, Any]) -> Accumulated:
    """Those of a chunk of any dtype: what the kernel is held to."""
    values = as_real(chunk)
    finite = values[np.isfinite(values)]
    found = Accumulated(finite.size)
    if finite.size != values.size:
        found.nan = int(np.isnan(values).sum())
        found.pos_inf = int((values == np.inf).sum())
        found.neg_inf = int((values == -np.inf).sum())
    if not finite.size:
        return found
    found.zeros = int(finite.size - np.count_nonzero(finite))
    found.low, found.high = float(finite.min()), float(finite.max())
    found.mean = float(finite.mean())
    found.deviation = float(((finite - found.mean) ** 2).sum())
    found.squares = float(np.einsum("i,i->", finite, finite))
    return found


def as_reals(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> tuple[F64, F64]:
    """Two chunks of one shape in float64, alike laid out: where one is complex, the other has imaginary parts of 0."""
    if np.iscomplexobj(a) != np.iscomplexobj(b):
        a, b = a.astype(np.complex128), b.astype(np.complex128)
    return as_real(a), as_real(b)


def as_real(values: np.ndarray[Any, Any]) -> F64:
    """A chunk in float64; complex numbers become pairs of reals along the last axis."""
    if np.issubdtype(values.dtype, np.complexfloating):
        values = np.stack([values.real, values.imag], axis=-1).reshape(*values.shape[:-1], -1)
    return values.astype(np.float64)
