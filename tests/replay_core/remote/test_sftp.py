"""`sftp://`: another machine's files by ranges, as the user's ssh lets them in, and nobody it does not know."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replay_core.errors import DumpError, RequestError, UnavailableError
from replay_core.remote import mirror as mirrors
from replay_core.remote import sftp
from replay_core.remote.mirror import mirror
from tests.replay_core.remote.test_mirror import CAP, a_dump, tensor

asyncssh = pytest.importorskip("asyncssh", reason="asyncssh is not installed")
pytest.importorskip("obstore", reason="obstore is not installed")


@dataclass
class Machine:
    """A machine behind ssh whose root is a folder of this one."""

    root: Path
    home: Path
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    port: int = 0
    reads: list[int] = field(default_factory=list)
    #: Reads before which the connection ends, from the next on.
    drops: int = 0
    connections: list[Any] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"sftp://tester@127.0.0.1:{self.port}"

    async def serve(self) -> Any:
        machine = self

        class Server(asyncssh.SFTPServer):  # type: ignore[misc, name-defined]
            def __init__(self, channel: Any) -> None:
                super().__init__(channel, chroot=str(machine.root))
                machine.connections.append(channel.get_connection())

            async def read(self, file: Any, offset: int, size: int) -> bytes:
                if machine.drops:
                    machine.drops -= 1
                    self.channel.get_connection().abort()
                machine.reads.append(size)
                data: bytes = super().read(file, offset, size)
                return data

        key = asyncssh.generate_private_key("ssh-ed25519")
        user = asyncssh.generate_private_key("ssh-ed25519")
        ssh = self.home / ".ssh"
        ssh.mkdir(parents=True)
        user.write_private_key(str(ssh / "id_ed25519"))
        os.chmod(ssh / "id_ed25519", 0o600)
        (ssh / "allowed").write_bytes(user.export_public_key())
        listening = await asyncssh.listen(
            "127.0.0.1", 0, server_host_keys=[key], sftp_factory=Server, authorized_client_keys=str(ssh / "allowed")
        )
        self.port = listening.get_port()
        (ssh / "known_hosts").write_text(f"[127.0.0.1]:{self.port} {key.export_public_key().decode()}")
        return listening


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    one = Machine(tmp_path / "root", tmp_path / "home")
    one.root.mkdir()
    monkeypatch.setenv("HOME", str(one.home))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    monkeypatch.setenv("RLDBG_MIRRORS", "")
    monkeypatch.setattr("replay_core.remote.objects._FIRST_PAUSE_S", 0.001)
    mirrors._about.cache_clear()
    thread = threading.Thread(target=one.loop.run_forever)
    thread.start()
    listening = asyncio.run_coroutine_threadsafe(one.serve(), one.loop).result(30)
    yield one
    sftp._loop().drop(f"tester@127.0.0.1:{one.port}")

    async def end() -> None:
        listening.close()
        await listening.wait_closed()
        for connection in one.connections:
            connection.abort()
            await connection.wait_closed()
        await asyncio.sleep(0)  # a transport closes at the loop's next turn

    asyncio.run_coroutine_threadsafe(end(), one.loop).result(30)
    one.loop.call_soon_threadsafe(one.loop.stop)
    thread.join()
    one.loop.close()


def test_a_dump_of_another_machine_reads_as_the_files_themselves(machine: Machine, tmp_path: Path) -> None:
    a_dump(machine.root / "data/my runs/a")
    path, left = mirror(f"{machine.url}/data/my%20runs/a", tmp_path / "cache", CAP)
    assert (left, machine.reads) == ([], [])
    assert np.array_equal(tensor(path, "weight"), tensor(machine.root / "data/my runs/a", "weight"))


def test_one_row_costs_no_whole_file_and_is_kept(machine: Machine, tmp_path: Path) -> None:
    from replay_core import pages
    from replay_core.dumps import open_run

    a_dump(machine.root / "a", rows=4000)
    path, _ = mirror(f"{machine.url}/a", tmp_path / "cache", CAP)
    (record,) = open_run(path).records
    ref = next(one for one in record.tensors() if one.name.endswith("weight"))
    for _ in range(2):
        assert pages.part(ref, [(3000, 3001)])[0, 0] == 3_000_000.0
    assert sum(machine.reads) < 0.05 * ref.nbytes


def test_very_many_files_are_listed_and_none_is_opened(machine: Machine, tmp_path: Path) -> None:
    folder = machine.root / "many"
    folder.mkdir()
    for number in range(1500):
        (folder / f"{number:05}.pt").write_bytes(b"x")
    path, _ = mirror(f"{machine.url}/many", tmp_path / "cache", CAP)
    assert len(list(path.iterdir())) == 1500
    assert machine.reads == []


def test_links_are_left_out_and_said(machine: Machine, tmp_path: Path) -> None:
    (machine.root / "d").mkdir()
    (machine.root / "d/fine.pt").write_bytes(b"1")
    (machine.root / "d/out.pt").symlink_to("/etc/hostname")
    path, left = mirror(f"{machine.url}/d", tmp_path / "cache", CAP)
    assert [file.name for file in path.iterdir()] == ["fine.pt"]
    assert left == ["'out.pt' is left out: it is a link, a pipe or a device"]


def test_a_connection_that_ends_is_made_again(machine: Machine, tmp_path: Path) -> None:
    a_dump(machine.root / "a")
    path, _ = mirror(f"{machine.url}/a", tmp_path / "cache", CAP)
    machine.drops = 2
    assert np.array_equal(tensor(path, "weight"), tensor(machine.root / "a", "weight"))
    assert machine.drops == 0


def test_a_connection_that_always_ends_is_said_and_nothing_of_it_is_kept(machine: Machine, tmp_path: Path) -> None:
    a_dump(machine.root / "a")
    path, _ = mirror(f"{machine.url}/a", tmp_path / "cache", CAP)
    machine.drops = 10**6
    with pytest.raises(DumpError) as caught:
        tensor(path, "weight")
    assert caught.value.hint
    machine.drops = 0
    assert np.array_equal(tensor(path, "weight"), tensor(machine.root / "a", "weight"))


def test_a_file_that_is_written_anew_or_cut_short_is_no_mixture(machine: Machine, tmp_path: Path) -> None:
    a_dump(machine.root / "a")
    path, _ = mirror(f"{machine.url}/a", tmp_path / "cache", CAP)
    tensor(path, "logprobs")
    file = max((machine.root / "a").rglob("*"), key=lambda one: one.stat().st_size if one.is_file() else -1)
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(DumpError, match="written anew"):
        tensor(path, "weight")


def test_nothing_there_and_a_host_that_nobody_knows_are_two_errors(machine: Machine, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="nothing is there"):
        mirror(f"{machine.url}/none", tmp_path / "cache", CAP)
    sftp._loop().drop(f"tester@127.0.0.1:{machine.port}")
    (machine.home / ".ssh/known_hosts").write_text("")
    with pytest.raises(RequestError, match="one may not look there") as caught:
        mirror(f"{machine.url}/none", tmp_path / "cache", CAP)
    assert "known_hosts" in str(caught.value.hint)


def test_no_key_and_no_machine_are_said(machine: Machine, tmp_path: Path) -> None:
    (machine.home / ".ssh/id_ed25519").unlink()
    with pytest.raises(RequestError, match="one may not look there"):
        mirror(f"{machine.url}/a", tmp_path / "cache", CAP)
    with pytest.raises(UnavailableError, match="does not answer"):
        mirror("sftp://127.0.0.1:9/a", tmp_path / "cache", CAP)
    with pytest.raises(RequestError, match="password"):
        mirror("sftp://me:secret@127.0.0.1/a", tmp_path / "cache", CAP)


def test_a_file_that_goes_while_its_folder_is_listed_is_left_out(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_dump(machine.root / "a")
    walk, goes = sftp._walk, [1, 1]

    async def walked(*arguments: Any) -> AsyncIterator[Any]:
        if goes:
            goes.pop()
            raise asyncssh.SFTPNoSuchFile("gone between its name and its size")
        async for one in walk(*arguments):
            yield one

    monkeypatch.setattr(sftp, "_walk", walked)
    path, _ = mirror(f"{machine.url}/a", tmp_path / "cache", CAP)
    assert np.array_equal(tensor(path, "weight"), tensor(machine.root / "a", "weight"))
