"""A TensorDict kept as a folder (`memmap`, `save`): meta.json and a .memmap of raw numbers per tensor.

A tensordict inside is a folder in it, and so is a column that is no tensor. The outermost folder is one record, named
as verl names its batches, which are what is kept so.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from replay_core import pages
from replay_core.budget import spend_values
from replay_core.dtypes import ITEMSIZE
from replay_core.dumps.containers.json_lines import read_object
from replay_core.dumps.dataproto import tensor_fields
from replay_core.dumps.dialect import Dialect, Index, any_of
from replay_core.dumps.file_places import place_below, told_apart
from replay_core.dumps.listing import Folder, listing
from replay_core.dumps.verl import PAD, WORDS
from replay_core.dumps.words import named, settled_by_width
from replay_core.errors import DumpError, RldbgError
from replay_core.records import Fields, FileBytes, Problem, RecordKey, TensorRef, Unreadable

_META = "meta.json"
_MAX_META = 1 << 24
_MAX_DEPTH = 8


def _folders(path: Path) -> Iterator[Folder]:
    """The outermost folders of tensordicts."""
    inside = None
    for folder in listing(path).folders:
        if inside is not None and folder.path.startswith(f"{inside}/"):
            continue
        if _META in folder.names and "tensordict" in str(_meta(folder.file(_META)).get("_type")):
            inside = folder.path
            yield folder


def _meta(file: Path) -> dict[str, Any]:
    try:
        return read_object(file, "the description of a tensordict", _MAX_META)
    except RldbgError:
        return {}


def index(path: Path) -> Index:
    found = Index([])
    # A step stands in the name of the batch's folder, also where one of its files is named.
    root = os.path.dirname(os.path.abspath(path if path.is_dir() else path.parent))
    within: list[str] = []
    for folder in _folders(path):
        file = folder.file(_META)
        step, rank, micro = (place_below(root, file, part) for part in ("step", "rank", "micro"))
        found.files.append((RecordKey(step, micro, rank, "actor", "batch_inputs"), file))
        within.append(folder.path)
    for folder in listing(path).folders if path.is_dir() else ():
        if any(folder.path == one or folder.path.startswith(f"{one}/") for one in within):
            found.beside += [folder.file(name) for name in folder.names if name == _META or name.endswith(".memmap")]
    found.files = told_apart(found.files)
    return found


def read(key: RecordKey, path: Path) -> list[TensorRef]:
    problems: list[Problem] = []
    tree = _tree(path.parent, problems, 0)
    fields = tensor_fields(tree if isinstance(tree, dict) else {"value": tree})
    return Fields(settled_by_width(named(fields, WORDS, PAD)), problems)


def _tree(folder: Path, problems: list[Problem], depth: int) -> Any:
    """{name: tensor, …} of a tensordict; a list of a stack; the value of what is no tensor.

    Raises:
        DumpError: nested deeper than any tensordict, or its meta.json is damaged.
    """
    if depth > _MAX_DEPTH:
        raise DumpError(f"a tensordict nested more than {_MAX_DEPTH} deep", file=str(folder))
    meta = read_object(folder / _META, "the description of a tensordict", _MAX_META)
    spend_values(len(meta), "names of a tensordict")
    if "data" in meta and "NonTensor" in str(meta.get("_type")):
        return meta["data"]
    if "stack_dim" in meta:
        count = next((n for n in range(1 << 16) if not (folder / str(n) / _META).is_file()), 0)
        return [_tree(folder / str(number), problems, depth + 1) for number in range(count)]
    found: dict[str, Any] = {}
    for name, said in meta.items():
        if not isinstance(said, dict):
            continue
        if os.path.basename(name) != name or name in ("", ".", ".."):
            problems.append(Problem(str(folder / _META), f"the description leads out of the folder: {name[:80]!r}"))
        elif "dtype" in said:
            found[name] = _tensor(folder, name, said)
        elif (folder / name / _META).is_file():
            inner = _tree(folder / name, problems, depth + 1)
            found[name] = {"__class__": "tensordict.TensorDict", "state": inner} if isinstance(inner, dict) else inner
        else:
            problems.append(Problem(str(folder / name), "the description names it, it is not there"))
    return found


def _tensor(folder: Path, name: str, said: dict[str, Any]) -> TensorRef:
    dtype, shape = str(said["dtype"]).removeprefix("torch."), said.get("shape")
    if dtype not in ITEMSIZE or not isinstance(shape, list) or not all(map(_is_length, shape)):
        return TensorRef("", dtype, (), Unreadable(f"said to be {dtype} of shape {shape}"))
    if not said.get("is_nested"):
        return _of_file(folder / f"{name}.memmap", dtype, tuple(shape))
    # The shape is that of the tensor of shapes: [rows, axes].
    sizes = _of_file(folder / f"{name}.shape.memmap", "int64", tuple(shape))
    if not sizes.is_readable or len(sizes.shape) != 2 or sizes.shape[1] != 1:
        return TensorRef("", dtype, (), Unreadable("a nested tensor whose rows are no rows of numbers"))
    rows = tuple(int(length) for length in pages.array(sizes)[:, 0])
    if not all(map(_is_length, rows)):
        return TensorRef("", dtype, (), Unreadable("a nested tensor whose rows have no lengths"))
    values = _of_file(folder / f"{name}.memmap", dtype, (sum(rows),))
    return values.with_(rows=rows, alignment="packed")


def _is_length(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 40


def _of_file(file: Path, dtype: str, shape: tuple[int, ...]) -> TensorRef:
    """Raw numbers of a file; unreadable where the file is not as long as they are."""
    ref = TensorRef("", dtype, shape, Unreadable(""))
    try:
        size = file.stat().st_size if file.is_file() else None
    except OSError:
        size = None
    if size is None and ref.numel:
        return ref.with_(source=Unreadable(f"{file.name} is not there"))
    if ref.nbytes > (size or 0):
        return ref.with_(source=Unreadable(f"{ref.nbytes:,} bytes declared, {file.name} has {size or 0:,}"))
    return ref.with_(source=FileBytes(file, 0, ref.nbytes))


DIALECT = Dialect("tensordict", "names", any_of(_folders), index, read)
