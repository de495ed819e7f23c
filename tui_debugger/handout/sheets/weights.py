"""Weights: what the engine holds in place of what was sent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tui_debugger import format as words
from tui_debugger.handout.blocks import Facts, Grid, Handout, Sayings, Section, Strip, StripMark, Tone
from tui_debugger.reports.weights import coverage_line, destination_rows

if TYPE_CHECKING:
    from replay_core.documents.weights import WeightsDocument

_ROWS = 200


def weights_sheet(doc: WeightsDocument) -> Handout:
    sides = [("trainer", doc["a"]), ("engine", doc["b"]), *((("before", doc["before"]),) if doc["before"] else ())]
    facts = [
        (name, f"{side['path']}, {side['parameters']} parameters"
         + ("" if side["step"] is None else f", step {side['step']}"))
        for name, side in [*sides, *(("older", one) for one in doc["older"])]
    ]  # fmt: skip
    wrong = [one for one in doc["destinations"] if one["arrival"] != "arrived"]
    marks = [
        StripMark(one["name"], one["arrival"], "same" if one["arrival"] == "arrived" else "bad")
        for one in doc["destinations"][:400]
    ]
    first = next((place for place, mark in enumerate(marks) if mark.tone == "bad"), None)
    sections = [Section("Parameters of the engine, in order", [Strip(marks, first)])] if len(marks) > 1 else []
    if wrong:
        rows = [row for one in wrong[:_ROWS] for row in destination_rows(one)]
        table = Grid(["parameter of the engine", "holds", ""], rows, ["bad"] * len(rows), left_out=len(wrong[_ROWS:]))
        sections.append(Section(f"What did not arrive ({len(wrong)} of {len(doc['destinations'])})", [table]))
    if doc["not_sent"]:
        sections.append(Section("Parameters of the trainer without a destination", [Sayings(doc["not_sent"][:_ROWS])]))
    sections.append(
        Section("By what they hold", [Facts([(name, str(count)) for name, count in doc["counts"].items()])])
    )
    said = [coverage_line(doc), *(f"note: {note}" for note in doc["notes"])]
    said += [f"problem: {one['what']} ({one['where']})" for one in doc["problems"]]
    if doc["coverage"]["unmoved"]:
        said.append(f"{words.number(doc['coverage']['unmoved'])} equal what was there before: that the push wrote them "
                    "is not shown")  # fmt: skip
    sections.append(Section("What was compared, and what was not", [Sayings(said)]))
    tone: Tone = "same" if doc["agrees"] else "bad"
    return Handout("ARRIVED" if doc["agrees"] else "NOT ARRIVED", tone, doc["headline"], facts, sections)
