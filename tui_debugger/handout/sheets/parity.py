"""Two critics on the same tokens: the cause, what counts beside what does not, the values against each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tui_debugger import format as words
from tui_debugger.handout.blocks import Bars, Block, Curve, Grid, Handout, Plain, Sayings, Section, Tone
from tui_debugger.handout.sheets.comparison import first_facts, settings
from tui_debugger.reports.parity import answer_lines, batch_lines, causes_of

if TYPE_CHECKING:
    from replay_core.documents.parity import BatchEntry, ParityDocument, RandomSource

_WORST = 12


def parity_sheet(doc: ParityDocument) -> Handout:
    lines = answer_lines(doc)
    word = lines[0].partition("  ")[0]
    cause = doc["cause"] or "not finite"
    facts = [("a", _critic(doc["a"]["backend"], doc["a"]["engine"], doc["a"]["path"]))]
    facts += [("b", _critic(doc["b"]["backend"], doc["b"]["engine"], doc["b"]["path"])), ("batch", doc["about"])]
    first = doc["first_divergence"]
    facts += [("first diverging module tensor", first["name"]), *first_facts(first)] if first is not None else []
    sections = [Section("Besides", [Sayings([line.strip() for line in lines[2:]])])] if lines[2:] else []
    about = [batch for batch in doc["batches"] if batch["name"] == doc["about"]]
    rest = [batch for batch in doc["batches"] if batch["name"] != doc["about"]]
    sections += [_batch(batch, doc, folded=batch in rest) for batch in [*about, *rest]]
    sections.append(_randomness(doc["randomness"]))
    sections += settings("Controls, read back from the built critics", doc["a"]["readback"], doc["b"]["readback"])
    if doc["notes"]:
        sections.append(Section("Notes", [Sayings(doc["notes"])]))
    tone: Tone = "same" if doc["agrees"] else "bad"
    return Handout(word, tone, f"cause: {cause}: {doc['why']}", facts, [one for one in sections if one.blocks])


def _critic(backend: str, engine: str, path: str) -> str:
    return f"{backend}, {engine}, {path}"


def _batch(batch: BatchEntry, doc: ParityDocument, *, folded: bool) -> Section:
    blocks: list[Block] = [Plain("\n".join(batch_lines(batch, doc)[1:]))]
    bins = batch["histogram"]
    if bins is not None:
        edges = [float(edge) for edge in bins["edges"]]
        rows = [
            (f"{words.number(low)} to {words.number(high)}", float(count))
            for low, high, count in zip(edges, edges[1:], bins["counted"], strict=False)
        ]
        # The bins reach as far as padding does: those at both ends that hold no token that counts are not its range.
        held = [place for place, (_, count) in enumerate(rows) if count]
        if held:
            blocks.append(Bars(rows[held[0] : held[-1] + 1], f"tokens that count ({batch['counted']}), by b - a"))
    if len(batch["steps"]) > 1:
        steps = [str(step["step"]) for step in batch["steps"]]
        values = [step["masked"]["max_abs"] for step in batch["steps"]]
        shown = [None if value is None or isinstance(value, str) else float(value) for value in values]
        blocks.append(Curve("max |b - a| after each training step", steps, shown))
    if batch["worst"]:
        table = [
            [str(one["row"]), str(one["position"]), *(words.number(one[name], 5) for name in ("a", "b", "d")),
             "" if one["token"] is None else str(one["token"]), one["text"] or "", one["before"] or ""]
            for one in batch["worst"][:_WORST]
        ]  # fmt: skip
        head = ["row", "position", "a", "b", "b - a", "token", "text", "before it"]
        blocks.append(Grid(head, table, (), frozenset(range(6)), max(0, len(batch["worst"]) - _WORST)))
    shape = " × ".join(map(str, batch["shape"]))
    return Section(f"Batch {batch['name']} ({shape}), cause: {causes_of(batch)}", blocks, folded)


def _randomness(rows: list[RandomSource]) -> Section:
    table, tones = [], list[Tone]()
    for one in rows:
        equal = {True: "yes", False: "NO", None: "not known"}[one["equal"]]
        shown = [words.NONE if value is None else words.setting(value) for value in (one["a"], one["b"])]
        table.append([one["component"], one["environment_variable"] or words.NONE, *shown, equal])
        tones.append("warn" if one["equal"] is False else "")
    blocks = [Grid(["source", "variable", "a", "b", "equal"], table, tones)] if table else []
    return Section("Randomness, read back from the built critics", blocks)
