"""Runs the cells of a replay through a Runner and holds each against the reference: every row alone.

No torch here: cells run in children, their dumps are compared like any two dumps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replay_core.compare import Comparison, compare_runs
from replay_core.dumps import open_run
from replay_core.errors import CellError, ChildDiedError, RldbgError, UnavailableError
from replay_core.jobs import Job, OnEvent, Partial, Runner, ignore
from replay_core.records import Run
from replay_core.replay.flags import Flags
from replay_core.replay.plan import ReplayPlan
from replay_core.replay.segments import segments


@dataclass(slots=True)
class CellResult:
    """One cell: what it did, and how it stands to the baseline (None for the baseline itself, or if it did not run)."""

    cell: dict[str, Any]
    run: Run | None = None
    comparison: Comparison | None = None
    segments: list[dict[str, Any]] | None = None
    #: Whether the user asked for it; the padded control beside a packed cell is ours.
    asked: bool = True


def cells_for(flags: Flags) -> list[tuple[Flags, bool]]:
    """The settings to run for a request, baseline first, each with whether it was asked for.

    The reference is every row alone. The padded batch is always beside it, so that a wrong padded
    batch is named as readily as a wrong pack.
    """
    padded = Flags.from_mapping({**flags.to_mapping(), "packing": False, "block_mask": True})
    wanted: list[tuple[Flags, bool]] = [(flags.reference(), flags.is_reference), (padded, not flags.packing)]
    if flags.packing:
        wanted.append((flags, True))
    seen: list[tuple[Flags, bool]] = []
    for setting, asked in wanted:
        if all(setting != known for known, _ in seen):
            seen.append((setting, asked))
    return seen


def run_cells(plan: ReplayPlan, out: Path, runner: Runner, on_event: OnEvent = ignore) -> list[CellResult]:
    """Run the reference and the asked-for cells of one micro-batch; compare each with the reference.

    Raises:
        RldbgError: the request itself is wrong (no such record, no such model): no cell can run.
    """
    results: list[CellResult] = []
    for number, (flags, asked) in enumerate(cells_for(plan.flags)):
        result = _run_cell(plan.with_flags(flags, str(out / f"cell{number}")), runner, on_event)
        result.asked = asked
        baseline = results[0] if results else None
        if baseline is not None and baseline.run is not None and result.run is not None:
            result.comparison = compare_runs(baseline.run, result.run)
            result.segments = segments(baseline.run, result.run, result.cell["final_hidden"])
        results.append(result)
        on_event(Partial({"cell": result.cell}))
    return results


def _run_cell(plan: ReplayPlan, runner: Runner, on_event: OnEvent) -> CellResult:
    try:
        cell = runner.run(Job("replay_cell", {"plan": plan.to_mapping()}), on_event)
        return CellResult(cell, open_run(Path(cell["dump"])))
    except UnavailableError as error:
        return CellResult(_unfinished(plan, "unavailable", error))
    except ChildDiedError as error:
        return CellResult(_unfinished(plan, "crashed", error))
    except CellError as error:
        return CellResult(_unfinished(plan, "failed", error))


def _unfinished(plan: ReplayPlan, outcome: str, error: RldbgError) -> dict[str, Any]:
    return {
        "flags": plan.flags.to_mapping(),
        "effective": None,
        "outcome": outcome,
        "error": error.to_mapping(),
        "notes": [],
        "time": None,
        "memory": None,
        "dump": None,
        "final_hidden": None,
    }


def broken_segments(rows: Sequence[dict[str, Any]], limit: float) -> list[int]:
    """Samples whose worst token is further off than `limit` (relative L2 of the final hidden state)."""
    return [row["sample"] for row in rows if row["worst_token"] and _past(row["worst_token"]["rel_l2"], limit)]


def _past(value: float | str, limit: float) -> bool:
    return isinstance(value, str) or value > limit
