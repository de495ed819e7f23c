"""`rldbg ls`: the records of a dump."""

from __future__ import annotations

from pathlib import Path

import click

from replay_core import workbench
from tui_debugger.commands import ProgressLine, document_output, finish
from tui_debugger.reports.run import run_report


@click.command("ls")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--names-only", is_flag=True, help="Look at file names only; read no header.")
@document_output
def command(path: Path, names_only: bool, as_json: bool, output: Path | None) -> int:
    """List the steps, ranks, micro-batches and fields of a dump.

    Reads headers, never tensor bytes, and executes nothing a file carries. Exit 3 when a record is unreadable.
    """
    progress = ProgressLine()
    doc = workbench.open_dump(path, headers=not names_only, on_event=progress)
    progress.clear()
    return finish(doc, run_report, as_json=as_json, output=output)
