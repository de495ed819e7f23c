"""Judges one pair from its figures: SAME, CLOSE, DIFF, NAN or PADDING, and one sentence why.

Pure: figures in, verdict out, nothing is read. The sentence speaks like torch.testing.assert_close.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from replay_core import naming
from replay_core.compare.judging import elementwise, limits, sample, structure
from replay_core.compare.judging.limits import LogprobTolerance, Tolerance
from replay_core.compare.judging.tolerance import DEFAULT, Limits, Tolerances
from replay_core.documents.parts import VerdictWord
from replay_core.dtypes import coarsest
from replay_core.measure.pair import PairFigures
from replay_core.naming import Meaning

EXACT_KINDS = frozenset({"ids", "mask", "layout", "text"})

#: Kinds whose single numbers (a loss, a gradient norm) the trainer reduced itself.
SCALAR_KINDS = frozenset({"loss", "metric", "value", "gradient"})


class Verdict(str, Enum):
    """What a pair is called, everywhere."""

    _value_: VerdictWord

    SAME = "SAME"
    CLOSE = "CLOSE"
    DIFF = "DIFF"
    NAN = "NAN"
    SHAPE = "SHAPE"
    MISSING = "MISSING"
    PADDING = "PADDING"

    @property
    def diverges(self) -> bool:
        return self in (Verdict.DIFF, Verdict.NAN, Verdict.SHAPE)


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict, whether it is CLOSE only just, and why in one sentence."""

    verdict: Verdict
    reason: str
    suspect: bool = False
    #: How far one row could have been off: rows past it are where to look.
    row_limit: float | None = None


@dataclass(frozen=True, slots=True)
class Rounded:
    """Two resolutions rounded to the narrower dtype: how many elements still differ."""

    dtype: str
    unequal: int


@dataclass(frozen=True, slots=True)
class Context:
    """What the judge knows beside the figures."""

    meaning: Meaning
    dtype: str
    exact: bool
    #: The module's recorded inputs are bitwise equal: the local column.
    local: bool = False
    #: How far the activations and log probabilities before it are off (`limits.widened`).
    noise: float = 0.0
    #: The standard error of a mean over the log probabilities before it, in nats.
    mean_error: float = 0.0
    #: Both sides are known to be computed in fp32 (their runs say so).
    known_fp32: bool = False
    scalar: bool = False
    bitwise_only: bool = False
    #: Of logprobs: (sample, mean exp|d| over its tokens) of the sample furthest off.
    worst_sample: tuple[int, float] | None = None
    #: The canonical name, for rules that go by it.
    name: str = ""
    #: Two resolutions: what is more than a cast.
    rounded: Rounded | None = None
    #: A judgement that no tolerance changes (positions).
    settled: Judgement | None = None

    @property
    def is_projection(self) -> bool:
        """Whether it is what one matrix product returned."""
        return not naming.is_input(self.name) and naming.module_of(self.name).endswith(limits.PROJECTIONS)

    @property
    def column(self) -> str:
        """The column of the table."""
        if self.meaning.kind in ("gradient", "param"):
            return self.meaning.kind
        return "local" if self.local else "end-to-end"


def judge(
    counted: PairFigures, whole: PairFigures | None, context: Context, tolerances: Tolerances = DEFAULT
) -> Judgement:
    """Verdict of a pair. `counted`: over the tokens that count; `whole`: over every element, where masked apart."""
    if context.settled is not None:
        return context.settled
    limit = tolerances.of(
        context.name, coarsest(context.dtype), context.column, known_fp32=context.known_fp32
    )  # fmt: skip
    if limit.reason is None:
        limit = replace(limit, table=_table(limit.table, context))
    found = _judged(counted, whole, context, limit)
    # What a module leaves in padding is nobody's; of what is trained on, people average over it.
    if found.verdict is Verdict.CLOSE and whole is not None and context.meaning.kind != "activation":
        found = _beyond_padding(found, counted, whole, context, limit)
    if limit.reason and found.verdict in (Verdict.CLOSE, Verdict.DIFF):
        found = Judgement(found.verdict, f"{found.reason}; {limit.reason}", found.suspect, found.row_limit)
    return found


def _table(table: Tolerance, context: Context) -> Tolerance:
    """The limits of half precision by what is known of the tensor beside its column."""
    row = coarsest(context.dtype)
    if row not in limits.PROJECTION:
        return table
    if context.local and context.is_projection:
        return replace(table, bug=min(table.bug, limits.PROJECTION[row]), suspect=min(table.suspect, table.noise))
    return limits.widened(table, context.column, context.noise)


def _is_worse_outside(counted: PairFigures, whole: PairFigures) -> bool:
    """Whether padding is off more than the tokens that count are, element by element."""
    if whole.nonfinite_mismatched or whole.max_abs > counted.max_abs:
        return True
    d2, number = whole.sum_d2 - counted.sum_d2, whole.finite - counted.finite
    return number > 0 and counted.finite > 0 and d2 / number > 4 * counted.sum_d2 / counted.finite


def _beyond_padding(
    found: Judgement, counted: PairFigures, whole: PairFigures, context: Context, limit: Limits
) -> Judgement:
    """CLOSE over the tokens that count; where padding makes a divergence of it, the difference lives in padding."""
    outside = _judged(whole, None, context, limit)
    if not outside.verdict.diverges:
        return found
    if not _is_worse_outside(counted, whole):
        return Judgement(found.verdict, f"{found.reason}; with padding {outside.reason}", True, found.row_limit)
    reason = f"differs only in padding: with it {outside.reason}; without it {found.reason}"
    return Judgement(Verdict.PADDING, reason, found.suspect, found.row_limit)


def _judged(counted: PairFigures, whole: PairFigures | None, context: Context, limit: Limits) -> Judgement:
    if counted.mismatched == 0:
        if whole is not None and whole.mismatched:
            return _padding(whole, context)
        return Judgement(Verdict.SAME, f"equal in all {counted.compared:,} elements compared")
    if counted.nonfinite_mismatched:
        return Judgement(
            Verdict.NAN,
            f"{counted.nonfinite_mismatched:,} of {counted.compared:,} elements are NaN or infinite on one side only "
            f"({counted.nonfinite_a:g} against {counted.nonfinite_b:g})",
        )
    if context.exact or context.bitwise_only or limit.exact:
        rule = "they must be equal" if context.exact else "bitwise equality was asked for"
        return Judgement(Verdict.DIFF, f"{_mismatched(counted)}; {rule}")
    if limit.elementwise is not None:
        within, reason = elementwise.judge(counted, *limit.elementwise)
        return Judgement(Verdict.CLOSE if within else Verdict.DIFF, reason)
    if context.scalar and context.meaning.kind in SCALAR_KINDS:
        found = _scalar(counted, context)
    elif context.meaning.kind == "logprob":
        found = _logprob(counted, limit.logprob, context)
    else:
        found = _scaled(counted, context, limit)
    return found if context.rounded is None else _mixed(found, context.rounded)


def _mixed(found: Judgement, rounded: Rounded) -> Judgement:
    """A cast is harmless: equal after rounding to the narrower dtype is CLOSE. More than a cast was computed in it."""
    if found.verdict is not Verdict.DIFF:
        return found
    if rounded.unequal == 0:
        return Judgement(Verdict.CLOSE, f"equal after rounding to {rounded.dtype}")
    reason = (
        f"{found.reason}; more than a cast: {rounded.unequal:,} elements differ after rounding to {rounded.dtype} too"
    )
    return Judgement(Verdict.DIFF, reason, row_limit=found.row_limit)


def _padding(whole: PairFigures, context: Context) -> Judgement:
    if context.bitwise_only:
        return Judgement(Verdict.DIFF, f"{_mismatched(whole)}, all in padding; bitwise equality was asked for")
    reason = f"differs only in padding: {_mismatched(whole)}, none of them in a token that counts"
    if whole.nonfinite_mismatched:
        reason += "; NaN there turns into NaN gradients where backward multiplies it by 0"
    return Judgement(Verdict.PADDING, reason)


def _mismatched(pair: PairFigures) -> str:
    share = 100 * pair.mismatched / pair.compared
    return f"mismatched elements: {pair.mismatched:,} / {pair.compared:,} ({share:.1f}%)"


def _scalar(pair: PairFigures, context: Context) -> Judgement:
    limit, floor = limits.SCALAR, limits.SCALAR_FLOOR
    because = ""
    if context.meaning.kind == "loss" and limits.SCALAR_ERRORS * context.mean_error > floor:
        floor = limits.SCALAR_ERRORS * context.mean_error
        because = ": what the noise of the log probabilities leaves of a mean"
    if pair.max_abs <= floor and (not because or pair.max_rel < limits.SCALAR_RELATIVE):
        return Judgement(Verdict.CLOSE, f"absolute difference {pair.max_abs:.3g} (up to {floor:.3g} allowed{because})")
    reason = f"relative difference {pair.max_rel:.3g} (up to {limit.bug:g} allowed), absolute {pair.max_abs:.3g}"
    if pair.max_rel >= limit.bug:
        return Judgement(Verdict.DIFF, reason)
    return Judgement(Verdict.CLOSE, reason, suspect=pair.max_rel > limit.suspect)


def _logprob(pair: PairFigures, limit: LogprobTolerance, context: Context) -> Judgement:
    measured = (
        ("greatest absolute difference", pair.max_abs, limit.max_abs, " nats"),
        ("mean exp|d|", pair.mean_exp_abs, limit.mean_exp_abs, ""),
        ("k3", pair.k3, limit.k3, " nats"),
    )
    for label, value, (_, _, bug), unit in measured:
        if value >= bug:
            return Judgement(Verdict.DIFF, f"{label} {value:.4g}{unit} (up to {bug:g} allowed); {_mismatched(pair)}")
    if context.worst_sample is not None and context.worst_sample[1] >= limit.mean_exp_abs[2]:
        number, value = context.worst_sample
        allowed = f"up to {limit.mean_exp_abs[2]:g} allowed"
        return Judgement(Verdict.DIFF, f"sample {number} has mean exp|d| {value:.4g} ({allowed}); {_mismatched(pair)}")
    shape = structure.pattern(pair, coarsest(context.dtype)) or sample.alone(pair)
    if shape is not None:
        return Judgement(Verdict.DIFF, shape)
    suspect = any(value > middle for _, value, (_, middle, _), _ in measured)
    reason = f"greatest absolute difference {pair.max_abs:.3g} nats (up to {limit.max_abs[2]:g} allowed)"
    return Judgement(Verdict.CLOSE, reason, suspect)


def _scaled(pair: PairFigures, context: Context, limit: Limits) -> Judgement:
    """Limits that scale with the tensor: as a whole, by row, by column, by element, and by the shape of the error."""
    row = coarsest(context.dtype)
    vanishing = limits.VANISHING.get(row, 0.0)
    one_is_zero = pair.sum_a2 == 0.0 or pair.sum_b2 == 0.0
    if context.meaning.kind == "gradient" and one_is_zero:
        vanishing = max(vanishing, limits.VANISHING_GRADIENT)
    if pair.max_abs < vanishing:
        what = "the square of which an optimizer cannot hold" if vanishing > 1e-30 else "the smallest normal number"
        reason = f"greatest absolute difference {pair.max_abs:.3g}: below {vanishing:.3g}, {what}"
        return Judgement(Verdict.CLOSE, reason)
    table = limit.table
    if pair.sum_d2 < limits.UNSUMMABLE and pair.max_rel >= table.bug:
        reason = f"relative difference {pair.max_rel:.3g} (up to {table.bug:g} allowed); too small to be squared"
        return Judgement(Verdict.DIFF, reason)
    found = _against(pair, context, limit)
    if found is None and pair.rest is not None and pair.rest.sum_d2 > 0:
        # A channel that outweighs all others hides them; what is left is held to the same limits.
        found = _against(pair.rest, context, limit)
        if found is not None:
            some = ", ".join(map(str, pair.massive[:4])) + (", ..." if len(pair.massive) > 4 else "")
            apart = f"apart from {len(pair.massive)} channels that outweigh all others ({some}): "
            found = Judgement(found.verdict, apart + found.reason, found.suspect, found.row_limit)
    if found is not None:
        return found
    if context.meaning.kind == "param" and (changed := structure.updated(pair, row)) is not None:
        return Judgement(Verdict.DIFF, changed)
    reason = f"relative L2 {pair.rel_l2:.2g} (up to {table.bug:.3g} allowed, {row} {limit.column})"
    suspect = pair.rel_l2 > table.suspect
    if suspect:
        reason += ", above the noise expected"
    if context.meaning.kind == "param" and context.rounded is None:
        # No forward ran between two stored numbers: what differs was written by another computation.
        reason += "; stored numbers are as a rule bitwise equal: an update smaller than that cannot be excluded"
    return Judgement(Verdict.CLOSE, reason, suspect)


def _against(pair: PairFigures, context: Context, limit: Limits) -> Judgement | None:
    """The DIFF of a pair, or None."""
    row, table, few = coarsest(context.dtype), limit.table, limit.column != "gradient"
    held_to = f"{row} {limit.column}"
    shape = structure.pattern(pair, row, few=few)
    if shape is not None and not few and not structure.explains_gradient(pair, row, context.noise):
        shape = None
    if pair.rel_l2 >= table.bug:
        reason = f"relative L2 {pair.rel_l2:.3g} (up to {table.bug:.3g} allowed, {held_to}); {_mismatched(pair)}"
        return Judgement(Verdict.DIFF, f"{shape}; {reason}" if shape else reason, row_limit=table.worst_row)
    worst = structure.worst_row(pair)
    if worst > table.worst_row:
        reason = (
            f"one row is off by {worst:.3g} of its own norm (up to {table.worst_row:.3g} allowed, {held_to}), "
            f"the tensor as a whole only by {pair.rel_l2:.2g}"
        )
        return Judgement(Verdict.DIFF, reason, row_limit=table.worst_row)
    # What exceeds the element's own allowance: a massive activation rounds by more than the tensor's rms.
    excess = pair.max_abs - table.bug * abs(pair.max_abs_a or 0.0)
    outlier = excess / pair.rms_a if pair.rms_a else float("inf")
    if outlier > table.outlier:
        reason = f"greatest absolute difference is {outlier:.3g} rms of the tensor (up to {table.outlier:.3g} allowed)"
        return Judgement(Verdict.DIFF, reason)
    if shape is not None:
        return Judgement(Verdict.DIFF, shape)
    found, least = structure.standing_out(pair, row, few=few)
    return None if found is None else Judgement(Verdict.DIFF, found, row_limit=least)
