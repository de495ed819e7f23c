"""Trends over steps: what stands out, what drifts, and a sparkline. Robust statistics, standard library only.

Outlier (Iglewicz and Hoaglin, "How to Detect and Handle Outliers", 1993): |x - median| > 6 * 1.4826 * MAD, over at
least 8 values. The factor 1.4826 makes MAD a standard deviation for normal noise; 6 instead of their 3.5, because a
run has thousands of steps and heavy tails. Where MAD is 0 (a signal that hardly moves) nothing stands out by noise.

Drift (Mann, 1945; Kendall, 1975): the rank test of a monotone trend, no matter of what form. One-sided p = 0.005.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import accumulate, groupby, pairwise
from statistics import median

MIN_STEPS = 8
#: Iterations that compile: static, then once more for any length.
WARM_UP = 2
OUTLIER_SIGMAS = 6.0
#: Normal quantile of p = 0.005, one-sided.
DRIFT_Z = 2.576
#: More points than that add nothing to the rank test, whose cost is their square.
_DRIFT_POINTS = 400
_BARS = "▁▂▃▄▅▆▇█"


def spread(values: list[float]) -> tuple[float, float]:
    """Median, and 1.4826 * MAD: the standard deviation of normal noise, unmoved by a few outliers."""
    middle = median(values)
    return middle, 1.4826 * median(abs(value - middle) for value in values)


def outliers(values: list[float]) -> list[int]:
    """Positions of the values that stand out: non-finite ones, and outliers where there are enough to tell."""
    odd = [position for position, value in enumerate(values) if not math.isfinite(value)]
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) >= MIN_STEPS:
        middle, sigma = spread(finite)
        limit = OUTLIER_SIGMAS * sigma
        # Values printed with few decimals have a MAD of 0 as soon as half of them print alike.
        if limit > 0:
            odd += [p for p, value in enumerate(values) if math.isfinite(value) and abs(value - middle) > limit]
    return sorted(odd)


def drift(values: list[float]) -> float:
    """Mann-Kendall's z: > `DRIFT_Z` is a rise, < -`DRIFT_Z` a fall, that chance does not explain. 0 for few values."""
    stride = max(1, len(values) // _DRIFT_POINTS)
    kept = [value for value in values if math.isfinite(value)][::stride]
    n = len(kept)
    if n < MIN_STEPS:
        return 0.0
    score = sum((b > a) - (b < a) for i, a in enumerate(kept) for b in kept[i + 1 :])
    variance = n * (n - 1) * (2 * n + 5) / 18
    return (score - math.copysign(1, score)) / math.sqrt(variance) if score else 0.0


def together(a: list[float], b: list[float]) -> float:
    """Spearman's rank correlation of two series of the same steps; 0 where they are not of as many, or one rests."""
    return line(_ranks(a), _ranks(b))[0] if len(a) == len(b) >= MIN_STEPS else 0.0


def _ranks(values: list[float]) -> list[float]:
    """The place of each; equal ones share theirs: steps in which both rest do not go together."""
    order = sorted(range(len(values)), key=values.__getitem__)
    places = [0.0] * len(values)
    for _, run in groupby(enumerate(order), key=lambda each: values[each[1]]):
        equal = list(run)
        middle = (equal[0][0] + equal[-1][0]) / 2
        for _, at in equal:
            places[at] = middle
    return places


def line(x: list[float], y: list[float]) -> tuple[float, float]:
    """(correlation, slope of y over x); 0 where one rests."""
    mx, my = sum(x) / len(x), sum(y) / len(y)
    xy = sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True))
    xx, yy = sum((a - mx) * (a - mx) for a in x), sum((b - my) * (b - my) for b in y)
    # Squares of what has exploded are no numbers any more.
    return (xy / math.sqrt(xx * yy), xy / xx) if xx > 0 and 0 < xx * yy < math.inf else (0.0, 0.0)


def rises(values: list[float]) -> bool:
    """Whether the values rise by more than chance explains."""
    return drift(values) > DRIFT_Z


def so_far(values: list[float], of: Callable[[float, float], float]) -> list[float]:
    """The largest (`max`) or least (`min`) of the values up to each; of a long log no slice is looked through twice."""
    return list(accumulate(values, of))


def from_here(values: list[float], of: Callable[[float, float], float]) -> list[float]:
    """The same of the values from each on to the last."""
    return so_far(values[::-1], of)[::-1]


def level(values: list[float], last: int = 10) -> float:
    """The median of the last values: what the run has come to. NaN where there is none, which is above and below
    nothing."""
    return median(values[-last:]) if values else math.nan


def sparkline(values: list[float], width: int = 40) -> str:
    """The series as one line of bars, `×` where a value is not finite. Wider series are binned by their median."""
    if not values:
        return ""
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        values = [_of_bin(values[a:b]) for a, b in pairwise(edges)]
    finite = [value for value in values if math.isfinite(value)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    return "".join(_bar(value, low, high) for value in values)


def _of_bin(values: list[float]) -> float:
    """A bin that holds one non-finite value shows it: it must not vanish."""
    if (beyond := next((value for value in values if not math.isfinite(value)), None)) is not None:
        return beyond
    middle = median(values)
    # The mean of two numbers that stand in the middle: their sum may be beyond what a float holds.
    return middle if math.isfinite(middle) else 2 * median(value / 2 for value in values)


def _bar(value: float, low: float, high: float) -> str:
    if not math.isfinite(value):
        return "×"
    if high / 2 == low / 2:
        return _BARS[0]
    # Halves: the difference of two numbers of opposite sign may be none.
    share = (value / 2 - low / 2) / (high / 2 - low / 2)
    return _BARS[min(len(_BARS) - 1, int(share * len(_BARS)))]
