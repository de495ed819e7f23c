"""What lies under a path: every folder and its file names, read once for all dialects that ask.

Twenty dialects look at the same directory. Each would list it, each would match ten thousand names; so
the tree is walked once, and a folder also knows the few *shapes* of its names (the names without
their digits), which is what most dialects recognise themselves by.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

from replay_core.file_spans import regular
from replay_core.jobs import OnEvent, Progress, ignore

#: Folders below the named one that are looked into, and names that are read: a dump is not a file system.
MAX_DEPTH = 6
MAX_NAMES = 500_000
#: Names after which it is said how many were read.
_SAY_EVERY = 2_000

_DIGITS = dict.fromkeys(map(ord, "0123456789"))


class Folder:
    """One directory: its own name and the names of its files, sorted."""

    def __init__(self, path: str, names: list[str]) -> None:
        self.path = path
        self.name = os.path.basename(path)
        self.names = names
        # Before Python 3.12 a Path is parsed when it is made, which is half the time of opening ten thousand files.
        self._child: Callable[[str], Path] | None = getattr(Path(path), "_make_child_relpath", None)

    @cached_property
    def shapes(self) -> frozenset[str]:
        """The names without their digits: `step__rank_micro.pt` for ten thousand files."""
        return frozenset("\n".join(self.names).translate(_DIGITS).split("\n"))

    @cached_property
    def suffixes(self) -> frozenset[str]:
        """What the names end in, from the last dot on."""
        return frozenset(name[name.rfind(".") :] if "." in name else "" for name in self.shapes)

    def file(self, name: str) -> Path:
        return self._child(name) if self._child is not None else Path(f"{self.path}/{name}")


class Listing:
    """The folders under a path, the path itself first. A file is a folder of one name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        #: What was not looked at: the place, and why.
        self.skipped: list[tuple[str, str]] = []
        #: Linked folders, which are not followed.
        self.linked: list[str] = []
        #: Pipes, sockets and devices, which are not opened.
        self.special: list[str] = []
        text = os.path.abspath(path)
        if os.path.isdir(text):
            self.folders = list(self._walk(text, 0, [0]))
        else:
            self.folders = [Folder(os.path.dirname(text), [os.path.basename(text)])]

    def _walk(self, path: str, depth: int, seen: list[int]) -> Iterator[Folder]:
        names, below = [], []
        with os.scandir(path) as entries:
            for entry in entries:
                # A linked directory is not followed: it may lead anywhere, also back here.
                if entry.is_dir(follow_symlinks=False):
                    below.append(entry.name)
                # Opening a pipe would wait for its writer, a device for whatever it does.
                elif _is_file(entry):
                    names.append(entry.name)
                elif entry.is_symlink():
                    self._link(entry)
                else:
                    self.special.append(entry.path)
        before, seen[0] = seen[0], seen[0] + len(names) + len(below)
        if before // _SAY_EVERY != seen[0] // _SAY_EVERY:
            _tell(Progress(seen[0], None, f"names of files read, now in {path}"))
        if seen[0] > MAX_NAMES:
            self.skipped.append((path, f"more than {MAX_NAMES:,} names: nothing from here on was looked at"))
            return
        yield Folder(path, sorted(names))
        if depth == MAX_DEPTH:
            if below:
                self.skipped.append((path, f"folders more than {MAX_DEPTH} deep were not looked into"))
            return
        for name in sorted(below):
            try:
                yield from self._walk(os.path.join(path, name), depth + 1, seen)
            except OSError as error:
                self.skipped.append((os.path.join(path, name), f"the folder cannot be read: {error.strerror}"))

    def _link(self, entry: os.DirEntry[str]) -> None:
        if os.path.isdir(entry.path):
            self.linked.append(entry.path)
        elif os.path.exists(entry.path):
            self.special.append(entry.path)
        else:
            self.skipped.append((entry.path, "a link to a file that is not there"))


def _is_file(entry: os.DirEntry[str]) -> bool:
    """Whether the entry is a file; a link that leads back to itself, or where nobody may look, is none."""
    try:
        return entry.is_file()
    except OSError:
        return False


_known: dict[Path, Listing] = {}
_are_files: dict[Path, bool] = {}
_tell: OnEvent = ignore


def listing(path: Path) -> Listing:
    """What lies under `path`; read once until `forget`.

    Raises:
        OSError: the directory cannot be read.
    """
    if path not in _known:
        _known[path] = Listing(path)
    return _known[path]


def is_file(path: Path) -> bool:
    """Whether the path that is opened is a file itself: each of the dialects asks, and it is looked at once."""
    known = _are_files.get(path)
    if known is None:
        known = _are_files[path] = path.is_file()
    return known


def count(path: Path) -> int:
    """How many files lie under `path`."""
    return sum(len(folder.names) for folder in listing(path).folders)


def forget(on_event: OnEvent = ignore) -> None:
    """Directories change: whoever opens a run looks again, and is told how far that is."""
    global _tell
    _known.clear()
    _are_files.clear()
    _tell = on_event


def few(names: Sequence[object], shown: int = 6) -> str:
    """`a, b and 7 more`."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(map(str, names[:shown])) + more


def contents(path: Path) -> str:
    """What a path holds, for an error that says what was found."""
    if path.is_file():
        with regular(path) as file:
            head = file.read(8)
        return f"a file of {path.stat().st_size:,} bytes that begins {head!r}"
    if not path.is_dir():
        return "neither a file nor a directory"
    return few(sorted(entry.name for entry in path.iterdir())) or "an empty directory"
