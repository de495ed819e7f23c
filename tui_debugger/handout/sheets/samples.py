"""The samples of a step: groups side by side, and tokens coloured by each number that was recorded of them."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from tui_debugger import format as words
from tui_debugger.handout.blocks import Block, Facts, Grid, Handout, Plain, Sayings, Section, TokenMark, Tokens
from tui_debugger.reports.samples import SAMPLE_HEAD, headline, sample_rows
from tui_debugger.token_colours import STRONGEST, levels

if TYPE_CHECKING:
    from replay_core.documents.samples import SampleEntry, SamplesDocument, SampleTokens

_GROUPS, _TOKENS = 12, 1000


def samples_sheet(doc: SamplesDocument) -> Handout:
    facts = [("run", doc["path"]), ("tokenizer", doc["tokenizer"] or words.NONE)]
    sections = []
    if doc["samples"]:
        grid = Grid(SAMPLE_HEAD, sample_rows(doc, 200), (), frozenset(range(7)), doc["left_out"])
        sections.append(Section(f"Samples by {doc['by']}", [grid]))
    texts = {one["sample"]: one for one in doc["samples"]}
    sections += [_sample(entry, texts.get(entry["sample"])) for entry in doc["tokens"]]
    if doc["worst"]:
        rows = [
            [str(one["sample"]), str(one["position"]), str(one["id"]), one["piece"] or "", words.number(one["value"])]
            for one in doc["worst"]
        ]
        head = ["sample", "position", "id", "token", str(doc["worst_by"])]
        grid = Grid(head, rows, (), frozenset({0, 1, 2, 4}))
        sections.append(Section(f"The tokens of the step furthest off by {doc['worst_by']}", [grid]))
    sections += _groups(doc["samples"])
    if doc["notes"]:
        sections.append(Section("Notes", [Sayings(doc["notes"])]))
    return Handout("SAMPLES", "muted", headline(doc), facts, sections)


def _sample(entry: SampleTokens, told: SampleEntry | None) -> Section:
    """Figures and turns, then every token once for each number, coloured by it."""
    blocks: list[Block] = []
    if told is not None:
        parts = [(one["name"], words.number(one["value"])) for one in told["reward_parts"]]
        figures = [(name, words.number(told[name])) for name in ("reward", "advantage", "mismatch", "clipped")]
        blocks.append(Facts([*figures, *parts]))
    if entry["texts"]:
        blocks.append(Grid(["turn", "text"], [[turn["role"], turn["text"]] for turn in entry["texts"]]))
    if len(entry["turns"]) > 1:
        rows = [[turn["role"], str(turn["begin"]), str(turn["end"] - 1), words.number(turn["counted"])]
                for turn in entry["turns"]]  # fmt: skip
        blocks.append(Grid(["turn", "first token", "last token", "count in the loss"], rows, (), frozenset({1, 2, 3})))
    shown = slice(entry["begin"], min(len(entry["ids"]), entry["begin"] + _TOKENS))
    pieces = entry["pieces"] or [str(token) for token in entry["ids"]]
    for column in entry["columns"]:
        coloured, most = levels(column, entry["begin"])
        marks = [
            TokenMark(text, f"{entry['begin'] + place}: {words.number(value)}", (level or 0) / STRONGEST)
            for place, (text, value, level) in enumerate(
                zip(pieces[shown], column["values"][shown], coloured, strict=False)
            )
        ]  # fmt: skip
        left = len(entry["ids"]) - shown.stop
        blocks.append(Tokens(marks, f"{column['name']}, up to {most}", left))
    return Section(f"Sample {entry['sample']}, token by token", blocks)


def _groups(samples: list[SampleEntry]) -> list[Section]:
    """Answers to one prompt, beside each other."""
    known = sorted((one for one in samples if one["group"] is not None), key=lambda one: one["group"] or 0)
    sections, left = list[Section](), 0
    for number, members in groupby(known, key=lambda one: one["group"]):
        group = list(members)
        if len(group) < 2 or not any(one["response"] for one in group):
            continue
        if len(sections) == _GROUPS:
            left += 1
            continue
        rows = [
            [str(one["sample"]), words.number(one["reward"]), words.number(one["advantage"]), one["response"] or ""]
            for one in group
        ]
        grid = Grid(["sample", "reward", "advantage", "response"], rows, (), frozenset({0, 1, 2}))
        prompt: list[Block] = [Plain(group[0]["prompt"])] if group[0]["prompt"] else []
        sections.append(Section(f"Group {number}: {len(group)} answers to one prompt", [*prompt, grid], folded=True))
    if left:
        said = Sayings(["the document has their answers; --most lists fewer samples"])
        sections.append(Section(f"… and {words.plural(left, 'group')} more", [said], folded=True))
    return sections
