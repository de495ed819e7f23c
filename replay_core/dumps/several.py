"""A folder of runs: each of its folders holds the same step, rank, micro and stage again.

The parent of two runs opens as one dump with two records for every key. That is never what somebody meant: it is
said once, with the runs' names, in the place of a line for every pair of files.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from replay_core.dumps.listing import few
from replay_core.records import Problem, Record, RecordKey


def runs_inside(path: Path, records: Sequence[Record]) -> list[Path]:
    """The folders below `path` that are runs of their own; none where `path` itself is one.

    They are if every record lies in one of its folders, and every folder repeats a key of another one.
    """
    if len({record.key for record in records}) == len(records) or not path.is_dir():
        return []  # nothing repeats, and paths are not taken apart for it
    folders: dict[str, list[Record]] = {}
    for record in records:
        try:
            inside = record.path.relative_to(path).parts
        except ValueError:
            return []
        if len(inside) < 2:
            return []
        folders.setdefault(inside[0], []).append(record)
    holders: dict[RecordKey, set[str]] = {}
    for name, held in folders.items():
        for record in held:
            holders.setdefault(record.key, set()).add(name)
    repeating = {name for names in holders.values() if len(names) > 1 for name in names}
    if len(folders) < 2 or repeating != set(folders):
        return []
    found = []
    for name in sorted(folders):
        found += runs_inside(path / name, folders[name]) or [path / name]
    return found


def said_once(path: Path, runs: Sequence[Path], problems: Sequence[Problem]) -> list[Problem]:
    """The problems of a folder of runs: that it is one, in place of what only follows from it."""
    listed = few([run.relative_to(path) for run in runs])
    about = Problem(str(path), f"holds {len(runs)} runs that repeat each other's steps: {listed}; open one of them")
    own = (one for one in problems if not one.what.startswith("a second record of ") and one.where != str(path))
    return [about, *own]
