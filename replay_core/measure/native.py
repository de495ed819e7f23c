"""The compiled loops for numpy's arrays: a pair's figures and one chunk's. Without: sums.py, statistics.py."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replay_core.kernel import loaded, moments_at

Rows = NDArray[Any]
F64 = NDArray[np.float64]

#: Dtypes of pairs, and the type in which the library adds them up.
_REALS = {"bfloat16": np.float32, "float16": np.float32, "float32": np.float64, "float64": np.float64}
_LINES = 7


def pair_lines(a_RC: Rows, b_RC: Rows, spans: NDArray[np.int64]) -> tuple[F64, F64, F64, int] | None:
    """Of two chunks: `sums.LINES` [7, R]; sums of d^2 and of a^2 per column [C]; how many elements differ.

    spans: first column and the one behind the last, of each stretch that is looked at [N, 2].

    None where there is no kernel, or none for what these are. Nothing is said of what is not finite: sums show it.
    """
    name = _name(a_RC.dtype)
    real = _REALS.get(name)
    if real is None or a_RC.dtype != b_RC.dtype or not (_is_plain(a_RC) and _is_plain(b_RC)):
        return None
    kernel = loaded()
    if kernel is None:
        return None
    rows, columns = a_RC.shape
    lines, found = np.empty((_LINES, rows)), np.zeros((2, columns), real)
    at = [_address(one) for one in (a_RC, b_RC, spans, lines, found)]
    second = at[4] + columns * found.itemsize
    differ = getattr(kernel, f"pair_{name}")(*at[:2], rows, columns, at[2], len(spans), at[3], rows, at[4], second)
    found = found.astype(np.float64)
    return lines, found[0], found[1], differ


def lines_of_files(
    dtype: str,
    files: tuple[tuple[int, int], tuple[int, int]],
    width: int,
    runs: NDArray[np.int64],
    step: int,
    massive: NDArray[np.intp],
    rooms: tuple[Rows, Rows],
) -> tuple[tuple[F64, F64, F64, int], F64, F64] | None:
    """The same of rows in two files, each a descriptor and an offset; massive columns are left out, and given apart.

    runs: first row of a, of b, and how many follow [N, 3]. `step` rows are read at once, and fit the rooms.

    Returns what `pair_lines` does, and both sides of the massive columns [R, M]; None where a file ends before.
    """
    library = loaded()
    assert library is not None
    rows = int(runs[:, 2].sum())
    spans = spans_between(massive, width)
    lines, columns, heavy = np.empty((_LINES, rows)), np.zeros((2, width)), np.empty((2, rows, massive.size))
    scratch = np.empty((2, width), _REALS[dtype])
    at = [_address(one) for one in (runs, spans, lines, columns[0], columns[1], heavy, *rooms, scratch)]
    differ = getattr(library, f"files_{dtype}")(
        *files[0], *files[1], width, at[0], len(runs), step, at[1], len(spans), at[2], rows, *at[3:]
    )
    return None if differ < 0 else ((lines, columns[0], columns[1], int(differ)), heavy[0], heavy[1])


def spans_between(massive: NDArray[np.intp], width: int) -> NDArray[np.int64]:
    """First column and the one behind the last of each stretch between the massive ones [N, 2]."""
    if not massive.size:
        return np.array([[0, width]], np.int64)
    edges = np.concatenate(([-1], massive, [width]))
    return np.stack((edges[:-1] + 1, edges[1:]), axis=1).astype(np.int64)


def moments(values: Rows) -> list[float] | None:
    """Of a flat chunk: `statistics.Accumulated`, in its order; None where numpy has to (`moments_at` says when)."""
    return moments_at(_address(values), values.size, str(values.dtype)) if _is_plain(values) else None


def _address(values: Rows) -> int:
    """Where the elements begin. `__array_interface__` says so in twice the time, for each array of each chunk."""
    return int(values.ctypes.data)


@cache
def _name(dtype: np.dtype[Any]) -> str:
    return str(dtype)


def _is_plain(values: Rows) -> bool:
    return bool(values.flags.c_contiguous and values.flags.aligned and values.dtype.isnative)
