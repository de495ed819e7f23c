"""`rldbg samples`: the samples of a step as a person reads them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from replay_core import workbench
from tui_debugger.commands import DumpPath, document_output, finish, step_selector
from tui_debugger.reports.samples import samples_report
from tui_debugger.sample_orders import ORDERS

if TYPE_CHECKING:
    from replay_core.documents.samples import SampleOrder
    from replay_core.records import Selection


@click.command("samples")
@click.argument("paths", type=DumpPath(remote=True), nargs=-1, required=True, metavar="PATH...")
@step_selector
@click.option("--by", type=click.Choice(ORDERS), default="order", show_default=True, help="The worst of it first.")
@click.option("--search", metavar="TEXT", help="Only samples whose prompt or response holds it.")
@click.option(
    "--sample", "shown", type=click.IntRange(min=0), multiple=True, help="Token by token; may be given again."
)
@click.option("--most", type=click.IntRange(min=1), default=50, show_default=True, help="Samples listed.")
@click.option("--tokenizer", type=click.Path(path_type=Path), help="A tokenizer.json or its folder, for texts.")
@document_output
def command(
    paths: tuple[Path, ...],
    step: Selection | None,
    by: str,
    search: str | None,
    shown: tuple[int, ...],
    most: int,
    tokenizer: Path | None,
    as_json: bool,
    output: Path | None,
) -> int:
    """List the samples of a step: prompt, response, rewards, advantage; how far engine and trainer are apart in each.

    --sample gives every number of its tokens; --html colours the tokens by each of them, and puts the answers to one
    prompt beside each other. Several paths are one run; the last step that holds samples, by default.
    """
    doc = workbench.samples(
        *paths, step=step, by=cast("SampleOrder", by), search=search, shown=shown, most=most, tokenizer=tokenizer
    )
    return finish(doc, samples_report, as_json=as_json, output=output)
