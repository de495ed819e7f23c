"""What the recorded numbers alone tell: each cause that leaves a signature, without a model."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from replay_core.diagnose.gap import is_of_padding
from replay_core.mismatch.candidate import Candidate
from replay_core.mismatch.figures import Array
from replay_core.mismatch.sides import Sides

#: Fewer tokens leave no shift to be told.
_FEWEST = 8
#: Temperatures that are no further apart are one.
_SAME_HEAT = 0.005
#: A constant is one where so much of the gap goes with it.
_CONSTANT = 0.9


def signatures(sides: Sides) -> list[Candidate]:
    """Every candidate that needs no model, weighed against the gap with a floor of 0; those whose sign is there are
    named, at most one: they are the same signs, in the same order, as the diagnosis has (D08, D10, D11, D12, D16)."""
    found = [
        *_shifted(sides),
        _tempered(sides),
        *_constant(sides),
        _truncated(sides),
        *_recorded(sides),
        *_leaking(sides),
    ]
    for one in found:
        one.weigh(sides.d_M, 0.0)
    return found


def _shifted(sides: Sides) -> Iterator[Candidate]:
    for lag in (-1, 1):
        left_M = shifted_left(sides, lag)
        named = sides.between.is_shifted and sides.between.lag.lag == lag
        known = int(np.isfinite(left_M).sum()) >= _FEWEST
        yield Candidate(
            f"values {'one token late' if lag > 0 else 'one token early'}", "shift",
            left_M=left_M if known else None, named=named,
            why_not=None if known else f"fewer than {_FEWEST} tokens stand beside another that counts",
        )  # fmt: skip


def shifted_left(sides: Sides, lag: int) -> Array:
    """trainer - the rollout's value of the token `lag` places on, of the same sample; NaN where there is none [M]."""
    values_N, sample_N = sides.between.rollout.values_N, sides.batch.flat.sample_N
    place_M = sides.at_M + lag
    inside_M = (place_M >= 0) & (place_M < values_N.size)
    place_M = np.where(inside_M, place_M, 0)
    inside_M &= sample_N[place_M] == sides.sample_M
    left_M: Array = np.where(inside_M, sides.trainer_M - values_N[place_M], np.nan)
    return np.where(np.isfinite(left_M), left_M, np.nan)


def _tempered(sides: Sides) -> Candidate:
    """By a line, or by what a temperature makes of a distribution of two tokens (`Gap.tempered_by`)."""
    between, x, y = sides.between, sides.trainer_M, sides.rollout_M
    if x.size < _FEWEST or not np.isfinite(between.slope) or between.slope <= 0:
        return Candidate("temperature", "temperature", why_not="the two do not rise and fall together")
    by_line = (y.mean() + between.slope * (x - x.mean())) - y
    found, _ = between.tempered_by
    bounded = np.minimum(x, -1e-7)
    rest = np.log(-np.expm1(bounded))
    by_two = bounded / found - np.logaddexp(bounded / found, rest / found) - y
    is_line = np.abs(by_line).mean() <= np.abs(by_two).mean()
    value = 1 / between.slope if is_line else found
    if abs(value - 1) < _SAME_HEAT:
        return Candidate("temperature", "temperature", why_not="their shape is that of one temperature")
    return Candidate(
        f"temperature {value:.3g}", "temperature",
        left_M=by_line if is_line else by_two, named=between.is_tempered,
    )  # fmt: skip


def _constant(sides: Sides) -> Iterator[Candidate]:
    d_M = sides.d_M
    middle = float(np.median(d_M))
    left_M = d_M - middle
    named = abs(middle) > 0.01 and float(np.abs(left_M).mean()) < (1 - _CONSTANT) * float(np.abs(d_M).mean())
    if abs(middle) > 0.05 * float(np.abs(d_M).mean()):
        yield Candidate(f"a constant of {-middle:+.3g} nats", "constant", left_M=left_M, named=named)


def _truncated(sides: Sides) -> Candidate:
    between = sides.between
    kept = float(np.exp(between.d.mean()))
    name = "renormalised over top-p or top-k"
    if between.is_truncated:
        name += f" ({kept:.1%} of the probability kept, as a geometric mean)"
    # What is left is not predicted without the distribution: only that it is all on one side.
    return Candidate(name, "truncation", named=between.is_truncated)


def _recorded(sides: Sides) -> Iterator[Candidate]:
    """The rollout against other log-probabilities of the same tokens that are recorded: which weights sampled?"""
    for name, what in (
        ("ref_logprobs", "the reference's weights (the initial ones)"),
        ("policy_logprobs", "the policy's own forward in place of the old one"),
    ):
        column = sides.batch.columns.of(name)
        if column is None or name == sides.between.trainer.name:
            continue
        other_M = np.where(column.said_N[sides.at_M], column.values_N[sides.at_M], np.nan)
        if np.isfinite(other_M).sum() < _FEWEST:
            continue
        named = name == "ref_logprobs" and sides.between.is_stale
        yield Candidate(f"{what}: {column.source}", "weights", left_M=other_M - sides.rollout_M, named=named)


def _leaking(sides: Sides) -> Iterator[Candidate]:
    between = sides.between
    if between.leak is not None:
        clean_B, how = between.leak
        yield Candidate(
            f"packs that leak: {int(clean_B.sum())} first samples agree, the later ones do not ({how})", "packing",
            "trainer", named=True,
        )  # fmt: skip
    if is_of_padding(between):
        flush, padded = between.by_padding or (0.0, 0.0)
        yield Candidate(
            f"left padding that is attended to or counted: {flush:.3g} nats without, {padded:.3g} with", "positions",
            named=not (between.is_shifted or between.is_tempered or between.is_truncated),
        )  # fmt: skip


def outliers(sides: Sides) -> Array:
    """Samples that are off by far more than the others [B]: mean |d| past 6 robust deviations over the median."""
    each_B = sides.between.by_sample_B
    known = each_B[np.isfinite(each_B)]
    if known.size < 4:
        return np.zeros(each_B.size, bool)
    middle = float(np.median(known))
    spread = 1.4826 * float(np.median(np.abs(known - middle)))
    out_B: Array = np.nan_to_num(each_B) > middle + 6 * max(spread, 0.1 * middle)
    return out_B
