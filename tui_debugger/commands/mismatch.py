"""`rldbg mismatch`: engine against trainer: which setting closes the gap?"""

from __future__ import annotations

from pathlib import Path

import click

from replay_core import workbench
from replay_core.replay.flags import FLAGS
from tui_debugger.commands import DumpPath, document_output, finish
from tui_debugger.progress_line import ProgressLine
from tui_debugger.reports.mismatch import mismatch_report


@click.command("mismatch")
@click.argument("run", type=DumpPath())
@click.argument("more", type=DumpPath(), nargs=-1)
@click.option("--step", type=click.IntRange(min=0), help="The last step that has both sides, by default.")
@click.option("--model", help="The trainer's model of that step: a Hugging Face directory, shards, an adapter.")
@click.option("--base-model", help="The base of an adapter, where its own config names none here.")
@click.option("--older", multiple=True, metavar="MODEL", help="Other weights either side may have; may be given again.")
@click.option("--tokenizer", type=click.Path(path_type=Path), help="A tokenizer.json or its folder.")
@click.option("--attention", type=click.Choice(FLAGS["attention"].values), default="sdpa", help="Of the replays.")
@click.option("--device", type=click.Choice(FLAGS["device"].values), default="cpu", help="Where the replays run.")
@click.option("--most", type=click.IntRange(min=1), default=64, show_default=True, help="Sequences replayed at most.")
@click.option("--all", "show_all", is_flag=True, help="List every candidate and sequence.")
@document_output
def command(
    run: Path,
    more: tuple[Path, ...],
    step: int | None,
    model: str | None,
    base_model: str | None,
    older: tuple[str, ...],
    tokenizer: Path | None,
    attention: str,
    device: str,
    most: int,
    show_all: bool,
    as_json: bool,
    output: Path | None,
) -> int:
    """Explain why the rollout's log-probabilities in RUN are not the trainer's.

    First the tokens, then what the recorded numbers alone tell (shift, temperature, top-p, old weights, packs); with
    a model (--model, or the one the dump notes) every candidate is replayed on some sequences and listed with what it
    leaves of the gap. What is left is held against the rounding noise of this very model.

    Exit 0: nothing left to explain. Exit 1: a cause is named, or something is left. Exit 4: no answer; it says what
    is lacking.
    """
    progress = ProgressLine()
    doc = workbench.mismatch(
        run, *more, step=step, on_event=progress, model=model, base_model=base_model, older=older,
        tokenizer=None if tokenizer is None else str(tokenizer), attention=attention, device=device, most=most,
    )  # fmt: skip
    progress.clear()
    return finish(doc, lambda one: mismatch_report(one, show_all=show_all), as_json=as_json, output=output)
