"""A dump of this machine brought to an object store: what is not there yet, its index last.

An object is there whole or not at all. Until the last one is, `rldbg-uploading.json` stands beside them, and whoever
reads the URL is told that files may be missing. What is there, as large and not older, is not sent again: killed, the
same command goes on where it was, and of a dump that a trainer still writes it sends what has come.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from replay_core.errors import DumpError, RequestError
from replay_core.regexes import regex
from replay_core.remote import store
from replay_core.remote.addresses import Address, address
from replay_core.remote.mirror import UPLOADING

#: Where objects can be put.
_WRITTEN = ("s3", "gs")
_INDEX = regex(r"index_rank\d{1,9}\.jsonl")
_MANIFEST = "manifest.json"
#: Files that are still being written under another name.
_UNFINISHED = (".tmp", ".part")
#: A larger object is sent in parts.
_ONE_REQUEST = 64 << 20
_AT_A_TIME = 4


class Uploaded(Struct):
    """What an upload came to: objects sent and their bytes, objects that were there, and what was left out and why."""

    url: str
    sent: int = 0
    nbytes: int = 0
    there: int = 0
    left: list[str] = field(default_factory=list)


def upload(dump: Path, url: str, said: Callable[[int, int, str], None] = lambda done, of, name: None) -> Uploaded:
    """Bring the files of a dump to a URL. said: hears of each object that was sent: how many, of how many, which.

    Raises:
        RequestError: the dump is no folder or has no file, the URL cannot be written, or another dump lies there.
        UnavailableError: the library is missing, or nobody answers.
        DumpError: a file cannot be read, or an object was not taken.
    """
    where = address(url)
    if where.scheme not in _WRITTEN:
        raise RequestError(
            f"nothing is uploaded to {where.scheme}://", file=str(where), expected="s3:// or gs://",
            hint="copy the folder by the means of that place",
        )  # fmt: skip
    found = Uploaded(str(where))
    # A trainer may be writing: what the index names by now is there when the files are listed.
    grown = {file.name: file.stat().st_size for file in dump.glob("index_rank*.jsonl")} if dump.is_dir() else {}
    files = _files(dump, found.left)
    there = dict(_there(where))
    _refuse_another(dump, files, where, there)
    if (
        _MANIFEST in files
        and _MANIFEST in there
        and "index_rank0.jsonl" not in files
        and any(map(_INDEX.fullmatch, files))
    ):
        # Every node of a job has one; that of rank 0's names the weights.
        files.remove(_MANIFEST)
        found.left.append(f"{_MANIFEST}: the one that is there stays, for rank 0 is not of this folder")
    if _MANIFEST in files and _MANIFEST in there and _bytes(where, _MANIFEST) != (dump / _MANIFEST).read_bytes():
        del there[_MANIFEST]  # as large, and another node's
    wanted = [name for name in files if not _is_there(dump / name, there.get(name))]
    found.there = len(files) - len(wanted)
    if not wanted:
        _end(where, there)
        return found
    # The index names what is there, so it comes when all of that is.
    last = [name for name in wanted if name == _MANIFEST or _INDEX.fullmatch(name)]
    first = [name for name in wanted if name not in set(last)]
    _put(where, UPLOADING, json.dumps({"objects": len(files)}).encode())
    pool = ThreadPoolExecutor(_AT_A_TIME, thread_name_prefix="upload")
    try:
        for names in (first, last):
            for name, nbytes in _each(pool, dump, where, names, grown):
                found.sent += 1
                found.nbytes += nbytes
                said(found.sent, len(wanted), name)
    finally:
        # Whoever interrupts does not wait for a bucket that answers nothing.
        pool.shutdown(wait=False, cancel_futures=True)
    _end(where, {UPLOADING: None})
    return found


def _each(
    pool: ThreadPoolExecutor, dump: Path, where: Address, names: Sequence[str], grown: Mapping[str, int]
) -> Iterator[tuple[str, int]]:
    """Send files, a few at a time; what fails ends it."""
    coming = iter(names)
    under_way = [
        (name, pool.submit(_send, dump / name, where, name, grown.get(name))) for name in islice(coming, 2 * _AT_A_TIME)
    ]
    try:
        while under_way:
            name, future = under_way.pop(0)
            yield name, future.result()
            under_way += [
                (one, pool.submit(_send, dump / one, where, one, grown.get(one))) for one in islice(coming, 1)
            ]
    finally:
        for _, future in under_way:
            future.cancel()


def _files(dump: Path, left: list[str]) -> list[str]:
    """The files below a folder, by their names in it. A link is not followed: it leads out of the dump."""
    if not dump.is_dir():
        raise RequestError("no folder is there", file=str(dump), expected="the folder of a dump")
    found = []
    for folder, folders, names in os.walk(dump):
        links = [name for name in sorted(folders) if os.path.islink(os.path.join(folder, name))]
        left += [f"{os.path.relpath(os.path.join(folder, name), dump)}: a link" for name in links]
        for name in sorted(names):
            path = os.path.join(folder, name)
            told = os.path.relpath(path, dump)
            if os.path.islink(path) or not os.path.isfile(path):
                left.append(f"{told}: no plain file")
            elif name.startswith(".") or name.endswith(_UNFINISHED):
                left.append(f"{told}: still being written, by its name")
            else:
                found.append(told.replace(os.sep, "/"))
    if not found:
        raise RequestError("the folder holds no file", file=str(dump), expected="a dump")
    return sorted(found)


def _there(where: Address) -> Iterator[tuple[str, tuple[int, float]]]:
    """Name -> size and time, of every object that is there."""
    errors = store.library().exceptions
    skip = len(where.key) + 1 if where.key else 0
    try:
        for chunk in store.bucket_of(where).list(where.key or None, chunk_size=1000):
            for one in chunk:
                modified = one["last_modified"]
                seconds = modified.timestamp() if isinstance(modified, datetime) else 0.0
                yield one["path"][skip:], (int(one["size"]), seconds)
    except (errors.NotFoundError, FileNotFoundError):
        return
    except (errors.BaseError, OSError, ValueError) as error:
        raise store.refused(where, error, errors) from None


def _is_there(file: Path, held: tuple[int, float] | None) -> bool:
    try:
        seen = file.stat()
    except OSError as error:
        raise DumpError(f"cannot read the file: {error.strerror}", file=str(file)) from None
    # A store says whole seconds.
    return held is not None and held[0] == seen.st_size and held[1] >= int(seen.st_mtime)


def _refuse_another(dump: Path, files: Sequence[str], where: Address, there: dict[str, tuple[int, float]]) -> None:
    """Refuse to lay one dump over another: an index only grows, so the one that is there begins this one."""
    for name in files:
        if not _INDEX.fullmatch(name) or name not in there:
            continue
        held = _bytes(where, name)
        with open(dump / name, "rb") as file:
            if file.read(len(held)) != held:
                raise RequestError(
                    "another dump lies there", file=f"{where}/{name}", expected=f"what {dump / name} begins with",
                    found="other records", hint="name another folder of the bucket",
                )  # fmt: skip
    known = {name for name in files if _INDEX.fullmatch(name)}
    others = [name for name in there if name != UPLOADING]
    if not known and others and not set(others) <= set(files):
        raise RequestError(
            "something else lies there", file=str(where), expected="nothing, or part of this dump",
            found=f"{len(others)} objects, such as {others[0]}", hint="name another folder of the bucket",
        )  # fmt: skip


def _key(where: Address, name: str) -> str:
    return "/".join(part for part in (where.key, name) if part)


def _bytes(where: Address, name: str) -> bytes:
    errors = store.library().exceptions
    try:
        return bytes(store.bucket_of(where).get(_key(where, name)).bytes())
    except (errors.BaseError, OSError, ValueError) as error:
        raise store.refused(where, error, errors) from None


def _send(file: Path, where: Address, name: str, first: int | None) -> int:
    """first: how many of its bytes, of a file that grows."""
    try:
        nbytes = file.stat().st_size if first is None else first
        with open(file, "rb") as opened:
            _put(where, name, opened if first is None else opened.read(first), use_multipart=nbytes > _ONE_REQUEST)
    except OSError as error:
        raise DumpError(f"cannot read the file: {error.strerror}", file=str(file)) from None
    return nbytes


def _put(where: Address, name: str, what: Any, *, use_multipart: bool = False) -> None:
    errors = store.library().exceptions
    try:
        store.bucket_of(where).put(_key(where, name), what, use_multipart=use_multipart)
    except errors.BaseError as error:
        raise DumpError(
            "the store did not take the object; the same command goes on from here", file=f"{where}/{name}",
            found=store.said(error), hint=store.credentials(where),
        ) from None  # fmt: skip


def _end(where: Address, there: dict[str, Any]) -> None:
    """Take away the word that an upload is under way."""
    errors = store.library().exceptions
    if UPLOADING in there:
        with suppress(errors.NotFoundError, FileNotFoundError):
            store.bucket_of(where).delete(_key(where, UPLOADING))
