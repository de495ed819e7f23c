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


def judge(counted: PairFigures, whole: PairFigures | None, context: Context) -> Judgement:
    """Verdict of a pair. `counted`: over the tokens that count; `whole`: over every element, where masked apart."""
    if counted.mismatched == 0:
        if whole is not None and whole.mismatched:
            return _padding(whole)
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
    if context.scalar and context.meaning.kind in ("loss", "metric", "value"):
        return _scalar(counted)
    if context.meaning.kind == "logprob":
        return _logprob(counted, tolerance.LOGPROB_FP32 if context.known_fp32 else tolerance.LOGPROB, context)
    return _elementwise(counted, context)


def _padding(whole: PairFigures) -> Judgement:
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
    suspect = any(value > middle for _, value, (_, middle, _), _ in measured)
    reason = f"greatest absolute difference {pair.max_abs:.3g} nats (up to {limit.max_abs[2]:g} allowed)"
    gain = _gain(pair, context)
    return Judgement(Verdict.DIFF, gain) if gain else Judgement(Verdict.CLOSE, reason, suspect)


def _elementwise(pair: PairFigures, context: Context) -> Judgement:
    limit, column = _limit(context)
    held_to = f"{tolerance.coarsest(context.dtype)} {column}"
    worst = pair.worst_row
    outlier = pair.max_abs / pair.rms_a if pair.rms_a else float("inf")
    if pair.rel_l2 >= limit.bug:
        reason = f"relative L2 {pair.rel_l2:.3g} (up to {limit.bug:g} allowed, {held_to}); {_mismatched(pair)}"
        return Judgement(Verdict.DIFF, reason, row_limit=limit.worst_row)
    if worst is not None and worst[1] > limit.worst_row and _carries_weight(pair, worst[0]):
        reason = (
            f"one row is off by {worst[1]:.3g} of its own norm (up to {limit.worst_row:g} allowed, {held_to}), "
            f"the tensor as a whole only by {pair.rel_l2:.2g}"
        )
        return Judgement(Verdict.DIFF, reason, row_limit=limit.worst_row)
    if outlier > limit.outlier:
        reason = f"greatest absolute difference is {outlier:.3g} rms of the tensor (up to {limit.outlier:g} allowed)"
        return Judgement(Verdict.DIFF, reason)
    gain = _gain(pair, context)
    if gain:
        return Judgement(Verdict.DIFF, gain)
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


def _carries_weight(pair: PairFigures, row: int) -> bool:
    """A row that is nothing but cancellation residue (a thousandth of the typical norm) proves nothing by its ratio."""
    typical = float(np.sqrt(np.median(pair.row_a2))) if pair.row_a2.size else 0.0
    return bool(np.sqrt(max(pair.row_a2[row], pair.row_d2[row])) >= 1e-3 * typical)


def _gain(pair: PairFigures, context: Context) -> str | None:
    """The sentence of a global factor, or None. Noise is not proportional to the tensor; a wrong scale is."""
    beta, row = pair.gain, tolerance.coarsest(context.dtype)
    if pair.finite < 16 or pair.gain_share < tolerance.GAIN_SHARE or abs(beta) < tolerance.GAIN_FLOOR[row]:
        return None
    return f"b is a times {1 + beta:.6g}: one factor explains {100 * pair.gain_share:.0f}% of the difference"
