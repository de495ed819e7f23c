"""What a dump holds, and what could not be read of it, said in the log."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from replay_core.jobs import Job
from tui_debugger.answer import run_line
from tui_debugger.flows.errands import Errands
from tui_debugger.together import named

if TYPE_CHECKING:
    from replay_core.documents.run import RunDocument

_PROBLEMS_LOGGED = 50


async def listed_run(errands: Errands, path: Path, run: RunDocument | None = None) -> RunDocument:
    """The records of a dump. `run`: what was listed already."""
    run = run or await errands.run(Job("open", named(errands.state.opened, str(path))), f"opening {path}")
    errands.log(f"{path}: {run_line(run)}")
    problems = run.get("problems") or []
    for problem in problems[:_PROBLEMS_LOGGED]:
        errands.log(f"problem: {problem.get('where')}: {problem.get('what')}")
    if len(problems) > _PROBLEMS_LOGGED:
        errands.log(f"and {len(problems) - _PROBLEMS_LOGGED} problems more: 7 lists them, and so does rldbg ls {path}")
    for note in run.get("notes") or []:
        errands.log(f"note: {note}")
    return run
