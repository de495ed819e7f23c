"""Whether anything is learnt: a rate of 0, weights that never move, and what the reward makes of it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, product
from statistics import median

import numpy as np
from msgspec import Struct

from replay_core.diagnose import trends
from replay_core.diagnose.algorithm import has_no_kl_loss, kl_weight, largest_norm, learning_rate, stated_number
from replay_core.diagnose.case import Case
from replay_core.diagnose.entropy_term import fitted_bonus
from replay_core.diagnose.falling_apart import (
    entropy_used_up,
    falls_apart,
    fell_from,
    lost_since,
    runs_into_the_limit,
    spike_before,
)
from replay_core.diagnose.falls_with import falls_with
from replay_core.diagnose.finding import Evidence, Finding, Where, error, finding, info, listed, share, shown, warning
from replay_core.diagnose.flat import Array
from replay_core.diagnose.function_weights import NOTHING as UNPAID
from replay_core.diagnose.function_weights import function_weights, paid_instead
from replay_core.diagnose.late_falls import late_fall
from replay_core.diagnose.leaps import falls_in_training_alone, leap_in, with_it
from replay_core.diagnose.printed import is_of_decimals
from replay_core.diagnose.rule import Skip, given, rule, skip_if
from replay_core.diagnose.rules.figures import together
from replay_core.diagnose.rules.weights import moved_weights
from replay_core.diagnose.signals import RunLog, Series
from replay_core.regexes import regex

#: Steps of one figure before it is a habit.
FEWEST, MANY, LONG = 5, 16, 40
#: No recipe for RL trains at less; warm-ups pass through it within a few steps.
TINY = 1e-7
#: A twentieth of the least that recipes train at: beside weights of .1 and more an update of that is lost in float32.
NOTHING = 5e-9
#: How many times where it began the reward that is lost has come to, before that is what it fell from.
HIGHER = 1.2
#: What a run calls the optimizer steps that it is to take.
TOTAL = ("total_steps", "max_steps", "total_training_steps", "num_steps", "steps", "num_training_steps", "max_iters")
#: Two forwards of one set of weights differ by less in float32.
SAME = 1e-6
#: A KL that no learning shows in.
STOOD = 3e-5
_RECORD = "rldbg record -- YOUR COMMAND, then rldbg diagnose rldbg-dump"


@rule("L07", "the learning rate is 0, or still warming up", link="optimizer", scope="signals", needs=("learning_rate",),
      explains=("D46", "D55", "D57", "L14"),
      source="rldbg; schedulers stepped per sample or given the wrong number of steps")  # fmt: skip
def rate(log: RunLog) -> Iterator[Finding]:
    """A learning rate of exactly 0 in every one of 5 steps and more is a warning (a run may be meant to stand still);
    of 3 steps and more where gradients are finite and not 0: a warm-up has but its first step at 0, and a loss scale
    that skips steps has no finite gradient.
    One that has risen by equal parts in every one of 16 steps and more and is below 1e-7 yet is a warm-up longer than
    the run: a warning; and so is one of 10 steps and more during which the KL never came to 3e-5, one of 12 that began
    at 0 and in which entropy, length and reward rest to a fiftieth, and one that lasts as long as the run states to be.
    Of 16 steps from 0 on, or of 40, a rise is worth knowing: how long the run will be the log need not tell; a warning
    after 60 in which the reward does not rise and the KL to the reference has not come to .005. A rate
    that never comes to 5e-9, which changes no weight, is a warning; and so is one that never comes to 1e-7 over 16
    lines and more in which no reward is logged and the loss falls by less than a tenth. A 0 that was printed with two
    decimals and more (`lr:0.000`) is a rate that was rounded, and no 0.

    A rate of 0 in the last twentieth (5 steps and more) of the steps that the run states to take is a warning, and so
    is one that is stated to fall to 0 over them (cosine, linear, no least rate, and no longer decay), and is at .8 of
    its largest and more at their end.
    """
    series = given(log.get("learning_rate"))
    values = series.finite
    if not tells_of_rate(log, values):
        raise Skip(f"needs the learning rate of {FEWEST} steps, or one of 0 in 3 with gradients")
    skip_if(_is_rounded(series), f"{series.name} is printed rounded: 0.00 and the like may be any small rate")
    if not any(values):
        yield warning(
            f"the learning rate is 0 in all {len(values)} steps: nothing is learnt",
            series,
            series.shown(0.0, "> 0"),
            cause="the scheduler's total or warm-up steps are wrong (0, or never stepped), or the rate is 0 in the "
            "configuration",
            next_step="print optimizer.param_groups[0]['lr'] after the first scheduler.step()",
        )
        return
    zeros = next((n for n, value in enumerate(reversed(values)) if value), 0)
    spent = len(values) - zeros if zeros else None
    # A schedule may end at 0 in its last step; a run that goes on has outlived it.
    if spent is not None and len(values) - spent >= max(3, len(values) // 4):
        yield warning(
            f"the learning rate has run out: it is 0 from step {series.points[spent].step} on, for the last "
            f"{len(values) - spent} of {len(values)} steps",
            series.of(series.points[spent:]),
            series.shown_at(series.points[spent], "> 0"),
            shown("largest learning rate", max(values)),
            cause="the scheduler is stepped too often (for every micro-batch or mini-batch instead of every step), or "
            "its total is too small: it decays to 0 early",
            next_step="call scheduler.step() once per optimizer step, and give it the number of those as total",
        )
        return
    if (spent is not None and (ended := _ends_early(log, series, spent)) is not None) or (
        (ended := _does_not_decay(log, series)) is not None
    ):
        yield ended
        return
    if max(values) < NOTHING:
        yield warning(
            f"the learning rate never comes above {max(values):.2g} in {len(values)} steps: no weight moves by it",
            series,
            series.shown(max(values), f"> {NOTHING:g}; RL trains at 1e-7 to 1e-3"),
            cause="a number of the schedule stands for the rate (an epsilon, a decay), or it is divided twice; updates "
            "of this size are lost in the weights' precision",
            next_step="print optimizer.param_groups[0]['lr'] after the first scheduler.step()",
        )
        return
    if max(values) < TINY and not trends.rises(values) and (pairs := _stays(log)) is not None:
        yield warning(
            f"the learning rate is at most {max(values):.2g}, and the loss stays: {pairs[0]:.3g}, then {pairs[1]:.3g}",
            series,
            series.shown(max(values), f"> {TINY:g}"),
            cause="a rate too small for the steps there are: policies and pairs are trained at 1e-7 to 1e-5, adapters "
            "at 1e-5 to 1e-3",
            next_step="raise it tenfold, and see whether the loss of one batch falls",
        )
        return
    rises = [b - a for a, b in pairwise(values)]
    rising = min(rises) > 0 and max(rises) < 1.05 * min(rises) + 1e-15
    # A first step of one rise: it began at 0, and how far it is to go the log does not tell.
    from_nothing = rising and abs(values[0] - median(rises)) <= 0.05 * median(rises) and len(values) >= MANY
    far = log.get("kl")
    stood = far is not None and len(far.finite) >= 10 and max(map(abs, far.finite)) < STOOD
    from_nothing = from_nothing or (rising and abs(values[0]) <= 1.05 * median(rises) and len(values) >= MANY)
    stood = stood or (rising and abs(values[0]) <= 1.05 * median(rises) and _rests(log))
    total = log.algorithm.number(*TOTAL)
    over = total is not None and len(values) >= max(total - 1, MANY)
    if rising and ((len(values) >= MANY and values[-1] < TINY) or (len(values) >= 10 and stood) or over):
        yield warning(
            f"the learning rate is still warming up after {len(values)} steps: {values[-1]:.2g}",
            series.ended,
            series.shown(values[-1], "its full value"),
            shown("rise per step", median(rises)),
            *([far.shown(max(map(abs, far.finite)), f"> {STOOD:g}")] if far is not None and far.finite else []),
            cause="the warm-up is longer than the run: its steps are counted in samples or micro-batches, or a ratio "
            "was given as a number of steps",
            next_step="compare warmup_steps with the number of optimizer steps",
        )
    elif from_nothing and (idle := _nothing_moves(log, len(values))) is not None:
        reward, moved = idle
        yield warning(
            f"the learning rate still climbs from 0 after {len(values)} steps, and nothing is learnt yet: "
            f"{reward.name} stays at {trends.level(reward.finite, len(reward.finite) // 3):.3g}, {moved.name} at "
            f"{trends.level(moved.finite):.2g}",
            series.ended,
            series.shown(values[-1], "its full value, which the log does not tell"),
            shown("rise per step", median(rises)),
            moved.shown(trends.level(moved.finite), f"> {IDLE_KL:g}"),
            cause="the warm-up is longer than the run has come: its steps are counted in samples or micro-batches, or "
            "a ratio was given as a number of steps",
            next_step="compare warmup_steps with the number of optimizer steps",
        )
    elif from_nothing or (rising and len(values) >= LONG):
        yield info(
            f"the learning rate still climbs: it has risen by {median(rises):.2g} in every one of {len(values)} "
            f"steps{', from 0' if from_nothing else ''}",
            series.ended,
            series.shown(values[-1], "its full value, which the log does not tell"),
            shown("rise per step", median(rises)),
            cause="a warm-up that is not over: right if the run is long; else its steps are counted in samples or "
            "micro-batches, and the rate never gets there",
            next_step="compare warmup_steps with the number of optimizer steps",
        )


#: Steps of a warm-up in which a policy should have moved, and a KL to the reference of one that has not.
IDLE, IDLE_KL = 60, 5e-3


def _nothing_moves(log: RunLog, steps: int) -> tuple[Series, Series] | None:
    """The reward and the KL to the reference, where the one does not rise and the other comes to nothing in many steps
    of a warm-up.
    """
    reward, far = log.get("reward"), log.get("kl")
    if steps < IDLE or reward is None or far is None or min(len(reward.finite), len(far.finite)) < IDLE // 2:
        return None
    stays = not trends.rises(reward.finite) and abs(trends.level(far.finite)) < IDLE_KL
    return (reward, far) if stays else None


#: Steps at 0 at the end of a run, and the share of it, before they are no last step of a schedule.
_AT_0, _SHARE_AT_0 = 5, 0.05
#: Steps of a decay, the share of the stated total that is logged, and what is left of the largest rate, before it is
#: one that does not take place.
_DECAYS, _LOGGED, _LEFT = 20, 0.9, 0.8
_SCHEDULES = ("lr_scheduler_type", "lr_scheduler", "lr_decay_style", "lr_schedule", "scheduler_type")
#: Steps that the decay has of its own, where they are stated; transformers' and verl's half a wave.
_DECAY_STEPS = ("lr_decay_iters", "lr_decay_steps", "decay_steps", "num_decay_steps", "lr_total_steps", "t_max")
_HALF_A_WAVE = 0.5
_LEAST_RATES = ("min_lr", "min_lr_ratio", "min_lr_rate", "lr_min", "final_lr", "lr_end", "min_learning_rate")


def _ends_early(log: RunLog, series: Series, spent: int) -> Finding | None:
    """A rate of 0 in the last steps of the run, one for each step up to the total that is stated."""
    values, total = series.finite, log.algorithm.number(*TOTAL)
    idle = len(values) - spent
    if total is None or len(values) != len(series.points) or abs(len(values) - total) > 1:
        return None
    if idle < max(_AT_0, _SHARE_AT_0 * len(values)):
        return None
    return warning(
        f"the learning rate ends before the run: it is 0 from step {series.points[spent].step} on, for the last {idle} "
        f"of the {total:g} steps that are stated",
        series.of(series.points[spent:]),
        series.shown_at(series.points[spent], "> 0"),
        shown("steps of the schedule", spent, f"{total:g}"),
        cause="the schedule has fewer steps than the run: the warm-up is taken off its total twice, or it is counted "
        "over another number of steps; nothing is learnt in the last of them",
        next_step="give the scheduler the number of optimizer steps of the run as its total",
    )


def _does_not_decay(log: RunLog, series: Series) -> Finding | None:
    """A rate that is stated to fall to 0 over the stated steps (cosine, linear) and near its largest at their end."""
    algorithm, values = log.algorithm, series.finite
    # verl's warmup_style names the whole schedule; elsewhere a linear one is how the rate rises.
    kind = algorithm.word(*_SCHEDULES) or algorithm.word("warmup_style").replace("linear", "")
    total, decay, waves = (algorithm.number(*names) for names in (TOTAL, _DECAY_STEPS, ("num_cycles",)))
    if kind not in ("cosine", "linear") or any(algorithm.number(name) for name in _LEAST_RATES) or total is None:
        return None
    # A longer decay, or a wave that comes back up, is meant to end high.
    if (decay is not None and decay > total) or waves not in (None, _HALF_A_WAVE):
        return None
    first, last = series.points[0].step, series.points[-1].step
    if first is None or last is None or len(values) < _DECAYS or first > 0.1 * total:
        return None
    if not _LOGGED * total <= last <= total + 1 or values[-1] < _LEFT * max(values):
        return None
    return warning(
        f"a {kind} schedule over {total:g} steps is stated, and the learning rate is at {values[-1] / max(values):.0%} "
        f"of its largest at step {last}: it decays over another number of steps, or not at all",
        series.ended,
        series.shown(values[-1], f"< {_LEFT * max(values):.3g}"),
        shown("largest learning rate", max(values)),
        shown("steps that are stated", total),
        cause="the schedule's length is a default or another setting (train_iters, decay steps), counted in other "
        "steps, or the schedule is made and never stepped",
        next_step="print the scheduler's total steps; give it those of the run",
    )


def _is_rounded(series: Series) -> bool:
    """Whether its zeros are printed with two decimals and more: they may be any number that is less."""
    zero = next((point for point in reversed(series.points) if not point.value), None)
    return zero is not None and is_of_decimals(series.name, zero.path, zero.line)


def tells_of_rate(log: RunLog, values: list[float]) -> bool:
    """Whether there are as many of them as are no start of a run: 5, or 3 of 0 with gradients."""
    return len(values) >= FEWEST or (not any(values) and len(values) >= 3 and _has_gradients(log))


def _has_gradients(log: RunLog) -> bool:
    """Whether every logged gradient norm is finite and over 0."""
    grads = log.get("grad_norm")
    return grads is not None and len(grads.points) >= 3 and all(math.isfinite(each) and each for each in grads.values)


def _stays(log: RunLog) -> tuple[float, float] | None:
    """The loss of the first and last third of 16 lines and more, where it falls by less than a tenth and nothing is
    paid.
    """
    loss = log.get("loss")
    if loss is None or len(loss.finite) < MANY or log.has("reward"):
        return None
    third = len(loss.finite) // 3
    begun, now = median(loss.finite[:third]), median(loss.finite[-third:])
    return (begun, now) if begun > 0 and now > 0.9 * begun else None


#: Share of itself by which a figure that rests wavers.
RESTS = 0.02


def _rests(log: RunLog) -> bool:
    """Whether entropy and one of length and reward waver by no more than a fiftieth over 12 steps and more: the weights
    that write them stand.
    """
    entropy = log.get("entropy")
    others = [one for name in ("response_length", "reward") if (one := log.get(name)) is not None]
    every = [entropy, *others]
    if entropy is None or not others:
        return False

    def wavers(series: Series | None) -> bool:
        values = [] if series is None else series.finite
        # One number throughout is no figure of a batch.
        return len(values) < 12 or not 0 < max(values) - min(values) <= RESTS * max(map(abs, values))

    return not any(map(wavers, every))


@rule("L07", "the settings leave nothing to learn with", link="optimizer", scope="case",
      source="a warm-up counted in samples; a norm to clip at that stands for a learning rate")  # fmt: skip
def settings(case: Case) -> Finding | None:
    """What the run states of its settings (its flags, `Recorder.note`): a learning rate of 0, or a warm-up that is as
    long as the run and longer, is a warning.
    """
    warmup = case.algorithm.number("warmup_steps", "lr_warmup_steps", "num_warmup_steps", "warmup_iters")
    total = case.algorithm.number(*TOTAL)
    lr = learning_rate(case.algorithm)
    skip_if(warmup is None and lr is None, "no settings are noted")
    if warmup is not None and total is not None and warmup >= total > 0 and warmup > 1:
        return warning(
            f"the warm-up of {warmup:g} steps is longer than the run of {total:g}: the learning rate never gets there",
            None,
            shown("warm-up steps", warmup, f"< {total:g}", "the run's settings"),
            cause="its steps are counted in samples or micro-batches, or another run's number was kept",
            next_step="compare warmup_steps with the number of optimizer steps",
        )
    elif lr == 0:
        return warning(
            "the learning rate is 0, as the run states it: nothing is learnt",
            None,
            shown("learning rate", 0.0, "> 0", "the run's settings"),
            cause="the rate is 0 in the configuration",
            next_step="print optimizer.param_groups[0]['lr'] after the first scheduler.step()",
        )
    return None


#: Of a gradient, the share that clipping may leave before it is all that is left.
LEAVES = 1e-2
#: How far norms may lie off a bound that they were clipped to.
OFF = 0.02


@rule("L15", "clipping leaves nothing of the gradient", link="optimizer", scope="signals",
      needs=("grad_norm", "grad_norm_clipped"), explains=("L14", "D46", "D55"),
      source="torch.nn.utils.clip_grad_norm_; recipes clip at 0.1 to 1")  # fmt: skip
def clipped_away(log: RunLog) -> Finding | None:
    """The gradient's norm after clipping below a hundredth of that before it (medians, 3 steps and more): a warning. Of
    a bound of .1 and more, as recipes have it, it is the gradient that is too large: a loss that is a sum over tokens.
    """
    before, after = given(log.get("grad_norm")), given(log.get("grad_norm_clipped"))
    skip_if(len(before.finite) < 3 or len(after.finite) < 3, "needs the norms before and after clipping of 3 steps")
    raw, left = median(before.finite), median(after.finite)
    if 0 < left < LEAVES * raw:
        return _clipped(raw, left, after, "the log")
    return None


def _clipped(raw: float, left: float, series: Series, source: str) -> Finding:
    return warning(
        f"clipping leaves {left:.2g} of a gradient norm of {raw:.3g}: every step is clipped to next to nothing"
        + (", as of a loss that is summed, not averaged" if left >= _USUAL else ""),
        series,
        shown("norm after clipping", left, f"> {LEAVES * raw:.2g}", source),
        shown("norm before", raw),
        cause="the loss is a sum over tokens or samples where a mean is meant (or it, or the advantages, are scaled "
        "up): the norm is as many times too large, and what is left of each step is a direction of one length"
        if left >= _USUAL
        else "max_grad_norm is far too small (a learning rate or an epsilon at its place)",
        next_step="divide the loss by the number of tokens that count, over all micro-batches and ranks of the step, "
        "and look at grad_norm"
        if left >= _USUAL
        else "set max_grad_norm to 1 and look at grad_norm",
    )


#: The least norm that recipes clip at.
_USUAL = 0.1


def _still_scaled(raw: float, left: float, scale: float, series: Series) -> Finding:
    return warning(
        f"gradients are clipped before they are unscaled: their norm of {raw:.3g} is {raw / scale:.2g} times the loss "
        f"scale, and is clipped to {left:.3g}",
        series,
        shown("norm before clipping", raw),
        shown("over the loss scale", raw / scale),
        shown("after", left),
        cause=f"scaler.unscale_(optimizer) is missing before clip_grad_norm_: {left / scale:.2g} is left of the norm "
        "once the step unscales it",
        next_step="call scaler.unscale_(optimizer) before clip_grad_norm_, and look at grad_norm",
    )


@rule("L15", "clipping leaves nothing of the gradient", link="optimizer", scope="case",
      source="torch.nn.utils.clip_grad_norm_; recipes clip at 0.1 to 1")  # fmt: skip
def clips_at_nothing(case: Case) -> Finding | None:
    """Norms that are one number after clipping (in 3 steps and more, and half of all), another than the run states: an
    error. The norm to clip at, as the run states it, below a hundredth of the logged gradient norm: a warning. Where
    a loss scale is stated (fp16) and the norm over it is below the norm to clip at, to which it was clipped all the
    same, what was clipped was not unscaled before.
    """
    limit = largest_norm(case.algorithm)
    norms, left = case.log.get("grad_norm"), case.log.get("grad_norm_clipped")
    if (other := _clipped_elsewhere(case, norms, left)) is not None:
        return other
    scale = stated_number({**(case.run.flags or {}), **case.run.facts}, "loss_scale", "init_scale", "initial_scale")
    if norms is not None and left is not None and scale and len(norms.finite) >= 3 and len(left.finite) >= 3:
        raw, clipped = median(norms.finite), median(left.finite)
        if scale > 1 and clipped < LEAVES * raw and 0.02 * clipped < raw / scale < clipped:
            return _still_scaled(raw, clipped, scale, norms)
    if limit is None or norms is None or len(norms.finite) < 3 or case.log.has("grad_norm_clipped"):
        raise Skip("needs the stated norm to clip at, and gradient norms of 3 steps")
    if 0 < limit < LEAVES * median(norms.finite):
        return _clipped(median(norms.finite), limit, norms, "the run's settings")
    return None


def _clipped_elsewhere(case: Case, norms: Series | None, left: Series | None) -> Finding | None:
    """Norms that are one number after clipping, which is not the stated one, in every step whose norm is above it."""
    stated = largest_norm(case.algorithm)
    rows = [] if not stated or norms is None or left is None else [row for _, row in together(norms, left)]
    cut = [after for before, after in rows if 0 < after < (1 - OFF) * before]
    if not stated or norms is None or left is None or len(cut) < 3 or len(cut) < len(rows) / 2:
        return None
    at = median(cut)
    if max(cut) - min(cut) > OFF * at or (1 - OFF) * stated < at < (1 + OFF) * stated:
        return None
    return error(
        f"the gradient is clipped at {at:.3g}, and the run states {stated:g}",
        left,
        left.shown(at, f"{stated:g}"),
        norms.shown(median(norms.finite)),
        shown("steps that are clipped there", share(len(cut), len(rows))),
        cause="the norm that is configured does not reach clip_grad_norm_ (a default of the optimizer's wrapper, "
        "another config group), or is scaled on its way (by micro-batches, ranks, a learning rate)",
        next_step="print the max_norm that clip_grad_norm_ is called with",
    )


#: An Adam step moves each weight by about the rate: a KL this small beside the square of all rates so far is none.
#: Runs that learn have 100 and more (docs/evidence.md#diagnosis), those of a few updates 3 and more. Half of F d^2 is
#: the KL of one weight that went d by every rate, and F of the sum over all of them is far more than 2. SGD has other
#: rates, and is left out by their size. What is logged may be a KL times its coefficient, of .001 and more: the lower
#: limit; the higher one where the batch's own updates are seen to leave the policy where it was, too.
HARDLY, HARDLY_BOTH, STAYS, LARGEST_RATE = 0.1, 1.0, 1e-4, 5e-3
#: SGD moves by the rate times a gradient, which clipping leaves at .1 and more: with such rates, a KL of that is none.
NOT_AT_ALL = 1e-7


@rule("L14", "the policy hardly moves for its learning rate", link="optimizer", scope="signals",
      needs=("kl", "learning_rate"), explains=("D46", "D55"),
      source="Adam's update is bounded by the learning rate (arXiv 1412.6980, section 2.1)")  # fmt: skip
def hardly_moves(log: RunLog) -> Finding | None:
    """KL to the reference over (sum of learning rates before)^2, largest over 8 steps and more: below .1 a warning
    (below 1 where the KL to the policy that sampled is not 0, and below 1e-4 in the middle), for rates up to
    5e-3, and below 1e-7 for higher ones. Runs under Adam that learn have 100 and more: of a gradient that arrives, Adam
    makes a step of about the rate, however small it is. A KL of exactly 0 is D46's.
    """
    far, rates = given(log.get("kl")), given(log.get("learning_rate"))
    by_step = {point.step: point.value for point in rates.points}
    every = [(by_step[p.step], abs(p.value)) for p in far.points if p.step in by_step and math.isfinite(p.value)]
    grads = log.get("grad_norm")
    skip_if(len(every) < 8 or not all(rate >= 0 for rate, _ in every), "needs KL and learning rate of 8 steps")
    own = log.get("policy_kl")
    both = own is not None and len(own.finite) >= 8 and 0 < median(map(abs, own.finite)) < STAYS
    limit = (HARDLY_BOTH if both else HARDLY) if all(rate <= LARGEST_RATE for rate, _ in every) else NOT_AT_ALL
    sums = [0.0]
    for rate, _ in every:
        sums.append(sums[-1] + rate)
    ratios = [kl / so_far**2 for (_, kl), so_far in zip(every[1:], sums[1:-1], strict=True) if so_far > 0]
    if not ratios or not any(kl for _, kl in every) or (grads is not None and not any(grads.finite)):
        return None
    if max(ratios) < limit:
        return warning(
            f"the policy hardly moves: KL {max(kl for _, kl in every):.2g} after {len(every)} steps at a learning rate "
            f"of {every[-1][0]:.2g}",
            far.ended,
            shown("KL / (sum of rates)^2", max(ratios), f"> {limit:g}", far.source),
            cause="next to nothing of the gradient reaches the weights: it is clipped to almost nothing "
            "(max_grad_norm), the optimizer's epsilon outweighs it, it holds few of the parameters, or updates are "
            "lost in bf16 weights; or the reference follows the policy",
            next_step="log the gradient norm after clipping; rldbg record --params . -- YOUR COMMAND, then compare the "
            "weights of two of its steps",
        )
    return None


_STILL = (
    "no update reaches the policy: the learning rate is 0, no gradient comes to it since the loss is detached, or the "
    "optimizer holds other parameters than the model that is run, made before it was wrapped, moved or given its "
    "adapter; or the reference is the policy itself: one object, or updated with it"
)

_ITSELF = (
    "the reference is the policy itself: one object, or weights that are shared or updated with it (no copy is made, "
    "an adapter is not switched off for the reference), so that the KL holds nothing; or the optimizer holds other "
    "parameters than the model that is run, made before it was wrapped, moved or given its adapter"
)


_ADAPTER = (
    "the reference is computed with the adapter on: it is the policy itself, and the KL holds nothing (switch the "
    "adapter off for its forward: disable_adapter()); or the adapter is not trained (the optimizer was made before it "
    "was added)"
)


@rule("D46", "the policy stays at its reference, or is back at it", link="optimizer", scope="case",
      explains=("D15",), source="ms-swift#5890; an optimizer made before FSDP wraps the model")  # fmt: skip
def never_moves(case: Case) -> Finding | None:
    """max |policy - ref| within 1e-6 in the third step and later ones, while advantages are not 0: a warning, info of
    fewer than 20 steps whose recorded values change (a critic that is warmed up). Looking ends at the first step that
    has moved. Or mean |policy - ref| is over .01 nats in 2 steps and more, and a hundredth of that in the next: one of
    the two was loaded with the other's weights. A warning; info where it comes more than once, at equal intervals
    from the first step on (in one step of which the two may be apart), or is stated.
    """
    seen: list[int] = []
    where, largest = None, 0.0
    pushed: int | None = None
    learns, told = False, None
    for batch in case.batches():
        trainer, ref = batch.trainer, batch.columns.of("ref_logprobs")
        if batch.step is None or trainer is None or ref is None:
            continue
        both_N = batch.pair(trainer, ref)
        if both_N.sum() < 8:
            continue
        gap = float(np.abs(trainer.values_N - ref.values_N)[both_N].max())
        if not gap <= SAME:  # NaN is no agreement
            return _one_again(case)
        largest = max(largest, gap)
        values = batch.columns.of("values")
        spread = 0.0 if values is None else float(np.nanstd(values.values_N[both_N]))
        learns, told = learns or (told is not None and spread != told), spread if values is not None else None
        advantages = batch.columns.of("advantages")
        if advantages is not None and np.abs(np.nan_to_num(advantages.values_N[both_N])).max(initial=0.0) > 0.1:
            pushed = batch.step if pushed is None else pushed
        if batch.step not in seen:
            seen.append(batch.step)
        where = batch.laid.where("ref_logprobs", sample=0)
    # An update shows in the step after it.
    if len(seen) < 3 or pushed is None or pushed >= seen[-1]:
        raise Skip("needs policy and reference of 3 steps, and advantages that are not 0 before the last of them")
    warms = learns and len(seen) < 20
    grads, rates = case.log.get("grad_norm"), case.log.get("learning_rate")
    least = 0.0 if grads is None or rates is None else min((*grads.finite, *rates.finite), default=0.0)
    adapter = (case.algorithm.number("lora_rank", "lora_r", "peft_rank") or 0) > 0
    # Checkpoints tell which of the two it is.
    weights = None if warms else moved_weights(case)
    moved = weights is not None and weights[0] > 0
    if weights is not None and moved:
        return warning(
            f"the reference is the policy itself: they are equal in all {len(seen)} steps, and the weights move"
            + (": the reference is computed with the adapter (LoRA) on" if adapter else ""),
            where,
            shown("max |policy - ref|", largest, f"> {SAME:g} after an update"),
            shown(f"largest change of a weight between the checkpoints of steps {weights[1]} and {weights[2]}",
                  weights[0]),
            link="ref",
            cause="the adapter is not switched off for the reference's forward (disable_adapter()): the KL holds "
            "nothing"
            if adapter
            else "one object, or weights that are shared or updated with it (no copy is made): the KL holds nothing",
            next_step="compute the reference under disable_adapter(), or keep a copy of the first weights",
            steps=seen,
        )  # fmt: skip
    return finding(
        "info" if warms else "warning",
        f"policy and reference do not move apart: they are equal in all {len(seen)} steps"
        + (
            ""
            if warms
            else ": the reference has the adapter (LoRA) as well, or the adapter is not trained"
            if adapter
            else ", while gradients and learning rates are not 0: the reference is the policy itself, or the optimizer "
            "holds other weights"
            if least > 0
            else ""
        ),
        where,
        shown("max |policy - ref|", largest, f"> {SAME:g} after an update"),
        *([shown("smallest gradient norm or learning rate", least)] if least > 0 else []),
        cause="the critic learns alone: a warm-up of the critic has the policy wait for it"
        if warms
        else _ADAPTER
        if adapter
        else _ITSELF
        if least > 0
        else _STILL,
        next_step="rldbg record --params . -- YOUR COMMAND, then compare the weights of two of its steps",
        steps=seen,
    )


#: mean |policy - reference| of a policy that has left its reference, in so many steps; and what is left of it, in
#: shares, where they are one again.
LEFT, STEPS_LEFT, ONE_AGAIN = 0.01, 2, 0.01


def _one_again(case: Case) -> Finding | None:
    """Policy and reference that are apart in two steps and more, and equal in the next one."""
    told: list[tuple[int, float, Where]] = []
    for batch in case.batches():
        trainer, ref = batch.trainer, batch.columns.of("ref_logprobs")
        if batch.step is None or trainer is None or ref is None:
            continue
        both_N = batch.pair(trainer, ref)
        if both_N.sum() >= 8:
            apart = float(np.abs(trainer.values_N - ref.values_N)[both_N].mean())
            told.append((batch.step, apart, batch.laid.where("ref_logprobs", sample=0)))
    before = {at: min(apart for _, apart, _ in told[at - STEPS_LEFT : at]) for at in range(STEPS_LEFT, len(told))}
    again = [at for at, least in before.items() if least >= LEFT and told[at][1] <= ONE_AGAIN * least]
    if not again:
        return None
    at, *more = again
    meant = bool(more) or _are_regular(told) or any(case.algorithm.value(name) for name in RESETS_REFERENCE)
    return finding(
        "info" if meant else "warning",
        f"the reference is the policy again at step {told[at][0]}: they are {told[at - 1][1]:.3g} nats per token apart "
        "in the step before, and not at all in this one",
        told[at][2],
        shown("mean |policy - reference| at this step", told[at][1], f"> {ONE_AGAIN * before[at]:.2g}"),
        shown("by step", ", ".join(f"{apart:.3g}" for _, apart, _ in told[:12])),
        link="ref",
        cause="the reference is reset to the policy on a schedule (TR-DPO, ProRL): right where it is meant"
        if meant
        else "the reference was made anew of the policy (a resume that loads the checkpoint into both), so that the KL "
        "no longer holds the policy near the model it began with (some recipes reset it on purpose: TR-DPO, ProRL); or "
        "the policy was loaded with the reference's weights, and has lost what it had learnt",
        next_step="load the reference from the model that the run began with, and the policy from its checkpoint",
        steps=[told[one][0] for one in again],
    )


def _are_regular(told: Sequence[tuple[int, float, Where]]) -> bool:
    """Whether the reference is the policy again in two steps and more at equal intervals, counted from the first step
    that is recorded: a schedule, though a slow step (a warm-up of the rate) parts the two in one step only.
    """
    resets = [
        now for (_, before, _), (now, apart, _) in pairwise(told) if before >= LEFT and apart <= ONE_AGAIN * before
    ]
    return len(resets) > 1 and len({later - at for at, later in pairwise([told[0][0], *resets])}) == 1


#: Settings of a reference that is moved on purpose, as trainers call them.
RESETS_REFERENCE = (
    "sync_ref_model", "ref_model_sync_steps", "ref_update_steps", "ref_update_interval", "ref_reset_interval",
    "reset_ref_every", "ref_update_freq", "update_ref_every", "reference_update_interval", "ref_ema",
    "ref_update_every", "ref_reset_every", "ref_reset_steps", "ref_sync_steps", "ref_sync_every", "ref_sync_interval",
    "reference_update_every", "reference_reset_interval", "ref_model_reset_steps", "sync_ref_every",
)  # fmt: skip


#: A KL that is none, and that is one; steps of it before, and after; and of entropy or reward that tell which side
#: went back.
NO_KL, A_KL, BEFORE, BEHIND, LEVELS = 1e-6, 5e-3, 4, 3, 4


def _back_at_the_start(log: RunLog, series: Series) -> Finding | None:
    """A KL that began at 0, grew, is 0 again in one step, and grows anew."""
    points = [point for point in series.points if math.isfinite(point.value)]
    values = [point.value for point in points]
    if len(values) < BEFORE + BEHIND + 2 or any(log.algorithm.value(name) for name in RESETS_REFERENCE):
        return None
    back = [at for at in range(BEFORE + 1, len(values) - BEHIND) if abs(values[at]) <= NO_KL]
    if len(back) != 1 or abs(values[0]) > NO_KL:
        return None
    at = back[0]
    before, behind = median(values[at - BEFORE : at]), median(values[at + 1 :])
    if before < A_KL or behind < A_KL / 5 or values[at + 1] > 0.5 * before or min(values[1:at]) <= NO_KL:
        return None
    # The policy went back where what it samples is as at first; the reference came forward where it goes on.
    went_back = []
    for name in ("entropy", "reward", "response_length"):
        one = log.get(name)
        told = {} if one is None else {point.step: point.value for point in one.points if math.isfinite(point.value)}
        each = [told.get(point.step, math.nan) for point in points]
        first, last, now = (sum(each[part]) / LEVELS for part in (
            slice(0, LEVELS), slice(at - LEVELS, at), slice(at, at + LEVELS)))  # fmt: skip
        if math.isfinite(first + last + now) and abs(first - last) > 0.1 * abs(first):
            went_back.append(abs(now - first) < abs(now - last))
    lost = bool(went_back) and 2 * sum(went_back) > len(went_back)
    return finding(
        "warning",
        f"the policy is back at its reference at step {points[at].step}: {series.name} is 0 after {before:.3g}"
        + (", and what it samples is as in the first steps: the run goes on from the initial weights" if lost else ""),
        points[at].where(series.name),
        series.shown_at(points[at], f"about {before:.3g}, as before"),
        shown("median of the steps before", before),
        shown("figures that are as in the first steps, of those that had moved", f"{sum(went_back)} of "
              f"{len(went_back)}"),
        cause="the checkpoint was not loaded as the run was resumed (or was that of the start): what was learnt until "
        "then is lost" if lost
        else "the reference was made anew of the policy (a resume that loads the checkpoint into both), or the policy "
        "was loaded with the initial weights: reward and entropy of the steps before and after tell which",
        next_step="look at what the resume loads at this step: the log's lines of load_checkpoint, and its path",
        steps=[point.step for point in points[at:]],
    )  # fmt: skip


@rule("D46", "KL to the reference is exactly 0", link="optimizer", scope="signals", needs=("kl|pair_reward",),
      source="ms-swift#5890; a reference that shares the policy's weights")  # fmt: skip
def no_divergence(log: RunLog) -> Finding | None:
    """KL exactly 0 in every one of 10 steps and more, while gradient norm and learning rate are not: a warning. Of
    preference pairs, so is every implicit reward (beta times the log ratio to the reference). A "penalty" may be
    multiplied by a coefficient of 0: it is a warning where the log tells of one over 0, and else worth knowing. Where
    no gradient norm is logged, 20 steps in which the loss changes. A KL that is off is silent: its coefficient is 0,
    the run states that its loss has none, it is printed rounded, or samples were recorded without a reference and
    nothing tells of a coefficient. Where the policy's entropy drifts (z 4, a fifth of it), the policy does move, and
    the reference moves with it. Or one that was 0 at first, past .005 in 4 steps, and is 0 again in a single later
    one: the run goes on from the initial weights where reward, entropy and length are then as in the first steps. A
    warning; silent where the reference is reset on purpose.
    """
    series = given(log.get("kl") or log.get("pair_reward"))
    if series.signal == "kl" and (again := _back_at_the_start(log, series)) is not None:
        return again
    unsure = series.signal == "kl" and "penalty" in series.name.lower() and not _is_weighed(log)
    grads, rates = log.get("grad_norm"), log.get("learning_rate")
    skip_if(len(series.finite) < 2 * FEWEST, f"needs the KL of {2 * FEWEST} steps")
    each = [series] if series.signal == "kl" else log.all("pair_reward")
    loss = log.get("loss") or log.get("pg_loss")
    moved = any(grads.finite) if grads is not None else (
        loss is not None and len(set(loss.finite)) > FEWEST and len(series.finite) >= 4 * FEWEST
    )  # fmt: skip
    if any(any(one.finite) for one in each) or not moved:
        return None
    if (rates is not None and not any(rates.finite)) or (series.signal == "kl" and _is_off(log)):
        return None
    goes = None if unsure else _policy_goes(log)
    return finding(
        "info" if unsure else "warning",
        f"{series.name} is exactly 0 in all {len(series.finite)} steps, although "
        + ("gradients are not" if grads is not None else "the loss changes")
        + ("" if goes is None else f" and {goes.name} tells that the policy moves: the reference moves with it"),
        series,
        series.shown(0.0, "> 0 after the first update"),
        *([] if goes is None else [goes.shown(trends.level(goes.finite), f"was {trends.level(goes.finite[:3]):.3g}")]),
        cause=("the coefficient it is multiplied by is 0, as a run without a KL term has it; or " if unsure else "")
        + (_STILL if goes is None else _MOVES_ALONG),
        next_step=_RECORD,
    )


#: Mann-Kendall's z, and the share of its beginning, by which a figure drifts of a policy that is updated.
SURELY, GONE = 4.0, 0.2
_MOVES_ALONG = (
    "the reference is the policy itself: one object, weights that are shared or updated with it (no copy is made, an "
    "adapter is not switched off for the reference), or a copy that is made anew in every step: the KL holds nothing"
)


def _policy_goes(log: RunLog) -> Series | None:
    """A figure of the policy alone that drifts farther than a policy that stands could: its entropy."""
    entropy = log.get("entropy")
    if entropy is None or len(entropy.finite) < 2 * FEWEST or abs(trends.drift(entropy.finite)) < SURELY:
        return None
    begun, now = trends.level(entropy.finite[:3]), trends.level(entropy.finite)
    return entropy if abs(now - begun) > GONE * abs(begun) else None


def _is_off(log: RunLog) -> bool:
    """Whether the run has no KL to a reference: what it logs as one is a 0 that was never computed."""
    kl = log.get("kl")
    if kl is not None and (_is_rounded(kl) or is_switched_off(log, kl)):
        return True
    if _is_weighed(log):
        return False
    has_samples = False
    for batch in log.samples():
        if batch.has("ref_logprobs"):
            return False
        has_samples = True
    return has_samples or log.has("kl_coefficient") or kl_weight(log.algorithm) is not None


def is_switched_off(log: RunLog, kl: Series) -> bool:
    """Whether a KL that is 0 in every step is one of a loss that has none, as the run states, or as its coefficient
    says: it is not computed then.
    """
    if any(kl.finite):
        return False
    weight = log.get("kl_coefficient")
    weights = [] if weight is None else weight.finite
    return has_no_kl_loss(log.algorithm) or kl_weight(log.algorithm) == 0 or (bool(weights) and not any(weights))


def _is_weighed(log: RunLog) -> bool:
    """Whether the log tells of a KL's coefficient over 0."""
    coefficient = log.get("kl_coefficient")
    stated = kl_weight(log.algorithm)
    return (coefficient is not None and any(coefficient.finite)) or bool(stated)


@rule("L17", "the reward is one number", link="rewards", scope="signals", needs=("reward",),
      explains=("D01", "D02", "D03", "D20", "D23", "D74", "L01", "L08", "L18"),
      source="a parser that looks for a marker nobody writes")  # fmt: skip
def one_reward(log: RunLog) -> Iterator[Finding]:
    """The mean reward the same number in every one of 5 steps and more: an error where it is 0 or no group differs,
    else a warning. A mean over a batch wavers wherever rewards do; where a spread is logged beside it, that has to
    stand still, too, while three of length, entropy, gradient and loss go on. Or 0 from some step on to the end, and in
    every step before over half of what it was: an error, of responses that no longer end where from that very step on
    their mean length is one number 1.25 times all before and more, or nine of ten are cut. Or 0 in 2 steps and more in
    a row, and over a quarter of the median in every other: a warning. Or one of several reward functions 0 in 16 steps
    and more, while another changes: a warning, and worth knowing where the whole reward rises, and one for right
    answers pays. Or another number but 1 in all of them, its spread 0: a warning below 0, else worth knowing.
    """
    series = given(log.get("reward"))
    values = series.finite
    skip_if(len(values) < FEWEST or len(values) < len(series.points), f"needs the reward of {FEWEST} steps")
    caught = log.events("traceback") if values[0] == 0 else []
    caught = caught if len(caught) >= len(values) else []
    if len(set(values)) > 1:
        found = [*_dies(log, series), *_fails_for_a_while(log, series)]
        yield from found or _never_pays(log)
        return
    spreads = [one.finite for one in log.all("reward_std")]
    spreads += [[each - values[0] for each in one.finite] for one in (*log.all("reward_max"), *log.all("reward_min"))]
    differ = any(any(each) for each in spreads)
    others = (log.get(name) for name in ("response_length", "entropy", "grad_norm", "loss"))
    go_on = sum(one is not None and len(set(one.values)) > 1 for one in others)
    if differ and (any(len(set(each)) > 1 for each in spreads) or go_on < 3):
        return
    yield finding(
        "error" if values[0] == 0 and not differ else "warning",
        f"every step has the same reward: {series.name} is {values[0]:.4g} in all {len(values)} of them"
        + (f", while exceptions are caught in each: {_first_words(caught[0].text)}" if caught else ""),
        series,
        series.shown(values[0], "another number in every step"),
        cause="rewards differ within a batch, and are the same in every step: they are cached, or belong to the "
        "samples of another step"
        if differ
        else f"the judge fails, and what it cannot score counts as 0: {len(caught)} exceptions were caught "
        f"({len(caught) / len(values):.2g} for each step), the first at line {caught[0].point.line}"
        if caught
        else "the judge is constant or never fires: a parser that looks for a marker nobody writes, an exception that "
        "is caught and scored 0, or a metric that is not updated",
        next_step="score two different responses by hand; rldbg record -- YOUR COMMAND keeps them",
    )


def _first_words(text: str, most: int = 90) -> str:
    """A text's beginning, up to `most` letters."""
    short = " ".join(text.split())
    return short if len(short) <= most else short[:most].rpartition(" ")[0] + " ..."


#: Steps of samples before and after, and how many different rewards each of those before has to hold; and how far mean
#: length and mean log-probability of a policy that goes on as before may be from what they were.
STEPS_OF_SAMPLES, DIFFERENT, AS_BEFORE = 2, 4, 1.5


@rule("L17", "the reward is one number", link="rewards", scope="case",
      explains=("D01", "D02", "D03", "D23", "D74", "L01", "L08", "L18"),
      source="a judge that is down and scored 0")  # fmt: skip
def one_reward_from_here_on(case: Case) -> Finding | None:
    """From some step to the last (2 and more) all samples of a step have one and the same reward, less than the best
    before, while each step before (2 and more) holds 4 different ones and more: an error where the policy goes on as
    before, in mean length and mean log-probability of its responses (to 1.5 times). One that has fallen apart may lose
    all of its reward; a judge that is asked rightly does not give a policy that goes on one number.
    """
    told: list[_Rewarded] = []
    for batch in case.batches():
        said = batch.columns.of("rollout_logprobs") or batch.trainer
        rewards_B, response_N = batch.reward_B, batch.response_N
        if batch.step is None or rewards_B is None or said is None or response_N is None:
            continue
        heard_N = response_N & said.said_N & np.isfinite(said.values_N)
        if np.isfinite(rewards_B).all() and heard_N.any():
            place = batch.laid.where(batch.columns.reward_name, sample=0)
            length, surprise = float(batch.flat.count(response_N).mean()), -float(said.values_N[heard_N].mean())
            told.append(_Rewarded(batch.step, place, np.unique(rewards_B), len(batch), length, surprise))
    at = len(told)
    while at and told[at - 1].rewards.size == 1 and told[at - 1].rewards[0] == told[-1].rewards[0]:
        at -= 1
    if min(at, len(told) - at) < STEPS_OF_SAMPLES:
        raise Skip(f"needs rewards and log-probabilities of {2 * STEPS_OF_SAMPLES} steps, the last of one reward")
    before, after = told[:at], told[at:]
    first, fewest = after[0], min(one.rewards.size for one in before)
    constant, best = float(first.rewards[0]), max(float(one.rewards[-1]) for one in before)
    as_before = all(
        _near([one.length for one in before], later.length) and _near([one.surprise for one in before], later.surprise)
        for later in after
    )
    if fewest < DIFFERENT or constant >= best or not as_before:
        return None
    return error(
        f"the judge is constant from step {first.step} on: it gives all {first.samples} responses of each step the "
        f"reward {constant:g}, after {fewest} different ones and more in every step before",
        first.place,
        shown("different rewards of a step from there on", 1, f">= {fewest}"),
        shown("largest reward before", best),
        shown("mean length before and after", f"{before[-1].length:.3g}, {first.length:.3g}", "about the same"),
        shown("mean -log p before and after", f"{before[-1].surprise:.3g}, {first.surprise:.3g}", "about the same"),
        cause="the judge died: a server that is down, a time-out or an exception that is scored as one number; the "
        "policy writes what it wrote before",
        next_step="call the judge by hand on one response of a step before",
        steps=[one.step for one in after],
    )


class _Rewarded(Struct, frozen=True):
    """A step's samples: the different rewards among them, rising, their mean length and mean -log p."""

    step: int
    place: Where
    rewards: Array
    samples: int
    length: float
    surprise: float


def _near(before: list[float], now: float) -> bool:
    return min(before) / AS_BEFORE <= now <= max(before) * AS_BEFORE


#: How many times as long responses are as the longest mean before, where they no longer end, and how near to one length
#: all of them then are; or the share that is cut off.
LONGER, ONE_LENGTH, ALL_CUT = 1.25, 0.01, 0.9


def _no_longer_end(log: RunLog, step: int | None) -> list[Evidence]:
    """What shows that responses run to the limit from this very step on, and did not before."""
    found = []
    for name in ("response_length", "truncated"):
        series = log.get(name) if step is not None else None
        points = [] if series is None else [one for one in series.points if one.step is not None]
        before, since = ([one.value for one in points if (one.step or 0) < (step or 0)],
                         [one.value for one in points if (one.step or 0) >= (step or 0)])  # fmt: skip
        if series is None or not before or not since:
            continue
        of_one = min(since) > LONGER * max(before) and max(since) - min(since) <= ONE_LENGTH * max(since)
        cut = min(since) >= ALL_CUT and max(before) < 0.5
        if of_one if name == "response_length" else cut:
            found.append(shown(f"{series.name} before and since", f"{median(before):.3g}, {median(since):.3g}"))
    return found


def _dies(log: RunLog, series: Series) -> Iterator[Finding]:
    """Exactly 0 from some step on to the end (3 steps and more, a fifth of all), from one step to the next: every one
    before is over half of their median.
    """
    values = series.finite
    at = len(values) - next((n for n, value in enumerate(reversed(values)) if value), len(values))
    left = len(values) - at
    if at < 4 or left < max(3, len(values) // 5) or not min(values[:at]) > 0.5 * median(values[:at]) > 0:
        return
    point = series.points[at]
    if ends := _no_longer_end(log, point.step):
        yield error(
            f"responses no longer end from step {point.step} on: all of them run to the token limit, and the reward "
            f"is 0 in all of the last {left} steps, at least {min(values[:at]):.3g} before",
            point.where(series.name),
            series.shown_at(point, f">= {min(values[:at]):.3g}"),
            *ends,
            link="tokens",
            cause="the engine no longer produces the end token or no longer stops at it (a stop token that is "
            "suppressed or lost, ignore_eos, min_tokens, another chat template or generation config), or it was given "
            "broken weights: what never ends has no answer to be judged",
            next_step="read a response of this step and of one before; compare eos_token_id and stop tokens of both",
            steps=[p.step for p in series.points[at:]],
        )
        return
    yield error(
        f"the reward is 0 from step {point.step} on, in all of the last {left} steps: {series.name} was at least "
        f"{min(values[:at]):.3g} before",
        point.where(series.name),
        series.shown_at(point, f">= {min(values[:at]):.3g}"),
        shown("steps at 0", left),
        cause="the judge died: a server that is down, a time-out or an exception that is scored 0; no policy loses all "
        "of its reward from one step to the next",
        next_step="call the judge by hand on one response of a step before; rldbg record -- YOUR COMMAND keeps them",
        steps=[p.step for p in series.points[at:]],
    )


#: Steps that a judge is out for, and steps before and after in which it paid, in all of them.
OUT, PAID = 2, 4


#: How often chance may leave a reward of few right answers without any before it is a judge that failed.
_BY_CHANCE = 1e-3


def _happens(paid: list[float], steps: int) -> bool:
    """Whether the rewards are so few right answers, all multiples of the least, that steps without one happen."""
    least = min(paid)
    if any(abs(value / least - round(value / least)) > 1e-2 for value in paid):
        return False
    answers = sum(paid) / len(paid) / least
    return len(paid) * math.exp(-answers * steps) > _BY_CHANCE


def _fails_for_a_while(log: RunLog, series: Series) -> Iterator[Finding]:
    """Exactly 0 in 2 steps and more in a row, with no spread where one is logged, and in no other step: in all of them
    (4 before, 1 after) it is over a quarter of the median; not of rewards that are a few right answers each. What the
    reward functions give in these steps, if logged.
    """
    points = [point for point in series.points if math.isfinite(point.value)]
    zero = [at for at, point in enumerate(points) if point.value == 0]
    paid = [point.value for point in points if point.value != 0]
    if len(zero) < OUT or not paid or zero[-1] - zero[0] + 1 != len(zero) or zero[-1] == len(points) - 1:
        return
    if zero[0] < PAID or len(zero) > len(paid) or not min(paid) > 0.25 * median(paid) > 0:
        return
    if _happens(paid, len(zero)):
        return
    steps = [points[at].step for at in zero]
    spread = log.get("reward_std")
    if spread is not None and any(point.value for point in spread.points if point.step in steps):
        return
    functions = [
        (one.name, median(values)) for one in log.all("reward_function") if not one.name.endswith("std")
        for values in [[point.value for point in one.points if point.step in steps]] if values and any(values)
    ]  # fmt: skip
    yield warning(
        f"the reward is exactly 0 in steps {steps[0]} to {steps[-1]} and in no other: {series.name} is at least "
        f"{min(paid):.3g} before and after; the judge failed for {len(zero)} steps",
        points[zero[0]].where(series.name),
        series.shown_at(points[zero[0]], f">= {min(paid):.3g}"),
        shown("steps at 0", len(zero)), shown("median of the others", median(paid)),
        *(shown(f"{name} in these steps, median", value, "0, as the reward") for name, value in functions[:2]),
        cause="a judge or a verifier that was down, timed out or raised for these steps, and is scored 0: nothing was "
        "learnt in them, whatever was answered"
        + ("; its functions did pay, so that they were lost where they are put together" if functions else ""),
        next_step="look for errors and time-outs of the judge in these steps; leave such batches out instead of "
        "scoring them 0",
        steps=steps,
    )  # fmt: skip


_OF_ANSWERS = regex(r"(?i)correct|accura|answer|solv|exact_match|outcome|verif|(?:^|[/_])(?:acc|em|math|int)(?:$|[/_])")


def _never_pays(log: RunLog) -> Iterator[Finding]:
    """One of several reward functions 0 in every one of 16 steps and more, while another changes."""
    each = [one for one in log.all("reward_function") if len(one.finite) >= MANY and not one.name.endswith("std")]
    dead = [one for one in each if not any(one.finite)]
    if not any(len(set(one.finite)) > 1 for one in each):
        return
    if not dead:
        yield from _says_nothing(log, each)
        return
    # What the answers themselves are paid for is learnt all the same: the form that one asks for is not needed.
    whole = log.get("reward")
    learns = whole is not None and trends.rises(whole.finite)
    learns = learns and any(
        _OF_ANSWERS.search(one.name) and len(set(one.finite)) > 1 and trends.drift(one.finite) > -trends.DRIFT_Z
        for one in each
    )
    still = [one for one in each if any(one.finite) and len(set(one.finite)) == 1]
    yield finding(
        "info" if learns else "warning",
        f"one reward function never pays: {dead[0].name} is 0 in all {len(dead[0].finite)} steps, always the same"
        + (
            f", and {', '.join(f'{one.name} {one.finite[0]:.4g}' for one in still[:3])} in all of them" if still else ""
        ),
        dead[0],
        dead[0].shown(0.0, "> 0 for some response"),
        cause="it looks for what nobody writes (a tag the prompt does not ask for, a regular expression that does not "
        "match across lines), or an exception in it is caught and scored 0"
        + ("; what changes is paid for by the others alone" if still else ""),
        next_step="call it by hand on one response that should be paid",
    )


def _rises(log: RunLog) -> bool:
    """Whether the whole reward rises: then what is fined alike is a cost of each step, or of each answer."""
    reward = log.get("reward")
    return reward is not None and trends.drift(reward.finite) > trends.DRIFT_Z


def _says_nothing(log: RunLog, each: list[Series]) -> Iterator[Finding]:
    """Reward functions of one number, neither 0 nor 1, in all steps, whose spread is 0 where it is logged."""
    spreads = {one.name.removesuffix("/std"): one.finite for one in log.all("reward_function_std")}
    still = [
        one for one in each
        if len(set(one.finite)) == 1 and not math.isclose(one.finite[0], 1)
        and not any(spreads.get(one.name.removesuffix("/mean"), ()))
    ]  # fmt: skip
    if not still:
        return
    fined = [one for one in still if one.finite[0] < 0]
    first = (fined or still)[0]
    yield finding(
        # What is above 0 may be all that it pays, which every answer earns.
        "warning" if fined and not _rises(log) else "info",
        f"one reward function says nothing: {first.name} is {first.finite[0]:.4g} in all {len(first.finite)} steps"
        + "".join(f", {one.name} {one.finite[0]:.4g}" for one in still if one is not first)
        + ": what changes is paid for by the others alone",
        first,
        first.shown(first.finite[0], "another mean in every step"),
        cause="no answer does what it looks for, and all are fined alike; or it falls back to a default for each "
        "answer (an exception that is caught, another column): a constant adds nothing to any advantage"
        if fined
        else "every answer earns all that it pays, and nothing is left to learn of it; or it falls back to a default "
        "for each answer: a constant adds nothing to any advantage",
        next_step="call it by hand on one response that should be paid and on one that should not",
    )


@rule("L08", "the reward falls", link="trend", scope="signals", needs=("reward",), explains=("D01", "D20", "D74"),
      source="rldbg; Mann-Kendall (p = 0.005)")  # fmt: skip
def reward_falls(log: RunLog) -> Finding | None:
    """The reward's last quarter (median) lies below the first third's by 0.3 of all it ever spans, in 12 steps and
    more, and the fall is none that chance explains: a warning, and worth knowing where three quarters of the first
    third's are left, as where prompts get harder. Or it breaks off: every one of its last 3 and more
    values lies below all before, by half of all it spans. Or it is lost early: all of the first 5 (or twentieth) lie
    above every one behind the first third. Or it falls within one step by .3 of what it was, and stays
    down, while the validation keeps .9 of what it had: a warning of the training's data. Or, of 40 values and more, it
    falls steadily from its best to the end, a quarter and four robust sigmas below where it began. Rewards waver by
    prompt; RL is meant to raise them.

    Worth knowing alone where what is asked changes with it, as a logged difficulty, stage of a curriculum or mean
    prompt length says: the reward falls where that does change and not within what follows, or step by step with it
    (rank correlation beyond .6). And where it falls in leaps (4 times what a step changes) and rises between them.
    An error where next to nothing is left (.05 of the first 3 steps) and most responses run into the token limit (.5),
    of which few did at first (under .25), or entropy or mean length come to three times (or a third) of what they were:
    the policy has fallen apart; of an entropy that was used up before it is told first.
    """
    series = given(log.get("reward"))
    values = series.finite
    skip_if(len(values) < 12, "needs the reward of 12 steps")
    before, now = median(values[: len(values) // 3]), median(values[-(len(values) // 4) :])
    harder = harder_prompts(log, series)
    alone = falls_in_training_alone(log) if harder is None else None
    if alone is not None:
        drop, held_out = alone
        held = trends.level([p.value for p in held_out.points if (p.step or 0) > (drop.at.step or 0)])
        return warning(
            f"{series.name} falls from {drop.before:.3g} to {drop.after:.3g} at step {drop.at.step}, within one step, "
            f"and stays there, while {held_out.name} stays at {held:.3g}: the training's data or their ground truths "
            "are others from there on, and not the policy",
            drop.at.where(series.name),
            series.shown_at(drop.at, f"about {drop.before:.3g}"),
            held_out.shown(held, "as before"),
            cause="from that step (of a new pass over the data, or another file) prompts and ground truths do not "
            "belong together (shuffled apart, shifted by a row), or the training's judge is another one: a policy that "
            "had changed would lose the validation's reward as well",
            next_step=f"print prompt, answer and ground truth of ten samples of before and behind step {drop.at.step}",
            steps=[p.step for p in series.points if p.step is not None and p.step >= (drop.at.step or 0)],
        )
    if (apart := falls_apart(log)) is not None and harder is None:
        begun, spike = trends.level(values[:3]), spike_before(log, apart[0])
        behind = ""
        if spike is not None:
            norm, at = spike.point.value, spike.point.step
            behind = f", behind a gradient norm of {norm:.3g} at step {at} ({spike.before:.2g} before"
            if spike.largest is not spike.point:
                behind += f", and up to {spike.largest.value:.3g} at step {spike.largest.step}"
            behind += ")"
        top, since = fell_from(series), lost_since(series)
        height = f"{begun:.3g}"
        if top.value > HIGHER * begun:
            height = (
                f"{top.value:.3g}" + ("" if top.step is None else f" at step {top.step}") + f" ({begun:.3g} at first)"
            )
        entropy = entropy_used_up(log, since.step)
        used_up = "" if entropy is None else (
            f"the entropy collapses from {trends.level(entropy.finite[:3]):.3g} to {trends.level(entropy.finite):.3g} "
            "nats per token, and "
        )  # fmt: skip
        return error(
            f"{used_up}{series.name} falls from {height} to {now:.3g} while {apart[1]}{behind}: the policy falls apart",
            since.where(series.name),
            series.shown(now, f">= {begun:.3g}"),
            *([] if spike is None else [spike.norms.shown_at(spike.point, f"about {spike.before:.2g}")]),
            *([] if entropy is None else [
                entropy.shown(trends.level(entropy.finite), f"about {trends.level(entropy.finite[:3]):.3g}")
            ]),
            cause="updates take from the policy what it could do: a learning rate too high, a weight decay that "
            "shrinks the weights, advantages (a sign, a scale) or a clipping that is made wrongly, "
            + (
                "an entropy bonus that outweighs the rest, "
                if entropy is None
                else "nothing that holds the entropy (it is no bonus for it that outweighs the rest), "
            )
            + "no KL: these figures alone do not tell which"
            + (
                ", until it no longer ends its answers; a higher token limit does not bring the reward back"
                if runs_into_the_limit(log) is not None
                else ""
            ),
            next_step="take a checkpoint from before the fall; lower the learning rate or add a KL term; " + _RECORD,
            steps=[
                p.step for p in series.points
                if p.step is not None and p.value < begun / 2 and p.step >= (since.step or 0)
            ],
        )  # fmt: skip
    least, most = trends.so_far(values, min), trends.from_here(values, max)
    far = 0.5 * (max(values) - min(values))
    broken = next(
        (at for at in range(len(values) // 3, len(values) - 2) if at and least[at - 1] - most[at] > far), None
    )
    if broken is not None:
        point = [p for p in series.points if math.isfinite(p.value)][broken]
        return finding(
            "warning" if harder is None else "info",
            f"{series.name} breaks off: at most {max(values[broken:]):.3g} from step {point.step} on, at least "
            f"{min(values[:broken]):.3g} before",
            point.where(series.name),
            series.shown(max(values[broken:]), f">= {min(values[:broken]):.3g}"),
            *_shown(harder),
            cause=_HARDER
            if harder is not None
            else "the judge changed or broke (a server that is down, a time-out scored 0), the weights did (a bad "
            "synchronisation or checkpoint), or the prompts are others",
            next_step=_RECORD,
            steps=[p.step for p in series.points if p.step is not None and p.step >= (point.step or 0)],
        )
    if harder is None and (fall := late_fall(series)) is not None:
        return warning(
            f"{series.name} falls at the end: from {fall.best:.3g} at step {fall.since.step} to {fall.now:.3g}, below "
            f"where it began ({fall.begun:.3g})",
            fall.since.where(series.name),
            series.shown(fall.now, f">= {fall.begun:.3g}"),
            shown("its best level", fall.best, None, f"to step {fall.since.step}"),
            cause="the policy has come apart after it had learnt: a learning rate that is too high for so many "
            "steps, no "
            "KL to hold it, entropy that is used up or explodes, a reward that was exploited until the judge no longer "
            "paid, or prompts of another kind from there on",
            next_step=f"take a checkpoint from about step {fall.since.step}; look at entropy, KL, lengths and the "
            "gradient norm from there on; " + _RECORD,
            steps=[p.step for p in series.points if (p.step or 0) > (fall.since.step or 0) and p.value < fall.begun],
        )
    if harder is None and (leap := leap_in(series)) is not None and leap.after < leap.before:
        moved, rest = with_it(log, leap, _OF_THE_POLICY)
        if rest and not moved and not learns_between(values):
            same = ", ".join(one.name for one in rest)
            return finding(
                "info" if leap.before > 0 and leap.after > 0.75 * leap.before else "warning",
                f"{series.name} leaps from {leap.before:.3g} to {leap.after:.3g} at step {leap.at.step}, within "
                "one step, and "
                f"stays there, while {same} go{'' if ',' in same else 'es'} on as before: the judge or the data "
                "changed, and "
                "not the policy",
                leap.at.where(series.name),
                series.shown_at(leap.at, f"about {leap.before:.3g}"),
                cause="no update moves a policy so far in one step and leaves all else: from there on answers are "
                "judged "
                "otherwise (a grader that times out or is down and scores 0, labels that are another prompt's, another "
                "version of the judge), or the prompts are of another set",
                next_step=f"score the same ten answers of before and behind step {leap.at.step} by hand; the "
                "judge's own log "
                "and its time-outs at that time; the order of prompts and labels there",
                steps=[p.step for p in series.points if p.step is not None and p.step >= (leap.at.step or 0)],
            )
    early = values[: max(_EARLY, len(values) // 20)]
    # What is lost within the first third is not in its median any more.
    is_lost_early = min(early) > max(values[len(values) // 3 :])
    before = max(before, median(early)) if is_lost_early else before
    falls = is_lost_early or trends.drift(values) < -trends.DRIFT_Z
    if now < before - 0.3 * (max(values) - min(values)) and falls:
        random = _gets_random(log)
        moves = _moves_away(log, before - now)
        beside = None if harder is not None else falls_with(log, before, now)
        leaps = learns_between(values) if harder is None else []
        from_the_start = _falls_from_the_start(values)
        return finding(
            "info" if harder is not None or leaps or (before > 0 and now > 0.75 * before) else "warning",
            f"{series.name} falls from {before:.3g} to {now:.3g}: "
            + (
                f"{harder.name} changes with it"
                if harder is not None
                else f"in {len(leaps)} leap{'s' if len(leaps) > 1 else ''}, and rises between them"
                if leaps
                else f"meanwhile {random}"
                if random
                else beside[0]
                if beside is not None
                else "it does so from the first steps on, and training makes the policy worse"
                if from_the_start
                else moves or "nothing that is logged beside it says why"
            ),
            series.first(under=(before + now) / 2 + 1e-12),
            series.shown(now, f">= {before:.3g}"),
            shown("Mann-Kendall z", trends.drift(values)),
            *_shown(harder),
            cause=_HARDER
            if harder is not None
            else "the policy learns between the leaps: other prompts (a stage of a curriculum), or another judge, from "
            "each of them on"
            if leaps
            else "an entropy bonus that outweighs what is paid: a coefficient a hundred times too large"
            if "bonus" in random
            else "updates take from the policy what it could do (a turned sign of loss, advantage or KL term, "
            "advantages of other samples, a learning rate that is too high, an entropy bonus that outweighs what is "
            "paid), or the prompts are others (a curriculum, another stage), of which it is less sure: these figures "
            "do not tell which"
            if random
            else beside[1]
            if beside is not None
            else "advantages, loss or reward have the wrong sign, so that each update drives the policy away from what "
            "is rewarded (advantages of other samples do so, too); or a learning rate that is far too high from the "
            "first step on"
            if from_the_start
            else "the judge changed or broke (time-outs scored 0, other ground truths); a turned sign of loss, "
            "advantage or KL term pushes the policy away from what is rewarded; or it falls apart by too large "
            "updates, a ratio or its clipping that is made wrongly (look at KL and entropy): the reward alone does "
            "not tell them apart",
            next_step=_RECORD,
            steps=[
                p.step
                for at, p in enumerate(series.points, len(values) // 4 - len(series.points))
                if at >= 0 or p.value < (before + now) / 2
            ],
        )
    return None


#: First steps that are above all that comes behind the first third, where a reward is lost early.
_EARLY = 5


def _falls_from_the_start(values: list[float]) -> bool:
    """Whether its best level is that of its first steps (a tenth, 3 and more), and both halves fall by no chance; or
    it is lost early, and every value behind the first third lies below all of the first 5.
    """
    if min(values[:_EARLY]) > max(values[len(values) // 3 :]):
        return True
    few, half = max(3, len(values) // 10), len(values) // 2
    best = max(median(values[at : at + few]) for at in range(few, len(values) - few + 1, few))
    falls = trends.drift(values[:half]) < -trends.DRIFT_Z and trends.drift(values) < -SURELY
    return falls and median(values[:few]) >= best


#: What tells of the policy, whatever a judge says.
_OF_THE_POLICY = ("entropy", "response_length", "kl", "truncated")
#: How many times its least an entropy has grown by that makes answers random, and the least that counts, in nats.
RANDOM, NATS = 1.8, 0.3


def _gets_random(log: RunLog) -> str:
    """That the entropy grows as the reward falls, and what the loss shows of a bonus, in words; else nothing."""
    series = log.get("entropy")
    values = [] if series is None else series.finite
    if series is None or len(values) < 12 or min(values) < 0:
        return ""
    least, now = min(trends.level(values[:at], 3) for at in range(3, len(values))), trends.level(values, 3)
    if now < max(RANDOM * least, least + NATS) or not trends.rises(values):
        return ""
    bonus = fitted_bonus(log)
    return f"{series.name} grows from {least:.2g} to {now:.2g} nats" + (
        "" if bonus is None else f", and the loss is {bonus:.2g} times it: an entropy bonus"
    )


#: A KL per token that a reward may be fined for, and how many times what it was at first.
_FINED, _TIMES = 0.02, 5.0


def _moves_away(log: RunLog, fall: float) -> str:
    """That the KL to the reference grows as the reward falls, by as much as a penalty may take; else nothing."""
    series = log.get("kl")
    values = [] if series is None else series.finite
    if series is None or len(values) < 12 or not trends.rises(values):
        return ""
    begun, now = trends.level(values[:3]), trends.level(values)
    if now < max(_FINED, _TIMES * abs(begun), fall / 2):
        return ""
    return f"{series.name} grows from {begun:.2g} to {now:.2g} with it, whose penalty may be part of what is logged"


_HARDER = "the prompts get harder, as a curriculum makes them: a reward of other prompts is no fall of the policy"
#: A step of what is asked: of a level any, of a mean length that much; and how it goes with the reward step by step.
WIDER, WITH_IT = 1.2, 0.6
#: A leap beside what a step changes; steps of a section that tell whether it rises, and sections.
LEAP, SECTION = 4.0, 8


def learns_between(values: list[float]) -> list[int]:
    """Where the values leap down, if they rise in all that lies between (no section falls by more than chance
    explains, and all together rise by more: Hirsch, Slack and Smith's seasonal Kendall test, 1982); empty where not.
    """
    change = median(abs(b - a) for a, b in pairwise(values))
    leaps = [at for at in range(1, len(values)) if values[at - 1] - values[at] > LEAP * change > 0]
    edges = [0, *leaps, len(values)]
    sections = [values[a:b] for a, b in pairwise(edges) if b - a >= SECTION]
    # Leaps here and there are no stages: what lies between two is.
    if not leaps or sum(map(len, sections)) < 0.9 * len(values):
        return []
    drifts = [trends.drift(section) for section in sections]
    rises = sum(drifts) / math.sqrt(len(drifts)) > trends.DRIFT_Z
    return leaps if rises and min(drifts) > -trends.DRIFT_Z else []


def _shown(harder: Series | None) -> list[Evidence]:
    return [] if harder is None else [shown(harder.name, f"{harder.finite[0]:.4g} to {harder.finite[-1]:.4g}")]


def harder_prompts(log: RunLog, reward: Series) -> Series | None:
    """What the log says of the prompts that changes where the reward falls; None where nothing does."""
    for series in (*log.all("difficulty"), *log.all("prompt_length")):
        asked = {point.step: point.value for point in series.points if math.isfinite(point.value)}
        both = [(asked[p.step], p.value) for p in reward.points if p.step in asked and math.isfinite(p.value)]
        levels, values = [level for level, _ in both], [value for _, value in both]
        if len(both) < 12 or len(both) < 0.8 * len(reward.finite) or len(set(levels)) < 2:
            continue
        # A mean length wavers from step to step; a difficulty that rises all the time is one.
        goes_along = series.signal == "difficulty" and len(set(levels)) > 8
        if goes_along and abs(trends.together(levels, values)) > WITH_IT:
            return series
        if _falls_at_steps(levels, values, series.signal == "prompt_length"):
            return series
    return None


def _falls_at_steps(levels: list[float], values: list[float], is_length: bool) -> bool:
    """Whether the reward falls at a change of level (of a length: one by a fifth, from median to median), and drifts
    down by more than chance neither before it nor after.
    """
    places = [at for at in range(3, len(levels) - 2) if is_length or levels[at] != levels[at - 1]]
    for at in places:
        a, b = median(levels[:at]), median(levels[at:])
        if is_length and not max(a, b) > WIDER * min(a, b) > 0:
            continue
        if is_length and not (max(levels[:at]) < min(levels[at:]) or min(levels[:at]) > max(levels[at:])):
            continue
        fall = median(values[max(at - 6, 0) : at]) - median(values[at : at + 6])
        parts = (values[:at], values[at:])
        if fall > 0.3 * (max(values) - min(values)) and all(trends.drift(part) >= -trends.DRIFT_Z for part in parts):
            return True
    return False


def _always_up(values: list[float]) -> bool:
    """Whether few values rise in every step, and by half in all."""
    return (
        3 <= len(values) < 12
        and all(a < b for a, b in pairwise(values))
        and values[-1] - values[0] >= 0.5 * abs(values[0])
    )


#: Of its most: what a reward that is learnt begins with at most, and comes to at least.
_UNLEARNT, _LEARNT = 0.8, 0.95


def _is_learnt(values: list[float]) -> bool:
    """Whether a reward climbs to next to its most within the run, and stays: ties hide it from a rank test."""
    most, begun = max(values), trends.level(values[:3])
    climbs = min(values[0], begun) >= 0 and max(values[0], begun) <= _UNLEARNT * most
    return climbs and trends.level(values) >= _LEARNT * most and trends.drift(values) > 0


#: The share of its most that a format's reward has come to, what it had first, and what is left of right answers.
ALL, SOME, REST = 0.9, 0.85, 0.5
#: Normal quantile of p = 0.05, one-sided: both together are what chance does not make.
BOTH_Z = 1.645


def _is_all_there_is(values: list[float]) -> bool:
    """Whether a format's reward has come to its most, from less in its first steps."""
    third = len(values) // 3
    begun, now = sum(values[:3]) / 3, sum(values[-third:]) / third
    return now >= ALL * max(values) and begun <= SOME * now and trends.drift(values) > BOTH_Z


def _is_lost(values: list[float]) -> bool:
    """Whether a share of right answers has come to half and less, from third to third, and by its trend."""
    third = len(values) // 3
    begun, now = sum(values[:third]) / third, sum(values[-third:]) / third
    return now <= REST * begun and trends.drift(values) < -BOTH_Z


#: Steps before a format is learnt, and since, that tell what answers were worth.
BEFORE_IT, SINCE_IT = 4, 12


def _is_given_up(form: Series, right: Series) -> bool:
    """Whether right answers come to half and less as a format's reward comes to its most, and stay there: each of its
    last thirds lies there too, and hardly a step comes back to what there was before.
    """
    told = {point.step: point.value for point in right.points if math.isfinite(point.value)}
    both = [(p.value, told[p.step]) for p in form.points if math.isfinite(p.value) and p.step in told]
    paid = [value for value, _ in both]
    if len(both) < BEFORE_IT + SINCE_IT or trends.level(paid) < ALL * max(paid) or max(paid) <= 0:
        return False
    at = next(at for at, value in enumerate(paid) if value >= ALL * max(paid))
    before, since = ([value for _, value in part] for part in (both[:at], both[at:]))
    if len(before) < BEFORE_IT or len(since) < SINCE_IT or paid[0] > REST * max(paid) or min(before) < 0:
        return False
    # The last of the steps before are those in which it is lost already.
    was = sum(before[:BEFORE_IT]) / BEFORE_IT
    end = since[-(len(since) // 3) :]
    comes_back = sum(value >= was for value in since)
    return max(sum(since) / len(since), sum(end) / len(end)) <= REST * was and comes_back <= len(since) // 10


_FORM = regex(r"format|(?:^|[/_.])fmt", re.IGNORECASE)
_RIGHT = regex(r"accura|correct|exact|solved|success|(?:^|[/_.])acc(?:$|[@/_.])", re.IGNORECASE)


@rule("L12", "the format is learnt and the answers are not", link="trend", scope="signals",
      needs=("reward_function",), explains=("D01", "D03", "D20", "D25", "D74", "L01", "L08", "L09", "L10"),
      source="open-r1, rllm: a format's reward that outweighs the answer's")  # fmt: skip
def form_over_answers(log: RunLog) -> Finding | None:
    """A reward for the format, or the whole reward, rises while one for right answers falls, both by more than chance
    explains (12 steps and more): an error. So does one for the format that comes to 19 twentieths of its most from
    four fifths and less: it is learnt in the first steps, and at rest since. Or one that rises to nine tenths of its
    most while right answers come to half and less, third by third and each trend by p = .05; or are at half and less of
    their first 4 steps ever since the format is learnt, early in the run. Or right answers that rose
    and are lost again from their best on, down to where they began and by half, while what is paid goes on to rise, a
    tenth of the run and more. Of 3 and more, where one
    rises and the other falls in every step, and each by half: worth knowing. Where the reward is one weighted sum of
    its functions (solved for over all steps) and a right answer weighs more in it than the form, the form is not what
    answers were lost for: worth knowing (a reward that falls with it is L08's).
    """

    def known(pattern: re.Pattern[str], fewest: int = 12) -> list[Series]:
        every = log.all("reward_function")
        return [one for one in every if pattern.search(one.name) and len(one.finite) >= fewest]

    whole = log.get("reward")
    for form, right in product(known(_FORM, 3), known(_RIGHT, 3)):
        if _always_up(form.finite) and _always_up([-value for value in right.finite]) and right.finite[-1] >= 0:
            return info(
                f"{form.name} rises in every step while {right.name} falls in every one: the format is learnt first, "
                "and answers may be lost for it",
                right.ended,
                form.shown(form.last.value, f"was {form.finite[0]:.3g}"),
                right.shown(right.last.value, f"was {right.finite[0]:.3g}"),
                cause="the format's reward is easier to get and outweighs the answer's; few steps, so that it may be "
                "chance, or a model that learns the format first",
                next_step="look whether accuracy comes back; else give the format less weight, lower the learning rate",
            )
    paid = [*known(_FORM), *([whole] if whole is not None and len(whole.finite) >= 12 else [])]
    pairs = [(form, right) for form in paid for right in known(_RIGHT) if form.values != right.values]
    skip_if(not pairs, "needs an accuracy reward, and a format reward or the whole one, of 12 steps")
    paid_for = function_weights(log) or {}
    for form, right in pairs:
        up, down = trends.drift(form.finite), trends.drift(right.finite)
        is_up = up > trends.DRIFT_Z or (form is not whole and _is_learnt(form.finite))
        is_lost = form is not whole and (
            (_is_all_there_is(form.finite) and _is_lost(right.finite)) or _is_given_up(form, right)
        )
        is_lost = is_lost or _is_traded(form, right)
        if (is_up and down < -trends.DRIFT_Z) or is_lost:
            if form is not whole and 0 <= paid_for.get(form.name, -1.0) + ROUNDING < paid_for.get(right.name, 0.0):
                return _paid_and_lost(form, right, paid_for)
            hacked = paid_instead(log, right) if form is whole else None
            return error(
                f"{form.name} rises while {right.name} falls: "
                + (
                    f"{hacked.name} is what is paid for, which grows from {trends.level(hacked.finite[:3]):.3g} to "
                    f"{trends.level(hacked.finite, 3):.3g}, and answers are lost: reward hacking"
                    if hacked is not None
                    else "something else than answers is paid for, such as format or length, and they are lost"
                    if form is whole
                    else "the format is learnt, the answers are lost"
                ),
                right.ended,
                *(
                    []
                    if hacked is None
                    else [hacked.shown(trends.level(hacked.finite, 3), f"was {trends.level(hacked.finite[:3]):.3g}")]
                ),
                form.shown(trends.level(form.finite, 3), f"was {trends.level(form.finite[:3]):.3g}"),
                right.shown(trends.level(right.finite, 3), f"was {trends.level(right.finite[:3]):.3g}"),
                cause="the judge pays for the form alone, or pays more for it than for a right answer"
                if hacked is None
                else f"{hacked.name} can be had without a right answer and outweighs it: the policy learns that alone",
                next_step="score ten responses by hand; give the format less weight, or nothing without an answer",
            )
    return None


#: Parts of a run that one is compared with, steps of such a part at the least; what of its way up is lost again.
PARTS, A_PART, LOST = 10, 4, 0.5


def _is_traded(form: Series, right: Series) -> bool:
    """Whether answers that were learnt are lost from their best on, half of what they had gained and more, while what
    is paid goes on to rise: a tenth of the run by a tenth, neither by chance.
    """
    values, size = right.finite, max(len(right.finite) // PARTS, A_PART)
    steps = {point.step: at for at, point in enumerate(form.points) if math.isfinite(point.value)}
    if len(values) < 4 * size or len(steps) < len(form.points):
        return False
    parts = [trends.level(values[at : at + size]) for at in range(0, len(values) - size + 1, size)]
    best = max(range(len(parts)), key=parts.__getitem__)
    if not 0 < best * size <= len(values) - 3 * A_PART:
        return False
    now = trends.level(values[-size:])
    least = parts[0]
    if (
        parts[best] - now < max(LOST * (parts[best] - least), LOST * parts[best])
        or now > min(values[:size][0], least) + 1e-9
    ):
        return False
    tail = [point for point in right.points if math.isfinite(point.value)][best * size :]
    beside = [form.finite[steps[point.step]] for point in tail if point.step in steps]
    return (
        len(beside) >= 3 * A_PART
        and trends.drift([point.value for point in tail]) < -trends.DRIFT_Z
        and trends.drift(beside) > trends.DRIFT_Z
        and trends.level(beside, 3) > trends.level(form.finite[:3])
    )


#: What rounding leaves of a weight that is none.
ROUNDING = 1e-3


def _paid_and_lost(form: Series, right: Series, paid_for: Mapping[str, float]) -> Finding:
    """Answers that are lost although they are paid for more than the form that is learnt: it does not outweigh them."""
    others = [name for name, weight in paid_for.items() if name not in (form.name, right.name) and abs(weight) > UNPAID]
    return info(
        f"{right.name} falls from {trends.level(right.finite[:3]):.3g} to {trends.level(right.finite, 3):.3g} while "
        f"{form.name} rises, although a right answer is paid {paid_for[right.name]:.3g} and the form "
        f"{paid_for[form.name] + 0.0:.2g}",
        right.ended,
        right.shown(trends.level(right.finite, 3), f"was {trends.level(right.finite[:3]):.3g}"),
        form.shown(trends.level(form.finite, 3), f"was {trends.level(form.finite[:3]):.3g}"),
        shown("weights solved for", ", ".join(f"{name} {weight:.3g}" for name, weight in paid_for.items())),
        cause="the format does not outweigh the answers"
        + (f"; {listed(others)} may, which is paid for as well" if others else "")
        + ". Prompts that get harder (a curriculum), a judge that no "
        "longer takes right answers, or a policy that loses them by its updates: these figures do not tell which",
        next_step="solve the first step's prompts with the last weights: what falls there is the policy's",
    )
