"""`rldbg replay`: re-execute a recorded micro-batch under other settings and hold it against each row alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from replay_core import workbench
from replay_core.errors import SelectionError
from replay_core.executors.child import ChildRunner
from replay_core.records import Selection
from replay_core.replay.flags import ATTENTIONS, DTYPES
from tui_debugger import paths
from tui_debugger.commands import ProgressLine, document_output, finish, selectors
from tui_debugger.reports.replay import replay_report


@click.command("replay")
@click.argument("path", type=click.Path(path_type=Path))
@selectors
@click.option("--role", help="actor, ref, critic ... where a micro-batch has several.")
@click.option(
    "--model", default="checkpoint", show_default=True, help="HF directory, random:ARCH, or the recorded one."
)
@click.option("--attention", type=click.Choice(ATTENTIONS), default="sdpa", show_default=True)
@click.option("--packing", is_flag=True, help="Pack the samples into one row, as well as padding them.")
@click.option("--dtype", type=click.Choice((*DTYPES, "fp32", "bf16", "fp16")), default="float32", show_default=True)
@click.option("--device", type=click.Choice(("cpu", "cuda")), default="cpu", show_default=True)
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads of the replay.")
@click.option("--temperature", type=float, help="Of the rollout; else the record's, else 1.0 and said so.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of a random: model's weights.")
@click.option("--capture", metavar="REGEX", help="Modules whose tensors are kept (default: all).")
@click.option("--max-rows", type=click.IntRange(min=1), help="Replay only the first rows.")
@click.option(
    "--logit-chunk", type=click.IntRange(min=1), default=512, show_default=True, help="Rows of logits at once."
)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Keep the cells' dumps here.")
@click.option(
    "--debug-no-block-mask",
    is_flag=True,
    help="Pack without the mask between samples: what a leak looks like. For learning, never for use.",
)
@click.option("--allow-pickled-weights", is_flag=True, help="Load .bin weights, which can run code.")
@click.option("--verbose", is_flag=True, help="What the model prints, on standard error.")
@document_output
def command(path: Path, as_json: bool, output: Path | None, out: Path | None, verbose: bool, **asked: Any) -> int:
    """Replay one recorded micro-batch: each row alone (the reference), padded as recorded, and packed if asked.

    Exit 0: every cell agrees with the reference. Exit 1: one does not. Exit 4: one failed or cannot run here.
    """
    plan = _plan(path, **asked)
    progress = ProgressLine(verbose=verbose)
    out = out or paths.new_replay_dir("replay")
    with ChildRunner() as runner:
        doc = workbench.replay(plan, out, runner, progress)
    progress.clear()
    return finish(doc, replay_report, as_json=as_json, output=output)


def _plan(
    path: Path,
    *,
    step: Selection | None,
    rank: Selection | None,
    micro: Selection | None,
    dtype: str,
    packing: bool,
    debug_no_block_mask: bool,
    attention: str,
    device: str,
    threads: int | None,
    **rest: Any,
) -> dict[str, Any]:
    short = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
    flags = {
        "attention": attention,
        "packing": packing or debug_no_block_mask,
        "dtype": short.get(dtype, dtype),
        "block_mask": not debug_no_block_mask,
        "device": device,
        "threads": threads,
    }
    numbers = {"step": _one("step", step), "rank": _one("rank", rank), "micro": _one("micro", micro)}
    return {"dump": str(path.resolve()), **numbers, "flags": flags, **rest}


def _one(name: str, selection: Selection | None) -> int:
    """The single number asked for; a micro-batch is replayed one at a time. The first one when nothing was asked."""
    if selection is None:
        return 0
    if selection.numbers is None or len(selection.numbers) != 1:
        raise SelectionError(f"replay takes one {name}", expected=f"--{name} 0", found=str(selection))
    return next(iter(selection.numbers))
