"""Digests of what recorded none: taken of each rank's values by several threads, and kept while the files lie there
unchanged, so that only the first comparison of two dumps reads them whole.

What is kept names no file: a record is known by a hash of its tensors' names and places and of the files' numbers,
sizes and times of change. What was written a moment ago is not kept, for a second change within one tick of the
disk's clock would not show.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from threading import Lock

from msgspec import Struct

from replay_core import naming
from replay_core.dtypes import ITEMSIZE
from replay_core.dumps.completeness import FRESH_S
from replay_core.errors import DumpError
from replay_core.measure.digests import digest, is_digest
from replay_core.mirrored import is_mirrored
from replay_core.records import FileBytes, Parts, Record, TensorRef

#: What is no field of a module, and is compared by its digest as well.
_OF_PARAMETERS = ("gradient", "param", "optimizer")
#: What all kept digests may take; the runs longest not compared go first.
_MOST_BYTES = 256 << 20
#: Raised where a digest comes to mean something else.
_FORMAT = 2


class Counted(Struct):
    """Of one run: tensors whose digests were taken now, their bytes, and tensors whose digests were known before."""

    taken: int = 0
    nbytes: int = 0
    known: int = 0
    #: Of those taken now, how many will not be known the next time.
    not_kept: int = 0


class RunDigests:
    """The digests of one run: a line of JSON for each record, only ever added to. Several processes may add at once."""

    def __init__(self, run: Path, under: Path | None) -> None:
        self.counted = Counted()
        self._file = (
            None if under is None else under / f"{sha256(os.path.abspath(run).encode()).hexdigest()[:24]}.jsonl"
        )
        self._lines: dict[str, tuple[int, int]] = {}
        self._lock = Lock()
        if self._file is not None:
            _prune(self._file)
            self._look()

    def of(self, record: Record, refs: Sequence[TensorRef]) -> dict[str, str]:
        """Name -> digest, of the computed tensors of a record that has them all to itself; taken where none is known.

        What cannot be read has none: whoever compares it says why.
        """
        own = [ref for ref in refs if is_computed(record, ref) and not ref.copies and ref.dtype in ITEMSIZE]
        found = {ref.name: ref.digest for ref in own if ref.digest is not None and is_digest(ref.digest)}
        open_ = [ref for ref in own if ref.name not in found and ref.is_readable]
        place, is_settled = _place(open_)
        known = self._known(place) if place is not None else None
        with self._lock:
            self.counted.known += len(found)
        if known is None or known.keys() != {ref.name for ref in open_}:
            known = self._take(open_, place if is_settled else None)
        else:
            with self._lock:
                self.counted.known += len(known)
        return found | known

    def _take(self, refs: Sequence[TensorRef], place: str | None) -> dict[str, str]:
        made: dict[str, str] = {}
        for ref in refs:
            with suppress(DumpError):
                made[ref.name] = digest(ref)
        is_kept = place is not None and len(made) == len(refs) and self._add(place, made)
        with self._lock:
            self.counted.taken += len(made)
            self.counted.nbytes += sum(ref.nbytes for ref in refs if ref.name in made)
            self.counted.not_kept += 0 if is_kept else len(made)
        return made

    def _known(self, place: str) -> dict[str, str] | None:
        if self._file is None or place not in self._lines:
            return None
        at, length = self._lines[place]
        try:
            with open(self._file, "rb") as file:
                file.seek(at)
                said = json.loads(file.read(length))
        except (OSError, ValueError):
            return None
        known = said.get("digests") if isinstance(said, dict) and said.get("of") == place else None
        if not isinstance(known, dict) or not all(isinstance(one, str) and is_digest(one) for one in known.values()):
            return None
        return known

    def _add(self, place: str, made: dict[str, str]) -> bool:
        if self._file is None:
            return False
        line = json.dumps({"of": place, "digests": made}).encode() + b"\n"
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            # One write at the end of the file: lines of other processes stay whole.
            descriptor = os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            try:
                return os.write(descriptor, line) == len(line)
            finally:
                os.close(descriptor)
        except OSError:
            return False  # a full or read-only disk: the answer is the same

    def _look(self) -> None:
        assert self._file is not None
        at = 0
        with suppress(OSError), open(self._file, "rb") as file:
            for line in file:
                # `{"of": "…", …}` as written above; what is torn names nothing that is asked for.
                if line.startswith(b'{"of": "') and line.endswith(b"}\n"):
                    self._lines[line[8:72].decode("ascii", "replace")] = at, len(line)
                at += len(line)


def is_computed(record: Record, ref: TensorRef) -> bool:
    """Whether it is a tensor of a module or a parameter: tokens, masks and the like are read, to pair samples by."""
    return record.key.stage in _OF_PARAMETERS or naming.is_module_tensor(ref.canonical or ref.name)


def _place(refs: Sequence[TensorRef]) -> tuple[str | None, bool]:
    """What tensors are known by as long as nobody changes their files, and whether nobody did just now."""
    files: dict[Path, tuple[int, ...]] = {}
    told = []
    for ref in refs:
        parts = list(_file_bytes(ref))
        if not parts or None in parts:
            return None, False
        told.append((ref.name, ref.dtype, ref.shape, _axes(ref), [str(part) for part in parts]))
        files.update((part.path, ()) for part in parts if part is not None)
    newest = 0.0
    for file in files:
        try:
            if is_mirrored(file):
                continue  # the name of its folder says which content of the object it is
            seen = os.stat(file)
        except (OSError, DumpError):
            return None, False
        newest = max(newest, seen.st_mtime, seen.st_ctime)
        files[file] = seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns
    state = repr((_FORMAT, told, [(os.path.abspath(file), seen) for file, seen in sorted(files.items())]))
    return sha256(state.encode()).hexdigest(), _is_settled(newest)


def _is_settled(newest: float) -> bool:
    return not -FRESH_S < time.time() - newest < FRESH_S


def _file_bytes(ref: TensorRef) -> Iterator[FileBytes | None]:
    """Where its bytes lie; None where that is no stretch of a file."""
    if isinstance(ref.source, Parts):
        for part in ref.source.parts:
            yield from _file_bytes(part)
    else:
        yield ref.source if isinstance(ref.source, FileBytes) else None


def _axes(ref: TensorRef) -> object:
    if not isinstance(ref.source, Parts):
        return ref.shape
    return ref.source.axis, [_axes(part) for part in ref.source.parts]


def _prune(own: Path) -> None:
    """Remove what was longest not compared, where all of it is too much. `own` is used now."""
    with suppress(OSError):
        os.utime(own)
    with suppress(OSError):
        held = sorted((file.stat().st_mtime, file.stat().st_size, file) for file in own.parent.glob("*.jsonl"))
        total = sum(size for _, size, _ in held)
        for _, size, file in held:
            if total > _MOST_BYTES and file != own:
                file.unlink()
                total -= size
        if own.exists() and own.stat().st_size > _MOST_BYTES:
            own.unlink()
