"""What a document came to, in a line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replay_core.replay.flags import telling

if TYPE_CHECKING:
    from replay_core.documents.comparison import ComparisonDocument
    from replay_core.documents.diagnosis import DiagnosisDocument
    from replay_core.documents.kinds import Document
    from replay_core.documents.replay import CellEntry, ReplayDocument


def headline(doc: Document) -> str:
    """One line, of the document alone."""
    if doc["kind"] == "comparison":
        return _comparison(doc)
    if doc["kind"] == "diagnosis":
        return _diagnosis(doc)
    if doc["kind"] == "replay":
        return _replay(doc)
    if doc["kind"] == "ruling":
        return f"{doc['ruling'] or 'not ruled'}: {doc['sentence']}"
    return doc["kind"]


def _comparison(doc: ComparisonDocument) -> str:
    first, counts = doc["first_divergence"], doc["counts"]
    if first is not None:
        return f"{first['verdict']} {first['name']}: {first['why']}"
    said = [f"{counts['MISSING']} MISSING"] if counts["MISSING"] else []
    said += [f"{counts['skipped']} not compared"] if counts["skipped"] else []
    if unread := doc["coverage"]["records_unreadable"]:
        said.append(f"{unread} records unreadable")
    agreeing = counts["SAME"] + counts["CLOSE"] + counts["PADDING"]
    return ", ".join([*said, f"{agreeing} of {counts['total']} tensors agree, {counts['SAME']} bitwise"])


def _diagnosis(doc: DiagnosisDocument) -> str:
    causes = [one for one in doc["findings"] if one["echo_of"] is None and one["severity"] != "info"]
    if not causes:
        return f"nothing found by {len(doc['checked'])} rules" if doc["checked"] else "no rule could look"
    more = f" and {len(causes) - 1} more" if len(causes) > 1 else ""
    return f"{causes[0]['severity']} {causes[0]['id']}: {causes[0]['claim']}{more}"


def _replay(doc: ReplayDocument) -> str:
    cells = doc["cells"]
    broken = next((cell for cell in cells if cell["outcome"] in ("failed", "crashed")), None)
    if broken is not None:
        why = broken["error"]["message"] if broken["error"] else "no word of why"
        return f"{_settings(broken)}: {broken['outcome']}: {why}"
    wrong = [cell for cell in cells if cell["agreement"]["agrees"] is False]
    if wrong:
        cell, first = wrong[0], wrong[0]["agreement"]["first_divergence"]
        named = f"{first['verdict']} {first['name']}: {first['why']}" if first is not None else "disagrees"
        why = named if cell["cause"] is None else cell["cause"]["sentence"]
        more = f"; and {len(wrong) - 1} cells more" if len(wrong) > 1 else ""
        return f"{_settings(cell)}: {why}{more}"
    baseline = cells[doc["baseline"]]
    held = baseline["recorded"][0]["verdict"] if baseline["recorded"] else None
    beside = "held to nothing recorded" if held is None else f"the recording: {held}"
    looked = sum(cell["agreement"]["agrees"] is True for cell in cells)
    return f"{looked} of {len(cells) - 1} cells agree with each row alone; {beside}"


def _settings(cell: CellEntry) -> str:
    said = ", ".join(f"{name} {value}" for name, value in telling(cell["flags"]).items())
    return said or cell["part"]
