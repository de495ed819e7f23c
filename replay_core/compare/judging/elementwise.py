"""Every |d| <= atol + rtol |a|, as torch.testing.assert_close asks, from the figures of a pair."""

from __future__ import annotations

from replay_core.measure.pair import PairFigures


def judge(pair: PairFigures, atol: float, rtol: float) -> tuple[bool, str]:
    """Whether every element is within, and why.

    Exact where these limits were counted while reading. Otherwise the figures bound the answer
    (`PairFigures.most_past`), and what that leaves open is not called within.
    """
    if pair.limits == (atol, rtol) and pair.beyond is not None:
        share = f"{pair.beyond:,} / {pair.compared:,} ({100 * pair.beyond / max(1, pair.compared):.1f}%)"
        return pair.beyond == 0, f"mismatched elements: {share}; {_greatest(pair, atol, rtol)}"
    if atol >= pair.max_abs or rtol >= pair.max_rel or pair.most_past(rtol) <= atol:
        return True, _greatest(pair, atol, rtol)
    if _certainly_past(pair, atol, rtol):
        return False, _greatest(pair, atol, rtol)
    return False, (
        f"{_greatest(pair, atol, rtol)}; the figures kept leave open whether any element passes both together: "
        f"compare again with --atol {atol:g} --rtol {rtol:g} to count them"
    )


def _certainly_past(pair: PairFigures, atol: float, rtol: float) -> bool:
    if rtol == 0.0 or atol == 0.0:  # one limit alone is what max_abs and max_rel answer
        return True
    return pair.max_abs > atol + rtol * abs(pair.max_abs_a or 0.0)


def _greatest(pair: PairFigures, atol: float, rtol: float) -> str:
    return (
        f"greatest absolute difference {pair.max_abs:.4g} (up to {atol:g} allowed), "
        f"greatest relative difference {pair.max_rel:.4g} (up to {rtol:g} allowed)"
    )
