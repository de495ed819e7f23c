"""What a unit's answer depends on, as a digest: names, sizes and times of change of files, and never their bytes.

A dump of a terabyte is not read to learn that it is still the same. A file that was rewritten has another time of
change, also where its size is the same; a dump that was copied without its times is another one, and is done again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

#: Files of a model's directory that are looked at: more than the shards of any.
_MOST = 10_000

#: What stands for a file: its place below the run, its size, when it was changed (ns).
Seen = tuple[str, int, int]


def seen(path: Path, root: Path) -> Seen:
    """A file as it lies there; (…, -1, -1) where it does not."""
    try:
        found = path.stat()
    except OSError:
        return _below(path, root), -1, -1
    return _below(path, root), found.st_size, found.st_mtime_ns


def files_seen(paths: Iterable[Path], root: Path) -> list[Seen]:
    """Each file once, in order of name."""
    return sorted(seen(path, root) for path in set(paths))


def reference_seen(reference: str | None) -> list[Any]:
    """Weights, a map, limits: a file or a directory by what lies in it, else (a hub's name) as it is called."""
    if reference is None:
        return []
    path = Path(reference)
    if path.is_file():
        return [path.name, *seen(path, path.parent)[1:]]
    if not path.is_dir():
        return [reference]
    names = sorted(entry.path for entry in os.scandir(path))[:_MOST]
    return [list(seen(Path(name), path)) for name in names]


def digest(*parts: Any) -> str:
    """24 digits of SHA-256 over JSON."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:24]


def _below(path: Path, root: Path) -> str:
    try:
        return str(path.relative_to(root))
    except ValueError:
        return str(path)
