"""Single steps whose loss is out of all measure."""

from __future__ import annotations

import math
from statistics import median

from replay_core.diagnose import trends
from replay_core.diagnose.finding import Finding, finding, shown
from replay_core.diagnose.rule import given, rule, skip_if
from replay_core.diagnose.signals import RunLog

#: A loss of a step is out of measure from so many times the median of all, and from so large on; more than one step in
#: four is no spike.
TIMES, LARGE, RARE = 30.0, 5.0, 0.25
#: From here on a single step moves the weights as far as clipping lets it.
HUGE = 20.0


@rule("L44", "the loss leaps in single steps", link="loss", scope="signals", needs=("reward", "loss|pg_loss"),
      explains=("L02",), source="trl#3015; the k3 estimator grows with e^x")  # fmt: skip
def leaps(log: RunLog) -> Finding | None:
    """|loss| of single steps over 5 and 30 times the median of all (8 steps and more, at most one in four of them):
    worth knowing; over 20 a warning. A loss of advantages over a ratio near 1 stays about 0: what comes to tens is one
    token whose ratio, or whose KL estimate e^x - x - 1, has run away.
    """
    series = given(log.get("loss") or log.get("pg_loss"))
    sizes = [abs(value) for value in series.finite]
    skip_if(len(sizes) < trends.MIN_STEPS, f"needs the loss of {trends.MIN_STEPS} steps")
    usual = median(sizes)
    limit = max(LARGE, TIMES * usual)
    odd = series.of(point for point in series.points if math.isfinite(point.value) and abs(point.value) > limit)
    if not odd.points or len(odd.points) > RARE * len(sizes):
        return None
    worst = max(odd.points, key=lambda point: abs(point.value))
    beside = [
        one.shown_at(point, f"median {median(map(abs, one.finite)):.3g}")
        for name in ("kl", "grad_norm", "ratio_max")
        if (one := log.get(name)) is not None and one.finite
        for point in one.points
        if point.step == worst.step and math.isfinite(point.value)
    ]
    kl = log.get("kl")
    at = None if kl is None else log.at("kl", worst.step)
    by_kl = kl is not None and at is not None and abs(at.value) > TIMES * median(map(abs, kl.finite or [0.0]))
    places = ", ".join(f"{point.value:.3g}" + ("" if log.is_counted else f" at step {point.step}")
                       for point in odd.points[:3])  # fmt: skip
    return finding(
        "warning" if abs(worst.value) >= HUGE else "info",
        f"the loss leaps in {len(odd.points)} of {len(sizes)} steps: {series.name} is {places}, and {usual:.2g} in the "
        "middle of all" + (f"; {kl.name} leaps with it" if by_kl and kl is not None else ""),
        odd,
        series.shown_at(worst, f"about {usual:.2g}"),
        *beside,
        shown("times the median", abs(worst.value) / usual if usual else None, f"< {TIMES:g}"),
        cause="single tokens that the policy has come to think next to impossible, or the reference has: the KL's "
        "estimate (k3, e^x - x - 1) or a ratio that is not clipped on that side grows with e^x, and one of them makes "
        "the whole step's loss",
        next_step="clip the log-ratio before it is exponentiated (or take k2, a dual clip); mask tokens off by more "
        "than 10 nats; rldbg record -- YOUR COMMAND, then rldbg diagnose rldbg-dump names the token",
    )
