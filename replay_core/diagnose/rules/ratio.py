"""pi / pi_old: 1 before the first update of a batch, near 1 after it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from statistics import median

import numpy as np

from replay_core.diagnose import trends
from replay_core.diagnose.algorithm import Algorithm, stated_by
from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.case import Case
from replay_core.diagnose.columns import Column
from replay_core.diagnose.compared import old_is_odd
from replay_core.diagnose.finding import Finding, Where, error, finding, shown, warning
from replay_core.diagnose.flat import Array
from replay_core.diagnose.gap import FEWEST, Gap
from replay_core.diagnose.passes import before_any_update_N
from replay_core.diagnose.places import FOLLOWED, places_of
from replay_core.diagnose.printed import is_of_decimals
from replay_core.diagnose.rule import Skip, given, rule, skip_if
from replay_core.diagnose.signals import Point, RunLog, Series
from replay_core.measure.lag import Lag, detect_lag
from replay_core.objectives import policy_loss

#: |ratio - 1| that two forwards of one model explain, by the precision they ran in.
SAME_FP32, SAME_BF16 = 1e-3, 0.02
#: Share of tokens that lie past the range between two forwards in bf16.
FEW_CLIPPED = 3e-3
#: verl and miles: largest ratio, share of clipped tokens, effective sample size.
LARGEST, CLIPPED, MOSTLY_CLIPPED, EFFECTIVE = 10.0, 0.2, 0.5, 0.5
#: Of a batch: the share of ratios that are extreme, and of those outside of clipping that no epochs explain.
EXTREME, FAR_GONE, FEW_EFFECTIVE = 0.02, 0.8, 0.3


def _pair(batch: StepBatch) -> tuple[Column, Column, Array]:
    policy, old = given(batch.columns.of("policy_logprobs")), given(batch.columns.of("old_logprobs"))
    both_N = batch.pair(policy, old)
    if both_N.sum() < FEWEST:
        raise Skip(f"policy and old log-probabilities share {int(both_N.sum())} tokens that count")
    return policy, old, both_N


def ratios(batch: StepBatch) -> tuple[Array, Array, str]:
    """The ratio of every token, which tokens have one, and from what: recomputed, else as recorded.

    Raises:
        Skip: neither can be had of enough tokens.
    """
    if batch.columns.of("policy_logprobs") is not None and batch.columns.of("old_logprobs") is not None:
        policy, old, both_N = _pair(batch)
        ratio_N = np.full(both_N.size, np.nan)
        moved = np.clip(policy.values_N[both_N] - old.values_N[both_N], -50, 50)
        ratio_N[both_N] = policy_loss.ratio(moved, np.zeros_like(moved))
        return ratio_N, both_N, f"{policy.source} and {old.source}"
    column = batch.columns.of("is_ratio")
    if column is None:
        raise Skip("needs policy and old log-probabilities, or the recorded ratio")
    known_N = column.said_N & np.isfinite(column.values_N)
    counted_N = batch.trained_N
    if counted_N is None and (column.values_N[known_N] != 0).any():
        # e to no difference is 0: where no mask is recorded beside it, what stands as 0 was masked.
        known_N &= column.values_N != 0
    known_N = known_N if counted_N is None else known_N & counted_N
    if known_N.sum() < FEWEST:
        raise Skip(f"the recorded ratio says something of {int(known_N.sum())} tokens that count")
    return column.values_N, known_N, column.source


#: Of a batch that is recorded whole, the share of samples that its first of several mini-batches may have.
FIRST_OF = (0.12, 0.55)


def _is_of_several_updates(batch: StepBatch, policy: Column, old: Column) -> bool:
    """Whether samples recorded in one piece look like those of several mini-batches: the first ones' ratio is 1."""
    keys = set(batch.laid.keys_of("policy_logprobs"))
    if len(keys) != 1 or any(key is None or key.minibatch is not None or key.epoch is not None for key in keys):
        return False
    both_N = batch.pair(policy, old)
    apart_N = np.where(both_N, np.abs(policy.values_N - old.values_N), 0.0)
    worst_B = np.zeros(len(batch))
    np.maximum.at(worst_B, np.repeat(np.arange(len(batch)), batch.flat.lengths_B), np.nan_to_num(apart_N))
    heard_B = batch.flat.count(both_N) > 0
    agree = float((worst_B[heard_B] <= SAME_FP32).mean()) if heard_B.any() else 0.0
    return FIRST_OF[0] <= agree <= FIRST_OF[1]


def _lag(batch: StepBatch, policy: Column, old: Column) -> Lag | None:
    """The lag at which old and new log-probabilities face each other, where it is not 0."""
    first_N = before_any_update_N(batch)
    inside_N = batch.response_N if batch.response_N is not None else batch.pair(policy, old)
    rows = [span for span in batch.flat.spans if first_N[span].any()]
    a, b = ([one.values_N[span][inside_N[span]] for span in rows] for one in (old, policy))
    lag = detect_lag(a, b) if rows else None
    return lag if lag is not None and lag.settled and lag.lag != 0 else None


#: Share of tokens that a router sends elsewhere from one forward to the next, or a sampled pad id leaves unseen; of the
#: rows that it is in; and by how much it moves these on average, nats, at the most.
FEW_MOVED, FEW_ROWS, MILDLY = 0.01, 0.1, 1.0
#: Other weights leave no more than a part of a rank's tokens where they were.
WHOLE_RANK = 0.3


def _is_rounding(apart: Array, moved: Array) -> bool:
    """Whether hardly a token is off, and all of them together are as near as half-precision forwards are."""
    return float((apart > SAME_BF16).mean()) < FEW_MOVED and float(np.abs(moved).mean()) < SAME_BF16 / 10


@rule("D14", "the ratio is not 1 before the first update", link="ratio", scope="batch",
      needs=("policy_logprobs", "old_logprobs"),
      explains=("D23", "D24", "L16"),
      source="verl#6280 #2088, RLinf#1534 (4.6 % clipped at lr 0), slime#1964")  # fmt: skip
def on_policy(batch: StepBatch) -> Finding | None:
    """max |pi / pi_old - 1| over the first optimizer step of a batch (by mini-batch and epoch where recorded, else the
    first micro-batch of each rank): above 1e-3 where both are fp32, above 0.02 otherwise (in a hundredth of the tokens,
    or 0.002 nats on average), is a warning; above 0.2, what clipping cuts off, an error (in a hundredth of the tokens
    and more, and in a tenth of the rows or by a nat on average in those that it is in). Where all that is off is on
    some ranks, and they are off as a whole, these compute with other weights; where it is all micro-batches (3 and
    more) but the first of the update, the optimizer steps between them (an error). Where the first sample of every pack
    agrees and no later one does, samples see each other. Where the first forward agrees with the engine, and the old
    ones with neither, it is these that are wrong.
    Later updates move the ratio on purpose; so does a later pass that is a step of its own, whose samples and old
    log-probabilities an earlier step holds to the last bit. Skipped where a batch is recorded whole, without its
    mini-batches, and an eighth to a half of its samples agree while the others do not: those of the first.

    A recorded ratio that is log pi - log pi_old itself, on every token, is an error in any update.
    """
    policy, old, both_N = _pair(batch)
    recorded = batch.columns.of("is_ratio")
    if recorded is not None:
        known_N = both_N & recorded.said_N & np.isfinite(recorded.values_N)
        logs = (policy.values_N - old.values_N)[known_N]
        if known_N.sum() >= FEWEST and np.abs(recorded.values_N[known_N] - logs).max() < 1e-4:
            return error(
                "the ratio is the difference of log-probabilities: the exponential is missing",
                batch.laid.where("is_ratio", at=known_N),
                shown("mean ratio", float(recorded.values_N[known_N].mean()), "about 1", recorded.source),
                shown("mean of log pi - log pi_old", float(logs.mean())),
                cause="the ratio is never exponentiated (or is a tensor of 0 that is never filled): it is about 0 where"
                " it has to be about 1, and clipping cuts tokens off as if the policy had left",
            )
    both_N = both_N & before_any_update_N(batch)
    skip_if(both_N.sum() < FEWEST, "no tokens are surely of the first update")
    moved = policy.values_N[both_N] - old.values_N[both_N]
    apart = np.abs(np.expm1(np.clip(moved, -50, 50)))
    largest = float(apart.max())
    if largest > SAME_BF16 and _is_of_several_updates(batch, policy, old):
        raise Skip("the samples are recorded together, and part of them agree: the others may be of later mini-batches")
    half = {policy.dtype, old.dtype} & {"bfloat16", "float16"} or str(batch.laid.flags.get("dtype")) in (
        "bfloat16",
        "bf16",
    )
    limit = SAME_BF16 if half or batch.laid.flags.get("dtype") is None else SAME_FP32
    if largest <= limit or (limit == SAME_BF16 and _is_rounding(apart, moved)):
        return None
    at = int(np.flatnonzero(both_N)[apart.argmax()])
    place = batch.laid.where("policy_logprobs", at=at)
    clipped = float((apart > 0.2).mean())
    if (lag := _lag(batch, policy, old)) is not None:
        return error(
            f"the policy's log-probabilities are shifted by {-lag.lag:+d} token against the old ones, before any "
            "update",
            place,
            *(shown(f"correlation at lag {-by:+d}", value, "the largest" if by == 0 else None)
            for by, value in lag.correlations.items()),
            shown("max |ratio - 1|", largest, f"<= {limit:g}", f"{policy.source} and {old.source}"),
            cause="one forward is about the token at its index, the other about the next: labels or logits are off by "
            "one (a slice or a roll) where the loss is made",
        )  # fmt: skip
    as_engine = Gap(batch, old, policy, both_N)
    of_engine = _is_engines(batch, old, both_N)
    # Of older weights, too, a policy that got sharper looks as if it were at another temperature.
    if as_engine.is_tempered and not (of_engine and batch.step):
        return error(
            "policy and old log-probabilities are at different temperatures before any update: "
            f"{given(as_engine.gain):.2f} explains their difference",
            place,
            shown("temperature of the old over the policy's", given(as_engine.gain), "0.9 to 1.1"),
            shown("correlation", as_engine.correlation),
            shown("max |ratio - 1|", largest, f"<= {limit:g}", f"{policy.source} and {old.source}"),
            cause="one of the two forwards divides its logits by the sampling temperature and the other does not",
        )
    if not of_engine and (leak := as_engine.leak) is not None:
        clean_B, how = leak
        return error(
            f"the ratio is off 1 by up to {largest:.3g} before any update, in every sample but the first of each pack: "
            "attention crosses samples",
            place,
            shown("mean |policy - old| of the first samples", float(np.nanmean(as_engine.by_sample_B[clean_B]))),
            shown("mean |policy - old| of the later ones", float(np.nanmean(as_engine.by_sample_B[~clean_B])), "0"),
            shown("packs", how),
            cause="the update packs samples without a block-diagonal mask (no cu_seqlens, a mask of ones), or position "
            "ids do not begin again with each of them: a sample sees those before it in its pack, and the forward of "
            "the old log-probabilities did not",
            next_step=batch.laid.replay_command(place, "--packing"),
        )
    # What lies in one row of many is that sample's (an id that nobody attends to, an image), and not the forward's.
    rows = batch.flat.sample_N[both_N]
    off = np.unique(rows[apart > 0.2])
    alone = _ranks_alone(batch, rows, apart, limit)
    if (micros := _moved_between(batch, rows, apart, limit)) and not of_engine:
        # Where mini-batches are not numbered, each of these may be one.
        numbered = all(key is not None and key.minibatch is not None for key in batch.laid.keys_of("policy_logprobs"))
        return finding(
            "error" if numbered else "warning",
            f"the weights change within an update: the ratio is 1 in its first micro-batch and off 1 (by up to "
            f"{largest:.3g}) in all {micros - 1} that follow"
            + ("" if numbered else ", or these are mini-batches that were recorded without their numbers"),
            place,
            shown("micro-batches of the update", micros),
            shown("share of tokens off by more than 0.2", clipped, "0"),
            shown("max |ratio - 1|", largest, f"<= {limit:g}", f"{policy.source} and {old.source}"),
            cause="the optimizer steps after every micro-batch, and not once they are all accumulated: each is an "
            "update of its own, of a smaller batch than is meant",
            next_step="call optimizer.step() and zero_grad() once for all micro-batches of a mini-batch",
        )
    few = clipped < FEW_MOVED or (
        len(off) < FEW_ROWS * len(np.unique(rows)) and float(np.abs(moved)[np.isin(rows, off)].mean()) < MILDLY
    )
    odd = old_is_odd(batch)
    later = odd is not None and _is_of_later_weights(batch, policy, old, both_N)
    random = None if alone or odd else _random(batch, policy, old, both_N)
    noisy = _random(batch, old, policy, both_N) if odd and not later and not alone else None
    of_engine = of_engine and not random  # what the engine's own numbers do not explain
    return finding(
        "info" if of_engine else "error" if largest > 0.2 and not few else "warning",
        f"the ratio is off 1 by up to {largest:.3g} before any update"
        + (": the old log-probabilities are the engine's own" if of_engine else alone)
        + (
            (
                ": the old log-probabilities hold the update already, taken after the optimizer's step"
                if later
                else ": the policy's first forward agrees with the engine, and the old log-probabilities with neither"
                + (", they are random" if noisy else "")
            )
            if odd and not alone
            else ": the policy's forward is random, dropout is on in it"
            if random
            else ""
        ),
        place,
        *(
            [shown("mean |old - rollout|, nats", odd[0]), shown("mean |policy - rollout| in the first forward", odd[1])]
            if odd
            else []
        ),
        *(
            [
                shown("range of the old log-probability of one token after one prefix, median", noisy[0]),
                shown("range of the policy's there", noisy[1], "as much"),
            ]
            if noisy
            else []
        ),
        *(
            [
                shown("range of the policy's log-probability of one token after one prefix, median", random[0]),
                shown("range of the old one there", random[1], "as much"),
            ]
            if random
            else []
        ),
        shown("max |ratio - 1|", largest, f"<= {limit:g}", f"{policy.source} and {old.source}"),
        shown("share of tokens off by more than 0.2", clipped, "0"),
        shown("mean |policy - old|", float(np.abs(moved).mean())),
        cause="the rollout's log-probabilities are taken for the old ones (a bypass of the trainer's own forward, as "
        "some asynchronous trainers run): the ratio holds the distance between engine and trainer, and the age of the "
        "weights"
        if of_engine
        else "these ranks compute the policy with other weights than the old log-probabilities are of, and than the "
        "other ranks: an update, a broadcast or a checkpoint does not reach them"
        if alone
        else "old log-probabilities are computed too late, and engine and policy are right: they are higher where the "
        "advantage is positive and lower where it is negative, as the step's own update makes them; the order of the "
        "loop is wrong (the forward for old log-probabilities comes after optimizer.step(), or in the update's loop)"
        if later
        else "the model is in train mode in the update: dropout (attention, residual, LoRA) gives one prefix another "
        "number "
        "in every row, and the old log-probabilities are of a forward without it; the ratio is noise from the first "
        "step on"
        if random
        else "old log-probabilities are stale or wrong, and engine and policy are right: they are of an earlier step's "
        "weights (taken before the last update, cached, a copy of the policy that lags), or of another forward "
        "(dropout, other inputs)"
        if odd
        else "old and new log-probabilities are computed differently: other micro-batch size or padding, dropout "
        "(train against eval), another attention or precision, or packing in one of them",
        next_step=batch.laid.replay_command(place, "--rows-per-forward 1"),
    )


#: Standard errors by which old log-probabilities have to follow the advantages; and of places that samples of a group
#: share, how many tell, and how far apart a random forward leaves them, nats, against one that is not.
FOLLOWS, TWINS, APART, TIMES = 4.0, 6, 0.01, 20.0


def _is_of_later_weights(batch: StepBatch, policy: Column, old: Column, both_N: Array) -> bool:
    """Whether old log-probabilities lie above the policy's where the advantage is positive and below where it is
    negative: an update does that, and those of weights before it do the opposite.
    """
    advantages = batch.columns.of("advantages")
    if advantages is None:
        return False
    known_N = both_N & advantages.said_N & np.isfinite(advantages.values_N) & (advantages.values_N != 0)
    if known_N.sum() < FEWEST:
        return False
    product = np.sign(advantages.values_N[known_N]) * (old.values_N - policy.values_N)[known_N]
    error_ = float(product.std()) / math.sqrt(len(product))
    return float(product.mean()) > FOLLOWS * error_


def _random(batch: StepBatch, policy: Column, old: Column, both_N: Array) -> tuple[float, float] | None:
    """Median range of what the policy, and the old forward, say of one token after one prefix, over the samples of one
    group: rows that begin alike, with as much padding. None where these are too few, or the policy gives them one
    number as the old one does. (Of packed rows, a later one may see the ones before it.)
    """
    ref = policy.ref
    if batch.group_B is None or len(ref.shape) != 2 or ref.rows is not None:
        return None  # packed
    places: dict[tuple[int, int], list[int]] = {}
    for _, here, at in places_of(batch, FOLLOWED):
        if both_N[at]:
            places.setdefault((here, int(batch.group_B[batch.flat.sample_N[at]])), []).append(at)
    shared = [np.array(found) for found in places.values() if len(found) > 1]
    if len(shared) < TWINS:
        return None
    now, before = (float(np.median([np.ptp(one.values_N[found]) for found in shared])) for one in (policy, old))
    return (now, before) if now > APART and now > TIMES * before else None


def _moved_between(batch: StepBatch, rows_N: Array, apart_N: Array, limit: float) -> int:
    """How many micro-batches a rank's update has, where on every rank the first agrees and each later one is off as a
    whole; 0 where that is not so, or there are fewer than 3.
    """
    by_rank: dict[int | None, list[tuple[int, float]]] = {}
    for (rank, micro), samples in batch.laid.rows_by_micro().items():
        inside = np.isin(rows_N, samples)
        if micro is not None and inside.any():
            by_rank.setdefault(rank, []).append((micro, float((apart_N[inside] > limit).mean())))
    for each in by_rank.values():
        each.sort()
        if len(each) < 3 or each[0][1] > 0 or min(share for _, share in each[1:]) <= WHOLE_RANK:
            return 0
    return max(map(len, by_rank.values()), default=0)


def _ranks_alone(batch: StepBatch, rows_N: Array, apart_N: Array, limit: float) -> str:
    """Which ranks alone are off, where whole ranks agree: all samples of some, and none of the others."""
    rank_of = {row: rank for (rank, _), rows in batch.laid.rows_by_micro().items() for row in rows}
    off = {rank_of.get(row) for row in np.unique(rows_N[apart_N > limit])}
    known = {rank_of.get(row) for row in np.unique(rows_N)}
    if None in known or not off or off == known:
        return ""
    each = [float((apart_N[np.isin(rows_N, [row for row, one in rank_of.items() if one == rank])] > limit).mean())
            for rank in off]  # fmt: skip
    which = "rank" if len(off) == 1 else "ranks"
    named = f": on {which} {', '.join(map(str, sorted(rank for rank in off if rank is not None)))} alone"
    return f"{named}, and every other rank agrees" if min(each) > WHOLE_RANK else ""


def _is_engines(batch: StepBatch, old: Column, both_N: Array) -> bool:
    """Whether the old log-probabilities are the rollout's to the last bit: two forwards never are."""
    rollout = batch.columns.of("rollout_logprobs")
    if rollout is None:
        return False
    known_N = both_N & rollout.said_N
    return bool(known_N.any()) and float((rollout.values_N == old.values_N)[known_N].mean()) > 0.99


@rule("D14", "the ratio is not 1 although nothing moves", link="ratio", scope="signals",
      needs=("learning_rate", "clip_fraction|policy_kl"), source="RLinf#1534, verl#6280")  # fmt: skip
def ratio_without_updates(log: RunLog) -> Finding | None:
    """With a learning rate of 0 the weights stay: no token may be clipped, and the policy's KL to itself is 0.

    A clip fraction over .003 or |KL| over 1e-3 at a step whose lr is 0, as the step's before it was (bf16 noise stays
    below), is two forward passes that disagree: other micro-batches, dropout, train against eval mode, or the engine's
    log-probabilities as old ones. So is a KL over 1e-3, or .003 of the tokens clipped, in half of the steps of a run
    that states one update for each batch, and no older samples.
    """
    rate = log.get("learning_rate")
    points = rate.points if rate is not None else ()
    # A rate that comes to 0 is that of the next update, where it is logged after the schedule's step.
    after = {point.step for before, point in pairwise(points) if before.value != 0}
    still = {point.step: point for point in points if point.value == 0 and point.step not in after}
    if rate is not None and still and is_of_decimals(rate.name, *_place(next(iter(still.values())))):
        raise Skip(f"{rate.name} is printed with few decimals: its 0.000 may be 1e-6")
    if still and log.algorithm.takes_engine_as_old:
        raise Skip("the engine's log-probabilities are taken for the old ones: the ratio is off 1 without an update")
    if not still:
        return _moved_in_one_update(log)
    for signal, limit in (("clip_fraction", FEW_CLIPPED), ("policy_kl", SAME_FP32)):
        series = log.get(signal)
        bad = [] if series is None else [p for p in series.points if p.step in still and abs(p.value) > limit]
        if series is not None and bad:
            return warning(
                f"the learning rate is 0, and {series.name} is not",
                series.of(bad),
                series.shown_at(bad[0], "0"),
                cause="old and new log-probabilities come from forward passes that disagree: other micro-batch sizes, "
                "dropout, train against eval mode, or the engine's probabilities",
                next_step="rldbg record -- YOUR COMMAND, then rldbg replay rldbg-dump --rows-per-forward 1",
            )
    return None


def _place(point: Point) -> tuple[str | None, int | None]:
    return point.path, point.line


def _moved_in_one_update(log: RunLog) -> Finding | None:
    """The same of a run that states one update for each batch: the ratio is taken before anything has moved."""
    if not log.algorithm.is_updated_once or log.algorithm.takes_engine_as_old:
        raise Skip("the learning rate is never 0, and no single update of a batch is stated: a ratio may be off 1")
    for signal, limit in (("policy_kl", SAME_FP32), ("clip_fraction", FEW_CLIPPED)):
        series = log.get(signal)
        bad = [] if series is None else [p for p in series.points if abs(p.value) > limit]
        if series is not None and len(bad) >= 3 and 2 * len(bad) >= len(series.points):
            return warning(
                f"the ratio is not 1 in a batch's only update: {series.name} is {bad[0].value:.3g}",
                series.of(bad),
                series.shown_at(bad[0], "0"),
                shown("steps", f"{len(bad)} of {len(series.points)}", "none"),
                cause="old log-probabilities are not this policy's: they are stale, of an earlier step or of older "
                "weights, or come from another forward pass (micro-batch size, dropout, the engine's own)",
                next_step="rldbg record -- YOUR COMMAND, then rldbg diagnose rldbg-dump --rule D14",
            )
    return None


@rule("D24", "the ratio explodes", link="ratio", scope="batch",
      needs=("policy_logprobs|is_ratio", "old_logprobs|is_ratio"),
      source="miles docs (clip fraction 0.2, 0.5); verl rollout_corr (effective sample size)")  # fmt: skip
def exploding(batch: StepBatch) -> Finding | None:
    """Share of tokens with a ratio outside [0.8, 1.2] > 0.5 by 3 of its standard errors (0.8: an error), outside [0.1,
    10] > 0.02 by as many of its own, or effective sample size (sum w)^2 / (n sum w^2) < 0.3 (of CISPO's weights as
    bounded; without the largest weight of each thousand), over tokens that count. Four epochs of a batch
    reach 0.36 in a run that learns. Worth knowing alone where a batch is stated, or recorded, to be used for several
    updates, and the effective sample size is half of it and more: what is pushed far down weighs nothing.
    """
    ratio_N, known_N, source = ratios(batch)
    weights = ratio_N[known_N]
    # Not the run's own range: GSPO clips half of its sequences at 3e-3 on purpose (arXiv 2507.18071, section 5).
    outside = float((np.abs(weights - 1) > 0.2).mean())
    largest = float(weights.max())
    extreme = float(((weights > LARGEST) | (weights < 1 / LARGEST)).mean())
    # CISPO weighs by the ratio as its bound leaves it: one token far past it weighs no more than another.
    algorithm = batch.laid.algorithm
    weighs = algorithm.is_of_weights or algorithm.kind == "cispo"
    most = 1 + algorithm.clip_range[1] if weighs and algorithm.clip_range is not None else math.inf
    # One token in a thousand may be anywhere: what weighs the batch is what is left without it.
    used = np.sort(np.minimum(weights, most))[: weights.size - weights.size // 1000]
    squares = float((used * used).sum())
    effective = float(used.sum()) ** 2 / (used.size * squares) if squares > 0 else 0.0
    # What a share of so few tokens is off by: those of one response move together.
    noise = 3 * math.sqrt(outside * (1 - outside) / weights.size)
    few = 3 * math.sqrt(extreme * (1 - extreme) / weights.size)
    if extreme - few <= EXTREME and outside - noise <= MOSTLY_CLIPPED and effective >= FEW_EFFECTIVE:
        return None
    name = "policy_logprobs" if batch.columns.of("policy_logprobs") else "is_ratio"
    by_design = (algorithm.updates > 1 or _passes_again(batch)) and effective >= EFFECTIVE
    return finding(
        "error" if outside > FAR_GONE else "info" if by_design else "warning",
        f"the policy is far from the one that sampled: {outside:.0%} of tokens have a ratio outside 0.8 to 1.2",
        batch.laid.where(name, at=int(np.flatnonzero(known_N)[weights.argmax()])),
        shown("share outside 0.8 to 1.2", outside, f"<= {MOSTLY_CLIPPED}", source),
        shown("share outside 0.1 to 10", extreme, f"<= {EXTREME}"),
        shown("largest ratio", largest),
        shown("effective sample size", effective, f">= {FEW_EFFECTIVE}"),
        cause="the last of several updates of one batch leave their range, and clipping stops them there; should the "
        "share rise, fewer updates or a lower learning rate"
        if by_design and outside <= FAR_GONE
        else "the learning rate is too high, a batch is used for too many updates, or it is too old",
    )


@rule("D24", "the policy leaves the clip range", link="ratio", scope="signals",
      needs=("clip_fraction|ratio_max|ess|ratio_mean",),
      source="miles docs (pg_clipfrac), verl rollout correction (ESS)")  # fmt: skip
def clipped(log: RunLog) -> Iterator[Finding]:
    """Level (median of the last 10 steps) of the clip fraction: over 0.2 a warning (.36 where a batch is stated, or
    recorded, to be used for several updates), over 0.5 of a range that is stated an error.

    Where the policy hardly moves, GSPO or a clip range is all it can be: a warning, info where no range is stated and
    ratios are within 5 % of 1, as a sequence's are; silent where the run states so small a range. Info, too, where none
    is stated, the fraction stands from the first step on, and the policy's KL to the one that sampled (logged, else of
    the recorded ratios) is .03 and less, or where neither is known, the reward does not fall and the entropy stays
    within half and twice its beginning: a range of .2 leaves .02 times the clipped share at the least, and a batch
    that tears the policy away far more.
    The largest ratio over 10 is a warning, and so is an effective sample size of the importance weights,
    1 / E[(w/E w)^2], under 0.5. Healthy runs stay under 0.2; a single step does not count. Where ratios are
    recorded and fewer than half as many of them lie outside of the stated range, that is not what clips: a warning.
    """
    # A sequence's ratio has a range of its own: GSPO clips half of its tokens on purpose (arXiv 2507.18071, section 5).
    for series, now in () if log.algorithm.is_by_sequence else _share_clipped(log):
        if now > 1 + 1e-6:
            continue  # no fraction: L30 says so
        if now > (CLIPPED_OF_EPOCHS if CLIPPED < now <= CLIPPED_OF_EPOCHS and _is_used_again(log) else CLIPPED):
            reach = _reach(log, series)
            stated = log.algorithm.clip_range
            # A range as small as the moves it cuts off is what the run asks for: GSPO's, whatever it is called.
            if stated is not None and max(stated) < NO_RANGE:
                continue
            hardly = reach is not None and reach < NO_RANGE
            narrow = stated is None and (_is_of_sequences(log, series) or (hardly and given(reach) < OF_SEQUENCES))
            # GSPO learns by what its range leaves.
            narrow = narrow and not (hardly and now > MOSTLY_CLIPPED and _learns_nothing(log))
            outside = None if stated is None else _share_outside(log, stated)
            if stated is not None and outside is not None and outside < FEW_OUTSIDE * now:
                yield warning(
                    f"{now:.0%} of the tokens are clipped, and {outside:.0%} have a ratio outside the stated range: "
                    "the loss clips at a smaller one, or counts otherwise",
                    series.between(over=CLIPPED),
                    series.shown(now, f"<= {outside:.3g}"),
                    shown("share of recorded ratios outside the stated range", outside, None, f"{stated[0]:g}"),
                    cause="the clip range that is configured does not reach the loss (another one does, or a default), "
                    "or the fraction is not over the tokens that count",
                    next_step="print the range where the ratio is clamped; rldbg diagnose --explain D50",
                )
                continue
            yield finding(
                # Where no range is stated, a sequence's may be meant.
                "info" if narrow else "error" if now > MOSTLY_CLIPPED and not hardly and stated else "warning",
                f"{now:.0%} of the tokens are clipped"
                + (
                    f" although the policy hardly moves: ratios of about 1 +- {reach:.2g} are past the clip range, "
                    f"which is too small"
                    if hardly
                    else " from the first step on, and the policy moves as little as an update should"
                    if narrow
                    else ""
                ),
                series.between(over=CLIPPED),
                series.shown(now, f"< {CLIPPED} (bad over {MOSTLY_CLIPPED})"),
                *([shown("sqrt(2 x mean policy KL / clip fraction)", reach, f"> {NO_RANGE:g}")] if hardly else []),
                cause="the clip range (eps) is far too small; or old and new log-probabilities differ by noise that is "
                "no move of the policy: dropout left on, two forwards with other kernels or another order. GSPO alone "
                "has so small a range on purpose"
                if hardly or narrow
                else "learning rate too high, too many updates per batch, stale samples, or an engine that samples "
                "from other probabilities than the trainer's",
                next_step="compare old and new log-probabilities of the first mini-batch: rldbg record -- YOUR "
                "COMMAND, then rldbg diagnose rldbg-dump",
            )
    for series, now in log.level("ratio_max"):
        if now > LARGEST:
            yield warning(
                f"the largest importance ratio is {now:.3g}",
                series.between(over=LARGEST),
                series.shown(now, f"< {LARGEST:g}"),
                cause="the policy is far from the one that sampled: off-policy data, or log-probabilities that do not "
                "belong together",
                next_step="rldbg record -- YOUR COMMAND, then rldbg diagnose rldbg-dump",
            )
    for series, now in log.level("ess"):
        if now < EFFECTIVE:
            yield warning(
                f"importance weights leave {now:.0%} of the samples effective",
                series.between(under=EFFECTIVE),
                series.shown(now, f"> {EFFECTIVE:g}"),
                cause="engine and trainer disagree about the samples' probabilities, or the samples are stale",
                next_step="rldbg record -- YOUR COMMAND, then rldbg diagnose rldbg-dump --rule D09",
            )


#: Of the share that is counted as clipped, what lies outside of the stated range where that is the range: a ratio is
#: clipped on one side alone, so that more are outside than are clipped.
FEW_OUTSIDE = 0.5


def _share_outside(log: RunLog, stated: tuple[float, float]) -> float | None:
    """The share of recorded ratios outside of that range, over the steps whose samples are recorded beside the log."""
    shares = []
    for batch in log.samples():
        if any(map(batch.has, ("policy_logprobs", "is_ratio"))) and any(map(batch.has, ("old_logprobs", "is_ratio"))):
            try:
                ratio_N, known_N, _ = ratios(batch)
            except Skip:
                continue
            weights = ratio_N[known_N]
            if weights.size:
                shares.append(float(((weights < 1 - stated[0]) | (weights > 1 + stated[1])).mean()))
    return median(shares) if shares else None


#: A token's log-probability that moves by that much within one batch is another policy: ratios of 2.7 and more.
TORN = 1.0
#: And in the middle of a run's steps; PPO implementations stop a batch's epochs there. Steps that it needs.
STOPS, LONG = 0.05, 12
#: A learning rate that no recipe for all weights has.
LARGE_RATE = 1e-4
#: And one that no recipe for adapters has.
NO_ADAPTERS = 1e-3
#: Ratios of whole responses, GSPO's, lie nearer to 1 than that.
OF_SEQUENCES = 0.05
#: Clip ranges of published recipes for a token's ratio begin at .1.
NO_RANGE = 0.1
#: What four epochs of a batch come to in a run that learns.
CLIPPED_OF_EPOCHS = 0.36


def _share_clipped(log: RunLog) -> Iterator[tuple[Series, float]]:
    """The clip fraction. A bare `clip_ratio`, as TRL once logged it, is elsewhere the share of responses that were cut
    off: it is none where another clip fraction stands beside it.
    """
    found = [(series, trends.level(series.finite)) for series in log.all("clip_fraction") if series.finite]
    yield from [one for one in found if one[0].name.rpartition("/")[2] != "clip_ratio"][:1] or found[:1]


def _is_used_again(log: RunLog) -> bool:
    """Whether a batch is trained on in several passes, as the run states or its samples show."""
    return log.algorithm.updates > 1 or any(map(_passes_again, log.samples()))


def _passes_again(batch: StepBatch) -> bool:
    """Whether its samples show that it is trained on in several passes."""
    return any(
        len(sheet) >= 2 * len(batch.spine) or any((part.held.record.key.epoch or 0) > 0 for part in sheet.parts)
        for sheet, _ in batch.columns.sheets
    )


def _learns_nothing(log: RunLog) -> bool:
    """Whether the reward of 12 steps and more does not rise, and the KL to the reference, if it is logged, is small."""
    reward, far = log.get("reward"), log.get("kl")
    stands = reward is not None and len(reward.finite) >= 12 and not trends.rises(reward.finite)
    return stands and (far is None or not far.finite or trends.level(far.finite) < SAME_FP32)


def _reach(log: RunLog, clipped: Series) -> float | None:
    """How far from 1 the clipped ratios are on average, at most: KL to the old policy is half the mean square of their
    logarithms, and the clipped share alone makes all of it. The mean over all steps: k1's noise cancels.
    """
    moved = log.get("policy_kl")
    if moved is None or len(moved.finite) < 8 or not any(moved.finite):
        return None
    share = sum(clipped.finite) / len(clipped.finite)
    return math.sqrt(2 * abs(sum(moved.finite) / len(moved.finite)) / share) if share else None


#: The policy's KL over a batch that adaptive rates and early stops aim at (.01 to .03).
USUAL_KL = 0.03


def _is_of_sequences(log: RunLog, clipped: Series) -> bool:
    """Whether a clip fraction looks like that of a range made for whole responses: it stands from the first step on, as
    every token after a batch's first update is past it, and the policy moves no more than recipes let it.
    """
    values = clipped.finite
    if len(values) < trends.MIN_STEPS or min(values[:STEPS]) < 0.8 * trends.level(values) or trends.rises(values):
        return False
    moved = log.get("policy_kl")
    if moved is not None:
        return bool(moved.finite) and abs(sum(moved.finite) / len(moved.finite)) <= USUAL_KL
    found = []
    for batch in log.samples():
        try:
            ratio_N, known_N, _ = ratios(batch)
        except Skip:
            continue
        logs = np.log(np.maximum(ratio_N[known_N], 1e-30))
        found.append(float((logs * logs).mean()) / 2)
    if found:
        return float(np.median(found)) <= USUAL_KL
    # Neither is known: a policy that is torn away loses its reward, its entropy or its gradient.
    reward, entropy = log.get("reward"), log.get("entropy")
    if reward is None or entropy is None or trends.rises([-value for value in reward.finite]):
        return False
    begun = trends.level(entropy.finite[:STEPS])
    return 0.5 * begun < trends.level(entropy.finite, STEPS) < 2 * begun


#: A mean |log ratio| that a range of .2 cannot leave alone, in so many steps.
UNBOUND, STEPS = 0.25, 3


@rule("L21", "nothing is clipped, however far the policy moves", link="trend", scope="signals",
      needs=("policy_kl", "clip_fraction"), lasts=True,
      explains=("D01", "D03", "D15", "D20", "D24", "D25", "L02", "L08", "L09", "L10", "L16", "L17"),
      source="arXiv 1707.06347 equation 7")  # fmt: skip
def never_clips(log: RunLog) -> Finding | None:
    """The clip fraction exactly 0 in every step, and the policy's KL to the one that sampled over .25 nats in 3 and
    more: an error. A mean log ratio of -.25 is past a range of .2. Not for CISPO and REINFORCE, which clip no ratio.
    """
    moved, clipped = given(log.get("policy_kl")), given(log.get("clip_fraction"))
    far = [point for point in moved.points if math.isfinite(point.value) and point.value > UNBOUND]
    if log.algorithm.estimator.startswith("reinforce") or log.algorithm.kind == "cispo":
        raise Skip("the stated algorithm does not clip its ratio below")
    if len(far) < STEPS or not clipped.finite or any(clipped.finite):
        return None
    return error(
        f"nothing is ever clipped although the policy moves {far[0].value:.2g} nats per token within one batch",
        moved.of(far),
        moved.shown_at(far[0], "< 0.05"), clipped.shown(0.0, "> 0 at such a move"),
        shown("steps that move so far", len(far)),
        cause="the clip range is not in effect: it is far too wide, or the unclipped loss is used, and the batch's own "
        "updates carry the policy away",
        next_step="rldbg record -- YOUR COMMAND, then rldbg diagnose rldbg-dump --rule D50",
    )  # fmt: skip


#: A distance to 1 from which a clip range leaves every ratio alone: below, and for both sides of one that a recipe may
#: have wide above (CISPO's is 5). What is wider than the last is no percentage, and clipping is turned off on purpose.
ALL_BELOW, ALL_ABOVE, TURNED_OFF = 1.0, 10.0, 100.0


@rule("L21", "the clip range that is stated clips nothing", link="trend", scope="case", lasts=True,
      source="arXiv 1707.06347: ranges of .1 to .3; DAPO .2 and .28, CISPO up to 5")  # fmt: skip
def clips_nothing(case: Case) -> Finding | None:
    """A stated clip range of 1 and more on both sides, or of 10 and more above (and of no more than 100, which turns it
    off on purpose), while ratios leave .8 to 1.2, or a batch has several updates: an error. A ratio is never below 0,
    so that a range of 1 leaves all of them alone. Not for REINFORCE and CISPO.
    """
    algorithm = Algorithm(stated_by(case.run))
    low, high = algorithm.clip_range or (0.0, 0.0)
    unbound = (min(low, high) >= ALL_BELOW or high >= ALL_ABOVE) and max(low, high) <= TURNED_OFF
    if not unbound or algorithm.estimator.startswith("reinforce") or algorithm.is_of_weights:
        return None
    moved = next((found for batch in case.batches() if (found := _far_ratio(batch)) is not None), None)
    if moved is None and algorithm.updates < 2:
        return None
    place, ratio = moved or (Where(), None)
    return error(
        f"the clip range is {low:g}"
        + (f" and {high:g}" if high != low else "")
        + ": nothing can be clipped"
        + ("" if low >= ALL_BELOW else " above")
        + f", and {max(low, high) / 100:g} is most likely meant",
        place,
        shown("clip range that is stated", max(low, high), "0.1 to 0.3"),
        *([shown("a ratio that is not clipped", ratio)] if ratio is not None else []),
        cause="a percentage stands where a share is meant: the ratio is bounded by 1 - eps and 1 + eps, and a batch's "
        "own updates carry the policy as far as they like",
        next_step=f"state {max(low, high) / 100:g}; rldbg diagnose --explain L21",
    )


def _far_ratio(batch: StepBatch) -> tuple[Where, float] | None:
    """Where a ratio is furthest from 1, and what it is; None where all are within .8 to 1.2, or none is known."""
    try:
        ratio_N, known_N, _ = ratios(batch)
    except Skip:
        return None
    logs_N = np.where(known_N, np.abs(np.log(np.maximum(ratio_N, 1e-30))), 0.0)
    at = int(np.nan_to_num(logs_N).argmax())
    name = "policy_logprobs" if batch.columns.of("policy_logprobs") else "is_ratio"
    return (batch.laid.where(name, at=at), float(ratio_N[at])) if abs(ratio_N[at] - 1) > 0.2 and known_N[at] else None


@rule("L16", "a batch's own updates tear the policy away", link="trend", scope="signals", needs=("policy_kl",),
      lasts=True,
      explains=("D01", "D03", "D20", "D24", "D25", "L08", "L09", "L10"),
      source="PPO implementations stop a batch's epochs at a KL of 0.01 to 0.05")  # fmt: skip
def torn(log: RunLog) -> Finding | None:
    """KL of the policy to the one that sampled, over 1 nat per token in any step: an error, worth knowing where it is
    in one step of 20 and less and more than half of the reward is left behind it. Over .05 in the middle of
    12 steps and more, with a logged learning rate of 1e-4 and more, a reward that does not rise and no older samples
    stated: a warning.
    """
    series = given(log.get("policy_kl"))
    bad = [point for point in series.points if math.isfinite(point.value) and abs(point.value) > TORN]
    if bad:
        # One batch of a long run that the reward does not feel is a spike; what lasts or is lost with it is more.
        once = len(bad) * ONCE <= len(series.finite) and not _is_lost_after(log, bad[0].step)
        return finding(
            "info" if once else "error",
            f"the policy moves {abs(bad[0].value):.3g} nats per token within one batch"
            + (f", in {len(bad)} of {len(series.finite)} steps" if once else ": its own updates tear it away"),
            series.of(bad),
            series.shown_at(bad[0], "< 0.05"),
            cause=_MOVES_FAR,
            next_step="look at grad_norm, clip fraction and the largest advantage of that step; stop a batch's epochs "
            "at a KL of 0.05",
        )
    sizes = [abs(value) for value in series.finite]
    rate, reward = log.get("learning_rate"), log.get("reward")
    if len(sizes) < LONG or median(sizes) < STOPS or rate is None or not rate.finite or reward is None:
        return None
    # Of older samples the distance is not the update's; at a small rate it has another cause.
    if log.algorithm.is_off_policy or max(rate.finite) < LARGE_RATE:
        return None
    clipped = log.get("clip_fraction")
    is_torn = clipped is not None and bool(clipped.finite) and median(clipped.finite) > CLIPPED
    # A task that is solved has a reward that does not rise, and an adapter has such a rate (LoRA).
    is_worse = is_torn or trends.rises([-value for value in reward.finite]) or max(rate.finite) > NO_ADAPTERS
    if not reward.finite or trends.rises(reward.finite) or not is_worse:
        return None
    return warning(
        f"the policy moves {median(sizes):.2g} nats per token within each batch ({series.name}) at a learning rate of "
        f"{max(rate.finite):.2g}, and the reward does not rise",
        series,
        series.shown(median(sizes), f"< {STOPS:g}"), rate.shown(max(rate.finite)),
        reward.shown(median(reward.finite)),
        *([clipped.shown(median(clipped.finite))] if clipped is not None and clipped.finite else []),
        cause="each batch's updates go far past what the clip range is to hold them to. " + _MOVES_FAR,
        next_step="stop a batch's epochs at a KL of 0.05; if a tenth of the learning rate learns no better, look at "
        "advantages and loss: rldbg record -- YOUR COMMAND, then rldbg diagnose rldbg-dump",
    )  # fmt: skip


#: In at most one of so many steps a leap is one batch's; what is left of the reward where it is lost with it.
ONCE, LEFT_OF_REWARD = 20, 0.5
_MOVES_FAR = (
    "The learning rate is too high, or a batch is used for too many updates; or what is learnt from it is too large or "
    "wrong (advantages that are not centred, a sign, a ratio or a clipping that is made wrongly): the KL alone does "
    "not tell which"
)


def _is_lost_after(log: RunLog, step: int | None) -> bool:
    """Whether half and less of the reward is left behind a step, and stays so; or no reward tells."""
    reward = log.get("reward")
    points = [] if reward is None else [p for p in reward.points if p.step is not None and math.isfinite(p.value)]
    before = [p.value for p in points if step is not None and (p.step or 0) <= step]
    after = [p.value for p in points if step is not None and (p.step or 0) > step]
    if len(before) < 3 or len(after) < 3:
        return True
    least = min(p.value for p in points)
    return median(after) - min(least, 0.0) < LEFT_OF_REWARD * (median(before) - min(least, 0.0))


@rule("L16", "a batch's own updates tear the policy away", link="trend", scope="batch",
      needs=("policy_logprobs", "old_logprobs"), source="PPO implementations stop at a KL of 0.01 to 0.05")  # fmt: skip
def torn_away(batch: StepBatch) -> Finding | None:
    """mean |policy - old| over 1 nat per token in a later update of a batch (its first update is D14's): an error."""
    policy, old, _ = _pair(batch)
    # Every epoch is a row of its own; the first ones have not moved yet.
    both_N = batch.pair(policy, old) & ~before_any_update_N(batch)
    skip_if(both_N.sum() < FEWEST, "one update for each batch")
    moved = np.abs(policy.values_N - old.values_N)[both_N]
    worst, at = float(moved.mean()), int(np.flatnonzero(both_N)[moved.argmax()])
    if worst > TORN:
        return error(
            f"the policy moves {worst:.3g} nats per token within one batch: its own updates tear it away",
            batch.laid.where("policy_logprobs", at=at),
            shown("mean |policy - old|, nats", worst, "< 0.2", f"{policy.source} and {old.source}"),
            cause="the learning rate is far too high, or a batch is used for too many updates",
            next_step="lower the learning rate ten times; stop a batch's epochs at a KL of 0.05",
        )
    return None
