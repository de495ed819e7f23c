"""Files of DTensor shards, one per rank: model_world_size_{W}_rank_{r}.pt, or any names that end in a rank.

The ranks' files of one folder and one base name are one record, whose path is the first of them. Names
that are no DTensor are taken from that first file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from replay_core import naming
from replay_core.dumps.containers import read_container
from replay_core.dumps.dialect import Dialect, Index, any_of
from replay_core.dumps.dtensor import assembled, holds_dtensor, is_dtensor
from replay_core.dumps.fields import flatten
from replay_core.dumps.listing import Folder, listing
from replay_core.dumps.peeking import class_of, content_of, first_that
from replay_core.errors import RldbgError
from replay_core.records import Fields, Problem, RecordKey, TensorRef
from replay_core.regexes import regex

_FILE = regex(r"(?P<base>.*?)[_.-]?(?:rank|r)[_=-]?(?P<rank>\d{1,6})\.(?:pt|pth|bin)")
#: A name of the kind without its digits, of which a folder has few.
_SHAPE = regex(r".*(?:rank|r)[_=-]?\d*\.(?:pt|pth|bin)")
_STEP = regex(r"(?:global_step|step|iter)[_=-]?(\d{1,18})")
_WORLD = regex(r"world_size_(\d{1,6})")


def _groups(path: Path) -> Iterator[tuple[Folder, dict[int, str]]]:
    """Ranks' files that belong together, where the first of them holds a DTensor."""
    for folder in listing(path).folders:
        if not any("rank" in shape or shape.startswith("r.") for shape in folder.shapes):
            continue
        if not any(map(_SHAPE.fullmatch, folder.shapes)):
            continue
        groups: dict[str, dict[int, str]] = {}
        for entry in folder.names:
            match = _FILE.fullmatch(entry)
            if match:
                groups.setdefault(match["base"], {})[int(match["rank"])] = entry
        # Ten thousand NexRL files are groups too: of two, three names, never with a DTensor. A few looks tell.
        for looked, members in enumerate(groups.values()):
            if looked == 3 and not first_that([folder.file(min(members.values()))], holds_dtensor):
                break
            if first_that((folder.file(entry) for entry in members.values()), holds_dtensor):
                yield folder, dict(sorted(members.items()))
            elif looked < 3:
                continue


def index(path: Path) -> Index:
    found = Index([])
    for folder, members in _groups(path):
        first = folder.file(next(iter(members.values())))
        key = RecordKey(_step(folder, first.name), None, None, _role(folder), _stage(first.name))
        found.files.append((key, first))
        found.beside += [folder.file(entry) for entry in members.values()][1:]
        world = _WORLD.search(first.name)
        missing = sorted(set(range(int(world.group(1)) if world else max(members) + 1)) - set(members))
        if missing and not path.is_file():
            found.problems.append(Problem(str(first), f"the shards of ranks {missing[:8]} are missing"))
        rest = len(members) - 1
        if rest:
            found.notes.append(f"{first.name} stands for itself and the {rest} other ranks' shards beside it")
    return found


def _step(folder: Folder, file: str) -> int | None:
    """The step that the file's name says, else the nearest of three folders above it: global_step_10/actor/."""
    parts = reversed([*folder.path.split("/")[-3:], file])
    return next((int(match.group(1)) for part in parts if (match := _STEP.search(part))), None)


def _role(folder: Folder) -> str:
    """verl keeps each model's checkpoint in a folder called by its role."""
    return folder.name if folder.name in ("critic", "ref", "reward") else "actor"


def _stage(file: str) -> str:
    if file.startswith("optim"):
        return "optimizer"
    return "gradient" if "grad" in file else "param"


def read(key: RecordKey, path: Path) -> list[TensorRef]:
    problems: list[Problem] = []
    trees: dict[int, Any] = {}
    first = _FILE.fullmatch(path.name)
    for entry in sorted(path.parent.iterdir()):
        match = _FILE.fullmatch(entry.name)
        if match is None or first is None or match["base"] != first["base"]:
            continue
        try:
            trees[int(match["rank"])] = read_container(entry).tree
        except RldbgError as error:
            problems.append(Problem(str(entry), error.message))
    if not trees:
        trees[0] = content_of(path).tree
    fields = flatten(whole(dict(sorted(trees.items()))))
    prefix = {"param": "param.", "gradient": "grad."}.get(key.stage, "")
    return Fields([ref.with_(canonical=naming.canonical(prefix + ref.name)) for ref in fields], problems)


def whole(trees: dict[int, Any], depth: int = 0) -> Any:
    """The ranks' trees as one: DTensors assembled, everything else the first rank's."""
    first = next(iter(trees.values()))
    if len(trees) == 1 and type(first) is dict and dict not in set(map(type, first.values())) and not class_of(first):
        return first  # nothing in it can be a shard
    if is_dtensor(first):
        return assembled({rank: tree for rank, tree in trees.items() if is_dtensor(tree)})
    if isinstance(first, dict) and depth < 32:
        return {
            field: whole(
                {rank: tree[field] for rank, tree in trees.items() if isinstance(tree, dict) and field in tree},
                depth + 1,
            )
            for field in first
        }
    return first


DIALECT = Dialect("dtensor", "names", any_of(_groups), index, read)
