"""`rldbg compare`: where two dumps first part."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click

from replay_core.read_ahead import reading
from replay_core.records import STAGES, Selection
from tui_debugger.commands import DumpPath, document_output, finish, selectors
from tui_debugger.commands.sharding import in_units, refuse, sharded, typed
from tui_debugger.paths import digests_dir

_PATH = DumpPath(remote=True)


@click.command("compare")
@click.argument("a", type=_PATH, required=False)
@click.argument("b", type=_PATH, required=False)
@selectors
@click.option("--stage", type=click.Choice(STAGES), metavar="STAGE", help="Which dump point: forward_data, loss, ...")
@click.option("--name", multiple=True, metavar="GLOB", help="Only tensors of this name: 'layers.*.output'.")
@click.option("--exact", is_flag=True, help="Bitwise: any difference is a DIFF.")
@click.option("--digests", is_flag=True, help="Read only tensors whose digests differ; taken once of a dump without.")
@click.option("--atol", type=float, help="With --rtol: hold every float to |b - a| <= atol + rtol |a| instead.")
@click.option("--rtol", type=float, help="See --atol; either alone leaves the other 0.")
@click.option("--tolerance", "tolerance_file", type=_PATH, help="Your own limits by name: TOML, a [[tolerance]] each.")
@click.option("--map", "map_file", type=_PATH, help="Your own names: 'name in a = name in b' a line, * for any text.")
@click.option("--allow-missing", is_flag=True, help="Tensors only one side has do not fail the comparison.")
@click.option(
    "--explain",
    metavar="NAME",
    help="One tensor's sentence, both values and the rules that were asked, instead of the list.",
)
@click.option("--referee", "ruled", is_flag=True, help="Also rule noise or bug; needs weights (rldbg referee --help).")
@click.option("--weights", help="With --referee: the model of both; else what the dumps note.")
@click.option("--all", "show_all", is_flag=True, help="List SAME tensors too.")
@click.option(
    "--jsonl", is_flag=True, help="Print a JSON line per tensor as it is judged, then the rest of the document."
)
@sharded
@click.option(
    "--parts",
    type=click.IntRange(1, 4096),
    metavar="N",
    help="With --out: the tensors of a step are measured in N units, by name, and judged in one.",
)
@click.option("--self_hosted_dir", type=_PATH, hidden=True)
@click.option("--weaver_dir", type=_PATH, hidden=True)
@click.option("--remote_api_dir", type=_PATH, hidden=True)
@click.option("--num_ranks", type=click.IntRange(min=1), hidden=True)
@click.option("--num_micros", type=click.IntRange(min=1), hidden=True)
@document_output
def command(
    a: Path | None,
    b: Path | None,
    step: Selection | None,
    rank: Selection | None,
    micro: Selection | None,
    stage: str | None,
    name: tuple[str, ...],
    exact: bool,
    digests: bool,
    atol: float | None,
    rtol: float | None,
    tolerance_file: Path | None,
    map_file: Path | None,
    allow_missing: bool,
    explain: str | None,
    ruled: bool,
    weights: str | None,
    show_all: bool,
    jsonl: bool,
    shard: str | None,
    ray: str | None,
    units: Path | None,
    parts: int | None,
    self_hosted_dir: Path | None,
    weaver_dir: Path | None,
    remote_api_dir: Path | None,
    num_ranks: int | None,
    num_micros: int | None,
    as_json: bool,
    output: Path | None,
) -> int:
    """Compare dump A (the baseline) with dump B, in order of computation.

    Samples are paired by their ids, then by their tokens: other orders, paddings, packings and micro-batch sizes are
    no difference. A alone may be a document that --output wrote: it is shown again.

    Exit 0: all SAME, CLOSE or PADDING. Exit 1: a first divergence, or a tensor only one side has.
    The arguments of NexRL's compare_debug_dumps.py work too, for two runs or three.
    """
    if exact and (atol is not None or rtol is not None or tolerance_file is not None):
        raise click.UsageError("--exact leaves nothing to tolerate: without --atol, --rtol and --tolerance")
    if as_json and jsonl:
        raise click.UsageError("--json and --jsonl are two forms of one answer: take one")
    if shard is not None or units is not None or ray is not None:
        refuse({"--explain": explain, "--jsonl": jsonl, "--referee": ruled})
        if a is None or b is None or self_hosted_dir or weaver_dir or remote_api_dir:
            raise click.UsageError("--out takes two dumps, A and B")
        asked = {
            "a": str(a.resolve()), "b": str(b.resolve()), "exact": exact, "digests": digests, "atol": atol,
            "rtol": rtol, "stage": stage, "name": list(name), "map": _told(map_file),
            "tolerance": _told(tolerance_file), **({"parts": parts} if parts is not None else {}),
        }  # fmt: skip
        select = typed(step=step, rank=rank, micro=micro)
        return in_units("compare", asked, units, shard, ray, as_json=as_json, output=output, select=select,
                        judged={"allow_missing": allow_missing})  # fmt: skip
    if parts is not None:
        raise click.UsageError("--parts cuts a job into units: with --out DIR")
    given = [path for path in (a, b, self_hosted_dir, weaver_dir, remote_api_dir) if path is not None]
    options: dict[str, Any] = {
        "exact": exact,
        "digests": digests,
        "digests_under": digests_dir() if digests else None,
        "atol": atol,
        "rtol": rtol,
        "tolerance_file": tolerance_file,
        "name": name,
        "map_file": map_file,
        "stage": stage,
        "step": step,
        "rank": rank or (Selection.parse(f"0:{num_ranks}") if num_ranks else None),
        "micro": micro or (Selection.parse(f"0:{num_micros}") if num_micros else None),
        "promised": {"rank": None if rank else num_ranks, "micro": None if micro else num_micros},
    }
    asked_of = (step, rank, micro, stage, digests, num_ranks, num_micros, *name)
    # Where only a part is compared, the rest would be read for nothing.
    ahead = reading(*given) if len(given) == 2 and not any(asked_of) else nullcontext()
    with ahead:
        from tui_debugger.commands import comparing  # nearly all of rldbg: files are read meanwhile

        if a is not None and len(given) == 1 and comparing.is_document(a):
            doc = comparing.reopened(a, options)
        elif len(given) == 2 or (self_hosted_dir and weaver_dir and remote_api_dir and len(given) == 3):
            selected = {"step": step, "rank": rank, "micro": micro}
            doc = comparing.compared(
                given, options, explain=explain, jsonl=jsonl, is_scripted=self_hosted_dir is not None,
                ruled={"weights": weights, **selected} if ruled else None,
            )  # fmt: skip
        else:
            raise click.UsageError(f"compare needs two dumps, A and B; got {len(given)}")
    report = comparing.reporter(doc, explain, show_all=show_all)
    if jsonl:
        return comparing.last_line(doc, output, allow_missing)
    return finish(doc, report, as_json=as_json, output=output, allow_missing=allow_missing)


def _told(path: Path | None) -> str | None:
    return None if path is None else str(path.resolve())
