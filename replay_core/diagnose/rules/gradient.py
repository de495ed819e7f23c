"""The gradient: exactly 0 where it should not be, never a number, or exploding."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from itertools import accumulate, pairwise
from statistics import median

import numpy as np

from replay_core import pages
from replay_core.budget import stored_bytes
from replay_core.diagnose import trends
from replay_core.diagnose.algorithm import largest_norm
from replay_core.diagnose.batch import StepBatch, largest_advantage
from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Evidence, Finding, Where, error, finding, info, listed, shown, warning
from replay_core.diagnose.flat import Array
from replay_core.diagnose.log_steps import (
    StepTold,
    first_broken,
    numbers,
    scale_falls,
    severity_of,
    steps_of,
    steps_told,
)
from replay_core.diagnose.rule import Skip, given, rule, skip_if
from replay_core.diagnose.signals import RunLog, Series
from replay_core.records import Record, TensorRef
from replay_core.regexes import regex

#: L02: how many medians a single norm may be before a batch's own tokens are no reason.
TORN_OUT = 1000.0
#: Steps of such a size that are no single ones.
TOSSED = 3
#: L02: how far the level of the last quarter must lie over the first half's.
EXPLODED = 5.0
#: By how many times a norm has grown, and what it has come to, where that alone is more than a run comes to by itself;
#: recipes clip a norm at 1, and none below it.
FAR_OFF, CLIPPED_AT = 10.0, 2.0


@rule("D23", "the gradient is 0 although advantages are not", link="gradient", scope="batch",
      needs=("advantages", "mask"),
      explains=("L01", "D46", "D55", "D57"),
      source="ms-swift#5890")  # fmt: skip
def no_gradient(batch: StepBatch) -> Finding | None:
    """grad_norm exactly 0 while max |A| over counted tokens is above 0: an error. Equal and opposite advantages do not
    cancel to an exact 0 on different tokens. Where gradients of both matrices of an adapter (LoRA's A and B) are
    recorded, and all of them are 0, either is it: B begins at 0 and has a gradient from the first step on.
    """
    norms = batch.columns.scalars("grad_norm")
    skip_if(not norms, "no gradient norm is recorded; rldbg record keeps one")
    if not largest_advantage(batch) > 1e-6 or any(norm.value != 0 for norm in norms):
        return None
    place = batch.laid.where_record(norms[0].record, norms[0].name)
    matrices = _of_dead_adapter(batch)
    return error(
        "the gradient is exactly 0 although advantages are not"
        + (", in both matrices of the adapter (LoRA): no gradient reaches it" if matrices else ""),
        place,
        shown("gradient norm", 0.0, "> 0", norms[0].record.path.name),
        shown(
            "largest |advantage| on counted tokens",
            largest_advantage(batch),
            None,
            given(batch.columns.of("advantages")).source,
        ),
        *([shown("recorded gradients of adapters that are 0", matrices)] if matrices else []),
        cause="both matrices were initialised to 0 (A's gradient is a product with B, and B's with A), the scale "
        "(alpha) is 0, or the loss is cut off before them: times 0, detached, or inputs that require no gradient under "
        "gradient checkpointing"
        if matrices
        else "logits are detached, parameters are frozen, both matrices of an adapter (LoRA) begin at 0, the loss "
        "scale overflowed, or the mask cuts the graph",
    )


#: The two matrices of an adapter as PEFT, diffusers and others call them.
_DOWN = regex(r"lora_?(a|down)(?![a-z])", re.IGNORECASE)
_UP = regex(r"lora_?(b|up)(?![a-z])", re.IGNORECASE)


def _of_dead_adapter(batch: StepBatch) -> int:
    """How many gradients of adapters are recorded, where both of their matrices are and all of them are 0; else 0."""
    refs = [
        ref for record in batch.columns.records if record.key.stage == "gradient" for ref in record.tensors()
        if ref.is_readable and ref.shape and (_DOWN.search(ref.name) or _UP.search(ref.name))
    ]  # fmt: skip
    both = any(_DOWN.search(ref.name) for ref in refs) and any(_UP.search(ref.name) for ref in refs)
    return len(refs) if both and not any(pages.array(ref).any() for ref in refs) else 0


@rule("D23", "gradient 0 although advantages are not", link="gradient", scope="signals",
      needs=("grad_norm",), source="ms-swift#5890")  # fmt: skip
def zero_gradient(log: RunLog) -> Finding | None:
    """grad_norm = 0 while some group's rewards differ: the advantages do not reach the weights.

    Without a spread, in all of 5 steps and more while the mean reward changes: an error. Of demonstrations or pairs,
    in every line while the loss is over .01: a warning (in less than 4 lines with a rate of 0 worth knowing).
    Exactly 0 in half of the steps is an error, in a quarter a warning; in fewer than half, steps whose clip fraction is
    above .05 are worth knowing: an update whose tokens all lie outside the clip range has none. A run whose
    completions are all cut and
    masked (D07) has no trained token, and is not this. A log cannot tell a detached loss from frozen weights, a
    loss scale from a mask: the gradients can.

    Worth knowing alone where other steps do have a gradient, each of these has groups without a spread, and no more
    norms are 0 than such groups explain: spreads are means over the updates since the last line, the norm is the last
    update's, and one of a single group has no gradient where that group has no spread. So, too, where nothing tells of
    such groups, each line is of 2 steps and more, and less than half of them have a norm of 0. A step whose largest
    advantage is 0 has no spread, whatever is counted beside it.
    """
    known = [step for step in steps_told(log) if step.grad is not None and step.is_dead is not None]
    if not known:
        return _never_any(log)
    broken = [
        step for step in known
        if step.grad == 0 and not step.is_dead and not step.is_cut and step.advantage != 0
    ]  # fmt: skip
    if broken:
        first = broken[0]
        clipped = [step for step in broken if _is_clipped(log, step)]
        # Where ratios leave the range, an update may have no token that is not clipped; not half of all updates.
        may_be = bool(clipped) and 2 * len(broken) < len(known)
        severity = severity_of(len(broken) - len(clipped) if may_be else len(broken), len(known))
        told = _are_of_one_update(known, broken)
        if told or _may_be_of_one_update(log, known, broken):
            return info(
                "the gradient of single updates is 0: the line's other updates have groups whose rewards differ",
                first.point.where("grad_norm"),
                *numbers(
                    grad_norm=0.0, loss=first.loss, frac_zero_std=first.frac_zero, reward_std=first.group_std,
                    steps=len(broken),
                ),
                cause="a line's spreads are means over its updates, its grad_norm is the last one's: an update whose "
                "groups have no spread has no gradient, "
                + (
                    "and the groups without one explain as many"
                    if told
                    else "and how many have none the log does not tell"
                ),
                next_step="larger batches, or prompts of middling difficulty, leave fewer updates without a gradient",
                steps=steps_of(broken),
            )  # fmt: skip
        # Some trainers' reward_std is of the whole batch: groups may be equal, one by one, in a step or two.
        of_batch = severity == "info" and not may_be and first.frac_zero is None and not first.advantage
        return finding(
            "info" if may_be and len(clipped) == len(broken) else severity,
            "the gradient is exactly 0 although rewards differ" + ("" if of_batch else " within groups")
            + (", in an update where ratios are clipped" if may_be else ""),
            first.point.where("grad_norm"),
            *numbers(
                grad_norm=0.0, loss=first.loss, frac_zero_std=first.frac_zero, reward_std=first.group_std,
                advantage_max=first.advantage, steps=len(broken),
            ),
            cause="every token (of GSPO: every sequence) with an advantage may lie outside the clip range in that "
            "update, as where the range is narrow or a batch is used for several epochs: it has no gradient then"
            if may_be
            else "each group may have equal rewards in that step, where reward_std is of the whole batch: nothing is "
            "wrong then. Else the loss does not reach the weights in it (a loss scale, an empty mask)"
            if of_batch
            else "the loss does not reach the weights: detached log-probabilities, frozen or wrongly sharded "
            "parameters, a loss scale of 0, an empty mask",
            next_step="the log does not say where it is lost; the gradients do: rldbg record --gradients . -- YOUR "
            "COMMAND, then rldbg diagnose rldbg-dump",
            steps=steps_of(broken),
        )  # fmt: skip
    return None


#: A share of groups without a spread from which an update of one or two of them may well be of such alone.
OFTEN = 0.25
#: Of the norms of 0, the share that may be of lines with fewer such groups.
FEW_OF_THEM = 0.25


def _are_of_one_update(known: list[StepTold], broken: list[StepTold]) -> bool:
    """Whether groups without a spread explain the norms of 0: an update has none at most as often as a group has no
    spread, which is a sum of coin tosses (within 3 of its standard deviations). So do those alone of the lines in which
    few groups have none.
    """
    if len(known) < 8 or any(step.frac_zero is None for step in known) or any(not step.frac_zero for step in broken):
        return False
    few = [step for step in known if (step.frac_zero or 0) < OFTEN]
    seldom = sum((step.frac_zero or 0) < OFTEN for step in broken)
    if seldom > FEW_OF_THEM * len(broken):
        return False
    return any(step.grad for step in known) and _by_tossing(known) and (not seldom or _by_tossing(few))


def _by_tossing(told: list[StepTold]) -> bool:
    """Whether no more norms are 0 than coins come up that are tossed with each step's share of groups."""
    shares = [min(1.0, max(0.0, step.frac_zero or 0.0)) for step in told]
    noise = 3 * math.sqrt(sum(each * (1 - each) for each in shares))
    return sum(step.grad == 0 for step in told) <= sum(shares) + noise


def _may_be_of_one_update(log: RunLog, known: list[StepTold], broken: list[StepTold]) -> bool:
    """Whether each line is of several updates, most of which have a gradient, and nothing tells of how many groups had
    a spread: the norm is that of the line's last update.
    """
    steps = sorted({step.step for step in known if step.step is not None})
    apart = [b - a for a, b in pairwise(steps)]
    if not apart or min(apart) < 2 or log.is_counted or 2 * len(broken) >= len(known):
        return False
    return all(step.frac_zero is None and step.advantage is None for step in broken)


#: The clip fraction of a step from which one of its updates may have no token left.
CLIPPED = 0.05


def _is_clipped(log: RunLog, step: StepTold) -> bool:
    """Whether the log says that ratios were clipped in the step."""
    point = log.at("clip_fraction", step.step)
    return point is not None and point.value > CLIPPED


def _never_any(log: RunLog) -> Finding | None:
    """A norm of exactly 0 in all of 5 steps and more, where the log tells no spread of rewards but their mean
    changes.
    """
    norms, reward = log.get("grad_norm"), log.get("reward")
    if norms is not None and len(norms.finite) >= 3 and not any(norms.finite):
        largest = max((largest_advantage(batch) for batch in log.samples()), default=0.0)
        if largest > 1e-6:
            return error(
                f"the gradient is exactly 0 in all {len(norms.finite)} steps although advantages are not",
                norms,
                norms.shown(0.0, "> 0"),
                shown("largest |advantage| on counted tokens", largest),
                cause="no parameter takes part: all are frozen (requires_grad is off, an adapter that is not marked "
                "trainable), logits are detached, or the mask cuts the graph",
                next_step="rldbg record --gradients . -- YOUR COMMAND, then rldbg diagnose rldbg-dump",
            )
    if (nothing := _nothing_of_a_loss(log, norms)) is not None:
        return nothing
    if norms is None or len(norms.finite) < 5 or any(norms.finite) or reward is None or len(set(reward.finite)) < 3:
        raise Skip("no step has both a grad_norm and the spread of its rewards")
    return error(
        f"the gradient is exactly 0 in all {len(norms.finite)} steps although rewards change",
        norms,
        norms.shown(0.0, "> 0"),
        reward.shown(reward.last.value),
        cause="rewards differ between prompts and never within a group, so that all advantages are 0 (log the spread "
        "within groups); or the loss does not reach the weights: detached log-probabilities, frozen parameters, a loss "
        "scale of 0, an empty mask; or no group has a spread of rewards, which is not logged",
        next_step="rldbg record --gradients . -- YOUR COMMAND, then rldbg diagnose rldbg-dump",
    )


#: What only a run that is paid logs: its loss need not be a distance from the data.
_PAID = ("reward", "reward_std", "frac_zero_std", "pg_loss", "advantage_max", "advantage_mean", "kl", "policy_kl")
#: A loss whose gradient is no rounding; lines with a rate of 0 before they are no start of a run.
A_LOSS, START = 0.01, 4


def _nothing_of_a_loss(log: RunLog, norms: Series | None) -> Finding | None:
    """A norm of exactly 0 in every line, with a loss of demonstrations or pairs that is not: it has a gradient."""
    loss, rates = log.get("loss"), log.get("learning_rate")
    if norms is None or not norms.finite or any(norms.finite) or loss is None or any(map(log.has, _PAID)):
        return None
    if not loss.finite or median(map(abs, loss.finite)) < A_LOSS:
        return None
    margins = log.all("pair_reward")
    if margins and not any(any(one.finite) for one in margins):
        return None  # a policy that stays at its reference: D72
    waits = rates is not None and rates.finite and not any(rates.finite)
    lines = len(norms.finite)
    return finding(
        "info" if waits and lines < START else "warning",
        f"the gradient is exactly 0 in {'the one line' if lines == 1 else f'all {lines} lines'} although the loss is "
        f"{median(loss.finite):.3g}" + (", and the learning rate is 0: nothing is trained" if waits else ""),
        norms,
        norms.shown(0.0, "> 0"),
        loss.shown(median(loss.finite)),
        *([rates.shown(0.0, "> 0")] if rates is not None and waits else []),
        cause="the loss does not reach the weights: all are frozen (an adapter that is not trainable), logits are "
        "detached; or every step is skipped because fp16 overflows (the norm and the rate stay at 0 then), or the "
        "engine hands out no norm (some versions of DeepSpeed)",
        next_step="compare a weight before and after a step; rldbg record --gradients . -- YOUR COMMAND, then rldbg "
        "diagnose rldbg-dump",
    )


@rule("D22", "grad_norm is never a number", link="gradient", scope="signals", needs=("grad_norm",),
      source="verl#2505, #1197")  # fmt: skip
def never_a_number(log: RunLog) -> Finding | None:
    """grad_norm NaN or infinite at every step, from the first on, as the first signal that is, with a finite loss: an
    accumulation of 0 micro-batches (mini // (micro * dp) = 0). An error. Not where lines tell of a loss scale that
    falls (D21).
    """
    broken = first_broken(log)
    if broken is None or not broken.is_gradient_alone or scale_falls(log, broken.steps):
        return None
    kinds = {"NaN" if math.isnan(value) else "infinite" for value in broken.series.values if not math.isfinite(value)}
    return error(
        f"grad_norm is {' or '.join(sorted(kinds))} at every step while the loss is finite",
        broken.point.where(broken.series.name),
        *broken.evidence,
        cause="gradients divided by an accumulation of 0 micro-batches (mini_batch // (micro_batch * data_parallel) = "
        "0), or an overflow in the backward pass from the start",
        next_step="check that the micro-batch is no larger than the mini-batch per rank; "
        "rldbg record --gradients . -- YOUR COMMAND names the first parameter",
        steps=broken.steps,
    )


#: Of a mean over tokens whose advantages are of the size 1, the gradient's norm is 1 and less to some tens; of a sum
#: over one response's tokens, some times its length. What is past this times the length is added up over the batch.
SUMMED, AT_LEAST = 10.0, 50.0


def _goes_on(log: RunLog) -> bool:
    """Whether nothing that is logged beside the norm goes wrong: the reward does not fall, the entropy neither falls to
    a third nor grows to twice, and no KL to the reference comes to half a nat.
    """
    reward, entropy, kl = map(log.get, ("reward", "entropy", "kl"))
    if reward is None or trends.drift(reward.finite) < -trends.DRIFT_Z:
        return False
    if entropy is not None and len(entropy.finite) >= trends.MIN_STEPS:
        begun, now = trends.level(entropy.finite[:3]), trends.level(entropy.finite)
        if not begun / 3 < now < 2 * begun:
            return False
    return kl is None or not kl.finite or trends.level(kl.finite) < 0.5


@rule("L37", "the gradient is a sum over the batch", link="loss", scope="signals",
      needs=("grad_norm", "response_length"),
      source="verl loss_agg_mode, TRL loss_type: each of them divides by samples or tokens")  # fmt: skip
def summed(log: RunLog) -> Finding | None:
    """The gradient norm (before clipping) is over 50 in each of 8 steps and more, and its median over 10 times the mean
    response length: a warning. A loss that is summed over each response's tokens is divided by the samples and comes to
    a few times the length. Where rewards are larger than 1 (as far as logged), by as much more; not where it leaps
    within the run, or a critic is trained. Nor where the loss is of ordinary size beside it: a sum makes both large
    (L11).
    """
    series, length = given(log.get("grad_norm")), log.get("response_length")
    values = series.finite
    if length is None or not length.finite or len(values) < trends.MIN_STEPS or log.has("value_loss"):
        raise Skip(f"needs grad_norm and the mean response length of {trends.MIN_STEPS} steps, and no critic")
    now, long = median(values), max(median(length.finite), 1.0)
    rewards = [abs(each) for name in ("reward", "reward_max", "reward_min") for one in log.all(name)[:1]
               for each in one.finite]  # fmt: skip
    size = max([1.0, *rewards])
    if min(values) < AT_LEAST * size or now < SUMMED * long * size or max(values[:4]) * EXPLODED < max(values):
        return None
    skip_if(_is_scaled(log, now), "the loss is of ordinary size: gradients alone are large (L11)")
    return warning(
        f"the gradient norm is large in every step: {series.name} is {now:.3g}, {now / long:.3g} times the mean "
        f"response length of {long:.3g}: the loss is most likely a sum over all tokens, not divided by them",
        series,
        series.shown(now, f"< {SUMMED:g} x {long:.3g}"),
        length.shown(long),
        cause="the loss is added up over tokens and samples (or micro-batches) and never divided: its size, and the "
        "update's unless it is clipped, hang on how many tokens a batch has; or another scale of the loss (an fp16 "
        "loss scale that is not taken off, advantages that are not normalised)",
        next_step="print the loss of one micro-batch and of its half: a mean stays, a sum halves; rldbg record -- YOUR "
        "COMMAND, then rldbg diagnose rldbg-dump --rule D28",
    )


def _leap(values: list[float]) -> tuple[int, int] | None:
    """The place from which on every value (3 and more) is over 5 times all before it (4 and more), and how many they
    are; None where there is none.
    """
    largest = list(accumulate(values, max))
    least = list(accumulate(reversed(values), min))[::-1]
    for at in range(4, len(values) - 2):
        if least[at] > EXPLODED * largest[at - 1] > 0:
            return at, len(values) - at
    return None


#: A leap that no batch and no update of a policy that goes on makes, and steps before and after it that tell.
RESCALED, BEFORE, AFTER = 100.0, 2, 3


def _rescaled(values: list[float]) -> int | None:
    """The place from which on every norm (3 and more) is over 100 medians of those before it (2 and more), 5 times the
    largest of them, and 50; None where there is none.
    """
    largest = list(accumulate(values, max))
    least = list(accumulate(reversed(values), min))[::-1]
    for at in range(BEFORE, len(values) - AFTER + 1):
        if least[at] > max(EXPLODED * largest[at - 1], AT_LEAST) and 0 < RESCALED * median(values[:at]) < least[at]:
            return at
    return None


def _is_of_spreads(log: RunLog) -> bool:
    """Whether norms grow as groups come to have a spread of rewards, and not for those that have one."""
    told = [step for step in steps_told(log) if step.grad is not None and step.frac_zero is not None]
    norms = [
        step.grad / math.sqrt(1 - step.frac_zero) for step in told
        if step.grad is not None and math.isfinite(step.grad) and step.frac_zero is not None and 0 <= step.frac_zero < 1
    ]  # fmt: skip
    if len(norms) < trends.MIN_STEPS:
        return False
    return median(norms[-(len(norms) // 4) :]) <= EXPLODED * median(norms[: len(norms) // 2])


@rule("L02", "the gradient norm explodes", link="gradient", scope="signals", needs=("grad_norm",),
      source="rldbg; verl#2626; torch.amp: unscale_ before clipping")  # fmt: skip
def gradient_norm_leaps(log: RunLog) -> Finding | None:
    """The level of grad_norm (median of the last quarter) is over 5 times that of the first half, and rises: a
    warning, worth knowing where it has grown to less than 10 times and to less than 2, and nothing beside it goes wrong
    (a reward that falls by no chance or is not logged, an entropy of a third or twice, a KL of half a nat). Not where
    groups come to have a spread: levels are of the steps that have one, over the root of the share of groups that do.

    From one step on over 100 times the median before (2 steps and more), 5 times all before, and 50, in each of 3 steps
    and more: a warning, and gradients of another scale.

    At least 8 steps. Single outliers that came down again (6 robust sigmas and 5 medians) are normal and are told
    as info: clipping took care of them. Three steps and more over a thousand medians are a warning. A leap after
    which every norm (3 and more) is over 5 times all before is a
    warning. Over a thousand medians, and a thousand times
    the steps beside it, it is a warning: nothing of a batch explains that.
    """
    series = log.get("grad_norm")
    values = series.finite if series else []
    finite = [] if series is None else [point for point in series.points if math.isfinite(point.value)]
    if series is not None and (scaled := _rescaled(values)) is not None:
        times = median(values[scaled:]) / median(values[:scaled])
        return warning(
            f"the gradient norm is {times:.3g} times what it was from step {finite[scaled].step} on: "
            f"{max(values[:scaled]):.3g} at most before, and never below {min(values[scaled:]):.3g} since",
            finite[scaled].where(series.name),
            series.shown_at(finite[scaled], f"< {EXPLODED:g} x {max(values[:scaled]):.3g}"),
            shown("steps since", len(values) - scaled),
            cause="gradients are of another scale from here on: an fp16 loss scale that is not taken off before they "
            "are clipped and measured (scaler.unscale_), a sum where there was a mean; where reward, KL and entropy "
            "break with it, one update broke the policy. Clipping hides it, and leaves every update the same length",
            next_step="unscale gradients before they are clipped; rldbg record --gradients . -- YOUR COMMAND",
            steps=steps_of(finite[scaled:]),
        )
    if series is None or len(values) < trends.MIN_STEPS:
        raise Skip(f"needs grad_norm of at least {trends.MIN_STEPS} steps")
    half, quarter = values[: len(values) // 2], values[-(len(values) // 4) :]
    before, after = median(half), median(quarter)
    grows = before > 0 and after > EXPLODED * before and trends.rises(values)
    if grows and _is_of_spreads(log):
        return None
    if grows:
        begun = next(point for point in finite[len(half) :] if point.value > EXPLODED * before)
        return finding(
            "info" if after < FAR_OFF * before and after < CLIPPED_AT and _goes_on(log) else "warning",
            "the gradient norm grows and stays there",
            begun.where(series.name),
            shown("median of the last quarter", after, f"< {EXPLODED:g} x {before:.3g}", series.source),
            shown("median of the first half", before, None, series.source),
            cause="the learning rate is too high, the policy has left the data it is trained on, or entropy has "
            "collapsed; or gradients of earlier updates are not cleared any more (zero_grad). An adapter that begins "
            "at 0, and groups of few right answers, come to as much",
            next_step="look at KL, clip fraction and entropy at the same steps; rldbg record --gradients . -- YOUR "
            "COMMAND",
            steps=steps_of(finite[-len(quarter) :]),
        )
    if (broken := _leap(values)) is not None and broken[1] < len(values) // 2 and len(finite) == len(values):
        at, _ = broken
        return warning(
            f"the gradient norm leaps at step {finite[at].step} and does not come back: {max(values[at:]):.3g}, at "
            f"most {max(values[:at]):.3g} before",
            finite[at].where(series.name),
            series.shown_at(finite[at], f"< {EXPLODED:g} x {max(values[:at]):.3g}"),
            shown("steps since", len(values) - at),
            cause="one update broke the policy (a batch with rare tokens or an outlier advantage, a learning rate too "
            "high without clipping): every gradient after it is large",
            next_step="clip the gradient at 1; look at reward, KL and loss at the same steps; rldbg record --gradients "
            ". -- YOUR COMMAND",
            steps=steps_of(finite[at:]),
        )
    middle, sigma = trends.spread(values)
    spikes = [p for p in finite if middle > 0 and p.value > max(5 * middle, middle + trends.OUTLIER_SIGMAS * sigma)]
    if spikes and sigma > 0:
        worst = max(spikes, key=lambda point: point.value)
        at = finite.index(worst)
        # A norm that falls over the run is far above its median at first, and near the norms beside it.
        beside = max((p.value for p in (*finite[max(at - 3, 0) : at], *finite[at + 1 : at + 4])), default=middle)
        # Out of the calm: a norm that falls from its first steps on, or a stretch of large ones, is another thing.
        torn = [
            p for before, p in pairwise(finite)
            if p.value > TORN_OUT * middle and before.value < TORN_OUT * middle / 10
        ]  # fmt: skip
        if len(torn) >= TOSSED:
            return warning(
                f"the gradient norm is tossed about: {len(torn)} steps have over {TORN_OUT:g} times the {middle:.3g} "
                f"of "
                f"most, up to {worst.value:.3g} at step {worst.step}",
                torn[0].where(series.name),
                series.shown_at(worst, f"median {middle:.3g}", "grad_norm"),
                shown("such steps", len(torn), f"< {TOSSED}", series.source),
                cause="the loss has cliffs: a coefficient or a margin that is scaled by what the batch holds (an "
                "adaptive "
                "beta at its floor, a division by a spread next to 0), a ratio or exponential without a bound, or data "
                "with outliers; even where such gradients are clipped, their direction is that of one sample",
                next_step="look at what the loss divides by or multiplies with in those steps; bound it; clip the "
                "gradient at 1; rldbg record --gradients . -- YOUR COMMAND",
                steps=steps_of(torn),
            )
        return finding(
            "warning" if worst.value > TORN_OUT * middle and worst.value > TORN_OUT * beside else "info",
            "single steps have a far larger gradient norm than the rest: "
            f"{worst.value:.3g} at step {worst.step}, and {middle:.3g} in between",
            worst.where(series.name),
            series.shown_at(worst, f"median {middle:.3g}", "grad_norm"),
            shown("such steps", len(spikes), None, series.source),
            cause="a batch with rare tokens or an outlier advantage; clipping bounds its update",
            next_step="look at the worst micro-batch of that step",
            steps=steps_of(spikes),
        )
    return None


#: How far a norm of accumulated gradients grows, what is left of the noise that every batch's own gradient has, and by
#: when it has begun to: after as many updates as make it so many times the first.
PILED, SMOOTH, BEGUN = 4.0, 0.03, 2.0
#: In a shorter log, how nearly every step has more than those before it, and how many steps that takes.
ORDERED, SHORT = 0.9, 12


@rule("D68", "gradients pile up", link="gradient", scope="signals", needs=("grad_norm",), lasts=True,
      explains=("L02", "L08", "L10", "D24", "D25", "L16"),
      source="torch.optim.Optimizer.zero_grad: backward adds to what is there")  # fmt: skip
def norm_piles_up(log: RunLog) -> Finding | None:
    """The gradient's norm before clipping comes to 4 times its first values (medians of 3), is twice that within the
    first quarter of 24 steps and more, and its last half hardly wavers from step to step: the median |log of the
    ratio| is below .03, or that of one such change less the one before it (a sum may rise and fall, but does so
    smoothly). A warning. The norm of one batch's gradient wavers by a tenth and more; a sum over all batches so far
    does not. In 12 steps and more, too, where nearly every step has more than those before it (tau .9), the first
    quarter of them comes to twice the first norm, half of them to two fifths of the last, and that to 4 times the first
    and no more than as many times as there are steps: so grows a sum, and what explodes grows faster in the end.
    """
    series = given(log.get("grad_norm"))
    values = series.finite
    if len(values) < SHORT or len(values) < len(series.points) or min(values) <= 0:
        raise Skip(f"needs grad_norm of {SHORT} steps, none of them 0")
    if _grows_as_a_sum(values):
        return _piled(series, values[0], values[-1], shown("Kendall's tau of the norm and the step", _tau(values)))
    if len(values) < 24:
        return None
    first, last = median(values[:3]), median(values[-3:])
    half, early = values[len(values) // 2 :], values[: max(4, len(values) // 4)]
    changes = [math.log(b / a) for a, b in pairwise(half)]
    noise = min(median(map(abs, changes)), median(abs(b - a) for a, b in pairwise(changes)))
    if last < PILED * first or early[-1] < BEGUN * first or not 0 < noise < SMOOTH:
        return None
    return _piled(
        series, first, last,
        shown("change from one step to the next, median of the last half", noise, f"> {SMOOTH:g}"),
    )  # fmt: skip


def _tau(values: list[float]) -> float:
    """Kendall's tau of the values and their order."""
    pairs = len(values) * (len(values) - 1) / 2
    return sum((b > a) - (b < a) for i, a in enumerate(values) for b in values[i + 1 :]) / pairs


def _grows_as_a_sum(values: list[float]) -> bool:
    """Whether norms grow from the first step on, in nearly every one, and as a sum over steps does: by no more than one
    norm a step, and no faster in the end.
    """
    first, last, count = values[0], values[-1], len(values)
    return (
        PILED * first <= last <= count * first
        and values[count // 4] >= BEGUN * first
        and values[count // 2] >= 0.4 * last
        and _tau(values[:: max(1, count // 400)]) >= ORDERED
    )


def _piled(series: Series, first: float, last: float, evidence: Evidence) -> Finding:
    return warning(
        f"gradients pile up: {series.name} grows from {first:.3g} to {last:.3g} and hardly wavers from step to step",
        series.between(over=BEGUN * first),
        series.shown(last, f"< {PILED:g} x {first:.3g}"),
        evidence,
        cause="the gradients of earlier updates are never cleared: optimizer.zero_grad() is missing, or is called on "
        "another optimizer",
        next_step="rldbg record --gradients . -- YOUR COMMAND, then rldbg diagnose rldbg-dump --rule D68",
    )


#: No norm of a mean loss is that large: a loss scale of fp16 (2^16) is left in, or a sum stands for a mean. Above the
#: second no warm-up passes through it either, and one step tells.
HUGE, ABSURD = 1e4, 1e6


@rule("L11", "the gradient norm is no norm of these gradients", link="gradient", scope="signals",
      needs=("grad_norm|loss",),
      source="verl#4710; torch.amp: clip after scaler.unscale_; ProRL-Agent-Server#40 (2.96e9)")  # fmt: skip
def odd_norm(log: RunLog) -> Iterator[Finding]:
    """The same number (to 1e-4) in every one of 5 steps and more (16 of one of two digits that no recipe clips at) is a
    warning, where loss or reward change. Over 1e4
    from the first step on (median of the first 5, in 2 steps and more): a warning; over 1e6 in every step: an error.
    Where the norm tells nothing, a loss over 1e6 in every step: a warning.
    """
    found = list(_odd(log))
    yield from found or _sum_for_mean(log)


#: The gradient norm over a loss that is no sum; a loss that is 0 by construction tells nothing; what a norm comes to
#: without the loss scale that fp16 begins with.
OVER_LOSS, TELLS, FP16, USUAL = 1e4, 1e-3, 65536.0, (0.05, 20.0)


def _is_scaled(log: RunLog, norm: float) -> bool:
    """Whether the gradient is scaled and the loss is not: a loss that is added up is as large as its gradient."""
    losses = [median(map(abs, one.finite)) for name in ("loss", "pg_loss") if (one := log.get(name)) and one.finite]
    return bool(losses) and norm > HUGE and TELLS < max(losses) < norm / OVER_LOSS


#: Norms that recipes clip at. Of others with two digits few steps may be equal as they are printed.
_BOUNDS = (0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0)


def _odd(log: RunLog) -> Iterator[Finding]:
    series = log.get("grad_norm")
    if series is None or not series.finite:
        return
    values = series.finite
    low, high, begun = min(values), max(values), median(values[:5])
    others = [one.finite for name in ("loss", "pg_loss", "reward") if (one := log.get(name)) is not None]
    fewest = 5 if high != float(f"{high:.1e}") or high in _BOUNDS else 16
    if len(values) >= fewest and low > 0 and high - low <= 1e-4 * high and any(len(set(each)) > 2 for each in others):
        yield warning(
            f"grad_norm is the same in all {len(values)} steps: {high:.5g}",
            series,
            series.shown(high, "another number in every step"),
            cause="the norm is measured after clipping or normalising, not before; or every step is clipped to it",
            next_step="log what clip_grad_norm_ returns: the norm before clipping",
        )
    elif low > ABSURD or (begun > HUGE and len(values) > 1):
        scaled = _is_scaled(log, begun)
        fp16 = scaled and USUAL[0] < begun / FP16 < USUAL[1]
        yield finding(
            "error" if low > ABSURD else "warning",
            f"grad_norm is {begun:.3g} from the first step on: gradients are far too large"
            + (", and the loss is not" if scaled else "")
            + (f": the loss scale of fp16, {FP16:g}, is left in them" if fp16 else ""),
            series.place,
            series.shown(begun, f"< {HUGE:g}"),
            *([shown(f"grad_norm over {FP16:g}", begun / FP16)] if fp16 else []),
            cause="the loss scale is not taken out of the gradients before they are measured and clipped "
            "(scaler.unscale_): clipping then leaves next to nothing of an update, or without it each is so many times "
            "too large"
            if fp16
            else _SCALED,
            next_step="rldbg record --gradients . -- YOUR COMMAND, then rldbg diagnose rldbg-dump --rule D28",
            steps=series.steps(over=HUGE),
        )


_SCALED = (
    "a loss scale that is not taken out before clipping (scaler.unscale_), or a loss that is a sum over tokens, "
    "samples or ranks instead of a mean; clipping then hides it"
)


def _sum_for_mean(log: RunLog) -> Iterator[Finding]:
    series = log.get("loss")
    sizes = [abs(value) for value in series.finite] if series else []
    if series and sizes and min(sizes) > ABSURD:
        yield warning(
            f"the loss is {median(sizes):.3g} in every step: it is no mean over tokens",
            series.place,
            series.shown(median(sizes), f"< {ABSURD:g}"),
            cause="a sum over tokens, samples or ranks stands for the mean, a value loss of rewards that are not "
            "scaled, or log-probabilities of padding",
            next_step="rldbg record -- YOUR COMMAND, then rldbg diagnose rldbg-dump --rule D28",
            steps=[point.step for point in series.points],
        )


#: Cosine of two steps' recorded gradients in a row, and of the changes between three in a row; how much the norm must
#: have grown; and pairs that tell. Batches of runs that learn stay within 0.6 (docs/evidence.md#diagnosis); one batch
#: for ever comes near 1 and shrinks. Gradients that share a signal and have noise of their own, however small, change
#: there and back, to a cosine of -0.5; what is added up goes on.
ALIKE, ONWARD, GROWN, PAIRS = 0.7, -0.25, 1.2, 6


@rule("D68", "gradients pile up", link="gradient", scope="case",
      explains=("L02", "L08", "L10", "D24", "D25", "L16"), lasts=True,
      source="torch.optim.Optimizer.zero_grad: backward adds to what is there")  # fmt: skip
def never_zeroed(case: Case) -> Finding | None:
    """Recorded gradients (`Recorder.gradients`) of one step's last update beside those of the next's: a median cosine
    over 0.7 over 6 pairs and more, while their norm comes to 1.2 times what it was (medians of first and last third),
    and what one step changes of them is not taken back by the next (median cosine of two changes over -0.25): an error.
    So are those of all updates, where none goes over samples again: scaled back to what they were before clipping, each
    holds the one before as it was left .75 to 1.5 times (median cosine over 0.7), the rest of two in a row is as little
    taken back, and their median norm is 1.2 times the first's. Not where steps have the samples of the step before.
    An error, too, where rows of an embedding with a head of its own are those of the update before, up to one factor of
    at most 1, for tokens that do not occur in the mini-batch (in 2 updates and more): such a row has a gradient of 0.
    (Not of an embedding that never changes, or is an adapter's base: no optimizer holds it, or clears its gradient.)
    Not where some recorded steps go on from the one before and others begin anew: those are parts of one update.
    """
    found: dict[int | None, tuple[Record, list[TensorRef]]] = {}
    updates: list[tuple[Record, list[TensorRef]]] = []
    for record in case.records():
        key = record.key
        if key.stage != "gradient" or key.rank or key.role == "critic" or stored_bytes(record.path) > LARGE:
            continue
        refs = sorted((ref for ref in record.tensors() if ref.is_readable and len(ref.shape) > 1), key=lambda r: r.name)
        if refs:
            found[key.step] = record, refs
            updates.append((record, refs))
    if (held := _rows_left_over(case, updates)) is not None:
        return held
    if len(found) <= PAIRS < len(updates):
        return _carried_along(case, updates)
    skip_if(len(found) <= PAIRS, f"needs the gradients of {PAIRS + 1} steps: rldbg record --gradients .")
    cosines: list[float] = []
    onward: list[float] = []
    norms: list[float] = []
    before: Array | None = None
    moved: Array | None = None
    for _, refs in found.values():
        now = np.concatenate([pages.array(ref).astype(np.float64).reshape(-1) for ref in refs])
        norms.append(float(np.linalg.norm(now)))
        skip_if(not norms[-1] > 0 or not math.isfinite(norms[-1]), "a step's gradients are 0, or not finite")
        if before is not None and before.shape == now.shape:
            cosines.append(_cosine(before, now))
            if moved is not None and moved.shape == now.shape:
                onward.append(_cosine(moved, now - before))
            moved = now - before
        else:
            moved = None  # other parameters have a gradient: an expert without tokens has none
        before = now
    skip_if(len(cosines) < PAIRS, f"needs the gradients of {PAIRS + 1} steps: rldbg record --gradients .")
    third = max(len(norms) // 3, 1)
    begun, now_at = median(norms[:third]), median(norms[-third:])
    if median(cosines) > ALIKE and now_at > GROWN * begun and median(onward) > ONWARD and not _is_one_batch(case):
        record, refs = next(iter(found.values()))
        key = record.key
        return error(
            "gradients pile up from update to update: they are never zeroed (zero_grad is not called)",
            Where(step=key.step, micro=key.micro, stage=key.stage, tensor=refs[0].name, path=str(record.path)),
            shown("median cosine of a step's gradient and the next one's", median(cosines), f"< {ALIKE}"),
            shown("median cosine of what two steps in a row change of it", median(onward), "about -0.5"),
            shown("norm of the last steps", now_at, f"< {GROWN:g} x {begun:.3g}"),
            shown("pairs compared", len(cosines)),
            cause="backward adds to .grad, and nothing clears it: gradients of all earlier batches are carried along. "
            "zero_grad() is missing, or clears those of other parameters: an optimizer that holds a copy of the model",
            next_step=_ZERO,
        )
    return _carried_along(case, updates)


_ZERO = "call optimizer.zero_grad() before the first backward of every optimizer step"
#: How many times an update's gradient holds the one before, along that, where it was added to it: once, and what the
#: batches have in common.
ONCE = (0.75, 1.5)


#: An embedding of tokens, and a head of its own: where the two are one, every token has a gradient.
_EMBEDDING = regex(r"(?:embed_tokens|tok_embeddings|word_embeddings|wte|embed_in)\.weight$")
_HEAD = regex(r"(?:lm_head|embed_out|output_layer|output)\.weight$")
#: Updates whose embedding tells before it is no accident, and how nearly rows are those of the update before: as far as
#: clipping rounds them.
LEFT_OVER, SAME_ROWS, ROUNDED_ROWS = 2, 1e-4, {"bfloat16": 4e-3, "float16": 1e-3}


def _rows_left_over(case: Case, updates: list[tuple[Record, list[TensorRef]]]) -> Finding | None:
    """Rows of the embedding's gradient of tokens that are not in their mini-batch, and that the one before left."""
    if len(updates) <= LEFT_OVER or not any(_HEAD.search(ref.name) for ref in updates[0][1]):
        return None
    ids: dict[int | None, list[tuple[int | None, Array]]] = {}
    weights: dict[tuple[int | None, int | None], TensorRef] = {}
    for record in case.records():
        key = record.key
        for ref in record.tensors():
            if key.stage == "forward_data" and key.role != "critic" and ref.canonical == "input_ids":
                if ref.is_readable:
                    ids.setdefault(key.step, []).append((key.micro, np.unique(pages.array(ref))))
            elif key.stage == "param" and not key.rank and key.role != "critic" and _EMBEDDING.search(ref.name):
                weights[key.step, key.micro] = ref
    if _is_at_rest(weights) or _has_adapters_alone(updates):
        return None
    told: list[tuple[Record, TensorRef, list[int], float]] = []
    looked = 0
    of_steps: set[bool] = set()  # whether a step's first update holds the one of the step before
    before: tuple[Record, TensorRef, Array] | None = None
    for record, refs in updates:
        key = record.key
        embedding = next((each for each in refs if _EMBEDDING.search(each.name)), None)
        if embedding is None:
            before = None
            continue
        now_VD = pages.array(embedding).astype(np.float64)
        last, before = before, (record, embedding, now_VD)
        if last is None or last[2].shape != now_VD.shape or _is_one_update(last[0], record, weights):
            continue
        if not (np.isfinite(last[2]).all() and np.isfinite(now_VD).all()):
            continue
        begin = last[0].key.micro if last[0].key.step == key.step else None
        here = [
            each
            for micro, each in ids.get(key.step, ())
            if micro is None or key.micro is None or (micro <= key.micro and (begin is None or micro > begin))
        ]
        if not here:
            continue
        absent_V: Array = np.any(last[2] != 0, axis=1)
        present = np.concatenate(here)
        absent_V[present[(present >= 0) & (present < len(absent_V))].astype(np.int64)] = False
        if not absent_V.any():
            continue
        looked += 1
        left, own = last[2][absent_V].reshape(-1), now_VD[absent_V].reshape(-1)
        by, near = float(left @ own) / float(left @ left), ROUNDED_ROWS.get(embedding.dtype, SAME_ROWS)
        holds = 0 < by <= 1 + near and float(np.linalg.norm(own - by * left)) <= near * float(np.linalg.norm(own))
        if holds:
            told.append((record, embedding, np.flatnonzero(absent_V).tolist(), by))
        if last[0].key.step != key.step:
            of_steps.add(holds)
    if len(told) < LEFT_OVER:
        return None
    skip_if(len(of_steps) > 1, "some recorded steps go on from the one before, others begin anew: parts of an update")
    record, where, tokens, by = told[0]
    key = record.key
    return error(
        "gradients of an update hold those of the update before: they are not zeroed between the two (zero_grad is not "
        "called)",
        Where(step=key.step, micro=key.micro, stage=key.stage, tensor=where.name, path=str(record.path)),
        shown("updates in which tokens that do not occur have the gradient of the update before", len(told), "0"),
        shown("updates that tell", looked),
        shown("first: such tokens", listed(tokens, 6)),
        shown("first: how many times the gradient before it holds", by, "0"),
        cause="a token that is not in the mini-batch gives its row of the embedding no gradient: what stands there was "
        "left by the backward before. zero_grad() is called once a step, and not before each mini-batch's first "
        "backward, or not at all",
        next_step=_ZERO,
        steps=sorted({each.key.step for each, *_ in told if each.key.step is not None}),
    )


def _is_at_rest(weights: dict[tuple[int | None, int | None], TensorRef]) -> bool:
    """Whether the recorded embedding never changes: an optimizer that does not hold it does not clear its gradient
    either, and what stays there moves nothing.
    """
    every = [each for each in weights.values() if each.is_readable]
    return len(every) > 1 and all(np.array_equal(pages.array(every[0]), pages.array(each)) for each in every[1:])


_ADAPTER = regex(r"(?i)lora_|adapter")


def _has_adapters_alone(updates: list[tuple[Record, list[TensorRef]]]) -> bool:
    """Whether adapters have gradients and the embedding none of its own: it is a frozen base's."""
    names = [ref.name for ref in updates[0][1]]
    return any(map(_ADAPTER.search, names)) and not any("modules_to_save" in name for name in names)


def _is_one_update(before: Record, now: Record, weights: dict[tuple[int | None, int | None], TensorRef]) -> bool:
    """Whether no optimizer step lies between the two, as far as their keys, or recorded weights, tell."""
    a, b = before.key, now.key
    if a.step == b.step and ((a.epoch, a.minibatch) == (b.epoch, b.minibatch) or b.minibatch is None):
        return True
    held = [weights.get((each.step, each.micro)) for each in (a, b)]
    first, second = held
    if first is None or second is None or not (first.is_readable and second.is_readable):
        return False
    return bool(np.array_equal(pages.array(first), pages.array(second)))


def _carried_along(case: Case, updates: list[tuple[Record, list[TensorRef]]]) -> Finding | None:
    """Gradients of which each is its own and the one before, as clipping left it: the norm then stays near the bound,
    and tells nothing. They may be recorded before clipping or after.
    """
    bound = largest_norm(case.algorithm)
    batches = list(case.batches())
    logged = {str(one.record.path): one.value for batch in batches for one in batch.columns.scalars("grad_norm")}
    norms = [logged.get(str(record.path), math.nan) for record, _ in updates]
    over_again = any(record.key.epoch for record in case.records() if record.key.stage == "forward_data")
    if not bound or bound <= 0 or not all(0 < one < math.inf for one in norms) or over_again or _is_one_batch(case):
        return None
    # The first has nothing before it.
    begun, now_at = norms[0], median(norms[1:] or norms)
    if len(updates) <= PAIRS or now_at <= GROWN * begun:
        return None
    cosines: list[float] = []
    onward: list[float] = []
    held: list[float] = []
    before: Array | None = None
    own: Array | None = None
    for (_, refs), norm in zip(updates, norms, strict=True):
        read = np.concatenate([pages.array(ref).astype(np.float64).reshape(-1) for ref in refs])
        size = float(np.linalg.norm(read))
        if not 0 < size < math.inf or (before is not None and before.shape != read.shape):
            return None
        by = max(1.0, norm / bound)
        # A part of the gradient that is larger than all of it was let be is there as it was before clipping.
        raw, left = (read, read / by) if size > 1.001 * bound else (read * by, read)
        if before is not None:
            cosines.append(_cosine(before, raw))
            held.append(float(before @ raw) / float(before @ before))
            rest = raw - before
            if own is not None:
                onward.append(_cosine(own, rest))
            own = rest
        before = left
    if median(cosines) <= ALIKE or not ONCE[0] <= median(held) <= ONCE[1] or median(onward) <= ONWARD:
        return None
    record, refs = updates[1]
    key = record.key
    return error(
        "gradients pile up from update to update: each is its own and the one before, as clipping left it (zero_grad "
        "is not called)",
        Where(step=key.step, micro=key.micro, stage=key.stage, tensor=refs[0].name, path=str(record.path)),
        shown(
            "median cosine of an update's gradient before clipping and the one before", median(cosines), f"< {ALIKE}"
        ),
        shown("how many times it holds the one before, median", median(held), "near 0"),
        shown("median cosine of what two updates in a row add", median(onward), "about -0.5"),
        shown("gradient norm after the first update, median", now_at, f"< {GROWN:g} x {begun:.3g}"),
        shown("pairs compared", len(cosines)),
        cause="backward adds to .grad, and nothing clears it: what clipping left of all earlier batches' gradients is "
        "carried along, and clipping hides how it grows. zero_grad() is missing, or clears those of other parameters",
        next_step=_ZERO,
    )


def _is_one_batch(case: Case) -> bool:
    """Whether most steps have the samples of the step before: their gradients are alike without being added up."""
    tokens = [None if batch.tokens_N is None else batch.tokens_N.tobytes() for batch in case.batches()]
    same = sum(a == b for a, b in pairwise(tokens) if a is not None)
    return len(tokens) > 1 and 2 * same >= len(tokens) - 1


def _cosine(a: Array, b: Array) -> float:
    """0 where one of them is."""
    size = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / size if size > 0 else 0.0


#: Files of gradients that are larger are left to `rldbg compare`.
LARGE = 1 << 26
