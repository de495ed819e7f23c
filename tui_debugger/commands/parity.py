"""`rldbg parity`: two critics on the same tokens; how far their values part, where, and why."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from replay_core import workbench
from replay_core.errors import RequestError
from replay_core.executors.child import ChildRunner
from tui_debugger import paths
from tui_debugger.commands import DumpPath, document_output, finish, is_handed_out
from tui_debugger.progress_line import ProgressLine
from tui_debugger.reports.parity import parity_report


@click.command("parity")
@click.argument("path_a", metavar="[CONFIG_A", type=DumpPath(), required=False)
@click.argument("path_b", metavar="CONFIG_B]", type=DumpPath(), required=False)
@click.option("--recorded", is_flag=True, help="The two are dumps: compare the values they hold, run nothing.")
@click.option(
    "--data",
    multiple=True,
    metavar="random|padded|stale|text[:FILE]|DUMP",
    help="What to ask the critics about; may be given again. Default: random, padded and stale.",
)
@click.option("--tokenizer", type=click.Path(path_type=Path), help="tokenizer.json, or its folder, for text.")
@click.option("--step", type=click.IntRange(min=0), default=0, help="Of a dump given as --data.")
@click.option("--rank", type=click.IntRange(min=0), default=0, help="Of a dump given as --data.")
@click.option("--micro", type=click.IntRange(min=0), default=0, help="Of a dump given as --data.")
@click.option("--steps", type=click.IntRange(min=0), default=5, show_default=True, help="Training steps.")
@click.option("--seed", type=int, default=42, show_default=True, help="Of made-up data.")
@click.option(
    "--threshold", type=float, default=0.1, show_default=True, help="Nearly identical: values nearer than this."
)
@click.option("--no-modules", is_flag=True, help="Do not record module tensors: no first diverging module.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Where the two dumps and logs go.")
@click.option("--time-limit", type=float, default=1800, show_default=True, help="Seconds a critic may take.")
@click.option("--verbose", is_flag=True, help="Print what the critics print.")
@click.option("--text", "as_text", is_flag=True, help="Print the report instead of opening the screen.")
@document_output
def command(
    path_a: Path | None,
    path_b: Path | None,
    recorded: bool,
    data: tuple[str, ...],
    tokenizer: Path | None,
    step: int,
    rank: int,
    micro: int,
    steps: int,
    seed: int,
    threshold: float,
    no_modules: bool,
    out: Path | None,
    time_limit: float,
    verbose: bool,
    as_text: bool,
    as_json: bool,
    output: Path | None,
) -> int:
    """Hold two critics against each other: two YAML configurations, or with --recorded two dumps of values.

    Without paths the two tiny configurations run that come with rldbg: DeepSpeed's critic and Megatron's. In a terminal
    the screen opens while they run; --text, --json and --output print instead.

    Exit 0: they agree where it counts (equal, noise, or padding alone). Exit 1: they do not; the cause is named.
    Exit 4: a critic failed or cannot run here.
    """
    progress = ProgressLine(verbose=verbose)
    on_screen = opens_screen(as_text or as_json or verbose or output is not None)
    if recorded:
        if path_a is None:
            raise RequestError("--recorded needs the dumps", hint="rldbg parity --recorded DIR_A DIR_B")
        if data:
            raise RequestError("--data is what critics are run on; recorded values have theirs")
        if on_screen:
            both = {"a": str(path_a), "b": str(path_b or path_a)}
            return show({"recorded": True, **both, "threshold": threshold})
        doc = workbench.recorded_parity(path_a, path_b or path_a, threshold=threshold, on_event=progress)
    else:
        if (path_a is None) != (path_b is None):
            raise RequestError(
                "parity needs two configurations", found=str(path_a), hint="rldbg parity CONFIG_A CONFIG_B"
            )
        asked = {
            "data": data or ("random", "padded", "stale"), "tokenizer": None if tokenizer is None else str(tokenizer),
            "steps": steps, "seed": seed, "threshold": threshold, "capture": not no_modules,
            "step": step, "rank": rank, "micro": micro,
        }  # fmt: skip
        example_a, example_b = workbench.parity_examples()
        a, b, place = path_a or example_a, path_b or example_b, out or paths.new_replay_dir("parity")
        if on_screen:
            return show({"a": str(a), "b": str(b), "out": str(place), "asked": asked, "time_limit_s": time_limit})
        with ChildRunner(time_limit_s=time_limit) as runner:
            doc = workbench.parity(a, b, place, runner, progress, **asked)
    progress.clear()
    return finish(doc, parity_report, as_json=as_json, output=output)


def opens_screen(wants_text: bool) -> bool:
    """Whether the answer goes to the screen: there is a terminal at both ends, and nobody asked for text."""
    return not wants_text and not is_handed_out() and sys.stdin.isatty() and sys.stdout.isatty()


def show(request: dict[str, Any]) -> int:
    """The parity screen on a request as `Session.parity` takes it; the exit code is the document's."""
    from tui_debugger.app import run_ui  # textual: 170 ms that no other command pays

    return run_ui(None, parity=request)
