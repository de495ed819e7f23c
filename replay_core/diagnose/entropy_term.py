"""The entropy's share in a logged loss: the coefficient of a bonus that has become all of it."""

from __future__ import annotations

import math

from replay_core.diagnose import trends
from replay_core.diagnose.signals import RunLog

#: The largest coefficient that recipes give the entropy, and what may be left of the loss beside a bonus that is all.
STRONG, PART = 0.05, 0.05


def fitted_bonus(log: RunLog) -> float | None:
    """The coefficient c of a loss (the policy's, where no other is logged) that is -c times the entropy, over 8 steps
    and more, but for a twentieth of its spread; None where it is none, or as small as recipes have it.
    """
    loss, entropy = log.get("loss") or log.get("pg_loss"), log.get("entropy")
    if loss is None or entropy is None or min(entropy.finite, default=-1.0) < 0:
        return None
    by_step = {point.step: point.value for point in loss.points if math.isfinite(point.value)}
    pairs = [(one.value, by_step[one.step]) for one in entropy.points if one.step in by_step]
    if len(pairs) < trends.MIN_STEPS:
        return None
    middle_e, middle_l = (sum(each) / len(pairs) for each in zip(*pairs, strict=True))
    squares = sum((e - middle_e) ** 2 for e, _ in pairs)
    spread = sum((each - middle_l) ** 2 for _, each in pairs)
    if not squares or not spread:
        return None
    slope = sum((e - middle_e) * (each - middle_l) for e, each in pairs) / squares
    left = sum((each - middle_l - slope * (e - middle_e)) ** 2 for e, each in pairs)
    return -slope if -slope > STRONG and left < PART * spread else None
