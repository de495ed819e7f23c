"""The loss, recomputed: which reduction is it, and is 0 a 0.

The chain of a zero: rewards (none differ in a group: `rewards`) -> masks (no token counts: `masks`) -> gradient (0
although they do: `gradient`). A loss of 0 alone is none of them: with an on-policy ratio of 1 and centred advantages
it is 0 by construction, while its gradient is not.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from replay_core.diagnose import trends
from replay_core.diagnose.algorithm import (
    RESPONSE_LIMITS,
    aggregation,
    divides_by_micro_batch,
    divides_by_update,
    entropy_bonus,
    is_dapo,
    of_loss,
    stated_number,
)
from replay_core.diagnose.batch import StepBatch, largest_advantage, worked_out_once
from replay_core.diagnose.case import Case
from replay_core.diagnose.columns import Scalar
from replay_core.diagnose.compared import disagrees
from replay_core.diagnose.finding import Evidence, Finding, Where, error, finding, info, listed, look_at, shown, warning
from replay_core.diagnose.flat import Array
from replay_core.diagnose.log_steps import StepTold, numbers, steps_of, steps_told
from replay_core.diagnose.own_means import TERMS, OwnMean, is_own, own_means
from replay_core.diagnose.printed import is_of_decimals
from replay_core.diagnose.rule import Skip, given, rule, skip_if
from replay_core.diagnose.rules.ratio import ratios
from replay_core.diagnose.rules.summed import over_slots, summed_kl, undivided
from replay_core.diagnose.rules.terms import weights_left_out
from replay_core.diagnose.signals import RunLog
from replay_core.diagnose.surrogates import logged_of, surrogates
from replay_core.objectives import advantages, policy_loss, reductions

#: Relative agreement of a recomputed loss, and an absolute floor for losses that cancel.
CLOSE, FLOOR = 1e-4, 1e-6
#: A loss so far from 0 tells a constant that it was divided by.
TELLS = 100 * FLOOR
#: How many times the weight of another a token may have through its micro-batch's own denominator. Micro-batches of
#: genuine runs lie within 1.6.
UNEVEN = 3.0
#: A displayed loss below this is "0.0000".
ZERO = 1e-4
#: Megatron's schedule divides what a loss function returns by the micro-batches: theirs multiply by them first.
_SCHEDULED = "token-sum over the tokens of the update, times its micro-batches"
#: A plain loop divides each micro-batch's mean by how many it accumulates.
_SHARED = ", over the number of its update's micro-batches"
#: What averages gradients over ranks divides each rank's mean by how many there are.
_RANKED = ", over the number of ranks"


class _MicroLoss(Struct, frozen=True):
    """One micro-batch's loss and the samples it was computed from: dense [B, T], padded with zeros."""

    logged: Scalar
    values_BT: Array
    mask_BT: Array
    widths: dict[str, int]
    """How wide its rows are, by what they hold."""
    update_tokens: int = 0
    """Tokens and samples of all micro-batches of its optimizer step."""
    update_samples: int = 0
    ranks: int = 1
    """Ranks of that step."""
    micros: int = 1
    """Micro-batches that each of these ranks takes for it."""
    attended: int = 0
    """Tokens of its samples, prompts and all."""
    update_attended: int = 0
    """The same of all micro-batches of its optimizer step."""
    answered: int = 0
    """Tokens of its responses, those that the mask leaves out (tool output) and all."""
    update_answered: int = 0
    """The same of all micro-batches of its optimizer step."""
    total_answered: float = 0.0
    """The sum of the loss over these tokens."""
    made: dict[str, float] = field(default_factory=dict)
    """What every reduction makes of its tokens (`reductions_of`)."""

    @property
    def value(self) -> float:
        return self.logged.value

    @property
    def tokens(self) -> int:
        return int((self.mask_BT != 0).sum())

    @property
    def total(self) -> float:
        """The sum over its tokens."""
        return float(reductions.masked_sum(self.values_BT, self.mask_BT))

    @property
    def longest(self) -> int:
        """Tokens of its longest response."""
        return int(self.mask_BT.sum(1).max(initial=0))


def reductions_of(part: _MicroLoss, step_tokens: int, step_samples: int) -> Iterator[tuple[str, float]]:
    """Every reduction a framework uses, by name, of one micro-batch's per-token loss."""
    values_BT, mask_BT, total = part.values_BT, part.mask_BT, part.total
    yield "token-mean over the micro-batch", float(reductions.token_mean(values_BT, mask_BT))
    yield "seq-mean-token-mean over the micro-batch", float(reductions.sequence_mean(values_BT, mask_BT))
    yield "seq-mean-token-sum over the micro-batch", float(reductions.sequence_sum_mean(values_BT, mask_BT))
    yield "token-sum over the tokens of the update", total / max(part.update_tokens, 1)
    if part.micros > 1:
        for name, mean in (("token-mean", reductions.token_mean), ("seq-mean-token-mean", reductions.sequence_mean)):
            yield f"{name} over the micro-batch{_SHARED} ({part.micros})", float(mean(values_BT, mask_BT)) / part.micros
    if part.ranks > 1:
        by = part.ranks * part.micros
        for name, mean in (("token-mean", reductions.token_mean), ("seq-mean-token-mean", reductions.sequence_mean)):
            all_of = f"{_RANKED} ({part.ranks})" + (f" and of micro-batches ({part.micros})" if part.micros > 1 else "")
            yield f"{name} over the micro-batch{all_of}", float(mean(values_BT, mask_BT)) / by
        # Gradients are averaged over the ranks afterwards.
        yield (
            "token-sum over the tokens of the update, times the ranks",
            part.ranks * total / max(part.update_tokens, 1),
        )
    if part.micros > 1:
        yield f"{_SCHEDULED} ({part.micros})", part.micros * total / max(part.update_tokens, 1)
    yield (
        "seq-mean-token-mean over the samples of the update",
        float(reductions.sequence_mean(values_BT, mask_BT)) * len(values_BT) / max(part.update_samples, 1),
    )
    yield "seq-mean-token-sum over the samples of the update", total / max(part.update_samples, 1)
    if part.ranks > 1:
        of_ranks = len(values_BT) * part.ranks / max(part.update_samples, 1)
        for name, mean in (
            ("seq-mean-token-mean", reductions.sequence_mean),
            ("seq-mean-token-sum", reductions.sequence_sum_mean),
        ):
            yield f"{name} over the samples of the update, times the ranks", float(mean(values_BT, mask_BT)) * of_ranks
    if len(values_BT) < part.update_samples:
        # verl's, of batches of any size: loss_scale_factor.
        share = len(values_BT) / part.update_samples
        yield (
            "token-mean over the micro-batch, by its share of the samples",
            (float(reductions.token_mean(values_BT, mask_BT)) * share),
        )
    yield "token-sum over the tokens of the step", total / max(step_tokens, 1)
    yield (
        "seq-mean-token-mean over the samples of the step",
        (float(reductions.sequence_mean(values_BT, mask_BT)) * len(values_BT) / max(step_samples, 1)),
    )
    yield "seq-mean-token-sum over the samples of the step", total / max(step_samples, 1)
    yield "token-sum", total


def _agreeing(parts: Sequence[_MicroLoss | _Recomputed]) -> list[str]:
    """The reductions that make every one of these losses."""
    names = parts[0].made if parts else ()
    return [name for name in names if all(name in part.made and _agree(part.made[name], part.value) for part in parts)]


#: What a number of 16 bits is off by, as a share of itself; what the loss of a token is made of, and that it may be
#: recorded in fewer bits than the loss was made of.
_SHORT = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
_FACTORS_OF_TOKENS, _LOGPS = ("advantages", "token_loss", "is_ratio", "is_weights"), ("policy_logprobs", "old_logprobs")


def _is_rounding(batch: StepBatch, parts: list[_MicroLoss]) -> bool:
    """Whether one reduction makes every loss but for what storing its tokens in 16 bits takes from them."""
    columns = {name: batch.columns.of(name) for name in (*_FACTORS_OF_TOKENS, *_LOGPS)}
    off = 0.0
    for name, column in columns.items():
        if column is not None and column.dtype in _SHORT:
            # A ratio is off by as much as its logarithm, however small that is beside 1.
            size = float(np.nanmean(np.abs(column.values_N[column.said_N]))) if name in _LOGPS else 1.0
            off += _SHORT[column.dtype] * size
    if not off or not parts:
        return False
    # What cancels in a sum is rounded all the same.
    sizes = _made_of(
        batch, [part.logged for part in parts],
        np.abs(given(_token_loss(batch)[0])),
    )  # fmt: skip
    if any(
        all(
            abs(part.made[name] - part.value) <= off * size.made[name] + FLOOR
            for part, size in zip(parts, sizes, strict=True)
        )
        for name in parts[0].made
        if all(name in part.made for part in parts)
    ):
        return True
    # Or a sum over a constant that no response is longer than.
    return any(
        all(
            abs(part.total / constant - part.value) <= off * size.total / constant + FLOOR
            for part, size in zip(parts, sizes, strict=True)
        )
        for constant in _near_constants(parts)
    )


def _near_constants(parts: list[_MicroLoss]) -> set[int]:
    """What sums may be divided by, as far as one of the losses says: samples times a length that no response exceeds,
    the nearest of each.
    """
    counts = {max(count, 1) for count in (parts[0].update_samples, len(parts[0].values_BT))}
    told = [part.total / part.value for part in parts if abs(part.value) > TELLS]
    near = {count * round(each / count) for each in told for count in counts}
    return {constant for constant in near if _is_of_samples(constant, parts)}


def _is_of_samples(constant: int, parts: list[_MicroLoss]) -> bool:
    """Whether that is as many samples times a length that no response exceeds."""
    longest = max(part.longest for part in parts)
    counts = [max(count, 1) for count in (parts[0].update_samples, len(parts[0].values_BT))]
    return constant > 0 and any(constant % count == 0 and constant / count >= longest for count in counts)


@rule("D28", "the loss is no known reduction of its tokens", link="reduction", scope="batch",
      needs=("mask", "advantages|token_loss"),
      source="verl agg_loss; TRL grpo, bnpo, dapo, dr_grpo; trl#6369 #6439, prime-rl#583, "
      "open-instruct#1137, SkyRL#1296")  # fmt: skip
def reduction(batch: StepBatch) -> Finding | None:
    """Recomputes the policy loss of every micro-batch from its tokens (recorded, or -A * clipped ratio; times the
    importance weights, where they are recorded and nothing agrees without them) and reduces it as token-mean,
    seq-mean-token-mean, seq-mean-token-sum, token-sum over a constant, over the micro-batch and over the step: one must
    agree with the logged pg_loss to 1e-4 of it in every micro-batch.

    The one that does is named (info); an error where the run states another, or importance weights that the loss is
    made without (a warning where they are recorded and not stated); a warning where it is the sum of the tokens and the
    run states a mean; where DAPO states a mean over tokens and each micro-batch's loss is the mean over its own,
    divided by how many an update has, while these hold unlike many tokens (from 1.05 times on); a warning where none
    does, and info where what engine and trainer disagree by comes to as much:
    importance weights that are not recorded may be in it. Skipped where `loss` alone is logged (it may hold KL and
    entropy terms) and agrees with nothing.
    """
    parts, exact, agreed, constants = _reduced(batch)
    skip_if(not parts, "needs a logged pg_loss or loss per micro-batch, and the tokens it came from")
    # Nothing but a product with 0 is 0 to the last bit: of its reduction that tells nothing, nor of what is stated.
    skip_if(all(part.value == 0 for part in parts), "every logged loss is exactly 0: something multiplies it by 0")
    if (told := _otherwise(batch, parts, agreed, exact=exact)) is not None:
        return told
    if (
        agreed
        and agreed[0] in constants
        and (counts := _counts_left_out(batch, parts, constants[agreed[0]])) is not None
    ):
        return counts
    # A loss of 0 agrees with everything and tells nothing.
    skip_if(all(abs(part.value) < FLOOR for part in parts), "every logged loss is 0: all reductions agree")
    first = parts[0]
    place = batch.laid.where_record(first.logged.record, first.logged.name)
    if agreed:
        name, stated = agreed[0], aggregation(batch.laid.algorithm)
        if name == "token-sum" and stated.endswith("-mean") and min(part.mask_BT.sum() for part in parts) > 1:
            return warning(
                f"{first.logged.name} is a sum over the tokens of its micro-batch, and the run states {stated}",
                place,
                shown(first.logged.name, first.value, None, first.logged.record.path.name),
                shown("tokens it is the sum of", int(first.mask_BT.sum())),
                shown("micro-batches that agree", len(parts)),
                cause="the division by the number of tokens is missing: loss and gradient are hundreds of times too "
                "large (clipping and Adam hide it), and long micro-batches count for more; right only where the "
                "gradient is divided by the tokens of the update afterwards",
                next_step="rldbg diagnose --explain D28   # then look at what divides the loss or the gradient",
            )
        return info(
            f"{first.logged.name} is {name}"
            + (f": {_UNEQUAL}" if _SHARED in name else f": {_UNEQUAL_RANKS}" if _RANKED in name else ""),
            place,
            shown("micro-batches that agree", len(parts)),
            shown("agree to", CLOSE),
            cause="right where the schedule divides by the micro-batches afterwards, as Megatron's does; a plain loop "
            "that accumulates gradients makes them that many times too large"
            if name.startswith(_SCHEDULED)
            else "right where a mean of the ranks' own means is meant (DDP over a local mean); else the count of "
            "tokens is not summed over the ranks before it divides"
            if _RANKED in name
            else "the reduction that was recomputed and agrees; nothing is wrong",
            next_step="rldbg diagnose --explain D28",
        )
    constant = _constant(parts)
    if constant is not None:
        return info(
            f"{first.logged.name} is token-sum over a constant, {constant:g}",
            place,
            shown("micro-batches that agree", len(parts)),
            shown("agree to", CLOSE),
            cause="Dr. GRPO divides by the samples times the longest response; nothing is wrong"
            if batch.laid.algorithm.averaged == "constant"
            else "right where Dr. GRPO is meant, which divides by the samples times the longest response; a mean over "
            "rows that are padded to one width comes to the same, and counts padding",
            next_step="rldbg diagnose --explain D28",
        )
    if batch.laid.algorithm.averaged == "constant":
        least = max(abs(part.value) for part in parts)
        skip_if(least <= TELLS, "the run states a sum over a constant, and a loss next to 0 does not tell which")
    skip_if(max(abs(part.value) for part in parts) <= TELLS, "a loss next to 0 does not tell a sum over a constant")
    if not exact or batch.laid.algorithm.is_distilled:
        raise Skip("no reduction agrees with `loss`, which may hold other terms, or ratios that are not recorded")
    skip_if(_is_rounding(batch, parts), "one reduction makes these losses, but for the 16 bits that tokens are kept in")
    worst = [f"{name} {value:.6g}" for name, value in first.made.items()][:3]
    weighed = disagrees(batch) or _may_be_weighed(batch, parts)
    return finding(
        "info" if weighed else "warning",
        f"{first.logged.name} is no known reduction of its tokens",
        place,
        shown(first.logged.name, first.value, "; ".join(worst), first.logged.record.path.name),
        shown("micro-batches", len(parts)),
        cause="another denominator, a mask that is not the recorded one, importance weights, or a term that is added",
    )


def _reduced(batch: StepBatch) -> tuple[list[_MicroLoss], bool, list[str], dict[str, float]]:
    """Micro-batches with a logged loss, whether their tokens' values are certain, the reductions that make every one of
    these losses, and the constants among what they may be divided by.
    """
    parts, exact = _parts(batch)
    constants = {
        f"token-sum over {scalar.name}": scalar.value
        for scalar in batch.columns.scalars("metrics.num_items_in_batch", "num_items_in_batch", "tokens_of_step")
        if scalar.value > 0
    }

    def with_constants(parts: list[_MicroLoss]) -> list[_MicroLoss]:
        return [replace(one, made=one.made | {
            name: float(reductions.token_sum_over(one.values_BT, one.mask_BT, constant))
            for name, constant in constants.items()
        }) for one in parts]  # fmt: skip

    agreed = _agreeing(with_constants(parts))
    if not agreed and batch.has("is_weights"):
        weighted, _ = _parts(batch, weighted=True)
        if found := _agreeing(with_constants(weighted)):
            parts, agreed = weighted, found
    return parts, exact, agreed, constants


def is_made_of_its_tokens(batch: StepBatch) -> bool | None:
    """Whether some reduction makes the losses of several micro-batches of the tokens that count; None where these are
    too few, or next to 0, which all tokens make.
    """
    parts, _, agreed, _ = _reduced(batch)
    if sum(abs(part.value) > TELLS for part in parts) < 2:
        return None
    return bool(agreed) or _constant(parts) is not None


#: What is stated of a loss's aggregation, in verl's words or the recorder's, and how the reductions begin that it may
#: mean.
_MODES = {
    "token-mean": ("token-mean", "token-sum over "), "seq-mean-token-mean": ("seq-mean-token-mean",),
    "seq-mean-token-sum": ("seq-mean-token-sum",),
}  # fmt: skip
_MODES |= {
    "token_mean": _MODES["token-mean"], "sequence_mean": _MODES["seq-mean-token-mean"],
    "sequence_sum": _MODES["seq-mean-token-sum"], "token_sum": ("token-sum",),
}  # fmt: skip
#: How other frameworks say it: whole words, as `loss_agg_mode` may have them, and TRL's names of losses (ms-swift's and
#: Unsloth's), each of which has a denominator of its own.
_MODES |= dict.fromkeys(("token", "token_level", "per_token", "token_avg", "batch_token_mean"), _MODES["token-mean"])
_MODES |= dict.fromkeys(
    (
        "sequence",
        "seq_mean",
        "sample_mean",
        "sequence_level",
        "seq_mean_token_mean",
        "sequence_mean_token_mean",
        "sample",
    ),
    _MODES["seq-mean-token-mean"],
)
_MODES |= {"seq_mean_token_sum": _MODES["seq-mean-token-sum"]}
_UPDATE_TOKENS = ("token-sum over ",)
_OF_TRL = {
    "grpo": _MODES["seq-mean-token-mean"], "sapo": _MODES["seq-mean-token-mean"],
    "bnpo": ("token-mean over the micro-batch",), "dapo": _UPDATE_TOKENS, "cispo": _UPDATE_TOKENS,
    "vespo": _UPDATE_TOKENS,
}  # fmt: skip
#: Switches: on, the loss is a mean over tokens; off, over samples (OpenRLHF, NeMo-RL; slime, miles, Megatron).
_SWITCHES = ("token_level_loss", "use_token_level_loss", "calculate_per_token_loss")


def _stated_mode(batch: StepBatch) -> tuple[str, tuple[str, ...] | None]:
    """What a run states of its loss's reduction, in its own words, and how the reductions begin that this may mean:
    None where it states nothing that is known.
    """
    algorithm = batch.laid.algorithm
    stated = aggregation(algorithm) or str(of_loss(batch.laid.flags, "reduction") or "")
    if stated:
        return stated, _MODES.get(stated) or _MODES.get(stated.replace("-", "_"))
    for name in _SWITCHES:
        if (is_on := algorithm.is_on(name)) is not None:
            return f"{name} = {is_on}", _MODES["token-mean" if is_on else "seq-mean-token-mean"]
    # A loss's name says so in TRL alone, whose groups have a word of their own.
    word = algorithm.word("loss_type")
    return (f"loss_type {word}", _OF_TRL.get(word)) if algorithm.value("num_generations") is not None else ("", None)


#: By how much the stated reduction has to miss a logged loss, and what share of weights has to be off 1, and how far.
MISSES, WEIGHED, OFF_ONE = 1e-4, 0.05, 0.05
#: Micro-batches that agree by no chance.
SEVERAL = 3


def _otherwise(batch: StepBatch, parts: list[_MicroLoss], agreed: list[str], *, exact: bool) -> Finding | None:
    """A loss that is made in a way, and the run states another: its aggregation, or its importance weights."""
    first = parts[0]
    place = batch.laid.where_record(first.logged.record, first.logged.name)
    stated, meant_modes = _stated_mode(batch)
    names = [name for name in first.made if all(name in one.made for one in parts)]
    # GSPO's loss is a mean of sequences' means, whatever is configured for others (verl).
    mode = None if batch.laid.algorithm.averages_sequences else meant_modes
    if mode is _MODES["token-mean"] and divides_by_update(batch.laid.algorithm):
        mode, stated = mode[1:], f"{stated} over the tokens of the mini-batch"
    # A loss that may hold more terms and agrees in several micro-batches holds none.
    exact = exact or len(parts) >= SEVERAL
    if exact and mode and agreed and not any(name.startswith(mode) for name in agreed) and agreed != ["token-sum"]:
        made = agreed[0]
        meant = next(name for name in names if name.startswith(mode))
        worst = max(parts, key=lambda one: abs(one.made[meant] - one.value))
        alone = (
            first.micros > 1 and made.endswith("over the micro-batch") and not meant.endswith("over the micro-batch")
        )
        if abs(worst.made[meant] - worst.value) > MISSES:
            return error(
                f"{first.logged.name} is {made}, and the run states {stated}",
                place,
                shown(first.logged.name, worst.value, f"{worst.made[meant]:.6g}", first.logged.record.path.name),
                shown("micro-batches that agree with what it is", len(parts)),
                cause=f"each micro-batch is divided by what it holds itself, and not by what all {first.micros} of the "
                f"update hold: they add up to {first.micros} times the mean that is meant (unless they are divided "
                "afterwards), and a token's weight hangs on the micro-batch it is in"
                if alone
                else f"each micro-batch is averaged over what it holds itself, and the {first.micros} of an update "
                "alike: a token of a small one weighs more than one of a large (gradient accumulation; sums are to be "
                "divided by the tokens of the whole update)"
                if _SHARED in made
                else f"each rank divides by the tokens that it holds itself, and all {first.ranks} count alike: a "
                "token of a rank with few of them weighs more (the count of tokens is not summed over the ranks)"
                if _RANKED in made
                else "the aggregation that is configured does not reach the loss: another default stands in its "
                "place, and responses of another length count for more or less than is meant",
                next_step="rldbg diagnose --explain D28",
            )
    if exact and agreed and (uneven := _own_tokens(batch, parts, agreed)) is not None:
        return uneven
    # TRL has no word for it but the loss's own.
    stated = batch.laid.algorithm.word("loss_type") if not stated or stated.startswith("loss_type ") else stated
    if exact and agreed and (constant := _stated_constant(batch, stated)) is not None:
        per_M = [one.total / max(len(one.values_BT), 1) / constant for one in parts]
        shared = [1.0, *(1 / one.micros for one in parts[:1] if one.micros > 1)]
        off = [
            (one, value) for one, value in zip(parts, per_M, strict=True)
            if all(abs(value * by - one.value) > MISSES for by in shared)
        ]  # fmt: skip
        # Sums over the samples of the whole update are made by no micro-batch alone.
        if off and any("token-mean" in name or name.startswith("token-sum over the tokens") for name in agreed[:1]):
            one, value = max(off, key=lambda each: abs(each[1] - each[0].value))
            return error(
                f"{first.logged.name} is {agreed[0]}, and the run states {stated} with a constant of {constant:g}",
                place,
                shown(first.logged.name, one.value, f"{value:.6g}", first.logged.record.path.name),
                shown("micro-batches that agree with what it is", len(parts)),
                shown("tokens of it", one.tokens, f"{constant:g} x {len(one.values_BT)} samples"),
                cause="the aggregation that is configured does not reach the loss: a mean over tokens (another "
                "default) stands in the place of a sum over a constant, and long responses count for less than is "
                "meant",
                next_step="rldbg diagnose --explain D28",
            )
    # Where the switch is off they are recorded to be looked at (verl, slime and TRL all can).
    if batch.laid.algorithm.is_weighed is not False and _leaves_out_weights(batch, parts):
        is_stated = batch.laid.algorithm.is_weighed is True
        weights = given(batch.columns.of("is_weights"))
        counted_N = weights.said_N & given(batch.trained_N)
        return weights_left_out(
            f"{first.logged.name} is made without them",
            place,
            shown("largest weight", float(weights.values_N[counted_N].max()), None, weights.source),
            shown("smallest weight", float(weights.values_N[counted_N].min())),
            shown("micro-batches that agree without them", len(parts), "0"),
            is_stated=is_stated,
        )
    return None


#: What trainers call the number of tokens of an update that a micro-batch's sum is divided by.
_OF_THE_UPDATE = ("batch_num_tokens", "global_tokens", "num_items_in_batch", "global_num_tokens")


def _counts_left_out(batch: StepBatch, parts: list[_MicroLoss], divisor: float) -> Finding | None:
    """A recorded number of tokens that the loss is divided by, which is that of all responses, also of those whose
    masks are emptied (TRL, `mask_truncated_completions`).
    """
    if batch.trained_N is None or batch.response_N is None:
        return None
    whole = batch.once
    counted_B, every_B = (whole.flat.count(given(one)) for one in (whole.trained_N, whole.response_N))
    left_B = (counted_B == 0) & (every_B > 0)
    counted, left = int(counted_B.sum()), int(every_B[left_B].sum())
    if not left or divisor != counted + left or parts[0].update_tokens != counted:
        return None
    logged = parts[0].logged
    return warning(
        f"{logged.name} is divided by {divisor:.0f} tokens, {left} of which are of {int(left_B.sum())} responses that "
        f"the mask leaves out: it is {counted / divisor:.3g} of the mean over what is trained on",
        batch.laid.where_record(logged.record, logged.name),
        shown("tokens that the loss is divided by", divisor, f"{counted}"),
        shown("tokens of responses whose mask is empty", left),
        cause="the number of tokens (num_items_in_batch) is taken before responses that were cut off are masked: the "
        "more of them, the smaller the update",
        next_step="count the mask after it is emptied",
    )


#: By how much the weights of two tokens of an update differ, before a mean over its tokens is another.
UNLIKE = 1.05


def _own_tokens(batch: StepBatch, parts: list[_MicroLoss], agreed: list[str]) -> Finding | None:
    """A stated mean over tokens that is the mean of the micro-batches' own means, where those hold unlike many. Only
    DAPO says that one over the whole batch is meant, and what keeps the number of the update's tokens beside its loss:
    many trainers make the word so. What states a divisor beside its
    reduction (the recorder's settings), or a local denominator, means it so.
    """
    algorithm, update = batch.laid.algorithm, "token-sum over the tokens of the update"
    is_own = agreed[0].startswith(f"token-mean over the micro-batch{_SHARED}")
    # What is recorded as its own mean may be scaled before the backward, but for a trainer that keeps the number of
    # the update's tokens beside it, by which a share of their sum is divided.
    counted = [one.value for name in _OF_THE_UPDATE for one in batch.columns.scalars(name)]
    is_own = is_own or (
        agreed[0] == "token-mean over the micro-batch" and min(counted, default=0) > max(part.tokens for part in parts)
    )
    if (
        not is_own
        or update in agreed
        or _MODES.get(aggregation(algorithm)) is not _MODES["token-mean"]
        or not (is_dapo(algorithm) or min(counted, default=0) > max(part.tokens for part in parts))
        or algorithm.averages_sequences
        or of_loss(batch.laid.flags, "divisor") is not None
        or divides_by_micro_batch(algorithm)
    ):
        return None
    several = [each for each in _by_update(parts) if len(each) > 1 and min(one.tokens for one in each)]
    if not several:
        return None
    every = max(several, key=lambda each: max(one.tokens for one in each) / min(one.tokens for one in each))
    small, large = (choose(every, key=lambda one: one.tokens) for choose in (min, max))
    weight = large.tokens / small.tokens
    worst = max(every, key=lambda one: abs(one.made[update] - one.value))
    if weight < UNLIKE or abs(worst.made[update] - worst.value) <= MISSES:
        return None
    logged = worst.logged
    return warning(
        f"{logged.name} is {agreed[0]}, and the run states {aggregation(algorithm)}: each micro-batch is divided by "
        f"its own tokens, and a token of the smallest weighs {weight:.3g} times one of the largest",
        batch.laid.where_record(logged.record, logged.name),
        shown(logged.name, worst.value, f"{worst.made[update]:.6g}", logged.record.path.name),
        shown("tokens of this micro-batch", worst.tokens),
        shown("tokens of its whole update, over its micro-batches", worst.update_tokens / worst.micros),
        shown("tokens of the smallest and the largest", f"{small.tokens}, {large.tokens}"),
        shown("micro-batches that agree with what it is", len(parts)),
        cause=f"the denominator is local: each micro-batch is averaged over its own tokens, and the {worst.micros} of "
        "an update count alike, where a mean over tokens divides their sums by the tokens of the whole mini-batch; "
        "right only where a mean of the micro-batches' own means is meant (older trainers make token-mean so)",
        next_step="sum over the micro-batch's tokens, and divide by the count of the whole mini-batch, taken before it "
        "is split",
    )


#: Words for a sum over a constant, whole: `token_norm` or `batch-normalized` divides by what is counted.
_OVER_A_CONSTANT = frozenset({
    "seq_mean_token_sum_norm", "token_sum_norm", "sum_norm", "dr_grpo", "drgrpo", "constant", "const",
    "token_sum_const",
    "token_sum_constant", "seq_mean_token_sum_const", "constant_norm", "fixed_norm",
})  # fmt: skip


def _stated_constant(batch: StepBatch, stated: str) -> float | None:
    """What the run states that a response's sum is divided by, where its loss is stated to be such a sum: by its
    aggregation, or by TRL's `loss_type`.
    """
    if stated.replace("-", "_").replace(".", "_") not in _OVER_A_CONSTANT:
        return None
    return stated_number(batch.laid.stated, *_CONSTANTS, *RESPONSE_LIMITS)


def _leaves_out_weights(batch: StepBatch, parts: list[_MicroLoss]) -> bool:
    """Whether a reduction of the plain loss makes every micro-batch's, and none of the weighted one does."""
    weights, advantages = batch.columns.of("is_weights"), batch.columns.of("advantages")
    if weights is None or advantages is None or batch.trained_N is None or batch.has("token_loss"):
        return False
    counted_N = weights.said_N & batch.trained_N & np.isfinite(weights.values_N)
    if not counted_N.any() or float((np.abs(weights.values_N[counted_N] - 1) > OFF_ONE).mean()) < WEIGHED:
        return False
    values_N = np.where(advantages.said_N, np.nan_to_num(advantages.values_N), 0.0)
    ratio_N = _ratio_N(batch)
    low, high = batch.laid.algorithm.clip_range or (0.2, 0.2)
    plain_N = policy_loss.clipped(
        np.ones(len(values_N)) if ratio_N is None else ratio_N, values_N, clip_low=low, clip_high=high
    )
    logged = [part.logged for part in parts]
    weighed_N = np.where(counted_N, plain_N * weights.values_N, plain_N)
    return bool(_agreeing(_made_of(batch, logged, plain_N)) and not _agreeing(_made_of(batch, logged, weighed_N)))


def _may_be_weighed(batch: StepBatch, parts: list[_MicroLoss]) -> bool:
    """Whether importance weights of trainer over engine, which are not recorded, come to what is left of one reduction
    in every micro-batch: by no more than every token's loss times how far its weight is off 1.
    """
    rollout, trainer = batch.columns.of("rollout_logprobs"), batch.trainer
    if rollout is None or trainer is None or batch.has("is_weights"):
        return False
    both_N = batch.pair(rollout, trainer)
    far_N = np.zeros(both_N.size)
    far_N[both_N] = np.abs(np.expm1(np.clip(trainer.values_N - rollout.values_N, -20, 20)[both_N]))
    token_N, _ = _token_loss(batch)
    bounds = _made_of(batch, [part.logged for part in parts], np.abs(given(token_N)) * far_N)
    if any(
        all(
            abs(part.value - part.total / constant) <= bound.total / constant + CLOSE * abs(part.value)
            for part, bound in zip(parts, bounds, strict=True)
        )
        for constant in _near_constants(parts)
    ):
        return True
    return any(
        all(abs(part.value - part.made[name]) <= bound.made[name] + CLOSE * abs(part.value)
            for part, bound in zip(parts, bounds, strict=True))
        for name in parts[0].made if "of the step" not in name
    )  # fmt: skip


def _constant(parts: list[_MicroLoss]) -> float | None:
    """What every micro-batch's token sum is divided by, where it is one whole number of whole samples: the samples
    times a length no response exceeds.
    """
    found = {round(part.total / part.value, 2) for part in parts if abs(part.value) > TELLS}
    if not found or not max(found) - min(found) <= 2e-3 * abs(max(found)) < math.inf:
        return None
    constant = round(max(found))
    is_whole = abs(constant - max(found)) <= 1e-3 * constant
    return float(constant) if is_whole and _is_of_samples(constant, parts) else None


class _Recomputed(Struct, frozen=True):
    """A micro-batch's logged loss, and what it may have been: by known reductions, and divided by slots."""

    step: int | None
    where: Where
    file: str
    value: float
    made: dict[str, float]
    mistakes: dict[str, float]
    widths: dict[str, int]
    exact: bool
    kind: str
    micros: int
    """Micro-batches of its update."""
    slots: float
    """What its token sum is divided by, for each of its samples; 0 where it holds all samples of its update."""
    each: float = 0.0
    """The same, whatever it holds."""
    longest: int = 0
    limit: float | None = None
    """What the run states that a response may have, and that a sum over one is divided by."""
    constant: float | None = None
    stated: str = ""
    as_many: float = 1.0
    """How many times the tokens that count its responses have, with those that the mask leaves out."""
    answered_each: float = 0.0
    """Those of a response."""
    is_counted_too: bool = False
    """Whether tokens that the mask leaves out have a loss."""


#: How near each other what sums are divided by lie, where weights of a token that are not recorded are in them.
ALIKE = 5e-3
#: Factors that a world size or an accumulation makes.
_FACTORS = (2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512)
_SUMMED = "it is the sum over samples of token means, not their mean"
_LONGEST = "divides by its samples times the longest response of the micro-batch, which is another in each"
_WITH_PROMPTS = "divides by all tokens of prompts and responses, not by those that count"
_COUNTS_TOOLS = "counts tokens of responses that the mask leaves out (tool output)"
_OVER_TOOLS = "divides by all tokens of responses, also by those that the mask leaves out (tool output)"
#: Micro-batches whose responses hold tokens that the mask leaves out, and by what share, before they tell.
TOOLS, MANY = 3, 1.02
_CAUSES = {
    _COUNTS_TOOLS: "this way of the loss (a fused kernel, a replayed batch) gets the mask of whole responses, and not "
    "that of the tokens that the policy wrote: it learns to write what tools answered",
    _OVER_TOOLS: "the denominator is the responses' length, tool output and all, and the sum is over the mask: the "
    "more tools were called, the smaller the loss",
    _WITH_PROMPTS: "the denominator is the attention mask's sum, and the loss is summed over the response mask's: "
    "prompt tokens (and tool output) are counted, have no loss, and make the others smaller, the longer prompts are",
    _SUMMED: "a division by the samples is missing",
    _LONGEST: "the length that sums are divided by is read off the micro-batch, and is no constant: a token weighs "
    "more where the longest response is shorter",
}
_PADDED = "a mean over the padded batch divides a sum over the mask"


@rule("D28", "the loss is off by a factor, or counts padding", link="reduction", scope="case", lasts=True,
      explains=("L08", "L10"),
      source="verl agg_loss; verl#4710; trl#6369; Dr. GRPO alone divides by a constant")  # fmt: skip
def off_by(case: Case) -> Finding | None:
    """Over all steps whose logged loss is no known reduction: what makes every micro-batch's loss of its tokens. An
    error where a denominator counts token slots of the rows (of the response, or of prompt and response), and is no
    constant while the rows change their width; where it is the longest response of each micro-batch; where samples are
    summed; or where one factor is all that is off one
    reduction (a world size, an accumulation, a sign). So is one that counts tokens of responses which the mask leaves
    out (tool output), or divides by them, in all micro-batches, 3 of which hold 2 % of them and more.

    A warning where each micro-batch's loss is the mean over its own tokens (or that over how many an update has) and
    one has 3 times the tokens of another of its update, in half of the steps and of their updates: tokens then do not
    weigh the same in one update; and so is a term beside it (KL, entropy, a teacher's), where the policy's loss is one
    over the update or a mean over tokens is stated, and one has twice the tokens of another. A
    warning where micro-batches of one update are means over their own tokens (or
    samples), and the step logs their sum, not their mean, in 2 steps and more; and where each is the mean that the run
    states (its own settings, with the KL) and the divisor that is stated beside it is missing, in 4 and all of them.

    An error, too, where the logged KL loss of all micro-batches (4 and more) is a sum over tokens and no mean of them,
    and the recorder's settings of the loss state a mean; a warning where an aggregation of the loss is stated. And a
    warning where the logged KL or entropy loss is the sum over its tokens divided by every slot of padded responses.

    An error where all losses are one reduction but for 3 micro-batches and more, of one rank, of one place in their
    update, or from some step on, and none (times a constant) makes all of them.
    """
    told = summed_kl(case) or over_slots(case) or undivided(case) or _not_divided(case) or _uneven_steps(case)
    told = told or _uneven_terms(case)
    if told is not None:
        return told
    off: list[_Recomputed] = []
    every: list[_Recomputed] = []
    fine = 0
    for batch in case.batches():
        here = _recomputed(batch)
        every += here
        if _agreeing(here) or (here and _is_rounding(batch, _parts(batch)[0])):
            fine += 1
        else:
            off += here
    if (in_part := _in_part(every)) is not None:
        return in_part
    skip_if(not off, "every loss is a reduction that is known, or none is logged with its tokens")
    if fine > len({part.step for part in off}):
        return None  # what holds in most steps is no line of code that is wrong
    first = off[0]
    found = next(_mistake(off), None)
    if found is not None:
        claim, cause, evidence = found
        return error(
            f"{first.where.tensor} {claim}", first.where,
            *evidence, shown("micro-batches that agree", len(off)),
            cause=cause,
            steps=sorted({part.step for part in off if part.step is not None}),
        )  # fmt: skip
    elif not any(part.exact for part in off):
        raise Skip("`loss` may hold other terms, or ratios that are not recorded")
    return None


#: Micro-batches whose loss is one reduction, and such that are off it, before what parts them is no chance; and by what
#: share they are off at least.
RIGHT, WRONG, APART = 4, 3, 0.02


def _in_part(every: list[_Recomputed]) -> Finding | None:
    """Losses that are one reduction of their tokens but for those of one rank, of one place among the micro-batches, or
    from some step on, which are another number.
    """
    told = [part for part in every if part.exact and abs(part.value) > 100 * FLOOR]
    # Where all responses are of one length several reductions are one: none is left in part where one makes every loss.
    if any(_is_one([part.made[name] / part.value for part in told]) for name in _names(told)):
        return None
    best: tuple[int, str, list[_Recomputed], list[_Recomputed]] | None = None
    for name in _names(told):
        own = [part for part in told if abs(part.made[name]) > 100 * FLOOR]
        right = [part for part in own if _agree(part.made[name], part.value)]
        wrong = [part for part in own if abs(part.value - part.made[name]) > APART * abs(part.made[name])]
        whole = len(right) + len(wrong) == len(own) == len(told)
        if whole and len(right) >= RIGHT and len(wrong) >= WRONG and (best is None or len(right) > best[0]):
            best = len(right), name, right, wrong
    if best is None:
        return None
    _, name, right, wrong = best
    which = _set_apart(right, wrong)
    if which is None:
        return None
    times = [part.value / part.made[name] for part in wrong]
    factor, is_one = float(np.median(times)), _is_one(times)
    first = wrong[0]
    return error(
        f"{first.where.tensor} is {name}, but for {len(wrong)} micro-batches, those {which}"
        + (f": it is {_in_times(factor) if factor < 0 else f'{factor:.4g} times'} that there" if is_one else ""),
        first.where,
        shown("logged", first.value, f"{first.made[name]:.6g}", first.file),
        shown("micro-batches that are that reduction", len(right)), shown("that are not", len(wrong)),
        cause="what makes the loss there is not what makes it elsewhere: a weight, a mask or a denominator of one rank "
        "or of a last, smaller micro-batch; or something that was changed in the run",
        steps=sorted({part.step for part in wrong if part.step is not None}),
    )  # fmt: skip


def _is_one(times: list[float]) -> bool:
    """Whether these are one number, 1 or a constant that a sum is divided by, and not 0."""
    middle = float(np.median(times))
    return abs(middle) > 0 and all(abs(one - middle) <= 1e-3 * abs(middle) for one in times)


def _set_apart(right: list[_Recomputed], wrong: list[_Recomputed]) -> str | None:
    """What all wrong ones share and no right one does: a rank, a place, or that they come from some step on."""
    for what, of in (("rank", "rank"), ("micro-batch", "micro")):
        mine, others = ({getattr(part.where, of) for part in each} for each in (wrong, right))
        if None not in mine and not mine & others:
            return f"of {what} {listed(sorted(mine))}"
    steps, before = ([part.step for part in each if part.step is not None] for each in (wrong, right))
    if steps and before and len(set(steps)) > 1 and min(steps) > max(before):
        return f"from step {min(steps)} on"
    return None


#: Steps whose logged loss is the sum of their micro-batches before it is no chance.
SUMMED = 2


def _not_divided(case: Case) -> Finding | None:
    """Means of micro-batches that are added up over an update: the step's loss is their sum."""
    if case.signals is None:
        return None
    found: list[tuple[StepBatch, _MicroLoss, str, float, float]] = []
    for batch in case.batches():
        parts, _ = _parts(batch)
        name = _own_mean(parts) or _scheduled(parts)
        updates = _by_update(parts)
        if name is None or len({len(each) for each in updates}) > 1:
            continue
        summed = float(np.mean([sum(part.value for part in each) for each in updates]))
        # Micro-batches that cancel out are 0 however they are put together.
        if abs(summed) < 100 * FLOOR:
            continue
        logged = [
            point.value for log in case.signals.logs for word in ("pg_loss", "loss") for series in log.all(word)
            if series.name != parts[0].logged.name for point in series.points
            if point.step == batch.step and point.micro is None
        ]  # fmt: skip
        if not logged:
            continue
        if not any(_agree(value, summed) for value in logged):
            return None
        found.append((batch, parts[0], name, summed, summed / parts[0].micros))
    if len(found) < SUMMED:
        return None
    batch, part, name, summed, mean = found[0]
    return warning(
        f"losses of micro-batches are not divided by the {part.micros} of an update (gradient accumulation): they add "
        f"up to {part.micros} times the mean over the update's tokens, which is what the step logs"
        if name == _SHARE
        else f"micro-batches are added up and not divided by their number: the step's loss is {part.micros} times the "
        f"mean of its {part.micros} micro-batches, each a {name}",
        batch.laid.where_record(part.logged.record, part.logged.name),
        shown("loss that the step logs", summed, f"{mean:.6g}"),
        shown("micro-batches of an update", part.micros),
        shown("steps that show it", len(found)),
        cause="accumulated gradients of micro-batches' own means are a sum: divide each by the number of "
        f"micro-batches, or its token sum by the tokens of the update; the gradient is {part.micros} times too large "
        "(clipping and Adam hide it). Where the loss alone is added up for the log, the gradient is right",
        steps=[each[0].step for each in found],
    )


#: Of an update's mean, what its schedule divides by the micro-batches afterwards.
_SHARE = "share of the mean over the update's tokens, times that number"


def _scheduled(parts: list[_MicroLoss]) -> str | None:
    """What all micro-batches' losses are where each is its tokens' share of the update's mean times the number of
    micro-batches, and nothing else that is known.
    """
    heard = [part for part in parts if abs(part.value) > 100 * FLOOR]
    if len(heard) < 2 or any(part.micros < 2 or part.ranks > 1 for part in parts):
        return None
    agreed = _agreeing(heard)
    is_it = agreed == [f"{_SCHEDULED} ({heard[0].micros})"]
    return _SHARE if is_it else None


def _own_mean(parts: list[_MicroLoss]) -> str | None:
    """What all micro-batches' losses are as means of their own; None where shares of the update agree as well, or
    there are not several to each update of one rank.
    """
    heard = [part for part in parts if abs(part.value) > 100 * FLOOR]
    if not heard or any(part.micros < 2 or part.ranks > 1 for part in parts):
        return None
    agreed = _agreeing(heard)
    own = [name for name in agreed if name.endswith("over the micro-batch")]
    return own[0].removesuffix(" over the micro-batch") if own and own == agreed else None


def is_share_of_update(batch: StepBatch) -> bool:
    """Whether the logged policy losses of micro-batches are shares of their update, several to each: what they sum is
    divided by the tokens or samples of all of them, and by nothing of their own.
    """
    parts, _ = _parts(batch)
    agreed = _agreeing([part for part in parts if part.micros > 1 and abs(part.value) > 100 * FLOOR])
    over_all, own = (
        any(name.endswith(words) for name in agreed) for words in ("of the update", "over the micro-batch")
    )
    return over_all and not own


def _names(parts: list[_Recomputed]) -> list[str]:
    """The reductions that all of these have."""
    return [name for name in parts[0].made if all(name in part.made for part in parts)] if parts else []


def _recomputed(batch: StepBatch) -> list[_Recomputed]:
    found: list[_Recomputed] = []
    kind = "constant" if _is_centred_alone(batch) else batch.laid.algorithm.averaged
    for weighted in (False, True) if batch.has("is_weights") else (False,):
        parts, exact = _parts(batch, weighted=weighted)
        exact = exact or _states_its_terms(batch)
        found = []
        for part in (part for part in parts if abs(part.value) > 100 * FLOOR):
            total, samples = part.total, len(part.values_BT)
            mean = float(reductions.sequence_mean(part.values_BT, part.mask_BT))
            slots = {
                f"divides by every token slot of {what}, padding included{of}": total / max(rows * width, 1)
                for what, width in part.widths.items()
                for of, rows in (("", samples), (" (the rows of the whole update)", part.update_samples))
            }
            with_prompts = {
                f"{_WITH_PROMPTS}{of}": total / max(many, 1)
                for of, many, own in (("", part.attended, part.tokens),
                                      (" (of the whole update)", part.update_attended, part.update_tokens))
                if many > own
            }  # fmt: skip
            with_tools = _with_tools(part)
            longest = samples * max(part.longest, 1)
            shared = f"{_LONGEST}, and by the {part.micros} micro-batches"
            record, name = part.logged.record, part.logged.name
            found.append(
                _Recomputed(
                    batch.step, batch.laid.where_record(record, name), record.path.name, part.value, part.made,
                    {**slots, **with_prompts, **with_tools, _LONGEST: total / longest,
                     shared: total / longest / max(part.micros, 1),
                     f"{_LONGEST}, over the samples of the whole update":
                         total / max(part.longest, 1) / max(part.update_samples, 1),
                     _SUMMED: mean * samples}, part.widths, exact, kind, part.micros,
                    total / part.value / max(samples, 1) if part.update_samples > samples > 0 else 0.0,
                    total / part.value / max(samples, 1), part.longest,
                    stated_number(batch.laid.stated, *RESPONSE_LIMITS),
                    stated_number(batch.laid.stated, *_CONSTANTS), aggregation(batch.laid.algorithm),
                    part.answered / max(part.tokens, 1), part.answered / max(samples, 1),
                    abs(part.total_answered - part.total) > CLOSE * abs(part.total),
                )
            )  # fmt: skip
        if _agreeing(found):
            return found
    return found


def _with_tools(part: _MicroLoss) -> dict[str, float]:
    """What a loss is that counts, or divides by, tokens of responses that the mask leaves out."""
    of_update = max(part.update_answered, 1)
    ways = (("", max(part.answered, 1), 1), (", of the whole update", of_update, 1),
            (f", of the whole update and times its {part.micros} micro-batches", of_update, part.micros))  # fmt: skip
    return {
        f"{what}{of}": times * total / many
        for what, total in ((_COUNTS_TOOLS, part.total_answered), (_OVER_TOOLS, part.total))
        for of, many, times in ways
    }


def _states_its_terms(batch: StepBatch) -> bool:
    """Whether the recorder's settings of the loss say that nothing but the policy's part is in it, and nothing of an
    older policy is kept: the ratio is 1, and `loss` is made of advantages alone (TRL).
    """
    settings = batch.laid.flags.get("loss")
    alone = isinstance(settings, Mapping) and not of_loss(batch.laid.flags, "kl")
    others = ("old_logprobs", "is_ratio", "is_weights", "rollout_logprobs", "values")
    return alone and not of_loss(batch.laid.flags, "entropy") and not any(map(batch.has, others))


def _is_centred_alone(batch: StepBatch) -> bool:
    """Whether advantages are the rewards less their group's mean: Dr. GRPO, by whatever name, whose loss is a sum over
    a constant.
    """
    advantage_B, group_B, reward_B = batch.advantage_B, batch.group_B, batch.reward_B
    if advantage_B is None or group_B is None or reward_B is None:
        return False
    kept_B = np.isfinite(advantage_B) & np.isfinite(reward_B)
    centred_B = advantages.group_centred(np.where(kept_B, reward_B, 0.0), group_B)
    return bool(kept_B.any() and np.allclose(advantage_B[kept_B], centred_B[kept_B], rtol=1e-3, atol=1e-5))


def _mistake(off: list[_Recomputed]) -> Iterator[tuple[str, str, list[Evidence]]]:
    """Claim, cause and evidence of what agrees in every micro-batch."""
    if any(all(_is_times(part, name, 1.0, off) for part in off) for name in _names(off)):
        # Of rows without padding, of updates that are halves of a step, a known mean is many a mistake as well.
        return
    first = off[0]
    said = [
        shown("logged", first.value, None, first.file),
        shown("token-mean", first.made["token-mean over the micro-batch"]),
    ]
    for name in first.mistakes:
        if not all(name in part.mistakes and _agree(part.mistakes[name], part.value) for part in off):
            continue
        if name.startswith((_COUNTS_TOOLS, _OVER_TOOLS)):
            # A constant for each row (of Dr. GRPO, or of padding that nothing tells) is no number of tokens.
            apart = len({round(part.answered_each, 2) for part in off}) > 1 and first.kind != "constant"
            sums_too = any(part.is_counted_too for part in off) or name.startswith(_OVER_TOOLS)
            if sum(part.as_many >= MANY for part in off) >= TOOLS and apart and sums_too:
                way = _COUNTS_TOOLS if name.startswith(_COUNTS_TOOLS) else _OVER_TOOLS
                yield (
                    name,
                    _CAUSES[way],
                    [*said, shown("tokens of responses over those that count", first.as_many, "1")],
                )
            continue
        if name.startswith(_WITH_PROMPTS):
            # A constant, or an update whose micro-batches hold as many tokens, is divided by a number that was chosen.
            if first.kind == "constant" or len({round(part.made["token-sum"] / part.value) for part in off}) < 2:
                continue
            times = first.value / first.made["token-mean over the micro-batch"]
            of = "" if "update" in name else f": it is {times:.3g} of the mean over those that count"
            yield f"{name}{of}", _CAUSES[_WITH_PROMPTS], said
            continue
        what = next((what for what in first.widths if f"slot of {what}," in name), None)
        same = len({part.step for part in off}) > 1 and len({part.widths.get(what or "") for part in off}) == 1
        # Rows that are always padded to the limit: the same number as Dr. GRPO's constant.
        if what == "the response" and (first.kind == "constant" or (same and not first.kind)):
            continue
        if what and same and first.kind == "constant":
            continue  # its constant is any number that is chosen
        if name.startswith(_LONGEST):
            # Of one longest response in all of them it is a constant.
            if len({round(part.made["token-sum"] / part.mistakes[name], 3) for part in off}) > 1:
                yield name, _CAUSES[_LONGEST], said
            continue
        yield name if what else f"does not divide by what it sums: {name}", _CAUSES.get(name, _PADDED), said
    width = round(first.slots)
    if (
        width > 1
        and first.kind
        and first.kind != "constant"
        and len(off) > 1
        and all(abs(part.slots - width) <= 1e-3 * width for part in off)
        and not _is_share(off, width)
    ):
        yield (
            f"divides by every token slot of the micro-batch, padding included (its samples x {width})",
            _PADDED,
            [*said, shown("algorithm that is stated", first.kind)],
        )
    yield from _other_constant(off, said)
    # Other terms in a loss leave no exact -1 in every micro-batch.
    heard = [part for part in off if part.exact] or (off if len({round(part.value, 9) for part in off}) > 3 else [])
    if _is_length(heard):
        return  # a constant that no response is longer than: of lengths that are one, a mean is such a sum as well
    is_total = not any(part.exact for part in off)
    fitting: list[tuple[float, str]] = []
    for name in _names(heard):
        each = [part.made[name] for part in heard]
        if any(abs(value) < FLOOR for value in each):
            continue
        for times in (-1.0, *(float(number) for number in _FACTORS), *(1 / number for number in _FACTORS)):
            # Of so many factors one is near by chance: only the sign is told by a single loss.
            if (len(heard) < 2 or is_total) and times > 0:
                continue
            # Dr. GRPO divides the sum of a response by a constant of its own.
            if "token-sum" in name and "tokens of" not in name and 0 < times < 1:
                continue
            if all(_is_times(part, name, times, heard) for part in heard):
                fitting.append((times, name))
    if fitting:
        # A rank's mean is its share times the ranks: of two right ways the one that less is wrong with.
        times, name = min(fitting, key=lambda one: (one[0] > 0, abs(math.log(abs(one[0])))))
        yield f"is {_in_times(times)} what it should be as {name}", _FACTOR_CAUSE[times < 0], said


def _is_share(off: list[_Recomputed], width: int) -> bool:
    """Whether that is a constant that is stated, or what a response may have, times the micro-batches of an update:
    each has its share of a mean over the update's samples.
    """
    stated = {round(each) for each in (off[0].limit, off[0].constant) if each is not None}
    return all(width % part.micros == 0 and width // part.micros in stated for part in off)


def _is_length(heard: list[_Recomputed]) -> bool:
    """Whether what each sample's sum is divided by is one whole number that no response is longer than."""
    length = round(heard[0].each) if heard else 0
    return length >= max((part.longest for part in heard), default=1) and all(
        part.exact and abs(part.each - length) <= ALIKE * length for part in heard
    )


#: How runs state the longest response, and what the loss of a response is divided by.
_CONSTANTS = ("loss_scale_factor", "loss_norm_constant", "loss_divisor", "token_sum_constant")


def _other_constant(off: list[_Recomputed], said: list[Evidence]) -> Iterator[tuple[str, str, list[Evidence]]]:
    """A constant for each sample that the token sum is divided by, in every micro-batch, where the run states a mean,
    or another constant.
    """
    first = off[0]
    width = round(first.each)
    alike = all(part.exact and abs(part.each - width) <= 1e-3 * width for part in off)
    if len(off) < 2 or not alike or width < max(part.longest for part in off):
        return
    if first.kind == "tokens" and first.stated in _MODES and not first.stated.endswith("sum"):
        padded = first.limit is not None and round(first.limit) == width
        yield (
            f"divides by a constant, its samples x {width}, and the run states {first.stated}"
            + (": every slot of responses padded to their limit counts" if padded else ""),
            _PADDED
            if padded
            else "the division by the tokens that count does not take place: a constant, or the "
            "padded size of the batch, stands in its place",
            said,
        )
        return
    meant = first.constant if first.constant is not None else first.limit
    stated = [each for each in (first.constant, first.limit) if each is not None]
    # A micro-batch of several may hold its share of the update's mean over samples.
    known = {round(each * times) for each in stated for times in (1, *{part.micros for part in off})}
    if first.kind == "constant" and meant and known and width not in known and width not in first.widths.values():
        yield (
            f"divides each response's sum by {width}, and the run states {meant:g}: loss and gradient are "
            f"{_ratio(meant / width)} "
            "of what they should be",
            "the constant of Dr. GRPO is another than the longest response that is configured: a default, a length in "
            "other units, or prompt and response together; the learning rate is that much off",
            [*said, shown("what each response's sum is divided by", first.each, f"{meant:g}")],
        )


def _ratio(times: float) -> str:
    return f"1/{1 / times:.4g}" if times < 1 else f"{times:.4g} times"


def _is_times(part: _Recomputed, name: str, times: float, heard: list[_Recomputed]) -> bool:
    value = part.made[name] * times
    return abs(value) >= FLOOR * abs(times) and abs(part.value - value) <= (CLOSE if len(heard) < 2 else 1e-3) * abs(
        value
    )


_UNEQUAL_RANKS = "each rank divides by its own tokens, and one of a rank with few of them weighs more"
_UNEQUAL = "a token of a small micro-batch weighs more than one of a large"
_FACTOR_CAUSE = (
    "a factor too many: the world size (gradients are averaged over ranks already), or the number of "
    "micro-batches (accumulation multiplied in, forgotten, or divided out twice)",
    "the loss is not negated, or negated twice: the policy learns to avoid what is rewarded",
)


def _in_times(times: float) -> str:
    return "-1 times (the sign is wrong)" if times < 0 else f"{times:g} times" if times > 1 else f"1/{1 / times:g} of"


def _uneven_steps(case: Case) -> Finding | None:
    """`_uneven` of a run: in half of the steps that have micro-batches of one update. A short one in a step or two is
    how lengths fell.
    """
    found: list[tuple[int | None, Finding]] = []
    looked = 0
    for batch in case.batches():
        if not batch.has("mask") or not (batch.has("advantages") or batch.has("token_loss")):
            continue
        rows, trained_N = batch.laid.rows_by_micro(), given(batch.trained_N)
        counts_B = batch.flat.count(trained_N)
        each = [total for samples in rows.values() if (total := int(counts_B[samples].sum()))]
        looked += len(each) > 1
        if len(each) < 2 or max(each) < UNEVEN * min(each):
            continue
        parts = [part for part in _parts(batch)[0] if part.mask_BT.any()]
        if not parts or all(abs(part.value) < FLOOR for part in parts):
            continue
        own = next(iter(parts[0].made))
        is_own = {own, f"{own}{_SHARED} ({parts[0].micros})"} & {*_agreeing(parts)}
        # TRL's name of a loss whose denominator is the micro-batch's own.
        is_meant = _stated_mode(batch)[1] == _OF_TRL["bnpo"]
        if is_own and not is_meant and (uneven := _uneven(parts)) is not None:
            found.append((batch.step, uneven))
    if not found or 2 * len(found) < looked:
        return None
    return replace(found[0][1], steps=tuple(step for step, _ in found if step is not None))


#: The same of a term whose loss is divided otherwise than the policy's.
UNLIKE_TERMS = 2.0


def _uneven_terms(case: Case) -> Finding | None:
    """The same of a term beside the policy's loss, where that is a mean over its update, or a mean over all tokens is
    stated: in 2 steps and more, and half of those that have such micro-batches.
    """
    for name, what in TERMS.items():
        if _is_metric_alone(case, what):
            continue
        found: list[tuple[int | None, list[OwnMean]]] = []
        made: list[list[OwnMean]] = []
        looked = 0
        for batch in case.batches():
            updates = own_means(batch, name)
            if not updates:
                continue
            looked += 1
            stated = _MODES.get(aggregation(batch.laid.algorithm)) is _MODES["token-mean"]
            if divides_by_micro_batch(batch.laid.algorithm) or not (stated or is_share_of_update(batch)):
                continue
            worst = max(updates, key=lambda each: max(one.tokens for one in each) / min(one.tokens for one in each))
            made += updates
            if max(one.tokens for one in worst) >= UNLIKE_TERMS * min(one.tokens for one in worst):
                found.append((batch.step, worst))
        if len(found) < 2 or 2 * len(found) < looked or not is_own(made):
            continue
        every = found[0][1]
        small, large = (choose(every, key=lambda one: one.tokens) for choose in (min, max))
        return warning(
            f"the {what} loss is a mean over each micro-batch's own tokens, and the loss is one over all of them: a "
            f"token of the smallest weighs {large.tokens / small.tokens:.2g} times one of the largest in it",
            Where.of(small.logged.record, small.logged.name),
            shown(small.logged.name, small.logged.value, None, small.logged.record.path.name),
            shown("tokens of the smallest micro-batch", small.tokens, f"> {large.tokens / UNLIKE_TERMS:.4g}"),
            shown("tokens of the largest", large.tokens),
            shown("steps that agree", len(found)),
            cause="the term is reduced on its own, over the tokens of its micro-batch, where the policy's loss is "
            "divided by those of the whole update: under dynamic batches, or lengths that differ, its weight is "
            "another "
            "in each micro-batch",
            next_step="divide the term's sum by the same number of tokens as the policy's loss",
            steps=[step for step, _ in found],
        )
    return None


def _is_metric_alone(case: Case, what: str) -> bool:
    """Whether the run states that the term is logged and has no part in the loss."""
    if what == "entropy":
        return entropy_bonus(case.algorithm) == 0
    if what == "KL":
        return case.algorithm.is_on("use_kl_loss") is False or case.algorithm.number("kl_loss_coef") == 0
    return False


def _uneven(parts: list[_MicroLoss]) -> Finding | None:
    """Micro-batches of one update that each divide by their own tokens, where those are far from equal."""
    # An update of its own divides by its own tokens. Of many updates one has a short micro-batch by chance: the middle
    # one tells.
    several = [each for each in _by_update(parts) if len(each) > 1]
    several.sort(key=lambda each: max(one.tokens for one in each) / min(one.tokens for one in each))
    if not several:
        return None
    parts = every = several[(len(several) - 1) // 2]
    counts = [part.tokens for part in every]
    fewest, most = min(counts), max(counts)
    small, large = (every[counts.index(count)].logged for count in (fewest, most))
    if most < UNEVEN * fewest:
        return None
    place = Where.of(small.record, small.name)
    return warning(
        f"{small.name} is a mean over each micro-batch's own tokens: a token of the smallest weighs "
        f"{most / fewest:.2g} times one of the largest",
        place,
        shown("tokens of the smallest micro-batch", fewest, f"> {most / UNEVEN:.4g}", small.record.path.name),
        shown("tokens of the largest", most, None, large.record.path.name),
        shown("mean of the micro-batches' losses", float(np.mean([part.value for part in parts]))),
        shown("token-mean over all of them", float(np.average([part.value for part in parts], weights=counts))),
        cause="the denominator is the micro-batch's token count, not the update's: accumulated gradients are no "
        "token-mean, and change with how samples are split into micro-batches",
        next_step=look_at(place) + "   # divide by the tokens of the whole update instead",
    )


def _agree(a: float, b: float) -> bool:
    return abs(a - b) <= max(CLOSE * abs(b), FLOOR)


def _parts(batch: StepBatch, *, weighted: bool = False) -> tuple[list[_MicroLoss], bool]:
    """Micro-batches with a logged policy loss, and whether its per-token values are certain.

    weighted: each token's loss times its recorded importance weight (TIS, MIS).
    """
    logged = {scalar.place: scalar for scalar in batch.columns.scalars("pg_loss")}
    exact = bool(logged)
    if not logged:
        logged = {one.place: one for one in batch.columns.scalars("loss") if one.record.key.micro is not None}
    token_N, certain = _token_loss(batch)
    if token_N is None or batch.trained_N is None:
        return [], False
    weights = batch.columns.of("is_weights") if weighted else None
    if weights is not None:
        token_N = np.where(weights.said_N, token_N * weights.values_N, token_N)
    return _made_of(batch, list(logged.values()), token_N), exact and certain


def _made_of(batch: StepBatch, logged: list[Scalar], token_N: Array) -> list[_MicroLoss]:
    """Micro-batches with what every reduction makes of these tokens' losses, each with the tokens and samples of its
    update: of all ranks, of one epoch and mini-batch.
    """
    rows = batch.laid.rows_by_micro()
    parts = [_dense(batch, scalar, token_N, np.array(rows[scalar.place])) for scalar in logged
             if scalar.place in rows and np.isfinite(scalar.value)]  # fmt: skip
    made: dict[tuple[int | None, int | None], _MicroLoss] = {}
    step_tokens = int(given(batch.trained_N).sum())
    for update in _by_update(parts):
        ranks = len({one.logged.record.key.rank for one in update})
        tokens, samples = sum(one.tokens for one in update), sum(len(one.values_BT) for one in update)
        for part in update:
            whole = replace(
                part, update_tokens=tokens, update_samples=samples, ranks=ranks, micros=len(update) // ranks,
                update_attended=sum(one.attended for one in update),
                update_answered=sum(one.answered for one in update),
            )  # fmt: skip
            made[part.logged.place] = replace(whole, made=dict(reductions_of(whole, step_tokens, len(batch))))
    return [made[part.logged.place] for part in parts]


def _by_update(parts: list[_MicroLoss]) -> list[list[_MicroLoss]]:
    """The micro-batches of each optimizer step."""
    updates: dict[tuple[int | None, int | None], list[_MicroLoss]] = defaultdict(list)
    for part in parts:
        updates[part.logged.update].append(part)
    return list(updates.values())


def _ratio_N(batch: StepBatch) -> Array | None:
    """The ratio of every token, 1 where there is none; None where none is known."""
    try:
        ratio_N, known_N, _ = ratios(batch)
    except Skip:
        return None
    filled_N: Array = np.where(known_N, ratio_N, 1.0)
    return filled_N


@worked_out_once
def _token_loss(batch: StepBatch) -> tuple[Array | None, bool]:
    """The loss of every token, and whether it is certain: recorded, or of a recorded ratio; else the ratio is taken
    as 1.
    """
    column = batch.columns.of("token_loss")
    if column is not None:
        return np.where(column.said_N, column.values_N, 0.0), True
    advantages = batch.columns.of("advantages")
    if advantages is None:
        return None, False
    values_N = np.where(advantages.said_N, advantages.values_N, 0.0)
    ratio_N = _ratio_N(batch)
    if ratio_N is None:
        return -values_N, False
    logged = logged_of(batch, "pg_loss", "loss", fewest=1)
    # One loss alone fits some way by chance: then only what has no ratio in it (REINFORCE) is asked for, and no factor.
    alone = logged is not None and len(logged.values_M) < 2
    fitting = None if logged is None else next((
        one for one in surrogates(batch)
        if (not one.mistake and not one.is_ratio and logged.is_made_by(one.values_N) if alone
            else logged.fits(one.values_N))
    ), None)  # fmt: skip
    if fitting is not None and logged is not None and not alone:
        # Of two losses many ways fit with a factor of their own: one that needs none goes first, and before it one
        # that fits to the end of the digits: a bound that a single token passes makes a difference of 1e-4.
        for loose in (0.1, 1.0):
            plain = (
                one for one in surrogates(batch)
                if not one.mistake and logged.factor(one.values_N, loose=loose, plain=True)
            )  # fmt: skip
            if (found := next(plain, None)) is not None:
                fitting = found
                break
    # What no way makes may hold other terms; what a mistake makes is D50's.
    if fitting is None or fitting.mistake:
        return policy_loss.clipped(ratio_N, values_N), bool((np.abs(ratio_N - 1) < 1e-3).all())
    return fitting.values_N, True


def _dense(batch: StepBatch, scalar: Scalar, token_N: Array, samples: Array) -> _MicroLoss:
    assert batch.trained_N is not None
    lengths, spans = batch.flat.lengths_B[samples], batch.flat.spans
    values_BT = np.zeros((len(samples), int(lengths.max(initial=1))))
    mask_BT = np.zeros(values_BT.shape)
    for row, (sample, length) in enumerate(zip(samples, lengths, strict=True)):
        values_BT[row, :length], mask_BT[row, :length] = token_N[spans[sample]], batch.trained_N[spans[sample]]
    widths = batch.laid.widths or {"the response": values_BT.shape[1]}
    answered_N = batch.trained_N if batch.response_N is None else batch.response_N | batch.trained_N
    if not batch.spine.padding_known:
        last_B = batch.flat.last(batch.trained_N)
        answered_N = answered_N & (batch.flat.position_N <= np.repeat(last_B, batch.flat.lengths_B))
    # Responses that are left out whole are another matter: nothing of them is trained on.
    answered_N = answered_N & np.repeat(batch.flat.count(batch.trained_N) > 0, batch.flat.lengths_B)
    inside = [spans[sample] for sample in samples]
    return _MicroLoss(
        scalar, values_BT, mask_BT, widths, attended=int(lengths.sum()),
        answered=sum(int(answered_N[span].sum()) for span in inside),
        total_answered=sum(float(token_N[span][answered_N[span]].sum()) for span in inside),
    )  # fmt: skip


@rule("D02", "the loss shows 0 and the policy learns", link="loss", scope="batch", needs=("advantages", "mask"),
      source="trl#3452, open-r1#239: mean-centred advantages at ratio 1")  # fmt: skip
def zero_and_fine(batch: StepBatch) -> Finding | None:
    """Every logged |loss| < 1e-4 while max |A| > 0 on counted tokens, the ratio is 1 where it is recorded, and no
    gradient norm is 0: info, nothing is wrong. Centred advantages times a ratio of 1 sum to 0; their gradient does
    not.
    """
    losses = batch.columns.scalars("pg_loss") or batch.columns.scalars("loss")
    skip_if(not losses, "no loss is logged")
    # Written so that a loss that is NaN is no zero.
    if not max(abs(scalar.value) for scalar in losses) < ZERO or not largest_advantage(batch) > 1e-6:
        return None
    norms = batch.columns.scalars("grad_norm")
    if any(scalar.value == 0 for scalar in norms):
        return None
    ratio_N = _ratio_N(batch)
    if ratio_N is not None and np.abs(ratio_N - 1).max() > 1e-2:
        return None
    return info(
        "the loss is 0 because advantages are centred and the ratio is 1; the gradient is not 0",
        batch.laid.where_record(losses[0].record, losses[0].name),
        shown("largest |loss|", max(abs(scalar.value) for scalar in losses), None, losses[0].record.path.name),
        shown("largest |advantage|", largest_advantage(batch), "> 0", given(batch.columns.of("advantages")).source),
        *([shown("smallest gradient norm", min(scalar.value for scalar in norms), "> 0")] if norms else []),
        cause="normal with one update per batch and no KL term; watch grad_norm and the reward instead",
        next_step="rldbg diagnose --explain D02",
    )


#: What a log of rewards, or of a policy against another, has beside its loss.
_OF_REWARDS = (
    "reward", "reward_std", "reward_max", "frac_zero_std", "advantage_max", "advantage_mean", "kl", "policy_kl",
    "ratio_mean", "ratio_max", "clip_fraction", "pg_loss", "truncated",
)  # fmt: skip


@rule("D02", "loss 0 while training goes on", link="loss", scope="signals", needs=("loss|pg_loss", "grad_norm"),
      source="trl#3452, open-r1#239")  # fmt: skip
def zero_loss_is_expected(log: RunLog) -> Finding | None:
    """|loss| < 1e-4 with a gradient norm above 0 is no error.

    With one update per batch the ratio is 1 and the loss is -mean(A) (+ beta * KL, 0 at first): centred advantages
    make it 0 whatever is learned. The gradient is not 0. Said as info, not as a warning; of a quarter of the steps and
    more, or the first one, and not of those whose clip fraction or KL to the old policy tells that the ratio is not 1.
    Of demonstrations, where nothing is paid, a loss of 0 is none of these: they are known by heart.
    """
    if not any(map(log.has, _OF_REWARDS)):
        return None
    some = [
        step for step in steps_told(log)
        if step.loss is not None and abs(step.loss) < ZERO and (step.grad or 0) > 0 and not step.is_dead
    ]  # fmt: skip
    known = [step for step in steps_told(log) if step.loss is not None]
    some = [step for step in some if not _has_moved(log, step)]
    # What is 0 here and there, and not at first, is so by chance.
    if some and (4 * len(some) >= len(known) or some[0] is known[0]):
        return info(
            "the loss is 0 by construction, the gradient is not: training goes on",
            some[0].point.where("loss"),
            *numbers(loss=some[0].loss, grad_norm=some[0].grad, reward_std=some[0].group_std, steps=len(some)),
            cause="with one update per batch the ratio is 1, and the mean of centred advantages is 0",
            next_step="watch reward, grad_norm and KL instead of the loss",
            steps=steps_of(some),
        )
    return None


#: What the ratio of a batch's only update leaves of the policy's KL to itself.
_UNMOVED = 1e-6


def _has_moved(log: RunLog, step: StepTold) -> bool:
    """Whether the log tells that the ratio of a step was not 1: a batch of several updates, or of older samples."""
    at = (log.at(name, step.step) for name in ("policy_kl", "clip_fraction"))
    return log.algorithm.updates > 1 or any(point is not None and abs(point.value) > _UNMOVED for point in at)


#: Seconds that no step of a language model takes.
AT_ONCE = 0.5


def _no_step(log: RunLog) -> Finding | None:
    """A summary of a run that came back at once, with a loss of 0 and no other."""
    took, loss = log.get("run_seconds"), log.get("loss")
    if took is None or not took.finite or loss is None or any(loss.finite) or len(loss.finite) > 1:
        return None
    if took.finite[-1] >= AT_ONCE or log.has("reward"):
        return None
    return warning(
        f"no step was taken: training came back after {took.finite[-1]:.2g} s, with a loss of 0",
        took,
        took.shown(took.finite[-1], "seconds for each step"),
        loss.shown(0.0, "> 0"),
        link="optimizer",
        cause="it resumed from a checkpoint that is at the last step already (its global_step is the run's total), or "
        "max_steps or the number of epochs is reached, or the data set is empty: nothing was trained",
        next_step="start without resume_from_checkpoint (an empty output folder), or raise max_steps or "
        "num_train_epochs",
    )


def _paid_alike(log: RunLog, steps: list[StepTold]) -> float | None:
    """The one reward, and not 0, that nine of ten of these steps have, and hardly any other step: all of their answers
    earn it. 1 may be that of every step.
    """
    reward = log.get("reward")
    by_step = {} if reward is None else {point.step: point.value for point in reward.points}
    own = {step.step for step in steps}
    known = [by_step[step] for step in own if step in by_step]
    if not known:
        return None
    paid, count = Counter(known).most_common(1)[0]
    others = [value for step, value in by_step.items() if step not in own]
    is_right = paid == 1 and min(by_step.values()) >= 0 and max(by_step.values()) == 1
    is_theirs = paid > 0 and bool(others) and 10 * others.count(paid) < len(others)
    return paid if 10 * count >= 9 * len(steps) and (is_right or is_theirs) else None


def _says_why(batch: StepBatch) -> bool:
    """Whether the samples of a step tell why a loss of 0 is one: no advantage differs from it (of which D01 and D03
    judge), or it is none to worry about.
    """
    if not batch.has("advantages"):
        return False
    if batch.trained_N is not None and batch.trained_N.any() and not largest_advantage(batch):
        return True
    try:
        return zero_and_fine(batch) is not None
    except Skip:
        return False


@rule("L01", "loss 0, and the log does not say why", link="loss", scope="signals", needs=("loss|pg_loss",),
      source="the causes of a loss of 0: docs/evidence.md#loss-of-zero")  # fmt: skip
def zero_loss_untold(log: RunLog) -> Iterator[Finding]:
    """A loss of exactly 0 that the log does not explain: says what would tell the six causes apart.

    The causes: no reward differs (D01, D03), no token counts (D07), the ratio is 1 (D02, no error), the gradient is
    lost (D23), the displayed loss is one micro-batch's. Looked at only where neither a gradient norm, the spread of
    rewards nor micro-batches are logged for the step. A quarter of the steps and more is a warning, else info: where
    rewards are rare, a step may have none; info, too, where other steps have a loss and the reward rises, or where
    nine of ten of these steps have one reward, 1 or one that other steps do not have: every answer is right, or as
    long as is paid. A run that came back within half a second with a loss of 0 took no step: a warning.
    """
    if (none := _no_step(log)) is not None:
        yield none
        return
    told_in_micros = {point.step for point in log.micros("pg_loss")}
    zero = [step for step in steps_told(log) if step.loss == 0 and step.step not in told_in_micros]
    told = log.get("loss") or log.get("pg_loss")
    if zero and told is not None and 4 * len(zero) < len(told.points):
        # 0.0000 among losses that are printed otherwise is a small one; one tells of all.
        zero = [] if is_of_decimals(told.name, zero[0].point.path, zero[0].point.line) else zero
    # Where samples are recorded, they say why (D02).
    told_by_samples = {batch.step for batch in (log.samples() if zero else ()) if _says_why(batch)}
    zero = [step for step in zero if step.step not in told_by_samples]
    untold = [step for step in zero if step.is_dead is None and not step.grad]
    normal = [step for step in zero if step.is_dead is False and step.grad is None]
    if untold:
        both = untold[0].grad == 0
        lost = (
            "a gradient that does not reach the weights"
            if both
            else "an on-policy ratio of 1, which is no error, or a gradient that is lost (both need grad_norm)"
        )
        finite = given(told).finite
        paid_alike = _paid_alike(log, untold)
        # Groups that are all right, or all wrong, give a loss of 0 in steps of few groups, while the others teach.
        teaches = not both and len(untold) < len(finite) and (paid := log.get("reward")) and trends.rises(paid.finite)
        yield finding(
            "warning" if 4 * len(untold) >= len(finite) and paid_alike is None and not teaches else "info",
            f"{'loss and gradient are' if both else 'the loss is'} 0, "
            + (
                "and the log does not say why"
                if paid_alike is None
                else "in steps whose answers are all right"
                if paid_alike == 1
                else f"in steps whose mean reward is {paid_alike:.4g}"
            ),
            untold[0].point.where("loss"),
            *numbers(loss=0.0, grad_norm=untold[0].grad, steps=len(untold)),
            cause="one of: equal rewards (needs reward_std or frac_reward_zero_std, per group), no token in the mask "
            f"(needs the masked count), {lost}, or the last micro-batch's loss shown for the whole step (needs the "
            "loss per micro-batch)",
            next_step="rldbg record -- YOUR COMMAND, then rldbg diagnose rldbg-dump",
            steps=steps_of(untold),
        )
    if normal:
        first = normal[0]
        yield info(
            "the loss is 0 while rewards differ: normal if the gradient is not 0, which is not logged",
            first.point.where("loss"),
            *numbers(loss=0.0, reward_std=first.group_std, frac_zero_std=first.frac_zero, steps=len(normal)),
            cause="with one update per batch the ratio is 1 and the mean of centred advantages is 0",
            next_step="log grad_norm; rldbg record --gradients . -- YOUR COMMAND",
            steps=steps_of(normal),
        )
