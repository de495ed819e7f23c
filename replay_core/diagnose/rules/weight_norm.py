"""The norm of the weights in a log: one that stands still although there are updates that it would show."""

from __future__ import annotations

from statistics import median

import numpy as np

from replay_core.diagnose.finding import Finding, finding, shown
from replay_core.diagnose.rule import Skip, given, rule
from replay_core.diagnose.rules.states import moves
from replay_core.diagnose.signals import RunLog

#: Steps before it is no chance; and without a learning rate to hold it against.
FEWEST, UNTOLD = 3, 8
#: How many times its last digit an update has to be before a norm that stands is no rounding.
SHOWS = 10.0


@rule("D57", "the norm of the weights stands still", link="optimizer", scope="signals", needs=("weight_norm",),
      explains=("D46", "D55", "L08", "L14"), lasts=True,
      source="Adam moves each weight by about the learning rate, and the norm of N weights by as much")  # fmt: skip
def norm_stands(log: RunLog) -> Finding | None:
    """The logged norm of the weights is one number in all of 3 steps and more, while gradients (or the loss) and the
    learning rate are not 0: a warning where the learning rate is 10 times the last digit of the norm (of float32, or
    as it is printed) and more. A norm of 700 in float32 does not show a rate of 1e-6: there it says nothing. Without a
    logged learning rate, 8 steps are worth knowing.
    """
    series = given(log.get("weight_norm"))
    values = series.finite
    if len(values) < FEWEST or len(values) < len(series.values):
        raise Skip(f"needs the norm of the weights in {FEWEST} steps")
    if len(set(values)) > 1 or not values[0] or not moves(log):
        return None
    rates = log.get("learning_rate")
    rate, digit = None if rates is None else median(rates.finite or [0.0]), _last_digit(values[0])
    if rate is None and len(values) < UNTOLD:
        raise Skip(f"needs the learning rate, or {UNTOLD} steps")
    if rate is not None and rate < SHOWS * digit:
        raise Skip(f"an update of {rate:.2g} does not show in a norm whose last digit is {digit:.2g}")
    return finding(
        "info" if rate is None else "warning",
        f"no weight changes: {series.name} is {values[0]:.8g} in all {len(values)} steps, although "
        + ("gradients are not 0" if log.has("grad_norm") else "the loss changes"),
        series,
        evidence=[
            series.shown(values[0], "another number in every step"),
            *([] if rate is None else [shown("learning rate", rate, None, given(rates).source)]),
            shown("last digit of the norm", digit),
        ],
        cause="no update reaches the weights: the optimizer holds other parameters than the model that is run (copies, "
        "or those from before it was wrapped, moved or given its adapter), steps are skipped (a loss scale, a gradient "
        "that is not finite), or updates are lost in bf16",
        next_step="rldbg record --params . -- YOUR COMMAND, then compare the weights of two of its steps",
    )


def _last_digit(value: float) -> float:
    """What the norm can tell apart: float32's spacing, or the last decimal that it is printed with."""
    decimals = len(repr(value).partition("e")[0].partition(".")[2])
    return max(float(np.spacing(np.float32(abs(value)))), 10.0**-decimals)
