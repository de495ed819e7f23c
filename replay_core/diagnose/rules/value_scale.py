"""Values in another unit than the returns they stand for."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Finding, shown, warning
from replay_core.diagnose.rule import Skip, rule

#: Steps, and tokens of each, before a scale is one; how many times the largest return values may come to.
STEPS, FEWEST, TIMES = 3, 16, 4.0
#: Of smaller returns than that a new critic's values are as many times as large.
UNIT = 0.5
#: Correlation from which values follow their returns, and how far their slope may be off 1.
FOLLOW, OFF = 0.8, 2.0


@rule("D96", "values are on another scale than returns", link="advantages", scope="case", lasts=True,
      explains=("D45", "D63", "L02", "L08", "L10"),
      source="value normalisation (PopArt, running mean and std) that is not undone; a critic of a reward model's "
      "head")  # fmt: skip
def other_scale(case: Case) -> Iterator[Finding]:
    """The root mean square of values over tokens that count beside the largest |return| of the run, in 3 steps and more
    of 16 tokens: a warning where it is 4 times as much (and over 2) in three of four steps, or where values and returns
    rise and fall together (correlation over .8 in every step) and returns are less than half of them, or more than
    twice (least squares, the median over steps). A new critic's values are about as large as returns, and have nothing
    to do with them.
    """
    sizes: list[float] = []
    slopes: list[float] = []
    alike: list[float] = []
    explained: list[float] = []
    steps: list[int] = []
    largest, where = 0.0, None
    for batch in case.batches():
        values, returns = batch.columns.of("values"), batch.columns.of("returns")
        if values is None or returns is None or batch.step is None or batch.trained_N is None:
            continue
        both_N = batch.trained_N & values.said_N & returns.said_N
        both_N &= np.isfinite(values.values_N) & np.isfinite(returns.values_N)
        v, r = values.values_N[both_N], returns.values_N[both_N]
        if v.size < FEWEST or not np.ptp(r) > 0:
            continue
        where = where or batch.laid.where("values", sample=0)
        steps.append(batch.step)
        sizes.append(float(np.sqrt((v * v).mean())))
        largest = max(largest, float(np.abs(r).max()))
        explained.append(1 - float((r - v).var() / r.var()))
        varies = float(v.var()) > 0
        slopes.append(float(np.cov(v, r)[0, 1] / v.var(ddof=1)) if varies else 0.0)
        alike.append(float(np.corrcoef(v, r)[0, 1]) if varies else 0.0)
    if len(steps) < STEPS:
        raise Skip(f"needs values and returns of {STEPS} steps")
    slope = float(np.median(slopes))
    if min(alike) > FOLLOW and (slope > OFF or slope < 1 / OFF):
        claim = f"values are {1 / slope:.3g} times their returns: they follow them on another scale"
        told = [shown("returns over values, slope", slope, "1"), shown("least correlation of a step", min(alike))]
    elif (size := float(np.quantile(sizes, 0.25))) > TIMES * max(largest, UNIT):
        claim = f"values are on another scale than returns: {size / largest:.3g} times as large and more"
        told = [
            shown("root mean square of values, in three of four steps more than", size, f"< {TIMES * largest:.3g}"),
            shown("largest |return| of the run", largest),
        ]
    else:
        return
    yield warning(
        claim,
        where,
        evidence=[*told, shown("explained variance, median", float(np.median(explained)), "> 0")],
        cause="the critic's output is in another unit: normalised targets whose mean and std are not put back "
        "(PopArt, value norm), a head that was taken over from a reward model or badly initialised, rewards that are "
        "scaled for the returns alone. Advantages are then what the critic is off by, not what was earned",
        steps=steps,
    )
