"""Every |d| <= atol + rtol |a|, as torch.testing.assert_close asks, from the figures of a pair."""

from __future__ import annotations

from replay_core.measure.figures import PairFigures


def beyond(pair: PairFigures, atol: float, rtol: float) -> tuple[float, str]:
    """How many elements are past, and a sentence.

    Exact where these limits were counted while reading. Otherwise the figures bound the answer to none or at least one
    (`PairFigures.most_past`), and what that leaves open is not called within.
    """
    greatest = (
        f"greatest absolute difference {pair.max_abs:.4g} (up to {atol:g} allowed), "
        f"greatest relative difference {pair.max_rel:.4g} (up to {rtol:g} allowed)"
    )
    if pair.limits == (atol, rtol) and pair.beyond is not None:
        share = f"{pair.beyond:,} / {pair.compared:,} ({100 * pair.beyond / max(1, pair.compared):.1f}%)"
        return pair.beyond, f"mismatched elements: {share}; {greatest}"
    if atol >= pair.max_abs or rtol >= pair.max_rel or pair.most_past(rtol) <= atol:
        return 0, greatest
    # One limit alone is what max_abs and max_rel answer.
    if rtol == 0.0 or atol == 0.0 or pair.max_abs > atol + rtol * pair.at_greatest:
        return 1, greatest
    return 1, (
        f"{greatest}; the figures kept leave open whether any element passes both together: "
        f"compare again with --atol {atol:g} --rtol {rtol:g} to count them"
    )
