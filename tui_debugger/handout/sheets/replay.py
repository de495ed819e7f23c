"""A replay: each setting against every row alone, sample by sample."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tui_debugger import format as words
from tui_debugger.cells import label
from tui_debugger.handout.blocks import Block, Grid, Handout, Sayings, Section, Strip, StripMark, Tone
from tui_debugger.handout.sheets.comparison import first_facts, settings
from tui_debugger.reports.replay import answer_lines, matrix_rows

if TYPE_CHECKING:
    from replay_core.documents.replay import CellEntry, ReplayDocument

_TONES: dict[str, Tone] = {
    "AGREES": "same", "DISAGREES": "bad", "RECORDING": "bad", "FAILED": "warn", "CRASHED": "warn",
    "UNAVAILABLE": "muted", "RAN": "muted",
}  # fmt: skip
_SAMPLES = 64


def replay_sheet(doc: ReplayDocument) -> Handout:
    lines = answer_lines(doc) or ["RAN  nothing was held against each row alone"]
    word, _, sentence = lines[0].partition("  ")
    facts = [("replay of", f"{doc['plan']['dump']}  {words.scope(doc['plan'])}"), ("model", doc["plan"]["model"])]
    if len(lines) > 1 and lines[1].startswith("  "):
        facts.append(("cause", lines[1].strip()))
    apart = next((cell for cell in doc["cells"] if cell["agreement"]["first_divergence"]), None)
    if apart is not None and (first := apart["agreement"]["first_divergence"]):
        facts += [("first diverging tensor", first["name"]), *first_facts(first)]
    answers = [line for line in lines[1:] if line[:1] not in (" ", "") and "\n" not in line]
    smallest = [line.strip() for line in lines if line.startswith("  smallest")]
    sections = [Section("Besides", [Sayings([*smallest, *answers])])] if smallest or answers else []
    sections += [_cells(doc), *_samples(doc)]
    baseline, shown = doc["cells"][doc["baseline"]], apart or doc["cells"][-1]
    title = "What really ran, in the reference (a) and in this cell (b)"
    sections += settings(title, baseline["effective"], shown["effective"])
    ranking = doc["ranking"]
    if ranking is not None:
        rows = [
            [str(place), one["model"], *(words.number(one[name], 3) for name in ("mean_abs", "max_abs", "k3"))]
            for place, one in enumerate(ranking["models"], start=1)
        ]
        table = Grid(["rank", "model", "mean |d|", "max |d|", "k3 (nats)"], rows, (), frozenset({2, 3, 4}))
        sections.append(Section(f"Models by how well they explain {ranking['against']}", [table]))
    errors = [
        f"cell {number} ({label(cell)}): {cell['error']['message']}"
        for number, cell in enumerate(doc["cells"])
        if cell["error"]
    ]
    if errors:
        sections.append(Section("What did not run, and why", [Sayings(errors)], tone="warn"))
    if doc["notes"]:
        sections.append(Section("Notes", [Sayings(doc["notes"])]))
    return Handout(word, _TONES.get(word, "muted"), sentence, facts, sections)


def _cells(doc: ReplayDocument) -> Section:
    rows = matrix_rows(doc)
    for cell, row in zip(doc["cells"], rows[1:], strict=True):
        row[1] = label(cell)
    tones = [_tone(cell, number == doc["baseline"]) for number, cell in enumerate(doc["cells"])]
    title = "Every combination of settings" if doc["matrix"] else "The settings that ran"
    marks = [
        StripMark(label(cell), row[-6] if number != doc["baseline"] else "reference", tone)
        for number, (cell, row, tone) in enumerate(zip(doc["cells"], rows[1:], tones, strict=True))
    ]
    strip: list[Block] = [Strip(marks, next((place for place, tone in enumerate(tones) if tone == "bad"), None))]
    costs = frozenset(place for place, name in enumerate(rows[0]) if name in ("load", "compile", "steady", "peak"))
    return Section(title, [*strip, Grid(rows[0], rows[1:], tones, costs)])


def _tone(cell: CellEntry, is_baseline: bool) -> Tone:
    agrees = cell["agreement"]["agrees"]
    if is_baseline or agrees:
        return "same"
    if agrees is False:
        return "bad"
    return "warn" if cell["outcome"] in ("failed", "crashed") else "muted"


def _samples(doc: ReplayDocument) -> list[Section]:
    """Of each cell the samples: those of a cell that disagrees stand open."""
    sections = []
    head = ["sample", "tokens", "worst token rel L2", "at position", "logp max (valid)", "logp max (response)"]
    for number, cell in enumerate(doc["cells"]):
        segments, off = cell["segments"] or [], cell["agreement"]["off"]
        if not segments:
            continue
        rows = [
            [
                str(row["sample"]), str(row["tokens"]),
                words.number(row["worst_token"] and row["worst_token"]["rel_l2"], 3),
                str(row["worst_token"]["position"]) if row["worst_token"] else words.NONE,
                words.number(row["valid"]["logp_max"], 3), words.number(row["response"]["logp_max"], 3),
            ]
            for row in segments[:_SAMPLES]
        ]  # fmt: skip
        tones: list[Tone] = ["bad" if row["sample"] in off else "" for row in segments[:_SAMPLES]]
        strip = Strip(
            [
                StripMark(
                    f"sample {row['sample']}", "off" if row["sample"] in off else "not off",
                    "bad" if row["sample"] in off else "same",
                    float(row["worst_token"]["rel_l2"]) if row["worst_token"] else None,
                )
                for row in segments[:_SAMPLES]
            ],
            next((place for place, row in enumerate(segments[:_SAMPLES]) if row["sample"] in off), None),
            "relative L2 of the worst token",
        )  # fmt: skip
        said = f"{len(off)} of {len(segments)} off" if off else "no sample past its limit"
        table = Grid(head, rows, tones, frozenset(range(6)), max(0, len(segments) - _SAMPLES))
        title = f"Cell {number} ({label(cell)}) against each row alone, sample by sample: {said}"
        sections.append(Section(title, [strip, table], folded=not off))
    return sections
