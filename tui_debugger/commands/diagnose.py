"""`rldbg diagnose`: what is wrong in the training maths, from a dump or a log."""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from replay_core import workbench
from replay_core.errors import RldbgError, error_from_mapping
from replay_core.records import Selection
from tui_debugger.commands import DumpPath, document_output, finish, step_selector
from tui_debugger.commands.scalars import scalars_option, to_dashboard
from tui_debugger.commands.sharding import in_units, sharded, typed
from tui_debugger.progress_line import ProgressLine
from tui_debugger.reports.diagnosis import diagnosis_report

if TYPE_CHECKING:
    from replay_core.documents.diagnosis import DiagnosisDocument
    from replay_core.export.dashboards import Dashboard

_STDIN = Path("-")


@click.command("diagnose")
@click.argument("paths", type=DumpPath(remote=True), nargs=-1, metavar="PATH...")
@step_selector
@click.option("--rule", "rules", multiple=True, metavar="ID", help="Only this rule, like D08; may be given again.")
@click.option("--explain", metavar="ID", help="What a rule looks at, its threshold and its source; then exit.")
@click.option(
    "--fail-on",
    type=click.Choice(("info", "warning", "error", "never")),
    default="warning",
    show_default=True,
    help="The mildest finding that makes the exit code 1.",
)
@click.option("--all", "show_all", is_flag=True, help="Spell out what is downstream, and every skipped rule.")
@click.option("--follow", is_flag=True, help="Again for every step that comes, until Ctrl-C: then the answer so far.")
@scalars_option
@sharded
@document_output
def command(
    paths: tuple[Path, ...],
    step: Selection | None,
    rules: tuple[str, ...],
    explain: str | None,
    fail_on: str,
    show_all: bool,
    follow: bool,
    scalars: str | None,
    shard: str | None,
    ray: str | None,
    units: Path | None,
    as_json: bool,
    output: Path | None,
) -> int:
    """Name what is wrong in the training maths of a dump or a log, with the evidence, or say what is missing to tell.

    A log may be one pasted line; - reads it from standard input. Several paths are one run: a dump and its log, two
    directories of ranks. Exit 1: a finding of --fail-on and above.
    Exit 3: nothing in PATH could be looked at.
    """
    if explain:
        click.echo(workbench.explain_rule(explain))
        return 0
    if not paths:
        raise click.UsageError("diagnose needs a dump or a log")
    if follow and (shard or units or ray is not None or step is not None or paths == (_STDIN,)):
        raise click.UsageError("--follow looks at every step of a run on disk: without --step, --out and -")
    if shard is not None or units is not None or ray is not None:
        if paths == (_STDIN,):
            raise click.UsageError("--out takes a dump or a log that can be read again, not -")
        asked = {"paths": [str(path.resolve()) for path in paths], "rules": list(rules)}
        return in_units("diagnose", asked, units, shard, ray, as_json=as_json, output=output, select=typed(step=step),
                        judged={"fail_on": fail_on})  # fmt: skip
    with to_dashboard(scalars, follow=follow) as told:
        doc = _followed(paths, rules, told) if follow else _once(paths, rules, step)
    return finish(
        doc,
        lambda document: diagnosis_report(document, show_all=show_all),
        as_json=as_json,
        output=output,
        fail_on=fail_on,
    )


def _once(paths: tuple[Path, ...], rules: tuple[str, ...], step: Selection | None) -> DiagnosisDocument:
    progress = ProgressLine()
    if paths == (_STDIN,):
        with _standard_input() as path:
            try:
                doc: DiagnosisDocument = _renamed(
                    workbench.diagnose(path, rules=rules, step=step, on_event=progress), str(path)
                )
            except RldbgError as error:
                raise error_from_mapping(_renamed(error.to_mapping(), str(path))) from None
    else:
        doc = workbench.diagnose(*paths, rules=rules, step=step, on_event=progress)
    progress.clear()
    return doc


def _followed(paths: tuple[Path, ...], rules: tuple[str, ...], told: Dashboard | None) -> DiagnosisDocument:
    from tui_debugger.commands.following import FollowedDiagnosis

    doc = FollowedDiagnosis(paths, rules, told, ProgressLine("waiting for the run")).until_stopped()
    if doc is None:
        raise KeyboardInterrupt  # before anything could be looked at: there is no answer
    return doc


@contextmanager
def _standard_input() -> Iterator[Path]:
    """Standard input as a file: a log is read by its lines, and a run by its path."""
    with _ended_in_order(), tempfile.TemporaryDirectory(prefix="rldbg-") as folder:
        path = Path(folder) / "stdin.log"
        with open(path, "wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
        yield path


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """What ends the process lets it take its files away first."""
    before = {}
    with suppress(ValueError):  # of the main thread alone
        for number in (signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
            before[number] = signal.signal(number, _leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(number: int, _frame: object) -> None:
    sys.exit(128 + number)


def _renamed(value: Any, path: str) -> Any:
    """The document with `-` where it names the file that is gone again."""
    if isinstance(value, dict):
        return {key: _renamed(inner, path) for key, inner in value.items()}
    if isinstance(value, list):
        return [_renamed(inner, path) for inner in value]
    return value.replace(path, "-") if isinstance(value, str) else value
