"""What a pair of values shows by itself: where it parts, what explains the difference, what it cannot be.

Nothing here reads a setting. Everything is a number of the recorded values, so it works on any two dumps.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct, field

from replay_core.compare.judging.limits import GAIN_FLOOR, REL_L2
from replay_core.dtypes import EPS, coarsest
from replay_core.parity.correlation import Bools, Floats, Measures, is_constant, line, measure
from replay_core.parity.values import Ints, Values

#: A slope or an offset counts from this many standard errors on (noise stays below 4: docs/evidence.md#gain-and-shape).
SIGMAS = 10.0
#: A line is fitted through no fewer tokens.
TOKENS = 8


class Fit(Struct):
    """b = scale * a + offset, and the rms it leaves. `why` is "offset", "scale", "both", or None: nothing is."""

    scale: float
    offset: float
    left: float
    why: str | None


class PaddedRows(Struct, frozen=True):
    """How many positions of padding each row has, and the side (A, B) whose own mask hides none of them."""

    tokens_B: Ints
    unmasked_side: str | None
    apart: int = 0
    """Positions of padding that are not equal."""


class ValueEvidence(Struct):
    """One batch, A against B. `floor` is the rms difference that rounding explains, in the values' unit.

    differs: whether what counts parts beyond rounding. starts: the first valued position of each row that parts, -1
    where none does.
    """

    batch: str
    dtype: str
    counted: str
    mask_BT: Bools
    floor: float
    masked: Measures
    valid: Measures | None
    unmasked: Measures
    fit: Fit | None
    differs: bool
    padding_differs: bool
    padding_tokens: int
    order: list[int] | None = None
    shift: int = 0
    starts: Ints | None = None
    padding: PaddedRows | None = None
    first_state_differs: bool | None = None
    repeats: dict[str, tuple[int, float]] = field(default_factory=dict)
    positions: str | None = None
    #: Largest and smallest difference of position ids over tokens; None where not both are recorded.
    position_range: tuple[int, int] | None = None
    alone_differs: bool | None = None
    alone: dict[str, Floats] = field(default_factory=dict)
    #: Masked, valid and unmasked, in train mode.
    train: tuple[Measures, Measures | None, Measures] | None = None
    train_differs: bool | None = None
    #: CriticSide -> rms between two train-mode calls of the same critic.
    wobble: dict[str, float] = field(default_factory=dict)


def gather(a: Values, b: Values, *, threshold: float) -> ValueEvidence:
    """The evidence of two values of one batch and one step. Rows must face each other (`faced`)."""
    mask_BT, counted = counting(a, b)
    dtype = coarsest(a.dtype, b.dtype)
    flat_a, flat_b = a.values_BT[mask_BT], b.values_BT[mask_BT]
    floor = rounding(flat_a, dtype)
    fit = explained(flat_a, flat_b, dtype, floor)
    masked = measure(a.values_BT, b.values_BT, mask_BT, threshold=threshold)
    differs = masked.nonfinite > 0 or (fit is not None and (fit.why is not None or rms(flat_b - flat_a) > floor))
    valid_BT = a.valid_BT if a.valid_BT is not None else b.valid_BT
    made = ValueEvidence(
        batch=a.batch,
        dtype=dtype,
        counted=counted,
        mask_BT=mask_BT,
        floor=floor,
        masked=masked,
        valid=None if valid_BT is None else measure(a.values_BT, b.values_BT, valid_BT, threshold=threshold),
        unmasked=measure(a.values_BT, b.values_BT, threshold=threshold),
        fit=fit,
        differs=bool(differs),
        padding_differs=False,
        padding_tokens=0,
    )
    if valid_BT is not None:
        pads_BT = ~valid_BT
        with np.errstate(invalid="ignore"):
            same_BT = (a.values_BT == b.values_BT) | (np.isnan(a.values_BT) & np.isnan(b.values_BT))
        made.padding_tokens = int(pads_BT.sum())
        made.padding_differs = _apart(a, b, pads_BT, floor, fit)
        # Which positions are padding, either side's mask may know.
        hidden_BT = ~np.logical_and.reduce([one.valid_BT for one in (a, b) if one.valid_BT is not None])
        bare = [side for side, one in (("A", a), ("B", b)) if one.valid_BT is not None and one.valid_BT.all()]
        bare_side = bare[0] if len(bare) == 1 and hidden_BT.any() else None
        made.padding = PaddedRows(hidden_BT.sum(1), bare_side, int((pads_BT & ~same_BT).sum()))
    _where(made, a, b, valid_BT)
    _positions(made, a, b)
    _probes(made, a, b, threshold)
    return made


def counting(a: Values, b: Values) -> tuple[Bools, str]:
    """Which values count, and how that is called: response tokens, else valid ones, else all."""
    for name, word in (("response_BT", "response"), ("valid_BT", "valid")):
        masks = [getattr(one, name) for one in (a, b) if getattr(one, name) is not None]
        if masks:
            return np.logical_and.reduce(masks), word
    return np.ones(a.shape, bool), "all"


def rounding(a: Floats, dtype: str) -> float:
    """The rms difference that rounding of one dtype may leave: the end-to-end limit of relative L2 times how much
    values vary, and a few units in the last place of how large they are."""
    finite = a[np.isfinite(a)]
    if not finite.size:
        return 0.0
    return REL_L2["end-to-end"][dtype] * float(finite.std()) + 2 * EPS[dtype] * rms(finite)


def rms(values: Floats) -> float:
    finite = values[np.isfinite(values)]
    return float(np.sqrt(np.mean(finite**2))) if finite.size else 0.0


def explained(a: Floats, b: Floats, dtype: str, floor: float) -> Fit | None:
    """Whether a constant, a factor, or both explain b: what is left is rounding, what they are is not."""
    finite = np.isfinite(a) & np.isfinite(b)
    a, b = a[finite], b[finite]
    if a.size < 2:
        return None
    d = b - a
    if a.size < TOKENS or is_constant(a):
        offset = float(d.mean())
        left = rms(d - offset)
        return Fit(1.0, offset, left, "offset" if abs(offset) > floor and left <= floor else None)
    offset, left = float(d.mean()), rms(d - d.mean())
    root = float(np.sqrt(a.size))
    smallest = GAIN_FLOOR[dtype] * float(a.std())
    if left <= floor and abs(offset) > max(smallest, SIGMAS * left / root) and not _leans(a, d, offset, dtype):
        return Fit(1.0, offset, left, "offset")
    scale = float(a @ b / (a @ a))
    left_scale = rms(b - scale * a)
    slope, both = line(a, b)
    if slope is None or both is None:
        return Fit(1.0, offset, left, None)
    left_both = rms(b - slope * a - both)
    error = SIGMAS * left_both / (root * float(a.std()))
    if left_both > floor or abs(slope - 1) <= max(GAIN_FLOOR[dtype], error):
        return Fit(slope, both, left_both, None)
    # The constant is the line's only where the factor alone leaves more.
    alone = left_scale <= max(1.5 * left_both, 1e-3 * floor)
    return Fit(scale, 0.0, left_scale, "scale") if alone else Fit(slope, both, left_both, "both")


def _leans(a: Floats, d: Floats, offset: float, dtype: str) -> bool:
    """Whether the difference also follows the value, so that a constant is not the whole of it."""
    centred = a - a.mean()
    slope = float(centred @ (d - offset) / (centred @ centred))
    left = rms(d - offset - slope * centred)
    return abs(slope) > max(GAIN_FLOOR[dtype], SIGMAS * left / (float(np.sqrt(a.size)) * float(a.std())))


def _apart(a: Values, b: Values, where_BT: Bools, floor: float, fit: Fit | None) -> bool:
    """Whether tokens part by more than what already explains those that count."""
    if not where_BT.any():
        return False
    flat_a, flat_b = a.values_BT[where_BT], b.values_BT[where_BT]
    if fit is not None and fit.why is not None:
        flat_a = fit.scale * flat_a + fit.offset
    d = flat_b - flat_a
    if (np.isfinite(flat_a) != np.isfinite(flat_b)).any():
        return True
    return bool(np.abs(d[np.isfinite(d)]).max(initial=0.0) > 10 * floor)


def _where(made: ValueEvidence, a: Values, b: Values, valid_BT: Bools | None) -> None:
    """Where rows begin to part, and whether equal prefixes have equal values."""
    seen_BT = np.ones(a.shape, bool) if valid_BT is None else valid_BT
    d_BT = np.abs(b.values_BT - a.values_BT)
    off_BT = seen_BT & ~(d_BT <= 10 * made.floor)
    made.starts = np.where(off_BT.any(1), off_BT.argmax(1), -1)
    firsts = seen_BT.argmax(1)
    rows = np.flatnonzero(seen_BT.any(1))
    made.first_state_differs = bool(off_BT[rows, firsts[rows]].any()) if rows.size else None
    if a.ids_BS is not None and a.attention_BS is not None:
        for side, values in (("a", a), ("b", b)):
            made.repeats[side] = _repeated_prefixes(values, a.ids_BS, a.attention_BS)


def _repeated_prefixes(values: Values, ids_BS: Ints, attention_BS: Bools) -> tuple[int, float]:
    """(how many pairs of tokens have equal prefixes in two rows, the largest difference of their values).

    A critic that is a function of the prefix gives them one value; one that drops at random does not.
    """
    width = min(values.shape[1], ids_BS.shape[1])
    pairs, largest = 0, 0.0
    seen: dict[bytes, tuple[int, int]] = {}
    for row in range(len(ids_BS)):
        whole = attention_BS[row].all()
        length = width if whole else int(attention_BS[row][:width].argmin())
        for t in range(length):
            prefix = ids_BS[row, : t + 1].tobytes()
            other = seen.setdefault(prefix, (row, t))
            if other[0] != row:
                pairs += 1
                largest = max(largest, abs(values.values_BT[row, t] - values.values_BT[other]))
    return pairs, float(largest)


def _positions(made: ValueEvidence, a: Values, b: Values) -> None:
    """Whether the recorded position ids differ where tokens are: "shifted" by one constant per row, or "apart"."""
    if a.positions_BS is None or b.positions_BS is None or a.positions_BS.shape != b.positions_BS.shape:
        return
    seen_BS = a.attention_BS if a.attention_BS is not None else np.ones(a.positions_BS.shape, bool)
    if seen_BS.shape != a.positions_BS.shape or not seen_BS.any():
        return
    d_BS = b.positions_BS - a.positions_BS
    made.position_range = (int(d_BS[seen_BS].min()), int(d_BS[seen_BS].max()))
    if made.position_range == (0, 0):
        return
    constant = all(np.unique(d_BS[row][seen_BS[row]]).size <= 1 for row in range(len(d_BS)))
    made.positions = "shifted" if constant else "apart"


def _probes(made: ValueEvidence, a: Values, b: Values, threshold: float) -> None:
    """Train mode, and each row alone, where both dumps recorded them."""
    if "values_train" in a.probes and "values_train" in b.probes:
        train_a, train_b = a.probes["values_train"], b.probes["values_train"]
        made.train = (
            measure(train_a, train_b, made.mask_BT, threshold=threshold),
            None if a.valid_BT is None else measure(train_a, train_b, a.valid_BT, threshold=threshold),
            measure(train_a, train_b, threshold=threshold),
        )
        d = train_b[made.mask_BT] - train_a[made.mask_BT]
        fit = made.fit
        if fit is not None and fit.why is not None:
            d = train_b[made.mask_BT] - fit.scale * train_a[made.mask_BT] - fit.offset
        made.train_differs = rms(d) > made.floor
    for side, values in (("a", a), ("b", b)):
        if {"values_train", "values_train_again"} <= set(values.probes):
            d = values.probes["values_train_again"] - values.probes["values_train"]
            made.wobble[side] = rms(d[made.mask_BT])
        if "values_alone" in values.probes:
            made.alone[side] = values.probes["values_alone"]
    if len(made.alone) == 2:
        d = made.alone["b"][made.mask_BT] - made.alone["a"][made.mask_BT]
        made.alone_differs = rms(d) > made.floor


def faced(a: Values, b: Values) -> tuple[Values, list[int] | None, int]:
    """B with its rows in A's order, the order they came in (None: A's own), and by how many tokens B's values lag.

    Rows are told by their tokens where both dumps hold them, else by their values.
    """
    told = a.ids_BS is not None and b.ids_BS is not None and a.ids_BS.shape == b.ids_BS.shape
    if told and not np.array_equal(a.ids_BS, b.ids_BS):  # type: ignore[arg-type]
        order = _row_order(a.ids_BS, b.ids_BS)  # type: ignore[arg-type]
        return (b, None, 0) if order is None else (b.rows(np.asarray(order)), order, 0)
    if a.shape != b.shape:
        return b, None, 0
    mask_BT, _ = counting(a, b)
    floor = rounding(a.values_BT[mask_BT], coarsest(a.dtype, b.dtype))
    d = (b.values_BT - a.values_BT)[mask_BT]
    if rms(d) <= floor or not floor or float(d[np.isfinite(d)].std() if np.isfinite(d).any() else 0.0) <= floor:
        return b, None, 0
    order = _value_order(a, b, mask_BT, floor)
    if order is not None:
        return b.rows(np.asarray(order)), order, 0
    return b, None, _lag(a, b, mask_BT, floor)


def _row_order(a_BS: Ints, b_BS: Ints) -> list[int] | None:
    """order[i]: the row of b that holds row i of a. None where the rows are not the same ones."""
    places: dict[bytes, list[int]] = {}
    for row in range(len(b_BS)):
        places.setdefault(b_BS[row].tobytes(), []).append(row)
    order = []
    for row in range(len(a_BS)):
        left = places.get(a_BS[row].tobytes())
        if not left:
            return None
        order.append(left.pop(0))
    return order


def _value_order(a: Values, b: Values, mask_BT: Bools, floor: float) -> list[int] | None:
    """A permutation of B's rows, not the identity, under which what counts agrees but for one constant: a head's bias
    hides no order. None where there is none.
    """
    rows = len(a.values_BT)
    order: list[int] = []
    constants: list[float] = []
    for row in range(rows):
        columns = mask_BT[row]
        if columns.sum() < 2:
            return None
        d_BT = b.values_BT[:, columns] - a.values_BT[row, columns]
        apart = d_BT.std(axis=1)
        near = int(apart.argmin())
        if not apart[near] <= 10 * floor:
            return None
        order.append(near)
        constants.append(float(d_BT[near].mean()))
    if np.ptp(constants) > 20 * floor:
        return None
    return order if sorted(order) == list(range(rows)) and order != list(range(rows)) else None


def _lag(a: Values, b: Values, mask_BT: Bools, floor: float) -> int:
    """By how many tokens B's values come later than A's (negative: earlier), if that and one constant explain them;
    else 0.
    """
    for lag in (1, -1):
        source = slice(None, -1) if lag == 1 else slice(1, None)
        target = slice(1, None) if lag == 1 else slice(None, -1)
        both = mask_BT[:, source] & mask_BT[:, target]
        d = (b.values_BT[:, target] - a.values_BT[:, source])[both]
        if (
            both.sum() >= TOKENS
            and np.isfinite(d).all()
            and float(d.std()) <= floor
            and not is_constant(a.values_BT[mask_BT])
        ):
            return lag
    return 0
