"""What each reward function weighs in the reward, as the means of a log tell: a function that is logged beside a reward
need not be paid for.

    weights = function_weights(log)       # {"rewards/accuracy/mean": 1.0, "rewards/format/mean": 0.2}, or None
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from replay_core.diagnose import trends
from replay_core.diagnose.algorithm import Algorithm
from replay_core.diagnose.signals import RunLog, Series
from replay_core.regexes import regex

if TYPE_CHECKING:
    from replay_core.diagnose.flat import Array

#: Steps beyond the number of functions that make a sum no luck; what rounding leaves of it, beside the largest reward.
FITTING, ROUNDED = 4, 2e-3
#: A weight below is none.
NOTHING = 0.01
#: What stands before a function's name where it is recorded, and not where its weight is stated.
_PREFIX = regex(r"^(?:reward|score)s?[_/]")
#: Of the reward's rise, what a part that is paid for instead of answers comes to.
MOST_OF_IT = 0.5


def weights_or_sum(log: RunLog) -> Mapping[str, float]:
    """The weights of `function_weights`, or 1 of each where the parts move together, so that no weights can be solved
    for, and their plain sum is the reward in every step; none where neither is known.
    """
    if (solved := function_weights(log)) is not None:
        return solved
    reward, parts = log.get("reward"), log.all("reward_function")
    if reward is None or len(parts) < 2 or len(reward.points) <= FITTING:
        return {}
    by_step = [{point.step: point.value for point in one.points} for one in parts]
    sums = [(point.value, sum(each.get(point.step, math.nan) for each in by_step)) for point in reward.points]
    room = ROUNDED * max((abs(value) for value, _ in sums), default=0.0)
    return {one.name: 1.0 for one in parts} if room > 0 and all(abs(a - b) <= room for a, b in sums) else {}


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


def paid_instead(log: RunLog, right: Series) -> Series | None:
    """The part that makes half and more of the reward's rise while right answers fall, and rises itself (weighed, where
    the weights are known); None where nothing is paid for in their place.
    """
    reward = log.get("reward")
    if reward is None or not trends.rises(reward.finite) or trends.drift(right.finite) >= -trends.DRIFT_Z:
        return None
    weights = weights_or_sum(log)

    def rise(one: Series) -> float:
        return trends.level(one.finite, 3) - trends.level(one.finite[:3])

    parts = [
        (weights.get(one.name, 0.0 if weights else 1.0) * rise(one), one) for one in log.all("reward_function")
        if one.name not in (reward.name, right.name) and trends.rises(one.finite)
    ]  # fmt: skip
    by, top = max(parts, key=lambda each: each[0], default=(0.0, None))
    return top if 0 < MOST_OF_IT * rise(reward) <= by else None


def stated_weights(algorithm: Algorithm, names: Sequence[str], *, in_order: bool) -> Array | None:
    """The weights that a run states for these reward functions [F], by their names, or one for all.

    in_order: whether the names stand in the order in which weights are stated, where these have no names. Else a list
    of the functions' names that the run states, too, tells it.
    """
    import numpy as np

    said = algorithm.value("reward_weights")
    if isinstance(said, dict):
        # `accuracy` is stated, and `reward_accuracy` is recorded.
        own = tuple(names) if set(said) == set(names) else tuple(_PREFIX.sub("", name) for name in names)
        return np.array([float(said[name]) for name in own]) if set(said) == set(own) else None
    listed = algorithm.value("reward_funcs", "reward_functions")
    if isinstance(said, list) and isinstance(listed, list) and not in_order and len(listed) == len(said):
        bare = [_PREFIX.sub("", name) for name in names]
        if sorted(map(str, listed)) == sorted(bare):
            return np.array([float(said[listed.index(name)]) for name in bare])
    if isinstance(said, list) and len(said) == len(names) and (len(set(said)) == 1 or in_order):
        return np.array(said, dtype=np.float64)
    return None
