"""Figures of pairs that another process measured: a line of JSON for each, by what the pair is.

The two that write and read it look at the same records in the same way, so a pair is known by its name, its records
and where its bytes lie. What is not there, is damaged or stands there twice is measured by whoever asks.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import asdict, replace

from replay_core.compare.judging.measuring import Measured
from replay_core.compare.judging.verdict import Rounded
from replay_core.compare.pairing.align import MicroBatchPair, Rowwise, TensorPair
from replay_core.errors import DumpError
from replay_core.file_spans import regular
from replay_core.measure.figures import ColumnFigures, ColumnGains, Element, PairFigures, RowFigures, Totals
from replay_core.measure.precision import Precision
from replay_core.records import FileBytes, Marks, Parts, Reduced, TensorRef

#: Pairs of fewer bytes a side are measured where they are judged: their figures are as long as they are.
WORTH_KEEPING = 1 << 16
#: A line holds a few numbers per row of a tensor.
_MOST_LINE = 1 << 28

_KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (Measured, PairFigures, Totals, RowFigures, ColumnFigures, ColumnGains, Element, Precision, Rounded)
}
#: Of the numbers that numpy makes: its booleans, integers, floats and complex ones.
_NUMBERS = "biufc"


def part_of(name: str, parts: int) -> int:
    """Which part, from 0, the tensors of a name belong to: the same in every process and version of Python."""
    return int.from_bytes(hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big") % parts


def is_worth_keeping(pair: TensorPair) -> bool:
    """Whether both sides are numbers that can be read, and large enough."""
    return pair.a is not None and pair.b is not None and all(
        ref.is_readable and not ref.is_text and ref.nbytes >= WORTH_KEEPING and _place(ref, Path()) is not None
        for ref in (pair.a[1], pair.b[1])
    )  # fmt: skip


def line_of(pair: TensorPair, micro_pair: MicroBatchPair, found: Measured, roots: tuple[Path, Path]) -> bytes:
    """A line that keeps what one look at a pair found. roots: where either run lies."""
    told = {"of": _known_by(pair, micro_pair, roots), "rows": found.rows is not None}
    line = json.dumps({**told, "found": _told(replace(found, rows=None))}, separators=(",", ":"))
    return line.encode() + b"\n"


class KeptFigures:
    """The figures in files of such lines, read one by one."""

    def __init__(self, files: Iterable[Path], roots: tuple[Path, Path]) -> None:
        self._roots = roots
        #: None where two lines say they are of one pair.
        self._lines: dict[str, tuple[Path, int, int] | None] = {}
        for path in files:
            at = 0
            with regular(path) as file:
                for line in iter(lambda: file.readline(_MOST_LINE), b""):
                    if line.startswith(b'{"of":"') and line.endswith(b"}\n"):
                        known_by = line[7:47].decode("ascii", "replace")
                        self._lines[known_by] = None if known_by in self._lines else (path, at, len(line))
                    at += len(line)

    def get(self, pair: TensorPair, micro_pair: MicroBatchPair) -> Measured | None:
        """What was found of a pair; None where that is not known.

        Raises:
            ShapesDifferError: its elements cannot face each other.
        """
        if not self._lines or not is_worth_keeping(pair):
            return None
        known_by = _known_by(pair, micro_pair, self._roots)
        place = self._lines.get(known_by)
        if place is None:
            return None
        path, at, length = place
        with suppress(DumpError, ValueError, LookupError, TypeError, RecursionError), regular(path) as file:
            file.seek(at)
            said = json.loads(file.read(length))
            found = _made(said["found"])
            if said["of"] == known_by and isinstance(found, Measured):
                assert pair.a is not None
                assert pair.b is not None
                return replace(found, rows=Rowwise(pair.a[1], pair.b[1], micro_pair) if said["rows"] else None)
        return None


def _known_by(pair: TensorPair, micro_pair: MicroBatchPair, roots: tuple[Path, Path]) -> str:
    """40 hex digits of what the pair is: its name and micro-batch, and of either side the record and place."""
    told: list[Any] = [pair.name, micro_pair.where, micro_pair.partial]
    for side, root in zip((pair.a, pair.b), roots, strict=True):
        assert side is not None
        record, ref = side
        told.append((str(record.key), _below(record.path, root), ref.name, ref.dtype, ref.shape, _place(ref, root)))
    return hashlib.blake2b(repr(told).encode("utf-8", "surrogatepass"), digest_size=20).hexdigest()


def _place(ref: TensorRef, root: Path) -> Any:
    """Where a tensor's bytes lie; None where that is no stretch of files."""
    source = ref.source
    if isinstance(source, FileBytes):
        return _below(source.path, root), source.offset, source.nbytes, source.strides, source.big_endian
    if isinstance(source, Marks):
        inner = _place(source.of, root)
        return None if inner is None else ("marks", inner)
    if isinstance(source, (Parts, Reduced)):
        inside = [(_place(part, root), part.shape) for part in source.parts]
        how = source.axis if isinstance(source, Parts) else source.how
        return None if any(place is None for place, _ in inside) else (how, inside)
    return None


def _below(path: Path, root: Path) -> str:
    return str(path.relative_to(root)) if path.is_relative_to(root) else path.name


def _told(value: Any) -> Any:
    """A value as JSON that `_made` makes the same value of, bit by bit."""
    if value is None or type(value) in (bool, int, str, float):
        return value
    if isinstance(value, np.ndarray):
        return {"array": value.dtype.str, "shape": value.shape, "bytes": base64.b64encode(value.tobytes()).decode()}
    if isinstance(value, np.generic):
        return {"number": value.dtype.str, "bytes": base64.b64encode(value.tobytes()).decode()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, tuple):
        return {"tuple": [_told(one) for one in value]}
    if isinstance(value, list):
        return [_told(one) for one in value]
    if isinstance(value, dict):
        return {"dict": [[_told(key), _told(one)] for key, one in value.items()]}
    if isinstance(value, Struct) and _KINDS.get(type(value).__name__) is type(value):
        return {
            "kind": type(value).__name__,
            "of": {name: _told(one) for name, one in asdict(value).items()},
        }
    raise TypeError(f"no figures are of {type(value).__name__}")


def _made(told: Any) -> Any:
    """The value that `_told` told of.

    Raises:
        ValueError, LookupError, TypeError: it is nothing that `_told` says.
    """
    if isinstance(told, list):
        return [_made(one) for one in told]
    if not isinstance(told, dict):
        return told
    if "array" in told or "number" in told:
        dtype = np.dtype(str(told.get("array") or told["number"]))
        if dtype.kind not in _NUMBERS:
            raise ValueError(f"no figures are of {dtype}")
        flat = np.frombuffer(base64.b64decode(told["bytes"], validate=True), dtype)
        return flat.reshape(told["shape"]).copy() if "array" in told else flat[()][0]
    if "complex" in told:
        return complex(*told["complex"])
    if "tuple" in told:
        return tuple([_made(one) for one in told["tuple"]])
    if "dict" in told:
        return {_made(key): _made(one) for key, one in told["dict"]}
    return _KINDS[told["kind"]](**{name: _made(one) for name, one in told["of"].items()})
