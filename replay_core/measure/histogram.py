"""How a tensor's magnitudes spread: a count per power of two. One chunked pass."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from replay_core.measure.statistics import as_real
from replay_core.pages import flat_chunks
from replay_core.records import TensorRef

if TYPE_CHECKING:
    from replay_core.documents.tensor import HistogramEntry


def log2_histogram(ref: TensorRef) -> HistogramEntry:
    """Elements by floor(log2 |x|); zeros and what is not finite are counted apart.

    bins: [{"exponent": e, "count": n}], 2**e <= |x| < 2**(e + 1), rising, empty ones between left out.

    Raises:
        DumpError: its bytes cannot be read.
    """
    bins: Counter[int] = Counter()
    zeros = nonfinite = negative = 0
    for _, chunk in flat_chunks(ref):
        values = as_real(chunk)
        finite = values[np.isfinite(values)]
        nonfinite += values.size - finite.size
        negative += int((finite < 0).sum())
        magnitudes = np.abs(finite[finite != 0])
        zeros += finite.size - magnitudes.size
        # frexp: |x| = m * 2**e with 0.5 <= m < 1, exact also for subnormals, where log2 rounds.
        exponents, counts = np.unique(np.frexp(magnitudes)[1] - 1, return_counts=True)
        bins.update(dict(zip(exponents.tolist(), counts.tolist(), strict=True)))
    return {
        "zeros": zeros,
        "nonfinite": nonfinite,
        "negative": negative,
        "bins": [{"exponent": exponent, "count": bins[exponent]} for exponent in sorted(bins)],
    }
