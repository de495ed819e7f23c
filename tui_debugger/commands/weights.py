"""`rldbg weights`: did the engine get what the trainer pushed?"""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import click

from replay_core import workbench
from replay_core.documents.weights import Arrival
from tui_debugger.commands import DumpPath, document_output, finish
from tui_debugger.progress_line import ProgressLine
from tui_debugger.reports.weights import weights_report

_WORDS = [word for word in get_args(Arrival) if word != "arrived"]


@click.command("weights")
@click.argument("sent", metavar="TRAINER", type=DumpPath())
@click.argument("received", metavar="ENGINE [ENGINE ...]", type=DumpPath(), nargs=-1, required=True)
@click.option("--before", type=DumpPath(), help="What the engine held before: its base checkpoint, a recording.")
@click.option("--older", type=DumpPath(), multiple=True, help="Weights of another step; may be given again.")
@click.option("--step", type=click.IntRange(min=0), help="Of the trainer's dump; its last by default.")
@click.option("--tp", "parallel", type=click.IntRange(1, 4096), help="Ranks the engine is cut over, if shapes mislead.")
@click.option("--name", multiple=True, metavar="GLOB", help="Only these parameters of the engine.")
@click.option(
    "--allow", "allowed", multiple=True, type=click.Choice(_WORDS), help="Fail nothing: --allow quantised, for one."
)
@document_output
def command(
    sent: Path,
    received: tuple[Path, ...],
    before: Path | None,
    older: tuple[Path, ...],
    step: int | None,
    parallel: int | None,
    name: tuple[str, ...],
    allowed: tuple[str, ...],
    as_json: bool,
    output: Path | None,
) -> int:
    """Say of every parameter of an ENGINE whether it holds what the TRAINER pushed, and else what it holds.

    Either side is a checkpoint, a state dict, FSDP shards or a recording; of the engine's, digests are enough
    (replay_core.recorder.record_weights, one line in a worker). Fused, stacked, tied and cut parameters are put
    together by the names vLLM and sglang give them. Several ENGINE paths are its ranks.

    Exit 0: every parameter arrived. Exit 1: one did not, or the trainer's has no destination. Exit 3: nothing meets.
    """
    progress = ProgressLine()
    doc = workbench.compare_weights(
        sent, received, before=before, older=older, step=step, parallel=parallel, name=name, allowed=allowed,
        on_event=progress,
    )  # fmt: skip
    progress.clear()
    return finish(doc, weights_report, as_json=as_json, output=output)
