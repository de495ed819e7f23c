"""An answer as JUnit XML, which CI services draw: the exit code first, then what it was made of, a case each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal
from xml.sax.saxutils import escape, quoteattr

from msgspec import Struct

from replay_core.errors import ExitCode
from tui_debugger import format as words
from tui_debugger.cells import label
from tui_debugger.handout.kinds import sheet_of
from tui_debugger.reports.tensor_table import held_at

if TYPE_CHECKING:
    from replay_core.documents.kinds import Document


class SuiteCase(Struct, frozen=True):
    """One thing that was looked at. `outcome`: what became of it; `why`: a sentence, where it did not pass."""

    group: str
    name: str
    outcome: Literal["passed", "failure", "error", "skipped"] = "passed"
    why: str = ""


def junit(document: Document, code: int) -> str:
    """One suite. Its first case is the answer: it passes where the exit code is 0, and what follows explains it, as a
    failure only where the answer is none.
    """
    sheet = sheet_of(document)
    said = f"{sheet.word}: {sheet.sentence}"
    fails = code != ExitCode.AGREES
    outcome: Literal["passed", "failure", "error"] = (
        "passed" if not fails else "failure" if code == ExitCode.DIVERGES else "error"
    )
    first = SuiteCase("rldbg", f"{document['kind']} (exit code {code})", outcome, said)
    parts = (
        _cases(document) if fails else [SuiteCase(one.group, one.name, _mild(one), one.why) for one in _cases(document)]
    )
    cases = [first, *parts]
    counts = {name: sum(one.outcome == name for one in cases) for name in ("failure", "error", "skipped")}
    return (
        '<?xml version="1.0" encoding="utf-8"?>\n'
        f'<testsuites><testsuite name={_attribute("rldbg " + document["kind"])} tests="{len(cases)}" '
        f'failures="{counts["failure"]}" errors="{counts["error"]}" skipped="{counts["skipped"]}" '
        f"timestamp={_attribute(document['created'].rstrip('Z'))}>\n"
        f"{''.join(map(_case, cases))}</testsuite></testsuites>\n"
    )


def _mild(one: SuiteCase) -> Literal["passed", "skipped"]:
    return "passed" if one.outcome == "passed" else "skipped"


def _case(one: SuiteCase) -> str:
    begin = f"<testcase classname={_attribute(one.group)} name={_attribute(one.name)}"
    if one.outcome == "passed":
        return f"{begin}/>\n"
    return (
        f"{begin}><{one.outcome} message={_attribute(one.why)}>{escape(_shown(one.why))}</{one.outcome}></testcase>\n"
    )


def _shown(text: str) -> str:
    """What XML can hold of a text, at a length that a service shows."""
    return words.end(words.safe(text[:4000]).replace("\ufffe", "").replace("\uffff", ""), 2000)


def _attribute(text: str) -> str:
    return quoteattr(_shown(text))


def _cases(document: Document) -> list[SuiteCase]:
    if document["kind"] == "comparison":
        return [
            SuiteCase(held_at(row), row["name"], _of_verdict(row["verdict"]), f"{row['verdict']}: {row['reason']}")
            for row in document["tensors"]
        ]
    if document["kind"] == "diagnosis":
        found = [
            SuiteCase(one["link"], one["id"], "skipped" if one["severity"] == "info" else "failure",
                 f"{one['severity']}: {one['claim']}. cause: {one['cause']}. next: {one['next_step']}")
            for one in document["findings"]
        ]  # fmt: skip
        ids = {one.name for one in found}
        clean = [SuiteCase("rules", id) for id in document["checked"] if id not in ids]
        return [*found, *clean, *(SuiteCase("rules", one["id"], "skipped", one["why"]) for one in document["skipped"])]
    if document["kind"] == "replay":
        return [
            SuiteCase(
                "cells", f"{number} {label(cell)}",
                "failure" if cell["agreement"]["agrees"] is False
                else "error" if cell["outcome"] in ("failed", "crashed")
                else "skipped" if cell["outcome"] == "unavailable" else "passed",
                cell["error"]["message"] if cell["error"]
                else cell["cause"]["sentence"] if cell["cause"] else "not what each row alone computes",
            )
            for number, cell in enumerate(document["cells"])
        ]  # fmt: skip
    if document["kind"] == "weights":
        return [
            SuiteCase("parameters", one["name"], "passed" if one["arrival"] == "arrived" else "failure", one["what"])
            for one in document["destinations"]
        ]
    return []


def _of_verdict(verdict: str) -> Literal["passed", "failure", "skipped"]:
    if verdict in words.DIVERGING or verdict == "MISSING":
        return "failure"
    return "skipped" if verdict == "skipped" else "passed"
