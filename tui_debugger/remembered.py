"""What the screen remembers from one session to the next: recent runs, where you were in each, what jobs cost.

Written as it changes, never only at the end: a dropped link takes the process with it. A file that cannot
be read or was written by another version is as good as none.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tui_debugger import paths

STATE_VERSION = 1
RUNS_KEPT = 24
#: Kinds of job, of all runs, of which it is kept what the last one took.
_JOBS_KEPT = 200

Place = dict[str, Any]


def _file() -> Path:
    return paths.state_dir() / "session.json"


def _load() -> dict[str, Any]:
    try:
        content = json.loads(_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) and content.get("version") == STATE_VERSION else {}


#: Before a path that is one more directory of the run before it.
TOGETHER = "+"


def _name(a: Path, b: Path | None, more: Sequence[str] = ()) -> str:
    joined = [TOGETHER + os.path.abspath(path) for path in more]
    return "\n".join([os.path.abspath(a), *joined, *([os.path.abspath(b)] if b is not None else [])])


def place(a: Path, b: Path | None, more: Sequence[str] = ()) -> Place:
    """Where the user was in this run (of several directories, with `more`) or pair; empty when never there."""
    found = (_load().get("runs") or {}).get(_name(a, b, more))
    return found if isinstance(found, dict) else {}


def recent() -> list[tuple[list[str], float]]:
    """The runs and pairs opened last that still exist, newest first, with the time they were looked at.

    A path that begins with `TOGETHER` is one more directory of the run before it.
    """
    runs = _load().get("runs") or {}
    dated = [
        (name.split("\n"), float(value.get("when") or 0)) for name, value in runs.items() if isinstance(value, dict)
    ]
    return sorted(
        (one for one in dated if all(os.path.exists(path.removeprefix(TOGETHER)) for path in one[0])),
        key=lambda one: -one[1],
    )


def theme() -> str | None:
    """The theme chosen on the screen."""
    name = _load().get("theme")
    return name if isinstance(name, str) else None


def keep_theme(name: str) -> None:
    content = _load()
    _write({**content, "theme": name})


def keep_place(a: Path, b: Path | None, where: Place, more: Sequence[str] = ()) -> None:
    """Note where the user is now."""
    content = _load()
    runs = {**(content.get("runs") or {}), _name(a, b, more): {**where, "when": time.time()}}
    newest = sorted(runs, key=lambda name: -float(runs[name].get("when") or 0))[:RUNS_KEPT]
    _write({**content, "runs": {name: runs[name] for name in newest}})


def took(job: str, a: Path | None, b: Path | None) -> float | None:
    """The seconds that the last job of this kind took with this run or pair; None where none was long enough."""
    seconds = (_load().get("took") or {}).get(_of_job(job, a, b))
    return float(seconds) if isinstance(seconds, (int, float)) else None


def keep_took(job: str, a: Path | None, b: Path | None, seconds: float) -> None:
    """Note what a job took."""
    content, name = _load(), _of_job(job, a, b)
    known = content.get("took") or {}
    newest = {**{other: known[other] for other in known if other != name}, name: round(seconds, 1)}
    _write({**content, "took": dict(list(newest.items())[-_JOBS_KEPT:])})


def _of_job(job: str, a: Path | None, b: Path | None) -> str:
    return job if a is None else f"{job}\n{_name(a, b)}"


def _write(content: dict[str, Any]) -> None:
    # Two screens may write at once: the later wins whole, never half of each.
    try:
        folder = paths.private_dir(paths.state_dir())
        half = folder / f".session-{os.getpid()}.json"
        half.write_text(json.dumps({**content, "version": STATE_VERSION}), encoding="utf-8")
        half.replace(_file())
    except OSError:
        return
