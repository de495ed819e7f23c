"""Folds the outcomes of a directory into one document, also while workers add to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from replay_core.documents.version import SCHEMA_VERSION
from replay_core.errors import DumpError
from replay_core.export import documents
from replay_core.units.folder import UnitFolder
from replay_core.units.plan import Plan, Unit
from replay_core.units.shard import Shard
from replay_core.units.working import is_done

if TYPE_CHECKING:
    from replay_core.documents.gathering import GatheringDocument, UnitCounts, UnitEntry, UnitState
    from replay_core.documents.parts import ErrorEntry, ProblemEntry


def gathered(folder: UnitFolder, plan: Plan | None = None, shard: Shard | None = None) -> GatheringDocument:
    """What the units of a directory have come to; of a shard, its own.

    plan: the one whose units count; None: the one that lies there.

    Raises:
        RequestError: the directory holds no units.
    """
    plan = folder.plan() if plan is None else plan
    units = plan.units if shard is None else shard.of(plan.units)
    holders, ended = folder.holders(), folder.ended()
    problems: list[ProblemEntry] = []
    took_s: list[float] = []
    entries = [_entry(folder, unit, holders, problems, took_s) for unit in units]
    _say_what_waits(plan, folder, units, entries)
    counts = _counts(entries)
    first = next((one for one in entries if _is_apart(one)), None)
    is_whole = shard is None
    one_sided = (list(plan.only_a), list(plan.only_b)) if is_whole else ([], [])
    apart = first is not None or (any(one_sided) and not plan.request.judged.get("allow_missing"))
    is_answered = counts["done"] == counts["total"] and any(map(_is_judged, entries))
    rest = counts["left"] + counts["failed"] + counts["crashed"]
    pace = sum(took_s) / len(took_s) if took_s else 0.0
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "gathering",
        **documents.stamp(),
        "directory": str(folder.path),
        "command": plan.request.command,
        "asked": {**plan.request.params, **plan.request.select, **plan.request.judged},
        "shard": str(shard) if shard is not None else None,
        "agrees": False if apart else True if is_answered else None,
        "headline": _headline(plan, counts, first, one_sided),
        "counts": counts,
        "first": None if first is None else {
            "id": first["id"], "label": first["label"], "said": first["said"], "file": first["file"]
        },
        "one_sided": {"a": one_sided[0], "b": one_sided[1]},
        "eta_s": pace * (rest / counts["running"] + 0.5) if counts["running"] and took_s else None,
        "stale": len(ended - {unit.id for unit in plan.units}),
        "units": entries,
        "problems": problems,
        "notes": list(plan.notes),
    }  # fmt: skip


def _entry(
    folder: UnitFolder, unit: Unit, holders: dict[str, bool], problems: list[ProblemEntry], took_s: list[float]
) -> UnitEntry:
    entry: UnitEntry = {
        "id": unit.id, "label": unit.label, "run": unit.run, "step": unit.step, "rank": unit.rank, "micro": unit.micro,
        "state": "left", "exit_code": None, "said": "", "file": None, "error": None, "tries": 0,
    }  # fmt: skip
    try:
        outcome = folder.outcome(unit.id)
    except DumpError as error:
        problems.append({"where": str(error.file), "what": error.in_one_line})
        entry["state"], entry["said"], entry["exit_code"] = "failed", error.in_one_line, int(error.exit_code)
        return entry
    if outcome is not None:
        entry["state"], entry["error"] = (
            cast("UnitState", outcome["state"]),
            cast("ErrorEntry | None", outcome["error"]),
        )
        entry["exit_code"], entry["said"], entry["tries"] = outcome["exit_code"], outcome["said"], outcome["tries"]
    if outcome is not None and outcome["state"] == "done":
        took_s.append(outcome["took_s"])
        if folder.is_answered(unit):
            if unit.measures:
                entry["exit_code"] = None  # it says nothing of either run
            else:
                entry["file"] = str(folder.answer(unit))
        else:
            what = "figures are" if unit.measures else "document is"
            gone = "cut short" if folder.answer(unit).exists() else "gone"
            entry["state"], entry["exit_code"], entry["said"] = "left", None, f"its {what} {gone}: it runs again"
    elif unit.id in holders:
        lives = holders[unit.id]
        said = "" if lives else "its worker ended in the middle, or has given no sign for a minute"
        entry["state"], entry["exit_code"], entry["said"] = "running" if lives else "crashed", None, said
    return entry


def _say_what_waits(plan: Plan, folder: UnitFolder, units: Sequence[Unit], entries: Sequence[UnitEntry]) -> None:
    """Of units that are left because of others, which these are."""
    labels = {unit.id: unit for unit in plan.units}
    for unit, entry in zip(units, entries, strict=True):
        if entry["state"] == "left" and unit.needs:
            missing = [labels[id].label for id in unit.needs if not is_done(folder, labels[id])]
            if missing:
                more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
                entry["said"] = f"waits for {missing[0]}{more}"


def _counts(entries: Sequence[UnitEntry]) -> UnitCounts:
    states = Counter(one["state"] for one in entries)
    diverge = sum(map(_is_apart, entries))
    judged = sum(map(_is_judged, entries))
    return {
        "total": len(entries), "done": states["done"], "failed": states["failed"], "crashed": states["crashed"],
        "running": states["running"], "left": states["left"], "agree": judged - diverge, "diverge": diverge,
    }  # fmt: skip


def _is_judged(one: UnitEntry) -> bool:
    return one["state"] == "done" and one["exit_code"] is not None


def _is_apart(one: UnitEntry) -> bool:
    return one["state"] == "done" and one["exit_code"] not in (0, None)


def _headline(
    plan: Plan, counts: UnitCounts, first: UnitEntry | None, one_sided: tuple[Sequence[int], Sequence[int]]
) -> str:
    if not counts["total"]:
        return f"there are more parts than units ({len(plan.units)}): none is this one's"
    so_far = "" if counts["done"] == counts["total"] else " so far"
    said = f"{counts['done']} of {counts['total']} units done"
    if first is not None:
        said += f"; {counts['diverge']} do not agree{so_far}, the first: {first['label']}"
    elif counts["agree"]:
        said += f"; all that are done agree{so_far}"
    rest = [f"{counts[name]} {name}" for name in ("failed", "crashed", "running", "left") if counts[name]]
    said += "".join(f"; {one}" for one in rest)
    for side, steps in zip("ab", one_sided, strict=True):
        if steps:
            said += f"; {len(steps)} steps only {side} has"
    return said
