"""`rldbg show`: one record's fields, or one tensor's statistics and values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from replay_core import workbench
from replay_core.dumps import open_run
from replay_core.records import Selection
from tui_debugger.commands import document_output, finish, selectors
from tui_debugger.reports.record import record_report, tensor_report


@click.command("show")
@click.argument("path", type=click.Path(path_type=Path))
@click.argument("tensor", required=False)
@selectors
@click.option("--stage", help="forward_data, loss, gradient ... where several match.")
@click.option("--role", help="actor, ref, critic ... where several match.")
@click.option("--at", help="Index to look around, like 0,17.")
@document_output
def command(
    path: Path,
    tensor: str | None,
    step: Selection | None,
    rank: Selection | None,
    micro: Selection | None,
    stage: str | None,
    role: str | None,
    at: str | None,
    as_json: bool,
    output: Path | None,
) -> int:
    """Show a record's fields with their statistics, or one TENSOR's values."""
    selection: dict[str, Any] = {"step": step, "rank": rank, "micro": micro, "stage": stage, "role": role}
    if tensor is None:
        doc = workbench.show_record(path, None, stats=True, **selection)
        return finish(doc, record_report, as_json=as_json, output=output)
    record = workbench.find_record(open_run(path), **selection)
    where = {"path": str(path), "key": record.key.to_mapping(), "name": tensor}
    doc = workbench.inspect(where, at=_index(at))
    return finish(doc, tensor_report, as_json=as_json, output=output)


def _index(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise click.BadParameter("an index is numbers with commas between, like 0,17", param_hint="--at") from None
