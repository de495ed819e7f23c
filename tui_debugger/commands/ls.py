"""`rldbg ls`: the records of a dump."""

from __future__ import annotations

from pathlib import Path

import click

from replay_core import workbench
from replay_core.records import Selection
from tui_debugger.commands import DumpPath, document_output, finish, step_selector
from tui_debugger.progress_line import ProgressLine
from tui_debugger.reports.run import run_report


@click.command("ls")
@click.argument("paths", type=DumpPath(remote=True), nargs=-1, required=True, metavar="PATH...")
@step_selector
@click.option("--names", "--names-only", "names_only", is_flag=True, help="Look at file names only; read no header.")
@click.option("--all", "show_all", is_flag=True, help="List every record, not the first hundred.")
@document_output
def command(
    paths: tuple[Path, ...],
    step: Selection | None,
    names_only: bool,
    show_all: bool,
    as_json: bool,
    output: Path | None,
) -> int:
    """List the steps, ranks, micro-batches and fields of a dump.

    Several paths are one run: a framework may write its rollouts, batches and metrics to different directories.
    Reads headers, never tensor bytes, and executes nothing a file carries. Exit 3 when a record is unreadable.
    """
    progress = ProgressLine()
    doc = workbench.open_dump(*paths, headers=not names_only, step=step, on_event=progress)
    progress.clear()
    return finish(doc, lambda document: run_report(document, show_all=show_all), as_json=as_json, output=output)
