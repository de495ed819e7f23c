"""Files whose names are not their framework's: a template of the user's own, a copy under another name.

slime's and miles' dump paths are templates (`--save-debug-rollout-data /tmp/dbg_{rollout_id}.pt`), verl's first
caches have no suffix, a captured batch is called as somebody liked. What they hold says what they are. One file
of each shape of name is looked into, and stands for the others.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from replay_core.dumps import loose
from replay_core.dumps.dialect import Dialect, Index
from replay_core.dumps.file_places import place_below, told_apart
from replay_core.dumps.listing import Folder, listing
from replay_core.dumps.peeking import tree_of
from replay_core.errors import DumpError
from replay_core.file_spans import regular
from replay_core.records import RecordKey

#: Shapes of names that are looked into, files of a shape that are tried, files whose own words are asked for.
_SHAPES = 64
_TRIES = 3
_ASKED = 512

NOTE = "recognised by what the files hold: their names are not the framework's"

_DIGITS = dict.fromkeys(map(ord, "0123456789"))


def found_inside(
    path: Path, dialects: Sequence[Dialect], is_free: Callable[[Path], bool]
) -> list[tuple[Dialect, Index]]:
    """What the dialects that know their content by sight make of the files no dialect has claimed by name."""
    known = [dialect for dialect in dialects if dialect.known_by == "content"]
    found: dict[str, tuple[Dialect, Index]] = {}
    for number, files in enumerate(_shapes(path, is_free)):
        if number == _SHAPES:
            break
        dialect = next((one for file in files[:_TRIES] for one in known if _knows(one, file)), None)
        if dialect is not None:
            _, index = found.setdefault(dialect.name, (dialect, Index([], notes=[NOTE])))
            _add(os.path.abspath(path), index, dialect, files)
    for _, index in found.values():
        index.files = told_apart(index.files)
    return list(found.values())


def _knows(dialect: Dialect, file: Path) -> bool:
    return tree_of(file) is not None and dialect.detect(file)


def _shapes(path: Path, is_free: Callable[[Path], bool]) -> Iterator[list[Path]]:
    """Unclaimed files by folder and shape of name."""
    for folder in listing(path).folders:
        if folder.suffixes.isdisjoint(loose.SUFFIXES) and "" not in folder.suffixes:
            continue
        shapes: dict[str, list[Path]] = defaultdict(list)
        for entry in folder.names:
            if _is_likely(folder, entry) and is_free(file := folder.file(entry)):
                shapes[entry.translate(_DIGITS)].append(file)
        yield from shapes.values()


def _is_likely(folder: Folder, entry: str) -> bool:
    if "." in entry:
        return entry[entry.rfind(".") :] in loose.SUFFIXES
    try:
        with regular(f"{folder.path}/{entry}") as file:
            return file.read(2) in (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
    except DumpError:
        return False


def _add(root: str, index: Index, dialect: Dialect, files: list[Path]) -> None:
    for file in files:
        said = dialect.index(file) if len(files) <= _ASKED and tree_of(file) is not None else Index([])
        key = said.files[0][0] if said.files else RecordKey(None, None, None, None, "tensors")
        step, rank = place_below(root, file, "step"), place_below(root, file, "rank")
        key = replace(key, step=step if key.step is None else key.step, rank=rank if key.rank is None else key.rank)
        index.files.append((key, file))
        index.problems += said.problems
        index.notes += [note for note in said.notes if note not in index.notes]
