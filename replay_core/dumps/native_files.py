"""The three forms of a native record's file, read back into the tree that was recorded.

`replay_core.recorder.formats` says how they are written. Tensors of a `.pt` or `.safetensors` file stay where
they lie; those of a `.jsonl` line are numbers of the line itself.
"""

from __future__ import annotations

import json
import os
from math import prod
from pathlib import Path
from typing import Any

from replay_core.budget import reading, spend_bytes
from replay_core.dtypes import ITEMSIZE
from replay_core.dumps.containers import read_container
from replay_core.dumps.containers.torch_rebuild import geometry
from replay_core.errors import DumpError
from replay_core.file_spans import regular
from replay_core.records import Inline, TensorRef

#: A line longer than this is refused before it is parsed.
MAX_LINE = 1 << 30
_NOT_FINITE = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}


def read_tree(path: Path) -> Any:
    """A record's tree: nested dicts and lists, tensors as TensorRefs.

    Raises:
        DumpError: the file cannot be read, or is not what the recorder writes.
    """
    if path.suffix == ".jsonl":
        return _jsonl(path)
    content = read_container(path)
    outline = content.metadata.get("rldbg") if content.container == "safetensors" else None
    if outline is None:
        return content.tree
    try:
        return _filled(json.loads(outline), content.tree)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DumpError(f"the record's metadata cannot be read: {error}", file=str(path)) from None


def _filled(outline: Any, tensors: dict[str, TensorRef]) -> Any:
    if isinstance(outline, dict):
        if set(outline) == {"__tensor__"}:
            return tensors[outline["__tensor__"]]
        return {key: _filled(value, tensors) for key, value in outline.items()}
    if isinstance(outline, list):
        return [_filled(value, tensors) for value in outline]
    return outline


def _jsonl(path: Path) -> Any:
    try:
        with reading(path), regular(path) as file:
            # Asking for more than there is takes that much memory first.
            text = file.read(min(os.fstat(file.fileno()).st_size, MAX_LINE) + 1)
            spend_bytes(len(text), "its one line")
        if len(text) > MAX_LINE:
            raise DumpError("the line is too long to read", file=str(path), expected=f"at most {MAX_LINE:,} bytes")
        tree = json.loads(text)
        if not isinstance(tree, dict):
            return tree
        told = tree.pop("__tensors__", {})
        return _with_tensors(tree, "", told) if told else tree
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DumpError(f"the record is not the line of JSON it should be: {error}", file=str(path)) from None


def _with_tensors(value: Any, name: str, told: dict[str, Any]) -> Any:
    if name in told:
        dtype, shape = told[name]["dtype"], geometry(tuple(told[name]["shape"]), None).shape
        if dtype == "number":
            return _NOT_FINITE[value]
        if dtype not in ITEMSIZE:
            raise ValueError(f"there is no dtype {dtype!r}")
        flat = _flat(value, len(shape))
        if len(flat) != prod(shape):
            raise ValueError(f"{name} has {len(flat)} values, not {prod(shape)}")
        return TensorRef(name, dtype, shape, Inline(flat if shape else flat[0]))
    if isinstance(value, dict):
        return {key: _with_tensors(inner, f"{name}.{key}" if name else key, told) for key, inner in value.items()}
    if isinstance(value, list):
        return [_with_tensors(inner, f"{name}.{position}", told) for position, inner in enumerate(value)]
    return value


def _flat(value: Any, depth: int) -> list[Any]:
    if depth == 0:
        return [_NOT_FINITE[value] if isinstance(value, str) else value]
    if depth == 1:
        return [_NOT_FINITE[item] if isinstance(item, str) else item for item in value]
    return [number for row in value for number in _flat(row, depth - 1)]
