"""`rldbg referee`: noise or bug, which side, and where."""

from __future__ import annotations

from pathlib import Path

import click

from replay_core import workbench
from replay_core.records import Selection
from tui_debugger.commands import DumpPath, document_output, finish, selectors
from tui_debugger.commands.sharding import in_units, sharded, typed
from tui_debugger.progress_line import ProgressLine
from tui_debugger.reports.ruling import ruling_report


@click.command("referee")
@click.argument("a", type=DumpPath())
@click.argument("b", type=DumpPath(), required=False)
@selectors
@click.option("--role", help="Whose forward: actor, critic, ref, ...")
@click.option("--weights", help="The model of both sides: a Hugging Face directory, shards, an adapter.")
@click.option("--weights-a", help="The model of side A; without it, what the dump notes for the step.")
@click.option("--weights-b", help="The model of side B.")
@click.option("--fail-above", type=float, metavar="X", help="Exit 1 where log-probabilities are off by X floors.")
@click.option(
    "--graft", is_flag=True, help="Put each module's output of B into A's forward: which carries the difference?"
)
@click.option("--all", "show_all", is_flag=True, help="List every tensor that was ruled.")
@sharded
@document_output
def command(
    a: Path,
    b: Path | None,
    step: Selection | None,
    rank: Selection | None,
    micro: Selection | None,
    role: str | None,
    weights: str | None,
    weights_a: str | None,
    weights_b: str | None,
    fail_above: float | None,
    graft: bool,
    show_all: bool,
    shard: str | None,
    ray: str | None,
    units: Path | None,
    as_json: bool,
    output: Path | None,
) -> int:
    """Rule a dump, or two: is every recorded tensor what a right kernel could have rounded to?

    Each side is held against fp64 of its own recorded inputs, with its own weights, in units of its own rounding:
    the two need no common kernel, dtype or engine. It rules by modules recorded with their inputs
    (step.modules(model, inputs=True), a replay, sglang's dumper); by log-probabilities alone it names no module.

    Exit 0: NOISE. Exit 1: BUG or SUSPECT. Exit 4: not ruled; it says what is missing.
    """
    if shard is not None or units is not None or ray is not None:
        asked = {
            "a": str(a.resolve()), "b": None if b is None else str(b.resolve()), "graft": graft,
            "weights_a": weights_a or weights, "weights_b": weights_b or weights, "role": role,
        }  # fmt: skip
        select = typed(step=step, rank=rank, micro=micro, role=role)
        return in_units("referee", asked, units, shard, ray, as_json=as_json, output=output, select=select,
                        judged={"fail_above": fail_above})  # fmt: skip
    progress = ProgressLine()
    doc = workbench.referee(
        a, b, weights_a=weights_a or weights, weights_b=weights_b or weights, step=step, rank=rank, micro=micro,
        role=role, graft=graft, on_event=progress,
    )  # fmt: skip
    progress.clear()
    return finish(
        doc,
        lambda one: ruling_report(one, show_all=show_all),
        as_json=as_json,
        output=output,
        fail_above=fail_above,
    )
