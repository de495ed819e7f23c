"""Which elements of two arrays are equal: by value in their own types, or by their bits."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[Any]
Mask = NDArray[np.bool_]

#: The largest doubles below 2**63 and 2**64: a float past them is no 64-bit integer.
_INTEGER_SPAN = {"i": (-(2.0**63), 2.0**63), "u": (0.0, 2.0**64)}


def is_plain_float(values: Rows) -> bool:
    """A real floating type of native byte order, ml_dtypes' included."""
    kind = values.dtype.kind
    return (kind == "f" or (kind == "V" and values.dtype.names is None)) and values.dtype.isnative


def unequal(a: Rows, b: Rows) -> Mask:
    """Elements that differ, each in its own type: NaN equals NaN, 0 equals -0, 2**63 is not a float."""
    kinds = a.dtype.kind, b.dtype.kind
    if {*kinds} == {"i", "u"} and np.dtype(np.uint64) in (a.dtype, b.dtype):
        signed, unsigned = (a, b) if kinds[0] == "i" else (b, a)
        differs: Mask = (signed < 0) | (signed.astype(np.uint64) != unsigned.astype(np.uint64))
        return differs
    if kinds[0] in "iu" and kinds[1] in "fV":
        return _integer_against_float(a, b)
    if kinds[1] in "iu" and kinds[0] in "fV":
        return _integer_against_float(b, a)
    if a.dtype != b.dtype and "V" in kinds:  # ml_dtypes' own kinds
        wide = np.complex128 if "c" in kinds else np.float64
        a, b = a.astype(wide), b.astype(wide)
    differs = np.asarray(a != b)
    if differs.any() and a.dtype.kind not in "iub" and b.dtype.kind not in "iub":
        differs &= ~(_isnan(a) & _isnan(b))
    return differs


def _integer_against_float(whole: Rows, real: Rows) -> Mask:
    """An integer equals a float that is that integer; a double would not tell 2**53 from 2**53 + 1."""
    values = real.astype(np.float64)
    wide = np.uint64 if whole.dtype.kind == "u" else np.int64
    low, high = _INTEGER_SPAN[whole.dtype.kind]
    fits = (values >= low) & (values < high) & (values == np.trunc(values))
    return np.asarray(~fits | (np.where(fits, values, 0).astype(wide) != whole.astype(wide)))


def _isnan(values: Rows) -> Mask:
    missing: Mask = np.isnan(values if values.dtype.kind in "fc" else values.astype(np.float64))
    return missing


def unequal_bits(a: Rows, b: Rows) -> Mask:
    """Elements whose bits differ; all of them where the types do."""
    a, b = (values.astype(values.dtype.newbyteorder("="), order="C") for values in (a, b))
    if a.dtype != b.dtype:
        return np.ones(a.shape, dtype=np.bool_)
    raw_a, raw_b = (values.view(np.uint8).reshape(*values.shape, -1) for values in (a, b))
    return np.asarray((raw_a != raw_b).any(axis=-1))
