"""What a KL to the reference has to come to where the reward has moved, and what an adaptive coefficient has to do."""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import median

from replay_core.diagnose import trends
from replay_core.diagnose.finding import Finding, shown, warning
from replay_core.diagnose.log_steps import steps_of
from replay_core.diagnose.rule import Skip, given, rule, skip_if
from replay_core.diagnose.rules.figures import together
from replay_core.diagnose.rules.learning import RESETS_REFERENCE, is_switched_off
from replay_core.diagnose.signals import RunLog

#: Lines before a KL and a reward tell; how far the reward has to have moved, in shares of all it spans; of what that
#: takes at least, the part that the KL may come to; and how many times its first steps' it may be.
LINES, FAR, PART, GROWN = 12, 0.2, 0.2, 2.0


@rule("D113", "the reference follows the policy", link="ref", scope="signals",
      needs=("kl",), lasts=True, explains=("L10",),
      source="Pinsker: a mean of what lies within a range R moves by R sqrt(KL / 2) at the most")  # fmt: skip
def follows(log: RunLog) -> Finding | None:
    """A reward that has moved by d of all it spans (R, its logged maximum less its minimum) takes a policy that is at
    least 2 (d / R)^2 nats per response from where it began. A warning where, over 12 lines and more, the reward has
    risen by a fifth of its span and more, the KL to the reference times the mean length comes to less than a fifth of
    that, and the KL is no larger than in the first three steps (2 times): it is measured against a reference that moves
    along. Silent where the reference is reset on purpose, or the KL is 0 throughout and off: the run states so, or its
    coefficient is 0. Skipped where the reward's span is not logged. A warning, too, where the KL is below that of the
    batch's own updates (|KL of the policy to the one that sampled|) in a fifth of the later half of 16 steps and more,
    while those before come to 20 times as much, the KL does not rise or come to more than 3 times its first steps', and
    both rise and fall together (rank correlation .5), that of the updates being .001 and more in the middle: from a
    reference that stands the policy is further away than one batch takes it.
    """
    kl, reward, length = given(log.get("kl")), log.get("reward"), log.get("response_length")
    skip_if(any(log.algorithm.value(name) for name in RESETS_REFERENCE), "the reference is reset on purpose")
    skip_if(is_switched_off(log, kl), f"{kl.name} is off: the run states none, or a coefficient of 0")
    if (batch := _is_of_the_batch(log)) is not None:
        return batch
    if reward is None or length is None:
        raise Skip("needs the reward and the mean length")
    top, bottom = log.get("reward_max"), log.get("reward_min")
    if top is None or bottom is None or not top.finite or not bottom.finite:
        raise Skip("needs the largest and the least reward of a step beside its mean")
    rows = [values for _, values in together(kl, reward, length)]
    skip_if(len(rows) < LINES, f"needs the KL, the reward and the length of {LINES} steps")
    third = len(rows) // 3
    begun, ended = median(row[1] for row in rows[:3]), median(row[1] for row in rows[-third:])
    span = max(top.finite) - min(bottom.finite)
    if not span > 0 or not trends.rises(reward.finite) or ended - begun < FAR * span:
        return None
    least = 2 * ((ended - begun) / span) ** 2
    late = [max(row[0], 0.0) for row in rows[-third:]]
    told = median(late) * median(row[2] for row in rows[-third:])
    first = sum(abs(row[0]) for row in rows[:3]) / 3
    # What is multiplied by its coefficient grows all the same.
    if told > PART * least or median(late) > GROWN * first or trends.rises([row[0] for row in rows]):
        return None
    return warning(
        f"the reference follows the policy: {kl.name} stays at {median(late):.2g} while the reward goes from "
        f"{begun:.3g} to {ended:.3g}, which takes {least / median(row[2] for row in rows[-third:]):.2g} and more",
        kl,
        kl.shown(median(late), f"> {least / median(row[2] for row in rows[-third:]):.2g} per token"),
        shown("KL per response (its mean times the mean length)", told, f">= {least:.2g}"),
        shown("the same figure in the first three steps", first, "0 before the first update, and growing"),
        reward.shown(ended, f"was {begun:.3g}, of a span of {span:.3g}"),
        cause="the KL is taken to a copy that is updated along with the policy: the reference is not frozen, is the "
        "policy itself of the step before (or shares its weights), or is loaded anew in each step. A KL term then "
        "holds nothing back. (Where prompts get easier over the steps, the reward rises without the policy)",
        next_step="compare the reference's weights of two steps, which have to be the same; rldbg record -- YOUR "
        "COMMAND keeps ref_log_probs",
    )


#: Steps; of the later half of them, how many have a KL below that of the batch's own updates; how many times that a
#: policy has to have moved before.
OF_BATCHES, BELOW, TIMES = 16, 0.2, 20.0
#: How the two go together (rank correlation) where one set of updates makes both, and how many times its first steps'
#: such a KL comes to.
GOES_WITH, AS_FIRST = 0.5, 3.0
#: A KL of one batch's updates that two forwards of one set of weights do not come to in bf16.
MOVES = 1e-3


def _is_of_the_batch(log: RunLog) -> Finding | None:
    """A KL to the reference that is no more than what the batch's own updates make, again and again."""
    kl, moved = given(log.get("kl")), log.get("policy_kl")
    rows = [(abs(far), abs(own)) for _, (far, own) in together(kl, moved)]
    if moved is None or len(rows) < OF_BATCHES or not all(own for _, own in rows):
        return None
    if min(len({row[at] for row in rows}) for at in (0, 1)) * 2 < len(rows):
        return None  # figures that rest do not go together
    if log.algorithm.is_off_policy or trends.rises([far for far, _ in rows]):
        return None
    # One set of updates makes both, from the first step on.
    alike = trends.together([far for far, _ in rows], [own for _, own in rows])
    late = rows[len(rows) // 2 :]
    if median(own for _, own in rows) < MOVES:
        return None  # what precision alone makes of two forwards
    if alike < GOES_WITH or median(far for far, _ in late) > AS_FIRST * max(far for far, _ in rows[:3]):
        return None
    below = [far for far, own in late if far < own]
    way = sum(own for _, own in rows[: len(rows) // 2])
    if len(below) < BELOW * len(late) or way < TIMES * median(below):
        return None
    return warning(
        f"the reference follows the policy: in {len(below)} of the last {len(late)} steps {kl.name} is below the KL of "
        f"that batch's own updates ({moved.name}), after updates of {way:.2g} nats per token in all",
        kl,
        shown(f"median {kl.name} in those steps", median(below), "above what the batch's updates make", kl.source),
        shown(f"sum of |{moved.name}| before", way),
        shown("steps that show it", len(below), None, f"of {len(late)}"),
        cause="the KL is taken to the policy as it was when the batch began: the reference is not frozen, is the "
        "policy itself (or shares its weights), or is loaded anew in each step. A KL term then holds nothing back",
        next_step="compare the reference's weights of two steps, which have to be the same; rldbg record -- YOUR "
        "COMMAND keeps ref_log_probs",
    )


#: Changes of the coefficient before they tell, the share that has to go one way, and what is no change.
CHANGES, MOST, STILL = 6, 0.9, 1e-9


@rule("D114", "the KL coefficient is steered the wrong way", link="ref", scope="signals",
      needs=("kl_coefficient", "kl"), lasts=True, explains=("D01", "D20", "D25", "L08", "L09", "L10"),
      source="Ziegler et al. 2019: the coefficient grows while the KL is above its target")  # fmt: skip
def steered(log: RunLog) -> Finding | None:
    """A coefficient that changes from step to step (6 times and more), beside the KL: with the stated target, or with
    any, it has to rise where the KL is above and fall where it is below. A warning where nine of ten changes go the
    other way (on both sides of the target, 3 and more each, where none is stated), and no target makes them right.
    """
    weight, kl = given(log.get("kl_coefficient")), given(log.get("kl"))
    rows = [values for _, values in together(weight, kl)]
    skip_if(len(rows) <= CHANGES, f"needs coefficient and KL of {CHANGES} steps and more")
    stated = _target(log)
    wrong: list[tuple[float, float, list[tuple[float, float]]]] = []
    right = 0.0
    # A step's coefficient is made of the KL of the step before, or of its own.
    for each in (
        [(b[0] - a[0], a[1]) for a, b in pairwise(rows)], [(b[0] - a[0], b[1]) for a, b in pairwise(rows)],
    ):  # fmt: skip
        moved = [(change, apart) for change, apart in each if abs(change) > STILL * max(abs(weight.finite[0]), 1e-12)]
        if len(moved) < CHANGES:
            continue
        for target in [stated] if stated is not None else _between(sorted({apart for _, apart in moved})):
            over = sum(apart > target for _, apart in moved)
            # Of a target that nobody states both sides have to tell.
            if not over or (stated is None and min(over, len(moved) - over) < CHANGES // 2):
                continue
            share_ = sum((change > 0) != (apart > target) for change, apart in moved) / len(moved)
            wrong.append((share_, target, moved))
            right = max(right, 1 - share_)
    skip_if(not wrong, "the coefficient does not change, or the KL is on one side of its target: nothing to tell by")
    worst, target, moved = max(wrong, key=lambda one: one[0])
    if worst < MOST or right >= MOST:
        return None
    above = [change for change, apart in moved if apart > target]
    return warning(
        "the KL coefficient is steered the wrong way: it falls while the KL is above "
        + (f"its target of {target:g}" if stated is not None else f"{target:.3g}, and rises below")
        + f", from {weight.finite[0]:.3g} to {weight.finite[-1]:.3g}",
        weight,
        weight.shown(weight.finite[-1], "larger, where the KL is above its target"),
        shown("changes that go the wrong way", f"{round(worst * len(moved))} of {len(moved)}", "none"),
        shown("steps with the KL above", f"{len(above)} of {len(moved)}"),
        kl.shown(trends.level(kl.finite), f"about {target:.3g}"),
        cause="the error of the controller has the wrong sign (target - KL for KL - target), or the KL it is given is "
        "negated: the farther the policy is from its reference, the less it is held",
        steps=steps_of(point for point in kl.points if math.isfinite(point.value) and point.value > target),
    )


#: Steps; the share of them in which the coefficient rises, how many times it grows in all and in the last third; what
#: of the first third's KL is left; and how many times it has to grow where no reward tells.
RISES, UP, SO_FAR_UP, STILL_UP, KEPT, FAR_UP = 8, 0.8, 5.0, 1.2, 0.6, 20.0


@rule("D122", "the KL coefficient grows without a hold on the KL", link="ref", scope="signals",
      needs=("kl_coefficient", "kl"), explains=("L08", "L10", "L36", "L40"), lasts=True,
      source="Ziegler et al. 2019: a coefficient that grows brings the KL down to its target")  # fmt: skip
def runs_away(log: RunLog) -> Finding | None:
    """A coefficient that rises in four of five steps (8 and more), to 5 times and more, and still does in the last
    third, while the KL keeps three fifths of what it was: a warning where the reward falls, or where it has grown 20
    times. Silent where the KL has come down to the stated target.
    """
    weight, kl = given(log.get("kl_coefficient")), given(log.get("kl"))
    rows = [values for _, values in together(weight, kl)]
    skip_if(len(rows) < RISES, f"needs coefficient and KL of {RISES} steps")
    weights, far = [row[0] for row in rows], [row[1] for row in rows]
    third = len(rows) // 3
    up = sum(b > a for a, b in pairwise(weights))
    if min(weights) <= 0 or up < UP * (len(weights) - 1) or weights[-1] < SO_FAR_UP * weights[0]:
        return None
    begun, now = median(far[:third]), median(far[-third:])
    if weights[-1] < STILL_UP * weights[-third] or begun <= 0 or now < KEPT * begun:
        return None
    target, reward = _target(log), log.get("reward")
    falls = reward is not None and trends.drift(reward.finite) < -trends.DRIFT_Z
    if (target is not None and now <= target) or not (falls or weights[-1] >= FAR_UP * weights[0]):
        return None
    return warning(
        f"the KL coefficient runs away: {weight.name} grows from {weights[0]:.3g} to {weights[-1]:.3g} "
        f"({weights[-1] / weights[0]:.3g} times) while the KL stays at {now:.3g} ({begun:.3g} at first): it has no "
        "hold on it"
        + (f", and the reward falls for it, to {trends.level(given(reward).finite, 3):.3g}" if falls else ""),
        weight.ended,
        weight.shown(weights[-1], "at rest, once the KL is at its target"),
        shown("steps in which it rises", f"{up} of {len(weights) - 1}"),
        kl.shown(now, f"< {KEPT * begun:.3g}"),
        *([given(reward).shown(given(reward).last.value, f"was {given(reward).finite[0]:.3g}")] if falls else []),
        cause="the KL does not answer to the penalty: no gradient of it reaches the policy (it is only taken from the "
        "reward, or detached, or the policy is not updated), its target is below what policy and reference are apart "
        "to begin with, or the KL is of other tokens than those that are trained; the penalty then eats the reward",
        next_step="take the KL before the first update, which is 0 for the policy that the reference is; bound the "
        "coefficient, and look whether one update with a large one lowers the KL",
    )


def _target(log: RunLog) -> float | None:
    """The KL that a controller is to keep."""
    return log.algorithm.number("target_kl", "kl_target", "target")


def _between(values: list[float]) -> list[float]:
    """The middles of neighbours."""
    return [(a + b) / 2 for a, b in pairwise(values)]
