"""A diagnosis: what is wrong, with the evidence, and the signals over the steps."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tui_debugger import format as words
from tui_debugger.handout.blocks import Block, Curve, Facts, Grid, Handout, Sayings, Section, Tone
from tui_debugger.reports.diagnosis import finding_title, headline
from tui_debugger.trend_rows import SHOWN, numbers

if TYPE_CHECKING:
    from replay_core.documents.diagnosis import DiagnosisDocument, FindingEntry, SeriesEntry

TONES: dict[str, Tone] = {"error": "bad", "warning": "warn", "info": "muted"}
#: Findings spelled out, curves drawn, points of one curve.
_FINDINGS, _CURVES, _POINTS = 40, 24, 400


def diagnosis_sheet(doc: DiagnosisDocument) -> Handout:
    causes = [finding for finding in doc["findings"] if finding["echo_of"] is None]
    echoes = [finding for finding in doc["findings"] if finding["echo_of"] is not None]
    worst = causes[0]["severity"] if causes else "none"
    word = {"error": "ERROR", "warning": "WARNING"}.get(worst, "CLEAN") if doc["checked"] else "NOT LOOKED AT"
    facts = [("run", f"{doc['path']}  ({doc['dialect']})")]
    steps = [step for step in doc["steps"] if step is not None]
    if steps:
        facts.append(("steps", f"{steps[0]} to {steps[-1]}, {len(steps)} of them" if len(steps) > 1 else str(steps[0])))
    if causes and worst != "info":
        facts += [("next", causes[0]["next_step"])]
    sections = [_finding(one) for one in causes[:_FINDINGS]]
    if echoes or causes[_FINDINGS:]:
        rest = [finding_title(one) for one in causes[_FINDINGS:]]
        rest += [f"{one['id']}, downstream of {one['echo_of']}: {one['claim']}" for one in echoes]
        sections.append(Section("Besides", [Sayings(rest)], folded=True))
    sections += _trends(doc["series"])
    skipped = Grid(["rule", "could not look"], [[one["id"], one["why"]] for one in doc["skipped"]])
    title = f"Looked at by {len(doc['checked'])} rules; {len(doc['skipped'])} could not look"
    checked: list[Block] = [Sayings([" ".join(doc["checked"]) or "none"]), *([skipped] if doc["skipped"] else [])]
    sections.append(Section(title, checked, folded=bool(doc["checked"])))
    if doc["notes"]:
        sections.append(Section("Notes", [Sayings(doc["notes"])]))
    tone = TONES.get(worst, "same") if worst != "info" else "same"
    return Handout(word, tone if doc["checked"] else "warn", headline(doc), facts, sections)


def _finding(one: FindingEntry) -> Section:
    rows = [
        [
            evidence["name"],
            str(evidence["value"]) if isinstance(evidence["value"], bool) else words.number(evidence["value"]),
            evidence["expected"] or "",
            evidence["source"] or "",
        ]
        for evidence in one["evidence"]
    ]
    blocks: list[Block] = [Grid(["evidence", "found", "expected", "from"], rows)] if rows else []
    blocks.append(Facts([("cause", one["cause"]), ("next", one["next_step"]), ("source", one["source"])]))
    return Section(finding_title(one), blocks, folded=one["severity"] == "info", tone=TONES[one["severity"]])


def _trends(series: list[SeriesEntry]) -> list[Section]:
    long = [one for one in series if len(one["values"]) > 1 and len(set(one["values"])) > 1]
    still = [f"{one['name']} = {words.number(one['values'][0])}" for one in series if len(set(one["values"])) == 1]
    order = {name: place for place, name in enumerate(SHOWN)}
    long.sort(key=lambda one: (not one["marks"], order.get(one["signal"], len(order))))
    curves: list[Block] = [_curve(one) for one in long[:_CURVES]]
    if len(long) > _CURVES:
        curves.append(Sayings([f"... and {len(long) - _CURVES} more signals; the document has all"]))
    if still:
        curves.append(Sayings([f"the same at every step: {', '.join(still)}"]))
    expected = [row for one in series for row in one["expected"] if row["holds"] is False]
    if expected:
        rows = [
            [
                row["what"], " to ".join(words.number(end) for end in row["expected"]),
                words.number(row["seen"]["median"]), row["unit"],
                row["source"] + (f"; corrected: {row['correction']}" if row["correction"] else ""),
            ]
            for row in expected
        ]  # fmt: skip
        curves.append(Grid(["what", "expected", "seen (median)", "unit", "from"], rows, ["warn"] * len(rows)))
    return [Section(f"Signals over steps ({len(long)})", curves)] if curves else []


def _curve(one: SeriesEntry) -> Curve:
    values, steps, marks = numbers(one["values"]), one["steps"], set(one["marks"])
    places = list(range(len(values)))
    if len(places) > _POINTS:
        per = -(-len(places) // _POINTS)
        places = [place for place in places if place % per == 0 or place in marks][: 2 * _POINTS]
    shown = [values[place] if math.isfinite(values[place]) else None for place in places]
    note = f"{words.number(one['values'][0])} → {words.number(one['values'][-1])}"
    apart = [str(steps[place]) for place in one["marks"]]
    if apart:
        note += f"; stands out at step {', '.join(apart[:6])}{' …' if len(apart) > 6 else ''}"
    at = [place for place, number in enumerate(places) if number in marks]
    return Curve(one["name"], [str(steps[place]) for place in places], shown, at, note)
