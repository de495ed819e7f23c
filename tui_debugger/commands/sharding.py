"""--shard and --out: a command done one part of the run at a time, by any number of workers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from replay_core.errors import RequestError
from tui_debugger.aside import aside
from tui_debugger.commands import Decorated, finish

if TYPE_CHECKING:
    from replay_core.records import Selection
    from replay_core.units.shard import Shard

shard_option = click.option(
    "--shard", metavar="I/N", help="Only part I of N, a file each in --out: 1/4; auto: Slurm's array, else RANK."
)
out_option = click.option(
    "--out", "units", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
    help="Do it a step or micro-batch at a time, a file each in DIR; what is there is not done again (rldbg gather).",
)  # fmt: skip


ray_option = click.option(
    "--ray", is_flag=False, flag_value="", metavar="[ADDRESS]",
    help="With --out: on the actors of a Ray cluster; without ADDRESS, of one on this machine.",
)  # fmt: skip


def sharded(command: Decorated) -> Decorated:
    """--shard, --ray and --out."""
    return shard_option(ray_option(out_option(command)))


def shard_of(text: str | None) -> Shard | None:
    """The part that is asked for, or that the task of a Slurm array is to do; None: all of it.

    RANK alone asks for nothing: a shell inside a training job has it as well, and its owner wants the whole answer.

    Raises:
        RequestError: it is none.
    """
    from replay_core.units.shard import Shard

    found = Shard.parse(text, os.environ) if text is not None else Shard.of_array(os.environ)
    if found is not None and found.told_by:
        aside(f"part {found}, as {found.told_by} say\n")
    return found


def typed(**parts: Selection | str | None) -> dict[str, str]:
    """What was typed of --step, --rank, --micro and --role, where anything was."""
    return {name: str(value) for name, value in parts.items() if value is not None}


def refuse(given: Mapping[str, Any]) -> None:
    """Refuse options that are about one answer, not about many.

    Raises:
        click.UsageError: one of them is given.
    """
    odd = [option for option, value in given.items() if value not in (None, False, ())]
    if odd:
        raise click.UsageError(f"{odd[0]} is about one answer: without --out, or on what a unit left in DIR")


def in_units(
    command: Literal["compare", "diagnose", "replay", "referee"],
    params: Mapping[str, Any],
    out: Path | None,
    shard: str | None,
    ray: str | None,
    *,
    as_json: bool,
    output: Path | None,
    select: Mapping[str, str] | None = None,
    judged: Mapping[str, Any] | None = None,
    time_limit_s: float | None = None,
    verbose: bool = False,
) -> int:
    """Do this worker's units, each in a child that stays warm and is replaced where it dies."""
    from replay_core import workbench
    from replay_core.executors.child import ChildRunner
    from tui_debugger.progress_line import ProgressLine
    from tui_debugger.reports.gathering import gathering_report

    if out is None:
        raise RequestError("--shard and --ray need a directory for what they find", expected="--out DIR", found="none")
    part = shard_of(shard)
    progress = ProgressLine(verbose=verbose)
    with ChildRunner(warm=True, time_limit_s=time_limit_s) as runner:
        doc = workbench.work_units(command, params, out, part, runner, progress, select=select, judged=judged,
                                   ray=ray, time_limit_s=time_limit_s)  # fmt: skip
    progress.clear()
    return finish(doc, gathering_report, as_json=as_json, output=output)
