"""What `rldbg compare` asks for and prints: apart from its options, as it imports nearly all of rldbg."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replay_core import workbench
from replay_core.errors import RequestError
from replay_core.export.outcome import exit_code
from replay_core.jobs import Event, Partial
from replay_core.workbench import is_document as is_document
from tui_debugger.commands import finish, say
from tui_debugger.progress_line import ProgressLine
from tui_debugger.reports.comparison import comparison_report, explanation

if TYPE_CHECKING:
    from replay_core.documents.comparison import ComparisonDocument, PairEntry


def compared(
    given: Sequence[Path],
    options: Mapping[str, Any],
    *,
    explain: str | None,
    jsonl: bool,
    is_scripted: bool,
    ruled: Mapping[str, Any] | None,
) -> ComparisonDocument:
    """The comparison of two dumps, or of three as NexRL's script takes them.

    ruled: the weights, and the step, rank and micro-batch, to rule noise or bug with; None where nobody asks.
    """
    progress, lines = ProgressLine("" if jsonl else "reading names of files"), _JsonLines() if jsonl else None
    asked: dict[str, Any] = {
        **options,
        "on_event": lines if lines else progress,
        "explain": explain,
        "is_rejudged": False,
        "on_row": lines.row if lines else None,
    }
    if len(given) == 3:
        doc = workbench.compare_three(*given, summarised=True, **asked)
    else:
        doc = workbench.compare_dumps(*given, summarised=True if is_scripted else None, **asked)
    if ruled is not None:
        weights, selected = ruled["weights"], {name: value for name, value in ruled.items() if name != "weights"}
        doc["ruling"] = workbench.referee(
            *given[:2], weights_a=weights, weights_b=weights, on_event=progress, **selected
        )
    progress.clear()
    return doc


def reporter(doc: ComparisonDocument, explain: str | None, *, show_all: bool) -> Callable[[ComparisonDocument], str]:
    """What prints the document: all of it, or one tensor of it.

    Raises:
        SelectionError: it has no tensor of that name, which is an error in every form of output.
    """
    if explain is not None:
        explained = explanation(doc, explain)
        return lambda _doc: explained

    def report(document: ComparisonDocument) -> str:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        return comparison_report(document, show_all=show_all, width=width)

    return report


def reopened(path: Path, options: Mapping[str, Any]) -> ComparisonDocument:
    """A comparison that --output wrote.

    Raises:
        RequestError: it is another document, or what only dumps can answer is asked of it.
    """
    asked = [
        option
        for option, value in options.items()
        if option not in ("promised", "digests_under") and value not in (None, False, ())
    ]
    if asked:
        raise RequestError(
            "a written document is shown as it was",
            file=str(path),
            expected="the dumps, to select or to judge again",
            found=", ".join(f"--{option.removesuffix('_file')}" for option in asked),
        )
    doc = workbench.reopen(path)
    if doc["kind"] != "comparison":
        raise RequestError("the document is no comparison", file=str(path), expected="comparison", found=doc["kind"])
    return doc


class _JsonLines:
    """A JSON line per tensor, and one for the first divergence, each as soon as it is known."""

    def row(self, row: PairEntry) -> None:
        say(json.dumps({"tensor": row}, allow_nan=False))

    def __call__(self, event: Event) -> None:
        if isinstance(event, Partial) and event.document.get("first_divergence"):
            say(json.dumps(event.document, allow_nan=False))


def last_line(doc: ComparisonDocument, output: Path | None, allow_missing: bool) -> int:
    """The document without its tensors, which have been said."""
    rest = {name: value for name, value in doc.items() if name != "tensors"}
    code = int(exit_code(doc, allow_missing=allow_missing))
    finish(doc, lambda _doc: json.dumps({"comparison": rest}, allow_nan=False), as_json=False, output=output)
    return code
