"""Rows of records into columns of tensors: what line by line and table files have instead of arrays.

A row is a mapping; a column is one `TensorRef` over all rows, row i being sample i. Lists of numbers are
kept as bytes the moment they are seen, so that a file's numbers are held once and not as Python objects:

    {"id": 1, "logprobs": [-.5, null]}       id        int64   [n]
    {"id": 2, "logprobs": [-.1]}        ->   logprobs  float64 [3] of rows (2, 1), sentinel "null is stored as NaN"

None is no value: a column of nothing else is left out, and among numbers it becomes NaN, said so.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct

from replay_core.budget import spend_bytes, spend_values
from replay_core.errors import DumpError
from replay_core.records import Inline, TensorRef

#: Cells and letters that are paid for at a time.
_TRANCHE = 1 << 16
MAX_COLUMNS = 20_000
MAX_DEPTH = 32

NULL = "null is stored as NaN"
ROUNDED = "integers of more than 64 bits are rounded"

_DTYPES = {"b": "bool", "q": "int64", "d": "float64", "f": "float32", "i": "int32", "h": "int16", "B": "uint8",
           "Q": "uint64"}  # fmt: skip
_CODES = {name: code for code, name in _DTYPES.items()}
_NAN = float("nan")


class _Dense(Struct):
    """A row's numbers: flat, with their shape."""

    numbers: array[Any]
    shape: tuple[int, ...]
    nulls: bool


class Table:
    """Columns that grow row by row."""

    def __init__(self, prefix: str = "", depth: int = 0) -> None:
        self.rows = 0
        self._prefix = prefix
        self._depth = depth
        self._columns: dict[str, list[Any]] = {}
        #: Cells and letters that are not paid for yet.
        self._cells = self._texts = 0

    def add(self, row: Mapping[Any, Any]) -> None:
        """One more row.

        Raises:
            BudgetError: more cells than what is stored may cost.
            DumpError: more columns than any table of samples has.
        """
        before = len(self._columns)
        for key, value in row.items():
            column = self._columns.setdefault(str(key), [])
            missing = self.rows - len(column)
            if missing < 0:
                continue  # two keys of one row that read the same
            if type(value) is str:
                self._texts += len(value)
            column.extend([None] * missing)
            column.append(_compact(value))
        self.rows += 1
        # A row for every column and a column for every row is how a small file describes a huge table.
        self._cells += len(self._columns) + (len(self._columns) - before) * (self.rows - 1)
        if len(self._columns) > MAX_COLUMNS:
            expected, found = f"at most {MAX_COLUMNS:,}", f"{len(self._columns):,}"
            raise DumpError("the table has more columns than any of samples", expected=expected, found=found)
        if self._cells + self._texts > _TRANCHE:
            self._pay()

    def _pay(self) -> None:
        spend_values(self._cells, f"the {self.rows:,} rows of {len(self._columns):,} columns")
        spend_bytes(self._texts, "texts of a table")
        self._cells = self._texts = 0

    def fields(self, dtypes: Mapping[str, str] | None = None) -> dict[str, TensorRef]:
        """Every column as a tensor, in the order the columns appeared. `dtypes`: what the file itself declares.

        Raises:
            DumpError: nested deeper than any record is.
        """
        found: dict[str, TensorRef] = {}
        self._pay()
        for key, column in self._columns.items():
            column.extend([None] * (self.rows - len(column)))
            name = self._prefix + key
            for ref in self._column(name, column, (dtypes or {}).get(name)):
                found.setdefault(ref.name, ref)
        return found

    def _column(self, name: str, values: list[Any], declared: str | None) -> Iterator[TensorRef]:
        present = [value for value in values if value is not None]
        kinds = set(map(type, present))
        nulls = len(present) < len(values)
        if not kinds:
            return
        if kinds <= {bool, int, float}:
            yield _scalars(name, values, kinds, nulls, declared)
        elif kinds == {str}:
            texts = ["" if value is None else value for value in values]
            yield TensorRef(name, "text", (len(texts),), Inline(texts), alignment="sample",
                            sentinel="null is shown as an empty text" if nulls else None)  # fmt: skip
        elif kinds == {dict}:
            if self._depth >= MAX_DEPTH:
                raise DumpError(f"the table is nested deeper than {MAX_DEPTH} levels", tensor=name)
            inner = Table(f"{name}.", self._depth + 1)
            for value in values:
                inner.add(value or {})
            yield from inner.fields().values()
        elif kinds == {_Dense} and (numbers := _numbers(name, values, declared)) is not None:
            yield numbers
        elif kinds <= {list, _Dense} and all(_is_texts(value) for value in present):
            parts = [[] if value is None or isinstance(value, _Dense) else value for value in values]
            flat = [text for part in parts for text in part]
            yield TensorRef(name, "text", (len(flat),), Inline(flat), rows=tuple(map(len, parts)))
        else:
            texts = ["" if value is None else _as_text(value) for value in values]
            yield TensorRef(name, "text", (len(texts),), Inline(texts), alignment="sample")


def _scalars(name: str, values: list[Any], kinds: set[type], nulls: bool, declared: str | None) -> TensorRef:
    said = [NULL] if nulls else []
    numbers = None
    for code in "d" if nulls or float in kinds else "b" if kinds == {bool} else "qQ":  # a hash is an id of 64 bits
        try:
            numbers = array(code, [_NAN if value is None else value for value in values])
            break
        except OverflowError:
            continue
    if numbers is None:
        numbers = array("d", [_NAN if value is None else _real(value) for value in values])
        said.append(ROUNDED)
    numbers, dtype = _declared(numbers, declared)
    return TensorRef(name, dtype, (len(values),), Inline(numbers.tobytes()), alignment="sample",
                     sentinel="; ".join(said) or None)  # fmt: skip


def _numbers(name: str, values: list[Any], declared: str | None) -> TensorRef | None:
    """Rows of numbers end to end; a matrix when equally long; None when their inner shapes differ."""
    dense = [value for value in values if value is not None]
    shapes = {value.shape[1:] for value in dense if value.shape[0]}
    if len(shapes) > 1:
        return None
    inner = shapes.pop() if shapes else ()
    codes = {value.numbers.typecode for value in dense if value.numbers}
    code = "d" if "d" in codes or not codes else "q" if "q" in codes else "b"
    flat = array(code)
    for value in dense:
        flat.extend(value.numbers if value.numbers.typecode == code else array(code, value.numbers))
    lengths = tuple(0 if value is None else value.shape[0] for value in values)
    flat, dtype = _declared(flat, declared)
    sentinel = NULL if any(value.nulls for value in dense) else None
    if len(set(lengths)) == 1:
        return TensorRef(name, dtype, (len(values), lengths[0], *inner), Inline(flat.tobytes()), sentinel=sentinel)
    return TensorRef(name, dtype, (sum(lengths), *inner), Inline(flat.tobytes()), rows=lengths, sentinel=sentinel)


def _declared(numbers: array[Any], declared: str | None) -> tuple[array[Any], str]:
    """The numbers in the type that the file's own schema gives them."""
    code = _CODES.get(declared or "")
    if code is None or code == numbers.typecode or (numbers.typecode == "d" and code != "f"):
        return numbers, _DTYPES[numbers.typecode]
    return array(code, numbers), _DTYPES[code]


def _compact(value: Any) -> Any:
    if not isinstance(value, (list, tuple)):
        return value
    dense = dense_of(value)
    if dense is None:
        return value if isinstance(value, list) else list(value)
    numbers, shape, nulls = dense
    return _Dense(numbers, shape, nulls)


def dense_of(value: Any) -> tuple[array[Any], tuple[int, ...], bool] | None:
    """Numbers, shape and whether one was null, of a list of numbers or of equally long lists of them."""
    shape = [len(value)]
    flat = value
    while flat and isinstance(flat[0], (list, tuple)) and len(shape) < MAX_DEPTH:
        width = len(flat[0])
        if not all(isinstance(row, (list, tuple)) and len(row) == width for row in flat):
            return None
        flat = [number for row in flat for number in row]
        shape.append(width)
    kinds = set(map(type, flat))
    nulls = type(None) in kinds
    if not kinds <= {bool, int, float, type(None)}:
        return None
    if nulls:
        return array("d", [_NAN if number is None else _real(number) for number in flat]), tuple(shape), True
    code = "b" if kinds == {bool} else "q" if kinds <= {int, bool} and kinds else "d"
    try:
        return array(code, flat), tuple(shape), False
    except OverflowError:
        return array("d", map(_real, flat)), tuple(shape), False


def _real(number: Any) -> float:
    try:
        return float(number)
    except OverflowError:
        return float("inf") if number > 0 else float("-inf")


def _is_texts(value: Any) -> bool:
    if isinstance(value, _Dense):
        return value.shape == (0,)
    return all(isinstance(item, str) for item in value)


def _as_text(value: Any) -> str:
    if isinstance(value, _Dense):
        value = value.numbers.tolist()
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
