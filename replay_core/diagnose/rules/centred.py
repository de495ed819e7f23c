"""Advantages without their rewards: what a group's own numbers tell of how they were made."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from msgspec.structs import replace

from replay_core.diagnose.advantage_mistakes import Guess
from replay_core.diagnose.advantage_variants import orders
from replay_core.diagnose.algorithm import OF_GROUPS
from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Finding, finding, listed, share, shown
from replay_core.diagnose.flat import Array, groups_of
from replay_core.diagnose.rule import given, rule, skip_if

#: Groups with a spread before their means say anything; how near 0 a mean is, and a std to 1 (an epsilon, a std over
#: n or n - 1, float32).
FEWEST, NEAR, UNIT = 3, 5e-3, 2e-2
#: Of such groups, those that add up to 0 with the rows in the order they were made in.
MOST = 0.5


@rule("D93", "advantages of a group are not measured against it", link="advantages", scope="case", lasts=True,
      explains=("D02", "D23", "D28", "D73", "L08"),
      source="GRPO, RLOO: a group's advantages add up to 0; TRL hands over no rewards")  # fmt: skip
def not_centred(case: Case) -> Finding | None:
    """Where advantages are recorded and rewards are not: equal prompts are a group, and a group's advantages add up to
    0, whatever its rewards were. Looked at with 3 groups of one size and more whose advantages differ, no critic and no
    stated REINFORCE. Where they do not add up: an error where they do for rows in another order or in other groups,
    where each group has a std of 1 (it was divided by its own std) and another mean than 0, where all are one number,
    none is negative, only signs are left (these three are worth knowing where no estimator of groups is stated, unless
    the trainer is TRL's), or the same constant lies on all groups, or the response's length; a warning
    where the whole batch adds up to 0 instead, or all stds are one number other than 1. Silent where neither holds:
    whitened over tokens (REINFORCE++), parts of groups.
    """
    ballot: dict[str, list[tuple[StepBatch, Guess]]] = {}
    looked = 0
    for batch in case.batches():
        whole = batch.once
        numbers = _numbers(whole)
        if numbers is None:
            continue
        looked += 1
        every = [
            replace(one, severity="info") if _may_be_meant(whole, one) else one
            for order in whole.laid.orders for one in _guesses(*(each[order] for each in numbers))
        ]  # fmt: skip
        # What another order or grouping explains is no matter of the whole batch.
        guess = min(every, key=lambda one: one.severity != "error", default=None)
        if guess is not None:
            ballot.setdefault(guess.key, []).append((batch, guess))
    skip_if(not looked, "needs advantages without rewards, of three groups of equal prompts and one size")
    found = max(ballot.values(), key=len, default=[])
    if 2 * len(found) < looked or not found or (len(found) < 2 and found[0][1].severity == "warning"):
        return None
    batch, guess = found[0]
    numbers = given(_numbers(batch.once))
    means = [float(numbers[0][numbers[1] == group].mean()) for group in np.unique(numbers[1])]
    column = batch.columns.of("advantages")
    return finding(
        guess.severity,
        guess.claim,
        batch.laid.where("advantages", sample=0),
        shown("means of the groups", listed([f"{mean:.3g}" for mean in means]), "0",
        column.source if column is not None else batch.name),
        shown("steps that show it", share(len(found), looked)),
        cause=guess.cause,
        steps=[each.step for each, _ in found],
    )  # fmt: skip


#: What REINFORCE, RAFT and SFT have: rewards for advantages, of any sign, or a weight of 1 for all that are chosen; and
#: ReMax, whose greedy answer may be the best.
_MAY_BE_MEANT = (
    "one number", "sign alone", "none is negative", "none is negative, and the worst of every group has 0",
    "the best response's reward is the baseline",
)  # fmt: skip


def _may_be_meant(batch: StepBatch, guess: Guess) -> bool:
    """Whether no baseline of groups is stated, and the trainer knows others (TRL's GRPO does not)."""
    run = batch.laid.run
    of_groups = batch.laid.algorithm.estimator in OF_GROUPS or (run is not None and run.dialect == "trl")
    return not of_groups and guess.key in _MAY_BE_MEANT and not guess.is_by_own_std


def _numbers(batch: StepBatch) -> tuple[Array, Array, Array] | None:
    """Advantages, group and counted tokens of each sample [B]; None where they cannot be judged."""
    if batch.reward_B is not None or batch.columns.ref("values") is not None:
        return None
    estimator = batch.laid.algorithm.estimator
    advantage_B, prompt_B = batch.advantage_B, batch.prompt_B
    if estimator == "gae" or estimator.startswith("reinforce") or advantage_B is None or prompt_B is None:
        return None
    if not np.isfinite(advantage_B).all() or not advantage_B.any():
        return None
    group_B = batch.group_B if batch.group_is_named and batch.group_B is not None else prompt_B
    sizes = np.unique(np.bincount(group_B))
    spread = sum(float(np.ptp(advantage_B[inside])) > 1e-6 for inside in groups_of(group_B))
    one = float(np.ptp(advantage_B)) <= 1e-6 * float(np.abs(advantage_B).max())
    if sizes.size > 1 or sizes[0] < 3 or (spread < FEWEST and not one):
        return None
    tokens_B = np.ones(len(advantage_B)) if batch.trained_N is None else batch.flat.count(batch.trained_N)
    return advantage_B, group_B, tokens_B.astype(np.float64)


def _told(values_B: Array, group_B: Array) -> tuple[Array, Array]:
    """Mean and std (over n - 1) of each group whose values differ."""
    groups = [values_B[inside] for inside in groups_of(group_B)]
    groups = [values for values in groups if np.ptp(values) > 1e-6]
    return np.array([values.mean() for values in groups]), np.array([values.std(ddof=1) for values in groups])


def _is_centred(values_B: Array, group_B: Array) -> bool:
    mean_G, std_G = _told(values_B, group_B)
    return len(mean_G) >= FEWEST and bool((np.abs(mean_G) <= NEAR * std_G).all())


def _centred(values_B: Array, group_B: Array) -> Array:
    """Whether each group whose values differ adds up to 0."""
    mean_G, std_G = _told(values_B, group_B)
    each_G: Array = np.abs(mean_G) <= NEAR * std_G
    return each_G


def _is_unit(std_G: Array, size: int) -> bool:
    """Whether every group was divided by its own std."""
    return any(bool((np.abs(std_G - one) <= UNIT).all()) for one in (1.0, float(np.sqrt(size / (size - 1)))))


def _guesses(a_B: Array, group_B: Array, tokens_B: Array) -> Iterator[Guess]:
    mean_G, std_G = _told(a_B, group_B)
    size = int(np.bincount(group_B)[0])
    if not len(mean_G):
        yield Guess(
            "error", "one number", f"all advantages are one number ({a_B[0]:.4g})",
            "a constant stands for them: no answer is told from another",
        )  # fmt: skip
        return
    middle = float(np.median(std_G))
    if _is_centred(a_B, group_B):
        one = bool((np.abs(std_G / middle - 1) <= UNIT / 4).all())
        if one and not _is_unit(std_G, size) and np.unique(np.round(np.abs(a_B), 4)).size > size:
            yield Guess(
                "warning", f"times {middle:.2g}",
                f"advantages are {middle:.4g} times what they should be: every group has that std, not 1",
                "a factor too many: they are scaled once more after they were normalised, or summed over ranks",
            )  # fmt: skip
        return
    groups = int(group_B.max()) + 1
    # Of one size, with two signs, any two that differ add up to 0.
    telling = np.unique(np.round(np.abs(a_B), 4)).size > 2
    for how, order_B in orders(len(a_B), groups) if telling else ():
        if _is_centred(a_B[order_B], group_B):
            yield Guess(
                "error", "other samples",
                f"advantages belong to other samples: they add up to 0 in every group with the rows {how}",
                "the batch was reordered (shuffled, rolled, gathered from ranks) after the advantages were computed",
            )  # fmt: skip
            return
    own_G = _centred(a_B, group_B)
    for how, order_B in orders(len(a_B), groups):
        # Rows that another's mask has cut add up no longer: most groups do, and none where it stands.
        there_G = _centred(a_B[order_B], group_B)
        if not own_G.any() and there_G.sum() >= FEWEST and there_G.mean() >= MOST and how.startswith("moved"):
            yield Guess(
                "error", "other samples",
                f"advantages belong to other samples: with the rows {how} they add up to 0 in {int(there_G.sum())} of "
                f"{len(there_G)} groups, and in none as they are",
                "the batch was rolled after the advantages were computed, and each row is masked by another's length",
            )  # fmt: skip
            return
    for how, other_B in _other_groups(len(a_B), groups) if telling else ():
        if _is_centred(a_B, other_B):
            yield Guess(
                "error", "groups",
                f"advantages are computed in the wrong groups: they add up to 0 with {how}, not over equal prompts",
                "samples are grouped by their place in a batch that was reordered, not by their prompt",
            )  # fmt: skip
            return
    for what, cause, values_B in (
        ("divided by", "the mean over a response's tokens is taken in the advantage already", a_B * tokens_B),
        ("multiplied by", "they are added up over a response's tokens instead of standing once",
         a_B / np.maximum(tokens_B, 1)),
    ):  # fmt: skip
        if _is_centred(values_B, group_B):
            yield Guess(
                "warning", what, f"advantages are {what} the length of their response: without it each group adds up "
                "to 0", cause,
            )  # fmt: skip
            return
    kinds = np.unique(np.round(a_B, 6))
    if set(kinds.tolist()) <= {-1.0, 0.0, 1.0}:
        yield Guess(
            "error", "sign alone", "only the sign of the advantages is left: they are -1, 0 and 1, and groups do not "
            "add up to 0",
            "a sign (or a comparison) is taken: how much better an answer is no longer counts",
        )  # fmt: skip
        return
    whitened = abs(float(a_B @ tokens_B)) <= NEAR * float(a_B.std()) * float(tokens_B.sum())
    if not whitened and (np.abs(mean_G - np.median(mean_G)) <= NEAR * np.maximum(std_G, 1)).all():
        yield Guess(
            "error", "moved", f"a constant is added to the advantages: every group's mean is {np.median(mean_G):.4g}, "
            "not 0",
            "a bias, or a mean that is taken away with the wrong sign: every token is pushed one way",
        )  # fmt: skip
        return
    unit = _is_unit(std_G, size)
    if float(a_B.min()) >= 0 or float(a_B.max()) <= 0 or unit:
        yield _of_sides(a_B, group_B, unit=unit)
        return
    if not whitened and abs(float(a_B.mean())) <= NEAR * float(a_B.std()):
        yield Guess(
            "warning", "batch", "advantages are centred over the whole batch, not by the group: only all of them add "
            "up to 0",
            "the mean is taken over the wrong axis: a response is measured against answers to other prompts; or rows "
            "were reordered after advantages were computed",
        )  # fmt: skip


def _of_sides(a_B: Array, group_B: Array, *, unit: bool) -> Guess:
    """Groups whose advantages keep to one side of 0, or have an own std and no mean of 0."""
    each = [a_B[group_B == group] for group in np.unique(group_B) if np.ptp(a_B[group_B == group]) > 1e-6]
    own = " Each group has a std of 1: it is divided by its own." if unit else ""
    if all(abs(float(values.max())) <= 1e-5 for values in each):
        what, cause = "the best response's reward is the baseline", "a max stands for the mean"
    elif all(abs(float(values.min())) <= 1e-5 for values in each):
        what, cause = (
            "none is negative, and the worst of every group has 0",
            "negative ones are cut off at 0, or the worst response's reward is the baseline",
        )
    elif all(abs(float(values[0])) <= 1e-5 for values in each):
        what, cause = "the group's first response is the baseline", "an index stands for the mean"
    elif all(abs(float(values[-1])) <= 1e-5 for values in each):
        what, cause = "the group's last response is the baseline", "an index stands for the mean"
    elif float(a_B.min()) >= 0:
        what, cause = (
            "none is negative",
            "there is no baseline: nothing is subtracted from the rewards; or an absolute value (a square, a clamp) is "
            "taken",
        )
    else:
        what, cause = (
            "what is subtracted is not the group's mean",
            "the mean is taken over the wrong axis (the whole batch), or over another count of responses",
        )
    return Guess(
        "error", what, f"advantages are not centred by the group: {what}.{own}".rstrip("."), cause, is_by_own_std=unit
    )


def _other_groups(total: int, groups: int) -> Iterator[tuple[str, Array]]:
    each = np.arange(total)
    if total % groups == 0:
        yield f"every {groups}th row as a group", each % groups
    for size in (2, 3, 4, 5, 6, 8, 12, 16, 24, 32):
        if total % size == 0 and size < total:
            yield f"every {size} rows in a row as a group", each // size
            yield f"every {total // size}th row as a group", each % (total // size)
