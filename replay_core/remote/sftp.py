"""`sftp://[USER@]HOST[:PORT]/FOLDER` through asyncssh, as the user's ~/.ssh says: its config, keys, agent and hosts.

A host that known_hosts does not know is refused, and nobody is asked for a password. Paths begin at the root;
`sftp://HOST/~/FOLDER` at one's home.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import suppress
from functools import lru_cache
from stat import S_ISDIR, S_ISREG
from typing import Any, TypeVar
from urllib.parse import urlsplit

from msgspec import Struct

from replay_core.errors import DumpError, RequestError, UnavailableError
from replay_core.remote.addresses import Address, redacted
from replay_core.remote.objects import MOST_OBJECTS, AgainError, Listed, changed, gone, shown

T = TypeVar("T")

_CONNECT_S = 15.0
#: For one listing of a folder's page, or one span.
_ANSWER_S = 120.0
#: Folders below the named one that are looked into; a dump has few.
_DEPTH = 8
#: How often a folder is listed out of which a file goes meanwhile.
_WALKS = 3
_HINT = "`sftp HOST` must get in without a question: a key in the agent, and the host in ~/.ssh/known_hosts"


class RemoteMachine(Struct, frozen=True):
    """A folder, or a file, of another machine."""

    address: Address
    path: str

    @classmethod
    def of(cls, address: Address) -> RemoteMachine:
        key = address.key
        return cls(address, (key[2:] or ".") if key == "~" or key.startswith("~/") else f"/{key}")

    def objects(self) -> Iterator[tuple[str, Listed | str]]:
        """As `Source.objects`."""
        ssh = _library()
        try:
            found = _loop().run(self._found())
        except ssh.SFTPNoSuchFile:
            raise RequestError(
                "nothing is there", file=str(self.address), expected="a folder, or a file",
                hint="a path begins at the root: sftp://HOST/data/RUN, or sftp://HOST/~/RUN",
            ) from None  # fmt: skip
        except (ssh.SFTPPermissionDenied, ssh.PermissionDenied, ssh.HostKeyNotVerifiable) as error:
            raise RequestError(
                "one may not look there", file=str(self.address), found=_said(error), hint=_HINT
            ) from None
        except (ssh.Error, OSError, TimeoutError, ValueError) as error:
            _loop().drop(self._who)
            raise UnavailableError(
                "the machine does not answer", file=str(self.address), found=_said(error), hint=_HINT
            ) from None
        yield from found

    def span(self, name: str, held: Listed, start: int, end: int) -> bytes:
        """As `Source.span`."""
        ssh, file = _library(), shown(self.address, name)
        try:
            before, data, after = _loop().run(self._span(name, start, end))
        except ssh.SFTPNoSuchFile:
            raise gone(file) from None
        except (ssh.SFTPPermissionDenied, ssh.PermissionDenied, ssh.HostKeyNotVerifiable) as error:
            raise DumpError("one may not read the object", file=file, found=_said(error), hint=_HINT) from None
        except (ssh.Error, OSError, TimeoutError) as error:
            _loop().drop(self._who)
            raise AgainError(_said(error)) from None
        if before != held or after != held:
            raise changed(file)
        return data

    @property
    def _who(self) -> str:
        return self.address.host

    async def _found(self) -> list[tuple[str, Listed | str]]:
        client = await _loop().client(self._who)
        attributes = await client.stat(self.path)
        if not S_ISDIR(attributes.permissions or 0):
            return [("", _held(attributes))]
        for _ in range(_WALKS - 1):
            # A file of a run that is written may go between its name and its size; the folder is there.
            with suppress(_library().SFTPNoSuchFile):
                return await self._listing(client)
        return await self._listing(client)

    async def _listing(self, client: Any) -> list[tuple[str, Listed | str]]:
        found: list[tuple[str, Listed | str]] = []
        async for one in _walk(client, self.path, "", 0):
            found.append(one)
            if len(found) > MOST_OBJECTS:
                break
        return found

    async def _span(self, name: str, start: int, end: int) -> tuple[Listed, bytes, Listed]:
        client = await _loop().client(self._who)
        # Of the open file, not of its name: a file that took its place meanwhile is another one, before and after.
        async with client.open(f"{self.path}/{name}" if name else self.path, "rb") as file:
            before = _held(await file.stat())
            data = await file.read(end - start, start)
            return before, bytes(data), _held(await file.stat())


async def _walk(client: Any, path: str, below: str, depth: int) -> AsyncIterator[tuple[str, Listed | str]]:
    folders = []
    async for one in client.scandir(path):
        name, mode = str(one.filename), one.attrs.permissions or 0
        if name in (".", ".."):
            continue
        if S_ISDIR(mode):
            folders.append(name)
        elif S_ISREG(mode):
            yield f"{below}{name}", _held(one.attrs)
        else:
            yield f"{below}{name}", "it is a link, a pipe or a device"
    for name in sorted(folders):
        if depth >= _DEPTH:
            yield f"{below}{name}", f"folders more than {_DEPTH} deep are not looked into"
        elif "/" not in name:
            async for found in _walk(client, f"{path}/{name}", f"{below}{name}/", depth + 1):
                yield found


def _held(attributes: Any) -> Listed:
    """A file without an etag of its own: another size or time is another file."""
    at_ns = (attributes.mtime or 0) * 10**9 + (attributes.mtime_ns or 0)
    size = int(attributes.size or 0)
    return Listed(f"{size}-{at_ns}", size, at_ns / 1e9)


class _SshLoop:
    """A thread with the loop that the library needs, and its connections: one a host, kept while it lasts."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._clients: dict[str, Any] = {}
        threading.Thread(target=self._loop.run_forever, name="rldbg-sftp", daemon=True).start()

    def run(self, what: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(asyncio.wait_for(what, _ANSWER_S), self._loop).result()

    async def client(self, who: str) -> Any:
        known = self._clients.get(who)
        if known is None:
            ssh, parts = _library(), urlsplit(f"sftp://{who}")
            named = {"port": parts.port, "username": parts.username}
            connection = await asyncio.wait_for(
                ssh.connect(parts.hostname, **{name: value for name, value in named.items() if value}), _CONNECT_S
            )
            known = self._clients[who] = await connection.start_sftp_client(), connection
        return known[0]

    def drop(self, who: str) -> None:
        """Forget a connection: the next call makes another one."""
        known = self._clients.pop(who, None)
        if known is not None:
            self._loop.call_soon_threadsafe(known[1].abort)


@lru_cache(maxsize=1)
def _loop() -> _SshLoop:
    return _SshLoop()


def _library() -> Any:
    try:
        import asyncssh
    except ImportError:
        raise UnavailableError(
            "reading sftp:// needs asyncssh", expected="the extra `remote`", hint="pip install 'rldbg[remote]'"
        ) from None
    return asyncssh


def _said(error: BaseException) -> str:
    return redacted(" ".join(str(error).split()) or type(error).__name__)[:300]
