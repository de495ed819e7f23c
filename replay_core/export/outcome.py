"""What a document means to the shell: one exit code per document, in one place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replay_core.errors import ExitCode

if TYPE_CHECKING:
    from replay_core.documents.comparison import ComparisonDocument
    from replay_core.documents.diagnosis import DiagnosisDocument
    from replay_core.documents.gathering import GatheringDocument
    from replay_core.documents.kinds import Document
    from replay_core.documents.replay import ReplayDocument
    from replay_core.documents.ruling import RulingDocument


def exit_code(
    doc: Document, *, allow_missing: bool = False, fail_on: str = "warning", fail_above: float | None = None
) -> ExitCode:
    """The exit code of a finished command (the table in README.md). `fail_on` is for a diagnosis: the mildest severity
    that fails it, or `never`.
    """
    if doc["kind"] == "diagnosis":
        return _diagnosis(doc, fail_on)
    if doc["kind"] == "comparison":
        return _comparison(doc, allow_missing)
    if doc["kind"] == "replay":
        return _replay(doc)
    if doc["kind"] == "run":
        return ExitCode.BAD_BYTES if doc["unreadable"] else ExitCode.AGREES
    if doc["kind"] == "ruling":
        return _ruling(doc, fail_above)
    if doc["kind"] == "mismatch":
        return ExitCode.CELL_FAILED if doc["agrees"] is None else _agreeing(doc["agrees"])
    if doc["kind"] == "gathering":
        return _gathering(doc)
    if doc["kind"] == "weights" and doc["coverage"].get("unread", 0):
        return ExitCode.BAD_BYTES
    if doc["kind"] == "parity" or doc["kind"] == "weights":
        return _agreeing(doc["agrees"])
    return ExitCode.AGREES


def _gathering(doc: GatheringDocument) -> ExitCode:
    """The worst of its units: 3 before 4 before 1 before 0. A unit without an answer is none that agrees."""
    if any(unit["state"] == "failed" and unit["exit_code"] == ExitCode.BAD_BYTES for unit in doc["units"]):
        return ExitCode.BAD_BYTES
    codes = {unit["exit_code"] for unit in doc["units"] if unit["state"] == "done"}
    if ExitCode.BAD_BYTES in codes:
        return ExitCode.BAD_BYTES
    if ExitCode.CELL_FAILED in codes or doc["counts"]["done"] < doc["counts"]["total"]:
        return ExitCode.CELL_FAILED
    # A worker without a unit, or of units that only measure, has found nothing, and nothing has failed: its scheduler
    # is told so.
    return _agreeing(doc["agrees"] is True or (doc["agrees"] is None and codes <= {None}))


def _agreeing(agrees: bool) -> ExitCode:
    return ExitCode.AGREES if agrees else ExitCode.DIVERGES


def _comparison(doc: ComparisonDocument, allow_missing: bool) -> ExitCode:
    ruling = doc.get("ruling")
    if ruling is not None and ruling["ruling"] is not None and not doc["coverage"]["records_unreadable"]:
        return _ruling(ruling)
    codes = [_one(doc, allow_missing), *(_comparison(other, allow_missing) for other in doc["others"])]
    return max(codes)  # 3 before 1 before 0, as their precedence is


def _ruling(doc: RulingDocument, fail_above: float | None = None) -> ExitCode:
    """NOISE agrees, SUSPECT and BUG do not; `fail_above`: nor do log-probabilities further off than so many floors.
    What could not be ruled is no answer."""
    if doc["ruling"] is None:
        return ExitCode.CELL_FAILED
    floors = [side["floor"]["ratio"] for side in (doc["a"], doc["b"]) if side is not None and side["floor"] is not None]
    is_past = fail_above is not None and any(isinstance(one, str) or one > fail_above for one in floors)
    return ExitCode.DIVERGES if is_past or doc["ruling"] != "NOISE" else ExitCode.AGREES


def _one(doc: ComparisonDocument, allow_missing: bool) -> ExitCode:
    if doc["coverage"]["records_unreadable"]:
        return ExitCode.BAD_BYTES
    counts = doc["counts"]
    absent = counts["MISSING"] + counts["skipped"] + doc["coverage"].get("numbers_absent", 0)
    diverges = counts["DIFF"] + counts["NAN"] + counts["SHAPE"] > 0
    return ExitCode.DIVERGES if diverges or (absent and not allow_missing) else ExitCode.AGREES


def _replay(doc: ReplayDocument) -> ExitCode:
    cells = doc["cells"]
    alternatives = [cell for number, cell in enumerate(cells) if number != doc["baseline"]]
    if any(cell["outcome"] in ("failed", "crashed") for cell in cells):
        return ExitCode.CELL_FAILED
    asked = [cell for cell in alternatives if cell["asked"]]
    if asked and all(cell["outcome"] == "unavailable" for cell in asked):
        return ExitCode.CELL_FAILED
    # The reference, too, where it is wrong itself.
    disagrees = any(cell["agreement"]["agrees"] is False for cell in cells)
    return ExitCode.DIVERGES if disagrees or _recording_parts(doc) else ExitCode.AGREES


def _recording_parts(doc: ReplayDocument) -> bool:
    """Whether what the trainer recorded is not what each row alone computes, with a matrix around it or without."""
    if doc["ranking"]:
        # Which weights come nearest is the question there.
        return False
    baseline = doc["cells"][doc["baseline"]]
    held = baseline["recorded"][0]["verdict"] if baseline["recorded"] else None
    trained = baseline["recorded_training"]
    return held in ("DIFF", "NAN", "SHAPE") or (trained is not None and trained["agrees"] is False)


def _diagnosis(doc: DiagnosisDocument, fail_on: str) -> ExitCode:
    severities = ("info", "warning", "error")
    failing = severities[severities.index(fail_on) :] if fail_on in severities else ()
    # Echoes are counted neither here nor in `counts`: what explains each is no milder, and is counted.
    if any(finding["severity"] in failing and finding["echo_of"] is None for finding in doc["findings"]):
        return ExitCode.DIVERGES
    # Nothing was looked at: that is no clean bill.
    return ExitCode.AGREES if doc["checked"] else ExitCode.BAD_BYTES
