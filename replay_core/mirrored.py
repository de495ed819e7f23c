"""Which files stand for remote objects: those of the folder in which this process, or who started it, keeps mirrors.

The folder is told by whoever was given a URL, never by a path: a dump that came from elsewhere may hold the layout of a
mirror with an address of its own in it, and nothing may be asked of that.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from replay_core.errors import DumpError

#: The folder that every mirror lies in.
FOLDER = "rldbg-remote"
INSIDE = f"{os.sep}{FOLDER}{os.sep}"
#: For processes that read for this one.
_ROOT = "RLDBG_MIRRORS"


def keep_under(root: Path) -> None:
    """Take files of `root/FOLDER` for mirrors from now on, here and in processes that are started."""
    os.environ[_ROOT] = os.path.abspath(root / FOLDER) + os.sep


#: Which address each folder stands for that this process was given an address for.
_ADDRESSES: dict[str, str] = {}


def stands_for(path: Path, url: str) -> None:
    """Say `url` where `path` would be said from now on: nobody else has this machine's cache."""
    _ADDRESSES[str(path)] = url.rstrip("/")


def as_addressed(said: Any) -> Any:
    """The text, mapping or list with the address that was given in place of its mirror's path; the same where no
    address was given. What is no mapping and no list stays: rows of a comparison that lie in a file are not read."""
    if not _ADDRESSES:
        return said
    if isinstance(said, str):
        for path, url in _ADDRESSES.items():
            said = said.replace(path, url)
        return said
    if isinstance(said, dict):
        return {key: as_addressed(value) for key, value in said.items()}
    return [as_addressed(value) for value in said] if isinstance(said, list) else said


def names_a_mirror(said: str) -> bool:
    """Whether a text, as of a job's parameters, has the path of a mirror in it."""
    return INSIDE in said


def is_mirrored(path: Path | str) -> bool:
    """Whether the file stands for a remote object, and may have holes.

    Raises:
        DumpError: it lies in a mirror that nobody asked for: its holes would read as zeros.
    """
    whole = str(path)
    if INSIDE not in whole:
        return False
    whole = os.path.abspath(whole)
    root = os.environ.get(_ROOT)
    if root is not None and whole.startswith(root):
        return True
    head, _, tail = whole.partition(INSIDE)
    if os.path.exists(f"{head}{INSIDE}{tail.partition(os.sep)[0]}{os.sep}about.json"):
        raise DumpError(
            "the file is a part of a cache of remote objects, most of which is not here", file=str(path),
            hint="give the URL again, not its cache",
        )  # fmt: skip
    return False
