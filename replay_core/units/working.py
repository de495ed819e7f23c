"""A worker: takes its units one after the other, leaves a file for each, and never stops at one that fails."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from msgspec.structs import replace

from replay_core.documents.kinds import Document
from replay_core.errors import CellError, ChildDiedError, DumpError, ExitCode, JobCancelledError, RldbgError
from replay_core.export.outcome import exit_code
from replay_core.jobs import Event, Job, OnEvent, Progress, Runner, ignore
from replay_core.units.folder import Outcome, UnitFolder
from replay_core.units.headline import headline
from replay_core.units.plan import Plan, Unit

#: Which units are to be done: all that are not, in their order.
Taken = Callable[[Sequence[Unit]], Sequence[Unit]]


def work(plan: Plan, folder: UnitFolder, units: Sequence[Unit], runner: Runner, on_event: OnEvent = ignore) -> int:
    """Do every unit that has no answer yet. How many had one.

    Raises:
        JobCancelledError, KeyboardInterrupt: the caller wants no more; what is done stays done.
        RequestError: the directory cannot be written.
    """
    already = 0
    of_id = {unit.id: unit for unit in plan.units}
    for number, unit in enumerate(units):
        on_event(Progress(number, len(units), unit.label))
        if is_done(folder, unit):
            already += 1
        elif is_ready(folder, unit, of_id):
            do(plan, folder, unit, runner, on_event)
    for unit in _ready_now(folder, of_id):
        # Of another worker's share, perhaps, who was done before the last figures came: whoever leaves these judges.
        do(plan, folder, unit, runner, on_event)
    on_event(Progress(len(units), len(units), "units"))
    return already


def is_ready(folder: UnitFolder, unit: Unit, of_id: Mapping[str, Unit]) -> bool:
    """Whether all that a unit judges by is there. of_id: the units of the plan."""
    return all(is_done(folder, of_id[id]) for id in unit.needs)


def _ready_now(folder: UnitFolder, of_id: Mapping[str, Unit]) -> Iterator[Unit]:
    """Units that judge what others measured, that nobody has begun, and all of whose figures are there."""
    for unit in of_id.values():
        if not unit.needs or folder.document(unit.id).is_file() or unit.id in folder.ended():
            continue
        if is_ready(folder, unit, of_id) and not folder.holders().get(unit.id):
            yield unit


def is_done(folder: UnitFolder, unit: Unit) -> bool:
    """Whether a unit has an answer. One that failed has none: it may have been the machine's fault."""
    try:
        found = folder.outcome(unit.id)
    except DumpError:
        return False  # a damaged file is written anew
    return found is not None and found["state"] == "done" and folder.is_answered(unit)


def do(plan: Plan, folder: UnitFolder, unit: Unit, runner: Runner, on_event: OnEvent = ignore) -> None:
    """Do one unit, whatever comes of it."""
    began = time.monotonic()
    document: dict[str, Any] | None = None
    error: RldbgError | None = None
    job = placed(plan, unit, folder, is_written_there=True)
    with folder.held(unit.id):
        try:
            document = runner.run(job, _quietly(on_event))
        except JobCancelledError:
            raise
        except RldbgError as raised:
            error = raised
        keep(plan, folder, unit, document, error, time.monotonic() - began)


def keep(
    plan: Plan, folder: UnitFolder, unit: Unit, document: dict[str, Any] | None, error: RldbgError | None, took_s: float
) -> None:
    """Write what a unit came to. That it failed is no answer where another worker has left one meanwhile.

    document: its document, or what it came to where whoever did it has put its answer there.
    """
    if document is None and is_done(folder, unit):
        return
    outcome: Outcome = {
        "state": "done", "exit_code": 0, "said": "", "error": None, "took_s": took_s, "tries": _tries(folder, unit) + 1
    }  # fmt: skip
    if document is not None and "kind" not in document:
        outcome["exit_code"], outcome["said"] = document["exit_code"], document["said"]
        document = None
    elif document is not None:
        outcome["exit_code"] = int(exit_code(cast(Document, document), **plan.request.judged))
        outcome["said"] = headline(cast(Document, document))
        if plan.request.command == "replay" and outcome["exit_code"] == ExitCode.AGREES:
            # A thousand that agree are a thousand dumps that nobody looks at.
            shutil.rmtree(folder.cells(unit.id), ignore_errors=True)
            for cell in document["cells"]:
                cell["dump"] = cell["log"] = None
    elif error is not None:
        outcome["state"] = "crashed" if isinstance(error, ChildDiedError) else "failed"
        known = (ExitCode.BAD_BYTES, ExitCode.BAD_REQUEST)
        outcome["exit_code"] = int(error.exit_code if error.exit_code in known else CellError.exit_code)
        outcome["said"], outcome["error"] = error.in_one_line, error.to_mapping()
    folder.end(unit.id, outcome, document)


def placed(plan: Plan, unit: Unit, folder: UnitFolder, *, is_written_there: bool) -> Job:
    """The job, told where its files go and lie; asked before the unit is held.

    is_written_there: whoever does it has the folder at hand: a comparison's document, which may be large, is then
    written where it is made, row by row.
    """
    if unit.measures:
        return Job("measure", {**unit.job.params, "into": str(folder.figures(unit.id).resolve())})
    if unit.needs:
        files = [str(folder.figures(id).resolve()) for id in unit.needs]
        unit = replace(unit, job=Job(unit.job.kind, {**unit.job.params, "measured": files}))
    if unit.job.kind == "compare" and is_written_there:
        into = {"into": str(folder.document(unit.id).resolve()), "judged": dict(plan.request.judged)}
        return Job("compare_into", {**unit.job.params, **into})
    if unit.job.kind != "replay":
        return unit.job
    return Job("replay", {**unit.job.params, "out": str(folder.new_try(unit.id).resolve())})


def _tries(folder: UnitFolder, unit: Unit) -> int:
    try:
        found = folder.outcome(unit.id)
    except DumpError:
        return 0
    return found["tries"] if found is not None else 0


def _quietly(on_event: OnEvent) -> OnEvent:
    """What a unit says of itself, without its own count: the line tells of units."""

    def heard(event: Event) -> None:
        if not isinstance(event, Progress):
            on_event(event)

    return heard
