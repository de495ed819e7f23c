"""Every advantage that a framework computes from rewards and groups, and whether recorded ones are one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.flat import Array, groups_of
from replay_core.diagnose.further_variants import further
from replay_core.diagnose.rule import given
from replay_core.diagnose.trajectories import earned_T, trajectory_B
from replay_core.objectives import advantages

#: How close a recomputed advantage has to be, by the precision it was stored in.
CLOSE = {"float64": 1e-5, "float32": 1e-4, "bfloat16": 2e-2, "float16": 4e-3}
_EPSILONS = (1e-4, 1e-6, 1e-8, 0.0)


def are_raw(batch: StepBatch) -> bool | None:
    """Whether advantages are the rewards themselves; None where that cannot be told."""
    advantage_B, reward_B = batch.advantage_B, batch.reward_B
    if advantage_B is None or reward_B is None:
        return None
    both_B = np.isfinite(advantage_B) & np.isfinite(reward_B)
    if not both_B.any() or not np.abs(reward_B[both_B]).max() > 0:
        return None
    return bool(np.allclose(advantage_B[both_B], reward_B[both_B], rtol=1e-4, atol=1e-6))


def moving_baseline(batch: StepBatch) -> float | None:
    """What is subtracted from every reward of the batch, where that is one number and not 0."""
    advantage_B, reward_B = batch.advantage_B, batch.reward_B
    if advantage_B is None or reward_B is None:
        return None
    apart_B = (reward_B - advantage_B)[np.isfinite(reward_B) & np.isfinite(advantage_B)]
    size = max(float(np.abs(reward_B[np.isfinite(reward_B)]).max(initial=0.0)), 1e-6)
    same = len(apart_B) >= 4 and float(np.ptp(apart_B)) <= 1e-5 * size and float(np.abs(apart_B).max()) > 1e-5 * size
    return float(apart_B.mean()) if same else None


def variants(reward_B: Array, group_B: Array, tokens_B: Array | None = None) -> Iterator[tuple[str, Array]]:
    """Every advantage a framework computes from rewards, groups and numbers of tokens, by what it is called."""
    for unbiased in (True, False):
        divisor = "n - 1" if unbiased else "n"
        for epsilon in _EPSILONS:
            add = f" + {epsilon:g}" if epsilon else ""
            scaled: list[tuple[str, Callable[..., Array]]] = [
                (f"(r - group mean) / (group std{add}), std over {divisor}", advantages.group_normalised),
                (f"(r - group mean) / (batch std{add}), std over {divisor}", advantages.group_centred_over_batch_std),
                (f"r - group mean, over its batch std{add}, std over {divisor}", advantages.group_centred_batch_scaled),
            ]
            with np.errstate(invalid="ignore", divide="ignore"):
                for name, compute in scaled:
                    yield name, compute(reward_B, group_B, unbiased=unbiased, epsilon=epsilon)
                yield (
                    f"(r - mean of the group's others) / (their std{add}), std over {divisor} of them",
                    advantages.leave_one_out_normalised(reward_B, group_B, unbiased=unbiased, epsilon=epsilon),
                )
                yield (
                    f"(r - batch mean) / (batch std{add}), std over {divisor}",
                    advantages.normalised(reward_B, unbiased=unbiased, epsilon=epsilon),
                )
    centred_B = advantages.group_centred(reward_B, group_B)
    yield "r - group mean (Dr. GRPO)", centred_B
    yield "r - mean of the group's others (RLOO)", advantages.leave_one_out(reward_B, group_B)
    yield (
        "(r - group mean) x responses / responses with a reward (GPG)",
        advantages.group_centred_upweighted(reward_B, group_B),
    )
    spread_B = np.abs(centred_B) > 1e-8
    if spread_B.any():
        yield (
            "(r - group mean) x responses / responses with an advantage (GPG)",
            centred_B * (len(centred_B) / int(spread_B.sum())),
        )
    yield "the lead of a group's best over its second (pass@k)", advantages.best_margin(reward_B, group_B)
    if tokens_B is None or not tokens_B.sum() > 1:
        return
    yield "r - group mean weighted by length (OPO)", advantages.length_weighted_centred(reward_B, group_B, tokens_B)
    others_B = advantages.leave_one_out(reward_B, group_B)
    for unbiased in (True, False):
        for what, scores_B in (
            ("r", reward_B),
            ("r - group mean", centred_B),
            ("r - mean of the group's others", others_B),
        ):
            name = f"{what}, whitened over the tokens of the batch, std over {'n - 1' if unbiased else 'n'}"
            yield name, advantages.whitened(scores_B, tokens_B, unbiased=unbiased)


def in_groups(reward_B: Array, group_B: Array) -> Iterator[tuple[str, Array]]:
    """The variants whose baseline is the group's alone."""
    yield from (one for one in variants(reward_B, group_B) if "batch" not in one[0])


BATCH_MEAN = "r - batch mean, one baseline for all groups"
#: How the name of one with a baseline that is none of the batch's own figures ends.
MOVING = "one baseline for the whole batch (a moving mean)"


def rewards_of(batch: StepBatch) -> Iterator[tuple[str, Array]]:
    """What the advantages may have been computed from."""
    if batch.reward_B is not None:
        yield "rewards", batch.reward_B
    for name in ("token_rewards", "token_scores"):
        scores_B = batch.summed(name)
        if scores_B is not None:
            yield name, scores_B


def matching(advantage_B: Array, candidates: Iterator[tuple[str, Array]], close: Array) -> str | None:
    for name, other_B in candidates:
        if agree(advantage_B, other_B, close):
            return name
    return None


def agree(a_B: Array, b_B: Array, close_B: Array) -> bool:
    # Most variants part at the first advantage already.
    if a_B.size and np.isfinite(b_B[0]) and not abs(a_B[0] - b_B[0]) <= close_B[0] * max(1, abs(b_B[0])):
        return False
    # Where a group has no spread, 0 / 0 without an epsilon is no reason to refuse a variant: frameworks skip it.
    b_B = np.where(np.isfinite(b_B) | (close_B < 1), b_B, 0.0)
    return bool(np.isfinite(b_B).all() and (np.abs(a_B - b_B) <= close_B * np.maximum(1, np.abs(b_B))).all())


def tolerance(reward_B: Array, group_B: Array, close: float) -> Array:
    """How close each advantage has to be: float32 rounds a mean, and a small std makes that large."""
    centred_B = advantages.group_centred(reward_B, group_B)
    count_G = np.bincount(group_B)
    std_B = np.sqrt(np.bincount(group_B, weights=centred_B**2) / count_G)[group_B]
    rounding_B = 2**-22 * np.maximum(np.abs(reward_B), 1e-12)
    # Equal rewards: what is left after subtracting the mean is rounding, whatever it is divided by.
    return np.where(std_B <= 4 * rounding_B, 1.0, close + rounding_B / np.maximum(std_B, 1e-12))


def is_rounded(values_B: Array) -> bool:
    """Whether numbers in float32 have no more than bfloat16's bits: they were computed in it."""
    bits_B = values_B.astype(np.float32).view(np.uint32)
    several = np.unique(np.abs(np.round(values_B, 6))).size > 4
    return several and bool(((bits_B & 0xFFFF) == 0).all())


def zeroed(candidates: Iterator[tuple[str, Array]], kept_B: Array) -> Iterator[tuple[str, Array]]:
    for name, values_B in candidates:
        yield name, values_B[kept_B]


def group_std_B(reward_B: Array, group_B: Array) -> Array:
    scale_B: Array = _std_B(reward_B, group_B) + 1e-6
    return scale_B


def _std_B(reward_B: Array, group_B: Array, *, unbiased: bool = True) -> Array:
    """The std of each sample's group."""
    centred_B = advantages.group_centred(reward_B, group_B)
    sizes_G = np.bincount(group_B)
    std_G = np.sqrt(np.bincount(group_B, weights=centred_B**2) / np.maximum(sizes_G - unbiased, 1))
    each_B: Array = std_G[group_B]
    return each_B


def made_with_all(batch: StepBatch, left_out_B: Array) -> str | None:
    """The variant that makes the advantages of the other rows where these count in their groups, and none does where
    they do not; None where both are so, or neither, or it cannot be told.
    """
    advantage_B, group_B, reward_B = batch.advantage_B, batch.group_B, batch.reward_B
    if advantage_B is None or group_B is None or reward_B is None or not batch.group_is_named:
        return None
    kept_B = ~left_out_B
    heard_B = advantage_B[kept_B]
    if not (np.isfinite(heard_B).all() and np.isfinite(reward_B).all()) or np.unique(np.round(heard_B, 6)).size < 4:
        return None
    column = batch.columns.of("advantages")
    stored = CLOSE.get("float32" if column is None else column.dtype, 1e-4)
    close = tolerance(reward_B, group_B, stored)[kept_B]
    # A group that is left without a spread has 0 either way: rounding of it tells nothing.
    groups_B = np.unique(group_B[kept_B], return_inverse=True)[1]
    alone = tolerance(reward_B[kept_B], groups_B, stored)
    name = matching(heard_B, ((each, values_B[kept_B]) for each, values_B in variants(reward_B, group_B)), close)
    if name is None or "(batch std" in name or "batch mean" in name or (close >= 1).all():
        return None
    return None if matching(heard_B, variants(reward_B[kept_B], groups_B), np.minimum(close, alone)) else name


def known_variants(batch: StepBatch, reward_B: Array, group_B: Array) -> Iterator[tuple[str, Array]]:
    """The variants of this batch: with its numbers of tokens, and the baseline that it records."""
    # Where no mask is recorded, all that was sampled counts.
    counted_N = batch.response_N if batch.trained_N is None else batch.trained_N
    yield from variants(
        reward_B, group_B, None if counted_N is None else batch.flat.count(counted_N).astype(np.float64)
    )
    if batch.laid.algorithm.estimator in ("rloo", ""):
        others_B = advantages.leave_one_out(reward_B, group_B)
        for unbiased in (True, False):
            for epsilon in _EPSILONS:
                with np.errstate(invalid="ignore", divide="ignore"):
                    yield (
                        f"(r - mean of the group's others) / (group std + {epsilon:g}), std over "
                        f"{'n - 1' if unbiased else 'n'}, the own reward counted",
                        others_B / (_std_B(reward_B, group_B, unbiased=unbiased) + epsilon),
                    )
    if (moved := moving_baseline(batch)) is not None:
        is_mean = abs(moved - float(reward_B.mean())) <= 1e-4 * max(float(np.abs(reward_B).max()), 1e-9)
        yield (
            BATCH_MEAN if is_mean else f"r - {moved:.4g}, {MOVING}",
            reward_B - moved,
        )
    baseline_B = greedy_rewards_B(batch)
    if baseline_B is not None:
        yield "r - the reward of a greedy response (ReMax)", reward_B - baseline_B
    yield from _over_trajectories(batch, reward_B, group_B)
    yield from further(batch, reward_B, group_B)


#: What a run that states ReMax calls the rewards of its greedy responses, beside names that mean nothing else.
_GREEDY = ("baselines", "baseline", "baseline_rewards", "baseline_reward", "rb")


def greedy_rewards_B(batch: StepBatch) -> Array | None:
    """The reward of a greedy response to each sample's prompt [B], where it is recorded."""
    return batch.columns.per_sample("reward_baselines", *(_GREEDY if batch.laid.algorithm.estimator == "remax" else ()))


#: What the name of a variant ends with where a trajectory counts once, whatever rows it has.
EACH_ONCE = "over trajectories, each counted once"


def _over_trajectories(batch: StepBatch, reward_B: Array, group_B: Array) -> Iterator[tuple[str, Array]]:
    """The variants of trajectories with a row for each turn, as each row has them."""
    each_B = trajectory_B(batch)
    if each_B is None or len(each_B) != len(reward_B):
        return
    group_T = np.zeros(int(each_B.max()) + 1, dtype=np.int64)
    group_T[each_B] = group_B
    if not np.array_equal(group_T[each_B], group_B):
        return
    tokens_T = None
    if batch.trained_N is not None:
        tokens_T = np.bincount(each_B, weights=batch.flat.count(batch.trained_N).astype(np.float64))
    for of, reward_T in earned_T(reward_B, each_B):
        for name, values_T in variants(reward_T, group_T, tokens_T):
            yield f"{name}, r{of} {EACH_ONCE}", values_T[each_B]


#: From here on an epsilon is no longer small beside a std of rewards; how near a number is to one of a single digit.
LARGE_EPSILON, ROUND = 0.05, 1e-2
#: Of advantages that differ from 0, the share that a bound of the same size on both sides may cut off.
MOSTLY_CUT = 0.5


def solved_variants(batch: StepBatch, heard_B: Array, kept_B: Array, reward_B: Array) -> Iterator[tuple[str, Array]]:
    """Variants with a number that is no recipe's, solved for: an epsilon, and one baseline and scale for the batch.

    heard_B: the advantages that are finite; kept_B: of all samples, which have one. Values are of the kept ones.
    """
    group_B = given(batch.group_B)
    centred_B = advantages.group_centred(reward_B, group_B)[kept_B]
    sizes_G = np.bincount(group_B)
    # What a bound cut off tells no epsilon.
    tells_B = (np.abs(heard_B) > 0.05 * np.abs(heard_B).max()) & (heard_B > heard_B.min()) & (heard_B < heard_B.max())
    tells_B &= np.abs(centred_B) > 1e-6 * max(float(np.abs(reward_B).max()), 1e-12)
    squares_G = np.bincount(group_B, weights=advantages.group_centred(reward_B, group_B) ** 2)
    for less, divisor in ((1, "n - 1"), (0, "n")):
        if not tells_B.any():
            break
        std_B = np.sqrt(squares_G / np.maximum(sizes_G - less, 1))[group_B][kept_B]
        several = np.unique(np.round(std_B[tells_B] / std_B[tells_B].max(), 2)).size > 1
        scale_B = centred_B[tells_B] / heard_B[tells_B]
        for words, epsilon in (
            ("group std + {:.3g}", float(np.median(scale_B - std_B[tells_B]))),
            ("root of (group variance + {:.3g})", float(np.median(scale_B**2 - std_B[tells_B] ** 2))),
        ):
            if not 0 < epsilon < LARGE_EPSILON or not (several or _is_round(epsilon)):
                continue
            below_B = std_B + epsilon if words.startswith("group std") else np.sqrt(std_B**2 + epsilon)
            yield (
                f"(r - group mean) / ({words.format(epsilon)}), std over {divisor}, the epsilon solved for",
                (centred_B / below_B),
            )
    if batch.laid.algorithm.estimator in ("", "reinforce"):
        yield from _one_line(heard_B, reward_B[kept_B], group_B[kept_B], _own_means(batch, reward_B))


def _is_round(value: float) -> bool:
    digit = float(f"{value:.0e}")
    return abs(value - digit) <= ROUND * digit


def _own_means(batch: StepBatch, reward_B: Array) -> tuple[float, ...]:
    """Means of the batch's own rewards: over the tokens that count, and over every slot of the padded responses."""
    if batch.trained_N is None:
        return ()
    tokens_B = batch.flat.count(batch.trained_N).astype(np.float64)
    width = batch.laid.widths.get("the response", 0)
    return tuple(
        float(reward_B @ tokens_B) / total for total in (float(tokens_B.sum()), float(width * len(tokens_B))) if total
    )


def _one_line(
    heard_B: Array, reward_B: Array, group_B: Array, own_means: tuple[float, ...]
) -> Iterator[tuple[str, Array]]:
    """(r - b) / s with one b and s for the batch, which none of its own figures is: running means. `own_means`:
    its own over tokens.
    """
    spread = float(np.ptp(reward_B))
    means = np.bincount(group_B, weights=reward_B) / np.maximum(np.bincount(group_B), 1)
    if not spread > 0 or float(np.ptp(means[np.unique(group_B)])) <= 1e-3 * spread:
        return
    centred_B = reward_B - reward_B.mean()
    slope = float(centred_B @ heard_B) / float(centred_B @ centred_B)
    if not slope > 0:
        return
    baseline = float(reward_B.mean()) - float(heard_B.mean()) / slope
    own = (float(reward_B.mean()), 0.0, float(reward_B.max()), float(reward_B.min()), *own_means)
    if any(abs(baseline - one) <= 1e-3 * spread for one in own):
        return
    name = f"(r - {baseline:.4g}) / {1 / slope:.4g}, one baseline and scale for the whole batch (running ones)"
    yield name, (reward_B - baseline) * slope


def clipped_variants(
    heard_B: Array, known: list[tuple[str, Array]], stated: float | None = None
) -> Iterator[tuple[str, Array]]:
    """Variants cut off at the largest and smallest advantage, where most of the batch lies between the two; and at one
    size on both sides, where that cuts off no more than half, or is stated.
    """
    low, high = float(heard_B.min()), float(heard_B.max())
    moving_B = heard_B[heard_B != 0]
    inside_B = (moving_B > low) & (moving_B < high)
    if low < 0 < high and float(inside_B.mean()) >= 0.5 and np.unique(moving_B[inside_B]).size >= 3:
        for name, values_B in known:
            yield f"{name}, clipped to {low:.4g} and {high:.4g}", np.clip(values_B, low, high)
    bound = max(-low, high)
    meant = stated is not None and abs(stated - bound) <= 1e-4 * bound
    if not low < 0 < high or not (meant or (np.abs(moving_B) < (1 - 1e-6) * bound).any()):
        return
    for name, values_B in known:
        lost_B = np.abs(values_B[heard_B != 0]) > (1 + 1e-6) * bound
        if meant or float(lost_B.mean()) <= MOSTLY_CUT:
            yield f"{name}, clipped to {-bound:.4g} and {bound:.4g}", np.clip(values_B, -bound, bound)


#: Different values of a known variant before a rising function of them is no chance.
RISES = 6


def squashed(batch: StepBatch, heard_B: Array, kept_B: Array, reward_B: Array, group_B: Array) -> str | None:
    """The known variant, or the ranks within the group, that advantages are a rising function of: a clip, a tanh, a
    root keep order, sign and what is equal. None where there is none, or where they take up too few values to tell.
    """
    ranks_B = np.zeros(len(reward_B))
    for inside in groups_of(group_B):
        r = reward_B[inside]
        below, equal = (r[:, None] > r).sum(1), (r[:, None] == r).sum(1) - 1
        ranks_B[inside] = below + equal / 2 - (len(r) - 1) / 2
    named = [
        ("the ranks within the group", ranks_B),
        ("the ranks within the group, over their std", advantages.group_normalised(ranks_B, group_B)),
        *in_groups(reward_B, group_B),
    ]
    size = max(float(np.abs(heard_B).max()), 1e-12)
    for name, values_B in zeroed(iter(named), kept_B):
        if not np.isfinite(values_B).all() or not np.ptp(values_B) > 0:
            continue
        order = np.argsort(values_B, kind="stable")
        v_B, a_B = values_B[order], heard_B[order]
        equal = np.diff(v_B) <= 1e-5 * float(np.abs(v_B).max())
        steps = np.diff(a_B)
        fewest = 4 if name.startswith("the ranks") else RISES
        if (
            (steps >= -1e-5 * size).all()
            and (np.abs(steps[equal]) <= 1e-4 * size).all()
            and (np.sign(np.round(v_B, 5)) == np.sign(np.round(a_B, 5)))[np.abs(v_B) > 1e-4].all()
            and np.unique(np.round(v_B / np.abs(v_B).max(), 4)).size >= fewest
            and np.unique(np.round(a_B / size, 4)).size >= fewest
        ):
            return name
    return None


def orders(samples: int, groups: int) -> Iterator[tuple[str, Array]]:
    """Orders that rewards may have come back in: dealt out over ranks, or put together again, turned or moved on."""
    each = np.arange(samples)
    for parts in sorted({2, 3, 4, 5, 6, 8, 16, groups, samples // groups}):
        if 1 < parts < samples and samples % parts == 0:
            yield f"of {parts} ranks, one of each in turn", each.reshape(parts, -1).T.reshape(-1)
            yield f"dealt out over {parts} ranks", each.reshape(-1, parts).T.reshape(-1)
    yield "from last to first", each[::-1]
    for by in sorted({1, samples // groups}):
        yield f"moved on by {by}", np.roll(each, by)
        yield f"moved back by {by}", np.roll(each, -by)


def parts_of_groups(group_B: Array) -> Iterator[tuple[str, Array]]:
    """Each group in parts of equal size, of rows that follow each other, or of every other one."""
    sizes = np.unique(np.bincount(group_B))
    if sizes.size > 1:
        return
    size = int(sizes[0])
    place_B = np.zeros(len(group_B), dtype=np.int64)
    for group in np.unique(group_B):
        place_B[group_B == group] = np.arange(size)
    for parts in range(2, size // 2 + 1):
        if size % parts == 0:
            each = size // parts
            yield (
                f"each group's {size} rows in parts of {each} that follow each other",
                (group_B * parts + place_B // each),
            )
            yield (
                f"each group's {size} rows in {parts} parts, one row to each in turn",
                group_B * parts + (place_B % parts),
            )


def held_together(batch: StepBatch) -> Iterator[tuple[str, Array]]:
    """The rows of each rank, and of each micro-batch, where there are several."""
    by_micro = batch.laid.rows_by_micro()
    ranks = sorted({-1 if rank is None else rank for rank, _ in by_micro})
    by_rank_B, by_micro_B = np.full(len(batch), -1, dtype=np.int64), np.full(len(batch), -1, dtype=np.int64)
    for number, ((rank, _), rows) in enumerate(by_micro.items()):
        by_rank_B[rows], by_micro_B[rows] = ranks.index(-1 if rank is None else rank), number
    for what, part_B in (("each rank's", by_rank_B), ("each micro-batch's", by_micro_B)):
        if (part_B >= 0).all() and np.unique(part_B).size > 1 and np.bincount(part_B).min() >= FEWEST_HELD:
            yield what, part_B


#: Rows of a rank or a micro-batch before their own mean and std are no chance.
FEWEST_HELD = 4


def groupings_of(batch: StepBatch) -> Iterator[tuple[str, Array]]:
    """Other ways the same samples may have been put into groups."""
    group_B = given(batch.group_B)
    yield from parts_of_groups(group_B)
    total, groups = len(group_B), int(group_B.max()) + 1
    if batch.prompt_B is not None:
        yield "equal prompts as groups", batch.prompt_B
    yield "the whole batch as one group", np.zeros(total, dtype=np.int64)
    for order in batch.laid.orders:
        place_B = np.argsort(order)
        if total % groups == 0:
            size = total // groups
            yield f"every {size} rows in a row as a group", place_B // size
            yield f"every {groups}th row as a group", place_B % groups
    for size in (2, 4, 8, 16):
        if total % size == 0 and size < total:
            yield f"every {size} rows in a row as a group", np.arange(total) // size
            yield f"every {total // size}th row as a group", np.arange(total) % (total // size)
