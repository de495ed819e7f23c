"""safetensors: eight bytes of length, a JSON header, the bytes.

The header is checked as the format's own reader checks it: known dtypes, sizes that follow from shapes,
bytes that cover the buffer without hole or overlap.
"""

from __future__ import annotations

import json
from math import prod
from typing import Any

from replay_core import naming
from replay_core.budget import is_walkable
from replay_core.dtypes import DTYPES, ITEMSIZE
from replay_core.dumps.containers.loading import Loading
from replay_core.dumps.containers.torch_rebuild import geometry, overlapping
from replay_core.records import FileBytes, TensorRef, Unreadable

#: What the format's own reader allows.
MAX_HEADER = 100_000_000
_DTYPES = {dtype.code: dtype.name for dtype in DTYPES.values() if dtype.code}


def read_safetensors(loading: Loading) -> tuple[dict[str, TensorRef], dict[str, str]]:
    """The tensors as their names say they are used (the format's writer sorts them by dtype and alphabet), and the
    file's metadata.

    Raises:
        DumpError: the header is not one that the format allows.
    """
    region = loading.region
    size = int.from_bytes(region.read(region.start, 8), "little")
    if size > MAX_HEADER:
        raise loading.malformed(
            "a safetensors header too large", expected=f"at most {MAX_HEADER}", found=f"{size} bytes"
        )
    try:
        header = json.loads(
            region.read(region.start + 8, size), object_pairs_hook=lambda pairs: _unique(loading, pairs)
        )
    except (ValueError, RecursionError) as error:
        raise loading.malformed(f"the safetensors header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise loading.malformed("the safetensors header is not an object")
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise loading.malformed("the safetensors metadata are not texts")
    start = region.start + 8 + size
    spans: list[tuple[int, int]] = []
    tree = {name: _tensor(loading, name, entry, start, spans) for name, entry in sorted(header.items(), key=_used)}
    at = 0
    for begin, end in sorted(spans):
        if begin != at:
            raise loading.malformed(
                "safetensors with a hole or an overlap", expected=f"byte {at}", found=f"byte {begin}"
            )
        at = end
    if start + at > region.end:
        raise region.truncated(start + at)
    if start + at < region.end:
        raise loading.malformed(
            "bytes that belong to no tensor", expected=f"{start + at - region.start} bytes",
            found=f"{region.end - region.start} bytes",
        )  # fmt: skip
    return tree, metadata


def _used(entry: tuple[str, Any]) -> naming.Place:
    return naming.called(entry[0])


def _unique(loading: Loading, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise loading.malformed("the safetensors header names a tensor twice")
    return entries


def _tensor(loading: Loading, name: str, entry: Any, start: int, spans: list[tuple[int, int]]) -> TensorRef:
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        raise loading.malformed(f"tensor {name:.80} has no dtype")
    offsets, shape, code = entry.get("data_offsets"), entry.get("shape"), entry["dtype"]
    if not isinstance(offsets, list) or len(offsets) != 2 or any(type(n) is not int for n in offsets):
        raise loading.malformed(f"tensor {name:.80} has no data offsets")
    begin, end = offsets
    try:
        if not isinstance(shape, list) or any(type(length) is not int for length in shape):
            raise ValueError("not a list of whole numbers")
        size = geometry(tuple(shape), None).shape
    except ValueError:
        raise loading.malformed(f"tensor {name:.80} has an impossible shape", found=f"{shape!r:.80}") from None
    if not 0 <= begin <= end:
        raise loading.malformed(f"tensor {name:.80} ends before it starts")
    spans.append((begin, end))
    dtype = _DTYPES.get(code)
    if dtype is None:
        return TensorRef("", code, size, Unreadable(f"numpy has no dtype like safetensors' {code}"))
    nbytes = prod(size) * ITEMSIZE[dtype]
    if end - begin != nbytes:
        raise loading.malformed(f"tensor {name:.80} is not as long as its shape", expected=f"{nbytes} bytes",
                                found=f"{end - begin} bytes")  # fmt: skip
    if not is_walkable(size, prod(size), nbytes):
        return TensorRef("", dtype, size, Unreadable(overlapping(size, nbytes)))
    return TensorRef("", dtype, size, FileBytes(loading.region.path, start + begin, nbytes))
