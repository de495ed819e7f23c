"""How rollout and trainer disagree about the same tokens: one set of figures, which the rules tell apart by.

d = trainer - rollout, in nats, over tokens that count in the loss. A leaking pack has a signature: the first sample of
every pack agrees with its reference, no later one does.
"""

from __future__ import annotations

import math
from collections import defaultdict
from functools import cached_property

import numpy as np
from msgspec import Struct

from replay_core.diagnose.batch import StepBatch, worked_out_once
from replay_core.diagnose.columns import Column
from replay_core.diagnose.flat import Array
from replay_core.diagnose.kinship import Kin, odd_one
from replay_core.diagnose.places import Contexts, contexts, places_of
from replay_core.diagnose.rule import Skip, given, skip_if
from replay_core.diagnose.softmax import divided_after_softmax
from replay_core.measure.lag import Lag, detect_lag

#: Mean |d| from which engine and trainer disagree at all (miles CI: 0.03), and from which badly (slime CI: 0.1).
DISAGREE, BADLY = 0.03, 0.1
#: What a healthy mixture of experts in bf16 comes to (0.064), docs/decisions.md#what-a-healthy-engine-is-apart.
USUAL = 0.07


class Limit(Struct, frozen=True):
    """From where on a figure of the mismatch is a warning, and an error; `side` +1 where large is bad, else -1. Up to
    `usual` it is what precision alone comes to, where nothing tells of another cause.
    """

    warning: float
    error: float
    side: int = 1
    usual: float = math.nan

    def is_past(self, value: float, limit: float) -> bool:
        return (value - limit) * self.side > 0


#: Figures of d = trainer - rollout, by the signal that a log has them under. NeMo-RL's docs have the band of mean e^|d|
#: and "KL errors below this are fine"; miles' and slime's CI mean |d|; verl-omni#637 the probabilities.
LIMITS = {
    "logprob_diff": Limit(DISAGREE, BADLY, usual=USUAL),
    "mult_prob_error": Limit(1.05, 1.2, usual=1.08),
    "rollout_k3": Limit(1e-3, 1e-1, usual=4e-3),
    # Half the mean square of d: its tails weigh most, and healthy runs come to 0.06.
    "rollout_k2": Limit(0.1, 0.3),
    # A bf16 mixture of experts lies at 4e-3 and 0.998 when healthy; five times its distance is none of that.
    "prob_diff": Limit(0.02, 0.1),
    "prob_pearson": Limit(0.98, 0.9, -1),
}
#: What weights some updates old come to at the most, nats per token.
OLDEST = 0.5
#: Fewer tokens say nothing.
FEWEST = 8
#: Nats per token that a rollout may give more before it has to rise and fall with the trainer.
UNRELATED = 1.0
#: Mean nats per token that a policy has moved by before its direction tells, and how well two have to lie on a line.
MOVED, ON_A_LINE = 0.01, 0.85
#: Log-probabilities below which a token has company.
UNSURE = -0.3
#: Nats within which two numbers are one (bf16), and by which they are two; the share of tokens that have to be so; and
#: the log-probability of a token with company that a part of it could be taken from.
ALIKE, BEYOND, MOSTLY_SAME, UNSURE_OF_ONE = 0.01, 0.02, 0.97, -0.1


class Gap(Struct, dict=True):
    """Rollout against trainer over the tokens of a batch that both say."""

    batch: StepBatch
    rollout: Column
    trainer: Column
    both_N: Array

    @cached_property
    def d(self) -> Array:
        """trainer - rollout of each compared token."""
        return self.trainer.values_N[self.both_N] - self.rollout.values_N[self.both_N]

    @cached_property
    def mean(self) -> float:
        """mean |d|, nats."""
        return float(np.abs(self.d).mean())

    @cached_property
    def p99(self) -> float:
        """99th percentile of |d|, nats."""
        return float(np.quantile(np.abs(self.d), 0.99))

    @cached_property
    def multiplier(self) -> float:
        """mean e^|d|: NeMo-RL's token_mult_prob_error."""
        return float(np.exp(np.minimum(np.abs(self.d), 50.0)).mean())

    @cached_property
    def k3(self) -> float:
        """mean(e^d - d - 1), an estimate of KL(rollout || trainer)."""
        return float((np.expm1(np.clip(self.d, -50, 50)) - self.d).mean())

    @cached_property
    def slope(self) -> float:
        """Least squares slope of rollout on trainer: 1 / T of a rollout at temperature T beside a trainer at 1."""
        x, y = self._pair
        centred = x - x.mean()
        spread = float((centred * centred).sum())
        return float((centred * (y - y.mean())).sum() / spread) if spread > 0 else float("nan")

    @cached_property
    def correlation(self) -> float:
        x, y = self._pair
        return float(np.corrcoef(x, y)[0, 1]) if x.std() > 0 and y.std() > 0 else float("nan")

    @cached_property
    def one_sided(self) -> float:
        """Share of tokens that the rollout gives more than the trainer does."""
        return float((self.d < 0).mean())

    @cached_property
    def _residual(self) -> float:
        """Rms of what a line leaves of the difference, over the rms of the difference."""
        x, y = self._pair
        left = (y - y.mean()) - self.slope * (x - x.mean())
        return float(np.sqrt((left * left).mean()) / max(np.sqrt((self.d * self.d).mean()), 1e-12))

    @property
    def _pair(self) -> tuple[Array, Array]:
        return self.trainer.values_N[self.both_N], self.rollout.values_N[self.both_N]

    @cached_property
    def by_sample_B(self) -> Array:
        """mean |d| of each sample, NaN where nothing is compared."""
        d_N = np.zeros(self.both_N.size)
        d_N[self.both_N] = np.abs(self.d)
        return self.batch.flat.mean(d_N, self.both_N)

    @cached_property
    def lag(self) -> Lag:
        """Which shift of the rollout faces the trainer. Both are looked at over the whole response."""
        inside_N = self.batch.response_N if self.batch.response_N is not None else self.both_N
        rows = self.batch.flat.spans
        a, b = ([one.values_N[span][inside_N[span]] for span in rows] for one in (self.trainer, self.rollout))
        return detect_lag(a, b)

    @property
    def is_shifted(self) -> bool:
        """Whether another lag than 0 fits, and by far."""
        return self.lag.settled and self.lag.lag != 0

    @cached_property
    def _never_less(self) -> bool:
        """Whether the rollout gives no token less than the trainer does, beyond the noise of bf16. A temperature takes
        from improbable tokens what it gives to others; a truncated distribution takes from none that can be sampled.
        """
        return float((self.d > 0.02).mean()) <= 0.01

    @cached_property
    def tempered_by(self) -> tuple[float, float]:
        """(T, residual): the temperature that best makes the rollout's values of the trainer's, and the rms it leaves
        over the rms of the difference. Of a distribution only the sampled token's p is known: p^(1/T) is held against
        (1 - p)^(1/T), which is exact where one other token has the rest, as in a policy that has learnt something.
        """
        x, y = self._pair
        x = np.minimum(x, -1e-7)
        rest = np.log(-np.expm1(x))
        before = max(float(np.sqrt((self.d * self.d).mean())), 1e-12)
        left = [
            (float(np.sqrt(((x / t - np.logaddexp(x / t, rest / t) - y) ** 2).mean())) / before, float(t))
            for t in np.geomspace(0.3, 3.0, 47)
        ]
        residual, found = min(left)
        return found, residual

    @property
    def is_tempered(self) -> bool:
        """Whether one gain explains most of the difference."""
        return (
            not self.is_shifted
            and not self.contexts.is_one_temperature
            and not self._is_one_way
            and self.mean > DISAGREE
            # Over places a temperature of 0.3 leaves a correlation of .8; within one it leaves all.
            and (self.correlation > 0.9 or self.contexts.temperature is not None)
            and self.gain is not None
            # A temperature spares no sample.
            and not is_of_padding(self)
        )

    @cached_property
    def after_softmax(self) -> float | None:
        """The temperature that the rollout's log-probabilities were divided by after the softmax, None for none."""
        return None if self.is_shifted else divided_after_softmax(self.batch, *self._pair)

    @cached_property
    def contexts(self) -> Contexts:
        """What tokens drawn in one place tell of a temperature."""
        return contexts(self.batch, self.trainer.values_N, self.rollout.values_N, self.both_N)

    @property
    def _is_one_way(self) -> bool:
        """Whether the rollout gives tokens more and none less, as no other temperature does: a flatter one takes from
        the probable tokens, and what a sharper one gives depends on the token, while a part of the distribution that
        is kept gives all tokens of a place the same.
        """
        if not self._never_less or self.one_sided <= 0.8 or self.contexts.temperature is not None:
            return False
        x, _ = self._pair
        unsure = x < UNSURE
        d = self.d[unsure]
        if self._residual > 0.3 or (self.gain is not None and self.gain > 1) or d.size < FEWEST:
            return True
        # One temperature beside one kept share, over tokens that are neither sure nor alone.
        return float(d.std()) < 0.5 * self.tempered_by[1] * float(np.sqrt((self.d**2).mean()))

    @property
    def gain(self) -> float | None:
        """The temperature of the rollout over the trainer's that explains the difference: by tokens drawn in one place,
        else by a line (an untrained policy, whose other tokens are many) or `tempered_by`, whichever leaves less; None
        where none does.
        """
        if self.contexts.temperature is not None:
            return self.contexts.temperature
        by_two, left = self.tempered_by
        # Of sure tokens a line has another slope than 1 / T.
        left, found = min((self._residual, 1 / self.slope if self.slope else math.inf), (left, by_two))
        return found if left < 0.6 and abs(1 / found - 1) > 0.1 else None

    @cached_property
    def from_reference(self) -> float | None:
        """mean |rollout - ref| over the compared tokens, or None without a reference."""
        ref = self.batch.columns.of("ref_logprobs")
        if ref is None:
            return None
        known_N = also(self, ref)
        if known_N.sum() < FEWEST:
            return None
        return float(np.abs(self.rollout.values_N[known_N] - ref.values_N[known_N]).mean())

    @cached_property
    def by_padding(self) -> tuple[float, float] | None:
        """mean |d| of samples without left padding and of those with it; None where all have as much. Where rows are
        not recorded padded, the longest prompts are those that a padded batch leaves without.
        """
        pads_B = self.batch.laid.left_pads_B
        if (pads_B is None or not pads_B.any()) and self.batch.response_N is not None:
            heads_B = self.batch.flat.first(self.batch.response_N)
            pads_B = heads_B.max(initial=0) - heads_B
        if pads_B is None or not (pads_B == 0).any() or not (pads_B > 0).any():
            return None
        flush_B, padded_B = self.by_sample_B[pads_B == 0], self.by_sample_B[pads_B > 0]
        if not np.isfinite(flush_B).any() or not np.isfinite(padded_B).any():
            return None
        return float(np.nanmean(flush_B)), float(np.nanmean(padded_B))

    @property
    def is_stale(self) -> bool:
        """Whether the rollout was sampled by the reference (the initial weights) and not by this policy."""
        reference = self.from_reference
        if self.is_shifted or self.mean <= DISAGREE or reference is None or reference >= 0.2 * self.mean:
            return False
        return self.leak is None

    @cached_property
    def leak(self) -> tuple[Array, str] | None:
        """Which samples agree, and how packs are known, where the differences lie as a leaking pack's; else None."""
        if self.is_shifted or self.is_tempered:
            return None
        return packed_signature(self.batch, self.by_sample_B)

    @cached_property
    def _mean_of_sampled(self) -> float:
        """mean d of the tokens to which the engine gives another number than 0: it stands where nothing was sampled
        (tool output), as well as where a truncation leaves one token alone; a truncation shows in others, too.
        """
        sampled = self.rollout.values_N[self.both_N] != 0
        return float(self.d[sampled].mean()) if sampled.any() else float(self.d.mean())

    @property
    def is_truncated(self) -> bool:
        """Whether the rollout's probabilities are all larger: renormalised over the tokens top-p or top-k kept. What is
        left is more of everything: those of the likeliest token alone leave that one's own as they are.
        """
        return (
            not self.is_shifted
            and of_the_likeliest(self) is None
            and self.after_softmax is None
            and not self.is_tempered
            and not self.is_stale
            and self.leak is None
            and -float(self.d.mean()) > 0.005
            and -self._mean_of_sampled > 0.005
            and self._never_less
            # What is left of a distribution keeps the order of its tokens; those of another place have none.
            and (-float(self.d.mean()) < UNRELATED or self.correlation > 0.5)
            # A token that is left alone has probability 1 on one side and nearly 1 on the other.
            and float((self.d[np.abs(self.d) > 1e-3] < 0).mean()) > 0.9
        )


def of_the_likeliest(between: Gap) -> tuple[int, int] | None:
    """Tokens of a place that has one likelier, which the rollout gives that one's number, and tokens that are the
    likeliest, which it gives their own; None where its numbers are not so. A token that the trainer gives more than
    half is the likeliest of its place, and no other there has more than that one leaves.
    """
    x, y = (one.values_N[between.both_N] for one in (between.trainer, between.rollout))
    same = np.abs(x - y) < ALIKE
    likeliest, other = x > np.log(0.5) + ALIKE, (y - x) > BEYOND
    unsure = likeliest & (x < UNSURE_OF_ONE)
    flat = between.batch.flat
    last_N = flat.position_N == np.repeat(flat.last(between.both_N), flat.lengths_B)
    if other.any() and last_N[between.both_N][other].all():
        return None  # an end token that was written over what was sampled
    if min(int(unsure.sum()), int(other.sum())) < FEWEST or not same[likeliest].mean() > MOSTLY_SAME:
        return None
    fits = np.exp(y[other]) <= 1 - np.exp(x[other]) + 0.02
    if not fits.mean() > MOSTLY_SAME or not (same | other).mean() > MOSTLY_SAME:
        return None
    return int(other.sum()), int(same.sum())


def also(between: Gap, column: Column) -> Array:
    """The compared tokens that a third tensor says something of, too."""
    known_N: Array = between.both_N & column.said_N & np.isfinite(column.values_N)
    return known_N


def ahead_of(between: Gap) -> float | None:
    """Least squares slope of rollout - trainer on trainer - ref: 0 of the trainer's own weights, -1 of the reference's,
    below 0 of older ones. None without a reference, where the policy has not moved from it (.01 nats), or the two do
    not lie on one line (correlation .85).
    """
    ref = between.batch.columns.of("ref_logprobs")
    if ref is None:
        return None
    known_N = also(between, ref)
    x = between.trainer.values_N[known_N] - ref.values_N[known_N]
    y = between.rollout.values_N[known_N] - between.trainer.values_N[known_N]
    if x.size < 4 * FEWEST or float(np.abs(x).mean()) < MOVED or not y.std() > 0 or not x.std() > 0:
        return None
    return float((x * y).sum() / (x * x).sum()) if abs(np.corrcoef(x, y)[0, 1]) >= ON_A_LINE else None


#: Nats that a token has to have moved by, from the reference and from one side to the other, before its way tells.
ON_ITS_WAY = 0.02


def same_way(between: Gap) -> float | None:
    """Of the tokens that the trainer has moved from the reference, and that the rollout has elsewhere, the share where
    it has them further on the same way; None without a reference or with too few of them.
    """
    ref = between.batch.columns.of("ref_logprobs")
    if ref is None:
        return None
    known_N = also(between, ref)
    moved = between.trainer.values_N[known_N] - ref.values_N[known_N]
    on = between.rollout.values_N[known_N] - between.trainer.values_N[known_N]
    tells = (np.abs(moved) > ON_ITS_WAY) & (np.abs(on) > ON_ITS_WAY)
    return float((np.sign(moved) == np.sign(on))[tells].mean()) if tells.sum() >= 2 * FEWEST else None


def is_of_padding(between: Gap) -> bool:
    """Whether samples with left padding differ and those without do not."""
    flush, padded = between.by_padding or (between.mean, between.mean)
    return flush < DISAGREE / 3 and padded > 5 * flush


class Twins(Struct, frozen=True):
    """Places where samples of a batch share a token and everything before it: one forward gives it one number.

    `trainer` and `rollout` are the mean range of each side's numbers at such a place, nats. `followed` is the trainer's
    where the token after it is shared, too (at `followed_places`), and `parted` where only that one is another.
    """

    places: int
    trainer: float
    rollout: float
    followed_places: int = 0
    followed: float = math.nan
    parted_places: int = 0
    parted: float = math.nan

    @property
    def sees_next(self) -> bool:
        """Whether the trainer's number is a matter of the token after it: one where it is shared, else others."""
        enough = min(self.followed_places, self.parted_places) >= FEWEST_TWINS
        return enough and self.parted > DISAGREE and self.followed < 0.05 * self.parted

    @property
    def known(self) -> bool:
        return self.places >= FEWEST_TWINS


#: Fewer places that samples share say nothing; and responses are followed this far.
FEWEST_TWINS, FOLLOWED = 4, 64


def twins_of(between: Gap) -> Twins:
    """The ranges at places that two samples and more share, over the first 64 tokens of their responses."""
    batch, trainer, rollout, both_N = between.batch, between.trainer, between.rollout, between.both_N
    places: dict[int, list[int]] = defaultdict(list)
    after: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    sample_N, tokens_N = batch.flat.sample_N, batch.tokens_N
    for _, here, at in places_of(batch, FOLLOWED):
        if both_N[at]:
            places[here].append(at)
            if tokens_N is not None and at + 1 < len(sample_N) and sample_N[at + 1] == sample_N[at]:
                after[here][int(tokens_N[at + 1])].append(at)
    shared = [found for found in places.values() if len(found) > 1]
    if not shared:
        return Twins(0, 0.0, 0.0)
    ranges = [(np.ptp(trainer.values_N[found]), np.ptp(rollout.values_N[found])) for found in shared]
    same = [np.ptp(trainer.values_N[found]) for nexts in after.values() for found in nexts.values() if len(found) > 1]
    heads = [trainer.values_N[[found[0] for found in nexts.values()]] for nexts in after.values() if len(nexts) > 1]
    return Twins(
        len(shared), float(np.mean([a for a, _ in ranges])), float(np.mean([b for _, b in ranges])),
        len(same), float(np.mean(same)) if same else math.nan,
        len(heads), float(np.mean([np.ptp(one) for one in heads])) if heads else math.nan,
    )  # fmt: skip


#: A log-probability that the one token of a nucleus does not have, and the share of zeros that tells.
NO_NUCLEUS, SOME = -1.2, 0.05


def unsampled(rollout: Column, trainer: Column, both_N: Array) -> Array:
    """Tokens that count and that no engine sampled [N]: its log-probability is exactly 0, which is a probability of 1,
    and the trainer finds them improbable, or a twentieth of them. (Where a nucleus holds one token alone, that has the
    greater part of the trainer's probability, too.) None where all are 0: a greedy engine, or none that says.
    """
    zero_N = both_N & (rollout.values_N == 0)
    count, said = int(zero_N.sum()), trainer.values_N[zero_N]
    improbable = count >= 2 and (float(said.mean()) < -1 or float((said < NO_NUCLEUS).mean()) >= SOME)
    return zero_N if improbable and count < 0.9 * both_N.sum() else np.zeros_like(both_N)


def _is_one_shift(odd: Kin) -> bool:
    """Whether rollout or trainer is off by one token: that is D08's."""
    return odd.suspect.name in ("rollout_logprobs", "old_logprobs") and abs(odd.by) == 1


@worked_out_once
def gap(batch: StepBatch) -> Gap:
    """The gap between rollout and trainer.

    Raises:
        Skip: fewer than 8 tokens have both, they are one tensor, or one of the two is no log-probability of its tokens.
    """
    rollout, trainer = given(batch.columns.of("rollout_logprobs")), given(batch.trainer)
    odd = odd_one(batch)
    if odd is not None and {odd.suspect.name} & {rollout.name, trainer.name} and not _is_one_shift(odd):
        raise Skip(f"{odd.suspect.name} are {odd.what} (D79, D80, D92): their distance has no other cause")
    both_N = batch.pair(rollout, trainer)
    both_N = both_N & ~unsampled(rollout, trainer, both_N) & _of_first_pass_N(batch, trainer)
    if both_N.sum() < FEWEST:
        raise Skip(f"rollout and trainer share {int(both_N.sum())} tokens that count; at least {FEWEST} are needed")
    skip_if(not np.ptp(trainer.values_N[both_N]) > 0, "the trainer's log-probabilities are all one number")
    return Gap(batch, rollout, trainer, both_N)


def _of_first_pass_N(batch: StepBatch, trainer: Column) -> Array:
    """Tokens [N] of the first epoch over the batch's samples: what is taken again in later ones is of later weights."""
    epochs = [0 if key is None or key.epoch is None else key.epoch for key in batch.laid.keys_of(trainer.name)]
    first = min(epochs, default=0)
    first_N: Array = np.repeat(np.array([epoch == first for epoch in epochs], dtype=bool), batch.flat.lengths_B)
    return first_N


#: How far apart clean and leaking samples are.
APART = 5.0
#: A leak moves what it touches by this much at least, in fp32 too. Where packs are guessed among many ways to pack, by
#: more than the noise of bf16, which alone looks like one way or another.
LEAKS, LEAKS_BY_GUESS = 1e-3, 0.02
#: One clean sample is chance among fewer than this.
FEWEST_ALONE = 6
#: Where more of the samples than this agree, hardly any row that was filled up holds two.
MOST_ALONE = 0.8
#: Fewer first samples of inferred packs than this have to hold that many tokens that count, or they agree by luck.
FEWEST_SPARED, FEWEST_CLEAN = 5, 12
#: A clean sample's mean |d| stays below this however noisy the precision.
CLEAN = 0.015


def packed_signature(batch: StepBatch, by_sample_B: Array, *, few: bool = False) -> tuple[Array, str] | None:
    """(samples that agree, how packs are known) where mean |d| per sample lies as a leak's does, else None.

    Every order the batch is known in is tried: as stored, and micro-batch by micro-batch. `few`: first samples of
    inferred packs may hold as few tokens as they like, which is no proof but over several steps.
    """
    counts_B = batch.flat.lengths_B if batch.trained_N is None else batch.flat.count(batch.trained_N)
    for order in batch.laid.orders:
        values_B = by_sample_B[order]
        known_B = ~np.isnan(values_B)
        if known_B.sum() < 4 or not known_B[0]:
            continue
        for starts_B, how in _starts(batch, order, values_B):
            later_B = known_B & ~starts_B
            first_B = known_B & starts_B
            # One sample that is off is no pack.
            if later_B.sum() < 2 or not first_B.any():
                continue
            # Of two samples of equal tokens, records may disagree which is which: a first one may then be off, too.
            # Of many guesses one holds by luck where its few first samples are a handful of tokens.
            if (
                not few
                and "inferred" in how
                and first_B.sum() < FEWEST_SPARED
                and counts_B[order][first_B].sum() < FEWEST_CLEAN
            ):
                continue
            ranked, dirty = np.sort(values_B[first_B]), values_B[later_B]
            clean = float(ranked[int(0.9 * (len(ranked) - 1))])
            if not clean < CLEAN:
                continue
            # A short later sample may see little of what it should not: a few may pass, the most may not.
            off = float((dirty > max(APART * float(np.median(values_B[first_B])), 1e-5)).mean())
            least = LEAKS_BY_GUESS if "inferred" in how else LEAKS
            apart = float(np.median(dirty)) > max(APART * clean, least)
            # Of those that agree, most are first ones: else something other than packing spares them.
            agree = values_B <= max(APART * clean, 1e-5)
            if off >= 0.8 and apart and float(starts_B[agree].mean()) >= 0.6:
                agree_B = np.zeros(len(values_B), dtype=bool)
                agree_B[order[starts_B]] = True
                return agree_B, how
    return None


def _starts(batch: StepBatch, order: Array, values_B: Array) -> list[tuple[Array, str]]:
    """Where packs may begin, in this order: as recorded, else every k-th sample, else rows filled up to a length."""
    total = len(order)
    recorded_B = batch.laid.pack_B
    if recorded_B is not None and np.unique(recorded_B).size > 1:
        packs_B = recorded_B[order]
        begins_B = np.concatenate([[True], packs_B[1:] != packs_B[:-1]])
        # Boundaries may be lost inside a pack, too: every other one of them.
        longest = int(np.diff([*np.flatnonzero(begins_B), total]).max())
        inside = [
            (np.arange(total) % size == 0, f"each {size} samples that follow each other (inferred)")
            for size in range(2, longest // 2 + 1)
        ]
        return [(begins_B, "as recorded"), *inside]
    # One pack of all samples is how they were recorded, and need not be how they were run.
    found = [(np.arange(total) % size == 0, f"every {size} samples (inferred)") for size in range(2, total // 2 + 1)]
    if total >= FEWEST_ALONE:
        found.append((np.arange(total) == 0, "all samples in one (inferred)"))
    clean_B = values_B < CLEAN
    lengths_B = batch.flat.lengths_B[order]
    filled = clean_B[0] and clean_B.sum() >= 2 and clean_B.mean() <= MOST_ALONE
    if filled and _is_filling(clean_B, lengths_B):
        found.append((clean_B, "rows filled up to one length (inferred)"))
    return found


def _is_filling(starts_B: Array, lengths_B: Array) -> bool:
    """Whether one length of row explains these starts: every pack fits it, and none would with the sample after it."""
    packs = np.cumsum(starts_B) - 1
    sums = np.bincount(packs, weights=lengths_B)
    following = lengths_B[starts_B][1:]
    return bool(sums.max() < (sums[:-1] + following).min())
