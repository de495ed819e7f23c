"""Rollout and trainer at different temperatures, and what top-p, top-k or a ban leaves of the distribution."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from msgspec.structs import replace

from replay_core.diagnose.algorithm import is_truncated
from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.case import Case
from replay_core.diagnose.collected import AGREES, Surprise
from replay_core.diagnose.compared import BOTH, compared, figures_of, worst_of
from replay_core.diagnose.finding import Finding, Where, error, finding, shown, warning
from replay_core.diagnose.gap import OLDEST, Gap, gap
from replay_core.diagnose.merging import merged, weighed
from replay_core.diagnose.padded_vocabulary import Padded, padded_vocabulary
from replay_core.diagnose.rule import Skip, given, rule
from replay_core.diagnose.rules.unsampled import replaced_N
from replay_core.diagnose.softmax import stated_temperature


@rule("D10", "rollout and trainer use another temperature", link="rollout_logprobs", scope="case",
      explains=("L10", "D09", "D11", "D12", "D14", "D15", "D24", "D25"), lasts=True,
      source="trl#3029 #4159, OpenRLHF#853, NeMo-RL#935, miles#1345; measured: slope 1.63 at T = 0.6")  # fmt: skip
def tempered(case: Case) -> Iterator[Finding]:
    """Least squares slope of rollout on trainer log-probabilities, through their means: 1 / T of a rollout at T
    beside a trainer that does not divide its logits; where that does not fit, the temperature that makes
    p^(1/T) / (p^(1/T) + (1 - p)^(1/T)) of the trainer's p. An error where T is off 1 by 0.1 at a correlation above 0.9
    and takes away at least 40 % of the difference.

    Tokens that samples drew after the very same tokens (6 and more beyond each place's first) tell it best: within a
    place the slope is 1 / T whatever else could have been drawn, and 1 if top-p or top-k were renormalised. A slope
    that is 1 there is no temperature, and neither is a rollout that gives unsure tokens more and none less, all by
    about one number.

    Another mistake is told first: log p / T, divided after the softmax, is one factor of the trainer's log p through
    the origin (5 % of the difference left, 16 tokens and more); beside a trainer at the temperature that the dump
    states, the two differ by -log sum p^(1/T), within what one other token or all of a vocabulary would leave.

    Which side has the temperature that tokens were drawn at is told where entropies are recorded: the trainer's, where
    its mean -log p is its mean entropy (to .15 of what the other temperature would make of it); the rollout's, where it
    is off by a quarter of that, and 3 standard errors.

    A warning where the dump begins after the second step, no tokens of one place tell and the two are half a nat and
    less apart: older samples look so, too.

    A temperature is a setting: where the first step of the run has none of it (.01 nats and less), it is told of one
    that was changed between two steps alone: none in 2 steps and more, and one temperature, to 3 %, in all later ones,
    of 3 and more. A policy that gets sharper with its updates looks as if its older samples were drawn at a higher one,
    and at another in each step.
    """
    found: list[Finding] = []
    means: list[float] = []
    whys: list[str] = []
    told: list[tuple[StepBatch, Gap, bool]] = []
    surprise = Surprise()
    starts_without = False
    for batch in case.batches():
        try:
            between = compared(batch)
        except Skip as skip:
            whys.append(str(skip))
            continue
        starts_without |= not means and batch.step in (0, 1) and between.mean <= AGREES and len(case.steps()) > 1
        if starts_without and len(told) != len([mean for mean in means if mean > AGREES]):
            return  # it came, and was no temperature, or no longer
        means.append(between.mean)
        # Of a dump that begins later samples may be older: only tokens drawn in one place tell them from a temperature.
        sure = (
            case.begins
            or between.mean > OLDEST
            or between.after_softmax is not None
            or between.contexts.temperature is not None
        )
        if between.after_softmax is not None or between.is_tempered:
            told.append((batch, between, sure))
        if between.is_tempered:
            surprise.take(between)
    if starts_without and not _was_changed(
        means, [given(between.gain) for _, between, _ in told if between.is_tempered]
    ):
        return
    since = f", since step {told[0][0].step}" if starts_without else ""
    for batch, between, sure in told:
        one = _tempered(batch, between, surprise)
        steps = () if batch.step is None else (batch.step,)
        claim = one.claim + since
        found.append(replace(one, claim=claim, steps=steps, severity=one.severity if sure else "warning"))
    if not means:
        raise Skip(max(whys, key=whys.count, default="the dump holds no batch of samples"))
    yield from (weighed(one, len(means), varies=False) for one in merged(found))


#: Steps without a difference, and with one, of a temperature that was changed in the middle of a run; how far the
#: temperatures of its steps are apart at most, as a share.
BEFORE, AFTER, ONE = 2, 3, 0.03


def _was_changed(means: list[float], gains: list[float]) -> bool:
    """Whether mean |d| by step is none up to a step, and of one temperature in all later ones; `gains`: theirs."""
    before = len(means) - len(gains)
    return (
        before >= BEFORE
        and len(gains) >= AFTER
        and max(means[:before]) <= AGREES
        and min(means[before:]) > AGREES
        and max(gains) <= (1 + ONE) * min(gains)
    )


def _tempered(batch: StepBatch, between: Gap, surprise: Surprise) -> Finding:
    place = batch.laid.where("rollout_logprobs", at=worst_of(between))
    if between.after_softmax is not None:
        return _after_softmax(between, between.after_softmax, place)
    stated, gain = stated_temperature(batch), given(between.gain)
    drawn = surprise.is_drawn(gain)
    why, cause = _why(gain, stated, drawn)
    return error(
        f"rollout and trainer are at different temperatures: {gain:.2f} explains their difference{why}",
        place,
        shown("temperature that explains it", gain, "0.9 to 1.1"),
        shown("slope of rollout on trainer", between.slope),
        *(
            [
                shown("slope over tokens drawn in one place", between.contexts.slope, "0.9 to 1.1"),
                shown("tokens drawn in one place", between.contexts.tokens),
            ]
            if between.contexts.temperature is not None
            else []
        ),
        shown("correlation", between.correlation),
        *([] if stated is None else [shown("temperature the dump states", stated)]),
        *([] if drawn is None else [shown("mean -log p - entropy of the trainer's", surprise.mean, "0")]),
        *figures_of(between),
        cause=cause,
        next_step=batch.laid.mismatch_command(),
    )


#: How near the temperature between the two is to the stated one, before it is the one that a side leaves out.
LEFT_OUT = 0.03
#: Of what a stated temperature would make of the difference.
_AS_STATED = 0.1


def _why(gain: float, stated: float | None, drawn: bool | None) -> tuple[str, str]:
    """What makes a difference of so much, for the claim and as a cause: what of it the stated temperature decides, and
    whether tokens were `drawn` at the trainer's temperature (None: it is not told).
    """
    raw = (
        f"the trainer divides its logits by about T = {1 / gain:.2f} and the engine returns raw log-probabilities "
        "(before the temperature)"
    )
    is_as_stated = bool(stated and abs(stated - 1) > _AS_STATED and abs(gain * stated - 1) < _AS_STATED)
    if drawn:
        return (
            ", and tokens were sampled at the trainer's: the engine reports raw log-probabilities",
            f"{raw}. Let it return processed ones (vLLM: logprobs_mode)",
        )
    if stated and abs(stated - 1) > _AS_STATED and abs(gain / stated - 1) < LEFT_OUT:
        return (
            ", the one that the run states: the trainer's log-probabilities leave it out",
            f"the engine samples, and reports, at the T = {stated:g} that is stated, and the trainer's forward does "
            "not divide its logits by it: ratio, KL and loss are of another distribution than was sampled",
        )
    if is_as_stated:
        # How far apart the two are is told, and not how cold: sampling at 1 beside T looks like T beside T twice.
        twice = f"the trainer divides by the temperature of {stated:g} twice"
        if drawn is False:
            return (
                ", and tokens were sampled at the rollout's",
                f"{twice}, or the engine samples without it (at 1)",
            )
        return "", f"{raw}; or {twice}"
    if drawn is False and gain > 1:
        return "", f"the rollout was sampled at about T = {gain:.2f} times the trainer's temperature"
    if gain < 1:
        return "", f"the rollout was sampled at about T = {gain:.2f} and the trainer's logits are not divided by it"
    return "", f"{raw}; or the rollout was sampled at T = {gain:.2f}"


def _after_softmax(between: Gap, temperature: float, place: Where) -> Finding:
    return error(
        f"rollout log-probabilities were divided by a temperature ({temperature:.2f}) after the softmax: they are no "
        "log-probabilities",
        place,
        shown("temperature that explains it", temperature, "1"),
        shown("slope of rollout on trainer", between.slope),
        shown("mean rollout log-probability", float(between.rollout.values_N[between.both_N].mean())),
        shown("mean trainer log-probability", float(between.trainer.values_N[between.both_N].mean())),
        *figures_of(between),
        cause="log_softmax(logits) / T in place of log_softmax(logits / T): raw log-probabilities of the engine are "
        "scaled by the sampling temperature afterwards. Divide the logits, or let the engine return processed "
        "log-probabilities",
        next_step=between.batch.laid.mismatch_command(),
    )


@rule("D11", "rollout log-probabilities are renormalised over top-p or top-k", link="rollout_logprobs", scope="batch",
      needs=BOTH,
      explains=("L10", "D09", "D12", "D14", "D20", "D24", "D26"), lasts=True,
      source="verl#6240, trl#6789, ms-swift#8442, vllm#42259")  # fmt: skip
def renormalised(batch: StepBatch) -> Finding | None:
    """The rollout gives more to over 90 % of its own tokens, by 0.005 nats and more on average, with no change of
    slope: what is left of the distribution after top-p or top-k was normalised again. An error where the run states
    that neither is used, or no response ends; worth knowing where it states one (the engine says what it sampled from,
    and ratios to it hold the part that was cut off); else a warning. Where all of it lies on the first k places of
    responses, none of which is shorter than k + 1, it is an end that is forbidden there (min_tokens).

    Where neither is stated, or that they are not used, and the head has more columns than tokens (as stated,
    by its recorded or saved rows, or since the size is made divisible by a stated number), the trainer's softmax over
    all of them is named first: it leaves each token less, by no more than the columns' share of all.
    """
    between = gap(batch)
    if not between.is_truncated or replaced_N(batch, between) is not None:
        return None
    place = batch.laid.where("rollout_logprobs", at=worst_of(between))
    kept = float(np.exp(between.d.mean()))
    endless = _never_ends(batch, between)
    if (until := _never_ends_before(batch, between)) is not None:
        return _forbidden(batch, between, until)
    stated = is_truncated(batch.laid.algorithm)
    padded = None if endless or stated else padded_vocabulary(batch)
    # Columns whose logits are no more than the mean token's take no more than their share of all columns.
    if padded is not None and kept >= padded.tokens / padded.columns:
        return _of_padding(batch, between, padded, stated)
    return finding(
        "error" if endless or stated is False else "warning" if stated is None else "info",
        (
            "no response ends: all are cut off at the length limit, and the engine gives their tokens more than the "
            "trainer: it may not write the end token (EOS), and what is left is renormalised"
            if endless
            else "rollout log-probabilities are renormalised over top-p or top-k: "
            f"{between.one_sided:.0%} of the tokens have more of it than the trainer gives them"
        ),
        place,
        shown("share of tokens with rollout > trainer", between.one_sided, "about 0.5"),
        shown("mean rollout - trainer", -float(between.d.mean()), "0"),
        shown("probability kept, geometric mean", kept),
        shown("probability kept, least (1 % of the tokens)", float(np.exp(np.quantile(between.d, 0.01)))),
        shown("slope of rollout on trainer", between.slope, "0.9 to 1.1"),
        *figures_of(between),
        cause="ignore_eos, a min_tokens as large as the limit, or a logit bias bans the end token in the engine: its "
        "log-probabilities are of what is left, the trainer's of the whole"
        if endless
        else "the engine returns log-probabilities of what is left of the distribution, the trainer of the whole: "
        "top-p, top-k or min-p, or tokens that it may not write: an end before min_tokens, a grammar, banned words",
        next_step=batch.laid.mismatch_command() + "   # then set logprobs_mode=raw, or top_p=1 and top_k=-1",
    )


def _of_padding(batch: StepBatch, between: Gap, padded: Padded, stated: bool | None) -> Finding:
    """The same of a run whose head is padded, and that states no top-p and no top-k."""
    kept = float(np.exp(between.d.mean()))
    saved = [] if padded.saved is None else [shown("rows of the head in the checkpoint", padded.saved)]
    return finding(
        "warning" if stated is None else "error",
        f"the trainer gives {between.one_sided:.0%} of the tokens less than the engine: its softmax counts columns "
        f"that stand for no token (a vocabulary of {padded.tokens} that is padded to {padded.columns}), or rollout "
        "log-probabilities are renormalised over top-p or top-k, which the run does not state",
        batch.laid.where(between.trainer.name, at=worst_of(between)),
        shown("share of tokens with rollout > trainer", between.one_sided, "about 0.5"),
        shown("mean rollout - trainer", -float(between.d.mean()), "0"),
        shown("columns of the head", padded.columns, f"{padded.tokens}, one for each token", padded.source),
        *saved,
        shown("probability that is left for tokens, geometric mean", kept, "1"),
        shown("slope of rollout on trainer", between.slope, "0.9 to 1.1"),
        *figures_of(between),
        cause="the trainer's head is padded (to a multiple that its ranks share), its softmax is over all columns, and "
        "those without a token, whose logits are near 0, take a part of the probability: every log-probability and "
        "entropy of the trainer is off, while the engine leaves the columns out. What is saved as a checkpoint may "
        "lack them. Else the engine samples with a top-p or top-k that nobody states (a generation_config.json)",
        next_step="set the trainer's logits[..., vocab_size:] to -inf (or cut them off) before the softmax; "
        "rldbg replay of one micro-batch tells which of the two the checkpoint agrees with",
    )  # fmt: skip


#: Tokens on either side of a place, and what is left behind it of the difference before it, before the place is one.
ON_EITHER, BEHIND = 8, 0.01


def _never_ends_before(batch: StepBatch, between: Gap) -> int | None:
    """The place of responses before which all of the difference lies, where none of them ends before it; else None."""
    inside_N = batch.response_N if batch.response_N is not None else between.both_N
    place_N = batch.flat.position_N - np.repeat(batch.flat.first(inside_N), batch.flat.lengths_B)
    place, size = place_N[between.both_N], np.abs(between.d)
    counts_B = batch.flat.count(between.both_N)
    off = place[size > 0.02]
    if not off.size or place.min(initial=0) < 0:
        return None
    until = int(off.max()) + 1
    behind = place >= until
    if min(behind.sum(), (~behind).sum()) < ON_EITHER or float(size[behind].max()) > BEHIND * float(size.max()):
        return None
    heard_B = counts_B > 0
    return until if heard_B.any() and int(counts_B[heard_B].min()) > until else None


def _forbidden(batch: StepBatch, between: Gap, until: int) -> Finding:
    place = batch.flat.position_N - np.repeat(batch.flat.first(between.both_N), batch.flat.lengths_B)
    before = place[between.both_N] < until
    return warning(
        f"the engine may not end a response before token {until + 1}: it gives the first {until} tokens more than the "
        "trainer, none less, and agrees on all behind them",
        batch.laid.where("rollout_logprobs", at=worst_of(between)),
        shown(f"mean rollout - trainer of the first {until} tokens", -float(between.d[before].mean()), "0"),
        shown("mean |rollout - trainer| behind them", float(np.abs(between.d[~before]).mean())),
        shown("tokens of the shortest response", int(batch.flat.count(between.both_N).min())),
        *figures_of(between),
        cause=f"min_tokens = {until} (or another processor that bans the end token there): the engine's "
        "log-probabilities are renormalised over what is left, the trainer's are of the whole vocabulary",
        next_step="set min_tokens to 0, or take raw log-probabilities (logprobs_mode=raw_logprobs)",
    )


def _never_ends(batch: StepBatch, between: Gap) -> bool:
    """Whether all responses have one length, the limit, where the trainer would end them: at some places it gives the
    token that was written less than half of what the engine does. (What top-p keeps is most of a distribution.)
    """
    counts_B = batch.flat.count(between.both_N)
    cut_B = batch.truncated_flag_B
    if len(counts_B) < 4 or counts_B.min() < 4 or counts_B.min() != counts_B.max():
        return False
    kept = np.exp(between.d)
    ends = float((kept < 0.5).mean())
    return (cut_B is None or bool(cut_B.all())) and ends > 0.02
