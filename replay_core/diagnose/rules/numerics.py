"""Numbers as such: the first that is not finite, in order of computation, and those that lie on a grid."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from replay_core import pages
from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Finding, Where, error, finding, info, share, shown, warning
from replay_core.diagnose.flat import Array
from replay_core.diagnose.gap import FOLLOWED
from replay_core.diagnose.log_steps import FORWARDS, LOSSES, FirstBroken, first_broken, scale_falls, steps_told
from replay_core.diagnose.places import places_of
from replay_core.diagnose.rule import rule, skip_if
from replay_core.diagnose.signal_names import MACHINE, ORDER
from replay_core.diagnose.signals import RunLog, Series
from replay_core.errors import RldbgError
from replay_core.naming import Phase, canonical, meaning
from replay_core.records import Record, TensorRef
from replay_core.regexes import regex

#: What is no computed number: masks of attention hold -inf on purpose, positions and ids are whole numbers.
_EXPECTED = ("mask", "ids", "positions", "layout", "note")
#: Nats that exp makes a number of in fp32.
LARGEST_LOG = 80.0
_FLOATS = ("float16", "bfloat16", "float32", "float64")


class _Bad(Struct, frozen=True):
    """A tensor with numbers that are not finite, where it first has one, and how many."""

    order: tuple[int, int, int]
    name: str
    where: Where
    nan: int
    inf: int
    counts: bool
    """Whether any of them is on a token that counts, or is not about tokens at all."""
    holders: tuple[int, int] | None = None
    """Samples that hold them, of how many; None of what is not about tokens."""
    micro: tuple[int, int, int] | None = None
    """Epoch, mini-batch and micro-batch that first holds one; None where its record has no such number."""
    note: str = ""
    """What else is known of how it is made."""

    @property
    def is_of_an_update(self) -> bool:
        """Whether it is made micro-batch by micro-batch, with the weights that the updates before have left."""
        return Phase.MODULES <= meaning(canonical(self.name)).phase <= Phase.GRADIENTS

    def after(self, *, by_micro: bool) -> tuple[int, ...]:
        """Its place in the order of computation: forward, loss and backward of one micro-batch come before those of the
        next.
        """
        step, phase, number = self.order
        micro = (self.micro or (0, 0, 0)) if by_micro and self.is_of_an_update else (-1, -1, -1)
        if by_micro and phase > Phase.GRADIENTS:
            micro = (1 << 30, 0, 0)
        return (step, *micro, phase, number)

    @property
    def cause(self) -> str:
        phase = meaning(canonical(self.name)).phase
        if phase == Phase.ROLLOUT_LOGPROBS and not self.nan:
            return (
                "the engine gives a sampled token probability 0: its logits were filtered (top-k, top-p, a grammar, "
                "banned words) by others than the token was drawn from. Weights that are not finite make NaN"
            )
        if phase in _OF_A_FORWARD and self.nan and self.holders is not None and 2 * self.holders[0] < self.holders[1]:
            return (
                f"only in {share(*self.holders)} samples, so that it is not the weights, which make all of them NaN: a "
                "row with nothing to attend to (an empty or inverted attention mask), inputs of its own that are not "
                "finite (images, an adapter), or a buffer that was not filled"
            )
        return _CAUSES.get(phase, "an overflow, a division by zero, or a row with nothing to attend to")


@rule("D21", "numbers that are not finite", link="dump", scope="case",
      explains=("D20", "D01", "D03", "D57", "D04", "D06", "D09", "D14", "D18", "D24", "D28", "D23", "D25",
               "D26", "D21", "D46", "L02", "L06"), lasts=True,
      source="verl#1197 #2626; miles and TRL hide them (nan_to_num, ratio 1), prime-rl writes null")  # fmt: skip
def not_finite(case: Case) -> Finding | None:
    """Every floating tensor in order of computation (rollout, rewards, old, reference, advantages, and micro-batch by
    micro-batch modules, log-probabilities, ratio, losses, gradients; norm, parameters): the first NaN or infinity on
    a token that counts is an error and is where to look; later ones follow from it. One only outside the mask is worth
    saying (info). Sentinels a framework writes for "none" do not count. A warning where another record of
    the rewards has them, the rewards are the same numbers elsewhere, and one number stands in their place: what could
    not be scored is trained on as if it were.
    """
    bad: list[_Bad] = []
    steps: list[int] = []
    placed: set[tuple[str, str]] = set()
    for batch in case.batches():
        bad += _in_batch(batch, placed)
        steps += [] if batch.step is None else [batch.step]
    looked = bool(placed)
    for number, record in enumerate(case.records()):
        looked = looked or _has_numbers(record)
        bad += _in_record(record, number, placed)
        record.release()
    skip_if(not looked, "there is no floating number in it")
    by_micro = all(one.micro is not None for one in bad if one.counts and one.is_of_an_update)
    counting = sorted((one for one in bad if one.counts), key=lambda one: one.after(by_micro=by_micro))
    if counting:
        return _first(counting, steps)
    elif bad and (filled := _filled_in(case)) is not None:
        return filled
    elif bad:
        first = min(bad, key=lambda one: one.order)
        of_reward = first.name.startswith("reward")
        return info(
            f"{first.name} is not finite" + (" for some samples" if of_reward else ", on tokens that do not count"),
            first.where,
            shown("NaN", first.nan),
            shown("infinite", first.inf),
            cause="a reward function that is not meant for a sample says so (None); what sums them has to leave it out"
            if of_reward
            else "values outside the mask are never used; a product with the mask would still keep NaN x 0 = NaN",
        )
    return None


_REWARD_NAME = regex(r"(?i)reward|score")
#: Rewards that are equal in both records, before one of them is the other filled in.
EQUAL = 4


def _filled_in(case: Case) -> Finding | None:
    """Rewards that are not finite in one record, and one number in the one that is trained on."""
    holders = total = 0
    named, into = "", set[float]()
    place: Where | None = None
    steps: list[int] = []
    for batch in case.batches():
        reward_B = batch.reward_B
        if reward_B is None or not np.isfinite(reward_B).all():
            continue
        names = sorted(
            {name for sheet, _ in batch.columns.sheets for name in sheet.names() if _REWARD_NAME.search(name)}
        )
        for name in names if not named else [named]:
            raw_B = batch.columns.per_sample(name)
            if raw_B is None or name == batch.columns.reward_name:
                continue
            bad_B = ~np.isfinite(raw_B)
            if not bad_B.any() and not named:
                continue
            if (~bad_B).sum() < EQUAL or not np.allclose(raw_B[~bad_B], reward_B[~bad_B], atol=1e-6):
                return None
            named = name
            holders, total = holders + int(bad_B.sum()), total + len(bad_B)
            into.update(np.round(reward_B[bad_B], 6).tolist())
            if bad_B.any():
                place = place or batch.laid.where(name, sample=bad_B)
                steps += [] if batch.step is None else [batch.step]
            break
    if place is None or len(into) != 1:
        return None
    value = into.pop()
    found = warning(
        f"{named} is not a number for {share(holders, total)} samples, and they are trained on with a reward of "
        f"{value:g}: what could not be scored counts as {'wrong' if value == 0 else 'an answer of that worth'}",
        place,
        shown(f"samples whose {named} is not finite", holders, "0"),
        shown("reward in their place, in all of them", value),
        shown("rewards of the others that are the same in both", total - holders),
        cause="the reward function fails (an exception, a parse, a time-out, a division by 0) and its NaN is hidden by "
        "nan_to_num or a default: group means and advantages hold rewards that nobody gave",
        next_step="score one of these responses by hand; leave such samples out, or out of their group's mean",
        steps=steps,
    )
    return replace(found, link="rewards")


#: The link of the chain that a phase of the computation belongs to.
_LINKS = {
    Phase.ROLLOUT_TOKENS: "tokens", Phase.MASKS: "masks", Phase.REWARDS: "rewards", Phase.VALUES: "advantages",
    Phase.ROLLOUT_LOGPROBS: "rollout_logprobs", Phase.OLD_LOGPROBS: "logprobs", Phase.REF_LOGPROBS: "ref",
    Phase.ADVANTAGES: "advantages", Phase.MODULES: "logprobs", Phase.LOGPROBS: "logprobs", Phase.ENTROPY: "logprobs",
    Phase.RATIO: "ratio", Phase.LOSSES: "loss", Phase.GRADIENTS: "gradient", Phase.GRAD_NORM: "gradient",
    Phase.PARAMS: "optimizer",
}  # fmt: skip


def _first(counting: list[_Bad], steps: list[int]) -> Finding:
    first = counting[0]
    skipped = _skipped(counting, steps)
    phase = meaning(canonical(first.name)).phase
    what = "NaN" if first.nan and not first.inf else "infinite" if first.inf and not first.nan else "NaN and infinite"
    later = list(dict.fromkeys(one.name for one in counting[1:] if one.name != first.name))
    beside = ", although policy and old log-probabilities are" if first.note else ""
    stated = error(
        f"{first.name} is the first tensor that is not finite ({what}){beside}, at step {first.where.step}"
        + (f", and the weights stay finite: no update since is made, in {skipped} steps" if skipped else "")
        if first.where.step is not None
        else f"{first.name} is the first tensor that is not finite ({what}){beside}",
        first.where,
        shown("NaN", first.nan, "0", first.where.path),
        shown("infinite", first.inf, "0"),
        *([] if first.holders is None else [shown("samples that hold them", share(*first.holders), "none")]),
        *([shown("not finite after it", ", ".join(later[:6]))] if later else []),
        cause=(first.note or first.cause)
        + (
            ". Updates with such gradients are skipped (by a loss scaler, or a check of the norm): nothing is learnt"
            if skipped
            else ""
        ),
        steps=() if first.where.step is None else (first.where.step,),
    )
    return replace(stated, link=_LINKS.get(phase, stated.link))


#: Log-probabilities that one forward over a sample makes.
_OF_A_FORWARD = (Phase.OLD_LOGPROBS, Phase.REF_LOGPROBS, Phase.LOGPROBS)


def _skipped(counting: list[_Bad], steps: list[int]) -> int:
    """In how many steps, the last ones, gradients alone are not finite, and what their updates would have made is: an
    update by such a gradient leaves NaN in the weights, and in all that comes of them. 0 where it is fewer than two.
    """
    of_gradients = (Phase.GRADIENTS, Phase.GRAD_NORM, Phase.UNKNOWN, Phase.METRICS)
    if any(meaning(canonical(one.name)).phase not in of_gradients for one in counting):
        return 0
    bad = {one.where.step for one in counting if one.where.step is not None}
    later = [step for step in steps if bad and step >= min(bad)]
    return len(set(later)) if len(set(later)) >= 2 and set(later) == bad else 0


_CAUSES = {
    Phase.REWARDS: "the reward function returned it: a failed parse, a division by an empty length",
    Phase.ROLLOUT_LOGPROBS: "the engine gave a sampled token probability 0: filtered logits, or "
    "weights that are already NaN",
    Phase.OLD_LOGPROBS: "-inf: a token the trainer's own distribution excludes (filtered or masked "
    "logits); NaN: its weights",
    Phase.REF_LOGPROBS: "-inf: a token the reference excludes; NaN: its weights or an empty attention row",
    Phase.ADVANTAGES: "0 / 0 in the normalisation, or rewards that are already not finite",
    Phase.MODULES: "an overflow in this module, or a row of attention with nothing to attend to",
    Phase.GRADIENTS: "finite in the forward, not in the backward: a log or a sqrt at 0, an overflow in fp16",
    Phase.PARAMS: "an update with a gradient that was not finite",
}


def _in_batch(batch: StepBatch, placed: set[tuple[str, str]]) -> Iterator[_Bad]:
    """Tensors about tokens: whether a bad value counts depends on the mask."""
    step = -1 if batch.step is None else batch.step
    trained_N = batch.trained_N
    for sheet, _ in batch.columns.sheets:
        for name in sorted(sheet.names()):
            known = meaning(name)
            if known.alignment not in ("next", "full") or known.kind in _EXPECTED:
                continue
            for column in batch.columns.every(name):
                for part in sheet.parts:
                    placed.add((str(part.held.record.path), name))
                    placed.update((str(record.path), name) for record in part.held.siblings)
                bad_N = column.said_N & ~np.isfinite(column.values_N)
                if not bad_N.any() or ("null" in (column.ref.sentinel or "") and known.phase == Phase.UNKNOWN):
                    continue
                counted_N = bad_N if trained_N is None else bad_N & trained_N
                shown_N = counted_N if counted_N.any() else bad_N
                place = batch.laid.where(name, at=shown_N)
                nan = int(np.isnan(column.values_N[shown_N]).sum())
                holders = int((batch.flat.count(shown_N) > 0).sum())
                note = _of_ratio(batch, shown_N) if known.phase == Phase.RATIO else ""
                yield _Bad((step, known.phase, 0), name, place, nan, int(shown_N.sum()) - nan, bool(counted_N.any()),
                           (holders, len(batch)), _first_micro(batch, name, shown_N), note)  # fmt: skip


def _first_micro(batch: StepBatch, name: str, bad_N: Array) -> tuple[int, int, int] | None:
    keys, holds_B = batch.laid.keys_of(name), batch.flat.count(bad_N) > 0
    known = [key for key, holds in zip(keys, holds_B, strict=True) if holds]
    if not known or any(key is None or key.micro is None for key in known):
        return None
    return min((key.epoch or 0, key.minibatch or 0, key.micro or 0) for key in known if key is not None)


def _of_ratio(batch: StepBatch, bad_N: Array) -> str:
    """What it adds that new over old is finite where the recorded ratio is not."""
    policy, old = batch.columns.of("policy_logprobs"), batch.columns.of("old_logprobs")
    if policy is None or old is None:
        return ""
    logs = (policy.values_N - old.values_N)[bad_N & policy.said_N & old.said_N]
    logs = logs[np.isfinite(logs)]
    if not logs.size or float(np.abs(logs).max()) > LARGEST_LOG:
        return ""
    return (
        f"policy and old log-probabilities are finite there, and apart by {float(np.abs(logs).max()):.3g} nats at the "
        "most: the ratio is not made as exp(policy - old); the difference is scaled before it is exponentiated, or "
        "other numbers stand in it"
    )


def _in_record(record: Record, number: int, placed: set[tuple[str, str]]) -> list[_Bad]:
    """Everything else a record holds: rewards, losses, modules, gradients, parameters."""
    found: list[_Bad] = []
    if record.key.stage == "training_metrics" or record.is_told:
        return found  # what was logged of the step follows from its tensors, and has a rule of its own
    try:
        fields = record.tensors()
    except RldbgError:
        return found
    for place, ref in enumerate(fields):
        name = ref.canonical or ref.name
        known = meaning(name)
        if ref.is_text or not ref.is_readable or ref.dtype not in _FLOATS or known.kind in _EXPECTED:
            continue
        if ref.line is not None or (str(record.path), name) in placed or "null" in (ref.sentinel or ""):
            continue
        if known.alignment in ("next", "full") and known.phase != Phase.MODULES:
            continue  # about tokens, and of samples that no batch could place: which count is not known
        nan, inf, at = _count(ref)
        if nan or inf:
            key = record.key
            where = Where(
                step=key.step, micro=key.micro, rank=key.rank, role=key.role, stage=key.stage, tensor=ref.name,
                sample=at if ref.shape and ref.shape[0] > 1 else None, path=str(record.path),
            )  # fmt: skip
            order = (-1 if key.step is None else key.step, known.phase, number * 100000 + place)
            micro = None if key.micro is None else (key.epoch or 0, key.minibatch or 0, key.micro)
            found.append(_Bad(order, name, where, nan, inf, known.phase != Phase.UNKNOWN, micro=micro))
    return found


def _has_numbers(record: Record) -> bool:
    try:
        return any(ref.dtype in _FLOATS and ref.is_readable for ref in record.tensors())
    except RldbgError:
        return False


def _count(ref: TensorRef) -> tuple[int, int, int]:
    """NaN, infinities, and the first row of one; read piece by piece."""
    nan = inf = 0
    first = -1
    for start, values in pages.flat_chunks(ref):
        real = values.astype(np.float32) if ref.dtype == "bfloat16" else values
        finite = np.isfinite(real)
        if finite.all():
            continue
        missing = int(np.isnan(real).sum())
        nan, inf = nan + missing, inf + int((~finite).sum()) - missing
        if first < 0:
            first = start + int(np.flatnonzero(~finite)[0])
    row = max(1, ref.numel // max(1, ref.shape[0] if ref.shape else 1))
    return nan, inf, first // row


_LOG_CAUSES = {
    "reward": "the reward function returned no number (a failed judge, 0/0 in a normalisation)",
    "reward_function": "a reward function returned no number (None counts as NaN)",
    "entropy": "logits that are not finite: the weights, an attention row that is masked whole, or a temperature of 0",
    "kl": "log-probabilities that are not finite in policy or reference",
    "prob_pearson": "one side's probabilities are all one number, whose correlation with the other's is 0/0: old or "
    "rollout log-probabilities that are all 0 or were never filled; or a policy that is sure of every token",
    "policy_kl": "log-probabilities that are not finite, or an overflow of the ratio",
    "pair_logits": "logits that are not finite: the weights, or an attention row that is masked whole",
    "pair_logps": "the log-probability of a response: one without a token (cut off by the length limit, or none of "
    "this kind in the batch: 0/0), or logits that are not finite",
    "pair_reward": "no response of this kind in the batch (0/0), or a log-probability that is not finite",
}


def _writes_nothing(log: RunLog, steps: list[int]) -> bool:
    """Whether in these steps all responses are cut, or no group has a spread of rewards."""
    return any(step.is_cut or step.is_dead for step in steps_told(log) if step.step in steps)


@rule("D21", "a metric is not a number", link="loss", scope="signals", needs=("|".join(ORDER),),
      explains=("D01", "D02", "D03", "D20", "D22", "D23", "D25", "L01", "L08", "L09", "L17", "L18"),
      source="verl#1197, #2626, #721; UniRL#110")  # fmt: skip
def first_metric(log: RunLog) -> Finding | None:
    """The first NaN or Inf by step, within the step by order of computation: what is broken first is the cause.

    NaN in the spread of rewards is a group of one (D06); a finite loss whose gradient is NaN at every step is D22. A
    gradient that is not finite once, with everything finite after it, is a skipped step: a warning. Where a loss scale
    is logged that comes to a quarter and less, it is the overflow of fp16 (worth knowing alone where it is rare, or the
    run's later half has none), but for NaN that go on whatever the scale; and where lines of a loss scale that skips
    steps (DeepSpeed's OVERFLOW) stand in half of them. KL and clip
    fractions alone, with a finite loss or gradient in those steps, are figures that are not computed: a warning.
    """
    broken = first_broken(log)
    if broken is None or broken.is_spread:
        return None
    if broken.is_gradient_alone:
        return _overflows(log, broken)
    series, point, steps = broken.series, broken.point, broken.steps
    signal = series.signal
    if broken.is_figure_alone:
        return _figure_alone(broken)
    # Rewards less a KL that is NaN are NaN; what weights that are NaN write is cut, or worth one and the same.
    updated = _by_an_update(broken)
    forward = broken.forward if signal in _OF_REWARDS and _writes_nothing(log, steps) else None
    if forward is not None:
        series, signal = forward, forward.signal
    if signal != "grad_norm":
        return error(
            ("engine and trainer do not rise and fall together: " if signal == "prob_pearson" else "")
            + f"{series.name} is the first metric that is not finite"
            + (f", at step {point.step}" if point.step is not None else "")
            + (", and with it all that is computed of the policy: its weights are not finite" if forward else "")
            + (", for both responses of a pair, and finite before: the weights are not since an update" * updated),
            point.where(series.name),
            *broken.evidence,
            # Weights that are not finite write nothing that is rewarded: what that looks like comes after them.
            link="dump"
            if signal in FORWARDS and _writes_nothing(log, steps)
            else "loss"
            if signal in LOSSES
            else "rewards"
            if signal in ("reward", "reward_function")
            else "logprobs",
            cause=_BY_AN_UPDATE
            if forward is not None or updated
            else _LOG_CAUSES.get(signal, "an overflow, a 0/0, or a mask without a token in the steps before the loss"),
            next_step=("go back to a checkpoint before the first NaN; " if forward is not None else "")
            + "record the steps before it: rldbg record -- YOUR COMMAND, then rldbg diagnose rldbg-dump names "
            "the first tensor; rldbg replay rldbg-dump --backward repeats the micro-batch",
            steps=steps,
        )
    if not any(map(log.has, LOSSES)):
        return error(
            "the gradient norm is not finite; the log holds no loss, which may be the first that is not",
            point.where(series.name), *broken.evidence,
            link="gradient",
            cause="a loss that is NaN (Megatron leaves it out of its line then), or an overflow or 0/0 in the backward "
            "of one that is finite", next_step="print the loss of that batch; rldbg record --gradients . -- YOUR "
            "COMMAND, then rldbg diagnose rldbg-dump names the first tensor", steps=steps,
        )  # fmt: skip
    after = [p.value for p in series.points if p.step is not None and steps and p.step > steps[0]]
    recovered = bool(after) and all(map(math.isfinite, after))
    scale = _sinks(log)
    later = {each.step for each in series.points[len(series.points) // 2 :]}
    settled = not later & set(steps) and all(math.isfinite(each.value) for each in series.points if each.step in later)
    rare = len(steps) <= RARE * len(series.points)
    when = "at the beginning" if settled else "now and then"
    if scale is not None and (rare or settled) and scale.finite[-1] >= LEAST_SCALE:
        return info(
            f"fp16 gradients overflow {when}: {len(steps)} of {len(series.points)} steps are skipped, and "
            f"{scale.name} comes down to {scale.finite[-1]:.4g}" + ", and stays" * settled,
            point.where(series.name),
            *broken.evidence,
            cause="the loss scale looks for what the gradients of this model bear, which is its work: it is halved at "
            "each overflow and doubled only after some thousand steps; watch that it settles",
            steps=steps,
        )
    # What overflows is infinite, and less so as the scale falls.
    if scale is not None and not settled and all(math.isnan(p.value) or math.isfinite(p.value) for p in series.points):
        return error(
            f"grad_norm is not finite whatever the loss scale: it is NaN in {len(steps)} of {len(series.points)} "
            f"steps, which are skipped, and {scale.name} falls from {scale.finite[0]:.4g} to {scale.finite[-1]:.4g}",
            point.where(series.name),
            *broken.evidence,
            scale.shown(scale.finite[-1], f"about {scale.finite[0]:.4g}"),
            link="gradient",
            cause="NaN is no overflow of scaled gradients, which a smaller scale would end: a 0/0 or 0 * inf in the "
            "backward (a mask without a token, a softmax row that is masked whole, sqrt or log at 0), or a loss or "
            "activations that are not finite before it",
            next_step="print the loss of that batch; rldbg record --gradients . -- YOUR COMMAND names the first tensor",
            steps=steps,
        )
    if scale is not None:
        return error(
            f"fp16 gradients overflow: grad_norm is not finite in {len(steps)} of {len(series.points)} steps, "
            "which are "
            f"skipped, and {scale.name} falls from {scale.finite[0]:.4g} to {scale.finite[-1]:.4g}",
            point.where(series.name),
            *broken.evidence,
            scale.shown(scale.finite[-1], f"about {scale.finite[0]:.4g}"),
            link="gradient",
            cause="the loss scale is halved at each overflow and never settles: gradients (or activations) are "
            "beyond what "
            "fp16 holds whatever the scale, as those of a model that was made for bf16, of logits that are not "
            "bounded, or "
            "of a loss that is summed; below a scale of 1 small gradients are lost as well",
            next_step="train in bf16; else clip, lower the learning rate, compute logits and loss in float32; "
            "rldbg record "
            "--gradients . -- YOUR COMMAND names the first tensor",
            steps=steps,
        )
    if not recovered and (overflow := _overflows(log, broken)) is not None:
        return overflow
    return finding(
        "warning" if recovered else "error",
        "grad_norm is not finite once, and the run goes on"
        if recovered
        else "the gradient is the first thing that is not finite: the forward pass is",
        point.where(series.name),
        *broken.evidence,
        link="gradient",
        cause="an overflow in the backward pass; the step was skipped (loss scaler, or a guard of the trainer)"
        if recovered
        else "forward finite, backward not: an overflow or 0/0 whose value is masked but whose gradient is not "
        "(0 * inf in a mask, sqrt or log at 0, a softmax row that is masked whole)",
        next_step="rldbg record --gradients . -- YOUR COMMAND, then rldbg diagnose rldbg-dump names the first "
        "parameter; rldbg replay rldbg-dump --backward repeats it",
        steps=steps,
    )


#: The share of steps that a loss scale which finds its height may lose; below that scale (of 2^16) small gradients are
#: lost: fp16 ends at 6e-8, and a gradient of 1e-9 is an ordinary one.
RARE, LEAST_SCALE = 0.15, 128.0


_AT_MINIMUM = regex(r"[^\n]*loss scale already at minimum[^\n]{0,80}", re.IGNORECASE)


def _overflows(log: RunLog, broken: FirstBroken) -> Finding | None:
    """Where lines tell that a loss scale (DeepSpeed's) skips steps, and as often as the gradient is not finite: it is
    that overflow, and the line of the scale that is at its minimum is its end.
    """
    texts, series, steps = scale_falls(log, broken.steps), broken.series, broken.steps
    if not texts:
        return None
    first, last = texts[0][1][1], texts[-1][1][2] or texts[-1][1][1]
    ends = next((one for one in log.told if _AT_MINIMUM.search(one.text)), None)
    return error(
        f"fp16 gradients overflow: {series.name} is not finite in {len(steps)} of {len(series.points)} steps, which "
        f"are skipped, and the loss scale falls from {float(first):.4g} to {float(last):.4g}"
        + (", its minimum, where the run ends" if ends is not None else ""),
        broken.point.where(series.name),
        shown("lines that tell of an overflow", len(texts), "0", f"line {texts[0][0].point.line}"),
        shown("loss scale", float(last), f"about {float(first):.4g}", f"line {texts[-1][0].point.line}"),
        *([] if ends is None else [shown("the run ends", _AT_MINIMUM.findall(ends.text)[-1], None, "log")]),
        *broken.evidence,
        link="gradient",
        cause="the loss scale is halved at each overflow and never settles: gradients (or activations) are beyond what "
        "fp16 holds whatever the scale, as those of a model that was made for bf16, or they are NaN whatever it is (a "
        "0/0 in the loss); no update was made in those steps",
        next_step="train in bf16; else compute logits and loss in float32; rldbg record --gradients . -- YOUR COMMAND "
        "names the first tensor",
        steps=steps,
    )


def _sinks(log: RunLog) -> Series | None:
    """The loss scale, where it has come to a quarter and less of what it was, and does not come back."""
    series = log.get("loss_scale")
    values = [] if series is None else series.finite
    sinks = len(values) >= 4 and values[0] > 0 and max(values[-3:]) <= 0.25 * values[0]
    return series if sinks else None


_OF_REWARDS = ("reward", "reward_max", "reward_min")
_BY_AN_UPDATE = (
    "the weights are not finite since an update before: a gradient that was not (an overflow in fp16 without a loss "
    "scale, a learning rate that is too high, a 0/0 in the loss), and was applied all the same; train in bf16, and "
    "skip steps whose gradient is not finite"
)


def _by_an_update(broken: FirstBroken) -> bool:
    """Whether the log-probabilities of both responses of the pairs are broken, and were finite before: an empty
    response or an odd sample makes one of them so.
    """
    return broken.is_broken("pair_logps", "chosen") and broken.is_broken("pair_logps", "rejected")


def _figure_alone(broken: FirstBroken) -> Finding:
    """Of KL and clip fractions that are not finite beside a loss that is."""
    series, point = broken.series, broken.point
    clipped = any(one.signal == "clip_fraction" for one, _ in broken.every)
    always = not series.finite
    return warning(
        f"{series.name} is the first metric that is not finite"
        + (f", at step {point.step}" if point.step is not None else "")
        + (", and in every step" if always and len(series.points) > 1 else "")
        + ", while loss and gradient are: the figure is broken, not the training",
        point.where(series.name),
        *broken.evidence,
        link="loss",
        cause="a mean over no token (0/0): a micro-batch or rank without a completion token that counts, whose figures "
        "are averaged with the others'"
        if clipped
        else "the KL is not computed, and NaN stands in its place (beta is 0, so that no reference model is loaded), "
        "or it is a mean over no token (0/0); with beta over 0 a KL that is NaN would make the loss NaN, too",
        next_step="look for samples whose completion is masked whole (truncated ones, tool turns, an empty answer)"
        if clipped
        else "look at beta (kl_coef, kl_loss_coef): 0 is the default of some trainers; set it where a KL is wanted",
        steps=broken.steps,
    )


@rule("L03", "the log holds no number", link="dump", scope="signals", explains=("D21", "D22"), source="rldbg")
def no_numbers(log: RunLog) -> Finding | None:
    """Every training metric of the run is NaN or Inf: nothing further can be judged, and no cause is invented."""
    training = [s for s in log.signals() if s.signal not in MACHINE and s.signal != "learning_rate" and s.points]
    skip_if(not training, "the run has no training metric that is known")
    if not any(series.finite for series in training):
        first = training[0].points[0]
        return error(
            "no training metric is a finite number, from the first logged step on",
            first.where(training[0].name),
            shown("metrics", len(training), None, "log"),
            training[0].shown_at(first),
            cause="the weights or the data were not finite before the first step that is logged",
            next_step="record the run from its first step: rldbg record -- YOUR COMMAND",
        )
    return None


#: Tokens before a grid is no chance.
ON_GRID = 32


@rule("D69", "log-probabilities are rounded to 16 bits", link="logprobs", scope="batch",
      needs=("policy_logprobs|old_logprobs",), explains=("D09", "D14", "D28", "D35"), lasts=True,
      source="log-softmax in bf16 leaves 3 digits: frameworks cast logits to float32 before it")  # fmt: skip
def on_a_grid(batch: StepBatch) -> Finding | None:
    """Log-probabilities of the trainer, stored in float32, of which every one that counts (32 and more) is a number of
    bfloat16 or float16: a warning. They were computed in it, whatever they were stored in.
    """
    for name in ("policy_logprobs", "old_logprobs"):
        column = batch.columns.of(name)
        if column is None or column.dtype != "float32":
            continue
        counted_N = column.said_N & np.isfinite(column.values_N) & (column.values_N != 0)
        counted_N = counted_N if batch.trained_N is None else counted_N & batch.trained_N
        values = column.values_N[counted_N].astype(np.float32)
        # Below -16 float16 has a spacing that few digits of text have, too.
        if len(values) < ON_GRID or np.unique(values).size < ON_GRID // 2:
            continue
        coarse = not (values.view(np.uint32) & 0xFFFF).any()
        half = bool((values.astype(np.float16).astype(np.float32) == values).all())
        # What is printed with few decimals is no such grid.
        if coarse or half:
            kind = "bfloat16" if coarse else "float16"
            return warning(
                f"log-probabilities are rounded to {kind}, and stored in float32",
                batch.laid.where(name, at=counted_N),
                shown(f"tokens whose value is a number of {kind}", len(values), "few", column.source),
                cause=f"logits or log-softmax are taken in {kind}: ratios, KL and the gap to the engine carry its "
                "precision; cast logits to float32 before log-softmax",
            )
    return None


#: Steps of logits that no precision of 16 bits has at the sizes of logits, the coarsest first; pairs that tell, and
#: how near a whole number of steps each lies.
COARSE = (2.0, 1.0, 0.5, 0.25)
PAIRS, OFF_GRID = 24, 4e-3


@rule("D87", "logits are rounded", link="logprobs", scope="batch", lasts=True,
      needs=("policy_logprobs|old_logprobs|rollout_logprobs", "tokens", "response"),
      explains=("D09", "D10", "D14", "D23", "D24", "D28", "L08"),
      source="between two tokens after one prefix log-probabilities differ as their logits do")  # fmt: skip
def logits_on_a_grid(batch: StepBatch) -> Finding | None:
    """Log-probabilities of different tokens after one and the same prefix differ as their logits do: an error where all
    such differences (24 and more, 3 different ones) are whole multiples of .25 and more, to .004. bf16 has steps of .06
    for logits of 8 to 16.
    """
    pairs = _after_one_prefix(batch)
    skip_if(len(pairs) < PAIRS, f"needs {PAIRS} pairs of different tokens after one prefix")
    at_a, at_b = pairs.T
    for name, whose in (("policy_logprobs", "trainer"), ("old_logprobs", "trainer"), ("rollout_logprobs", "engine")):
        column = batch.columns.of(name)
        if column is None:
            continue
        both = column.said_N[at_a] & column.said_N[at_b]
        apart = (column.values_N[at_a] - column.values_N[at_b])[both]
        apart = apart[np.isfinite(apart)]
        if len(apart) < PAIRS:
            continue
        for step in COARSE:
            whole = apart / step
            off = float(np.abs(whole - np.rint(whole)).max())
            if off <= OFF_GRID and np.unique(np.rint(np.abs(whole))).size >= 3:
                return error(
                    f"the {whose}'s logits are rounded to steps of {step:g}: after one prefix the log-probabilities of "
                    "any two tokens differ by whole multiples of it",
                    batch.laid.where(name, at=int(at_a[0])),
                    shown("pairs of tokens after one prefix", len(apart), None, column.source),
                    shown("largest distance from a whole multiple", off, "about 0.25"),
                    cause="logits are quantised (fp8, int8, a rounding) before log-softmax: precision is lost, engine "
                    "and trainer disagree, and no gradient passes through a rounding",
                )
    return None


def _after_one_prefix(batch: StepBatch) -> Array:
    """Pairs of flat places [P, 2] whose tokens differ and stand after one and the same prefix, each place once."""
    found: dict[int, dict[int, int]] = {}
    for before, here, at in places_of(batch, FOLLOWED):
        found.setdefault(before, {}).setdefault(here, at)
    pairs = [(places[0], other) for each in found.values() if len(places := list(each.values())) > 1
             for other in places[1:]]  # fmt: skip
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)
