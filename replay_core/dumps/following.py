"""A run that is still being written: what has come since somebody last looked.

Looking costs a `stat` per folder and per file that grows line by line, as long as nothing has changed; then the names
are read again. Records that were there stay the same objects, with whatever was read of them.
"""

from __future__ import annotations

import os
import time
from itertools import pairwise
from pathlib import Path
from statistics import median

from msgspec import Struct

from replay_core.dumps.opening import DIALECTS, open_run
from replay_core.records import Record, RecordKey, Run
from replay_core.regexes import regex

#: File systems tell times apart by some milliseconds: a folder changed this short ago may have changed again.
_UNSETTLED_NS = 50_000_000
_GROWING = regex("|".join({dialect.grows for dialect in DIALECTS if dialect.grows is not None}))
#: How many of the last steps tell the pace, and how many files of a step are asked for their times.
_PACE_STEPS, _PACE_FILES = 8, 32

_Stamp = tuple[int, int]


class Pulse(Struct, frozen=True):
    """Whether a run still grows: its last step, seconds since anything of it was written, seconds a step takes.

    None where it has no steps, or no files with times; `pace_s` also where the last steps are fewer than three, or
    lie in one file.
    """

    last_step: int | None
    silent_s: float | None
    pace_s: float | None


class Follower:
    """A run and what has been written since. `run` is always the whole; nothing is read but names.

    Raises:
        RequestError: a path does not exist.
        NotADumpError: no dialect knows it (yet).
    """

    def __init__(self, path: Path | str, *more: Path | str) -> None:
        self._paths = (Path(path), *map(Path, more))
        # Looked at before the names are read: what comes in between is seen next time.
        self._folders = _folders(self._paths)
        self.run: Run = open_run(path, *more)
        self._files = _growing(self.run)
        self._read: dict[int, _Stamp] = {}

    def poll(self) -> list[Record]:
        """The records that have come since the last time, in the run's order; the run holds them from now on.

        A record whose file was written over forgets what was read of it. One whose file is gone leaves the run.

        Raises:
            DumpError: the dump's own index has become unreadable; the run stays as it was.
        """
        folders = _folders(self._paths)
        self._forget_overwritten()
        if folders == self._folders and _growing(self.run) == self._files:
            return []
        found = open_run(*self._paths)
        known = {(record.key, record.path): record for record in self.run.records}
        came: list[Record] = []
        records: list[Record] = []
        for record in found.records:
            old = known.get((record.key, record.path))
            if old is None:
                came.append(record)
            elif old.key != record.key or _places(old.key) != _places(record.key):
                old = None
            records.append(old or record)
        self._folders = folders
        found.records = records
        self.run = found
        self._files = _growing(found)
        return came

    def pulse(self) -> Pulse:
        """How the run is doing, by the times of the files of its last steps: some `stat` calls, however long it is."""
        by_step: dict[int, list[Path]] = {}
        for record in self.run.records:
            if record.key.step is not None:
                by_step.setdefault(record.key.step, []).append(record.path)
        last = sorted(by_step)[-_PACE_STEPS:]
        written = [max(_stamp(path)[1] for path in set(by_step[step][-_PACE_FILES:])) for step in last]
        if not written:
            return Pulse(None, None, None)
        gaps = [(later - before) / 1e9 for before, later in pairwise(written) if later > before > 0]
        silent_s = max(0.0, (time.time_ns() - max(written)) / 1e9) if max(written) > 0 else None
        return Pulse(last[-1], silent_s, median(gaps) if len(gaps) > 1 else None)

    def _forget_overwritten(self) -> None:
        stamps: dict[int, _Stamp] = {}
        for record in self.run.records:
            if not record.is_read:
                continue
            stamp = _stamp(record.path)
            if self._read.get(id(record), stamp) != stamp:
                record.release()
            else:
                stamps[id(record)] = stamp
        self._read = stamps


def _places(key: RecordKey) -> tuple[int | None, int | None]:
    return key.epoch, key.minibatch


def _stamp(path: Path | str) -> _Stamp:
    try:
        status = os.stat(path)
    except OSError:
        return (-1, -1)
    return (status.st_size, status.st_mtime_ns)


def _folders(paths: tuple[Path, ...]) -> dict[str, int]:
    """When every folder below the paths last changed; -1, equal to nothing seen before, where it was just now."""
    now, found = time.time_ns(), {}
    waiting = [os.path.abspath(path) for path in paths]
    while waiting:
        folder = waiting.pop()
        changed = _stamp(folder)[1]
        found[folder] = changed if now - changed > _UNSETTLED_NS else -now
        try:
            with os.scandir(folder) as entries:
                waiting += [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
        except OSError:
            continue  # a file, or a folder that is gone
    return found


def _growing(run: Run) -> dict[Path, int]:
    """Sizes of the files that new lines are added to."""
    files = {record.path for record in run.records if _GROWING.search(record.path.name)}
    return {file: _stamp(file)[0] for file in files}
