"""What mistakes make of a batch's advantages: a closed family, each held against the recorded ones."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct

from replay_core.diagnose.advantage_variants import (
    LARGE_EPSILON,
    agree,
    are_raw,
    group_std_B,
    groupings_of,
    held_together,
    in_groups,
    known_variants,
    matching,
    orders,
    squashed,
    zeroed,
)
from replay_core.diagnose.algorithm import GROUP_SIZE, OF_GROUPS, divides_by_length, severity_of_raw
from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.finding import listed, share
from replay_core.diagnose.flat import Array, groups_of
from replay_core.diagnose.lines import MEAN, baseline_of, scale_of, solved
from replay_core.diagnose.rule import Skip, given, skip_if
from replay_core.objectives import advantages, kl

if TYPE_CHECKING:
    from replay_core.documents.diagnosis import Severity


class Unlike(Exception):  # noqa: N818 - it is no error, it is an answer
    """Advantages that no known variant has: of the samples that have one, which those are, and how close is close."""

    def __init__(self, heard_B: Array, kept_B: Array, close: Array, stored: float) -> None:
        super().__init__("advantages are no known variant")
        self.heard_B, self.kept_B, self.close, self.stored = heard_B, kept_B, close, stored


OF_FUNCTIONS = "rewards are a sum of functions, whose weights (and a penalty) are not recorded"


class Guess(Struct, frozen=True):
    """One mistake that makes all advantages of a batch; `key` is the same in every step it is made in."""

    severity: Severity
    key: str
    claim: str
    cause: str
    is_by_own_std: bool = False
    """Whether each group was surely divided by its own std: then the baseline is a group's."""


def guesses_of(batch: StepBatch, unlike: Unlike) -> Iterator[Guess]:
    """Every mistake that makes the advantages of the batch, the likeliest first; what says least comes last and is for
    batches that nothing else explains.

    Raises:
        Skip: nothing explains them, and something that is not recorded may.
    """
    heard_B, kept_B, close = unlike.heard_B, unlike.kept_B, unlike.close
    reward_B, group_B = given(batch.reward_B), given(batch.group_B)
    if not batch.group_is_named:
        if (turned := _turned(batch, heard_B, kept_B, close)) is not None:
            yield turned
            return
        # A baseline and a scale that both have a name, in every group, say that the groups are right.
        if lines := [one for one in _from_lines(batch, unlike) if one.key not in ("baseline", "scale")]:
            yield from lines
            return
        if absolute := [one for one in _from_values(batch, unlike) if one.key == "absolute"]:
            yield from absolute
            return
        # What makes every advantage of the batch exactly needs no ids of groups beside it.
        if exact := [*_from_groupings(batch, unlike, mixed=True), *_from_order(batch, unlike)]:
            yield from exact
            return
        raise Skip("groups are not named in the dump, and equal prompts as groups explain no known variant")
    if batch.trained_N is not None and not batch.trained_N.any():
        raise Skip("no token counts (D07): advantages are masked out with it")
    if batch.columns.are_sums_alone:
        yield from _of_own_sum(batch, unlike)
        return
    if not np.abs(heard_B).max() > 0:
        yield Guess(
            "error", "zero", "all advantages are 0 although rewards differ within groups",
            "advantages are computed from other rewards than these, or are masked or cleared before they are stored",
        )  # fmt: skip
        return
    skip_if(are_raw(batch), "advantages are the raw rewards in some steps alone: a baseline that begins at 0")
    if (turned := _turned(batch, heard_B, kept_B, close)) is not None:
        yield turned
        return
    weight = _kl_in_rewards(batch, heard_B, kept_B)
    if weight is not None:
        raise Skip(f"advantages are made of rewards less {weight:.3g} x KL to the reference, as some trainers do")
    if (rows := _turned_rows(batch, unlike)) is not None:
        yield rows
        return
    every = [
        one
        for makes in (_from_held, _from_padding, _from_variance, _from_equal, _from_nominal, _from_lines, _from_values,
                      _from_groupings, _from_strides, _from_order, _from_parts)
        for one in makes(batch, unlike)
    ]  # fmt: skip
    # That a line is none of those known says less than what makes it.
    yield from sorted(every, key=lambda one: one.key in ("baseline", "scale"))
    if every:
        return
    if np.unique(np.bincount(group_B)).size > 1:
        raise Skip("groups have different sizes: part of the batch may not be in the dump")
    if batch.columns.reward_functions_FB is not None:
        raise Skip(OF_FUNCTIONS)
    if (some := _but_for_some(batch, unlike)) is not None:
        yield some
        return
    algorithm = batch.laid.algorithm
    known = squashed(batch, heard_B, kept_B, reward_B, group_B)
    if algorithm.estimator not in OF_GROUPS and (chosen := _chosen(batch, heard_B, kept_B)) is not None:
        yield Guess(
            "info", "chosen", f"advantages choose: {chosen:.4g} for the best answers, and 0 for all others",
            "rejection sampling (RAFT, best of n, positive answers alone): right where it is meant",
        )  # fmt: skip
        return
    if known is not None:
        yield Guess(
            "info", "squashed", f"advantages are a rising function of {known}: no recipe's, and in the right order",
            "a squashing that keeps order and sign (tanh, ranks, a root, another clip); nothing is wrong where it is "
            "meant",
        )  # fmt: skip
        return
    is_own = algorithm.estimator == "reinforce" or (algorithm.names_an_estimator and not algorithm.estimator)
    yield Guess(
        "info" if is_own else "warning", "none", "advantages are no variant that rewards and groups give",
        "another normalisation, rewards that were shaped (KL, length) after they were recorded, or a wrong grouping",
    )  # fmt: skip


#: The share of the samples that a known variant makes before the others are those that are made otherwise, and
#: different advantages of them.
MOST_SAMPLES, DIFFERENT = 0.75, 6


def _but_for_some(batch: StepBatch, unlike: Unlike) -> Guess | None:
    """A known variant that makes the advantages of most samples, and of some of a group but not all of it."""
    heard_B, close = unlike.heard_B, unlike.close
    group_B = given(batch.group_B)[unlike.kept_B]
    best: tuple[int, str, Array] | None = None
    for name, values_B in _known(batch, unlike.kept_B):
        if not np.isfinite(values_B).all():
            continue
        off_B = np.abs(heard_B - values_B) > close * np.maximum(1, np.abs(values_B))
        if best is None or off_B.sum() < best[0]:
            best = int(off_B.sum()), name, off_B
    if best is None or not 0 < best[0] <= (1 - MOST_SAMPLES) * len(heard_B):
        return None
    off, name, off_B = best
    right = np.unique(np.round(heard_B[~off_B], 5)).size
    whole = [group for group in np.unique(group_B[off_B]) if off_B[group_B == group].all()]
    if right < DIFFERENT or whole:
        return None
    rows = np.flatnonzero(unlike.kept_B)[off_B]
    one = np.ptp(heard_B[off_B]) <= float(close.max())
    if one and abs(float(heard_B[off_B][0])) <= float(close.max()):
        return None  # samples that are left out on purpose have none
    return Guess(
        "warning", "some",
        f"advantages of {share(off, len(heard_B))} samples are others than their groups give: in all the rest they are "
        f"{name}, in rows {listed(rows.tolist(), 4)} "
        + (f"they are {heard_B[off_B][0]:.4g}" if one else "they are not"),
        "something is written into single rows after the advantages are made: a penalty (for a failed call, for "
        "length), or a write to one token of a row that is a view of one number and changes all of it; their groups "
        "no longer add up to 0",
    )  # fmt: skip


def _of_own_sum(batch: StepBatch, unlike: Unlike) -> Iterator[Guess]:
    """Mistakes with rewards whose functions' weights nobody states: those that a known variant of the plain sum gives
    to the digit, which it would not were the weights others.

    Raises:
        Skip: there is none.
    """
    if (turned := _turned(batch, unlike.heard_B, unlike.kept_B, unlike.close)) is not None:
        yield turned
        return
    if (rows := _turned_rows(batch, unlike)) is not None:
        yield rows
        return
    exact = [one for makes in (_from_held, _from_values, _from_order, _from_parts) for one in makes(batch, unlike)]
    if not exact:
        raise Skip(OF_FUNCTIONS)
    yield from exact


def _from_padding(batch: StepBatch, unlike: Unlike) -> Iterator[Guess]:
    """Rewards whitened over every slot of the padded responses, whose padding holds zeros."""
    trained_N, width = batch.trained_N, batch.laid.widths.get("the response", 0)
    if trained_N is None or not np.ptp(unlike.heard_B) > 0:
        return
    tokens_B = batch.flat.count(trained_N).astype(np.float64)
    reward_B, group_B = given(batch.reward_B), given(batch.group_B)
    for what, score_B in (("r", reward_B), ("r - group mean", advantages.group_centred(reward_B, group_B))):
        slots = float(max(width, _width_of(score_B, tokens_B, unlike)) * len(tokens_B))
        if not tokens_B.sum() < slots:
            continue
        mean = float(score_B @ tokens_B) / slots
        squares = float(((score_B - mean) ** 2) @ tokens_B) + (slots - float(tokens_B.sum())) * mean**2
        for divisor in (slots, slots - 1):
            made_B = (score_B - mean) / (np.sqrt(squares / divisor) + 1e-8)
            if np.isfinite(made_B).all() and agree(unlike.heard_B, made_B[unlike.kept_B], unlike.close):
                yield Guess(
                    "error", "over padding",
                    f"advantages are whitened over padding: mean and std of {what} are taken over all {slots:.0f} "
                    f"positions of the padded responses, not over the {tokens_B.sum():.0f} tokens of the mask",
                    "the mask is not handed to the whitening: zeros of padding draw the mean to 0, and advantages keep "
                    "one",
                )  # fmt: skip
                return


def _width_of(score_B: Array, tokens_B: Array, unlike: Unlike) -> int:
    """The width of the padded responses that a mean over all slots would be of, where advantages are a line of scores
    and rows are recorded narrower than they were; 0 where they are none.
    """
    kept_B = score_B[unlike.kept_B]
    if np.ptp(kept_B) <= 1e-9:
        return 0
    gain, off = np.polyfit(kept_B, unlike.heard_B, 1)
    total = float(score_B @ tokens_B)
    if not gain > 0 or abs(off) < 1e-3 or not agree(unlike.heard_B, gain * kept_B + off, unlike.close):
        return 0
    width = total / (-off / gain) / len(score_B)
    return round(width) if 0 < width < 1e6 and abs(width - round(width)) < 1e-2 else 0


_NORMALISED = "(r - group mean) / group std"


def _from_variance(batch: StepBatch, unlike: Unlike) -> Iterator[Guess]:
    """Rewards whitened over the batch's tokens, or its samples, by their variance instead of its root."""
    if not np.ptp(unlike.heard_B) > 0:
        return
    reward_B, group_B = given(batch.reward_B), given(batch.group_B)
    tokens_B = None if batch.trained_N is None else batch.flat.count(batch.trained_N).astype(np.float64)
    for over, weights_B in (("tokens", tokens_B), ("samples", np.ones(len(reward_B)))):
        total = 0.0 if weights_B is None else float(weights_B.sum())
        if weights_B is None or total < 2:
            continue
        for what, score_B in (("r", reward_B), ("r - group mean", advantages.group_centred(reward_B, group_B))):
            centred_B = score_B - float(score_B @ weights_B) / total
            squares = float((centred_B * centred_B) @ weights_B)
            for divisor in (total, total - 1) if squares > 0 else ():
                # Of a variance near 1 it is its own root.
                made_B = centred_B / (squares / divisor)
                if abs(squares / divisor - 1) > OFF_ROOT and agree(
                    unlike.heard_B, made_B[unlike.kept_B], unlike.close * max(1.0, float(np.abs(made_B).max()))
                ):
                    yield Guess(
                        "error", "by variance",
                        f"advantages are whitened by the variance of the batch's {over}, not by its root, the std: "
                        f"they are ({what} - mean) / {squares / divisor:.3g}, where the std is "
                        f"{float(np.sqrt(squares / divisor)):.3g}",
                        "a square root is missing in the normalisation: advantages have the std 1 / std, and grow the "
                        "more alike rewards get",
                    )  # fmt: skip
                    return


#: How far from 1 a variance has to be before it is told from its root.
OFF_ROOT = 0.05


def _from_held(batch: StepBatch, unlike: Unlike) -> Iterator[Guess]:
    """Mean and std of the rows that one rank, or one micro-batch, holds: over these samples, or over their tokens."""
    reward_B, group_B = given(batch.reward_B), given(batch.group_B)
    if np.unique(np.round(unlike.heard_B, 6)).size < MOVED_VALUES:
        return
    tokens_B = None if batch.trained_N is None else batch.flat.count(batch.trained_N).astype(np.float64)
    for whose, part_B in held_together(batch):
        for what, score_B in (
            ("r", reward_B), ("r - group mean", advantages.group_centred(reward_B, group_B)),
            (_NORMALISED, advantages.group_normalised(reward_B, group_B)),
        ):  # fmt: skip
            made = [advantages.group_normalised(score_B, part_B, unbiased=unbiased) for unbiased in (True, False)]
            for unbiased in (True, False):
                whitened_B = np.zeros(len(score_B))
                for part in np.unique(part_B) if tokens_B is not None else ():
                    inside = part_B == part
                    whitened_B[inside] = advantages.whitened(
                        score_B[inside], given(tokens_B)[inside], unbiased=unbiased
                    )
                made.append(whitened_B)
            if matching(unlike.heard_B, zeroed(((what, one_B) for one_B in made), unlike.kept_B), unlike.close):
                yield Guess(
                    "error" if batch.laid.algorithm.estimator else "warning", f"held: {whose}",
                    f"advantages are normalised a second time, over {whose} own rows, after they were within each group"
                    if what == _NORMALISED
                    else f"advantages are normalised over {whose} own rows: mean and std of {what} are not those of "
                    "the whole batch",
                    "the statistics are not reduced over all ranks (or are taken inside the loop over micro-batches): "
                    "one reward has another advantage on another rank, and fewer samples make its mean and std noisier",
                )  # fmt: skip
                return


def _from_equal(batch: StepBatch, unlike: Unlike) -> Iterator[Guess]:
    """Groups of equal rewards whose rounding is divided by a std of 0, where a known variant makes all others."""
    reward_B, group_B, heard_B = given(batch.reward_B), given(batch.group_B), unlike.heard_B
    spread_B = group_std_B(reward_B, group_B)
    equal_B = (spread_B - 1e-6 <= 1e-6 * np.maximum(np.abs(reward_B), 1e-12))[unlike.kept_B]
    if not equal_B.any() or equal_B.all() or not np.abs(heard_B[equal_B]).max() > 0.1:
        return
    for name, values_B in _known(batch, unlike.kept_B):
        if agree(heard_B[~equal_B], values_B[~equal_B], unlike.close[~equal_B]):
            yield Guess(
                "error",
                "equal",
                f"groups of equal rewards have advantages, up to {np.abs(heard_B[equal_B]).max():.3g}: what "
                f"rounding leaves of them is divided by a std of 0 without an epsilon; the others are {name}",
                "the std of equal rewards is 0 but for rounding, and no epsilon is added to it: noise is taught",
            )
            return


def _from_nominal(batch: StepBatch, unlike: Unlike) -> Iterator[Guess]:
    """A baseline that divides each group's sum by one number, however many rows the group has."""
    kept_B = unlike.kept_B
    reward_B, group_B = given(batch.reward_B)[kept_B], given(batch.group_B)[kept_B]
    size_B = np.bincount(group_B)[group_B]
    sum_B = np.bincount(group_B, weights=reward_B)[group_B]
    if np.unique(size_B).size < 2:
        return
    taken_B = reward_B - unlike.heard_B
    for what, over_B, own_B in (
        ("the sum of the group's other rewards", sum_B - reward_B, size_B - 1), ("the group's sum", sum_B, size_B)
    ):  # fmt: skip
        told_B = np.abs(taken_B) > 10 * unlike.close
        if told_B.sum() < MOVED_VALUES:
            continue
        divisor = float(np.median(over_B[told_B] / taken_B[told_B]))
        number = round(divisor)
        is_one = number > 0 and np.allclose(reward_B - over_B / number, unlike.heard_B, atol=float(unlike.close.max()))
        if is_one and (own_B != number).any():
            few = share(int((own_B != number).sum()), len(own_B))
            yield Guess(
                "warning", "nominal",
                f"the baseline divides {what} by {number} in every group, also where it has another number of rows "
                f"({few} samples are in such groups): their advantages do not add up to 0",
                "the group's nominal size stands for the number of rows that are left of it: of groups that lost rows "
                "(aborted, filtered, too long) the baseline is too low, and all that is left of them is rewarded; "
                "right only where rows whose reward is 0 were left out of the dump after advantages were made",
            )  # fmt: skip
            return


def one_bound(strange: list[tuple[StepBatch, Unlike]]) -> Guess | None:
    """One bound on both sides that cuts off a known variant in every one of these batches, 2 and more: the same in all
    of them, and one advantage at least lies between.
    """
    bounds = [float(np.abs(unlike.heard_B).max()) for _, unlike in strange]
    bound = bounds[0] if bounds else 0.0
    if len(bounds) < 2 or not bound > 0 or any(abs(one - bound) > 1e-4 * bound for one in bounds):
        return None
    inside = lost = total = 0
    name = ""
    for batch, unlike in strange:
        heard_B, close = unlike.heard_B, unlike.close
        every = ((what, np.clip(values_B, -bound, bound), values_B) for what, values_B in _known(batch, unlike.kept_B))
        found = next(((what, raw_B) for what, cut_B, raw_B in every if agree(heard_B, cut_B, close)), None)
        if found is None:
            return None
        name = name or found[0]
        cut = int((np.abs(found[1]) > bound * (1 + 1e-4)).sum())
        if not cut:
            return None
        lost, total = lost + cut, total + int((np.abs(found[1]) > close).sum())
        inside += int(((np.abs(heard_B) > close) & (np.abs(heard_B) < bound * (1 - 1e-4))).sum())
    stated = strange[0][0].laid.algorithm.advantage_clip
    if not inside:
        return None
    meant = stated is not None and abs(stated - bound) <= 1e-3 * bound
    return Guess(
        "info" if meant else "warning", "bound",
        f"advantages are cut off at {-bound:.4g} and {bound:.4g}, {lost} of {total} of them: they are {name}, clamped",
        "a clip that the run states" if meant else
        "a clamp behind the normalisation: what it cuts off teaches less than it should, and good and very good "
        "answers count alike",
    )  # fmt: skip


def _chosen(batch: StepBatch, heard_B: Array, kept_B: Array) -> float | None:
    """The one advantage over 0, where all others are 0 and, in each group, are of smaller rewards."""
    reward_B, group_B = given(batch.reward_B)[kept_B], given(batch.group_B)[kept_B]
    chosen_B = heard_B > 0
    if not chosen_B.any() or (heard_B[~chosen_B] != 0).any() or np.ptp(heard_B[chosen_B]) > 1e-6:
        return None
    for group in np.unique(group_B):
        inside, left = chosen_B & (group_B == group), ~chosen_B & (group_B == group)
        if inside.any() and left.any() and not reward_B[inside].min() > reward_B[left].max():
            return None
    return float(heard_B[chosen_B][0])


_OF_ONE = (
    "one response of the group stands for all of them, or the mean counts one too many or too few: an index, a padded "
    "row or a reduction over the wrong axis"
)


def _from_lines(batch: StepBatch, unlike: Unlike) -> Iterator[Guess]:
    """The group's baseline and scale, solved for and named."""
    kept_B = unlike.kept_B
    reward_B, group_B = given(batch.reward_B)[kept_B], given(batch.group_B)[kept_B]
    lines = solved(unlike.heard_B, reward_B, group_B, unlike.stored)
    if lines is None:
        return
    baseline, scale = baseline_of(lines), scale_of(lines)
    name, k, epsilon = scale if scale is not None else ("", 1.0, 0.0)
    if baseline != MEAN and scale is None and not lines.has_middle:
        return  # of two rewards any two numbers are a line
    of_one = scale is not None and not name
    over = "" if of_one else f", over {name}" if scale is not None else ", over a scale that rewards do not give"
    if k != 1 and scale is not None and baseline != MEAN:
        over += f", times {1 / k:.4g}"
    if bool((lines.scale_G < 0).all()) and baseline == MEAN:
        yield Guess(
            "error", "turned", f"advantages have the wrong sign: they fall with the reward within every group{over}",
            "the sign is turned twice, or not at all",
        )  # fmt: skip
    elif baseline == MEAN and scale is None:
        if not lines.has_middle or batch.columns.reward_functions_FB is not None:
            return
        yield Guess(
            "warning", "scale", "advantages are r - group mean, over a scale that rewards and groups do not give",
            "they are divided by the std of other samples or of shaped rewards, or scaled per group",
        )  # fmt: skip
    elif baseline == MEAN and epsilon:
        if epsilon < LARGE_EPSILON:
            return
        yield Guess(
            "warning", "epsilon", f"advantages are (r - group mean) / ({name} + {epsilon:.3g}): the epsilon is no "
            "longer small beside the std",
            "an epsilon of another size than is meant (1e-6 to 1e-4), or a constant that is added to the std: groups "
            "of small spread hardly count",
        )  # fmt: skip
    elif baseline == MEAN and (of_one or name.startswith("the group's std")):
        whose = _std_of_one_group(lines.scale_G, reward_B, group_B, unlike.stored) if of_one else None
        if whose is not None:
            yield Guess(
                "error" if batch.laid.algorithm.estimator in OF_GROUPS else "warning", f"{OF_ONE}{whose}",
                f"all groups are divided by the std of one: advantages are (r - group mean) / the std of {whose} group",
                "the std is taken once, of one group (an index that does not move, a broadcast), and not of each: "
                "advantages have the size of another prompt's spread",
            )  # fmt: skip
        elif abs(k - 1) > 1e-2:
            what = f"r - group mean{over}"
            yield Guess(
                "warning", f"times {1 / k:.2g}",
                f"advantages are {1 / k:.4g} times what they should be: {1 / k:.4g} x ({what})",
                "a factor too many: they are scaled once more after they were normalised, or summed over ranks",
            )  # fmt: skip
    elif baseline == MEAN:
        # Other measures of a spread are recipes of their own: wrong for sure where the std is stated.
        sure = batch.laid.algorithm.estimator in OF_GROUPS and not name.startswith(("the mean distance", "the range"))
        yield Guess(
            "error" if sure else "warning", name, f"advantages are divided by {name}",
            "another figure stands for the group's std: groups of small and of large spread do not count alike",
        )  # fmt: skip
    elif baseline == "0":
        severity = severity_of_raw(batch.laid.algorithm)
        if severity == "info" and (batch.laid.algorithm.estimator or not over):
            return
        # No known algorithm divides by a group's std and subtracts nothing.
        yield Guess(
            "warning" if severity == "info" else severity, "no baseline",
            f"nothing is subtracted from the rewards: advantages are r{over}, there is no baseline",
            "the group's mean is not taken away: every answer is pushed up, whatever the others are",
        )  # fmt: skip
    elif baseline is not None and "batch" in baseline:
        # One mean and one std for all samples is another estimator, or samples that are not in the dump.
        whole = float(np.ptp(lines.scale_G)) <= lines.close * abs(float(lines.scale_G[0]))
        if whole and batch.laid.algorithm.estimator not in OF_GROUPS | {""}:
            return
        yield Guess(
            "warning" if whole and not batch.laid.algorithm.estimator else "error", baseline,
            f"advantages are not centred by the group: the baseline is {baseline}{over}",
            "the mean is taken over the wrong axis: a response is measured against answers to other prompts, and easy "
            "prompts are pushed up, hard ones down",
        )  # fmt: skip
    elif baseline is not None:
        # Some measure against the median on purpose.
        meant = "median" in baseline or batch.laid.algorithm.estimator not in OF_GROUPS
        yield Guess(
            "warning" if meant else "error", baseline, f"the baseline is {baseline}, not the group's mean: "
            f"advantages are r - that{over}",
            _OF_ONE,
        )  # fmt: skip
    elif lines.has_middle and np.unique(np.bincount(group_B)).size == 1:
        if np.ptp(lines.baseline_G) <= lines.close * float(lines.range_G.min()):
            return  # one baseline for all: moving, or of samples that are not in the dump
        if batch.laid.algorithm.estimator == "remax":
            yield Guess(
                "info", "baseline", "advantages are r - a baseline of the group's own that is not recorded, as ReMax's "
                f"is{over}", "the reward of a greedy response is the baseline, as is stated; nothing is wrong",
            )  # fmt: skip
            return
        if (whose := _mean_of_others(lines.baseline_G, lines.range_G, reward_B, group_B, lines.close)) is not None:
            yield Guess(
                "error", "another group's mean", "advantages are centred by another group's mean: the baseline of "
                f"each group is the mean reward of {whose}{over}",
                "baselines and samples are joined by their place, and one of the two is moved (rolled, an index that "
                "is off by one, groups in another order): an answer is measured against answers to another prompt",
            )  # fmt: skip
            return
        yield Guess(
            "warning", "baseline", f"advantages are not centred by their group: they are r - a baseline that is no "
            f"mean of its rewards{over}",
            "the baseline is made of other rewards (another group's, an earlier step's, shaped ones), or over another "
            "axis",
        )  # fmt: skip


def _from_values(batch: StepBatch, unlike: Unlike) -> Iterator[Guess]:
    """What is made of right advantages afterwards: absolute values, signs, ranks, a clamp, a constant, lengths."""
    heard_B, kept_B, close = unlike.heard_B, unlike.kept_B, unlike.close
    reward_B, group_B = given(batch.reward_B), given(batch.group_B)
    known = [(name, values_B) for name, values_B in _known(batch, kept_B) if np.ptp(values_B) > 0]
    # Of one size all advantages are anything: at least one group has three different rewards.
    several = any(np.unique(np.round(reward_B[inside], 9)).size > 2 for inside in groups_of(group_B))
    if float(np.ptp(heard_B)) <= 1e-6 * float(np.abs(heard_B).max()):
        yield Guess(
            "warning", "one number", f"all advantages are one number ({heard_B[0]:.4g}), although rewards differ",
            "a constant stands for them: no answer is told from another",
        )  # fmt: skip
        return
    if several and known:
        centred_B = advantages.group_centred(reward_B, group_B)[kept_B]
        # What rounding leaves of equal rewards has a sign, too.
        nothing_B = np.abs(centred_B) <= 1e-6 * max(float(np.abs(reward_B).max()), 1e-12)
        if agree(heard_B[~nothing_B], np.sign(centred_B)[~nothing_B], close[~nothing_B]):
            yield Guess(
                "error", "sign alone", "only the sign of the advantages is left: they are -1, 0 and 1",
                "a sign (or a comparison) is taken: how much better an answer is no longer counts",
            )  # fmt: skip
    for name, values_B in known:
        turned = int((values_B < -close).sum())
        # Of a handful of values, or of one size, another formula may have the same.
        told = np.unique(np.round(np.abs(values_B), 4)).size > 3 and turned > 3
        if told and agree(heard_B, np.abs(values_B), close):
            yield Guess(
                "error", "absolute", f"no advantage is negative: they are {name}, without their sign",
                "an absolute value (or a root of a square) is taken: what is worse than the others is pushed up, too",
            )  # fmt: skip
            break
    if (sided := _sided(known, heard_B, close)) is not None:
        yield sided
        return
    low, high = float(heard_B.min()), float(heard_B.max())
    relu = next((name for name, values_B in known if low == 0 < high and (values_B < -close).any()
                 and (heard_B > 0).sum() >= RELU and agree(heard_B, np.maximum(values_B, 0), close)), None)  # fmt: skip
    if relu is not None:
        yield Guess(
            "warning", "relu", f"negative advantages are cut off at 0: none is negative, they are {relu}, "
            "clamped below 0",
            "a clamp (relu, max with 0) behind the normalisation: bad answers are never pushed down, and the mean is "
            "no longer 0",
        )  # fmt: skip
    for name, values_B in known if relu is None else ():
        cut_B = np.clip(values_B, low, high)
        lost = float((np.abs(cut_B - values_B) > close).mean())
        inside = np.unique(np.round(heard_B[(heard_B > low) & (heard_B < high)], 9)).size
        # A handful of values lies within any two bounds.
        if lost > CUT_OFF and inside >= 3 and agree(heard_B, cut_B, close):
            where = "below 0: none is negative" if low == 0 else f"at {low:.4g} and {high:.4g}"
            yield Guess(
                "warning", "cut off", f"advantages are cut off {where}, {lost:.0%} of them: they are {name}, clamped",
                "a clamp: what it cuts off teaches less or nothing, and the mean is no longer 0",
            )  # fmt: skip
            break
    # Of a few different values a factor and a constant fit any other formula.
    for name, values_B in known if np.unique(np.round(heard_B, 5)).size >= MOVED_VALUES else ():
        moved = float((heard_B - values_B).mean())
        spread = values_B - values_B.mean()
        gain = float(spread @ (heard_B - heard_B.mean())) / max(float(spread @ spread), 1e-30)
        off = float(heard_B.mean()) - gain * float(values_B.mean())
        if not gain > 0:
            continue
        if abs(moved) > 1e-2 and abs(off) > 1e-2 and agree(heard_B, gain * values_B + off, close):
            if _is_centred_over_tokens(batch, heard_B, kept_B):
                yield Guess(
                    "warning", "moved",
                    f"advantages are whitened once more over the tokens of the batch: {gain:.4g} x ({name}) + "
                    f"{off:.4g}, and no setting says so",
                    "a second normalisation after the group's own: right where it is meant (adv_norm, "
                    "whiten_advantages, normalize_advantages), and then it is to be stated; else long answers move the "
                    "baseline of all groups",
                )  # fmt: skip
                break
            yield Guess(
                "warning", "moved",
                f"advantages are normalised once more over the batch and moved: {gain:.4g} x ({name}) + {off:.4g}"
                if abs(gain - 1) > 1e-3
                else f"a constant is added to the advantages: they are {name}, {off:+.4g}",
                "their mean is not 0: every token is pushed one way, whatever its reward",
            )  # fmt: skip
            break
    for name, values_B in known:
        size = float(values_B @ values_B)
        times = float(values_B @ heard_B) / size
        is_told = batch.columns.reward_functions_FB is None and times > 0 and abs(times - 1) > 1e-2
        if is_told and agree(heard_B / times, values_B, close):
            copies = _copies_that_make(times, np.bincount(given(batch.group_B)), name)
            if copies:
                yield Guess(
                    "warning", f"copies {copies}",
                    f"advantages are those of groups in which each response stands {copies} times: {times:.4g} x "
                    f"{name}",
                    "the batch held copies when they were made (it was put together with itself, or a gather doubled "
                    "what every rank had): a std over n - 1 is another for them, and others that were drawn may be "
                    "missing",
                )  # fmt: skip
                break
            yield Guess(
                "warning", f"times {times:.2g}",
                f"advantages are {times:.4g} times what they should be: {times:.4g} x {name}",
                "a factor too many: they are scaled once more after they were normalised, or summed over ranks",
            )  # fmt: skip
            break
    if batch.trained_N is None:
        return
    tokens_B = np.maximum(batch.flat.count(batch.trained_N), 1)[kept_B]
    if np.unique(tokens_B).size < 2:
        return
    if matching(heard_B, ((name, values_B / tokens_B) for name, values_B in known), close) is not None:
        yield Guess(
            "warning" if divides_by_length(batch.laid.algorithm) else "info", "over length",
            f"advantages are divided by the length of their response: they are {known[0][0]}, over its tokens",
            "the mean over a response's tokens is taken in the advantage already: right before a loss that sums them; "
            "one that averages over tokens divides by the length twice, and long responses count for less",
        )  # fmt: skip
    elif matching(heard_B / tokens_B, iter(known), close / tokens_B) is not None:
        yield Guess(
            "warning", "times length",
            "advantages are multiplied by the length of their response: a sum over its tokens stands in them",
            "they are added up over a response's tokens instead of standing once: long responses count for more",
        )  # fmt: skip


def _is_centred_over_tokens(batch: StepBatch, heard_B: Array, kept_B: Array) -> bool:
    """Whether the mean over the tokens that count is 0 and their std 1."""
    if batch.trained_N is None:
        return False
    tokens_B = batch.flat.count(batch.trained_N).astype(np.float64)[kept_B]
    total = float(tokens_B.sum())
    mean = float(heard_B @ tokens_B) / max(total, 1.0)
    std = float(np.sqrt(((heard_B - mean) ** 2) @ tokens_B / max(total, 1.0)))
    return total > 1 and abs(mean) < 1e-3 and abs(std - 1) < 1e-2


def _copies_that_make(times: float, sizes_G: Array, name: str) -> int:
    """How often each response stands in its group, where a std over n - 1 of such a group makes that factor; else 0."""
    sizes = np.unique(sizes_G[sizes_G > 0])
    if sizes.size != 1 or sizes[0] < 2 or "over n - 1" not in name:
        return 0
    size = float(sizes[0])
    made = {copies: math.sqrt((copies * size - 1) / (copies * (size - 1))) for copies in (2, 3, 4, 8)}
    return next((copies for copies, factor in made.items() if abs(times - factor) <= COPIED * factor), 0)


#: How near a factor is to what copies make of a std.
COPIED = 1e-3
#: How near one scale for all groups has to be to one group's std, which only an epsilon parts from it.
ONE_STD, ROUNDED_STD = 3e-4, 5e-3
#: How the key of that guess begins.
OF_ONE = "std of "


def _std_of_one_group(scale_G: Array, reward_B: Array, group_B: Array, stored: float) -> str | None:
    """Which group of the batch the one scale of all groups is the std of; None where their stds are alike, or it is
    none's, or several groups'.
    """
    close = ONE_STD if stored <= 1e-3 else ROUNDED_STD
    if float(np.ptp(scale_G)) > close * abs(float(scale_G[0])):
        return None
    inside = groups_of(group_B)
    scale = float(np.median(scale_G))
    for less in (1, 0):
        std_G = np.array([float(reward_B[one].std(ddof=less)) if len(one) > less else 0.0 for one in inside])
        at = np.flatnonzero(np.abs(std_G - scale) <= close * abs(scale))
        if len(at) == 1 and (np.abs(std_G - scale) > 4 * close * abs(scale)).sum() >= 2:
            place = int(at[0])
            if place in (0, len(inside) - 1):
                return "the batch's first" if not place else "the batch's last"
            return f"the batch's {place + 1}th"
    return None


#: Groups away that a baseline is looked for.
_GROUPS_AWAY = {1: "the group before", -1: "the group after", 2: "the second group before",
                -2: "the second group after"}  # fmt: skip


def _mean_of_others(baseline_G: Array, range_G: Array, reward_B: Array, group_B: Array, close: float) -> str | None:
    """Whose mean reward each group's baseline is, up to one constant for all (a mean that a whitening takes away); None
    where it is no other group's.
    """
    inside = groups_of(group_B)
    mean_G = np.array([float(reward_B[one].mean()) for one in inside])
    # Lines are of groups whose rewards differ; the means are of all.
    spread_G = np.array([np.ptp(reward_B[one]) > 1e-5 * max(float(np.abs(reward_B).max()), 1e-12) for one in inside])
    if spread_G.sum() != len(baseline_G) or len(baseline_G) < OF_A_SIDE + 1:
        return None
    for away, words in _GROUPS_AWAY.items():
        apart_G = baseline_G - np.roll(mean_G, away)[spread_G]
        if (np.abs(apart_G - np.median(apart_G)) <= close * range_G).all():
            return words
    return None


#: Different advantages of one sign before a factor of theirs is no chance.
OF_A_SIDE = 3


def _sided(known: list[tuple[str, Array]], heard_B: Array, close: Array) -> Guess | None:
    """A known variant on one side of 0, and one factor of it on the other."""
    for name, values_B in known:
        for word, side_B in (("negative", values_B < -close), ("positive", values_B > close)):
            if np.unique(np.round(values_B[side_B], 5)).size < OF_A_SIDE or not (~side_B & (values_B != 0)).any():
                continue
            size = float(values_B[side_B] @ values_B[side_B])
            factor = float(values_B[side_B] @ heard_B[side_B]) / size
            if not 0.01 < factor < 100 or abs(factor - 1) < 1e-2:
                continue
            if agree(heard_B, np.where(side_B, factor * values_B, values_B), close * max(1.0, factor)):
                return Guess(
                    "warning", f"sided: {word}",
                    f"{word} advantages are {factor:.4g} times what they should be, the others are right: {name}",
                    "a weight on one sign alone: what is better and what is worse than the group no longer add up to "
                    "0, and every token is pushed one way; right only where it is meant",
                )  # fmt: skip
    return None


def _from_groupings(batch: StepBatch, unlike: Unlike, *, mixed: bool = False) -> Iterator[Guess]:
    """Other groups that make the advantages; `mixed`: only those that hold several prompts. A prompt that is drawn
    twice is two groups, which equal prompts alone do not tell apart.
    """
    reward_B, prompt_B = given(batch.reward_B), batch.prompt_B
    for how, other_B in groupings_of(batch):
        if mixed and (prompt_B is None or _holds(prompt_B, other_B)):
            continue
        found = matching(unlike.heard_B, zeroed(known_variants(batch, reward_B, other_B), unlike.kept_B), unlike.close)
        if found is not None:
            yield Guess(
                "error", f"groups: {how}", f"advantages are computed in the wrong groups: {found}, with {how}",
                "samples are grouped by their place in a batch that was reordered, not by their prompt",
            )  # fmt: skip


def _holds(whole_B: Array, part_B: Array) -> bool:
    """Whether every part lies in one whole."""
    pairs = np.unique(np.stack([part_B, whole_B]), axis=1)
    return bool(pairs.shape[1] == np.unique(part_B).size)


def _from_strides(batch: StepBatch, unlike: Unlike) -> Iterator[Guess]:
    """Blocks of one size over rows whose groups have lost some: each block behind the first gap holds two prompts."""
    reward_B, group_B = given(batch.reward_B), given(batch.group_B)
    sizes = np.bincount(group_B)
    stated = batch.laid.algorithm.number(*GROUP_SIZE)
    whole = max(int(sizes.max()), int(stated) if stated is not None and stated >= 2 else 0)
    if sizes.min() == whole or np.unique(np.round(unlike.heard_B, 6)).size < MOVED_VALUES:
        return
    for order in batch.laid.orders:
        place_B, ordered_B = np.argsort(order), group_B[order]
        for size in sorted({int(sizes.max()), whole}):
            block_B = place_B // size
            blocks = [ordered_B[at : at + size] for at in range(0, len(ordered_B), size)]
            mixed = [at for at, block in enumerate(blocks) if np.unique(block).size > 1]
            if len(mixed) < MIXED:
                continue
            # What is left at the end is a block as well, or has an advantage of its own.
            whole_B = (block_B < len(ordered_B) // size)[unlike.kept_B]
            every = ((name, values_B[whole_B]) for name, values_B in zeroed(
                in_groups(reward_B, block_B), unlike.kept_B))  # fmt: skip
            name = matching(unlike.heard_B[whole_B], every, unlike.close[whole_B])
            if name is None:
                continue
            first = size * mixed[0]
            yield Guess(
                "error", f"blocks of {size}",
                f"advantages are made in blocks of {size} rows, which are not the groups: {int((sizes < size).sum())} "
                f"of {sizes.size} groups have fewer, and from row {first} on {share(len(mixed), len(blocks))} blocks "
                f"hold several prompts; they are {name} of each block",
                "groups are cut by their stated size although some lost rows (failed, filtered, timed out): from the "
                "first gap on answers are measured against answers to other prompts. Group by the id, or fill the "
                "gaps",
            )  # fmt: skip
            return


#: Blocks of several prompts before a stride over incomplete groups is no chance.
MIXED = 2


def _from_order(batch: StepBatch, unlike: Unlike) -> Iterator[Guess]:
    """Right advantages in another order, or of rewards in another order."""
    heard_B, kept_B, close = unlike.heard_B, unlike.kept_B, unlike.close
    reward_B, group_B = given(batch.reward_B), given(batch.group_B)
    if np.unique(np.round(heard_B, 6)).size < 4:
        return
    is_sorted = False
    for name, values_B in _known(batch, kept_B):
        if len(heard_B) > 2 and agree(np.sort(heard_B), np.sort(values_B), np.full(len(heard_B), close.min())):
            yield Guess(
                "error", "other samples",
                f"advantages belong to other samples: as {name} they are right, in another order",
                "the batch was reordered after the advantages were computed",
            )  # fmt: skip
            is_sorted = True
            break
    if not kept_B.all():
        return
    for how, order_B in orders(len(reward_B), int(group_B.max()) + 1):
        found = matching(heard_B, known_variants(batch, reward_B[order_B], group_B), close)
        if found is not None:
            yield Guess(
                "error", f"rewards: {how}",
                f"advantages are made of other samples' rewards: they are {found}, of the rewards {how}",
                "rewards come back in another order than the samples, as where parts of several ranks or workers "
                "are put together one by one instead of one after the other",
            )  # fmt: skip
            return
    if not is_sorted and (moved := _moved_rows(batch, unlike)) is not None:
        yield moved


#: Samples that tell one order of the rows from another; of them, the share that has the advantage of the row it was
#: moved from, and the most that may have its own.
TELLING, MOVED, STAYED = 8, 0.8, 0.1


def _moved_rows(batch: StepBatch, unlike: Unlike) -> Guess | None:
    """Rows of advantages that were rolled, where some no longer are what they were: a row that is masked by another's
    length is cut, and its mean is smaller.
    """
    heard_B, close = unlike.heard_B, unlike.close
    reward_B, group_B = given(batch.reward_B), given(batch.group_B)
    for name, values_B in _known(batch, unlike.kept_B):
        own_B = np.abs(heard_B - values_B) <= close
        if own_B.mean() > MOVED:
            continue
        for how, order_B in orders(len(reward_B), int(group_B.max()) + 1):
            there_B = values_B[order_B]
            telling_B = np.abs(there_B - values_B) > 10 * close
            if telling_B.sum() < TELLING or own_B[telling_B].mean() > STAYED:
                continue
            moved_B = np.abs(heard_B - there_B) <= close
            if moved_B[telling_B].mean() >= MOVED and moved_B.mean() >= MOVED:
                return Guess(
                    "error", "other samples",
                    f"advantages belong to other samples: as {name} they are right, with the rows {how}",
                    "the batch was reordered (rolled, shuffled, gathered from ranks) after the advantages were "
                    "computed",
                )  # fmt: skip
    return None


def _from_parts(batch: StepBatch, unlike: Unlike) -> Iterator[Guess]:
    """A variant that has the advantages of a third of the groups and more, where in all of the others, though rewards
    differ, they are 0, or of the other sign; or of two and more, where all others have their raw rewards.
    """
    heard_B, kept_B, close = unlike.heard_B, unlike.kept_B, unlike.close
    reward_B, group_B = given(batch.reward_B)[kept_B], given(batch.group_B)[kept_B]
    spread_G = np.array([float(np.ptp(reward_B[inside])) for inside in groups_of(group_B)])
    several_G = spread_G > 1e-6 * max(float(np.abs(reward_B).max()), 1e-12)
    if several_G.sum() < 2:
        return
    if (guess := _of_one_part(batch, unlike)) is not None:
        yield guess
        return
    if several_G.sum() < 3:
        return
    names = np.unique(group_B)[several_G]
    for name, values_B in _known(batch, kept_B):

        def are(expected_B: Array) -> Array:
            off_B = np.abs(heard_B - expected_B) > close * np.maximum(1, np.abs(values_B))  # noqa: B023
            return np.array([not off_B[group_B == group].any() for group in names])

        right_G = are(values_B)
        if 2 <= right_G.sum() < len(names) - 1 and are(reward_B)[~right_G].all():
            yield Guess(
                "error", "part",
                f"advantages are the raw rewards in {share(int((~right_G).sum()), len(names))} groups; in the others "
                f"they are {name}",
                "the loop over groups goes in steps of a group's size over their numbers (range(0, batch, size)), or "
                "ends early: the slices of most groups are never written",
            )  # fmt: skip
            return
        if not len(names) <= 3 * right_G.sum() < 3 * len(names):
            continue
        for what, other_B, cause in (
            ("0", np.zeros_like(values_B), "part of the batch is cleared: rows that are masked, filled in late, or "
            "left out by a loop that ends too early"),
            ("of the other sign", -values_B, "the sign is turned for a part of the batch"),
        ):  # fmt: skip
            if are(other_B)[~right_G].all():
                yield Guess(
                    "error", "part",
                    f"advantages are {what} in {share(int((~right_G).sum()), len(names))} groups whose rewards differ; "
                    f"in the others they are {name}",
                    cause,
                )  # fmt: skip
                return


#: Samples of a part, and of the others, that tell what each has.
TELL = 3


def _of_one_part(batch: StepBatch, unlike: Unlike) -> Guess | None:
    """A known variant in all rows but those of one rank (or of one micro-batch), where none of a spread has it: what
    stands there is 0, has the other sign, or is one factor of it.
    """
    heard_B, kept_B, close = unlike.heard_B, unlike.kept_B, unlike.close
    parts = list(held_together(batch))
    for name, values_B in _known(batch, kept_B) if parts else ():
        off_B = np.abs(heard_B - values_B) > close * np.maximum(1, np.abs(values_B))
        tells_B = np.abs(values_B) > 10 * close
        for whose, part_B in parts:
            own_B = part_B[kept_B]
            bad = np.unique(own_B[off_B])
            if len(bad) != 1:
                continue
            inside_B = tells_B & (own_B == bad[0])
            if inside_B.sum() < TELL or (tells_B & ~inside_B).sum() < TELL or not off_B[inside_B].all():
                continue
            v, a = values_B[inside_B], heard_B[inside_B]
            factor = float(v @ a) / float(v @ v)
            if np.abs(a - factor * v).max() > float(close.max()) * max(1.0, float(np.abs(v).max()), abs(factor)):
                continue
            part = f"rank {_rank_at(batch, part_B, int(bad[0]))}" if "rank" in whose else f"micro-batch {bad[0]}"
            what = (
                "0" if abs(factor) < 1e-6 else "of the other sign" if abs(factor + 1) < 1e-3
                else f"{factor:.4g} times what they should be"
            )  # fmt: skip
            return Guess(
                "error", f"part: {part}",
                f"advantages of {part} are {what}, in all {int((own_B == bad[0]).sum())} of its rows although their "
                f"rewards differ; in all other rows they are {name}",
                f"{part} makes or receives its part of the advantages otherwise: a buffer that is not filled there, a "
                "scatter that sends it nothing, its own factor or sign",
            )  # fmt: skip
    return None


def _rank_at(batch: StepBatch, part_B: Array, part: int) -> str:
    """The number of the rank whose rows are this part."""
    sample = int(np.flatnonzero(part_B == part)[0])
    return next((str(rank) for (rank, _), rows in batch.laid.rows_by_micro().items() if sample in rows), str(part))


def _known(batch: StepBatch, kept_B: Array) -> Iterator[tuple[str, Array]]:
    """The known variants that have a number for each of the kept samples."""
    every = zeroed(known_variants(batch, given(batch.reward_B), given(batch.group_B)), kept_B)
    return ((name, values_B) for name, values_B in every if np.isfinite(values_B).all())


#: Advantages that are left of a clamp at 0.
RELU = 3
#: Different advantages before a factor and a constant are no fit by chance.
MOVED_VALUES = 5
#: Of a batch's advantages, the share that a bound may cut off before it is what training is about.
CUT_OFF = 0.25


def _kl_in_rewards(batch: StepBatch, heard_B: Array, kept_B: Array) -> float | None:
    """The weight with which the KL of a response is in its reward, where that explains every advantage.

    In a group (or the batch), any estimator of a mean baseline makes r - weight x KL = k A + b: with b and k of each
    group taken out, the weight is all that is left to solve for.
    """
    ref = batch.columns.of("ref_logprobs")
    ours = next((found for name in ("old_logprobs", "policy_logprobs", "rollout_logprobs")
                 if (found := batch.columns.of(name)) is not None), None)  # fmt: skip
    if ref is None or ours is None or batch.trained_N is None:
        return None
    both_N = batch.pair(ours, ref)
    ours_N, ref_N = (np.where(both_N, each.values_N, 0.0) for each in (ours, ref))
    every = [batch.flat.sum(estimator(ours_N, ref_N))[kept_B] for estimator in kl.ESTIMATORS.values()]
    every = [far_B for far_B in every if np.isfinite(far_B).all() and np.abs(far_B).max() > 1e-6]
    group_B, reward_B = given(batch.group_B)[kept_B], given(batch.reward_B)[kept_B]
    for groups_B, far_B in product((group_B, np.zeros(len(group_B), dtype=np.int64)), every):
        if len(groups_B) - 2 * np.unique(groups_B).size < 4:
            continue
        left_B, along_B = (_apart_from(values_B, heard_B, groups_B) for values_B in (reward_B, far_B))
        size = float(along_B @ along_B)
        if not size > 1e-12:
            continue
        weight = float(along_B @ left_B) / size
        rest = np.abs(left_B - weight * along_B).max()
        if 1e-6 < weight < 10 and rest <= 1e-3 * max(float(np.abs(left_B).max()), 1e-9):
            return weight
    return None


def _apart_from(values_B: Array, other_B: Array, groups_B: Array) -> Array:
    """What is left of values when, in each group, their mean and their part along another are taken out."""
    centred_B, other_B = (advantages.group_centred(each_B, groups_B) for each_B in (values_B, other_B))
    along_G = np.bincount(groups_B, weights=centred_B * other_B)
    size_G = np.bincount(groups_B, weights=other_B**2)
    factor_G = np.where(size_G > 1e-12, along_G / np.maximum(size_G, 1e-12), 0.0)
    left_B: Array = centred_B - factor_G[groups_B] * other_B
    return left_B


#: Share of the rows that may have the other sign, while the others are a known variant.
FEW_TURNED = 0.25


def _turned_rows(batch: StepBatch, unlike: Unlike) -> Guess | None:
    """A few rows alone with the sign turned: all others are a known variant, and so are these but for their sign."""
    heard_B = unlike.heard_B
    for name, values_B in _known(batch, unlike.kept_B):
        off_B = np.abs(heard_B - values_B) > unlike.close
        if not 0 < off_B.sum() <= FEW_TURNED * off_B.size:
            continue
        if agree(np.where(off_B, -heard_B, heard_B), values_B, unlike.close):
            at = np.flatnonzero(unlike.kept_B)[off_B]
            return Guess(
                "error", "turned rows",
                f"advantages of single rows have the wrong sign: {share(int(off_B.sum()), off_B.size)}, at "
                f"{'row' if len(at) == 1 else 'rows'} {listed(at)}; all others are {name}",
                "these rows are written again after the advantages were made (an index that is off, a mask, a sign for "
                "one rank or one kind of sample): what is rewarded there is unlearned",
            )  # fmt: skip
    return None


def _turned(batch: StepBatch, heard_B: Array, kept_B: Array, close: Array) -> Guess | None:
    """Advantages that are a known variant with the sign turned."""
    reward_B, group_B = given(batch.reward_B), given(batch.group_B)
    flipped = matching(-heard_B, zeroed(known_variants(batch, reward_B, group_B), kept_B), close)
    if flipped is None or not np.abs(heard_B).max() > 0:
        return None
    return Guess(
        "error", "turned", f"advantages have the wrong sign: they are -1 x {flipped}",
        "the sign is turned twice, or not at all",
    )  # fmt: skip
