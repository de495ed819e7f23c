"""The figures of two single numbers, as `measure.pair` has them of two tensors: a log is made of nothing else."""

from __future__ import annotations

import math

from replay_core.measure.figures import ColumnFigures, Element, PairFigures, RowFigures, Totals
from replay_core.measure.precision import Precision

#: Of numbers between these (and of 0) every sum of the figures is a plain double.
_LEAST, _MOST = 1e-70, 1e70
_WHOLE = 2**53
_ROWS, _COLUMNS, _PRECISION = RowFigures(width=1), ColumnFigures(), (Precision(), Precision())


def figures_of_numbers(
    x: float, y: float, *, exact: bool, limits: tuple[float, float] | None = None
) -> PairFigures | None:
    """What `figures` says of [[x]] and [[y]], rows let go, without an array; None where that needs one."""
    if not (_is_plain(x) and _is_plain(y)):
        return None
    a, b = float(x), float(y)
    found = PairFigures(
        compared=1, beyond=None if limits is None else 0, limits=limits, rows=_ROWS, columns=_COLUMNS,
        precision=_PRECISION,
    )  # fmt: skip
    found.kept["lines"] = [(0.0, 0.0)]
    if not (math.isfinite(a) and math.isfinite(b)):
        if exact:
            return None
        found.nan_a, found.nan_b = int(math.isnan(a)), int(math.isnan(b))
        if a != b and not (found.nan_a and found.nan_b):
            found.mismatched = found.nonfinite_mismatched = 1
            found.nonfinite = found.first = Element((0, 0), a, b)
            found.beyond = None if limits is None else _past(a, b, limits)
        return found
    d = b - a
    square = a * a
    found.total = Totals(1, d, d * d, square, a * d, square * square)
    if d:
        found.mismatched = 1
        found.first = found.greatest = Element((0, 0), a, b)
        found.max_abs = abs(d)
        found.max_rel = abs(d / a) if a else math.inf
        found.kept["lines"] = [(found.max_abs, found.max_abs / found.max_rel)]
        if limits is not None:
            found.beyond = _past(a, b, limits)
    return found


def _past(a: float, b: float, limits: tuple[float, float]) -> int:
    return int(not abs(b - a) <= limits[0] + limits[1] * abs(a))


def _is_plain(value: object) -> bool:
    if type(value) is float:
        return value == 0 or _LEAST < abs(value) < _MOST or not math.isfinite(value)
    return type(value) in (int, bool) and -_WHOLE < value < _WHOLE  # type: ignore[operator]
