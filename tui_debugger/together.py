"""Several paths on the screen: one run in several directories, or two runs to compare.

A framework may write its rollouts, its batches and its log to different directories. `rldbg A B` cannot be told by
its words, so what lies there decides.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tui_debugger.state import LOGS, Opened

if TYPE_CHECKING:
    from replay_core.documents.run import RunDocument


def are_one_run(a: RunDocument, b: RunDocument) -> bool:
    """Whether two listed dumps are parts of one run: what they hold is of different kinds (role and stage), and one
    framework wrote both, or one of them is a log. Two that hold the same kind of record are two runs to compare."""
    dialects = [set(str(run.get("dialect")).split(" + ")) for run in (a, b)]
    belong = bool(dialects[0] & dialects[1]) or any(one <= LOGS for one in dialects)
    kinds = [{(record["key"]["role"], record["key"]["stage"]) for record in run["records"]} for run in (a, b)]
    return belong and all(kinds) and not kinds[0] & kinds[1]


def named(opened: Opened, path: str | None) -> dict[str, Any]:
    """What names the run at a path in a job: the path, and beside A's the other directories of its run."""
    is_a = opened.more and opened.a_path is not None and path == str(opened.a_path)
    return {"path": path, "more": list(opened.more)} if is_a else {"path": path}


def sides(opened: Opened, a: str, b: str) -> dict[str, Any]:
    """What names two sides in a job that compares."""
    found: dict[str, Any] = {"a": a, "b": b}
    for side, path in (("a", a), ("b", b)):
        if more := named(opened, path).get("more"):
            found[f"more_{side}"] = more
    return found


def folder_of(opened: Opened, paths: Iterable[str]) -> str | None:
    """Which of A's directories holds a record's file: a replay reads one."""
    known = [str(opened.a_path), *opened.more]
    for path in paths:
        inside = [one for one in known if path == one or path.startswith(one.rstrip("/") + "/")]
        if inside:
            return max(inside, key=len)
    return None
