"""The objects behind an address: what is there, and a range of one, each of the state that was listed.

A source is what answers for a scheme: an object store or a web server (`store`), the hub of Hugging Face (`hub`), a
machine behind ssh (`sftp`). Each is loaded by who names it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from replay_core.errors import DumpError, TruncatedError
from replay_core.remote.addresses import Address

#: Tries of a range whose connection ended midway; what was refused or is not there is not asked for twice.
TRIES = 4
#: A dump of more is asked for in parts.
MOST_OBJECTS = 200_000
_FIRST_PAUSE_S = 0.2


@dataclass(frozen=True)
class Listed:
    """One object as it was when it was listed.

    etag: what changes with its bytes; "" where the server gives none.
    edition: under which name its bytes stay what they are (a commit), where there is one.
    """

    etag: str
    nbytes: int
    modified_s: float
    edition: str = field(default="", compare=False)


class AgainError(Exception):
    """A range did not come whole, and may the next time; says why."""


class Source(Protocol):
    """What answers for an address."""

    def objects(self) -> Iterator[tuple[str, Listed | str]]:
        """Every object under the address, its name relative to it: how it is listed, or why it is left out. Of an
        address that is one object, "" and that.

        Raises:
            RequestError: nothing is there, or one may not look.
            UnavailableError: the library is not installed, or nobody answers.
        """

    def span(self, name: str, held: Listed, start: int, end: int) -> bytes:
        """The bytes `start:end` of the object, or fewer.

        Raises:
            DumpError: it is another one now, or gone, or not to be read.
            AgainError: they did not come.
        """


def source_of(address: Address) -> Source:
    """Who answers for an address."""
    if address.scheme == "hf":
        from replay_core.remote.hub import Hub

        return Hub.of(address)
    if address.scheme in ("sftp", "ssh"):
        from replay_core.remote.sftp import RemoteMachine

        return RemoteMachine.of(address)
    from replay_core.remote.store import Store

    return Store.of(address)


def fetch(address: Address, name: str, held: Listed, start: int, end: int) -> bytes:
    """The bytes `start:end` of the object, which is still the one that was listed.

    Raises:
        DumpError: it is another one now, or gone; or the connection ended at each try.
    """
    source, why = source_of(address), ""
    for attempt in range(TRIES):
        if attempt:
            time.sleep(_FIRST_PAUSE_S * 2 ** (attempt - 1))
        try:
            data = source.span(name, held, start, end)
        except AgainError as error:
            why = str(error)
            continue
        if len(data) == end - start:
            return data
        why = f"{len(data):,} bytes"
    raise TruncatedError(
        f"the connection ended at each of {TRIES} tries",
        file=shown(address, name),
        expected=f"{end - start:,} bytes at offset {start:,}",
        found=why,
        hint="run the command again: what came is kept",
    )


def shown(address: Address, name: str) -> str:
    """An object as its URL."""
    return f"{address}/{name}" if name else str(address)


def changed(file: str) -> DumpError:
    """The error of an object that is another one now."""
    return DumpError(
        "the object was written anew since it was listed",
        file=file,
        expected="the same object at each read",
        found="another one",
        hint="run the command again, when its upload has ended",
    )


def gone(file: str) -> DumpError:
    """The error of an object that was there when it was listed."""
    return DumpError("the object is gone since it was listed", file=file, hint="run the command again")
