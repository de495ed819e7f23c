"""Pairs that are turned around from one step on: what was learnt to be better is called worse."""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import median

from replay_core.diagnose.finding import Finding, shown, warning
from replay_core.diagnose.rule import rule, skip_if
from replay_core.diagnose.rules.by_chance import RIGHT
from replay_core.diagnose.signals import RunLog, Series

#: Lines on either side; a share of right pairs that something was learnt of, and one that no coin comes to.
SIDE, LEARNT, TURNED = 5, 0.62, 0.38


@rule("L69", "pairs are turned around from a step on", link="rewards", scope="signals", needs=("reward_function",),
      lasts=True, explains=("L20", "L66", "L44", "L10"),
      source="a coin is right in half of the pairs; less is what was learnt, told the other way round")  # fmt: skip
def turned(log: RunLog) -> Finding | None:
    """The share of right pairs (DPO, a reward model) falls, within one step, from .62 and more (medians of 5 lines on
    either side) to .38 and less: a warning. No update makes a model that tells pairs apart worse than a coin at once;
    pairs whose better and worse answers are exchanged do.
    """
    is_of_pairs = log.has("pair_reward") or log.has("pair_logps") or log.has("pair_score") or not log.has("reward")
    right = next((one for one in log.all("reward_function") if RIGHT.search(one.name)), None)
    skip_if(right is None or not is_of_pairs, "needs a share of right pairs")
    assert right is not None
    points = [point for point in right.points if math.isfinite(point.value)]
    values = [point.value for point in points]
    skip_if(len(values) < 2 * SIDE, f"needs the share of right pairs of {2 * SIDE} lines")
    if min(values) < 0 or max(values) > 1:
        return None
    at = max(
        range(SIDE, len(values) - SIDE + 1),
        key=lambda n: _level(values, n - SIDE) - _level(values, n) + values[n - 1] - values[n],
    )
    before, after = _level(values, at - SIDE), _level(values, at)
    usual = median(abs(b - a) for a, b in pairwise(values))
    if before < LEARNT or after > TURNED or values[at - 1] - values[at] < max(usual, (before - after) / 2):
        return None
    here = points[at]
    return warning(
        f"chosen and rejected are exchanged from step {here.step} on: {right.name} falls from {before:.2g} to "
        f"{after:.2g} within one step, below what a coin gets" + _margin(log, here.step),
        right.of(points[at:]),
        right.shown_at(here, f"about {before:.2g}"),
        shown("share of right pairs behind it", after, "> 0.5"),
        cause="from that step on (another file, shard or pass over the data) the better answer stands in the column of "
        "the worse one, or the labels are negated: what was learnt until then is unlearnt",
        next_step=f"read ten pairs of before and behind step {here.step}, and which of each is called chosen",
    )


def _level(values: list[float], start: int) -> float:
    return median(values[start : start + SIDE])


def _margin(log: RunLog, step: int | None) -> str:
    margin: Series | None = next((one for one in log.all("pair_reward") if "margin" in one.name), None)
    if margin is None or step is None:
        return ""
    later = [p.value for p in margin.points if p.step is not None and p.step >= step][:SIDE]
    return f", and {margin.name} to {median(later):.2g}" if later and median(later) < 0 else ""
