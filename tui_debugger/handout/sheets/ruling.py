"""A ruling: noise or bug, which side, and the module whose work it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tui_debugger import format as words
from tui_debugger.handout.blocks import Block, Facts, Grid, Handout, Sayings, Section, Strip, StripMark, Tone

if TYPE_CHECKING:
    from replay_core.documents.ruling import RuledTensor, RulingDocument, SideRuling

TONES: dict[str, Tone] = {"BUG": "bad", "SUSPECT": "warn", "NOISE": "close"}
_ROWS = 100


def ruling_sheet(doc: RulingDocument) -> Handout:
    facts = [
        (name, str(value))
        for name, value in (
            ("side", doc["side"]), ("module", doc["module"]), ("tensor", doc["tensor"]), ("what", doc["what"]),
            ("explained by", doc["hypothesis"]),
        )
        if value
    ]  # fmt: skip
    word = doc["ruling"] or "NOT RULED"
    return Handout(word, TONES.get(word, "muted"), doc["sentence"], facts, ruling_sections(doc))


def ruling_sections(doc: RulingDocument) -> list[Section]:
    """What was given differently, the transplant, then either side."""
    sections = []
    if doc["differences"]:
        sections.append(Section("Given to the two sides differently", [Sayings(doc["differences"])]))
    graft = doc["graft"]
    if graft is not None:
        rows = [[one["tensor"], _share(one["comes"]), _share(one["goes"])] for one in graft["grafts"][:_ROWS]]
        head = ["B's output in A", "the difference comes with it", "and goes with A's in B"]
        left = len(graft["grafts"]) - len(rows)
        blocks: list[Block] = [Sayings([graft["sentence"]]), Grid(head, rows, (), frozenset({1, 2}), left)]
        sections.append(Section("Proof by transplant", blocks))
    sides = [(name, side) for name, side in (("a", doc["a"]), ("b", doc["b"])) if side is not None]
    return [*sections, *(_side(name, side) for name, side in sides)]


def _share(value: float | str | None) -> str:
    return words.NONE if value is None else value if isinstance(value, str) else f"{value:.1%}"


def _side(name: str, side: SideRuling) -> Section:
    word = side["ruling"] or "not ruled"
    title = f"Side {name}: {word}"
    facts = [("dump", side["path"]), ("computation", side["computation"])]
    if side["why_not"] is not None:
        return Section(title, [Facts([*facts, ("not ruled", side["why_not"])])], tone="muted")
    facts += [("weights", str(side["weights"])), ("computed in", str(side["dtype"]))]
    floor = side["floor"]
    if floor is not None:
        facts.append(
            (
                "log-probabilities",
                f"off by {words.number(floor['observed'])} nats, floor {words.number(floor['floor'])}: "
                f"{words.number(floor['ratio'])} times the floor, {floor['tokens']} tokens",
            )
        )
    covered = side["coverage"]
    if covered is not None:
        facts.append(
            (
                "coverage",
                f"ruled {covered['ruled']} of {covered['recorded']} recorded tensors, the work of "
                f"{covered['modules_ruled']} of {covered['modules_of_model']} modules",
            )
        )
    blocks: list[Block] = [Facts(facts)]
    marks = [
        StripMark(one["tensor"], one["ruling"], TONES.get(one["ruling"], ""), float(one["excess"]))
        for one in side["tensors"]
    ]
    if len(marks) > 1:
        first = next((place for place, one in enumerate(marks) if one.word == "BUG"), None)
        blocks.append(Strip(marks, first, "times what noise may have"))
    told = [one for one in side["tensors"] if one["ruling"] != "NOISE"]
    if told:
        blocks.append(_table(told))
    if side["hypotheses"]:
        rows = [
            [one["name"], "explains it" if one["explains"] else "does not", words.number(one["before"]),
             words.number(one["after"])]
            for one in side["hypotheses"]
        ]  # fmt: skip
        blocks.append(Grid(["changed in the model", "", "before", "after (x noise)"], rows, (), frozenset({2, 3})))
    if side["notes"]:
        blocks.append(Sayings(side["notes"]))
    return Section(title, blocks, tone=TONES.get(word, "muted"))


def _table(told: list[RuledTensor]) -> Grid:
    rows = [
        [one["ruling"], one["tensor"], one["module"], words.number(one["excess"]), words.number(one["size"]),
         one["what"] + (f"; {one['recipe']}" if one["recipe"] else "")]
        for one in told[:_ROWS]
    ]  # fmt: skip
    head = ["ruling", "tensor", "module", "x noise", "roundings", "what"]
    return Grid(head, rows, [TONES[row[0]] for row in rows], frozenset({3, 4}), len(told) - len(rows))
