"""A gathering as text: what is not as it should be first, and the file of each."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from tui_debugger import format as words
from tui_debugger.reports.columns import columns

if TYPE_CHECKING:
    from replay_core.documents.gathering import GatheringDocument, UnitEntry

#: Units listed of each kind; `--json` has them all.
_MOST = 20


def verdict(doc: GatheringDocument) -> str:
    """The word that stands for all of it."""
    if not doc["counts"]["total"]:
        return "NOTHING TO DO"
    if doc["agrees"] is False:
        return "DISAGREES"
    if doc["agrees"] is None and doc["counts"]["done"] == doc["counts"]["total"]:
        return "MEASURED"
    return "AGREES" if doc["agrees"] else "NOT DONE"


def unit_word(one: UnitEntry) -> str:
    """The word of a unit."""
    if one["state"] != "done":
        return one["state"]
    if one["exit_code"] is None:
        return "measured"
    return "agrees" if one["exit_code"] == 0 else "not ruled" if one["exit_code"] == 4 else "disagrees"


def is_over(doc: GatheringDocument) -> bool:
    """Whether every unit has ended, one way or the other."""
    return not doc["counts"]["running"] and not doc["counts"]["left"]


def notable(doc: GatheringDocument) -> list[UnitEntry]:
    """Those that disagree, then those without an answer that were begun, each in order of computation."""
    order = {"done": 0, "failed": 1, "crashed": 2, "running": 3}
    found = [one for one in doc["units"] if one["state"] in order and unit_word(one) not in ("agrees", "measured")]
    return sorted(found, key=lambda one: order[one["state"]])


def gathering_report(doc: GatheringDocument, *, show_all: bool = False) -> str:
    part = f" (part {doc['shard']})" if doc["shard"] else ""
    lines = [f"{verdict(doc)}  rldbg {doc['command']}{part}: {doc['headline']}"]
    if doc["first"] is not None:
        lines += ["", f"first: {doc['first']['label']}: {doc['first']['said']}"]
        if doc["first"]["file"]:
            lines.append(f"       rldbg {shlex.quote(doc['first']['file'])}")
    listed = doc["units"] if show_all else notable(doc)
    shown = listed if show_all else listed[:_MOST]
    if shown:
        rows = [[one["label"], unit_word(one), one["said"]] for one in shown]
        lines += ["", *columns([["unit", "", ""], *rows])]
        if len(listed) > len(shown):
            lines.append(f"  … and {len(listed) - len(shown)} more; --json lists all")
    lines += ["", counts_line(doc)]
    lines += [f"only {side} has steps {', '.join(map(str, steps[:12]))}{', …' if len(steps) > 12 else ''}"
              for side, steps in (("a", doc["one_sided"]["a"]), ("b", doc["one_sided"]["b"])) if steps]  # fmt: skip
    lines += [f"note: {note}" for note in doc["notes"]]
    lines += [f"problem: {one['where']}: {one['what']}" for one in doc["problems"]]
    return "\n".join(lines)


def counts_line(doc: GatheringDocument) -> str:
    """How many of each, and what is left of it."""
    counts = doc["counts"]
    said = f"done {counts['done']} of {counts['total']}"
    said += "".join(f", {name} {counts[name]}" for name in ("failed", "crashed", "running", "left") if counts[name])
    if isinstance(doc["eta_s"], (int, float)):
        said += f"; about {words.span(doc['eta_s'])} left"
    if doc["stale"]:
        said += f"; {doc['stale']} answers there are of other records, weights, settings or versions: not counted"
    return said
