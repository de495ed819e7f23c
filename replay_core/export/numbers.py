"""The one way a number enters a document: finite as it is, else the word "nan", "inf" or "-inf"."""

from __future__ import annotations

import math
from typing import Any, TypeVar, cast

T = TypeVar("T")


def number(value: Any) -> int | float | str | bool | None:
    """A JSON number, or the word for what JSON cannot say. numpy scalars and None are welcome."""
    if hasattr(value, "item"):
        value = value.item()
    if value is None or isinstance(value, (bool, str, int)):
        return value
    if isinstance(value, complex):
        return str(value)
    real = float(value)
    if math.isnan(real):
        return "nan"
    if math.isinf(real):
        return "inf" if real > 0 else "-inf"
    return real


#: Most of a document; asking what else they might be takes longer than the rest of it.
_AS_THEY_ARE = frozenset({str, int, bool, type(None)})


def clean(value: T) -> T:
    """The same tree in which every number went through `number`, tuples are lists and keys are texts."""
    return cast(T, _cleaned(value))


def _cleaned(value: Any) -> Any:
    if type(value) in _AS_THEY_ARE or (type(value) is float and math.isfinite(value)):
        return value
    if isinstance(value, dict):
        return {str(key): inner if type(inner) in _AS_THEY_ARE else _cleaned(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [inner if type(inner) in _AS_THEY_ARE else _cleaned(inner) for inner in value]
    if hasattr(value, "tolist"):
        return _cleaned(value.tolist())
    return number(value)
