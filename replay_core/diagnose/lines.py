"""Advantages as a line of the rewards within each group: its baseline and its scale, solved for and named.

Whatever subtracts one number from the rewards of a group and divides by another gives a line, A = (r - b) / s. Both are
solved for in every group without knowing the formula; what they are in all groups at once names it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from msgspec import Struct

from replay_core.diagnose.flat import Array, groups_of

#: Groups that have to agree before a name is no chance; how close, in shares of a group's range of rewards and of its
#: scale.
FEWEST, CLOSE = 3, 2e-3


class GroupLines(Struct, frozen=True):
    """Baseline b and scale s of A = (r - b) / s in each group whose rewards differ [G], and the rewards of each."""

    baseline_G: Array
    scale_G: Array
    rewards_G: list[Array]
    """Each group's rewards, in the order of its samples."""
    batch_B: Array
    """All rewards of the batch."""
    close: float

    @property
    def range_G(self) -> Array:
        return np.array([np.ptp(r) for r in self.rewards_G])

    @property
    def has_middle(self) -> bool:
        """Whether some group has three different rewards: of two any two numbers are a line."""
        return any(np.unique(np.round(r, 9)).size > 2 for r in self.rewards_G)

    def is_baseline(self, known_G: Array) -> bool:
        return bool((np.abs(self.baseline_G - known_G) <= self.close * self.range_G).all())

    def factor(self, known_G: Array) -> float | None:
        """k where the scale is k times this in every group; None where there is none."""
        if not (np.isfinite(known_G).all() and (np.abs(known_G) > 1e-12).all()):
            return None
        each = self.scale_G / known_G
        k = float(np.median(each))
        return k if k and bool((np.abs(each - k) <= self.close * abs(k)).all()) else None


def solved(advantage_B: Array, reward_B: Array, group_B: Array, close: float) -> GroupLines | None:
    """The lines of all groups whose rewards differ; None where a group's advantages are no line of its rewards, or
    fewer than 3 groups have a spread.

    close: how far an advantage may lie from its line, in shares of the largest of its group.
    """
    baselines, scales, rewards = [], [], []
    for inside in groups_of(group_B):
        r, a = reward_B[inside], advantage_B[inside]
        if np.ptp(r) <= 1e-5 * max(float(np.abs(reward_B).max()), 1e-12):
            continue
        apart = r - r.mean()
        slope = float(apart @ a) / float(apart @ apart)
        largest = float(np.abs(a).max())
        if np.abs(a - a.mean() - slope * apart).max() > close * max(largest, 1e-12) or abs(slope) < 1e-9:
            return None
        baselines.append(float(r.mean()) - float(a.mean()) / slope)
        scales.append(1 / slope)
        rewards.append(r)
    if len(rewards) < FEWEST:
        return None
    return GroupLines(np.array(baselines), np.array(scales), rewards, reward_B, max(CLOSE, 2 * close))


#: What is right for a baseline, and for a scale.
MEAN = "the group's mean"


def baselines(lines: GroupLines) -> Iterator[tuple[str, Array]]:
    """What may stand for a group's mean, the right one first."""
    groups = lines.rewards_G

    def each(of: object) -> Array:
        return np.array([of(r) for r in groups])  # type: ignore[operator]

    yield MEAN, each(np.mean)
    yield "0", np.zeros(len(groups))
    yield "the mean of the whole batch", np.full(len(groups), lines.batch_B.mean())
    yield "the reward of the group's first response", each(lambda r: r[0])
    yield "the reward of the group's last response", each(lambda r: r[-1])
    yield "the group's best reward", each(np.max)
    yield "the group's worst reward", each(np.min)
    yield "the group's median reward", each(np.median)
    yield "the group's median reward", each(lambda r: np.sort(r)[(len(r) - 1) // 2])
    yield "the group's second best reward (pass@k keeps the best response's alone)", each(lambda r: np.sort(r)[-2])
    yield "the group's sum", each(np.sum)
    yield "the group's sum over one response more than it has", each(lambda r: r.sum() / (len(r) + 1))
    yield "the group's sum over one response less than it has", each(lambda r: r.sum() / max(len(r) - 1, 1))
    yield "the mean of the group without its first response", each(lambda r: r[1:].mean() if len(r) > 1 else np.nan)
    yield "the mean of the group without its last response", each(lambda r: r[:-1].mean() if len(r) > 1 else np.nan)
    yield "the batch's best reward", np.full(len(groups), lines.batch_B.max())
    yield "the batch's worst reward", np.full(len(groups), lines.batch_B.min())


def scales(lines: GroupLines) -> Iterator[tuple[str, Array]]:
    """What may stand for a group's std, the right ones first: of the group, of the batch, none."""
    groups = lines.rewards_G
    std_G = np.array([r.std(ddof=1) for r in groups])
    yield "the group's std", std_G
    yield "the group's std (over n)", np.array([r.std() for r in groups])
    yield "", np.ones(len(groups))
    yield "the group's variance, not its std", std_G**2
    yield "the group's variance (over n), not its std", np.array([r.var() for r in groups])
    yield "1 / std: they are multiplied by the group's std", 1 / std_G
    yield "the range of the group's rewards", np.array([np.ptp(r) for r in groups])
    yield "the group's mean reward", np.array([r.mean() for r in groups])
    yield "the size of the group", np.array([float(len(r)) for r in groups])
    yield "the mean distance from the group's mean", np.array([np.abs(r - r.mean()).mean() for r in groups])
    yield "the root of the group's std", np.sqrt(std_G)
    yield "the group's norm", np.array([float(np.sqrt(((r - r.mean()) ** 2).sum())) for r in groups])


def baseline_of(lines: GroupLines) -> str | None:
    """Which of the baselines it is, in all groups; None where it is none of them."""
    return next((name for name, known_G in baselines(lines) if lines.is_baseline(known_G)), None)


def scale_of(lines: GroupLines) -> tuple[str, float, float] | None:
    """(name, factor, epsilon) with s = factor x name + epsilon in all groups; None where it is none of them."""
    named = [(name, known_G, lines.factor(known_G)) for name, known_G in scales(lines)]
    for name, _, k in named:
        if k is not None and abs(abs(k) - 1) <= lines.close:
            return name, 1.0 if k > 0 else -1.0, 0.0
    for name, known_G, _ in named[:2]:
        added_G = lines.scale_G - known_G
        middle = float(np.median(added_G))
        if middle > CLOSE and (np.abs(added_G - middle) <= lines.close * (known_G + middle)).all():
            return name, 1.0, middle
    # Of equal stds any scale is a multiple of any other: the plain one is said first.
    if (found := next(((name, k) for name, _, k in named if k is not None), None)) is not None:
        return found[0], found[1], 0.0
    return None
