"""What each reward function weighs in the reward, as the means of a log tell: a function that is logged beside a reward
need not be paid for.

    weights = function_weights(log)       # {"rewards/accuracy/mean": 1.0, "rewards/format/mean": 0.2}, or None
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from replay_core.diagnose.signals import RunLog

#: Steps beyond the number of functions that make a sum no luck; what rounding leaves of it, beside the largest reward.
FITTING, ROUNDED = 4, 2e-3
#: A weight below is none.
NOTHING = 0.01


def function_weights(log: RunLog) -> Mapping[str, float] | None:
    """The weight of every reward function in the reward, where the reward of all steps is one sum of theirs, and a
    constant, and only one; None where it is not.
    """
    import numpy as np  # findings are put together without it

    reward = log.get("reward")
    parts = [one for one in log.all("reward_function") if reward is not None and len(one.points) == len(reward.points)]
    if reward is None or not parts:
        return None
    by_step = [{point.step: point.value for point in one.points} for one in parts]
    rows = [(point.value, [each.get(point.step, math.nan) for each in by_step]) for point in reward.points]
    rewards_S, parts_SF = np.array([value for value, _ in rows]), np.array([each for _, each in rows])
    known_S = np.isfinite(rewards_S) & np.isfinite(parts_SF).all(1)
    rewards_S, parts_SF = rewards_S[known_S], parts_SF[known_S]
    count = len(rewards_S)
    scale = max(np.abs(rewards_S).max(initial=0.0), 1e-6)
    for terms_SF in (parts_SF, np.c_[parts_SF, np.ones(count)]):
        # A reward of one number, or of few, is a sum of whatever stands beside it.
        if count < terms_SF.shape[1] + FITTING or len(set(rewards_S.tolist())) <= terms_SF.shape[1] + 1:
            break
        weights_F, _, rank, _ = np.linalg.lstsq(terms_SF, rewards_S, rcond=None)
        if rank == terms_SF.shape[1] and np.abs(terms_SF @ weights_F - rewards_S).max() <= ROUNDED * scale:
            return {one.name: float(weight) for one, weight in zip(parts, weights_F, strict=False)}
    return None
