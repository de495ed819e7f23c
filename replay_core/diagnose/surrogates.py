"""The loss of every token by every known way to make it, right ones and wrong ones, held against what was logged.

A logged policy loss is a reduction of its tokens. Which reduction, and which factor, is another question
(`rules/loss.py`): here a way to make a token's loss fits if one factor makes it the logged loss of every micro-batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct

from replay_core.diagnose.algorithm import RESPONSE_LIMITS, Algorithm, is_by_token, stated_number
from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.flat import Array
from replay_core.diagnose.rule import Skip
from replay_core.diagnose.rules.ratio import ratios
from replay_core.objectives import policy_loss

if TYPE_CHECKING:
    from replay_core.documents.diagnosis import Severity

#: Clip ranges of published recipes (low, high): PPO, DAPO, tighter and wider ones, GSPO's.
RANGES = ((0.2, 0.2), (0.2, 0.28), (0.1, 0.1), (0.3, 0.3), (0.2, 0.3), (0.2, 0.4), (3e-4, 4e-4), (3e-3, 4e-3))
#: Where the loss of a negative advantage is cut besides, in times the advantage (dual clip), and how runs state it.
DUAL = 3.0
_DUAL_WORDS = ("clip_ratio_c", "dual_clip", "dual_clip_c", "eps_clip_c", "clip_dual", "dual_clip_ratio")
#: Where it is cut by mistake: constants that are no published ones, and a ratio's own bounds.
_DUALS = (*(round(1 + 0.05 * step, 2) for step in range(41)), 3.5, 4.0, 5.0, 8.0, 10.0, 20.0)
_DUAL_AT = "the dual clip acts at "
_OF_DUAL = (
    "the constant that is configured does not reach the loss, or another bound (the clip range) is handed over in its "
    "place: of a negative advantage whatever has a ratio above it has no gradient, and bad answers are not pushed down"
)
#: Relative agreement of a recomputed loss in every micro-batch; those below the second are rounding.
CLOSE, FLOOR = 2e-4, 1e-6
#: Micro-batches that must agree before a free factor is no chance.
FEWEST = 3
REINFORCE = "-A log p, as REINFORCE's: neither a ratio nor a clip range stands in it"
_OVER_WIDTH = (
    "a sequence's log ratio is divided by one length for all (the limit of a response, or the padded row), not by its "
    "own tokens"
)
_UPSIDE_DOWN = "the ratio is upside down, old over new"
_SMALLER = "the smaller of clipped and unclipped loss is taken, not the larger"
_SIGN = "the sign is wrong: it is +A x ratio, and falls with the advantage"
SUMMED = "a sequence's ratio is e to the sum of its log ratios, not to their mean: it is not normalised by length"
_SIZE = "the size of the advantage stands in it, without its sign"
_UP = "only positive advantages count, negative ones are 0"
_DOWN = "only negative advantages count, positive ones are 0"
_SQUARED = "the advantage stands in it twice (squared)"
_OTHER_ROW = "each row has the advantage of another row of its micro-batch"
_REWARD = "the reward stands in it, not the advantage"
_TOKEN_BEFORE = "each token has the advantage of the token before"
_TOKEN_AFTER = "each token has the advantage of the token after"
_RETURN = "the return stands in it, not the advantage"
_VALUE = "the value stands in it, not the advantage"
_NO_ADVANTAGE = "the advantage is missing: every token is pushed alike"
_LOG = "the exponential is missing: the logarithm of the ratio stands for the ratio"
_RATIO_SQUARED = "the ratio stands in it twice (squared)"
_ALWAYS = "the clipped loss alone is taken, not the larger of clipped and unclipped"
_UNWEIGHING = (
    "the bounded ratio times the advantage stands alone, without the log-probability that CISPO weighs with it"
)
_AROUND_0 = "the clip range lies around 0, not around 1: nearly every token is cut off"
_ABOVE_ALONE = "the ratio is clipped above alone, and not below"
_BELOW_ALONE = "the ratio is clipped below alone, and not above"
_SWAPPED = "the two clip ranges are swapped: the lower stands above, the higher below"
_DUAL_OF_ALL = "the dual clip cuts positive advantages, too: their loss is a constant times the advantage"
_WEIGHT_SQUARED = "the importance weight stands in it twice (squared)"
_UNCAPPED = "the weight of a log-probability (CISPO) is the bare ratio, and never cut off"
_WEIGHT_INVERTED = "the importance weight is upside down, rollout over trainer"
_MASK_INVERTED = "the importance mask is turned around: weights within its bounds are 0, those outside of it are kept"
_CORRECTED_TWICE = (
    "the rollout is corrected for twice: the ratio is taken to the rollout's log-probabilities, and an importance "
    "weight (trainer over rollout) multiplies it"
)
_OF_ENGINE = "the ratio is taken to the rollout's log-probabilities, not to the old ones that are recorded"
_CAUSES = {
    _OVER_WIDTH: "GSPO takes the mean over the tokens that count: a sum over them that is divided by the row's width "
    "leaves every ratio nearer to 1, most of all those of short responses, and hardly any is clipped",
    _SIZE: "an absolute value is taken: what is worse than the others is pushed up, too",
    _UP: "a clamp (relu, max with 0) before the loss: bad answers are never pushed down",
    _DOWN: "a clamp (min with 0) before the loss: good answers are never pushed up",
    _SQUARED: "it is multiplied in at two places",
    _OTHER_ROW: "advantages were not shuffled (sorted, packed) with the rows they belong to",
    _REWARD: "advantages are computed, recorded, and not used",
    _TOKEN_BEFORE: "advantages are shifted by one against the log-probabilities",
    _TOKEN_AFTER: "advantages are shifted by one against the log-probabilities",
    _RETURN: "another tensor is handed to the loss: the baseline is not in it",
    _VALUE: "another tensor is handed to the loss",
    _NO_ADVANTAGE: "advantages are computed, recorded, and not multiplied in",
    _LOG: "log pi - log pi_old is used as it is",
    _RATIO_SQUARED: "it is multiplied in at two places",
    _ALWAYS: "the maximum of the two losses is missing: a token outside of the range never has a gradient, and one "
    "that went the wrong way stays there",
    _UNWEIGHING: "a bounded ratio has no gradient where it is cut off, and PPO's where it is not: CISPO keeps the "
    "gradient of every token's log-probability, and bounds its weight alone (stop-gradient)",
    _AROUND_0: "clamp(ratio, -eps, eps) stands for clamp(ratio, 1 - eps, 1 + eps)",
    _ABOVE_ALONE: "one bound of the clamp is missing",
    _BELOW_ALONE: "one bound of the clamp is missing",
    _DUAL_OF_ALL: "the smaller of the clipped loss and that constant is taken whatever the advantage's sign is: a good "
    "answer's loss never depends on the policy, and it is never pushed up",
    _SWAPPED: "clip_low and clip_high are handed over in the wrong order",
    _OF_ENGINE: "the engine's numbers are handed over as the old policy's: rounding between engine and trainer is "
    "taken for a step of the policy",
    _WEIGHT_SQUARED: "the correction is multiplied in at two places: into the advantage and into the loss, or in both "
    "of two helpers",
    _WEIGHT_INVERTED: "the difference of log-probabilities is taken the wrong way round: tokens that the engine found "
    "too probable are weighted up, not down",
    _MASK_INVERTED: "the condition of the mask is negated: what is rejected is what was to be kept",
    _CORRECTED_TWICE: "one of the two is meant: the ratio to the old log-probabilities times the weight, or the ratio "
    "to the rollout alone",
    _UNCAPPED: "the clamp of the weight is missing, or its result is not used: one token may outweigh all others",
    _UPSIDE_DOWN: "exp(old - new) stands for exp(new - old)",
    _SMALLER: "min stands for max: of a loss (a negated objective) the larger one is the pessimistic one, and clipping "
    "is on the wrong side",
    _SIGN: "the loss is not negated, or negated twice: the policy learns to avoid what is rewarded",
    SUMMED: "GSPO takes the length-normalised ratio, the geometric mean of a response's token ratios",
}
#: Mistakes of the ratio and its range: they come before what a policy that leaves its range looks like.
_OF_RATIO = {
    _UPSIDE_DOWN, SUMMED, _LOG, _RATIO_SQUARED, _ALWAYS, _UNWEIGHING, _AROUND_0, _ABOVE_ALONE, _BELOW_ALONE, _SWAPPED,
    _OF_ENGINE, _OVER_WIDTH, _SMALLER, _DUAL_OF_ALL, _WEIGHT_SQUARED, _UNCAPPED, _WEIGHT_INVERTED, _MASK_INVERTED,
    _CORRECTED_TWICE,
}  # fmt: skip


class Surrogate(Struct, frozen=True):
    """One way to make the loss of a token [N]. `mistake` says what is wrong with it, empty where nothing is.
    `clip`: the range it is clipped at, None where it is not clipped.
    """

    values_N: Array
    clip: tuple[float, float] | None = None
    mistake: str = ""
    is_ratio: bool = True
    """Whether the ratio stands in it at all."""
    how: str = ""
    """What it is, where the range alone does not say it."""

    @property
    def cause(self) -> str:
        return _OF_DUAL if self.mistake.startswith(_DUAL_AT) else _CAUSES[self.mistake]

    def severity(self, algorithm: Algorithm) -> Severity:
        """An error contradicts the estimator, or the clip range, that is stated; what some algorithm makes on purpose,
        and nothing that is stated forbids, is worth knowing.
        """
        meant = {
            # RLOO's ratio is a whole response's (TRL); GSPO's is normalised by its length.
            SUMMED: not algorithm.is_by_sequence and not is_by_token(algorithm),
            # Positive answers alone (RAFT, rejection sampling), and rewards that stand for advantages (REINFORCE).
            **dict.fromkeys((_UP, _REWARD), algorithm.estimator in ("", "reinforce")),
            # One side alone is clipped by some; the engine's own numbers are a bypass of the trainer's forward.
            **dict.fromkeys((_ABOVE_ALONE, _BELOW_ALONE, _ALWAYS), algorithm.clip_range is None),
            # The plain gradient of samples of an older policy is weighted by the whole ratio.
            _UNCAPPED: not (algorithm.is_of_weights and algorithm.clip_range is not None),
            # With weights of an older engine it is what corrects for them; of a run that states nothing, anything is.
            _OF_ENGINE: algorithm.takes_engine_as_old is True
            or algorithm.is_off_policy
            or (algorithm.takes_engine_as_old is None and not algorithm.estimator),
        }
        if self.mistake.startswith(_DUAL_AT):
            return "error" if dual_clip(algorithm) else "info"
        if self.mistake == _OF_ENGINE and algorithm.takes_engine_as_old is None and not meant[_OF_ENGINE]:
            return "warning"
        return "info" if meant.get(self.mistake) else "error"

    @property
    def link(self) -> str:
        """Where in the chain the mistake is."""
        return "ratio" if self.mistake in _OF_RATIO or self.mistake.startswith(_DUAL_AT) else "loss"


def dual_clip(algorithm: Algorithm) -> float | None:
    """Where a run states that the loss of a negative advantage is cut, in times the advantage; None where nowhere."""
    stated = algorithm.number(*_DUAL_WORDS)
    return stated if stated and stated > 1 else None


def by_sequence(batch: StepBatch, ratio_N: Array, known_N: Array, *, summed: bool = False) -> Array:
    """GSPO's ratio: e to the mean (or the sum) of a sample's log ratios, for each of its tokens."""
    logs_N = np.where(known_N, np.log(np.maximum(np.where(known_N, ratio_N, 1.0), 1e-30)), 0.0)
    logs_B = np.clip(batch.flat.sum(logs_N), -50, 50) if summed else np.nan_to_num(batch.flat.mean(logs_N, known_N))
    return np.repeat(np.exp(logs_B), batch.flat.lengths_B)


class Weighing(Struct, frozen=True):
    """Importance weights [N] that a run states. `right`: the recorded ones, else those that recipes make of its
    log-probabilities; `mask_N`: the tokens that a mask keeps, where one is stated.
    """

    is_recorded: bool

    logs_N: Array
    """log trainer - log rollout."""
    right: tuple[Array, ...]
    mask_N: Array | None


_WEIGHTS_KIND = (
    "rollout_is", "is_correction", "rollout_rs", "is_correction_type", "vllm_is_correction_type",
    "truncated_importance_sampling_type",
)  # fmt: skip
#: How far from 1 the weights have to be on a token before they tell.
TELLS = 1e-2


def weighing(batch: StepBatch) -> Weighing | None:
    """The weights that are recorded, or that the settings ask for; None where there are none, or all are 1."""
    algorithm = batch.laid.algorithm
    rollout, recorded = batch.columns.of("rollout_logprobs"), batch.columns.of("is_weights")
    old = batch.columns.of("old_logprobs") or batch.columns.of("policy_logprobs")
    if (recorded is None and algorithm.is_weighed is not True) or rollout is None or old is None:
        return None
    both_N = batch.pair(old, rollout)
    logs_N = np.where(both_N, np.clip(np.nan_to_num(old.values_N - rollout.values_N), -20, 20), 0.0)
    cap = algorithm.weight_bounds[1]
    words = " ".join(algorithm.word(name) for name in _WEIGHTS_KIND)
    masks = "mask" in words or "mis" in words.split() or "icepop" in words
    sums_N = np.repeat(np.clip(batch.flat.sum(logs_N), -20, 20), batch.flat.lengths_B)
    means_N = np.repeat(np.nan_to_num(batch.flat.mean(logs_N, both_N)), batch.flat.lengths_B)
    kinds = (sums_N, means_N, logs_N) if "seq" in words else (logs_N, sums_N, means_N)
    if not float(np.abs(np.expm1(logs_N)).max(initial=0.0)) > TELLS and not masks:
        return None
    floor = algorithm.weight_bounds[0] or 0.0
    least = np.log(floor) if floor > 0 else -np.log(cap) if cap else -np.inf
    # What is rejected as a whole is so by the mean over its tokens; what is left has each token's own weight.
    judged_N = means_N if "seq-mask" in words else logs_N
    inside_N = (judged_N >= least) & (judged_N <= np.log(cap)) if masks and cap and cap > 1 else None
    if recorded is not None:
        own_N = np.where(recorded.said_N, np.nan_to_num(recorded.values_N), 1.0)
        return Weighing(True, logs_N, (own_N,), inside_N)
    if inside_N is not None:
        return Weighing(False, logs_N, (np.exp(logs_N) * inside_N, inside_N.astype(np.float64)), inside_N)
    return Weighing(False, logs_N, tuple(np.clip(np.exp(one), floor, cap or np.inf) for one in kinds), None)


def surrogates(batch: StepBatch) -> Iterator[Surrogate]:
    """Every way, the right ones first: those of the stated algorithm before others.

    Raises:
        Skip: no ratio is recorded, nor log-probabilities it can be made of.
    """
    column = batch.columns.of("advantages")
    if column is None:
        raise Skip("no advantages are recorded")
    a_N = np.where(column.said_N, np.nan_to_num(column.values_N), 0.0)
    found_N, known_N, _ = ratios(batch)
    r_N = np.where(known_N, found_N, 1.0)
    logprobs = batch.columns.of("policy_logprobs")
    logp_N = None if logprobs is None else np.where(logprobs.said_N, np.nan_to_num(logprobs.values_N), 0.0)
    weights = batch.columns.of("is_weights")
    every_w: list[Array | float] = [1.0]
    if weights is not None:
        every_w.insert(0, np.where(weights.said_N, np.nan_to_num(weights.values_N), 1.0))
    derived = weighing(batch)
    if derived is not None and not derived.is_recorded:
        every_w = [*derived.right, 1.0]
    stated = batch.laid.algorithm.clip_range
    ranges = (*((stated,) if stated else ()), *RANGES, (0.0, 0.0))
    kinds = [r_N, by_sequence(batch, r_N, known_N)]
    duals = dict.fromkeys((dual_clip(batch.laid.algorithm) or DUAL, DUAL))
    for w in every_w:
        for ratio_N in kinds[::-1] if batch.laid.algorithm.is_by_sequence else kinds:
            for low, high in ranges:
                plain_N = policy_loss.clipped(ratio_N, a_N, clip_low=low, clip_high=high)
                yield Surrogate(w * plain_N, (low, high))
                for most in duals:
                    yield Surrogate(w * np.where(a_N < 0, np.minimum(plain_N, -most * a_N), plain_N), (low, high))
                # CISPO's; without a range no ratio is left of it.
                if logp_N is not None and high:
                    yield Surrogate(-w * ratio_N.clip(1 - low, 1 + high) * a_N * logp_N, (low, high))
                    yield Surrogate(-w * np.minimum(ratio_N, 1 + high) * a_N * logp_N, (low, high))
            yield Surrogate(-w * a_N * ratio_N)
        yield Surrogate(-w * a_N, is_ratio=False)
        if logp_N is not None:
            yield Surrogate(-w * a_N * logp_N, is_ratio=False, how=REINFORCE)
    sum_N = by_sequence(batch, r_N, known_N, summed=True)
    for w in every_w:
        for low, high in ranges:
            inverse_N = 1 / np.maximum(r_N, 1e-30)
            yield Surrogate(
                w * policy_loss.clipped(inverse_N, a_N, clip_low=low, clip_high=high), (low, high), _UPSIDE_DOWN
            )
            least_N = np.minimum(-a_N * r_N, -a_N * r_N.clip(1 - low, 1 + high))
            yield Surrogate(w * least_N, (low, high), _SMALLER)
            for ratio_N in kinds:
                plain_N = policy_loss.clipped(ratio_N, a_N, clip_low=low, clip_high=high)
                yield Surrogate(-w * plain_N, (low, high), _SIGN)
            for most in duals:
                whole_N = policy_loss.clipped(r_N, a_N, clip_low=low, clip_high=high)
                yield Surrogate(w * np.minimum(whole_N, -most * a_N), (low, high), _DUAL_OF_ALL)
            yield Surrogate(w * policy_loss.clipped(sum_N, a_N, clip_low=low, clip_high=high), (low, high), SUMMED)
        yield Surrogate(w * a_N * r_N, None, _SIGN)
    if weights is not None:
        for low, high in ranges:
            twice_N = every_w[0] ** 2 * policy_loss.clipped(r_N, a_N, clip_low=low, clip_high=high)
            yield Surrogate(twice_N, (low, high), _WEIGHT_SQUARED)
    if derived is not None:
        yield from _wrongly_weighed(batch, derived, a_N, r_N, ranges[:2])
    if logp_N is not None and float(np.abs(r_N - 1).max(initial=0.0)) > 1e-3:
        for w in every_w:
            yield Surrogate(-w * r_N * a_N * logp_N, None, _UNCAPPED)
    if batch.laid.algorithm.is_by_sequence:
        for over_N in _over_widths(batch, sum_N):
            for low, high in ranges:
                plain_N = policy_loss.clipped(over_N, a_N, clip_low=low, clip_high=high)
                yield Surrogate(plain_N, (low, high), _OVER_WIDTH)
    yield from _of_other_advantages(batch, a_N, r_N, ranges[:1])
    yield from _of_other_ratios(batch, a_N, r_N, known_N, ranges)
    for w in every_w:
        yield from _of_other_duals(batch, w, a_N, r_N, ranges[0])


def _of_other_duals(
    batch: StepBatch, w: Array | float, a_N: Array, r_N: Array, clip: tuple[float, float]
) -> Iterator[Surrogate]:
    """A dual clip at another constant than the stated one, as far as ratios of negative advantages come to it."""
    stated = dual_clip(batch.laid.algorithm)
    largest = float(r_N[a_N < 0].max(initial=0.0))
    plain_N = policy_loss.clipped(r_N, a_N, clip_low=clip[0], clip_high=clip[1])
    for most in _DUALS:
        if most < largest and most not in (stated, DUAL):
            cut_N = np.where(a_N < 0, np.minimum(plain_N, -most * a_N), plain_N)
            beside = "" if stated is None else f", and the run states {stated:g}"
            what = f"{_DUAL_AT}{most:g}{beside}: losses of negative advantages are cut at {most:g} times the advantage"
            yield Surrogate(w * cut_N, clip, what)


def _over_widths(batch: StepBatch, sum_N: Array) -> Iterator[Array]:
    """A sequence's ratio with its log ratios' sum over one length for all: the stated limit, the row's, the longest."""
    counted_N = batch.trained_N
    longest = 0 if counted_N is None else int(batch.flat.count(counted_N).max(initial=0))
    limit = stated_number(batch.laid.stated, *RESPONSE_LIMITS)
    widths = {int(limit) if limit else 0, longest, *(batch.laid.widths or {}).values()}
    for width in sorted(one for one in widths if one > 1):
        yield np.exp(np.log(np.maximum(sum_N, 1e-30)) / width)


def _wrongly_weighed(
    batch: StepBatch, derived: Weighing, a_N: Array, r_N: Array, ranges: tuple[tuple[float, float], ...]
) -> Iterator[Surrogate]:
    """Weights that are stated and applied by mistake: twice, upside down, their mask turned around."""
    policy, rollout = batch.columns.of("policy_logprobs"), batch.columns.of("rollout_logprobs")
    beyond_N = np.exp(np.clip(derived.logs_N, -20, 20))
    engine_N = None
    if policy is not None and rollout is not None:
        both_N = batch.pair(policy, rollout)
        engine_N = np.where(both_N, np.exp(np.clip(np.nan_to_num(policy.values_N - rollout.values_N), -20, 20)), 1.0)
    cap = batch.laid.algorithm.weight_bounds[1] or np.inf
    for low, high in ranges:
        plain_N = policy_loss.clipped(r_N, a_N, clip_low=low, clip_high=high)
        if derived.mask_N is not None:
            out_N = ~derived.mask_N
            yield Surrogate(out_N * plain_N, (low, high), _MASK_INVERTED)
            yield Surrogate(out_N * beyond_N * plain_N, (low, high), _MASK_INVERTED)
        for w in derived.right:
            if not derived.is_recorded:
                yield Surrogate(w**2 * plain_N, (low, high), _WEIGHT_SQUARED)
            if engine_N is not None:
                ratio_N = policy_loss.clipped(engine_N, a_N, clip_low=low, clip_high=high)
                yield Surrogate(w * ratio_N, (low, high), _CORRECTED_TWICE)
                yield Surrogate(-w * a_N * engine_N, None, _CORRECTED_TWICE)
        if derived.mask_N is None:
            yield Surrogate(np.minimum(1 / np.maximum(beyond_N, 1e-9), cap) * plain_N, (low, high), _WEIGHT_INVERTED)


def _of_other_advantages(
    batch: StepBatch, a_N: Array, r_N: Array, ranges: tuple[tuple[float, float], ...]
) -> Iterator[Surrogate]:
    """What stands for the advantage: none, its size, one side of it, its square, another sample's, another tensor."""
    flat = batch.flat
    each_B = batch.advantage_B
    others: list[tuple[str, Array]] = [
        (_SIZE, np.abs(a_N)), (_UP, np.maximum(a_N, 0.0)), (_DOWN, np.minimum(a_N, 0.0)), (_SQUARED, a_N * np.abs(a_N)),
    ]  # fmt: skip
    if each_B is not None and np.isfinite(each_B).all():
        # Rows of a micro-batch stand together: what is rolled is rolled within it.
        for by in (1, -1):
            moved_B = each_B.copy()
            for rows in batch.laid.rows_by_micro().values():
                moved_B[rows] = np.roll(each_B[rows], by)
            others.append((_OTHER_ROW, np.repeat(moved_B, flat.lengths_B)))
        if batch.reward_B is not None and np.isfinite(batch.reward_B).all():
            others.append((_REWARD, np.repeat(batch.reward_B, flat.lengths_B)))
    else:
        inside_N = np.ones(len(a_N), dtype=bool) if batch.trained_N is None else batch.trained_N
        at, sample_N = np.flatnonzero(inside_N), flat.sample_N
        for by, word in ((1, _TOKEN_BEFORE), (-1, _TOKEN_AFTER)):
            moved_N = np.zeros(len(a_N))
            near = np.roll(at, by)
            same = sample_N[near] == sample_N[at]
            moved_N[at[same]] = a_N[near[same]]
            others.append((word, moved_N))
        for name, word in (("returns", _RETURN), ("values", _VALUE)):
            column = batch.columns.of(name)
            if column is not None:
                others.append((word, np.where(column.said_N, np.nan_to_num(column.values_N), 0.0)))
    for what, other_N in others:
        if not np.ptp(other_N) > 0:
            continue
        for low, high in ranges:
            yield Surrogate(policy_loss.clipped(r_N, other_N, clip_low=low, clip_high=high), (low, high), what)
        yield Surrogate(-other_N * r_N, None, what)
    moved = float(np.abs(r_N - 1).max(initial=0.0)) > 1e-3
    if moved:
        yield Surrogate(-r_N, None, _NO_ADVANTAGE)


def _of_other_ratios(
    batch: StepBatch, a_N: Array, r_N: Array, known_N: Array, ranges: tuple[tuple[float, float], ...]
) -> Iterator[Surrogate]:
    """What stands for the ratio or the pessimistic one of two losses."""
    policy, rollout = batch.columns.of("policy_logprobs"), batch.columns.of("rollout_logprobs")
    old = batch.columns.of("old_logprobs")
    if policy is not None and rollout is not None and old is not None and not batch.has("is_weights"):
        both_N = known_N & rollout.said_N & np.isfinite(rollout.values_N)
        other_N = np.where(both_N, np.exp(np.clip(policy.values_N - rollout.values_N, -20, 20)), 1.0)
        if float(np.abs(other_N - r_N).max(initial=0.0)) > 1e-2:
            low, high = ranges[0]
            yield Surrogate(policy_loss.clipped(other_N, a_N, clip_low=low, clip_high=high), (low, high), _OF_ENGINE)
    if not float(np.abs(r_N - 1).max(initial=0.0)) > 1e-3:
        return
    yield Surrogate(-a_N * np.log(np.maximum(r_N, 1e-30)), None, _LOG)
    yield Surrogate(-a_N * r_N**2, None, _RATIO_SQUARED)
    for low, high in ranges:
        always = _UNWEIGHING if batch.laid.algorithm.is_of_weights else _ALWAYS
        yield Surrogate(-a_N * r_N.clip(1 - low, 1 + high), (low, high), always)
        yield Surrogate(np.maximum(-a_N * r_N, -a_N * r_N.clip(-low, high)), (low, high), _AROUND_0)
        yield Surrogate(np.maximum(-a_N * r_N, -a_N * np.minimum(r_N, 1 + high)), (low, high), _ABOVE_ALONE)
        yield Surrogate(np.maximum(-a_N * r_N, -a_N * np.maximum(r_N, 1 - low)), (low, high), _BELOW_ALONE)
        if low != high:
            swapped_N = policy_loss.clipped(r_N, a_N, clip_low=high, clip_high=low)
            yield Surrogate(swapped_N, (high, low), _SWAPPED)


class Logged(Struct, frozen=True, dict=True):
    """The logged losses of a batch's micro-batches [M], and which tokens each is of."""

    values_M: Array
    token_of: Array
    """Flat tokens that count, micro-batch by micro-batch."""
    sample_of: Array
    """The sample of each of these tokens, numbered through over all micro-batches."""
    micro_of_sample: Array
    update_tokens_M: Array

    def fits(self, values_N: Array, *, loose: float = 1.0) -> bool:
        """Whether one positive factor makes every micro-batch's sum, token mean, or mean of token means the logged.
        `loose`: how many times as far as rounding it may lie.
        """
        return self.factor(values_N, loose=loose) is not None

    def is_made_by(self, values_N: Array) -> bool:
        """Whether values make the logged losses: by any factor where 3 micro-batches tell, else by none."""
        return self.factor(values_N, plain=len(self.values_M) < FEWEST) is not None

    def per_micro(self, each: Array) -> Array:
        return np.bincount(self.micro_of_sample, weights=each, minlength=len(self.values_M))

    @cached_property
    def sizes(self) -> tuple[Array, Array, Array]:
        """The tokens of each sample, the tokens of each micro-batch, and its samples: hundreds of losses are tried."""
        samples = len(self.micro_of_sample)
        counts = np.bincount(self.sample_of, minlength=samples)
        return counts, self.per_micro(counts), self.per_micro(np.ones(samples))

    def factor(self, values_N: Array, *, loose: float = 1.0, plain: bool = False) -> float | None:
        """That factor (of the token mean, or of what fits); None where none does. `plain`: it has to be 1."""
        counts, tokens, heard = self.sizes
        sums = np.bincount(self.sample_of, weights=values_N[self.token_of], minlength=len(counts))
        total, of_means = self.per_micro(sums), self.per_micro(sums / np.maximum(counts, 1))
        for base in (
            total / np.maximum(tokens, 1), of_means / np.maximum(heard, 1), total / np.maximum(self.update_tokens_M, 1),
            total / np.maximum(heard, 1), total,
        ):  # fmt: skip
            size = float(base @ base)
            if not size > 0:
                continue
            factor = float(base @ self.values_M) / size
            limit = loose * (CLOSE * np.maximum(np.abs(self.values_M), 1e-2 * np.abs(self.values_M).max()) + FLOOR)
            if plain and abs(factor - 1) > min(loose, 1.0) * CLOSE:
                continue
            if factor > 0 and bool((np.abs(factor * base - self.values_M) <= limit).all()):
                return factor
        return None


def logged_of(batch: StepBatch, *names: str, fewest: int = FEWEST) -> Logged | None:
    """The micro-batches of a batch that log the first of these scalars that any logs, with their tokens; None for fewer
    than `fewest` of them, or where all are 0.
    """
    rows, trained_N = batch.laid.rows_by_micro(), batch.trained_N
    told = next((found for name in names if (found := batch.columns.scalars(name))), [])
    scalars = [
        (scalar, samples) for scalar in told if (samples := rows.get(scalar.place)) and np.isfinite(scalar.value)
    ]
    if trained_N is None or len(scalars) < fewest or max(abs(scalar.value) for scalar, _ in scalars) < 10 * FLOOR:
        return None
    starts_B, lengths_B = batch.flat.starts_B, batch.flat.lengths_B
    token_of, sample_of, tokens = [], [], []
    micro_of_sample: list[int] = []
    for micro, (_, samples) in enumerate(scalars):
        count = 0
        for sample in samples:
            at = np.arange(starts_B[sample], starts_B[sample] + lengths_B[sample])
            at = at[trained_N[at]]
            token_of.append(at)
            sample_of.append(np.full(len(at), len(micro_of_sample)))
            micro_of_sample.append(micro)
            count += len(at)
        tokens.append(count)
    of_update: dict[tuple[int | None, int | None], int] = defaultdict(int)
    keys = [scalar.update for scalar, _ in scalars]
    for key, count in zip(keys, tokens, strict=True):
        of_update[key] += count
    return Logged(
        np.array([scalar.value for scalar, _ in scalars]), np.concatenate(token_of), np.concatenate(sample_of),
        np.array(micro_of_sample), np.array([of_update[key] for key in keys]),
    )  # fmt: skip
