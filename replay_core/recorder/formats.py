"""The three forms of a record's file: pt, jsonl, safetensors. Standard library and the trainer's torch.

Whatever the form, a reader sees the same tree (`replay_core.dumps.native`):

pt            torch.save of the tree, in its zip archive.
jsonl         the tree as one line of JSON, tensors as nested lists, and `__tensors__`: dotted name -> dtype and
              shape. A number that is not finite is the text "nan", "inf" or "-inf", so that the line is JSON.
safetensors   the tensors under their dotted names; the rest of the tree in the metadata's `rldbg`, where
              {"__tensor__": name} stands for a tensor.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import IO, Any

from replay_core.dtypes import DTYPES
from replay_core.errors import RequestError
from replay_core.recorder import archive
from replay_core.recorder.values import is_tensor, raw

FORMATS = ("pt", "jsonl", "safetensors")

#: torch's names of dtypes -> those of safetensors; its readers know the rest since late versions only.
_CODES = {name: dtype.code for name, dtype in DTYPES.items() if dtype.code and not name.endswith(("fnuz", "e8m0fnu"))}


def write(form: str, content: dict[str, Any], file: IO[bytes]) -> None:
    """Write a tree of snapshots in the form.

    Raises:
        RequestError: the form cannot hold one of its tensors; names it.
    """
    _WRITERS[form](content, file)


def _write_pt(content: dict[str, Any], file: IO[bytes]) -> None:
    archive.write(content, file)


def _write_jsonl(content: dict[str, Any], file: IO[bytes]) -> None:
    tensors: dict[str, Any] = {}

    def plain(value: Any, name: str) -> Any:
        if is_tensor(value):
            dtype = str(value.dtype).removeprefix("torch.")
            if value.is_complex():
                raise RequestError("jsonl holds no complex tensor", tensor=name, found=dtype, hint="record it as pt")
            tensors[name] = {"dtype": dtype, "shape": list(value.shape)}
            wide = value.float() if dtype.startswith(("float8", "bfloat")) else value
            return _spelled(wide.tolist())
        if isinstance(value, Mapping):
            return {key: plain(inner, f"{name}.{key}" if name else key) for key, inner in value.items()}
        if isinstance(value, list):
            return [plain(inner, f"{name}.{position}") for position, inner in enumerate(value)]
        if isinstance(value, complex):
            raise RequestError("jsonl holds no complex number", tensor=name, hint="record it as pt")
        if isinstance(value, float) and not math.isfinite(value):
            tensors[name] = {"dtype": "number", "shape": []}
            return str(value)
        return value

    tree = plain(content, "")
    if tensors:
        tree["__tensors__"] = tensors
    file.write(json.dumps(tree, allow_nan=False).encode() + b"\n")


def _spelled(values: Any) -> Any:
    if isinstance(values, list):
        return [_spelled(value) for value in values]
    return str(values) if isinstance(values, float) and not math.isfinite(values) else values


def _write_safetensors(content: dict[str, Any], file: IO[bytes]) -> None:
    tensors: dict[str, Any] = {}

    def rest(value: Any, name: str) -> Any:
        if is_tensor(value):
            if str(value.dtype).removeprefix("torch.") not in _CODES:
                raise RequestError(
                    "safetensors has no such dtype", tensor=name, found=str(value.dtype), hint="record it as pt"
                )
            if name in tensors or name == "__metadata__":
                raise RequestError("two tensors of the record share a dotted name", tensor=name)
            tensors[name] = value
            return {"__tensor__": name}
        if isinstance(value, Mapping):
            return {key: rest(inner, f"{name}.{key}" if name else key) for key, inner in value.items()}
        if isinstance(value, list):
            return [rest(inner, f"{name}.{position}") for position, inner in enumerate(value)]
        if isinstance(value, complex):
            raise RequestError("safetensors holds no complex number", tensor=name, hint="record it as pt")
        return value

    tree = rest(content, "")
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "rldbg": json.dumps(tree)}}
    # Wide elements first: then every tensor is aligned without a hole between two.
    placed = sorted(tensors.items(), key=lambda entry: -entry[1].element_size())
    ends, at = {}, 0
    for name, tensor in placed:
        ends[name] = (at, at + tensor.numel() * tensor.element_size())
        at = ends[name][1]
    for name, tensor in tensors.items():
        code = _CODES[str(tensor.dtype).removeprefix("torch.")]
        header[name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": list(ends[name])}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for _, tensor in placed:
        file.write(raw(tensor))


_WRITERS: dict[str, Callable[[dict[str, Any], IO[bytes]], None]] = {
    "pt": _write_pt,
    "jsonl": _write_jsonl,
    "safetensors": _write_safetensors,
}
