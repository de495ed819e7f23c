"""`rldbg show`: one record's fields, or one tensor's statistics and values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from replay_core import workbench
from replay_core.records import Selection
from tui_debugger.commands import DumpPath, document_output, finish, selectors
from tui_debugger.reports.record import record_report
from tui_debugger.reports.tensor import tensor_report


@click.command("show")
@click.argument("paths", type=DumpPath(remote=True), nargs=-1, required=True, metavar="PATH... [TENSOR]")
@selectors
@click.option("--stage", help="forward_data, loss, gradient ... where several match.")
@click.option("--role", help="actor, ref, critic ... where several match.")
@click.option("--tensor", metavar="NAME", help="One tensor, by its name or canonical name.")
@click.option("--at", help="Index to look around, like 0,17.")
@click.option("--slice", "part", metavar="SPANS", help="The part to print, like 0:4,:8; of ragged rows, 2,:8.")
@click.option("--tokenizer", type=click.Path(path_type=Path), help="A tokenizer.json or its folder, for texts.")
@document_output
def command(
    paths: tuple[Path, ...],
    step: Selection | None,
    rank: Selection | None,
    micro: Selection | None,
    stage: str | None,
    role: str | None,
    tensor: str | None,
    at: str | None,
    part: str | None,
    tokenizer: Path | None,
    as_json: bool,
    output: Path | None,
) -> int:
    """Show a record's fields with their statistics, or one tensor: statistics, histogram, values, text.

    Several paths are one run. A last word that is no path names the tensor; so does the name of a folder here, where
    what is shown has a tensor called so.
    """
    selection: dict[str, Any] = {"step": step, "rank": rank, "micro": micro, "stage": stage, "role": role}
    if tensor is None and len(paths) > 1 and _names_a_tensor(paths[-1], paths[:-1], selection):
        paths, tensor = paths[:-1], str(paths[-1])
    if at and part:
        raise click.UsageError("--at looks around an index, --slice prints a part: name one of them")
    if tensor is None:
        if at or part:
            raise click.UsageError("--at and --slice need a tensor: name one with --tensor")
        doc = workbench.show_record(paths[0], None, *paths[1:], stats=True, **selection)
        return finish(doc, record_report, as_json=as_json, output=output)
    shown = workbench.show_tensor(
        paths[0], tensor, *paths[1:], at=_index(at), part=part, tokenizer=tokenizer, **selection
    )
    return finish(shown, tensor_report, as_json=as_json, output=output)


def _index(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise click.BadParameter("an index is numbers with commas between, like 0,17", param_hint="--at") from None


def _names_a_tensor(last: Path, paths: tuple[Path, ...], selection: dict[str, Any]) -> bool:
    """Whether the last word is a tensor's name: it is no path, or a folder here that is called as a tensor is."""
    if not _is_there(last):
        return True
    is_a_word = str(last) == last.name and last.is_dir()
    return is_a_word and workbench.holds_tensor(paths[0], last.name, *paths[1:], **selection)


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # longer than any file name: a tensor's
        return False
