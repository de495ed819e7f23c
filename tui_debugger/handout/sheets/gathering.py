"""Units: what many workers came to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tui_debugger.handout.blocks import Facts, Grid, Handout, Sayings, Section, Strip, StripMark, Tone
from tui_debugger.reports.gathering import counts_line, notable, unit_word, verdict

if TYPE_CHECKING:
    from replay_core.documents.gathering import GatheringDocument

_ROWS, _MARKS = 200, 400
_TONES: dict[str, Tone] = {"agrees": "same", "disagrees": "bad", "failed": "bad", "crashed": "bad"}


def gathering_sheet(doc: GatheringDocument) -> Handout:
    facts = [("command", f"rldbg {doc['command']}"), ("directory", doc["directory"])]
    if doc["shard"]:
        facts.append(("part", doc["shard"]))
    marks = [
        StripMark(one["label"], unit_word(one), _TONES.get(unit_word(one), "muted")) for one in doc["units"][:_MARKS]
    ]
    first = next((place for place, mark in enumerate(marks) if mark.tone == "bad"), None)
    strip = Strip(marks, first, left_out=len(doc["units"]) - len(marks))
    sections = [Section("Units, in order of computation", [strip])] if len(marks) > 1 else []
    if found := notable(doc):
        rows = [[one["label"], unit_word(one), one["said"]] for one in found[:_ROWS]]
        tones = [_TONES.get(row[1], "muted") for row in rows]
        sections.append(
            Section("What does not agree, or has no answer",
                    [Grid(["unit", "", ""], rows, tones, left_out=len(found[_ROWS:]))])
        )  # fmt: skip
    sections.append(Section("Asked", [Facts([(name, str(value)) for name, value in doc["asked"].items() if value])]))
    said = [counts_line(doc), *(f"note: {note}" for note in doc["notes"])]
    said += [f"problem: {one['what']} ({one['where']})" for one in doc["problems"]]
    sections.append(Section("What was looked at, and what was not", [Sayings(said)]))
    tone: Tone = {True: "same", False: "bad", None: "muted"}[doc["agrees"]]  # type: ignore[assignment]
    return Handout(verdict(doc), tone, doc["headline"], facts, sections)
