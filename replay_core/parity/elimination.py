"""What values alone can say of their cause, where no weights, modules or controls were recorded.

Each test rules something out. A first token attends to itself alone and has no distance to anything: where it agrees,
the weights agree. Equal prefixes have equal values unless something is drawn at random. A dropped-out value is the
right one plus noise, so one of the two regressions has slope 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from replay_core.compare.judging.limits import NOISE, REL_L2
from replay_core.parity.evidence import ValueEvidence

if TYPE_CHECKING:
    from replay_core.documents.parity import ParityCause

#: Dropout on a head leaves correlations in this range: below, nothing is shared; above, hardly a unit was dropped.
_SCATTER = (0.8, 0.9995)

Found: TypeAlias = "tuple[ParityCause, str, dict[str, Any]]"


def from_values(ev: ValueEvidence) -> list[Found]:
    """Causes (kind, why, numbers) of a difference that counts."""
    padded = _of_padded_rows(ev)
    return [*_line(ev)] or ([padded] if padded else []) or [*_random(ev)] or [_beginning(ev) or _scatter(ev)]


def _line(ev: ValueEvidence) -> list[Found]:
    ranges = {"A": ev.masked.range_a, "B": ev.masked.range_b}
    flat = [(side, each[0]) for side, each in ranges.items() if each is not None and each[0] == each[1]]
    if len(flat) == 1 and ev.masked.n > 1:
        side, number = flat[0]
        why = f"{side}'s values are one number ({number:.6g}) everywhere, the other's are not: they do not correlate"
        return [("weights", why, {"constant": number})]
    fit = ev.fit
    if fit is None or fit.why is None:
        return []
    left = f"what is left is rounding (rms {fit.left:.3g})"
    found: list[Found] = []
    if fit.why in ("scale", "both"):
        found.append(
            ("scale", f"B's values are {fit.scale:.6g} times A's; {left}", {"slope": fit.scale, "left_rms": fit.left})
        )
    if fit.why in ("offset", "both"):
        why = f"B's values are A's {fit.offset:+.6g}; {left}. A head with a bias against one without looks like this, "
        found.append(("offset", why + "and no correlation sees it", {"offset": fit.offset, "left_rms": fit.left}))
    return found


def _random(ev: ValueEvidence) -> list[Found]:
    # One critic against itself: kernels may round rows differently, but nothing accumulated between implementations.
    smallest = 3 * ev.floor * NOISE[ev.dtype] / REL_L2["end-to-end"][ev.dtype]
    moving = [(side, *ev.repeats[side]) for side in ev.repeats if ev.repeats[side][1] > smallest]
    if not moving:
        return []
    side, pairs, largest = moving[0]
    who = f"{side.upper()}'s values are" if len(moving) == 1 else "both sides' values are"
    why = f"{who} no function of the tokens: of {pairs} equal prefixes some differ by {largest:.3g}, as under dropout"
    return [("dropout", why, {"equal_prefixes": pairs, "largest": largest})]


def _beginning(ev: ValueEvidence) -> Found | None:
    """Differences that begin after the first token are about what tokens see of each other."""
    if ev.starts is None or ev.first_state_differs is not False:
        return None
    rows = [(row, int(start)) for row, start in enumerate(ev.starts) if start >= 0]
    if not rows:
        return None
    begins = [int(ev.mask_BT[row].argmax()) if ev.mask_BT[row].any() else -1 for row, _ in rows]
    lags = {start - begin for (_, start), begin in zip(rows, begins, strict=True)}
    numbers = {"first_positions": [start for _, start in rows][:16]}
    if ev.counted == "response" and len(lags) == 1 and abs(next(iter(lags))) <= 1 and len(set(begins)) > 1:
        why = "every row parts at its first response token and agrees before: its positions jump there"
        return "positions", why, numbers
    where = sorted({start for _, start in rows})
    at = f"position {where[0]}" if len(where) == 1 else f"positions {where[0]} to {where[-1]}"
    why = (
        f"the first token of every row agrees, so the weights do; rows part from {at} on: attention, or positions that "
        "were not recorded"
    )
    return "attention", why, numbers


def _of_padded_rows(ev: ValueEvidence) -> Found | None:
    """Rows that part are those with padding, and rows without agree: one side sees the padding, or counts it."""
    if ev.starts is None or ev.padding is None:
        return None
    heard_B = ev.mask_BT.any(1)
    apart_B, padded_B = (ev.starts >= 0) & heard_B, (ev.padding.tokens_B > 0) & heard_B
    whole = int((heard_B & ~padded_B).sum())
    if not apart_B.any() or (apart_B & ~padded_B).any():
        return None
    # Without a row that is whole, only a mask that hides nothing tells padding from other weights.
    if ev.padding.unmasked_side is None and (not whole or (padded_B & ~apart_B).any()):
        return None
    rows, bare = np.flatnonzero(apart_B).tolist(), ev.padding.unmasked_side
    which = ", ".join(map(str, rows[:6])) + (" …" if len(rows) > 6 else "")
    others = f", the {whole} without agree" if whole else ""
    why = (
        f"{bare}'s attention mask hides no padding, the other's does: {len(rows)} rows with padding part "
        f"(row {which}){others}; the mask is missing on that side, and tokens attend to padding"
        if bare is not None
        else f"only rows with padding part ({len(rows)} of {int(heard_B.sum())}: row {which}){others}: one side "
        "attends to padding or counts it in its positions (no attention mask, or position ids of the padded row)"
    )
    numbers = {"rows": rows[:16], "padding": [int(ev.padding.tokens_B[row]) for row in rows[:16]]}
    return "attention", why, numbers


def _of_some_rows(ev: ValueEvidence) -> Found | None:
    """Rows that part while most agree: neither dropout nor other weights leave a row alone."""
    if ev.starts is None or len(ev.starts) < 3:
        return None
    apart = [row for row, start in enumerate(ev.starts) if start >= 0]
    heard = int(ev.mask_BT.any(1).sum())
    if not apart or 2 * len(apart) > heard:
        return None
    which = ", ".join(map(str, apart[:6])) + (" …" if len(apart) > 6 else "")
    why = (
        f"only {len(apart)} of {heard} rows part (row {which}), the others agree: dropout or other weights would move "
        "every row, so these see other rows, padding or a mask of their own"
    )
    return "attention", why, {"rows": apart[:16]}


def _scatter(ev: ValueEvidence) -> Found:
    some = _of_some_rows(ev)
    if some is not None:
        return some
    r, slope = ev.masked.pearson, ev.masked.slope
    numbers = {"pearson": r, "slope": slope, "residual_rms": ev.masked.residual_rms}
    repeats = [pairs for pairs, _ in ev.repeats.values()]
    ruled_out = bool(repeats) and min(repeats) > 0
    if r is not None and slope is not None and _SCATTER[0] <= r <= _SCATTER[1] and not ruled_out and _unbiased(ev):
        why = (
            f"B scatters around A without slope or offset (Pearson {r:.3f}): what dropout on one head leaves. Values "
            "alone do not tell it from slightly different weights; a run in eval mode does"
        )
        return "dropout", why, numbers
    sure = "equal prefixes have equal values on both sides, so nothing is drawn at random; " if ruled_out else ""
    correlated = "they do not correlate" if r is None else f"Pearson {r:.3f}"
    why = f"{sure}every token parts from the first on, {correlated}, and no line explains it: different weights"
    return "weights", why, numbers


def _unbiased(ev: ValueEvidence) -> bool:
    """Whether B is A plus noise, or A is B plus noise: one regression's slope is 1 within three standard errors."""
    r, slope, ratio, n = ev.masked.pearson, ev.masked.slope, ev.masked.std_ratio, ev.masked.n
    if r is None or slope is None or not ratio or n < 3:
        return False
    error = float(np.sqrt((1 - r * r) / (n - 2)))
    return abs(slope - 1) <= 3 * error * ratio or abs(slope / ratio**2 - 1) <= 3 * error / ratio
