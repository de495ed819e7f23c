"""Children by fork: one Python imports torch and transformers, and every child of a replay begins where it stands.

    parent ══ socket ══ origin ── fork ── child ══ its three pipes ══ parent

Each child is a process of its own as before, in a session of its own: time and memory are independent of order, and a
crash costs one job. What is saved is the import, which takes longer than most cells. Origin and child end with the
parent. The origin never touches a device; where an import did, a child starts anew, since a fork cannot use it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import NoReturn

from replay_core.executors import wire

#: What the origin says: the child's number once it leads a session, then its status as `os.waitpid` has it.
_SAID = struct.Struct("<q")
#: Files that stay open from a runtime's start to a process's end; NVML, which only asks, opens others.
_DEVICES = ("/dev/nvidia-uvm", "/dev/kfd")
_ASKS_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
#: Jobs whose imports the origin has.
JOBS = frozenset(("replay_cell", "replay_why", "replay_own", "replay_library", "replay_slice", "replay_blame"))


@cache
def is_possible() -> bool:
    """Whether children can be forked here: on macOS libraries do not survive a fork; an old kernel, or a container that
    forbids it, has no file for a process.
    """
    if sys.platform != "linux":
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True


def command(role: str) -> list[str]:
    """The command that starts an origin."""
    return [*wire.child_command(role), "--origin"]


class ForkOrigin:
    """The parent's end: starts the Python that forks, at its first child."""

    def __init__(self, role: str, environment: Mapping[str, str]) -> None:
        self.role = role
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                command(role),
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=dict(environment),
                start_new_session=True,
            )
        self.socket = ours
        self._last: Forked | None = None

    @property
    def is_free(self) -> bool:
        """Whether it can fork another: a child whose end was not heard would be taken for the next one's beginning."""
        return self.process.poll() is None and (self._last is None or self._last.returncode is not None)

    def child(self) -> Forked:
        """Another child; the one before has ended."""
        self._last = Forked(self)
        return self._last

    def close(self) -> None:
        """End it, and a child that is left."""
        self.socket.close()
        wire.kill_group(self.process.pid)
        self.process.wait()


class Forked:
    """A child of an origin; what `executors.child` asks of a `subprocess.Popen`."""

    def __init__(self, origin: ForkOrigin) -> None:
        self._origin = origin
        self._pid: int | None = None
        self.returncode: int | None = None
        (stdin, ours_in), (ours_out, stdout), (ours_err, stderr) = os.pipe(), os.pipe(), os.pipe()
        self.stdin = open(ours_in, "wb")  # noqa: SIM115
        self.stdout, self.stderr = open(ours_out, "rb"), open(ours_err, "rb")  # noqa: SIM115
        try:
            with contextlib.suppress(BrokenPipeError):  # the origin died: `wait` tells how
                socket.send_fds(origin.socket, [b"f"], [stdin, stdout, stderr])
        finally:
            for end in (stdin, stdout, stderr):
                os.close(end)

    @property
    def pid(self) -> int:
        """Its number; the origin's until it is forked."""
        if self._pid is None:
            self._hear(0)
        return self._origin.process.pid if self._pid is None else self._pid

    def poll(self) -> int | None:
        """As Popen's."""
        while self.returncode is None and self._hear(0):
            pass
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """As Popen's.

        Raises:
            subprocess.TimeoutExpired: it is still there.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._hear(left):
                raise subprocess.TimeoutExpired("a forked child", timeout or 0.0)
        return self.returncode

    def _hear(self, timeout: float | None) -> bool:
        """Take what the origin says next; whether it said something in time."""
        if self.returncode is None and self._origin.socket.fileno() < 0:  # it was closed, and the child with it
            self.returncode = self._origin.process.wait()
            return True
        if self.returncode is not None or not _is_readable(self._origin.socket, timeout):
            return False
        try:
            said = self._origin.socket.recv(_SAID.size, socket.MSG_WAITALL)
        except ConnectionResetError:
            said = b""
        if len(said) < _SAID.size:
            self.returncode = self._origin.process.wait()
        elif self._pid is None:
            (self._pid,) = _SAID.unpack(said)
        else:
            self.returncode = os.waitstatus_to_exitcode(_SAID.unpack(said)[0])
        return True


def _is_readable(one: socket.socket, timeout: float | None) -> bool:
    asked = select.poll()  # not `select`, which knows no descriptor past 1023
    asked.register(one, select.POLLIN)
    return bool(asked.poll(None if timeout is None else timeout * 1000))


def serve(role: str, become: Callable[[list[str]], NoReturn], prepare: Callable[[], None]) -> NoReturn:
    """The origin: import once, fork whenever the parent sends the streams of a child, tell how it ended.

    become: be a child, by the words of its command line. prepare: import what children need.
    """
    faulthandler.enable(all_threads=True)
    connection = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    is_prepared = False
    while True:
        asked, streams, _, _ = socket.recv_fds(connection, 1, 3)
        if not asked:
            os._exit(0)
        if not is_prepared:
            _prepare(prepare, streams[2], nothing)
            is_prepared = True
        child = _forked(connection, streams)
        if child is None:
            become(_words(role))
        _keep(connection, child)


def _prepare(prepare: Callable[[], None], log: int, nothing: int) -> None:
    """What libraries print while they are imported belongs in the log of the child that waits for it."""
    for number in (1, 2):
        os.dup2(log, number)
    # Who only asks whether there is a device must not touch it: children of a process that did cannot use it.
    before = os.environ.get(_ASKS_NVML)
    os.environ[_ASKS_NVML] = "1"
    # Where that fails, each child finds out by itself and says so.
    with contextlib.suppress(Exception, SystemExit):
        prepare()
    del os.environ[_ASKS_NVML]
    if before is not None:
        os.environ[_ASKS_NVML] = before
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # an import may have closed it
            stream.flush()
    for number in (1, 2):
        os.dup2(nothing, number)


def _forked(connection: socket.socket, streams: list[int]) -> int | None:
    """The number of a child that has those streams and leads a session; None in the child itself."""
    leads, told = os.pipe()
    try:
        child = os.fork()
    except OSError as error:  # as many processes as there may be, or no memory for one
        os.write(streams[2], f"no process could be forked: {error.strerror}\n".encode())
        os._exit(1)
    if child == 0:
        os.setsid()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        connection.close()
        os.close(leads)
        os.close(told)
        if "numpy" in sys.modules:  # torch is seeded by the plan, Python's own generator by the fork
            sys.modules["numpy"].random.seed()
        return None
    for end in (*streams, told):
        os.close(end)
    os.read(leads, 1)  # ends once the child leads its session, or is dead
    os.close(leads)
    return child


def _keep(connection: socket.socket, child: int) -> None:
    """Tell of a child, and wait for its end or the parent's."""
    connection.sendall(_SAID.pack(child))
    ended = os.pidfd_open(child)
    ready, _, _ = select.select([ended, connection.fileno()], [], [])
    if ended not in ready:  # the parent left, or asks for another before this one is gone: it is not wanted any more
        wire.kill_group(child)
    os.close(ended)
    connection.sendall(_SAID.pack(os.waitpid(child, 0)[1]))


def _words(role: str) -> list[str]:
    """A child's command line. What no fork may take along is left behind by starting anew."""
    words = [role, "--die-with-parent", "--forked"]
    if _holds_a_device():
        command = [*wire.child_command(role)[:-1], *words[1:]]
        os.execv(command[0], command)
    return words


def _holds_a_device() -> bool:
    """Whether CUDA or ROCm was initialised in the process that forked this one."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda._is_in_bad_fork():
        return True
    try:
        open_files = os.listdir("/proc/self/fd")
    except OSError:
        return True  # nobody can tell
    for number in open_files:
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{number}") in _DEVICES:
                return True
    return False
