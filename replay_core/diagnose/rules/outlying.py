"""Single advantages that outweigh all others: what a spread of nearly 0 is divided into."""

from __future__ import annotations

import numpy as np

from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Finding, Where, error, share, shown
from replay_core.diagnose.flat import Array
from replay_core.diagnose.rule import rule, skip_if

#: How many times the others' an advantage is for the same reward, and how large, before it is a division by nothing.
TIMES, LEAST = 100.0, 50.0
#: And how many times as far from its group's mean as is common its reward may lie.
REACH = 10.0
#: Advantages that are not 0 before they are a scale.
FEWEST = 12


@rule("D97", "an advantage outweighs all others", link="advantages", scope="case", lasts=True,
      explains=("D04", "D24", "D28", "D73", "L02", "L08", "L10", "L16"),
      source="NeMo-RL#4158: leave-one-out normalisation of a group with one odd reward")  # fmt: skip
def outlying(case: Case) -> Finding | None:
    """Advantages over 50 that are 100 times the run's median (of those that are not 0), while their rewards are not a
    tenth as far out: distance from the mean of the group, 10 times the median of the run at the most. An error. What is
    left is a division by a spread of next to nothing, as of a group in which all other rewards are equal.
    """
    sizes: list[Array] = []
    reach: list[Array] = []
    steps: list[int | None] = []
    places: list[Where] = []
    alone: list[Array] = []
    for batch in case.batches():
        a_B, reward_B, group_B = batch.advantage_B, batch.reward_B, batch.group_B
        if a_B is None or reward_B is None or group_B is None:
            continue
        if not (np.isfinite(a_B).all() and np.isfinite(reward_B).all()):
            continue
        counts = np.bincount(group_B)
        mean_B = (np.bincount(group_B, weights=reward_B) / np.maximum(counts, 1))[group_B]
        sizes.append(np.abs(a_B))
        reach.append(np.abs(reward_B - mean_B))
        alone.append(np.array([_others_equal(reward_B, group_B, sample) for sample in range(len(a_B))]))
        places.append(batch.laid.where("advantages", sample=int(np.abs(a_B).argmax())))
        steps.append(batch.step)
    every = np.concatenate(sizes) if sizes else np.zeros(0)
    skip_if((every > 0).sum() < FEWEST, f"needs {FEWEST} responses with one advantage, rewards and groups")
    usual, near = float(np.median(every[every > 0])), np.concatenate(reach)
    common = float(np.median(near[near > 0])) if (near > 0).any() else 0.0
    odd = [(each > max(LEAST, TIMES * usual)) & (far <= REACH * common) for each, far in zip(sizes, reach, strict=True)]
    many = int(sum(one.sum() for one in odd))
    if not many:
        return None
    worst = int(np.argmax([each.max(initial=0.0) * bool(one.any()) for each, one in zip(sizes, odd, strict=True)]))
    lone = all(bool(told[one].all()) for told, one in zip(alone, odd, strict=True))
    return error(
        f"advantages explode: {share(many, len(every))} are {TIMES:g} times the others and more, up to "
        f"{sizes[worst].max():.3g}, where the median is {usual:.3g}",
        places[worst],
        shown("largest |advantage|", float(sizes[worst].max()), f"< {max(LEAST, TIMES * usual):.3g}"),
        shown("median |advantage| that is not 0", usual),
        shown("its reward - the mean of its group", float(reach[worst][sizes[worst].argmax()]),
        f"others' median {common:.3g}"),
        cause="it is the one odd reward of its group: the std of the others (leave-one-out) is 0 but for rounding, and "
        "only an epsilon is left to divide by. Divide by the std of the whole group, or leave such groups undivided"
        if lone
        else "something next to 0 is divided by: a std of rewards that are equal but for rounding, with an epsilon "
        "that is too small",
        steps=sorted({step for step, one in zip(steps, odd, strict=True) if step is not None and one.any()}),
    )  # fmt: skip


def _others_equal(reward_B: Array, group_B: Array, sample: int) -> bool:
    """Whether the other rewards of a sample's group are one number, and its own is not."""
    mine = group_B == group_B[sample]
    mine[sample] = False
    others = reward_B[mine]
    close = 1e-6 * max(float(np.abs(reward_B).max()), 1e-12)
    return bool(others.size and np.ptp(others) <= close and abs(reward_B[sample] - others[0]) > close)
