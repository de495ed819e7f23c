"""How many numbers and texts a framework's files hold, by the name of their field, counted without rldbg.

The files are read by what wrote them (torch, pickle, json, pyarrow), classes of a framework as empty
ones; then every number is counted under the last name above it. Only for files of tests/data: pickles are run.
"""

from __future__ import annotations

import io
import json
import math
import pickle
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

#: Parts of containers that are no names of fields: a pickled class's own, what numpy and tensordict wrap values in.
_NO_NAMES = frozenset({"data", "value", "args", "state", "batch_dict", "non_tensor_batch", "meta_info", "samples"})
_TENSORDICT = "_rebuild_tensordict_files_consolidated"
#: What frameworks write batches in; a dump's other files (tokenizers, settings, weights) hold none.
_READ = frozenset({".pt", ".dp", ".pkl", ".jsonl", ".parquet"})
#: Packages whose own classes are made; those of a framework would need it, and may be here or not.
_KNOWN = frozenset({"torch", "__builtin__", "numpy", "collections", "builtins", "_io", "_codecs"})


class _Stub:
    """An instance of a framework's class: what it was made of."""

    def __init__(self, *args: Any, **named: Any) -> None:
        self.parts: list[Any] = [*args, named]

    def __setstate__(self, state: Any) -> None:
        self.parts = [*getattr(self, "parts", []), state]

    def __setitem__(self, name: Any, value: Any) -> None:
        self.parts.append({name: value})


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] in _KNOWN:
            return super().find_class(module, name)
        return type(name, (_Stub,), {})


_PICKLE = SimpleNamespace(Unpickler=_Unpickler, load=lambda file, **_: _Unpickler(file).load(), __name__="counted")


def in_files(path: Path) -> Counter[str]:
    """Name of a field -> how many numbers or texts the files under a path hold of it."""
    found: Counter[str] = Counter()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.suffix in _READ and file.is_file():
            for tree in _trees(file):
                _count(tree, "", found)
    return found


def _trees(file: Path) -> Iterator[Any]:
    if file.suffix == ".jsonl":
        yield from map(json.loads, file.read_text(encoding="utf-8").splitlines())
    elif file.suffix == ".parquet":
        import pyarrow.parquet

        yield from pyarrow.parquet.read_table(file).to_pylist()
    else:
        yield _loaded(file.read_bytes())


def _loaded(data: bytes) -> Any:
    import torch

    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False, pickle_module=_PICKLE)
    except (RuntimeError, pickle.UnpicklingError, AttributeError):
        return _Unpickler(io.BytesIO(data)).load()


def _count(value: Any, name: str, found: Counter[str], depth: int = 0) -> None:
    if hasattr(value, "is_nested") and value.is_nested:
        found[name] += sum(row.numel() for row in value.unbind())
    elif hasattr(value, "numel"):
        found[name] += value.numel()
    elif isinstance(value, np.ndarray) and value.dtype != object:
        found[name] += value.size
    elif isinstance(value, bytes):
        if value[:2] in (b"PK", b"\x80\x02", b"\x80\x04", b"\x80\x05"):
            _count(_loaded(value), name, found, depth + 1)
    elif isinstance(value, (bool, int, float, str)):
        found[name] += 1
    elif isinstance(value, dict):
        for key, inner in value.items():
            _count(inner, _last(key) if _is_name(key) else name, found, depth + 1)
    elif isinstance(value, (list, tuple, np.ndarray)):
        for inner in value:
            _count(inner, name, found, depth + 1)
    elif isinstance(value, io.BytesIO):
        _count(_loaded(value.getvalue()), name, found, depth + 1)
    elif type(value).__name__ == _TENSORDICT:
        for leaf, (_, shape, *_rest) in value.parts[0]["leaves"].items():
            found[leaf] += math.prod(shape)
    elif isinstance(value, _Stub) and depth < 60:
        for part in getattr(value, "parts", ()):
            _count(part, name, found, depth + 1)


def _is_name(key: Any) -> bool:
    return isinstance(key, str) and not key.startswith("_") and key not in _NO_NAMES


def in_rldbg(path: Path) -> Counter[str]:
    """The same, of what rldbg lists: a name's last part, its second copies of one name with the first."""
    from replay_core.dumps import open_run

    found: Counter[str] = Counter()
    for record in open_run(path).records:
        for ref in record.tensors():
            if ref.is_readable:
                found[_last(ref.name)] += ref.numel
    return found


def _last(name: str) -> str:
    """The last part of a name that is neither a place in a list nor a second copy's number."""
    parts = [part for part in name.partition("#")[0].split(".") if not part.isdecimal()]
    return parts[-1] if parts else name


def lost(path: Path) -> dict[str, tuple[int, int]]:
    """Field -> (in the files, listed), where fewer are listed than are there."""
    there, listed = in_files(path), in_rldbg(path)
    return {name: (count, listed[name]) for name, count in there.items() if name and listed[name] < count}
