"""Runs that lie there as they did when they were opened: a worker opens one run several times for each unit.

Only a dump that its own index describes is kept. The times of its folders, and the sizes and times of the files beside
its index, tell of every record that came or went; what records hold is read when they are asked for. An opening is kept
where all that was the same before it and after it, by no clock but the disk's own; what changed a moment ago is not,
for a second change within one tick would not show.
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from msgspec import Struct

from replay_core.dumps.completeness import FRESH_S, being_written
from replay_core.dumps.listing import Listing
from replay_core.records import Run

#: The two sides of a comparison, and what a replay of one of them left.
_MOST = 3
#: Of more places it is not asked whether they changed.
_MOST_PLACES = 4_000

_Stamp: TypeAlias = "tuple[tuple[int, int, int], ...] | None"


class _Opened(Struct):
    """Where a run lies, and the run itself once an opening saw all of that unchanged."""

    places: tuple[str, ...]
    stamp: _Stamp = None
    run: Run | None = None


_opened: OrderedDict[tuple[str, Path], _Opened] = OrderedDict()


def found(path: Path) -> Run | None:
    """The run of a path, no record of it read, where nothing has changed since it was opened; else None."""
    known = _opened.get(_key(path))
    if known is None or known.run is None:
        return None
    if _stamp(known.places) != known.stamp:
        known.run = None
        return None
    _opened.move_to_end(_key(path))
    run = _unread(known.run)
    run.problems += being_written([record.path for record in run.records])
    return run


def stamp(path: Path) -> _Stamp:
    """How everything lies there now, for `keep`; None of a path that was not opened before."""
    known = _opened.get(_key(path))
    return None if known is None else _stamp(known.places)


def keep(path: Path, run: Run, listing: Listing, before: _Stamp) -> None:
    """Remember an opening, `before` which it lay so."""
    files = [f"{listing.folders[0].path}/{name}" for name in listing.folders[0].names]
    places = (*(folder.path for folder in listing.folders), *files)
    if listing.skipped or listing.linked or len(places) > _MOST_PLACES:
        return
    known = _Opened(places, _stamp(places))
    if known.stamp is not None and known.stamp == before and not _is_fresh(known.stamp):
        known.run = _unread(run)
    _opened[_key(path)] = known
    _opened.move_to_end(_key(path))
    while len(_opened) > _MOST:
        _opened.popitem(last=False)


def _key(path: Path) -> tuple[str, Path]:
    # Of a whole path the folder that one stands in says nothing, and it may be gone.
    return "" if path.is_absolute() else os.getcwd(), path


def _stamp(places: tuple[str, ...]) -> _Stamp:
    try:
        seen = [os.stat(place) for place in places]
    except OSError:
        return None
    return tuple([(one.st_ino, one.st_mtime_ns, one.st_size) for one in seen])


def _is_fresh(seen: tuple[tuple[int, int, int], ...]) -> bool:
    newest_ns = max(changed_ns for _, changed_ns, _ in seen)
    return -FRESH_S < time.time() - newest_ns / 1e9 < FRESH_S


def _unread(run: Run) -> Run:
    """The same run, which nobody has read in or added to."""
    return replace(
        run,
        records=[record.unread() for record in run.records],
        problems=list(run.problems),
        notes=list(run.notes),
        models=dict(run.models),
    )
