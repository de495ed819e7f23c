"""`rldbg gather`: what many workers have found so far."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from replay_core import workbench
from replay_core.jobs import Progress
from tui_debugger.commands import DumpPath, document_output, finish
from tui_debugger.commands.scalars import scalars_option, to_dashboard
from tui_debugger.progress_line import ProgressLine
from tui_debugger.reports.gathering import gathering_report, is_over

if TYPE_CHECKING:
    from replay_core.documents.gathering import GatheringDocument
    from replay_core.export.dashboards import Dashboard

_AGAIN_S = 1.0


@click.command("gather")
@click.argument("directory", type=DumpPath())
@click.option("--all", "show_all", is_flag=True, help="List the units that agree too.")
@click.option("--follow", is_flag=True, help="Wait until every unit has ended; say on the way what is found.")
@scalars_option
@document_output
def command(
    directory: Path, show_all: bool, follow: bool, scalars: str | None, as_json: bool, output: Path | None
) -> int:
    """Fold what workers left in DIRECTORY (--shard, --out) into one answer, also while they run.

    Exit 0: every unit is done and agrees. Exit 1: all are done and one does not. Exit 4: one failed, crashed or is
    left. Exit 3: one could not read its bytes.
    """
    with to_dashboard(scalars, follow=follow) as told:
        doc = followed(directory, told) if follow else workbench.gather(directory)
    return finish(doc, lambda one: gathering_report(one, show_all=show_all), as_json=as_json, output=output)


def followed(directory: Path, told: Dashboard | None = None) -> GatheringDocument:
    """What a directory has come to when every unit has ended; until then a line says how far it is, and what is found
    first as soon as it is. `told` is given the scalars of each step."""
    from replay_core.export.scalars import UnitScalars

    progress, said, points = ProgressLine("units"), None, UnitScalars(workbench.reopen)

    def gathered() -> GatheringDocument:
        doc = workbench.gather(directory)
        if told is not None:
            for step, scalars in points.news(doc):
                told.take(step, scalars)
        return doc

    while not is_over(doc := gathered()):
        if doc["first"] is not None and doc["first"]["id"] != said:
            said = doc["first"]["id"]
            progress.note(f"first so far: {doc['first']['label']}: {doc['first']['said']}")
        counts = doc["counts"]
        running = f"units, {counts['running']} running" + (f", {counts['diverge']} disagree" if said else "")
        progress(Progress(counts["done"] + counts["failed"] + counts["crashed"], counts["total"], running))
        time.sleep(_AGAIN_S)
    progress.clear()
    return doc
