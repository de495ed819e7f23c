"""A first look into a file, for dialects that recognise themselves by what a file holds."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from replay_core.dumps.containers import read_container
from replay_core.errors import RldbgError

#: Classes that stand in a dump for data that lies elsewhere.
REFERENCES = ("areal.infra.rpc.rtensor.RTensor", "areal.infra.rpc.rtensor.TensorShardInfo")


def tree_of(path: Path) -> Any:
    """The file's structure, or None where it cannot be read: what is wrong with it is said when it is opened."""
    try:
        return read_container(path, inert=REFERENCES).tree
    except RldbgError:
        return None


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
