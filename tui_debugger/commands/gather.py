"""`rldbg gather`: what many workers have found so far."""

from __future__ import annotations

from pathlib import Path

import click

from replay_core import workbench
from tui_debugger.commands import DumpPath, document_output, finish
from tui_debugger.reports.gathering import gathering_report


@click.command("gather")
@click.argument("directory", type=DumpPath())
@click.option("--all", "show_all", is_flag=True, help="List the units that agree too.")
@document_output
def command(directory: Path, show_all: bool, as_json: bool, output: Path | None) -> int:
    """Fold what workers left in DIRECTORY (--shard, --out) into one answer, also while they run.

    Exit 0: every unit is done and agrees. Exit 1: all are done and one does not. Exit 4: one failed, crashed or is
    left. Exit 3: one could not read its bytes.
    """
    doc = workbench.gather(directory)
    return finish(doc, lambda one: gathering_report(one, show_all=show_all), as_json=as_json, output=output)
