"""Judges one pair from its figures: SAME, CLOSE, DIFF, NAN or PADDING, and one sentence why.

Pure: figures in, verdict out, nothing is read. The sentence speaks like torch.testing.assert_close.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np

from replay_core.compare import tolerance
from replay_core.compare.tolerance import LogprobTolerance, Tolerance
from replay_core.measure.pair import PairFigures
from replay_core.naming import Meaning

EXACT_KINDS = frozenset({"ids", "mask", "layout", "text"})

#: Kinds whose single numbers (a loss, a gradient norm) the trainer reduced itself.
SCALAR_KINDS = frozenset({"loss", "metric", "value", "gradient"})


class Verdict(str, Enum):
    """What a pair is called, everywhere."""

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
class Context:
    """What the judge knows beside the figures."""

    meaning: Meaning
    dtype: str
    exact: bool
    #: The module's recorded inputs are bitwise equal: the local column.
    local: bool = False
    #: Both sides are known to be computed in fp32 (their runs say so).
    known_fp32: bool = False
    scalar: bool = False
    bitwise_only: bool = False
    #: Of logprobs: (sample, mean exp|d| over its tokens) of the sample furthest off.
    worst_sample: tuple[int, float] | None = None


def judge(counted: PairFigures, whole: PairFigures | None, context: Context) -> Judgement:
    """Verdict of a pair. `counted`: over the tokens that count; `whole`: over every element, where masked apart."""
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
    if context.exact or context.bitwise_only:
        rule = "bitwise equality was asked for" if context.bitwise_only else "they must be equal"
        return Judgement(Verdict.DIFF, f"{_mismatched(counted)}; {rule}")
    if context.scalar and context.meaning.kind in SCALAR_KINDS:
        return _scalar(counted)
    if context.meaning.kind == "logprob":
        return _logprob(counted, tolerance.LOGPROB_FP32 if context.known_fp32 else tolerance.LOGPROB, context)
    return _elementwise(counted, context)


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


def _scalar(pair: PairFigures) -> Judgement:
    limit = tolerance.SCALAR
    if pair.max_abs <= tolerance.SCALAR_FLOOR:
        return Judgement(
            Verdict.CLOSE, f"absolute difference {pair.max_abs:.3g} (up to {tolerance.SCALAR_FLOOR:g} allowed)"
        )
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
        sample, value = context.worst_sample
        allowed = f"up to {limit.mean_exp_abs[2]:g} allowed"
        return Judgement(Verdict.DIFF, f"sample {sample} has mean exp|d| {value:.4g} ({allowed}); {_mismatched(pair)}")
    suspect = any(value > middle for _, value, (_, middle, _), _ in measured)
    reason = f"greatest absolute difference {pair.max_abs:.3g} nats (up to {limit.max_abs[2]:g} allowed)"
    pattern = _pattern(pair, context)
    return Judgement(Verdict.DIFF, pattern) if pattern else Judgement(Verdict.CLOSE, reason, suspect)


def _elementwise(pair: PairFigures, context: Context) -> Judgement:
    limit, column = _limit(context)
    held_to = f"{tolerance.coarsest(context.dtype)} {column}"
    vanishing = tolerance.VANISHING.get(tolerance.coarsest(context.dtype), 0.0)
    if pair.max_abs < vanishing:
        reason = f"greatest absolute difference {pair.max_abs:.3g}: below the smallest normal number {vanishing:.3g}"
        return Judgement(Verdict.CLOSE, reason)
    if pair.sum_d2 < tolerance.UNSUMMABLE and pair.max_rel >= limit.bug:
        reason = f"relative difference {pair.max_rel:.3g} (up to {limit.bug:g} allowed); too small to be squared"
        return Judgement(Verdict.DIFF, reason)
    worst = _worst_row(pair)
    # What exceeds the element's own allowance: a massive activation rounds by more than the tensor's rms.
    excess = pair.max_abs - limit.bug * abs(pair.max_abs_a or 0.0)
    outlier = excess / pair.rms_a if pair.rms_a else float("inf")
    if pair.rel_l2 >= limit.bug:
        reason = f"relative L2 {pair.rel_l2:.3g} (up to {limit.bug:g} allowed, {held_to}); {_mismatched(pair)}"
        return Judgement(Verdict.DIFF, reason, row_limit=limit.worst_row)
    if worst > limit.worst_row:
        reason = (
            f"one row is off by {worst:.3g} of its own norm (up to {limit.worst_row:g} allowed, {held_to}), "
            f"the tensor as a whole only by {pair.rel_l2:.2g}"
        )
        return Judgement(Verdict.DIFF, reason, row_limit=limit.worst_row)
    if outlier > limit.outlier:
        reason = f"greatest absolute difference is {outlier:.3g} rms of the tensor (up to {limit.outlier:g} allowed)"
        return Judgement(Verdict.DIFF, reason)
    pattern = _pattern(pair, context)
    if pattern:
        return Judgement(Verdict.DIFF, pattern)
    reason = f"relative L2 {pair.rel_l2:.2g} (up to {limit.bug:g} allowed, {held_to})"
    suspect = pair.rel_l2 > limit.suspect
    return Judgement(Verdict.CLOSE, reason + (", above the noise expected" if suspect else ""), suspect)


def _limit(context: Context) -> tuple[Tolerance, str]:
    row = tolerance.coarsest(context.dtype)
    if context.meaning.kind == "gradient":
        return tolerance.GRADIENT[row], "gradient"
    if context.local:
        return tolerance.LOCAL[row], "local"
    return tolerance.END_TO_END[row], "end-to-end"


def _worst_row(pair: PairFigures) -> float:
    """Largest ||d|| / ||a|| of a row that carries weight.

    A row that is nothing but cancellation residue (a thousandth of the typical norm) proves nothing by its ratio,
    and a row of a few numbers may cross zero: it is held against the typical row instead of itself.
    """
    if not pair.row_d2.any():
        return 0.0
    if pair.row_width < tolerance.NARROW_ROW:
        typical = float(pair.row_a2.mean())
        if not typical:
            return float("inf")
        return float(np.sqrt((pair.row_d2 / np.maximum(pair.row_a2, typical)).max()))
    weight = np.maximum(pair.row_a2, pair.row_d2) >= 1e-6 * float(np.median(pair.row_a2))
    return float(pair.row_rel[weight].max(initial=0.0))


def _pattern(pair: PairFigures, context: Context) -> str | None:
    """The sentence of a structured error, or None: noise is neither proportional to the tensor nor a constant."""
    row = tolerance.coarsest(context.dtype)
    floor = tolerance.GAIN_FLOOR[row]
    if pair.finite < tolerance.PATTERN_ELEMENTS:
        return None
    # An element that outweighs all others (a massive activation) makes its own rounding look like a factor.
    spread = pair.weighty >= tolerance.PATTERN_ELEMENTS
    if spread and pair.gain_share >= tolerance.GAIN_SHARE and abs(pair.gain) >= floor:
        return f"b is a times {1 + pair.gain:.6g}: one factor explains {100 * pair.gain_share:.0f}% of the difference"
    if pair.bias_share >= tolerance.GAIN_SHARE and abs(pair.mean_signed) >= floor * pair.rms_a:
        return (
            f"b is a plus {pair.mean_signed:.6g}: one constant explains {100 * pair.bias_share:.0f}% of the difference"
        )
    return _scaled_rows(pair, tolerance.ROW_GAIN_FLOOR[row])


def _scaled_rows(pair: PairFigures, floor: float) -> str | None:
    """Rows that are each a times a factor of their own."""
    if pair.row_width < tolerance.PATTERN_ELEMENTS:
        return None
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        beta = pair.row_ad / pair.row_a2
        share = pair.row_ad**2 / (pair.row_a2 * pair.row_d2)
        weighty = pair.row_a2**2 / pair.row_a4
    scaled = (np.abs(beta) >= floor) & (share >= tolerance.ROW_GAIN_SHARE) & (weighty >= tolerance.PATTERN_ELEMENTS)
    if not scaled.any():
        return None
    factors = 1 + beta[scaled]
    return f"{int(scaled.sum()):,} of {scaled.size:,} rows are a times a factor: {float(factors.min()):.4g}" + (
        f" to {float(factors.max()):.4g}" if factors.size > 1 else ""
    )
