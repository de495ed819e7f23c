"""`rldbg capsule`: one file that shows what a replay found by itself; and that file opened."""

from __future__ import annotations

from pathlib import Path

import click

from replay_core import workbench
from replay_core.documents.replay import ReplayDocument
from replay_core.errors import RequestError
from replay_core.executors.child import ChildRunner
from replay_core.export.documents import check_place
from tui_debugger import paths
from tui_debugger.commands import DumpPath, document_output, finish
from tui_debugger.commands.sections import Sectioned
from tui_debugger.progress_line import ProgressLine
from tui_debugger.reports.replay import replay_report

_SECTIONS = {
    "What is made": ("cell", "script", "out"),
    "How it runs": ("time_limit", "allow_pickled_weights"),
    "The answer": ("as_json", "output", "html", "markdown", "junit"),
}
_EXAMPLES = (
    "rldbg replay DUMP --packing --out R; rldbg capsule R bug.capsule    # of its first cell that disagrees",
    "rldbg capsule R bug.capsule --script repro.py                       # and a script without rldbg",
    "rldbg bug.capsule                                                   # anywhere: runs it again",
)


@click.command("capsule", cls=Sectioned, sections=_SECTIONS, examples=_EXAMPLES)
@click.argument("replay", type=DumpPath())
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False), required=False)
@click.option("--cell", type=click.IntRange(min=0), help="Which cell; default the first that disagrees.")
@click.option("--script", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="Also a standalone script: torch and transformers, no rldbg.")  # fmt: skip
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Keep what is made on the way here.")
@click.option("--time-limit", type=float, default=1800, show_default=True, help="Seconds a piece of work may take.")
@click.option("--allow-pickled-weights", is_flag=True, help="Load .bin weights, which can run code.")
@document_output
def command(
    replay: Path,
    file: Path | None,
    cell: int | None,
    script: Path | None,
    out: Path | None,
    time_limit: float,
    allow_pickled_weights: bool,
    as_json: bool,
    output: Path | None,
) -> int:
    """Make one FILE of what REPLAY found: a slice of the model, the smallest batch, both outputs, the verdict.

    REPLAY is the directory of a replay or of one of its cells, its JSON document or its page; FILE is at most 25 MB,
    and its token ids are numbered anew: no text leaves. Where REPLAY is a capsule itself, it is run again, as
    `rldbg FILE` does.

    Exit 1: the difference shows, in the capsule made or opened. Exit 0: an opened one agrees here. Exit 4: cannot run.
    """
    if workbench.is_capsule(replay):
        return finish(opened(replay, out, time_limit), replay_report, as_json=as_json, output=output)
    if file is None:
        raise RequestError("where the capsule goes is not said", hint=f"rldbg capsule {replay} bug.capsule")
    for place in filter(None, (file, script)):
        if not click.get_current_context().meta.get("force"):
            check_place(place)
    doc, its_cell = workbench.replay_of(replay)
    progress = ProgressLine()
    progress.note("capsule: the smallest batch and slice of the model that show it, then a replay of those alone")
    with ChildRunner(warm=True, time_limit_s=time_limit) as runner:
        made = workbench.capsule(
            doc, file, out or paths.new_replay_dir("capsule"), runner, progress, script=script,
            cell=its_cell if cell is None else cell,
            allow_pickled_weights=allow_pickled_weights,
        )  # fmt: skip
    progress.clear()
    return finish(made, replay_report, as_json=as_json, output=output)


def opened(file: Path, out: Path | None = None, time_limit: float = 1800) -> ReplayDocument:
    """A capsule run again here."""
    progress = ProgressLine()
    progress.note(f"capsule: running {file.name} again, each row alone first")
    with ChildRunner(warm=True, time_limit_s=time_limit) as runner:
        doc = workbench.open_capsule(file, out or paths.new_replay_dir("capsule"), runner, progress)
    progress.clear()
    return doc
