"""Our own dumps in a folder that is none itself: a demo's, or that of a trainer that recorded beside its outputs."""

from __future__ import annotations

from pathlib import Path

from replay_core.dumps import native
from replay_core.dumps.dialect import Dialect, Index, any_of
from replay_core.dumps.listing import listing
from replay_core.errors import DumpError
from replay_core.records import Problem


def _below(path: Path) -> list[Path]:
    """The dumps that lie in a folder which is none itself, without those that lie inside another."""
    found: list[Path] = []
    if not path.is_dir() or native.detect(path):
        return found
    within = ""
    for folder in listing(path).folders:
        # A folder is listed before what lies in it, and that before its neighbours.
        if "manifest.json" not in folder.names or (within and folder.path.startswith(within)):
            continue
        if native.detect(here := Path(folder.path)):
            found.append(here)
            within = f"{folder.path}/"
    return found


def index(path: Path) -> Index:
    """The dumps below a folder as one index. What lies in them is theirs: checkpoints, logs of a replay."""
    dumps, parts, broken = _below(path), [], []
    for dump in dumps:
        try:
            parts.append(native.index(dump))
        except DumpError as error:
            if len(dumps) == 1:
                raise
            broken.append(Problem(str(dump), error.in_one_line))
    is_one = len(parts) == 1 or _are_of_one_run(parts)
    flags = [part.flags for part in parts if part.flags]
    whole = Index([], flags=flags[0] if is_one and flags and all(one == flags[0] for one in flags) else None)
    whole.problems += broken
    for part in parts:
        whole.files += part.files
        whole.problems += part.problems
        whole.notes += part.notes
        whole.names |= part.names
        whole.models |= part.models if is_one else {}
        whole.facts |= part.facts if len(parts) == 1 else {}
    places, within = set(map(str, dumps)), ""
    for folder in listing(path).folders:
        if folder.path in places:
            within = f"{folder.path}/"
        if within and f"{folder.path}/".startswith(within):
            whole.beside += [folder.file(name) for name in folder.names]
    return whole


def _are_of_one_run(parts: list[Index]) -> bool:
    """Whether the dumps are what the nodes of one job wrote: none repeats another's record, or names other weights."""
    keys = [key for part in parts for key in {key for key, _ in part.files}]
    noted = [(step, model) for part in parts for step, model in part.models.items()]
    return len(set(keys)) == len(keys) and len({step for step, _ in noted}) == len(set(noted))


DIALECT = Dialect(
    "native", "names", any_of(_below), index, native.read, grows=native.DIALECT.grows,
    before=dict.fromkeys(("nexrl", "weights", "log"), "what lies in a dump of ours is its own"),
)  # fmt: skip
