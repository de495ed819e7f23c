"""torchlens bundles (`tl.save`): manifest.json, a safetensors file per tensor under `blobs`.

What a bundle keeps beside them as a pickle is not looked at. A tensor is called by torchlens' own label of its
operation (`linear_1_1:1`), a gradient by `grad.` before it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from replay_core.budget import spend_values
from replay_core.dumps.containers import read_container
from replay_core.dumps.containers.json_lines import read_object
from replay_core.dumps.dialect import Dialect, Index, any_of
from replay_core.dumps.fields import flatten
from replay_core.dumps.file_places import place_below, told_apart
from replay_core.dumps.listing import Folder, listing
from replay_core.errors import DumpError, RldbgError
from replay_core.records import Fields, Problem, RecordKey, TensorRef, Unreadable

_MANIFEST, _BLOBS = "manifest.json", "blobs"
_MAX_MANIFEST = 1 << 28


def _folders(path: Path) -> Iterator[Folder]:
    for folder in listing(path).folders:
        likely = _MANIFEST in folder.names and (path.is_file() or "metadata.pkl" in folder.names)
        if likely and "torchlens_version" in _manifest(folder.file(_MANIFEST)):
            yield folder


def _manifest(file: Path) -> dict[str, Any]:
    try:
        return read_object(file, "the bundle's manifest", _MAX_MANIFEST)
    except RldbgError:
        return {}


def index(path: Path) -> Index:
    found = Index([])
    root = os.path.dirname(os.path.abspath(path))
    bundles = [folder.path for folder in _folders(path)]
    for folder in listing(path).folders:
        if folder.path in bundles:
            file = folder.file(_MANIFEST)
            step, rank, micro = (place_below(root, file, part) for part in ("step", "rank", "micro"))
            found.files.append((RecordKey(step, micro, rank, None, "modules"), file))
            found.beside += [folder.file(name) for name in folder.names if name != _MANIFEST]
        elif folder.name == _BLOBS and os.path.dirname(folder.path) in bundles:
            found.beside += map(folder.file, folder.names)
    found.files = told_apart(found.files)
    return found


def read(key: RecordKey, path: Path) -> list[TensorRef]:
    listed = read_object(path, "the bundle's manifest", _MAX_MANIFEST).get("tensors")
    if not isinstance(listed, list):
        raise DumpError("the manifest of a torchlens bundle lists no tensors", file=str(path))
    spend_values(len(listed), "tensors of a bundle")
    problems: list[Problem] = []
    fields: dict[str, TensorRef] = {}
    for said in listed:
        if isinstance(said, dict) and isinstance(said.get("label"), str):
            prefix = "grad." if said.get("kind") == "grad" else ""
            fields[f"{prefix}{said['label']}"] = _tensor(said, path, problems)
    return Fields([ref.with_(canonical=ref.name) for ref in flatten(fields)], problems)


def _tensor(said: dict[str, Any], path: Path, problems: list[Problem]) -> TensorRef:
    where = str(said.get("relative_path"))
    file = path.parent / _BLOBS / os.path.basename(where)
    if where != f"{_BLOBS}/{file.name}" or file.name in ("", ".", ".."):
        return TensorRef("", "none", (), Unreadable("the manifest leads out of the bundle"))
    try:
        held = flatten(read_container(file).tree)
    except RldbgError as error:
        problems.append(Problem(str(file), error.message))
        return TensorRef("", "none", (), Unreadable(error.message))
    if len(held) != 1 or list(held[0].shape) != said.get("shape"):
        return TensorRef("", "none", (), Unreadable(f"{file.name} does not hold what the manifest says"))
    return held[0]


DIALECT = Dialect("torchlens", "names", any_of(_folders), index, read)
