"""Curves of loggers as runs of scalars: TensorBoard event files, wandb offline runs. Neither library is needed.

events.out.tfevents.*     TFRecords (length, checksum, bytes, checksum) of tensorflow.Event messages
run-*.wandb               a LevelDB log (blocks of 32 KiB) of wandb.Record messages; rows of history
metrics/train/reward      MLflow's folder of one run: a file for each metric, `milliseconds value step` a line

Only scalars are read: pictures, histograms and tables are passed over. Checksums are not verified.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from replay_core.budget import reading, spend_bytes, spend_values
from replay_core.dumps.containers import wire
from replay_core.dumps.dialect import Dialect, Index, alone, any_of
from replay_core.dumps.fields import flatten
from replay_core.dumps.listing import listing
from replay_core.dumps.words import metric_name
from replay_core.errors import DumpError
from replay_core.file_spans import kept_while_unchanged, regular
from replay_core.records import Problem, RecordKey, TensorRef
from replay_core.regexes import regex

#: A scalar's message is short; a longer record holds a picture or is no record.
_LONGEST = 1 << 26
_WANDB_HEAD = b":W&B"
_BLOCK = 1 << 15
#: Of a record inside a block (checksum, length, kind), and of the whole file.
_HEADER = 7
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4

#: How a line of MLflow's begins: milliseconds since 1970.
_MLFLOW = regex(rb"^\d{11,12}")
_MLFLOW_LINE = regex(r"^\d{12,14} (\S{1,40}) (\d{1,12})$")

_Steps = dict[int | None, dict[str, float]]


def _files(path: Path) -> Iterator[Path]:
    for folder in listing(path).folders:
        for entry in folder.names:
            if ".tfevents." in entry or entry.endswith(".wandb"):
                file = folder.file(entry)
                if _reader(file) is not None:
                    yield file
    yield from _of_mlflow(path)


def _of_mlflow(path: Path) -> Iterator[Path]:
    """The files of one run's metrics; none where several runs lie side by side, which no line tells apart."""
    if path.is_file():
        return
    folders = [folder for folder in listing(path).folders if _mlflow_root(folder.path) is not None]
    if len({_mlflow_root(folder.path) for folder in folders}) != 1:
        return
    for folder in folders:
        yield from (file for name in folder.names if _reader(file := folder.file(name)) == "mlflow")


def _mlflow_root(folder: Any) -> Path | None:
    """The folder of a run's metrics that a folder is, or lies in."""
    return next((one for one in (Path(folder), *Path(folder).parents) if one.name == "metrics"), None)


def _reader(file: Path) -> str | None:
    try:
        with regular(file) as opened:
            head = opened.read(12)
    except DumpError:
        return None
    if head[:4] == _WANDB_HEAD:
        return "wandb"
    if _MLFLOW.match(head) is not None and _mlflow_root(file.parent) is not None:
        return "mlflow"
    # The first record of an event file is its version: `brain.Event:2`, a short one.
    return "tfevents" if len(head) == 12 and struct.unpack("<Q", head[:8])[0] < 1 << 12 else None


def index(path: Path) -> Index:
    found = Index([])
    for file in _files(path):
        try:
            steps, problem = _parsed(file)
        except DumpError as error:
            found.problems.append(Problem(str(file), error.message))
            continue
        if problem:
            found.problems.append(Problem(str(file), problem))
        if not steps:
            found.problems.append(Problem(str(file), "the file holds no scalar"))
        found.files += [(RecordKey(step, None, None, None, "training_metrics"), file) for step in steps]
    return found


def several(keys: Sequence[RecordKey], path: Path) -> Iterator[list[TensorRef] | DumpError]:
    """The scalars of some steps."""
    steps = _parsed(path)[0]
    for key in keys:
        values = steps.get(key.step)
        if not values:
            yield DumpError(f"the file holds no scalar of step {key.step}", file=str(path))
            continue
        fields = flatten(values)
        for ref in fields:
            ref.canonical = metric_name(ref.name)
        yield fields


@kept_while_unchanged(8)
def _parsed(file: Path) -> tuple[_Steps, str | None]:
    """Steps in order with their scalars, and what is wrong with the file's end."""
    steps: _Steps = {}
    problem = None
    if _reader(file) == "mlflow":
        return _of_lines(file), None
    is_wandb = _reader(file) == "wandb"
    count = 0
    try:
        with reading(file):
            for message in _wandb_records(file) if is_wandb else _tf_records(file):
                count += 1
                spend_values(1, "records of a curve")
                step, values = _history(message) if is_wandb else _event(message)
                if values:
                    steps.setdefault(step, {}).update(values)
    except wire.WireError as error:
        problem = f"the file ends in what is no record, after {count:,} records: {error}"
    ordered = sorted(steps, key=lambda step: -1 if step is None else step)
    return {step: steps[step] for step in ordered}, problem


def _of_lines(file: Path) -> _Steps:
    """The steps of MLflow's file of one metric, which is called as its path is."""
    root = _mlflow_root(file.parent)
    name = str(file.relative_to(root)) if root is not None else file.name
    steps: _Steps = {}
    with reading(file), regular(file) as opened:
        for line in opened:
            spend_values(1, "records of a curve")
            if (said := _MLFLOW_LINE.match(line.decode("ascii", "replace").strip())) is not None:
                value = _json_number(said[1].encode())
                if value is not None:
                    steps.setdefault(int(said[2]), {})[name] = value
    return dict(sorted(steps.items(), key=lambda each: each[0] or 0))


def _tf_records(file: Path) -> Iterator[bytes]:
    with regular(file) as opened:
        while head := opened.read(12):
            size = struct.unpack("<Q", head[:8])[0] if len(head) == 12 else _LONGEST + 1
            if size > _LONGEST:
                raise wire.WireError("a record's length is cut or impossible")
            data = opened.read(size + 4)
            if len(data) < size + 4:
                raise wire.WireError("its writer was stopped, or still writes")
            yield data[:size]


def _event(message: bytes) -> tuple[int | None, dict[str, float]]:
    step = 0  # a step of 0 is not written
    values: dict[str, float] = {}
    for field, kind, value in wire.fields(message):
        if field == 2 and kind == wire.VARINT and isinstance(value, int):
            step = wire.signed(value)
        elif field == 5 and isinstance(value, bytes):
            for one in wire.texts(value, 1):
                tag, scalar = _summary(one)
                if tag and scalar is not None:
                    values[tag] = scalar
    return step, values


def _summary(message: bytes) -> tuple[str, float | None]:
    tag, scalar = "", None
    for field, kind, value in wire.fields(message):
        if field == 1 and isinstance(value, bytes):
            tag = value.decode(errors="replace")
        elif field == 2:
            scalar = wire.number(kind, value)
        elif field == 8 and isinstance(value, bytes):
            scalar = _tensor(value)
    return tag, scalar


def _tensor(message: bytes) -> float | None:
    """A TensorProto of one float (dtype 1) or double (2), in its content or its list."""
    dtype, content = 0, b""
    for field, kind, value in wire.fields(message):
        if field == 1 and isinstance(value, int):
            dtype = value
        elif field == 4 and isinstance(value, bytes):
            content = value
        elif field in (5, 6) and not content:
            content = value if isinstance(value, bytes) and kind != wire.VARINT else b""
    form = {1: "<f", 2: "<d"}.get(dtype)
    return float(struct.unpack(form, content)[0]) if form and len(content) == struct.calcsize(form) else None


def _wandb_records(file: Path) -> Iterator[bytes]:
    with regular(file) as opened:
        at = len(opened.read(_HEADER))
        parts: list[bytes] = []
        held = 0
        while True:
            left = _BLOCK - at % _BLOCK
            if left < _HEADER:
                if len(opened.read(left)) < left:
                    break
                at += left
                continue
            head = opened.read(_HEADER)
            if not head:
                break
            if len(head) < _HEADER:
                raise wire.WireError("its writer was stopped, or still writes")
            size, kind = struct.unpack("<HB", head[4:])
            data = opened.read(size)
            at += _HEADER + len(data)
            if len(data) < size or kind not in (_FULL, _FIRST, _MIDDLE, _LAST):
                raise wire.WireError("its writer was stopped, or still writes")
            if kind in (_FULL, _FIRST):
                parts, held = [], 0
            parts.append(data)
            held += len(data)
            spend_bytes(_HEADER + len(data), "records of a curve")
            if held > _LONGEST:
                raise wire.WireError("a record longer than any row of history")
            if kind in (_FULL, _LAST):
                yield b"".join(parts)


def _history(message: bytes) -> tuple[int | None, dict[str, float]]:
    step: int | None = None
    values: dict[str, float] = {}
    for history in wire.texts(message, 2):
        for field, kind, value in wire.fields(history):
            if not isinstance(value, bytes) or kind != wire.BYTES:
                continue
            if field == 1:
                key, number = _item(value)
                if key and number is not None:
                    values[key] = number
            elif field == 2:
                step = next((wire.signed(n) for f, _, n in wire.fields(value) if f == 1 and isinstance(n, int)), 0)
    told = values.pop("_step", None)
    if told is not None and told == told and abs(told) < 2**53:
        step = int(told)
    return step, {key: number for key, number in values.items() if not key.startswith("_")}


def _item(message: bytes) -> tuple[str, float | None]:
    path: list[str] = []
    number: float | None = None
    for field, kind, value in wire.fields(message):
        if isinstance(value, int):
            number = float(wire.signed(value)) if field == 5 else number
        elif field in (1, 2):
            path.append(value.decode(errors="replace"))
        elif field in (8, 16):
            number = _json_number(value)
        elif field == 6:
            number = wire.number(kind, value)
    return ".".join(path), number


def _json_number(text: bytes) -> float | None:
    """The value, if it is a number: wandb writes NaN and Infinity as words, some versions as strings."""
    try:
        value = json.loads(text)
        if isinstance(value, str) and value in ("NaN", "Infinity", "-Infinity"):
            return float(value.replace("Infinity", "inf"))
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
    except (ValueError, RecursionError, OverflowError):
        return None


DIALECT = Dialect(
    "curves",
    "names",
    any_of(_files),
    index,
    alone(several),
    several=several,
    grows=r"\.tfevents\.|\.wandb$",
    is_container=False,
)
