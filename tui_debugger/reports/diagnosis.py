"""A diagnosis document as text: the worst finding first, then what was looked at, then what could not be."""

from __future__ import annotations

import re
import textwrap
from typing import TYPE_CHECKING

from tui_debugger import format as words
from tui_debugger.reports.trends import trends_lines

if TYPE_CHECKING:
    from replay_core.documents.diagnosis import DiagnosisDocument, FindingEntry

WIDTH = 100
#: Pieces of evidence printed of a finding; the document has all.
PIECES = 6
#: Findings spelled out; of the others the claim is printed.
SPELLED_OUT = 3


def diagnosis_report(doc: DiagnosisDocument, *, show_all: bool = False) -> str:
    causes = [finding for finding in doc["findings"] if finding["echo_of"] is None]
    downstream = [finding for finding in doc["findings"] if finding["echo_of"] is not None]
    lines = [headline(doc)]
    if causes and causes[0]["severity"] != "info":
        lines.append("next: " + causes[0]["next_step"])
    lines.append(f"{words.safe(doc['path'])}  ({doc['dialect']})")
    spelled = len(causes) if show_all else SPELLED_OUT
    for finding in causes[:spelled]:
        lines += ["", *_finding(finding)]
    if causes[spelled:]:
        lines += ["", "besides (--all spells them out):"]
        lines += [
            line for finding in causes[spelled:] for line in _wrapped("  " + finding_title(finding), "              ")
        ]
    if downstream:
        lines += ["", "downstream: " + ", ".join(f"{one['id']} of {one['echo_of']}" for one in downstream)]
        if show_all:
            for finding in downstream:
                lines += ["", *_finding(finding)]
        else:
            # An echo may name the cause better than what it is an echo of: it is read, too.
            loud = [finding for finding in downstream if finding["severity"] != "info"]
            lines += [line for one in loud for line in _wrapped("  " + finding_title(one), "              ")]
    lines += trends_lines(doc["series"], show_all=show_all)
    lines += ["", f"checked {len(doc['checked'])} rules: " + (" ".join(doc["checked"]) or "none")]
    lines += _skipped(doc, show_all=show_all)
    lines += [f"note: {note}" for note in (doc["notes"] if show_all else doc["notes"][:3])]
    return "\n".join(lines)


def headline(doc: DiagnosisDocument) -> str:
    """The answer in one line."""
    counts = doc["counts"]
    if not doc["checked"]:
        return "nothing could be looked at: no rule found what it needs"
    first = next((finding for finding in doc["findings"] if finding["echo_of"] is None), None)
    if first is None or first["severity"] == "info":
        known = "" if first is None else f"; {counts['info']} worth knowing, first {first['id']}: {first['claim']}"
        return f"no warning and no error in {len(doc['checked'])} rules{known}"
    loud = (("error", counts["error"]), ("warning", counts["warning"]))
    parts = [f"{count} {level}{'s' * (count > 1)}" for level, count in loud if count]
    return f"{' and '.join(parts)}; first {first['id']}: {first['claim']}{_since(first, len(doc['steps']))}"


def _since(finding: FindingEntry, recorded: int) -> str:
    """Since when, and how sure: in how many of the steps that were looked at."""
    steps, looked = finding["steps"], finding.get("looked", 0)
    if not steps or recorded < 2 or (looked < 2 and re.search(rf"\bstep {steps[0]}\b", finding["claim"])):
        return ""
    return f", since step {steps[0]}" + (f" ({len(steps)} of {looked} steps)" if looked > 1 else "")


def _finding(finding: FindingEntry) -> list[str]:
    lines = _wrapped(finding_title(finding), "              ")
    for evidence in finding["evidence"][:PIECES]:
        value = evidence["value"]
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        line = f"{evidence['name']} = {words.number(value) if number else value}"
        if evidence["expected"]:
            line += f"  (expected {evidence['expected']})"
        if evidence["source"]:
            line += f"  from {evidence['source']}"
        lines += _wrapped("    " + line, "        ")
    if len(finding["evidence"]) > PIECES:
        lines.append(f"    and {len(finding['evidence']) - PIECES} more in --json")
    lines += _wrapped("    cause: " + finding["cause"], "        ")
    return [*lines, "    next:  " + finding["next_step"]]


def finding_title(finding: FindingEntry) -> str:
    return f"{finding['severity'].upper():<8}{finding['id']}  {finding['claim']}{_steps(finding)}"


def _steps(finding: FindingEntry) -> str:
    steps, looked = finding["steps"], finding.get("looked", 0)
    if not steps:
        return ""
    if looked > 1 and len(steps) == looked:
        return f"  [all {looked} steps]"
    shown = ", ".join(map(str, steps[:5])) + (f" and {len(steps) - 5} more" if len(steps) > 5 else "")
    return f"  [step {shown}" + (f": {len(steps)} of {looked}]" if looked > 1 else "]")


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False, drop_whitespace=True
    )


def _skipped(doc: DiagnosisDocument, *, show_all: bool) -> list[str]:
    if not doc["skipped"]:
        return []
    if show_all:
        return ["skipped:", *(f"  {one['id']}  {one['why']}" for one in doc["skipped"])]
    by_reason: dict[str, list[str]] = {}
    for one in doc["skipped"]:
        by_reason.setdefault(one["why"], []).append(one["id"])
    lines = [f"skipped {len(doc['skipped'])} rules:"]
    return [*lines, *(line for why, ids in by_reason.items() for line in _wrapped(f"  {' '.join(ids)}: {why}", "    "))]
