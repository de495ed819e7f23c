"""What a document means to the shell: one exit code per document, in one place."""

from __future__ import annotations

from replay_core.errors import ExitCode
from replay_core.jobs import Document


def exit_code(doc: Document, *, allow_missing: bool = False, fail_on: str = "warning") -> ExitCode:
    """The exit code of a finished command (the table in README.md). `fail_on` is for a diagnosis: the mildest severity
    that fails it, or `never`.
    """
    if doc["kind"] == "diagnosis":
        return _diagnosis(doc, fail_on)
    judge = {"comparison": _comparison, "replay": _replay, "run": _run, "parity": _parity}.get(doc["kind"])
    return judge(doc, allow_missing) if judge else ExitCode.AGREES


def _comparison(doc: Document, allow_missing: bool) -> ExitCode:
    codes = [_one(doc, allow_missing), *(_comparison(other, allow_missing) for other in doc.get("others", ()))]
    return max(codes)  # 3 before 1 before 0, as their precedence is


def _one(doc: Document, allow_missing: bool) -> ExitCode:
    if doc["coverage"]["records_unreadable"]:
        return ExitCode.BAD_BYTES
    counts = doc["counts"]
    absent = counts["MISSING"] + counts["skipped"] + doc["coverage"].get("numbers_absent", 0)
    diverges = counts["DIFF"] + counts["NAN"] + counts["SHAPE"] > 0
    return ExitCode.DIVERGES if diverges or (absent and not allow_missing) else ExitCode.AGREES


def _replay(doc: Document, _allow_missing: bool) -> ExitCode:
    cells = doc["cells"]
    alternatives = [cell for number, cell in enumerate(cells) if number != doc["baseline"]]
    if any(cell["outcome"] in ("failed", "crashed") for cell in cells):
        return ExitCode.CELL_FAILED
    asked = [cell for cell in alternatives if cell.get("asked", True)]
    if asked and all(cell["outcome"] == "unavailable" for cell in asked):
        return ExitCode.CELL_FAILED
    disagrees = any(cell["agreement"]["agrees"] is False for cell in alternatives if cell["agreement"])
    return ExitCode.DIVERGES if disagrees or _recording_parts(doc) else ExitCode.AGREES


def _recording_parts(doc: Document) -> bool:
    """Whether what the trainer recorded is not what each row alone computes, with a matrix around it or without."""
    if doc.get("ranking"):
        # Which weights come nearest is the question there.
        return False
    baseline = doc["cells"][doc["baseline"]]
    held = (baseline.get("recorded") or [{}])[0].get("verdict")
    trained = baseline.get("recorded_training") or {}
    return held in ("DIFF", "NAN", "SHAPE") or trained.get("agrees") is False


def _run(doc: Document, _allow_missing: bool) -> ExitCode:
    return ExitCode.BAD_BYTES if doc["unreadable"] else ExitCode.AGREES


def _diagnosis(doc: Document, fail_on: str) -> ExitCode:
    severities = ("info", "warning", "error")
    failing = severities[severities.index(fail_on) :] if fail_on in severities else ()
    # Echoes are counted neither here nor in `counts`: what explains each is no milder, and is counted.
    if any(finding["severity"] in failing and finding["echo_of"] is None for finding in doc["findings"]):
        return ExitCode.DIVERGES
    # Nothing was looked at: that is no clean bill.
    return ExitCode.AGREES if doc["checked"] else ExitCode.BAD_BYTES


def _parity(doc: Document, _allow_missing: bool) -> ExitCode:
    return ExitCode.AGREES if doc["agrees"] else ExitCode.DIVERGES
