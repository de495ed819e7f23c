"""Our own dumps in a folder that is none itself: a demo's, or that of a trainer that recorded beside its outputs."""

from __future__ import annotations

from pathlib import Path

from replay_core.dumps import native
from replay_core.dumps.dialect import Dialect, Index, any_of
from replay_core.dumps.listing import listing


def _below(path: Path) -> list[Path]:
    """The dumps that lie in a folder which is none itself, without those that lie inside another."""
    found: list[Path] = []
    if not path.is_dir() or native.detect(path):
        return found
    for folder in listing(path).folders:
        here = Path(folder.path)
        if (
            "manifest.json" in folder.names
            and native.detect(here)
            and not any(here.is_relative_to(dump) for dump in found)
        ):
            found.append(here)
    return found


def index(path: Path) -> Index:
    """The dumps below a folder as one index. What lies in them is theirs: checkpoints, logs of a replay."""
    dumps = _below(path)
    parts = [native.index(dump) for dump in dumps]
    whole = Index([], flags=parts[0].flags if len(parts) == 1 else None)
    for part in parts:
        whole.files += part.files
        whole.problems += part.problems
        whole.notes += part.notes
        whole.names |= part.names
        whole.models |= part.models if len(parts) == 1 else {}
        whole.facts |= part.facts if len(parts) == 1 else {}
    whole.beside = [
        folder.file(name)
        for folder in listing(path).folders
        if any(Path(folder.path).is_relative_to(dump) for dump in dumps)
        for name in folder.names
    ]
    return whole


DIALECT = Dialect(
    "native", "names", any_of(_below), index, native.read, grows=native.DIALECT.grows,
    before=dict.fromkeys(("nexrl", "weights", "log"), "what lies in a dump of ours is its own"),
)  # fmt: skip
