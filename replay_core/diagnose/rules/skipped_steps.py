"""Steps that a trainer takes without an update, by its own count, and the loss scale that ends at its least."""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import median

from replay_core.diagnose import trends
from replay_core.diagnose.finding import Finding, error, warning
from replay_core.diagnose.rule import Skip, rule
from replay_core.diagnose.signals import RunLog, Series

#: The share of steps that are skipped; the scale it began at and the least one, which is no scale any more; steps.
SKIPPED, SKIPPED_BAD, SCALED, LEAST, STEPS = 0.2, 0.5, 256.0, 1.0, 3


@rule("L84", "steps are skipped, by the trainer's own count", link="gradient", scope="signals",
      needs=("skipped_steps|loss_scale",), explains=("D23", "L08", "L11", "L14", "L48", "L51"),
      source="Megatron: number of skipped iterations, loss scale")  # fmt: skip
def skipped(log: RunLog) -> Finding | None:
    """Of the steps between two lines, the share that the trainer says it skipped, in the last quarter of 5 lines and
    more: .5 and more an error, .2 a warning. A loss scale that began at 256 and more and is 1 and less in the last 3
    lines: an error, it was halved to nothing. It is told since lines with skipped steps come as often as at the end,
    with the scale of the step before; a search of the first steps is none of it. fp16 begins with skipped steps until
    its scale fits, and bf16 logs a scale of 1 throughout: both are quiet.
    """
    counts, scale = log.get("skipped_steps"), _gone(log)
    share = None if counts is None else _share(counts)
    if share is None and scale is None:
        if counts is None or len(counts.finite) < STEPS + 2:
            raise Skip("needs the count of skipped steps at 5 lines, or a loss scale that falls")
        return None
    if scale is None and (share is None or share < SKIPPED):
        return None
    bad = scale is not None or (share is not None and share >= SKIPPED_BAD)
    series = counts if counts is not None and share is not None and share >= SKIPPED else scale
    assert series is not None
    scales = scale.finite if scale is not None else []
    lasting, over, every = _lasting(counts) if series is counts and counts is not None else (series, 0, 0)
    # The scale that the steps before were trained at, not the one that a search of the first steps begins with.
    since = lasting.points[0].step or 0
    held = [] if scale is None else [p.value for p in scale.points if (p.step or 0) < since] or scale.finite
    scales = [held[-1], scale.finite[-1]] if scale is not None and held[-1] >= SCALED else scales
    return (error if bad else warning)(
        (
            f"{share:.0%} of the steps are skipped, by the trainer's own count: no update is made in them"
            + (f" ({over} of the {every} lines from step {since} on tell so)" if every else "")
            if share is not None and share >= SKIPPED
            else "fp16 gradients overflow at every scale"
        )
        + (f"; the loss scale falls from {scales[0]:.4g} to {scales[-1]:.4g}" if scales else ""),
        lasting if series is counts else series.ended,
        *([] if counts is None else [counts.shown(trends.level(counts.finite, STEPS), "0")]),
        *([] if scale is None else [scale.shown(scales[-1], f"about {scales[0]:.4g}")]),
        cause="gradients (or activations) are beyond what fp16 holds whatever the scale, as those of a model made for "
        "bf16, or they are NaN at any scale (weights that are not finite, a 0/0 in the loss): the scale is halved at "
        "each overflow, and the step is left out",
        next_step="train in bf16; else go back to the last checkpoint whose steps were not skipped, and look for the "
        "first tensor that is not finite: rldbg record --gradients . -- YOUR COMMAND",
    )


def _share(counts: Series) -> float | None:
    points = [point for point in counts.points if point.step is not None and math.isfinite(point.value)]
    shares = [b.value / ((b.step or 0) - (a.step or 0)) for a, b in pairwise(points) if (b.step or 0) > (a.step or 0)]
    if len(shares) < STEPS + 1 or max(shares) > 1:
        return None
    last = shares[-max(STEPS, len(shares) // 4) :]
    return median(last)


def _lasting(counts: Series) -> tuple[Series, int, int]:
    """The lines with skipped steps since that is the state of the run, which lasts to its end; how many lines they are,
    and of how many since then. What was skipped before, as fp16 looks for a scale, is not of it.
    """
    values = [point.value > 0 for point in counts.points]
    last = values[-max(STEPS, len(values) // 4) :]
    # Since where the lines with skipped steps are most above half of the share that they are at the end.
    usual, above, most, since = sum(last) / len(last) / 2, 0.0, 0.0, 0
    for at in reversed(range(len(values))):
        above += values[at] - usual
        if above >= most:
            most, since = above, at
    return counts.of(p for p in counts.points[since:] if p.value > 0), sum(values[since:]), len(values) - since


def _gone(log: RunLog) -> Series | None:
    scale = log.get("loss_scale")
    values = [] if scale is None else scale.finite
    return scale if len(values) > STEPS and values[0] >= SCALED and max(values[-STEPS:]) <= LEAST else None
