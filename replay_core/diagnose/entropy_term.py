"""The entropy's share in a logged loss: the coefficient of a bonus that has become all of it."""

from __future__ import annotations

import math
from statistics import median

from replay_core.diagnose import trends
from replay_core.diagnose.signals import RunLog, Series

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
    fitted = _fitted(by_step, entropy)
    if fitted is None:
        return None
    # What the policy's own loss leaves of the whole is the term itself, which the policy's part does not bend.
    policy = log.get("pg_loss")
    told = {} if policy is None or policy.name == loss.name else {point.step: point.value for point in policy.points}
    terms = [
        (by_step[one.step] - told[one.step]) / one.value
        for one in entropy.points
        if one.step in by_step and one.step in told and one.value > 0
    ]
    if len(terms) < trends.MIN_STEPS:
        return fitted
    factor = median(terms)
    is_term = median(abs(term - factor) for term in terms) < PART * abs(factor)
    return -factor if is_term and -factor > STRONG else fitted


def is_outweighed(log: RunLog) -> bool:
    """Whether the loss is the bonus, and the entropy grows by it while the reward does not rise."""
    entropy, reward = log.get("entropy"), log.get("reward")
    if entropy is None or not trends.rises(entropy.finite) or (reward is not None and trends.rises(reward.finite)):
        return False
    return fitted_bonus(log) is not None


def _fitted(by_step: dict[int | None, float], entropy: Series) -> float | None:
    """The slope of a line through losses and entropies; None where they lie on none, or it is a small one."""
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
