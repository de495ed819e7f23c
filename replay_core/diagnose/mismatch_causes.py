"""Why engine and trainer disagree, as far as the differences tell: by place, by sample, by side."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from msgspec import Struct, field

from replay_core.diagnose.algorithm import RESPONSE_LIMITS
from replay_core.diagnose.apart import Apart
from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.finding import Evidence, listed, share, shown
from replay_core.diagnose.flat import Array
from replay_core.diagnose.gap import (
    BADLY,
    DISAGREE,
    FEWEST,
    MOSTLY_SAME,
    Gap,
    also,
    is_of_padding,
    of_the_likeliest,
    twins_of,
)
from replay_core.diagnose.passes import before_any_update_N

#: Nats by which the first response token differs in the median, and how many times as far as the others, where the
#: prompts end differently.
FIRST, FIRST_TIMES = 1.0, 8.0
OF_THE_ENGINE = "the engine gives one token after one prefix different numbers"


class MismatchCause(NamedTuple):
    """Why engine and trainer disagree: in a few words (empty where they are not sure), in a sentence, and the figures
    behind it.
    """

    short: str
    sentence: str
    figures: list[Evidence]
    is_of_a_forward: bool = False
    """Whether it is sure whichever weights the two sides hold: of a mask, positions, labels, or two forwards of one."""
    is_of_tokens: bool = False
    """Whether the tokens themselves, or the rows, tell it, so that it is none of old weights where it begins in a later
    step, too.
    """
    is_weak: bool = False
    """Whether it is what is left where nothing in the batch tells: what a run's places tell goes before it."""
    is_of_few: bool = False
    """Whether most samples agree: that they see the same context up to some place goes before it."""
    is_random: bool = False
    """Whether it is that one side gives one token after one prefix different numbers."""


#: How far apart what one forward says of one token after one prefix may be, in shares of the mismatch, and in nats: two
#: batch shapes in bf16.
RANDOM, RANDOM_FLOOR = 0.25, 0.02
#: How little samples that agree differ, beside the few that do not.
OTHERS_AGREE = 0.15
#: Correlation that rounding, however coarse, leaves the two sides with.
COARSE = 0.95


def cause_of(batch: StepBatch, between: Gap) -> MismatchCause:
    """The cause that the differences tell."""
    if is_of_padding(between):
        flush, padded = between.by_padding or (0.0, 0.0)
        return MismatchCause(
            "only samples with left padding",
            "left padding is attended to, or counted in the positions: samples without padding agree",
            [shown("mean |d| without left padding", flush), shown("mean |d| with left padding", padded)],
            is_of_a_forward=True,
        )
    if (random := _at_random(batch)) is not None:
        # Rows of their own see no neighbours, and what kernels change is next to nothing.
        alone = batch.laid.flags.get("packing") is False and between.mean > BADLY
        return MismatchCause(
            "two forwards of the trainer by the same weights disagree as much" + (": dropout is on" if alone else ""),
            "dropout is left on in the trainer's forward (train mode)"
            + ("" if alone else ", or it is not deterministic in another way"),
            random,
            is_of_a_forward=True,
        )
    twins = twins_of(between)
    ranges = [
        shown("places where samples share a token and all before it", twins.places),
        shown("mean range of the trainer there", twins.trainer, f"< {max(RANDOM * between.mean, RANDOM_FLOOR):.3g}"),
        shown("mean range of the rollout there", twins.rollout),
    ]
    limit = max(RANDOM * between.mean, RANDOM_FLOOR)
    if between.mean > BADLY and twins.sees_next:
        return MismatchCause(
            "the trainer's number of a token depends on the token after it",
            "the trainer gathers log-probabilities at labels that are shifted by one (off by one): those of the next "
            "token, by logits that predict this one",
            [
                *ranges,
                shown("mean range of the trainer where the next token is shared, too", twins.followed),
                shown("mean range of the trainer where the next token is another", twins.parted, "0"),
            ],
            is_of_a_forward=True,
        )
    if twins.known and twins.trainer > limit and twins.trainer > 4 * twins.rollout:
        return _not_one_number(batch, ranges)
    told = ranges if twins.known else []
    head_B = batch.flat.first(batch.response_N if batch.response_N is not None else between.both_N)
    d_N = np.zeros(between.both_N.size)
    d_N[between.both_N] = np.abs(between.d)
    repeated = Repeated()
    repeated.take(batch, between)
    if told_alone := (
        _given(batch, between, d_N)
        or _likeliest(between)
        or gathered_elsewhere(batch, between)
        or repeated.told()
        or _of_later_turns(batch, between)
        or _near_the_limit(batch, between)
    ):
        return told_alone
    if (block := _block_of_rows(between)) is not None:
        return block
    if (retold := other_tokens(batch, between)) is not None:
        return MismatchCause(
            "a part of the samples is off, their tokens are not the sampled ones (re-tokenised)",
            "text was encoded again into other tokens than were sampled (re-tokenised): the trainer finds some tokens "
            "of these samples improbable, and hardly any more probable, while other samples agree",
            [*told, retold],
            is_of_a_forward=True,
            is_of_tokens=True,
        )
    early_N = between.both_N & (batch.flat.position_N < np.repeat(head_B + 3, batch.flat.lengths_B))
    late_N = between.both_N & ~early_N
    if early_N.sum() >= FEWEST and late_N.sum() >= FEWEST:
        early, late = float(d_N[early_N].mean()), float(d_N[late_N].mean())
        if early > 3 * late and (
            between.correlation <= COARSE or _surer(between, early_N, late_N) <= early / (3 * late)
        ):
            return MismatchCause(
                "most at the first tokens, the prompts differ",
                "the prompts differ: chat template, system prompt or BOS; it fades as the response conditions itself",
                [shown("mean |d| of the first 3 response tokens", early), shown("mean |d| of the others", late)],
                is_weak=True,
            )
    first_N = between.both_N & (batch.flat.position_N == np.repeat(head_B, batch.flat.lengths_B))
    others_N = between.both_N & ~first_N
    if first_N.sum() >= FEWEST and others_N.sum() >= FEWEST:
        first, others = float(np.median(d_N[first_N])), float(np.median(d_N[others_N]))
        if first > FIRST and first > FIRST_TIMES * others:
            # Records that hold the tokens are joined by them: what differs then is what the engine was asked.
            recorded = sum(sheet.has_tokens for sheet, _ in batch.columns.sheets)
            return MismatchCause(
                "most at the first response token, "
                + ("though the recorded prompts are equal" if recorded > 1 else "the prompts end differently"),
                "the end of the prompt is missing on one side, or there are tokens more: a generation prompt that is "
                "not added (add_generation_prompt), a separator or a space that is cut off; what follows sees the "
                "response itself, and is nearer",
                [
                    shown("median |d| of the first response token", first, f"< {FIRST_TIMES:g} times the others'"),
                    shown("median |d| of the others", others),
                    shown("first tokens compared", int(first_N.sum())),
                ],
            )
    often = float((between.by_sample_B > DISAGREE).mean())
    told = [*told, shown("share of samples above 0.03", often)]
    side = _side(between)
    if side is not None:
        told.append(shown("mean |rollout - ref|", between.from_reference))
    # Before the first update all weights are the initial ones: what differs then is no matter of their version.
    begins = batch.step is not None and batch.step <= 1
    if (by_length := _by_prompt_length(batch, between, head_B)) is not None:
        return by_length
    off_B, heard_B = between.by_sample_B > DISAGREE, np.isfinite(between.by_sample_B)
    rest = float(between.by_sample_B[heard_B & ~off_B].mean()) if (heard_B & ~off_B).any() else math.inf
    # Of what all samples have evenly, about as many lie on either side of the limit.
    are_few = off_B.any() and rest <= OTHERS_AGREE * float(between.by_sample_B[off_B].mean())
    if often < 0.5 and len(batch) >= 4 and are_few:
        apart = Apart()
        apart.take(batch, off_B, heard_B)
        if (trait := apart.told()) is not None:
            return MismatchCause(
                f"all of it in samples {trait.words}, the others agree",
                "what these samples share and the others do not is where the two sides part: the version of their "
                "weights, an adapter, inputs that one side lacks (images, tools), or a place in the row or the batch",
                [*told, trait.evidence],
                is_of_few=True,
            )
        return MismatchCause(
            "few samples are off",
            "few samples are off and the others agree: their weights' version, adapter or inputs (images, tools) "
            "differ; or one side sees less of a long context, where those are the longest ones",
            told,
            is_of_few=True,
        )
    if twins.known and twins.rollout > limit and twins.rollout > 4 * twins.trainer:
        return MismatchCause(
            OF_THE_ENGINE,
            "its kernels depend on what else is in the batch (a mixture of experts routes by it), dropout is on in it "
            "(a model in train mode), weights change while it samples, its replicas hold different ones, or its cache "
            "is not emptied after an update",
            ranges,
        )
    never_below, alike = float((between.d < -0.02).mean()), float((np.abs(between.d) < 0.02).mean())
    if between.mean > BADLY and never_below <= 0.01 and alike > 0.3:
        return MismatchCause(
            "the trainer gives no token less than the engine",
            "the trainer's values are those of the best token of each position (argmax, max over the vocabulary), not "
            "of the sampled one: a gather by other ids, or logits that are made colder",
            [*told, shown("share of tokens that it gives less", never_below, "about 0.5"),
             shown("share of tokens that agree", alike)],
        )  # fmt: skip
    if between.mean > BADLY and side == "trainer":
        padding = "" if between.by_padding is not None else ", its positions or mask of padding differ"
        dropout = ", or dropout is on" if not twins.known else ""
        stale = "" if begins else ", or the engine samples with the initial weights"
        return MismatchCause(
            "the rollout agrees with the reference, the trainer with neither",
            f"the trainer's own forward is off: it is given another prompt (chat template, system prompt, BOS){padding}"
            f"{dropout}{stale}",
            told,
        )
    if between.correlation < 0.5:
        other = "other weights (another model or adapter)" if begins else "other weights (another version or adapter)"
        return MismatchCause(
            "they do not rise and fall together",
            f"{'the engine' if side == 'engine' else 'one side'} is given another prompt (another prompt template, a "
            f"doubled or missing BOS), or has {other}",
            [*told, shown("correlation at lag 0", between.correlation, "> 0.9")],
            is_weak=True,
        )
    if between.mean > BADLY:
        dropout = "" if twins.known else ", dropout left on in the trainer's forward"
        weights = "another prompt template" if begins else "weights of another version"
        # Rounding leaves the two alike, however coarse it is.
        quantised = ", or an engine that is quantised" if between.correlation > COARSE else ""
        return MismatchCause("", f"too much for precision: {weights}{dropout}{quantised}", told, is_weak=True)
    return MismatchCause(
        "",
        "precision or kernels: bf16 against fp32, another attention or MoE kernel, tensor parallelism; or weights one "
        "update old. Not a shift, a temperature, top-p, a packing leak: their discriminators do not show",
        told,
    )


def _surer(between: Gap, early_N: Array, late_N: Array) -> float:
    """How many times as unsure the two sides are of the first tokens: weights that are a little off (rounded, old)
    part such tokens by as much more, whatever the prompt is.
    """
    known = np.maximum(between.trainer.values_N, between.rollout.values_N)
    unsure_N = 1 - np.exp(np.minimum(np.where(between.both_N, known, 0.0), 0.0))
    return float(unsure_N[early_N].mean() / max(unsure_N[late_N].mean(), 1e-6))


#: Of a mismatch, the share that lies on tokens whose rollout log-probability is exactly 0; and how many of them.
ON_GIVEN, GIVEN = 0.9, 4


def _given(batch: StepBatch, between: Gap, d_N: Array) -> MismatchCause | None:
    """A mismatch of tokens that no engine sampled: in runs, inside responses, with nothing off beside them."""
    zero_N = between.both_N & (between.rollout.values_N == 0)
    total = float(d_N.sum())
    if zero_N.sum() < GIVEN or zero_N.sum() > 0.5 * between.both_N.sum() or d_N[zero_N].sum() < ON_GIVEN * total:
        return None
    # What a filter leaves alone stands alone: what an environment writes are several tokens in a row.
    if 2 * int((zero_N[1:] & zero_N[:-1]).sum()) < int(zero_N.sum()):
        return None
    holders = int((batch.flat.count(zero_N) > 0).sum())
    return MismatchCause(
        f"all of it on {int(zero_N.sum())} tokens that no engine sampled, tool output or another given text",
        "tokens that an environment (a tool, a user) wrote are in the loss mask: the engine gives them no "
        "log-probability (exactly 0), and the policy is trained on words that are not its own",
        [
            shown("share of the mismatch on tokens whose rollout log-probability is exactly 0",
                  float(d_N[zero_N].sum()) / total, f"< {ON_GIVEN:g}"),
            shown("samples that hold them", holders),
        ],
        is_of_a_forward=True,
    )  # fmt: skip


def _likeliest(between: Gap) -> MismatchCause | None:
    """An engine that reports the best token of each place in the place of the one that it sampled."""
    found = of_the_likeliest(between)
    if found is None:
        return None
    others, own = found
    return MismatchCause(
        "the engine's numbers are those of the likeliest token of each place, not of the sampled one",
        "the engine's log-probabilities are taken from the head of its top list (the first of top_logprobs, an "
        "argmax) and not looked up by the token that was sampled: they agree where that is the "
        "likeliest, and are too large everywhere else",
        [
            shown("tokens with a likelier one beside them, which the engine gives more", others),
            shown("tokens that agree", own),
            shown("of those that the trainer gives over half, how many agree", f"over {100 * MOSTLY_SAME:.0f} %"),
        ],
        is_of_a_forward=True,
        is_of_tokens=True,
    )


#: Tokens of first turns, and of later ones, before they tell; and how little the former are off beside the latter.
OF_TURNS, BESIDE_TURNS = 24, 0.1


def _of_later_turns(batch: StepBatch, between: Gap) -> MismatchCause | None:
    """First turns that agree, in samples whose later turns do not: what stands before a later turn is not the same."""
    later_N = np.zeros(between.both_N.size, dtype=bool)
    several_N = np.zeros(between.both_N.size, dtype=bool)
    for span in batch.flat.spans:
        at = span.start + np.flatnonzero(between.both_N[span])
        gaps = np.flatnonzero(np.diff(at) > 2) if len(at) else np.zeros(0, dtype=int)
        if gaps.size:
            later_N[at[gaps[0] + 1 :]] = True
            several_N[at] = True
    first_N = several_N & ~later_N
    if min(int(first_N.sum()), int(later_N.sum())) < OF_TURNS:
        return None
    d_N = np.zeros(between.both_N.size)
    d_N[between.both_N] = np.abs(between.d)
    first, later = float(d_N[first_N].mean()), float(d_N[later_N].mean())
    if later <= DISAGREE or first > min(BESIDE_TURNS * later, DISAGREE) or not _are_most(d_N, later_N):
        return None
    off = batch.flat.count(later_N & (d_N > DISAGREE))
    several = int((batch.flat.count(later_N) > 0).sum())
    return MismatchCause(
        "all of it behind the first tool output or user turn, first turns agree: engine and trainer see another "
        "conversation before the later turns",
        "what stands before a later turn is not the same on the two sides: the chat template drops or rewrites what an "
        "earlier turn held (its thinking, its tool calls) when the engine is asked again, tool output is cut or is "
        "encoded otherwise, or a separator is missing. Take over the tokens that the engine was given, and never build "
        "the history anew from messages",
        [
            shown("mean |d| of first turns", first),
            shown("mean |d| of later turns", later, "as the first"),
            shown("responses of several turns whose later ones are off", share(int((off > 0).sum()), several)),
        ],
        is_of_a_forward=True,
    )


#: Tokens on either side of a place near the limit, the share of them that has to be on its side, and how much of the
#: limit its end is at most.
ON_EITHER, ON_ITS_SIDE, END_OF_ALL = 8, 0.9, 0.34


def _near_the_limit(batch: StepBatch, between: Gap) -> MismatchCause | None:
    """The last places that a response may have, where all of the difference lies there, however long a response is."""
    inside_N = batch.response_N if batch.response_N is not None else between.both_N
    place_N = batch.flat.position_N - np.repeat(batch.flat.first(inside_N), batch.flat.lengths_B)
    places, off = place_N[between.both_N], np.abs(between.d) > DISAGREE
    limit = batch.laid.algorithm.number(*RESPONSE_LIMITS) or float(places.max(initial=0)) + 1
    if not off.any() or places.max() >= limit:
        return None
    for first in np.unique(places[off]):
        behind = places >= first
        if first < (1 - END_OF_ALL) * limit or min(behind.sum(), (~behind).sum()) < ON_EITHER:
            continue
        if off[behind].mean() < ON_ITS_SIDE or off[~behind].any():
            continue
        # Ends of responses of every length are another matter: shorter ones have to agree to their own.
        ends_B = batch.flat.last(between.both_N) - batch.flat.first(inside_N) + 1
        if int(((ends_B > 0) & (ends_B <= first)).sum()) < 2:
            return None
        each = np.abs(between.d)
        count = int(limit - first)
        return MismatchCause(
            f"all of it in the last {count} of the {limit:g} tokens that a response may have, shorter ones agree to "
            "their end",
            "what the engine says of tokens near its limit is not of these tokens: drafts of speculative decoding "
            "(MTP) that it may not take any more, a block or a buffer that ends there, or a length that the two sides "
            "do not share",
            [
                shown(f"mean |d| from token {int(first) + 1} on", float(each[behind].mean())),
                shown("mean |d| before it", float(each[~behind].mean())),
                shown("tokens behind it", int(behind.sum())),
            ],
            is_of_a_forward=True,
            is_of_tokens=True,
        )
    return None


def _are_most(d_N: Array, part_N: Array) -> bool:
    return bool(d_N[part_N].sum() >= ON_GIVEN * d_N.sum())


#: Rows side by side that are off, and as many that agree, before it is no chance; and how little those differ.
ROWS, AGREES = 8, 0.1


def _block_of_rows(between: Gap) -> MismatchCause | None:
    """Rows side by side that are all off, while all others agree: what one replica of the engine sampled."""
    heard_B = np.isfinite(between.by_sample_B)
    each_B = np.nan_to_num(between.by_sample_B)
    off = np.flatnonzero(heard_B & (each_B > DISAGREE))
    if len(off) < ROWS:
        return None
    inside_B = np.zeros(len(each_B), bool)
    inside_B[off[0] : off[-1] + 1] = True
    others_B = heard_B & ~inside_B
    if others_B.sum() < ROWS or len(off) < (1 - AGREES) * (heard_B & inside_B).sum():
        return None
    if each_B[others_B].max() > min(AGREES * each_B[off].mean(), DISAGREE):
        return None
    # Replicas are dealt as many rows each: so many of one's are no whole fraction where prompts of any number are old.
    part = min(int(inside_B.sum()), len(each_B) - int(inside_B.sum()))
    if len(each_B) % part or off[0] % part:
        return None
    if _are_of_a_minibatch(between, inside_B, heard_B):
        return MismatchCause(
            f"all of it in the rows of a later mini-batch ({off[0]} to {off[-1]}), the other {int(others_B.sum())} "
            "agree: the trainer's numbers are taken after an update",
            "log-probabilities of these rows are of the policy as the mini-batches before have left it, not of the one "
            "that sampled: old ones are taken anew in the loop, or none are recorded; where they are, this is how far "
            "one update moves the policy",
            [
                shown(f"mean |d| of rows {off[0]} to {off[-1]}", float(each_B[off].mean())),
                shown("largest mean |d| of the others", float(each_B[others_B].max())),
            ],
        )
    return MismatchCause(
        f"all of it in rows {off[0]} to {off[-1]}, the other {int(others_B.sum())} agree: one replica of the engine",
        "one of several replicas of the engine (or what one rank sampled) has other weights than the trainer: an "
        "update did not reach it, or it was loaded from another checkpoint; or these rows are of an earlier step (a "
        "buffer, rollouts that were continued)",
        [
            shown(f"mean |d| of rows {off[0]} to {off[-1]}", float(each_B[off].mean())),
            shown("largest mean |d| of the others", float(each_B[others_B].max())),
        ],
        is_of_tokens=True,
    )


def _are_of_a_minibatch(between: Gap, inside_B: Array, heard_B: Array) -> bool:
    """Whether these rows are those of the mini-batches (or epochs) behind the first, as the trainer's record says, of
    all that both sides are known of: the engine's numbers may stand beside a batch's first epoch alone.
    """
    keys = between.batch.laid.keys_of(between.trainer.name)
    if any(key is None for key in keys):
        return False
    later_B = np.array([bool(key is not None and (key.minibatch or key.epoch)) for key in keys])
    return bool((later_B & heard_B).any()) and bool((later_B == inside_B)[heard_B].all())


def _not_one_number(batch: StepBatch, ranges: list[Evidence]) -> MismatchCause:
    """The trainer gives one token after one prefix different numbers: at random, or by what else is in the batch."""
    claim = "the trainer gives one token after one prefix different numbers"
    moved = _moved_before_update(batch)
    if moved is not None:
        ranges = [*ranges, shown("mean |policy - old| before any update", moved, "0")]
    if moved is not None and moved <= SAME_FORWARD:
        return MismatchCause(
            claim,
            "samples see what else is in their batch: neighbours of a pack (no block-diagonal mask), or padding (mask, "
            "positions); two forwards of one batch agree, so that it is not dropout",
            ranges,
            is_of_a_forward=True,
        )
    return MismatchCause(
        claim,
        "dropout is left on in the trainer's forward (train mode), or samples see what else is in their batch: "
        "neighbours of a pack, or padding (mask, positions)"
        + (
            "; or old log-probabilities are recomputed between the updates of a batch, with other weights each time"
            if batch.columns.of("policy_logprobs") is None
            else ""
        ),
        ranges,
        is_of_a_forward=True,
        is_random=True,
    )


#: Two forwards of one batch by one set of weights differ by less, in bf16 too.
SAME_FORWARD = 1e-2
#: Differences that are no rounding, nats; and the share of tokens of either kind that lie on their side.
BEYOND_ROUNDING, SIDED = 0.03, 0.85


class Repeated(Struct):
    """trainer - rollout of tokens that stood in the context before, and of those that did not, where they differ by
    more than rounding: of one batch, or of a run's.
    """

    again: list[Array] = field(default_factory=list)
    new: list[Array] = field(default_factory=list)

    def take(self, batch: StepBatch, between: Gap) -> None:
        tokens_N = batch.tokens_N
        if tokens_N is None or between.mean <= DISAGREE:
            return
        again_N = np.zeros(tokens_N.size, dtype=bool)
        for span in batch.flat.spans:
            again_N[span.start + 1 : span.stop] = True
            again_N[span.start + np.unique(tokens_N[span], return_index=True)[1]] = False
        far = np.abs(between.d) > BEYOND_ROUNDING
        self.again.append(between.d[far & again_N[between.both_N]])
        self.new.append(between.d[far & ~again_N[between.both_N]])

    def told(self) -> MismatchCause | None:
        """An engine that gives tokens which stood in the context before less than the trainer, and all others more."""
        again, new = (np.concatenate(each) if each else np.zeros(0) for each in (self.again, self.new))
        if min(again.size, new.size) < FEWEST:
            return None
        less, more = float((again > 0).mean()), float((new < 0).mean())
        if min(less, more) < SIDED or float(again.mean()) < DISAGREE:
            return None
        return MismatchCause(
            "the engine gives tokens that stood in the context before less, and all others more: a repetition penalty",
            "the engine samples with a repetition, presence or frequency penalty (often of the model's "
            "generation_config) that the trainer's log-probabilities know nothing of: set it to 1 (0), or take "
            "log-probabilities before it",
            [
                shown("tokens that stood before and that it gives less", less, "about 0.5"),
                shown("tokens that did not and that it gives more", more, "about 0.5"),
                shown("mean trainer - rollout of the former", float(again.mean())),
                shown("mean trainer - rollout of the latter", float(new.mean())),
            ],
        )


#: Nats per token that a gather of other tokens costs; the share of them that it gives less; how little they then
#: rise and fall with the engine's; and how much the entropies do, whose mean is off by this share at the most.
ELSEWHERE, LESS, UNLIKE, FITS, OFF = 1.0, 0.97, 0.3, 0.4, 0.3


def gathered_elsewhere(batch: StepBatch, between: Gap) -> MismatchCause | None:
    """A trainer whose entropies are those of the engine's places, and whose log-probabilities are of other tokens. One
    that has another prompt, or other weights, gives some of the sampled tokens more and gets the format right.
    """
    entropy = batch.columns.of("entropy")
    if entropy is None or between.mean < ELSEWHERE or between.one_sided < LESS or between.correlation > UNLIKE:
        return None
    known_N = also(between, entropy)
    own, engine = entropy.values_N[known_N], -between.rollout.values_N[known_N]
    if own.size < 4 * FEWEST or not (own.std() > 0 and engine.std() > 0):
        return None
    fits = float(np.corrcoef(own, engine)[0, 1])
    if fits < FITS or abs(float(own.mean()) - float(engine.mean())) > OFF * float(engine.mean()):
        return None
    return MismatchCause(
        "its entropies fit the tokens that were sampled, its log-probabilities do not: they are of other tokens",
        "the forward is right and the gather is not: labels are not shifted by one against the logits, or shifted "
        "twice. Take logits[:, :-1] beside labels[:, 1:]",
        [
            shown("mean entropy of the trainer's", float(own.mean())),
            shown("mean -log p of the engine's", float(engine.mean()), "about the same"),
            shown("correlation of the two", fits),
            shown("tokens that the trainer gives less", between.one_sided, "about 0.5"),
        ],
        is_of_a_forward=True,
        is_of_tokens=True,
    )


#: The part of the samples that has to agree, and how near they are to what the others are apart.
SPARED, AGREE = 0.2, 0.1


def other_tokens(batch: StepBatch, between: Gap) -> Evidence | None:
    """Of the tokens that are far apart in the samples that are off, the share that the trainer finds less probable than
    the engine did, where that is nearly all, and a part of the samples agrees: other weights find some of them more
    probable, and spare no sample. None where it is not so.
    """
    d_N = np.zeros(between.both_N.size)
    d_N[between.both_N] = between.d
    off_B = np.nan_to_num(between.by_sample_B) > DISAGREE
    off_N = np.repeat(off_B, batch.flat.lengths_B) & between.both_N
    far_N = off_N & (np.abs(d_N) > 0.5)
    fine_B = ~off_B & np.isfinite(between.by_sample_B)
    if len(batch) < 4 or far_N.sum() < FEWEST or fine_B.mean() < SPARED:
        return None
    if np.median(between.by_sample_B[fine_B]) > AGREE * np.median(between.by_sample_B[off_B]):
        return None
    version = batch.columns.of("weight_version")
    if version is not None:
        # Samples that name older weights are off by these, and what those favoured the newer may not.
        newest_B = batch.flat.extremes(version.values_N, version.said_N & (version.values_N >= 0))[1]
        if np.nan_to_num(newest_B[off_B], nan=np.inf).max() < np.nan_to_num(newest_B[fine_B], nan=-np.inf).min():
            return None
    less = float((d_N[far_N] < 0).mean())
    return shown("tokens far apart that the trainer finds less probable", less, "about 0.5") if less > 0.85 else None


def _by_prompt_length(batch: StepBatch, between: Gap, head_B: Array) -> MismatchCause | None:
    """Where samples agree whose prompts have one length, the shortest or the longest, and those of other lengths do
    not: positions that begin elsewhere by as much as a prompt is shorter or longer.
    """
    known_B = ~np.isnan(between.by_sample_B)
    fine_B = known_B & (between.by_sample_B <= DISAGREE)
    off_B = known_B & ~fine_B
    if fine_B.sum() < 3 or off_B.sum() < 3:
        return None
    fine, off = np.unique(head_B[fine_B]), np.unique(head_B[off_B])
    if fine.size != 1 or off.size < 2 or not (fine[0] < off.min() or fine[0] > off.max()):
        return None
    return MismatchCause(
        f"only prompts of {int(fine[0])} tokens agree",
        "position ids count from another place than the engine's, by as much as a prompt is longer or shorter: padding "
        "is counted in them, or left out twice",
        [shown("samples that agree", int(fine_B.sum())), shown("tokens of their prompts", int(fine[0])),
         shown("tokens of the others' prompts", listed(off))],
    )  # fmt: skip


def _at_random(batch: StepBatch) -> list[Evidence] | None:
    """Before any update old and new log-probabilities are of one set of weights: figures of them where they are as far
    from each other as either is from the rollout. (Old ones of other weights are far, and the new ones are not.)
    """
    policy, old = batch.columns.of("policy_logprobs"), batch.columns.of("old_logprobs")
    rollout = batch.columns.of("rollout_logprobs")
    if policy is None or old is None or rollout is None:
        return None
    both_N = (
        before_any_update_N(batch) & batch.pair(policy, old) & batch.pair(policy, rollout) & batch.pair(old, rollout)
    )
    if both_N.sum() < FEWEST:
        return None
    apart = [
        float(np.abs(a.values_N[both_N] - b.values_N[both_N]).mean())
        for a, b in ((policy, old), (policy, rollout), (old, rollout))
    ]
    if min(apart) < max(RANDOM * max(apart), DISAGREE):
        return None
    return [shown("mean |policy - old| before any update", apart[0], "0"), shown("mean |policy - rollout|", apart[1]),
            shown("mean |old - rollout|", apart[2])]  # fmt: skip


def _moved_before_update(batch: StepBatch) -> float | None:
    """mean |policy - old| over the first update of the batch; None where one of the two is not recorded."""
    policy, old = batch.columns.of("policy_logprobs"), batch.columns.of("old_logprobs")
    if policy is None or old is None:
        return None
    both_N = batch.pair(policy, old) & before_any_update_N(batch)
    if both_N.sum() < FEWEST:
        return None
    return float(np.abs(policy.values_N[both_N] - old.values_N[both_N]).mean())


def _side(between: Gap) -> str | None:
    """Which side parts from the reference, where the other does not: `trainer` or `engine`."""
    ref = between.batch.columns.of("ref_logprobs")
    if ref is None or between.from_reference is None:
        return None
    if between.from_reference < 0.2 * between.mean:
        return "trainer"
    known_N = also(between, ref)
    own = float(np.abs(between.trainer.values_N[known_N] - ref.values_N[known_N]).mean())
    return "engine" if own < 0.2 * between.mean else None
