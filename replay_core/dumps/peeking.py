"""A first look into a file, for dialects that recognise themselves by what a file holds.

A dozen dialects ask about the same file. It is read once: what is found is kept until the record is read,
which takes it away, so that reading again looks again.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replay_core.dumps.containers import read_container
from replay_core.errors import RldbgError

if TYPE_CHECKING:
    from replay_core.dumps.containers import Content

#: Classes that stand in a dump for data that lies elsewhere.
REFERENCES = frozenset(("areal.infra.rpc.rtensor.RTensor", "areal.infra.rpc.rtensor.TensorShardInfo"))

#: Files that are remembered: a dialect looks at three of a folder, the next one at the same three.
_KEPT = 4
#: Containers of text hold every value they have read; larger ones are not kept.
_KEPT_BYTES = 1 << 20
#: Lines of a text that tell what all of them are.
_ROWS = 64
_BY_PLACE = frozenset({"torch_zip", "torch_legacy", "pickle", "safetensors", "npy", "npz"})

_Stamp = tuple[int, int, int]
_seen: dict[Path, tuple[_Stamp, Any]] = {}
_said: dict[Path, tuple[str, ...]] = {}


def forget() -> None:
    """Files change: whoever opens a run looks again."""
    _seen.clear()


def _stamp(path: Path) -> _Stamp:
    try:
        status = os.stat(path)
    except OSError:
        return (-1, -1, -1)
    return (status.st_size, status.st_mtime_ns, status.st_ino)


def _looked(path: Path) -> Any:
    """The file's content, or the error that reading it ends in. Looked at once while a run is opened."""
    known = _seen.get(path)
    if known is not None:
        return known[1]
    stamp = _stamp(path)
    try:
        found: Any = read_container(path, inert=REFERENCES, most_rows=_ROWS)
    except RldbgError as error:
        found = error
    if isinstance(found, RldbgError) or found.container in _BY_PLACE or stamp[0] <= _KEPT_BYTES:
        while len(_seen) >= _KEPT:
            del _seen[next(iter(_seen))]
        _seen[path] = (stamp, found)
    return found


def content_of(path: Path) -> Content:
    """The file's content for the record that is being read: what a first look saw, once, else read now.

    Raises:
        DumpError: as `read_container`.
    """
    known = _seen.pop(path, None)
    if known is not None and _is_whole(known[1]) and known[0] == _stamp(path):
        found: Content = known[1]
    else:
        found = read_container(path, inert=REFERENCES)
    if found.problems:
        _said[path] = found.problems
    return found


def said_of(path: Path) -> tuple[str, ...]:
    """What the container of the file that `content_of` read last says is wrong with it; asked once."""
    return _said.pop(path, ()) if _said else ()


def look(path: Path) -> Content:
    """The file's content, read now or by whoever looked first.

    Raises:
        DumpError: as `read_container`.
    """
    found = _looked(path)
    if isinstance(found, RldbgError):
        raise found
    return found if found.is_whole else read_container(path, inert=REFERENCES)


def _is_whole(found: Any) -> bool:
    return not isinstance(found, RldbgError) and found.is_whole


def tree_of(path: Path) -> Any:
    """The file's structure, of a text of very many lines that of the first; None where it cannot be read: what is wrong
    with it is said when it is opened.
    """
    found = _looked(path)
    return None if isinstance(found, RldbgError) else found.tree


def class_of(tree: Any) -> str:
    """The name of the framework's class that the tree is an instance of; empty for plain data."""
    name = tree.get("__class__") if isinstance(tree, dict) else None
    return name if isinstance(name, str) else ""


def has(tree: Any, keys: Iterable[str]) -> bool:
    """Whether the tree is a dict with all these keys."""
    return isinstance(tree, dict) and all(key in tree for key in keys)


def first_that(paths: Iterable[Path], fits: Any, tries: int = 3) -> bool:
    """Whether one of the first files that can be read holds what `fits(tree)` looks for.

    A damaged first file must not hide the dialect of the others, and a thousand strangers must not be read.
    """
    for number, path in enumerate(paths):
        if number == tries:
            return False
        tree = tree_of(path)
        if tree is not None:
            return bool(fits(tree))
    return False
