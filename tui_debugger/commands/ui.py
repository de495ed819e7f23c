"""`rldbg [A [B]]`: the screen."""

from __future__ import annotations

import gc
from pathlib import Path

import click

from replay_core.errors import RequestError
from tui_debugger import snapshot
from tui_debugger.commands import DumpPath, finish
from tui_debugger.opening import has_terminal, listing, open_screen, require_terminal


@click.command("ui", hidden=True)
@click.argument("a", type=DumpPath(remote=True), required=False)
@click.argument("b", type=DumpPath(remote=True), required=False)
@click.argument("more", type=DumpPath(remote=True), nargs=-1)
@click.option("--ascii", "ascii_only", is_flag=True, help="No character outside ASCII.")
@click.option("--no-mouse", is_flag=True, help="Do not ask the terminal for mouse reports.")
@click.option("--theme", help="Name of a theme.")
@click.option("--follow", is_flag=True, help="Look at A again every second while it is written.")
@click.option(
    "--one-run/--compare", "one_run", default=None, help="Whether two paths are parts of one run, or compared."
)
def command(
    a: Path | None = None,
    b: Path | None = None,
    more: tuple[Path, ...] = (),
    ascii_only: bool = False,
    no_mouse: bool = False,
    theme: str | None = None,
    follow: bool = False,
    one_run: bool | None = None,
) -> int:
    """Open the screen on dump A, or on the first divergence of A and B.

    Two paths are parts of one run where they hold records of different kinds and one framework wrote both, or one is
    a log; else they are compared. --one-run and --compare say which. More than two paths are one run.
    """
    if more and one_run is False:
        raise RequestError("--compare takes two paths", expected="A and B", found=f"{2 + len(more)} paths")
    if a is not None and b is not None and one_run is not False:
        others = (b, *more)
        if one_run or more or _belong_together(a, b):
            return _open_together(a, others, ascii_only, no_mouse, theme, follow)
    if a is not None and b is None and (a / "plan.json").is_file() and _holds_units(a):
        return _gathered(a, ascii_only, no_mouse, theme)
    if (
        a is not None
        and snapshot.is_document(a)
        and (not has_terminal() or snapshot.kind_of(a) not in (None, *snapshot.KINDS))
    ):
        return _printed(a)
    if a is not None and b is None and a.is_file() and _is_capsule(a):
        return _open_capsule(a, ascii_only, no_mouse, theme)
    return open_screen(a, b, ascii=ascii_only, mouse=not no_mouse, theme=theme, follow=follow)


def _printed(path: Path) -> int:
    """A document where there is no terminal, or no pane for it: what the command that made it printed."""
    from replay_core import workbench
    from tui_debugger.handout.kinds import KINDS

    document = workbench.reopen(path)
    _, report = KINDS.get(document["kind"], (None, None))
    if report is None:
        raise RequestError("the document is for programs", file=str(path), found=document["kind"],
                           hint=f"python -m json.tool {path}")  # fmt: skip
    return finish(document, report, as_json=False, output=None)


def _holds_units(path: Path) -> bool:
    from replay_core.units.folder import is_folder  # every dialect comes with it: no dump pays that here

    return is_folder(path)


def _gathered(path: Path, ascii_only: bool, no_mouse: bool, theme: str | None) -> int:
    """What the units of a directory have come to; on the screen as they come, and any of them can be opened there."""
    from replay_core import workbench
    from tui_debugger.reports.gathering import gathering_report

    doc = workbench.gather(path)
    if not has_terminal():
        return finish(doc, gathering_report, as_json=False, output=None)
    from tui_debugger.app import run_ui, run_units  # as above

    def reopen(file: Path) -> int:
        if snapshot.kind_of(file) in snapshot.KINDS:
            return run_ui(file, ascii=ascii_only, mouse=not no_mouse, theme=theme)
        return _read(file)

    return run_units(lambda: workbench.gather(path), reopen, ascii=ascii_only, mouse=not no_mouse, theme=theme)


def _read(file: Path) -> int:
    """A document that no pane is for, a page at a time."""
    from replay_core import workbench
    from tui_debugger.handout.kinds import KINDS

    document = workbench.reopen(file)
    _, report = KINDS.get(document["kind"], (None, None))
    click.echo_via_pager(report(document) if report is not None else f"{file}: {document['kind']}, for programs\n")
    return 0


def _is_capsule(path: Path) -> bool:
    with path.open("rb") as file:
        if not file.read(4).startswith(b"PK"):
            return False
    from replay_core.workbench import is_capsule  # every dialect comes with it, which no other file pays here

    return is_capsule(path)


def _open_capsule(file: Path, ascii_only: bool, no_mouse: bool, theme: str | None) -> int:
    """Run a capsule again and say what came out; then the screen on its two sides, where there is one."""
    from tui_debugger.commands.capsule import opened
    from tui_debugger.reports.replay import replay_report

    doc = opened(file)
    code = finish(doc, replay_report, as_json=False, output=None)
    alone, cell = doc["cells"][doc["baseline"]]["dump"], doc["cells"][-1]["dump"]
    if not has_terminal() or alone is None or cell is None:
        return code
    from tui_debugger.app import run_ui  # as above

    return run_ui(Path(alone), Path(cell), ascii=ascii_only, mouse=not no_mouse, theme=theme)


def _belong_together(a: Path, b: Path) -> bool:
    from tui_debugger.together import are_one_run

    if snapshot.is_document(a) or snapshot.is_document(b):
        return False
    return are_one_run(listing(a), listing(b))


def _open_together(
    a: Path, others: tuple[Path, ...], ascii_only: bool, no_mouse: bool, theme: str | None, follow: bool
) -> int:
    """Open several directories of one run."""
    if follow:
        raise RequestError(
            "--follow takes one path", expected="the run's own directory", found=f"{1 + len(others)} paths"
        )
    listed = listing(a, *others)
    require_terminal(a, None)
    gc.disable()
    from tui_debugger.app import run_ui  # as below

    return run_ui(a, ascii=ascii_only, mouse=not no_mouse, theme=theme, listed=listed, more=others)
