"""What one tensor looks like: counts, extremes, moments. One chunked pass, memory independent of size."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from replay_core.pages import flat_chunks, spread_chunks
from replay_core.records import TensorRef

if TYPE_CHECKING:
    from replay_core.documents.record import StatisticsEntry

F64 = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class Statistics:
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
        return cast("StatisticsEntry", asdict(self))


def statistics(ref: TensorRef, chunks: int | None = None) -> Statistics:
    """Statistics of a tensor. Sums run in float64; std is the population's, by Chan's merge of chunks.

    With `chunks` a large tensor is sampled: that many pieces, evenly spread; `numel` says how many elements were
    looked at, and l2 is theirs alone.

    Raises:
        DumpError: its bytes cannot be read.
    """
    nan = pos_inf = neg_inf = zeros = count = looked_at = 0
    low, high = np.inf, -np.inf
    mean = deviation = squares = 0.0
    for _, chunk in flat_chunks(ref) if chunks is None else spread_chunks(ref, chunks):
        looked_at += chunk.size
        values = as_real(chunk)
        finite_mask = np.isfinite(values)
        finite = values[finite_mask]
        if finite.size != values.size:
            nan += int(np.isnan(values).sum())
            pos_inf += int((values == np.inf).sum())
            neg_inf += int((values == -np.inf).sum())
        zeros += int(finite.size - np.count_nonzero(finite))
        if not finite.size:
            continue
        low, high = min(low, float(finite.min())), max(high, float(finite.max()))
        chunk_mean = float(finite.mean())
        chunk_deviation = float(((finite - chunk_mean) ** 2).sum())
        delta, total = chunk_mean - mean, count + finite.size
        deviation += chunk_deviation + delta * delta * count * finite.size / total
        mean += delta * finite.size / total
        squares += float(np.einsum("i,i->", finite, finite))
        count = total
    if not count:
        return Statistics(looked_at, nan, pos_inf, neg_inf, zeros, None, None, None, None, None)
    std = float(np.sqrt(deviation / count))
    return Statistics(looked_at, nan, pos_inf, neg_inf, zeros, low, high, mean, std, float(np.sqrt(squares)))


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
