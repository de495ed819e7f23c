"""Advantages, recomputed: which variant they are, which mistake makes them, and some that outweigh all others."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from replay_core.diagnose.advantage_mistakes import OF_ONE, Guess, Unlike, guesses_of, one_bound
from replay_core.diagnose.advantage_variants import (
    BATCH_MEAN,
    CLOSE,
    EACH_ONCE,
    MOVING,
    are_raw,
    clipped_variants,
    group_std_B,
    is_rounded,
    known_variants,
    matching,
    rewards_of,
    solved_variants,
    tolerance,
    zeroed,
)
from replay_core.diagnose.algorithm import OF_GROUPS, demands_whitening, severity_of_raw, why_raw
from replay_core.diagnose.batch import StepBatch, worked_out_once
from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Finding, Where, error, finding, info, listed, share, shown, warning
from replay_core.diagnose.flat import Array
from replay_core.diagnose.further_variants import GDPO, MAXRL, OF_ONE_EACH
from replay_core.diagnose.rule import Skip, given, rule, skip_if
from replay_core.diagnose.trajectories import earned_T, trajectory_B
from replay_core.objectives import advantages


def _another_estimator(batch: StepBatch, name: str, *, several: bool) -> tuple[str, str] | None:
    """Claim and cause where the estimator that agrees is not the one that is stated; None where it is, or none is."""
    stated, scaled = batch.laid.algorithm.estimator, batch.laid.algorithm.is_scaled
    if not several:
        return None
    reward_B, group_B = given(batch.reward_B), given(batch.group_B)
    std_B = group_std_B(reward_B, group_B)
    spread_B = std_B[std_B > 1e-5 * max(float(np.abs(reward_B).max()), 1e-12)]
    # Of groups with one std, what is divided by it and scaled again is what is not divided.
    of_one_std = not spread_B.size or float(np.ptp(spread_B)) <= 1e-2 * float(spread_B.max())
    if name == BATCH_MEAN and stated in OF_GROUPS:
        return (
            f"advantages are not centred by the group: they are {name}",
            f"{stated} measures a response against its own group: the mean is taken over the wrong axis",
        )
    # A loss that is called GRPO's says little of the baseline.
    if name.endswith(MOVING) and stated in OF_GROUPS and batch.laid.algorithm.names_an_estimator:
        return (
            f"advantages are not centred by the group: they are {name}",
            f"{stated} measures a response against its own group; here every group has the same baseline, which is no "
            "mean of this batch: a running mean over steps (or a constant) stands in the group mean's place",
        )
    # A run that says how its rewards are scaled says whose baseline it is, too (TRL has no other).
    of_groups = batch.laid.algorithm.names_an_estimator or batch.laid.algorithm.value("scale_rewards") is not None
    if name.endswith("(OPO)") and stated in ("grpo", "dr_grpo", "rloo") and of_groups:
        return (
            f"the baseline is weighted by length, and the run states {stated}: advantages are {name}",
            "the group's mean is taken over its tokens, not over its answers (OPO's baseline): longer answers count "
            "more in it, and advantages of a group do not add up to 0",
        )
    if name.startswith("(r - batch mean)") and stated in OF_GROUPS:
        return (
            f"advantages are normalised over the whole batch, not within the group: {name}",
            f"{stated} measures a response against its own group; the group is lost on the way, or another estimator "
            "is configured",
        )
    # Of one std, or cut off, what is divided by it may be another formula that comes to the same.
    of_std = "/ (group std" in name and "clipped" not in name and not of_one_std
    if stated in ("grpo", "dr_grpo") and batch.laid.algorithm.leaves_out_std and of_std:
        return (
            "advantages are divided by the group's std, and the run states that they are not",
            "the setting that leaves the std out (Dr. GRPO) does not reach the advantages: groups of small spread "
            "count as much as those of large",
        )
    if stated == "rloo" and of_std:
        return (
            f"advantages are normalised by the group's std, and the run states RLOO: {name}",
            "another estimator is computed than is configured: RLOO subtracts the mean of the others and divides by "
            "nothing",
        )
    rloo = name.startswith("r - mean of the group's others (RLOO)")
    if stated == "grpo" and scaled is True and not of_one_std and rloo:
        return (
            "advantages are RLOO's, and the run states GRPO: the mean of the others is subtracted, nothing divided",
            "another estimator is computed than is configured",
        )
    bare = name.startswith(("r - group mean (Dr. GRPO)", "r - mean of the group's others (RLOO)"))
    if stated.startswith("reinforce++") and bare and demands_whitening(batch.laid.algorithm):
        return (
            f"advantages are not whitened over the batch, and the run states {stated.replace('_', ' with a ')}: they "
            f"are {name.split(' (')[0]}, and their std is {float(given(batch.advantage_B).std()):.3g}, not 1",
            "the global normalisation (mean and std over the tokens of the batch) does not reach the advantages",
        )
    if stated == "rloo" and name.startswith("r - group mean (Dr. GRPO)"):
        return (
            "the leave-one-out baseline includes the sample itself: advantages are (n - 1) / n of RLOO's",
            "the mean is taken over the whole group, own reward included, and not over the others",
        )
    if stated in ("grpo", "dr_grpo", "") and batch.laid.algorithm.std_of == "group" and "/ (batch std" in name:
        return (
            f"advantages are divided by the std of the whole batch, and the run states the group's: {name}",
            "the std is taken over the wrong axis: groups of small and of large spread no longer count alike",
        )
    if batch.laid.algorithm.std_of == "batch" and of_std:
        return (
            f"advantages are divided by the std of each group, and the run states the whole batch's: {name}",
            "the two are swapped where the setting is read, or another one is: groups of small spread count as much as "
            "those of large",
        )
    if name.endswith(MAXRL) and stated in OF_GROUPS and batch.laid.algorithm.names_an_estimator:
        return (
            f"advantages are divided by the group's mean reward, and the run states {stated}: {name}",
            "another estimator is computed than is configured",
        )
    if GDPO in name and OF_ONE_EACH in name and _weights_stated(batch):
        return (
            f"reward functions are summed with weights of 1 each, and the run states others: advantages are {name}",
            "the weights are applied to the sum that is logged, and not to the functions that are normalised one by "
            "one: each counts alike, whatever it is to weigh",
        )
    if stated == "grpo" and scaled is True and not of_one_std and name.startswith("r - group mean (Dr. GRPO)"):
        return (
            "advantages are not divided by the group's std, and the run states that they are",
            "the setting that divides by the std does not reach the advantages",
        )
    return None


def _weights_stated(batch: StepBatch) -> bool:
    """Whether the run states a weight for each of its reward functions, and not one for all."""
    said = batch.laid.algorithm.value("reward_weights")
    each = list(said.values()) if isinstance(said, dict) else said
    return isinstance(each, list) and len(each) == len(batch.columns.reward_functions) and len(set(each)) > 1


@rule("D04", "advantages are not what rewards and groups give", link="advantages", scope="batch",
      needs=("rewards", "group", "advantage"),
      explains=("D02", "D23", "D28", "D73"),
      source="DeepSeekMath eq. 4.1.2; verl core_algos, trl, slime; RLOO 2402.14740; REINFORCE++ "
      "2501.03262")  # fmt: skip
def advantages_recomputed(batch: StepBatch) -> Iterator[Finding]:
    """Recomputes (r - mean) / (std + e) for e in {1e-4, 1e-6, 1e-8, 0}, std over n and n - 1, in the group and in the
    batch, without the std (Dr. GRPO), leave-one-out (RLOO), OPO, GPG, pass@k, ReMax's recorded baseline, REINFORCE++
    whitened over tokens, with any other epsilon under .05 (solved for), each as it is or clipped; and one baseline and
    scale for all groups (running means) where no estimator of groups is stated: one must agree to 1e-4 (2e-2 in bf16).
    MaxRL where it is stated; each reward function normalised by itself and summed with the stated weights (GDPO); the
    group's own normalisation whitened once more over tokens, where that is stated or no estimator of groups is.

    Where one does, it is named (info). Where none does in any step, all steps together are held against what a mistake
    makes of them (the other D04).
    Where a known variant agrees, but groups whose rewards differ by less than 1e-4 of what the batch's do,
    have advantages over 0.1: a warning, noise is taught (not where most rewards of the batch differ); an error where
    the rewards are equal and the advantages of a group are not.
    Where ids of trajectories (or their last rows) are recorded, each of them may count once, whatever rows it has: a
    warning where the baseline of rows that share their trajectory's reward counts rows, and that moves it by a
    hundredth of the rewards' range and more in two groups (GiGPO's across steps is meant); and where the last rows
    alone have rewards, and 3 earlier turns and more of those that earned more than their group have negative ones.
    Skipped where advantages change from token to token (GAE), and where all groups are of one (D05). Where every
    sample stands equally often, a batch was trained on for several epochs: each counts once.
    """
    try:
        found = _recomputed(batch)
        if batch.once is not batch and found and found[0].severity == "info" and (plain := _plainer(batch, found)):
            yield from plain
            return
        if not found or found[0].severity == "info" or batch.once is batch:
            yield from found
            return
    except Unlike as unlike:
        if batch.once is batch:
            raise Skip(_OVER_ALL) from unlike
    try:
        yield from _recomputed(batch.once)
    except Unlike as unlike:
        raise Skip(_OVER_ALL) from unlike


_OVER_ALL = "no known variant agrees: what they are instead is judged over all steps"


#: What the name of a variant holds where a number of it was taken from the advantages themselves.
_FITTED = ("clipped", "solved for", "one baseline")


def _plainer(batch: StepBatch, found: list[Finding]) -> list[Finding]:
    """What makes the advantages of each sample once by a formula without a number of their own, where of all epochs
    together one does only with such a number: groups that stand there twice have another std.
    """
    if not any(word in found[0].claim for word in _FITTED):
        return []
    try:
        once = _recomputed(batch.once)
    except (Skip, Unlike):
        return []
    plain = bool(once) and once[0].severity == "info" and not any(word in once[0].claim for word in _FITTED)
    return once if plain else []


@worked_out_once
def _recomputed(batch: StepBatch) -> list[Finding]:
    return list(_by_variants(batch))


def _by_variants(batch: StepBatch) -> Iterator[Finding]:
    advantage_B, group_B, reward_B = batch.advantage_B, given(batch.group_B), given(batch.reward_B)
    if advantage_B is None:
        raise Skip("advantages change from token to token: a critic's (GAE)")
    kept_B = np.isfinite(advantage_B)
    if not kept_B.all() and batch.trained_N is not None:
        # Samples without a counted token have no advantage; their rewards still belong to their group.
        unheard_B = batch.flat.count(batch.trained_N) == 0
        skip_if((~kept_B & ~unheard_B).any(), "some advantages are not finite (D21)")
    skip_if(not kept_B.any() or not np.isfinite(reward_B).all(), "advantages or rewards are not finite (D21)")
    skip_if(np.bincount(group_B).max() < 2, "every group has one response (D05)")
    column = batch.columns.of("advantages")
    stored = CLOSE.get("float32" if column is None else "bfloat16" if is_rounded(advantage_B[kept_B]) else
                       column.dtype, 1e-4)  # fmt: skip
    close = tolerance(reward_B, group_B, stored)[kept_B]
    if (close >= 1).all():
        if (amplified := _amplified(batch, kept_B)) is not None:
            yield amplified
            return
        raise Skip("no group has a spread of rewards (D01, D03): what is left is rounding, which every variant gives")
    heard_B = advantage_B[kept_B]
    for what, candidate_B in rewards_of(batch):
        known = list(zeroed(known_variants(batch, candidate_B, group_B), kept_B))
        known += zeroed(solved_variants(batch, heard_B, kept_B, candidate_B), np.ones(len(heard_B), dtype=bool))
        name = matching(heard_B, iter(known), close) or matching(
            heard_B, clipped_variants(heard_B, known, batch.laid.algorithm.advantage_clip), close
        )
        if name is not None:
            if not np.abs(heard_B).max() > 0:
                return  # zeros agree with every variant
            told = _another_estimator(batch, name, several=np.bincount(group_B).min() > 1)
            if told is not None:
                claim, cause = told
                yield error(
                    claim, batch.laid.where("advantages"),
                    shown("the estimator that agrees", name, None, what),
                    shown("estimator that is stated", batch.laid.algorithm.estimator),
                    cause=cause,
                )  # fmt: skip
                return
            if (equal := _taught_of_equal(batch, kept_B, candidate_B, name)) is not None:
                yield equal
                return
            if (weighed := _weighed_by_turns(batch, kept_B, candidate_B, name)) is not None:
                yield weighed
                return
            if noisy := list(_noise_taught(batch, heard_B, candidate_B[kept_B], group_B[kept_B], name)):
                yield from noisy
                return
            yield info(
                f"advantages are {name}",
                batch.laid.where("advantages"),
                shown("computed from", what),
                shown("agree to", stored),
                cause="the variant that was recomputed and agrees; nothing is wrong",
                next_step="rldbg diagnose --explain D04",
            )
            return
    raise Unlike(heard_B, kept_B, close, stored)


#: Groups whose baseline another count of trajectories moves, and by how much of the rewards' range.
WEIGHED, MOVED = 2, 1e-2


def _weighed_by_turns(batch: StepBatch, kept_B: Array, reward_B: Array, name: str) -> Finding | None:
    """Rows of one trajectory that share its reward, and count one by one in their group's baseline."""
    each_B, group_B = trajectory_B(batch), given(batch.group_B)
    of_group = "group" in name and "batch mean" not in name and "(OPO)" not in name
    if each_B is None or name.endswith(EACH_ONCE) or not of_group or not kept_B.all():
        return None
    algorithm = batch.laid.algorithm
    # verl-agent's switch, which is on unless it is stated: GiGPO's baseline is meant to be one of steps.
    if algorithm.is_on("compute_mean_std_cross_steps") or "gigpo" in algorithm.word("adv_estimator"):
        return None
    of, reward_T = next(earned_T(reward_B, each_B))
    if of:
        # Each turn has its own reward: rows are what is measured, unless the last ones alone have any.
        return _paid_at_the_end(batch, each_B, reward_B, name)
    group_T = np.zeros(len(reward_T), dtype=np.int64)
    group_T[each_B] = group_B
    mean_G, once_G = (
        np.bincount(groups, weights=rewards) / np.maximum(np.bincount(groups), 1)
        for groups, rewards in ((group_B, reward_B), (group_T, reward_T))
    )
    moved_G = np.abs(mean_G - once_G)
    if (moved_G > MOVED * float(np.ptp(reward_B))).sum() < WEIGHED:
        return None
    worst = int(moved_G.argmax())
    turns = np.bincount(each_B)
    return warning(
        f"long trajectories weigh as they have turns in their group's baseline: it is a mean over rows "
        f"({len(each_B)}), not over trajectories ({len(reward_T)}), which share one reward each",
        batch.laid.where("advantages", sample=group_B == worst),
        shown("advantages are", name),
        shown("rows of a trajectory", f"{turns.min()} to {turns.max()}"),
        shown("baseline of this group over its rows", float(mean_G[worst]), f"{once_G[worst]:.4g} over trajectories"),
        shown("groups whose baseline it moves", share(int((moved_G > 0).sum()), len(moved_G)), "none"),
        cause="a row is made of every turn before advantages are, and the group's mean and std are taken over rows: a "
        "trajectory enters them once for each of its turns, and long ones (often those that fail) move the baseline "
        "to themselves",
        next_step="take mean and std over one row of each trajectory, and give all of its rows that advantage (verl-"
        "agent: compute_mean_std_cross_steps false); or state that steps are meant",
    )


#: Turns before the last, of trajectories that earned more than their group, before they tell.
EARLIER = 3


def _paid_at_the_end(batch: StepBatch, each_B: Array, reward_B: Array, name: str) -> Finding | None:
    """Rewards of the last turns alone, where the turns before them are measured as answers that earned nothing."""
    group_B, advantage_B = given(batch.group_B), given(batch.advantage_B)
    last_T = np.zeros(int(each_B.max()) + 1, dtype=np.int64)
    last_T[each_B] = np.arange(len(each_B))  # of equal places the last is kept
    earlier_B = np.ones(len(each_B), dtype=bool)
    earlier_B[last_T] = False
    if not earlier_B.any() or reward_B[earlier_B].any() or not (reward_B[last_T] > 0).any():
        return None
    groups = np.bincount(group_B[last_T])
    mean_T = (np.bincount(group_B[last_T], weights=reward_B[last_T]) / np.maximum(groups, 1))[group_B[last_T]]
    of_winners_B = earlier_B & (reward_B[last_T] > mean_T + 1e-6)[each_B]
    down_B = of_winners_B & (advantage_B < 0)
    if down_B.sum() < EARLIER or not advantage_B[last_T][reward_B[last_T] > mean_T + 1e-6].min() > 0:
        return None
    return warning(
        f"turns before the last one count as answers that earned nothing: {int(down_B.sum())} turns of trajectories "
        "that earned more than their group have a negative advantage, and their last turns a positive one",
        batch.laid.where("advantages", sample=down_B),
        shown("advantages are", f"{name}, over rows"),
        shown("turns before the last whose reward is not 0", share(0, int(earlier_B.sum()))),
        shown("rows, and trajectories", f"{len(each_B)}, {len(last_T)}"),
        cause="a row is made of every turn, the reward stands on the last, and the group's mean and std are taken over "
        "all rows: each earlier turn is a sample with reward 0. What leads to a right answer is pushed down, and the "
        "more turns there are the lower the baseline is",
        next_step="measure the last rows (or each trajectory's sum) alone within their group, and give all turns of a "
        "trajectory its advantage; or give each turn its return to go",
    )


def _amplified(batch: StepBatch, kept_B: Array) -> Finding | None:
    """Advantages that differ within groups whose rewards are equal but for rounding."""
    every = (batch.advantage_B, batch.reward_B, batch.group_B)
    advantage_B, reward_B, group_B = (given(each)[kept_B] for each in every)
    far, apart, taught, bad, sample = 0.0, 0.0, 0, 0, 0
    groups = np.unique(group_B)
    for group in groups:
        inside = group_B == group
        if float(np.ptp(advantage_B[inside])) <= TAUGHT:
            continue
        taught += 1
        left_B = reward_B[inside] - reward_B[inside].mean()
        # Only what rounding left can be amplified, and in its own order: other advantages have other rewards.
        if np.ptp(left_B) > 0 and np.corrcoef(left_B, advantage_B[inside])[0, 1] > ALIKE:
            bad += 1
            if float(np.ptp(advantage_B[inside])) > far:
                far, sample = float(np.ptp(advantage_B[inside])), int(np.flatnonzero(kept_B)[inside.argmax()])
            apart = max(apart, float(np.ptp(reward_B[inside])))
    if not bad or bad < MOST_OF * taught:
        return None
    return error(
        f"rounding in the rewards is amplified: rewards of a group are equal up to {apart:.2g}, and advantages of "
        f"{share(bad, len(groups))} groups come to {far:.3g} apart",
        batch.laid.where("advantages", sample=sample),
        shown("advantages of one group apart by", far, "0"),
        shown("rewards of such a group apart by, at most", apart),
        shown("largest |reward|", float(np.abs(reward_B).max())),
        cause="what rounding leaves of equal rewards is divided by its own std, with no epsilon or one far smaller "
        "than it: noise (a jitter, a sum in another order) is taught at full size",
    )


#: What is left of a group's spread of rewards beside the batch's, and how large advantages of it must not be.
NO_SPREAD, TAUGHT = 1e-4, 0.1
#: How well what is left and the advantages that it was made into go together (it is rounded once more where it is
#: stored), and in how many of the groups that have any.
ALIKE, MOST_OF = 0.9, 0.8


def _taught_of_equal(batch: StepBatch, kept_B: Array, reward_B: Array, name: str) -> Finding | None:
    """Groups whose recorded rewards are one number and whose advantages are not 0, where a known variant makes those
    of the groups that have a spread.
    """
    group_B, heard_B = given(batch.group_B), np.where(kept_B, given(batch.advantage_B), 0.0)
    groups = np.unique(group_B)
    # Of all samples, also those that are not trained on.
    equal = [group for group in groups if not np.ptp(reward_B[group_B == group]) > 0]
    sizes = [float(np.abs(heard_B[group_B == group]).max()) for group in equal]
    bad = [group for group, size in zip(equal, sizes, strict=True) if size > TAUGHT]
    if (
        batch.columns.are_sums_alone
        or not bad
        or len(equal) == len(groups)
        or batch.laid.algorithm.estimator not in OF_GROUPS | {""}
    ):
        return None
    if not name.startswith(("(r - group mean) / (group std", "(r - mean of the group's others) / (their std")):
        return None
    apart = max(float(np.ptp(heard_B[group_B == group])) for group in bad)
    return finding(
        "error" if apart > TAUGHT else "warning",
        f"groups of equal rewards have advantages, up to {max(sizes):.3g}, in {share(len(bad), len(equal))} such "
        f"groups: they should be 0; the others are {name}",
        batch.laid.where("advantages", sample=group_B == bad[0]),
        shown("largest |advantage| of a group of equal rewards", max(sizes), f"< {TAUGHT:g}"),
        shown("advantages of one such group apart by", apart, "0"),
        shown("groups of equal rewards", len(equal)), shown("all groups", len(groups)),
        cause="what rounding (or a jitter that is not recorded) leaves of equal rewards is divided by its own std, "
        "with no epsilon or one far smaller than it: noise is taught at full size",
    )  # fmt: skip


def _noise_taught(batch: StepBatch, heard_B: Array, reward_B: Array, group_B: Array, name: str) -> Iterator[Finding]:
    """Groups whose rewards differ by a ten-thousandth of what rewards of the batch differ by, and have advantages."""
    whole = float(np.ptp(reward_B))
    if not whole > 0 or np.unique(np.round(reward_B / whole, 3)).size > 0.5 * len(reward_B):
        return  # rewards that are all different are measured on a scale of their own
    groups = np.unique(group_B)
    spread_G = np.array([float(np.ptp(reward_B[group_B == group])) for group in groups])
    noisy_G = (spread_G > 0) & (spread_G < NO_SPREAD * whole)
    taught_G = np.array([float(np.abs(heard_B[group_B == group]).max()) > TAUGHT for group in groups])
    bad = groups[noisy_G & taught_G]
    if not len(bad):
        return
    yield warning(
        f"noise in the rewards is taught: {share(len(bad), len(groups))} groups have nearly equal rewards (apart by "
        f"{float(spread_G[noisy_G & taught_G].max()):.2g} at most), and advantages of full size",
        batch.laid.where("advantages", sample=given(batch.group_B) == bad[0]),
        shown("largest spread of rewards in such a group", float(spread_G[noisy_G & taught_G].max()),
        f"0, or > {NO_SPREAD:g} x {whole:.3g}"),
        shown("largest |advantage| in one", float(np.abs(heard_B[np.isin(group_B, bad)]).max()), f"< {TAUGHT:g}"),
        shown("advantages are", name),
        cause="a tiny difference between rewards (rounding, a jitter, a time in the score) is divided by a std that is "
        "as tiny: round the rewards, raise the epsilon, or leave groups without a spread out",
    )  # fmt: skip


#: Steps that a known variant makes, for one that it does not.
ODD = 4


@rule("D04", "advantages are made by a mistake", link="advantages", scope="case", explains=("D97", "L08"),
      source="DeepSeekMath eq. 4.1.2; RLOO 2402.14740; a moving baseline is 0 in its first step alone")  # fmt: skip
def made_by_mistake(case: Case) -> Finding | None:
    """Steps whose advantages no known variant makes of rewards and groups, against a closed family of mistakes; the one
    that makes those of most steps is said.

    In every group with a spread A = (r - b) / s is solved for b and s: b is held against 0, the batch's mean, the
    group's first, last, best, worst, second best and median reward, its sum over another count; s against the std, the
    variance, 1 / std, the range, a factor or an epsilon on top of each. Further: the sign, absolute values, signs
    alone, a clamp, a constant that is added, one for all, another grouping, another order of rows or of rewards, a
    division by the length, parts that are 0, of the other sign or the raw rewards, and single rows (a quarter at most)
    that are written over. An error where a mistake is sure, or contradicts the
    estimator that is stated; a warning where it may be meant or none is found; info where advantages are a rising
    function of a known variant, or of ranks (tanh, another clip), or the stated algorithm is none that is known. The
    raw rewards only where every step has them: an error where an estimator with a baseline is stated, else info.

    Where the dump names no groups equal prompts are one: there only the sign, absolute values, and lines are judged.
    Skipped where a KL in the rewards explains all of it, where groups are parts of larger ones, where rewards are sums
    of functions whose weights are not recorded.
    """
    ballot: dict[str, list[tuple[StepBatch, Guess, Unlike]]] = {}
    looked = right = 0
    raw: list[StepBatch] = []
    strange: list[tuple[StepBatch, Unlike]] = []
    whys: list[str] = []
    for batch in case.batches():
        if not all(batch.has(need) for need in ("rewards", "group", "advantage")):
            continue
        is_raw = are_raw(batch)
        looked += is_raw is not None
        if is_raw:
            raw.append(batch)
        unlike, of = _unlike(batch), batch
        if isinstance(unlike, Unlike) and batch.once is not batch:
            unlike, of = _unlike(batch.once), batch.once
        if not isinstance(unlike, Unlike):
            right += unlike
            continue
        strange.append((of, unlike))
        try:
            for guess in guesses_of(of, unlike):
                ballot.setdefault(guess.key, []).append((batch, guess, unlike))
        except Skip as skip:
            whys.append(str(skip))
    if raw and len(raw) == looked:
        algorithm = raw[0].laid.algorithm
        return finding(
            severity_of_raw(algorithm),
            "advantages are the raw rewards: nothing is subtracted",
            raw[0].laid.where("advantages", sample=0),
            shown("steps in which they are", len(raw), "0"),
            cause=why_raw(algorithm),
            steps=[batch.step for batch in raw],
        )
    if 2 * len(strange) > looked - right and (bound := one_bound(strange)) is not None:
        for of, unlike in strange:
            ballot.setdefault(bound.key, []).append((of, bound, unlike))
    if not ballot:
        raise Skip(whys[0] if whys else "a known variant makes the advantages, or rewards, groups and advantages are "
                   "not recorded together")  # fmt: skip
    found = max(ballot.values(), key=lambda each: (len(each), each[0][1].key == "bound"))
    # One scale for all groups is a line of free numbers as well: whose it is says more, where a step leaves it untold.
    named = [each for each in ballot.values() if each[0][1].key.startswith(OF_ONE) and 3 * len(each) >= 2 * len(found)]
    found = max(named, key=len) if named and (len(found) == 1 or max(map(len, named)) > 1) else found
    batch, guess, unlike = found[0]
    # A known variant in most steps is the code that runs: in the others a number of it is another (a bound, a mean).
    # One odd step of many is chance, whatever made the others.
    odd = ODD * len(found) <= right or (guess.severity != "error" and ODD * len(found) < looked)
    if odd or (guess.severity != "error" and right > len(found)):
        raise Skip(f"a known variant makes the advantages of {right} steps, and {len(found)} others are near it")
    reward_B, group_B = given(batch.reward_B), given(batch.group_B)
    column, kept_B = batch.columns.of("advantages"), unlike.kept_B
    source = column.source if column else None
    evidence = [shown("steps it makes", len(found), None, source), shown("agree to", unlike.stored)]
    if len(kept_B) == len(reward_B):
        expected_B = advantages.group_normalised(reward_B, group_B)[kept_B]
        worst = int(np.abs(unlike.heard_B - expected_B).argmax())
        evidence += [
            shown("sample", int(np.flatnonzero(kept_B)[worst])),
            shown("advantage there", float(unlike.heard_B[worst]), f"{float(expected_B[worst]):.6g}"),
        ]
    return finding(
        guess.severity,
        guess.claim,
        batch.laid.where("advantages", sample=int(np.flatnonzero(kept_B)[0]) if len(kept_B) == len(batch) else 0),
        *evidence,
        shown("groups", listed(np.bincount(group_B), 4)),
        cause=guess.cause,
        steps=[each.step for each, _, _ in found],
    )


def _unlike(batch: StepBatch) -> Unlike | bool:
    """What no known variant makes; else whether one makes it and nothing is wrong."""
    try:
        for one in _recomputed(batch):
            return one.severity == "info"
    except Unlike as unlike:
        return unlike
    except Skip:
        pass
    return False


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
