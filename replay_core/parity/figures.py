"""What a screen draws of two critics' values: a sampled scatter, a histogram of differences, the worst tokens."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from replay_core.decoding import Decoder
from replay_core.errors import RequestError
from replay_core.parity.evidence import ValueEvidence
from replay_core.parity.values import Values

if TYPE_CHECKING:
    from replay_core.documents.parity import ScatterEntry, ValueHistogram, WorstValue

POINTS = 2000
BINS = 40
WORST = 10
#: Tokens of text on either side of a worst one.
CONTEXT = 8


def scatter(a: Values, b: Values, ev: ValueEvidence) -> ScatterEntry:
    """Up to 2,000 points [a, b, region] (region: response | valid | padding), every k-th where there are more."""
    region_BT = regions(a, ev)
    finite = np.flatnonzero(np.isfinite(a.values_BT.reshape(-1)) & np.isfinite(b.values_BT.reshape(-1)))
    # Evenly, from a fixed seed: a stride would follow the rows' period.
    chosen = np.sort(np.random.default_rng(0).choice(finite, POINTS, replace=False)) if finite.size > POINTS else finite
    flat_a, flat_b, region = a.values_BT.reshape(-1), b.values_BT.reshape(-1), region_BT.reshape(-1)
    points = [[float(flat_a[at]), float(flat_b[at]), str(region[at])] for at in chosen]
    return {
        "points": points,
        "shown": len(points),
        "total": int(a.values_BT.size),
        "sampled": bool(finite.size > POINTS),
    }


def regions(a: Values, ev: ValueEvidence) -> Any:
    """[B, T] of words: what each value is about."""
    region_BT = np.full(a.shape, "padding", dtype="<U8")
    valid_BT = np.ones(a.shape, bool) if a.valid_BT is None else a.valid_BT
    region_BT[valid_BT] = "valid"
    region_BT[ev.mask_BT] = "response" if ev.counted == "response" else "valid"
    return region_BT


def histogram(a: Values, b: Values, ev: ValueEvidence) -> ValueHistogram | None:
    """Counts of d = b - a in equal bins: `counted` over tokens that count, `others` the rest. None without values."""
    d_BT = b.values_BT - a.values_BT
    finite_BT = np.isfinite(d_BT)
    if not finite_BT.any():
        return None
    low, high = float(d_BT[finite_BT].min()), float(d_BT[finite_BT].max())
    if low == high:
        low, high = low - 0.5e-6, high + 0.5e-6
    edges = np.linspace(low, high, BINS + 1)
    counted, _ = np.histogram(d_BT[finite_BT & ev.mask_BT], edges)
    others, _ = np.histogram(d_BT[finite_BT & ~ev.mask_BT], edges)
    return {"edges": edges.tolist(), "counted": counted.tolist(), "others": others.tolist()}


def worst(a: Values, b: Values, ev: ValueEvidence, tokenizer: Path | None) -> list[WorstValue]:
    """The tokens that count whose values part most, largest first; none where they are equal. Text where it is known.

    `row` and `position` are those of the token that the value comes before; `column` is the value's own.
    """
    d_BT = np.where(ev.mask_BT, np.abs(b.values_BT - a.values_BT), -1.0)
    d_BT[np.isnan(d_BT)] = np.inf
    flat = np.argsort(-d_BT, axis=None, kind="stable")[:WORST]
    decoder = _decoder(tokenizer)
    rows: list[WorstValue] = []
    for at in flat:
        row, column = divmod(int(at), a.shape[1])
        if d_BT[row, column] <= 0:
            continue
        token = None if a.tokens_BT is None else int(a.tokens_BT[row, column])
        rows.append(
            {
                "row": row,
                "row_b": row if ev.order is None else int(ev.order[row]),
                "column": column,
                "position": column + (0 if a.ids_BS is None else a.ids_BS.shape[1] - a.shape[1]),
                "a": float(a.values_BT[row, column]),
                "b": float(b.values_BT[row, column]),
                "d": float(b.values_BT[row, column] - a.values_BT[row, column]),
                "token": token,
                "text": None if decoder is None or token is None else decoder.text([token]),
                "before": _before(a, row, column, decoder),
            }
        )
    return rows


def _before(a: Values, row: int, column: int, decoder: Decoder | None) -> str | None:
    if decoder is None or a.tokens_BT is None:
        return None
    return decoder.text([int(one) for one in a.tokens_BT[row, max(0, column - CONTEXT) : column]])


def _decoder(tokenizer: Path | None) -> Decoder | None:
    if tokenizer is None:
        return None
    try:
        return Decoder(tokenizer)
    except RequestError:
        return None
