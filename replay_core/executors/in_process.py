"""InProcess: runs a job in this very process, as a warm child does for the cells of a replay; what a crash file is."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from replay_core.errors import RldbgError, failing_disk, missing_library, stack_of
from replay_core.jobs import Answer, Job, OnEvent, ignore


class InProcess:
    """Implements `jobs.Runner`; the process that calls it is the child."""

    def __init__(self, perform: Callable[[Job, OnEvent], Answer]) -> None:
        self._perform = perform

    def run(self, job: Job, on_event: OnEvent = ignore) -> Answer:
        """Run one job to its end.

        Raises:
            RldbgError: the error the job raised, or what stands for one that it did not mean to raise.
        """
        try:
            return self._perform(job, on_event)
        except RldbgError:
            raise
        except Exception as error:
            raise unexpected(job, error) from error


#: Jobs that need more than the base installation, as people call them.
_WORK = {
    "replay_cell": "a replay",
    "replay_slice": "a capsule",
    "demo_train": "the demo",
    "critic": "a critic",
    "recorded_parity": "parity",
}


def unexpected(job: Job, error: BaseException) -> RldbgError:
    """The error that is told where a job stopped on something else than one of ours; its traceback is in a file."""
    if missing := missing_library(error, _WORK.get(job.kind, job.kind)):
        return missing
    if full := failing_disk(error, _WORK.get(job.kind, job.kind)):
        return full
    if isinstance(error, MemoryError):
        hint = "the job asked for more memory than its process may have"
    else:
        hint = "where the traceback ends in rldbg and not in the model's own code, please report it with that file"
    return RldbgError(
        f"{job.kind} stopped on {type(error).__name__}: {str(error)[:400]}",
        file=_crash_file(job, error),
        hint=hint,
    )


#: Reports of crashes that are kept.
CRASHES_KEPT = 8


def _keep_newest(reports: Iterable[Path]) -> None:
    """Take all but the newest away, before another is written."""
    dated = []
    for path in reports:
        with contextlib.suppress(OSError):
            dated.append((path.lstat().st_mtime, path))
    for _, path in sorted(dated, reverse=True)[CRASHES_KEPT - 1 :]:
        with contextlib.suppress(OSError):
            path.unlink()


def _crash_file(job: Job, error: BaseException) -> str | None:
    """Write the traceback, without the values of variables, where only its owner can read it; the newest are kept."""
    try:
        _keep_newest(Path(tempfile.gettempdir()).glob("rldbg-crash-*.txt"))
        descriptor, path = tempfile.mkstemp(prefix=f"rldbg-crash-{job.kind}-", suffix=".txt")
        with os.fdopen(descriptor, "w") as file:
            file.write(f"job {job.kind}\n")
            file.writelines(stack_of(error))
    except OSError:
        return None
    return path
