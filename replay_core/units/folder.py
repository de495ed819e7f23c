"""The files of `--out DIR`: plan.json, an outcome and a document per unit, and who holds a unit now.

    plan.json                what was asked, and every unit
    outcomes/ID.json         how a unit ended; written last, whole or not at all: where it says done, the unit is done
    documents/ID.json        its document
    figures/ID.jsonl         what a unit that measures left, in the place of a document
    held/ID.json             the worker that has it, touched while it lives
    cells/ID/TRY/            what a replay left that disagrees

Workers on several machines share it through their disk, and nothing else: no lock that a network disk may not keep, no
clock but the disk's own.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypedDict

from msgspec import Struct

from replay_core.documents.version import SCHEMA_VERSION
from replay_core.errors import DumpError, RequestError
from replay_core.file_spans import regular
from replay_core.jobs import Job
from replay_core.recorder.writer import replace_whole
from replay_core.units.plan import Plan, Request, Unit, refused

PLAN = "plan.json"
_KIND = "units"
#: A worker touches what it holds as often.
BEAT_S = 5.0
#: Who has not touched it for so long is gone: a disk of a cluster may show a change late.
GONE_AFTER_S = 60.0
#: A file half written at once for longer was left by a worker that is gone; one that grows may be quiet for longer.
_LEFT_S = 2.0
#: Of every document.
_END = b"}\n"
#: No outcome or plan is larger: a hundred thousand units are.
_MOST_BYTES = 1 << 28


class Outcome(TypedDict):
    """How a unit ended. `error` as `RldbgError.to_mapping`; `exit_code` None where there is no answer."""

    state: str
    exit_code: int
    said: str
    error: dict[str, Any] | None
    took_s: float
    tries: int


class UnitFolder(Struct, frozen=True):
    """A directory of units.

    Raises:
        RequestError: (every method that writes) the directory cannot be written.
        DumpError: (every method that reads) a file of it is damaged.
    """

    path: Path

    def document(self, id: str) -> Path:
        return self.path / "documents" / f"{id}.json"

    def figures(self, id: str) -> Path:
        return self.path / "figures" / f"{id}.jsonl"

    def answer(self, unit: Unit) -> Path:
        """The file that is there where the unit has an answer."""
        return self.figures(unit.id) if unit.measures else self.document(unit.id)

    def is_answered(self, unit: Unit) -> bool:
        """Whether that file is there and has its end. A disk that lost power may keep a name and not what it names."""
        answer = self.answer(unit)
        try:
            with regular(answer) as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - len(_END)))
                # A unit that measures may find nothing worth keeping; of a damaged line nothing is taken.
                return file.read() == _END or unit.measures
        except (OSError, DumpError):
            return False

    def cells(self, id: str) -> Path:
        return self.path / "cells" / id

    def new_try(self, id: str) -> Path:
        """Where a replay that begins now puts its dumps; what a worker that is gone left there goes.

        Each has a place of its own: nothing recorded is ever overwritten, and two may take one unit.
        """
        if not self.holders().get(id):
            shutil.rmtree(self.cells(id), ignore_errors=True)
        return self.cells(id) / secrets.token_hex(4)

    def keep_plan(self, plan: Plan) -> None:
        """Put the plan there; over an older one of the same request, whose dump has grown or changed since.

        Raises:
            RequestError: the directory holds the units of another request.
            DumpError: it holds those of another version, whose plan is left as it is.
        """
        is_damaged = False
        try:
            known = self._read(self.path / PLAN)
        except DumpError:
            known, is_damaged = None, True  # units of another request have other ids
        request = json.loads(json.dumps(plan.request.to_mapping()))
        if known is not None and known.get("kind") == _KIND:
            self._need_this_version(known)
        if known is not None and known.get("request") != request:
            raise refused(known.get("request") or {}, plan.request, self.path / PLAN)
        if known is None and not is_damaged and self.path.is_dir() and any(self.path.iterdir()):
            raise RequestError(
                "the directory holds other files", file=str(self.path), expected="an empty or a new one",
                found=", ".join(sorted(one.name for one in self.path.iterdir())[:4]), hint="--out NEW_DIR",
            )  # fmt: skip
        units = [
            {"id": one.id, "label": one.label, "params": one.job.params, "run": one.run, "step": one.step,
             "rank": one.rank, "micro": one.micro, **({"measures": True} if one.measures else {}),
             **({"needs": one.needs} if one.needs else {})}
            for one in plan.units
        ]  # fmt: skip
        made = {
            "kind": _KIND, "schema_version": SCHEMA_VERSION, "request": request, "units": units,
            "only_a": plan.only_a, "only_b": plan.only_b, "notes": plan.notes,
        }  # fmt: skip
        if known is None or json.loads(json.dumps(made)) != known:
            self._write(self.path / PLAN, made)

    def plan(self) -> Plan:
        """The plan that a worker put there.

        Raises:
            RequestError: there is none.
        """
        found = self._read(self.path / PLAN)
        if found is None or found.get("kind") != _KIND:
            raise RequestError(
                "the directory holds no units", file=str(self.path), expected=PLAN, found="none",
                hint="rldbg compare A B --out DIR begins one",
            )  # fmt: skip
        self._need_this_version(found)
        try:
            request = Request(**found["request"])
            units = tuple(
                Unit(one["id"], one["label"], Job(request.command, one["params"]), one["run"], one["step"],
                     one["rank"], one["micro"], bool(one.get("measures")), tuple(one.get("needs", ())))
                for one in found["units"]
            )  # fmt: skip
            return Plan(request, units, tuple(found["only_a"]), tuple(found["only_b"]), tuple(found["notes"]))
        except (KeyError, TypeError) as error:
            raise DumpError("the plan is damaged", file=str(self.path / PLAN), expected="what a worker writes",
                            found=f"{type(error).__name__}: {error}") from None  # fmt: skip

    def _need_this_version(self, plan: Mapping[str, Any]) -> None:
        if plan.get("schema_version") != SCHEMA_VERSION:
            raise DumpError(
                "the units are of another version of rldbg",
                file=str(self.path / PLAN),
                expected=f"schema_version {SCHEMA_VERSION}",
                found=str(plan.get("schema_version")),
                hint="another --out DIR, or the rldbg that wrote it",
            )

    def outcome(self, id: str) -> Outcome | None:
        """How a unit ended; None where it has not.

        Raises:
            DumpError: the file is damaged, or of another version.
        """
        path = self.path / "outcomes" / f"{id}.json"
        found = self._read(path)
        if found is None:
            return None
        if found.get("schema_version") != SCHEMA_VERSION or found.get("state") not in ("done", "failed", "crashed"):
            raise DumpError(
                "the outcome of a unit is damaged, or of another version", file=str(path),
                expected=f"schema_version {SCHEMA_VERSION} and a state", found=str(found)[:80],
            )  # fmt: skip
        return {name: found.get(name) for name in Outcome.__annotations__}  # type: ignore[return-value]

    def end(self, id: str, outcome: Outcome, document: Mapping[str, Any] | None) -> None:
        """Put a document and then its outcome there."""
        if document is not None:
            self._write(self.document(id), document)
        self._write(self.path / "outcomes" / f"{id}.json", {"schema_version": SCHEMA_VERSION, **outcome})

    def ended(self) -> set[str]:
        """The ids of every outcome there, of this plan or another."""
        try:
            names = os.listdir(self.path / "outcomes")
        except OSError:
            return set()
        return {name.removesuffix(".json") for name in names if not name.startswith(".")}

    @contextlib.contextmanager
    def held(self, id: str) -> Iterator[None]:
        """Tell others that this process has the unit, until it has not. Nobody is kept off by it."""
        path = self.path / "held" / f"{id}.json"
        self._write(path, {"worker": worker(), "began": time.time()})
        over = threading.Event()
        beat = threading.Thread(target=_beat, args=(path, over), name="rldbg-beat", daemon=True)
        beat.start()
        try:
            yield
        finally:
            over.set()
            beat.join()
            with contextlib.suppress(OSError):
                path.unlink()
            self._sweep(path, _LEFT_S)
            for answer in (self.document(id), self.figures(id)):
                self._sweep(answer, GONE_AFTER_S)

    def _sweep(self, path: Path, quiet_s: float) -> None:
        """Take away what a worker that was killed left half written of a unit that has ended now."""
        now = self._now()
        for left in path.parent.glob(f".{path.name}.*.tmp"):
            number = left.name.removeprefix(f".{path.name}.").partition("-")[0]
            is_ours = number.isdecimal() and not is_gone([*worker()[:2], int(number)])
            with contextlib.suppress(OSError):
                # One of another machine is renamed, or grows.
                if not is_ours and now - left.stat().st_mtime > quiet_s:
                    left.unlink()

    def holders(self) -> dict[str, bool]:
        """The ids of units that a worker began and did not end: whether it lives, as far as can be told from here."""
        found = {}
        now = self._now()
        try:
            entries = [Path(entry.path) for entry in os.scandir(self.path / "held") if entry.name.endswith(".json")]
        except OSError:
            return {}
        for path in entries:
            with contextlib.suppress(OSError, DumpError):
                quiet_s = now - path.stat().st_mtime
                who = (self._read(path) or {}).get("worker")
                found[path.stem] = quiet_s < GONE_AFTER_S and not (isinstance(who, list) and is_gone(who))
        return found

    def _now(self) -> float:
        """The time by the disk's clock, which need not be this machine's."""
        probe = self.path / "held" / f".now-{os.getpid()}-{threading.get_ident()}"
        try:
            probe.touch()
            return probe.stat().st_mtime
        except OSError:
            return time.time()  # read-only here: whoever only looks has no better clock
        finally:
            with contextlib.suppress(OSError):
                probe.unlink()

    def _read(self, path: Path) -> dict[str, Any] | None:
        if not path.is_file():
            return None
        with regular(path) as file:
            data = file.read(_MOST_BYTES + 1)
        try:
            found = json.loads(data)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict) or len(data) > _MOST_BYTES:
            again = "a worker's command again writes it anew, and keeps what is done"
            raise DumpError(
                "the file is no JSON object", file=str(path), expected="what a worker writes",
                found=f"{len(data):,} bytes", hint=again if path.name == PLAN else "remove it: its unit runs again",
            )  # fmt: skip
        return found

    def _write(self, path: Path, value: Mapping[str, Any]) -> None:
        try:
            replace_whole(path, json.dumps(value, allow_nan=False).encode() + b"\n")
        except OSError as error:
            raise RequestError("the directory of units cannot be written", file=str(path), found=error.strerror,
                               hint="df -h; another --out DIR") from None  # fmt: skip


def is_folder(path: Path) -> bool:
    """Whether a directory holds units."""
    try:
        with open(path / PLAN, "rb") as file:
            return f'"kind": "{_KIND}"'.encode() in file.read(256)
    except OSError:
        return False


def worker() -> list[Any]:
    """Host, the world in which its process ids count, and its process id."""
    try:
        world = os.readlink("/proc/self/ns/pid")
    except OSError:
        world = ""
    return [socket.gethostname(), world, os.getpid()]


def is_gone(who: list[Any]) -> bool:
    """Whether a worker of this machine has ended. Of another machine's, or a container's, nothing is known."""
    if len(who) != 3 or who[:2] != worker()[:2] or not isinstance(who[2], int):
        return False
    try:
        os.kill(who[2], 0)
    except (ProcessLookupError, OverflowError):
        return True
    except OSError:
        return False
    return False


def _beat(path: Path, over: threading.Event) -> None:
    while not over.wait(BEAT_S):
        with contextlib.suppress(OSError):
            os.utime(path)
