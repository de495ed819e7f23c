"""`rldbg compare`: where two dumps first part."""

from __future__ import annotations

from pathlib import Path

import click

from replay_core import workbench
from replay_core.records import Selection
from tui_debugger.commands import ProgressLine, document_output, finish, selectors
from tui_debugger.reports.comparison import comparison_report, explanation


@click.command("compare")
@click.argument("a", type=click.Path(path_type=Path), required=False)
@click.argument("b", type=click.Path(path_type=Path), required=False)
@selectors
@click.option("--exact", is_flag=True, help="Bitwise: any difference is a DIFF.")
@click.option("--allow-missing", is_flag=True, help="Tensors only one side has do not fail the comparison.")
@click.option("--explain", metavar="NAME", help="One tensor's sentence and both values, instead of the list.")
@click.option("--all", "show_all", is_flag=True, help="List SAME tensors too.")
@click.option("--self_hosted_dir", type=click.Path(path_type=Path), hidden=True)
@click.option("--weaver_dir", type=click.Path(path_type=Path), hidden=True)
@click.option("--remote_api_dir", type=click.Path(path_type=Path), hidden=True)
@click.option("--num_ranks", type=click.IntRange(min=1), hidden=True)
@click.option("--num_micros", type=click.IntRange(min=1), hidden=True)
@document_output
def command(
    a: Path | None,
    b: Path | None,
    step: Selection | None,
    rank: Selection | None,
    micro: Selection | None,
    exact: bool,
    allow_missing: bool,
    explain: str | None,
    show_all: bool,
    self_hosted_dir: Path | None,
    weaver_dir: Path | None,
    remote_api_dir: Path | None,
    num_ranks: int | None,
    num_micros: int | None,
    as_json: bool,
    output: Path | None,
) -> int:
    """Compare dump A (the baseline) with dump B, in order of computation.

    Exit 0: all SAME, CLOSE or PADDING. Exit 1: a first divergence, or a tensor only one side has.
    The arguments of NexRL's compare_debug_dumps.py work too.
    """
    given = [path for path in (a, b, self_hosted_dir, weaver_dir, remote_api_dir) if path is not None]
    if len(given) != 2:
        raise click.UsageError(f"compare needs two dumps, A and B; got {len(given)}")
    rank = rank or (Selection.parse(f"0:{num_ranks}") if num_ranks else None)
    micro = micro or (Selection.parse(f"0:{num_micros}") if num_micros else None)
    progress = ProgressLine()
    doc = workbench.compare_dumps(*given, exact=exact, on_event=progress, step=step, rank=rank, micro=micro)
    progress.clear()
    if explain:
        explanation(doc, explain)  # an unknown name is an error in every form of output

    def report(document: dict[str, object]) -> str:
        return explanation(document, explain) if explain else comparison_report(document, show_all=show_all)

    return finish(doc, report, as_json=as_json, output=output, allow_missing=allow_missing)
