"""A remote dump as a folder of this machine: each object a file with holes, filled by ranges as it is read.

A snapshot is one listing: names, sizes, etags. Whoever opens the same URL again gets the same folder while nothing has
changed there, and another one as soon as something has, with the blocks of what has not. So a file of a snapshot never
changes its meaning. A hole would read as zeros: files of a mirror are known by the folder they lie in, and
`file_spans`, through which every byte of a dump goes, fetches before it reads.

    ROOT/rldbg-remote/URL-LISTING/about.json    the address and the objects
                                 /tree/…        the files
                                 /blocks/…      a byte for each block of a file: 1 where it is here
"""

from __future__ import annotations

import json
import os
import shutil
import time
from contextlib import suppress
from dataclasses import astuple
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from tempfile import mkdtemp

from replay_core.errors import DumpError, RequestError
from replay_core.mirrored import FOLDER, INSIDE, keep_under
from replay_core.remote.addresses import Address, address, why_not_a_file
from replay_core.remote.objects import MOST_OBJECTS, Listed, fetch, source_of

BLOCK = 1 << 16
#: Beside the objects of a dump for as long as `upload` sends them.
UPLOADING = "rldbg-uploading.json"
#: Bytes asked for at a time: what is lost when a connection ends.
_SPAN = 8 << 20
_SNAPSHOTS = 16
_IN_USE_S = 3600.0


def mirror(url: str, root: Path, cap_bytes: int) -> tuple[Path, list[str]]:
    """The folder (or file) that stands for what the URL names, and what of it was left out. No object is read.

    Args:
        cap_bytes: about what all mirrors under `root` may take; past it tensors are read and not kept.

    Raises:
        RequestError: the URL is none, nothing is there, or one may not look.
        UnavailableError: the library is missing, or nobody answers.
    """
    where = address(url)
    keep_under(root)
    found, left = _listed(where)
    digest = sha256(str(where).encode()).hexdigest()[:12]
    state = json.dumps([str(where), sorted((name, astuple(held)) for name, held in found.items())])
    folder = root / FOLDER / f"{digest}-{sha256(state.encode()).hexdigest()[:12]}"
    if not (folder / "about.json").exists():
        _make(folder, where, found, cap_bytes, before=_newest(root, digest))
    with suppress(OSError):
        os.utime(folder)
    _prune(root, cap_bytes, folder)
    # One object keeps its own name, by which dialects know it.
    return folder / "tree" / (where.key.rpartition("/")[2] or "object" if "" in found else ""), left


def _listed(where: Address) -> tuple[dict[str, Listed], list[str]]:
    found: dict[str, Listed] = {}
    left: list[str] = []
    for name, held in source_of(where).objects():
        if len(found) >= MOST_OBJECTS:
            raise RequestError(
                f"more than {MOST_OBJECTS:,} objects are there", file=str(where), hint="name a folder below it"
            )
        if name and (why := why_not_a_file(name)):
            # An empty one is how some clients write a folder.
            if isinstance(held, str) or held.nbytes or not name.endswith("/"):
                left.append(f"{name!r} is left out: {why}")
            continue
        if isinstance(held, str):
            left.append(f"{name!r} is left out: {held}")
        else:
            found[name] = held
    if found.pop(UPLOADING, None) is not None:
        left.append(f"an upload has not ended: files may be missing; rldbg upload DUMP {where} goes on with it")
    folders = {name[:at] for name in found for at in range(len(name)) if name[at] == "/"}
    for name in sorted(folders & found.keys()):
        if found[name].nbytes:
            left.append(f"{name!r} is left out: it is a folder as well")
        del found[name]
    return found, left


def _make(folder: Path, where: Address, found: dict[str, Listed], cap_bytes: int, before: Path | None) -> None:
    """The snapshot, under another name until it is whole."""
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    made = Path(mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        known = _about(before).held if before is not None else {}
        for name, held in found.items():
            file = name or where.key.rpartition("/")[2] or "object"
            tree, blocks = made / "tree" / file, made / "blocks" / file
            tree.parent.mkdir(parents=True, exist_ok=True)
            blocks.parent.mkdir(parents=True, exist_ok=True)
            # Marks without their bytes would make numbers of holes: both files are the earlier ones, or neither.
            if before is None or not held.etag or known.get(name) != held or not _linked(before, made, file):
                with open(tree, "wb") as empty:
                    empty.truncate(held.nbytes)
                os.utime(tree, (held.modified_s, held.modified_s))
                blocks.unlink(missing_ok=True)
                blocks.touch()
        (made / "tree").mkdir(exist_ok=True)
        facts = {
            "url": str(where),
            "cap_bytes": cap_bytes,
            "objects": {name: astuple(held) for name, held in found.items()},
        }
        (made / "about.json").write_text(json.dumps(facts), encoding="utf-8")
        try:
            made.rename(folder)
        except OSError:
            if not (folder / "about.json").exists():  # else another process was first
                raise
    except OSError as error:
        raise RequestError(f"the cache cannot be written: {error.strerror}", file=str(folder)) from None
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _linked(before: Path, made: Path, file: str) -> bool:
    """Whether the blocks that an earlier snapshot has of an object, and their marks, are this one's now."""
    try:
        os.link(before / "tree" / file, made / "tree" / file)
    except OSError:
        return False
    try:
        os.link(before / "blocks" / file, made / "blocks" / file)
    except OSError:
        (made / "tree" / file).unlink()
        return False
    return True


class _About:
    """What is known of a snapshot, and how much of it is here."""

    def __init__(self, folder: Path) -> None:
        facts = json.loads((folder / "about.json").read_text(encoding="utf-8"))
        self.where = address(facts["url"])
        self.held = {name: Listed(*held) for name, held in facts["objects"].items()}
        self.left_bytes = int(facts["cap_bytes"]) - _kept(folder)


@lru_cache(maxsize=16)
def _about(folder: Path) -> _About:
    return _About(folder)


def _place(path: str) -> tuple[_About, str, Listed, str]:
    """Whose file it is: the snapshot, the object's name, its state, the file of its blocks."""
    head, _, tail = os.path.abspath(path).partition(INSIDE)
    snapshot, room, name = (*tail.split(os.sep, 2), "", "")[:3]
    try:
        about = _about(Path(f"{head}{INSIDE}{snapshot}"))
        held = about.held.get(name.replace(os.sep, "/"))
        key = name.replace(os.sep, "/")
        if held is None and "" in about.held:
            key, held = "", about.held[""]
    except (OSError, ValueError, KeyError, TypeError):
        held = None
    if held is None or room != "tree":
        raise DumpError(
            "the file is a part of a cache that is no longer whole", file=path, hint="give the URL again, not its cache"
        )
    return about, key, held, f"{head}{INSIDE}{snapshot}{os.sep}blocks{os.sep}{name}"


def need(path: str, fd: int, start: int, end: int) -> None:
    """Have the bytes `start:end` of a mirrored file, which is open for reading as `fd`.

    Raises:
        DumpError: they cannot be had. Nothing of a block that did not come whole is kept.
    """
    about, name, held, blocks = _place(path)
    end = min(end, held.nbytes)
    if start >= end:
        return
    first, last = start // BLOCK, (end - 1) // BLOCK + 1
    try:
        with open(blocks, "r+b", buffering=0) as marks:
            here = os.pread(marks.fileno(), last - first, first).ljust(last - first, b"\0")
            for begin, stop in _missing(here, first):
                data = fetch(about.where, name, held, begin * BLOCK, min(stop * BLOCK, held.nbytes))
                _keep(fd, path, begin * BLOCK, data)
                os.pwrite(marks.fileno(), b"\1" * (stop - begin), begin)
                about.left_bytes -= len(data)
    except OSError as error:
        raise DumpError(
            f"the cache cannot be written: {error.strerror}", file=path, hint="XDG_CACHE_HOME=FOLDER names another one"
        ) from None


def straight(path: str, buffer: memoryview, offset: int) -> bool:
    """Fill the buffer from the object itself where the cache is full; False where it was not done."""
    about, name, held, _ = _place(path)
    if about.left_bytes >= len(buffer) or offset + len(buffer) > held.nbytes:
        return False
    for begin in range(0, len(buffer), _SPAN):
        stop = min(begin + _SPAN, len(buffer))
        buffer[begin:stop] = fetch(about.where, name, held, offset + begin, offset + stop)
    return True


def _missing(here: bytes, first: int) -> list[tuple[int, int]]:
    """The stretches of blocks that are not here, each at most `_SPAN` long."""
    found: list[tuple[int, int]] = []
    for number, mark in enumerate(here, first):
        if mark:
            continue
        if found and found[-1][1] == number and (number - found[-1][0]) * BLOCK < _SPAN:
            found[-1] = (found[-1][0], number + 1)
        else:
            found.append((number, number + 1))
    return found


def _keep(fd: int, path: str, offset: int, data: bytes) -> None:
    """Write what came: on the disk before its blocks are marked, and the file's time stays the object's."""
    status = os.fstat(fd)
    with open(path, "r+b", buffering=0) as file:
        if not os.path.sameopenfile(file.fileno(), fd):
            raise DumpError("the cache was cleared while it was read", file=path, hint="run the command again")
        done = 0
        while done < len(data):
            done += os.pwrite(file.fileno(), memoryview(data)[done:], offset + done)
        os.fsync(file.fileno())
        os.utime(file.fileno(), ns=(status.st_atime_ns, status.st_mtime_ns))


def _kept(folder: Path) -> int:
    """Bytes of a snapshot that are on the disk."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                status = os.stat(os.path.join(place, name))
                total += getattr(status, "st_blocks", -(-status.st_size // 512)) * 512 // max(1, status.st_nlink)
    return total


def _snapshots(root: Path) -> list[tuple[float, Path]]:
    found = []
    with suppress(OSError):
        for one in (root / FOLDER).iterdir():
            with suppress(OSError):
                found.append((one.stat().st_mtime, one))
    return sorted(found, reverse=True)


def _newest(root: Path, digest: str) -> Path | None:
    of_it = (one for _, one in _snapshots(root) if one.name.startswith(f"{digest}-") and (one / "about.json").exists())
    return next(of_it, None)


def _prune(root: Path, cap_bytes: int, used: Path) -> None:
    """Remove the oldest snapshots past the cap; what was opened within the hour may be read by somebody."""
    kept_bytes, now = 0, time.time()
    for number, (opened, one) in enumerate(_snapshots(root)):
        kept_bytes += _kept(one)
        too_much = kept_bytes > cap_bytes or number >= _SNAPSHOTS
        if one != used and too_much and now - opened > _IN_USE_S:
            shutil.rmtree(one, ignore_errors=True)
