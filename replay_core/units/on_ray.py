"""The same units on the actors of a Ray cluster: `rldbg[ray]`.

An actor is a process that keeps its model warm between units, one per GPU, or per CPU where there is none. It is handed
one unit at a time; its death is that unit's outcome after two more tries, and another takes its place. The files are
written by the process that asked, so they are those of any other worker.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib import import_module
from typing import Any

from msgspec import Struct, field

import replay_core
from replay_core.budget import lift_limit
from replay_core.errors import (
    ChildDiedError,
    RequestError,
    RldbgError,
    UnavailableError,
    error_from_mapping,
    missing_library,
)
from replay_core.jobs import Job, OnEvent, Progress, ignore
from replay_core.units.folder import UnitFolder
from replay_core.units.plan import Plan, Unit
from replay_core.units.working import is_done, is_ready, keep, placed

#: How often a unit whose actor died is tried again.
RETRIES = 2
#: How long a cluster may take to answer the door.
_KNOCK_S = 10.0
#: How long the loop waits for an answer before it looks at its clock.
_LOOK_S = 0.5
#: Ray itself ends this process, as if its answer were 1, when its cluster's head did not answer for a minute: that is
#: said before. How often it is looked for, and how long it may be away.
_HEAD_EVERY_S, _HEAD_AWAY_S, _KNOCKS = 5.0, 30.0, 3
#: How long no actor is placed and none is at work before it is asked whether the cluster has a machine at all.
_PATIENCE_S = 10.0


class _Flight(Struct):
    """A unit in the air: who has it, since when, and what tells others that it is held."""

    unit: Unit
    actor: Any
    began: float
    held: ExitStack = field(default_factory=ExitStack)


class _Crew(Struct):
    """The actors without work, and those that were asked for: a cluster gives each its room when it has it."""

    ray: Any
    address: str = ""
    #: What each actor has one of: GPU or CPU.
    kind: str = "CPU"
    idle: list[Any] = field(default_factory=list)
    coming: dict[Any, Any] = field(default_factory=dict)
    #: Since when nothing was heard of any of those that were asked for, and none worked.
    quiet_since: float | None = None
    #: How many ended on their way one after another, and what was said of the last.
    lost: int = 0
    why: str = ""
    #: When the cluster's head was last looked for, and last there.
    asked_at: float = field(default_factory=time.monotonic)
    heard_at: float = field(default_factory=time.monotonic)
    unheard: int = 0

    def hire(self, count: int) -> None:
        """All of one kind: what a GPU computes is not mixed with what a CPU does, when the last GPU is gone."""
        for _ in range(count):
            actor = self.ray.remote(**{f"num_{self.kind.lower()}s": 1}, max_restarts=0)(_Worker).remote()
            self.coming[actor.version.remote()] = actor

    def welcome(self, answer: Any) -> None:
        """Raises RequestError where its machine has another rldbg. One that ended on its way is asked for again."""
        actor = self.coming.pop(answer)
        try:
            version = self.ray.get(answer)
        except self.ray.exceptions.RayError as error:
            self.lost, self.why = self.lost + 1, _in_one_line(error)
            if self.lost <= RETRIES:
                self.hire(1)
            return
        self.lost = 0
        if version != replay_core.__version__:
            raise RequestError(
                "the machines of the cluster have another rldbg", expected=replay_core.__version__, found=version,
                hint="pip install the same version on each: answers of two are never mixed",
            )  # fmt: skip
        self.idle.append(actor)

    def look_round(self, *, is_at_work: bool, left: int) -> bool:
        """Whether it waits for room by now. Raises UnavailableError where no machine is left, or no head."""
        self._look_for_the_head(left)
        if is_at_work or self.idle:
            self.quiet_since = None
            return False
        now = time.monotonic()
        self.quiet_since = self.quiet_since or now
        if now - self.quiet_since < _PATIENCE_S:
            return False
        try:
            found = None if self.ray.cluster_resources().get(self.kind) else "none"
        except (self.ray.exceptions.RayError, OSError, RuntimeError) as error:
            found = _in_one_line(error)
        if found is not None:
            raise UnavailableError(
                "no machine of the Ray cluster is left", expected=f"one with a {self.kind}", found=found,
                hint=_what_is_left(left),
            )  # fmt: skip
        return True

    def _look_for_the_head(self, left: int) -> None:
        now = time.monotonic()
        if now - self.asked_at < _HEAD_EVERY_S:
            return
        self.asked_at = now
        try:
            _knock(self.address)
        except OSError as error:
            self.unheard += 1
            # After a stall of this process itself the first knock tells nothing yet.
            if self.unheard >= _KNOCKS and now - self.heard_at > _HEAD_AWAY_S:
                raise UnavailableError(
                    "the head of the Ray cluster does not answer any more", expected=f"a cluster at {self.address}",
                    found=_in_one_line(error), hint=_what_is_left(left),
                ) from None  # fmt: skip
        else:
            self.heard_at, self.unheard = time.monotonic(), 0


def _what_is_left(units: int) -> str:
    return f"the same command does the {units:,} units that are left: what is done is kept"


def work_on_ray(
    plan: Plan,
    folder: UnitFolder,
    units: Sequence[Unit],
    address: str,
    on_event: OnEvent = ignore,
    *,
    time_limit_s: float | None = None,
) -> None:
    """Do every unit that has no answer yet on the actors of a cluster; without an address, of one on this machine.

    Raises:
        UnavailableError: Ray is not installed, or the cluster has neither a GPU nor a CPU.
        RequestError: no cluster answers there, or its rldbg is another version.
        KeyboardInterrupt: the caller wants no more; every actor is ended.
    """
    waiting = deque(unit for unit in units if not is_done(folder, unit))
    done, total = len(units) - len(waiting), len(units)
    on_event(Progress(done, total, "units"))
    if not waiting:
        return
    ray = _connected(address)
    flights: dict[Any, _Flight] = {}
    tries: dict[str, int] = {}
    of_id = {unit.id: unit for unit in plan.units}
    try:
        room, kind = _room(ray)
        crew = _Crew(ray, address, kind)
        crew.hire(min(len(waiting), room))
        while waiting or flights:
            while crew.idle and (unit := _next(folder, waiting, of_id)) is not None:
                actor = crew.idle.pop()
                flight, job = _Flight(unit, actor, time.monotonic()), placed(plan, unit, folder, is_written_there=False)
                flight.held.enter_context(folder.held(unit.id))
                flights[actor.perform.remote(job.kind, dict(job.params))] = flight
            if not flights and crew.idle:
                return  # what is left waits for figures that are not there; the gathering names them
            if not flights and not crew.coming:
                raise UnavailableError(
                    "no actor of the Ray cluster starts", expected="rldbg[ray,replay] on its machines", found=crew.why,
                    hint="ray logs; what is done is kept",
                )  # fmt: skip
            ready, _ = ray.wait([*flights, *crew.coming], num_returns=1, timeout=_LOOK_S)
            if crew.look_round(is_at_work=bool(flights), left=len(waiting) + len(flights)):
                on_event(Progress(done, total, "waiting for room on the cluster"))
            ended = _overdue(ray, flights, time_limit_s)
            for answer in dict.fromkeys([*ready, *ended]):
                if answer in crew.coming:
                    crew.welcome(answer)
                    continue
                flight = flights.pop(answer)
                unit, took_s = flight.unit, time.monotonic() - flight.began
                with flight.held:
                    document, error = _heard(ray, answer, took_s, time_limit_s)
                    if isinstance(error, ChildDiedError):
                        tries[unit.id] = tries.get(unit.id, 0) + 1
                        crew.hire(1)
                        if tries[unit.id] <= RETRIES:
                            waiting.append(unit)
                            continue
                    elif answer in ended:
                        crew.hire(1)  # its answer came while it was ended
                    else:
                        crew.idle.append(flight.actor)
                    keep(plan, folder, unit, document, error, took_s)
                done += 1
                on_event(Progress(done, total, unit.label))
    finally:
        for flight in flights.values():
            with contextlib.suppress(Exception):
                ray.kill(flight.actor)
            flight.held.close()
        ray.shutdown()


def _next(folder: UnitFolder, waiting: deque[Unit], of_id: Mapping[str, Unit]) -> Unit | None:
    """The next unit that can be done now; None where there is none."""
    for _ in range(len(waiting)):
        unit = waiting.popleft()
        if is_ready(folder, unit, of_id):
            return unit
        waiting.append(unit)
    return None


def _connected(address: str) -> Any:
    # A raylet is no reader of untrusted files: it reserves more memory than one may have.
    lift_limit()
    try:
        import ray
    except ModuleNotFoundError as error:
        missing = missing_library(error, "--ray")
        if missing is None:
            raise
        raise missing from None
    local = {} if address else {"include_dashboard": False}
    try:
        _knock(address)
        ray.init(address=address or "local", log_to_driver=False, logging_level="ERROR", **local)
    except (ConnectionError, RuntimeError, ValueError, OSError, TimeoutError) as error:
        raise RequestError(
            "no Ray cluster of this version answers there",
            expected=f"a cluster of Ray {ray.__version__} at --ray ADDRESS",
            found=f"{address or 'a local one'}: {_in_one_line(error)}",
            hint="ray status --address ADDRESS; RAY_AUTH_MODE=token where it wants one; --ray alone starts one here",
        ) from None
    return ray


#: How an HTTP/2 connection begins, as all of Ray's do; a server's first frame is its settings (RFC 9113, 3.4).
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
_SETTINGS = 4


def _knock(address: str) -> None:
    """Raise an OSError where nobody listens, or something that speaks otherwise: Ray itself tries for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return
    with socket.create_connection((host, int(port)), _KNOCK_S) as door:
        if os.environ.get("RAY_USE_TLS") == "1":
            return  # it waits for a handshake first
        door.sendall(_PREFACE)
        heard = b""
        while len(heard) < 4 and (more := door.recv(4 - len(heard))):
            heard += more
        if heard[3:4] != bytes([_SETTINGS]):
            raise ConnectionError(f"what listens there is no Ray: it answers {heard!r}")


def _in_one_line(error: BaseException) -> str:
    """Ray says which versions differ on the lines after the first."""
    return " ".join(str(error).split() or [repr(error)])[:200]


def _room(ray: Any) -> tuple[int, str]:
    """How many actors it has room for, and what each has one of."""
    resources = ray.cluster_resources()
    kind = "GPU" if int(resources.get("GPU", 0)) else "CPU"
    count = int(resources.get(kind, 0))
    if not count:
        raise UnavailableError(
            "the Ray cluster has no room", expected="a GPU or a CPU", found="none", hint="ray status"
        )
    return count, kind


class _Worker:
    """What an actor is made of: a process that does jobs, as a child of `executors` does."""

    def version(self) -> str:
        return replay_core.__version__

    def perform(self, kind: str, params: dict[str, Any]) -> dict[str, Any]:
        """The answer, or the error as a mapping: an exception of ours would reach the other side as Ray's own."""
        from replay_core.executors.in_process import InProcess

        try:
            # A process of its own begins at the top, as the loop of a child does.
            return {"result": InProcess(import_module("replay_core.desk").perform).run(Job(kind, params))}
        except RldbgError as error:
            return {"error": error.to_mapping()}


def _overdue(ray: Any, flights: dict[Any, _Flight], time_limit_s: float | None) -> list[Any]:
    """Answers that will not come: their actors are ended."""
    if time_limit_s is None:
        return []
    late = [answer for answer, one in flights.items() if time.monotonic() - one.began > time_limit_s]
    if late:
        # What has come by now is an answer, however late this process looks.
        _, late = ray.wait(late, num_returns=len(late), timeout=0)
    for answer in late:
        ray.kill(flights[answer].actor)
    return late


def _heard(
    ray: Any, answer: Any, took_s: float, time_limit_s: float | None
) -> tuple[dict[str, Any] | None, RldbgError | None]:
    try:
        told = ray.get(answer)
    except ray.exceptions.RayError as error:
        late = time_limit_s is not None and took_s > time_limit_s
        said = f"no answer after {time_limit_s:.0f} s" if late else _in_one_line(error)
        return None, ChildDiedError("the actor ended without an answer", expected="a document", found=said)
    return (told["result"], None) if "result" in told else (None, error_from_mapping(told["error"]))
