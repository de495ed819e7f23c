"""A table or a JSON of which no metric and no sample was read: no verdict follows from it, and that is what is said.

refuse_unread(run, case, found)     # NotADumpError, in words: what was looked for, what was found, what next
"""

from __future__ import annotations

from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Diagnosis
from replay_core.dumps.metrics import STEP_FIELDS
from replay_core.errors import NotADumpError
from replay_core.records import Run

#: Endings of what may be a log of metrics. A file of tensors is one that was read.
_TEXTS = frozenset((".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".txt", ".log", ".out"))
#: Rules that look at any input, whatever it holds: damaged records, numbers that are none, a stated clip range.
_OF_ANY = frozenset(("D21", "D39", "L21"))
#: Names that are told.
_NAMED = 8


def refuse_unread(run: Run, case: Case, found: Diagnosis) -> None:
    """Nothing where something was read.

    Raises:
        NotADumpError: the run is one text, and no rule found in it what it looks at.
    """
    if run.path.suffix not in _TEXTS or not run.path.is_file() or case.signals is not None or found.findings:
        return
    if not _OF_ANY.issuperset(found.checked):
        return
    fields = [ref for record in run.records for ref in record.tensors()]
    names = [ref.name for ref in fields]
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    rows = max((ref.shape[0] for ref in fields if ref.shape), default=0)
    counts = any(name.rpartition(".")[2] in STEP_FIELDS for name in names)
    raise NotADumpError(
        "no metric was read of this file: nothing in it could be looked at, and nothing is known of the run",
        file=str(run.path),
        expected='rows of numbers that name their step: {"step": 1, "loss": 0.1, "reward": 0.2} in a line each, a list '
        'of such, {"log_history": [...]}, columns of numbers as long as a column of steps, or a table with a head',
        found=(f"{rows} rows of " if rows else "")
        + (", ".join(names[:_NAMED]) or "nothing that has a name")
        + more
        + ("" if counts else "; none of them is a step: a row for each answer tells of no step"),
        hint="name the file that your trainer writes its loss to, or add a step to each row; rldbg show "
        f"{run.path.name} prints what is in it; rldbg record -- COMMAND records a run",
    )
