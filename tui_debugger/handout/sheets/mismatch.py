"""A mismatch: which setting closes the gap between engine and trainer, what is left, and which tokens are no one's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tui_debugger import format as words
from tui_debugger.handout.blocks import Block, Facts, Grid, Handout, Sayings, Section, Strip, StripMark, Tone

if TYPE_CHECKING:
    from replay_core.documents.mismatch import GapCause, GapEntry, MismatchDocument, SequenceEntry

_WORDS: dict[bool | None, tuple[str, Tone]] = {
    True: ("AGREES", "same"), False: ("MISMATCH", "bad"), None: ("NOT ANSWERED", "warn"),
}  # fmt: skip
_ROWS = 60


def mismatch_sheet(doc: MismatchDocument) -> Handout:
    word, tone = _WORDS[doc["agrees"]]
    facts = [("run", doc["path"]), ("step", words.NONE if doc["step"] is None else str(doc["step"]))]
    if doc["gap"] is not None:
        facts += [("rollout", doc["rollout"]), ("trainer", doc["trainer"]), ("gap", _gap(doc["gap"]))]
        facts.append(("correlation", words.number(doc["correlation"])))
    if doc["model"] is not None:
        facts.append(("model", f"{doc['model']}, replayed on {doc['tried_on']} of {doc['samples']} samples"))
    facts += [("lacks", one) for one in doc["lacks"]]
    sections = []
    if doc["tokens"]:
        rows = [
            ["wrong" if one["is_fault"] else "note", one["what"], str(one["samples"]),
             _place(one["sample"], one["position"]), " against ".join(one["texts"] or [])]
            for one in doc["tokens"][:_ROWS]
        ]  # fmt: skip
        tones: list[Tone] = ["bad" if one["is_fault"] else "" for one in doc["tokens"][:_ROWS]]
        grid = Grid(
            ["", "what", "samples", "first at", "text"], rows, tones, frozenset({2}), len(doc["tokens"][_ROWS:])
        )
        sections.append(Section("The tokens themselves", [grid]))
    sections += _causes(doc["causes"])
    floor = doc["floor"]
    if floor is not None:
        left = [("floor", f"{words.number(floor['floor'])} nats of rounding ({floor['dtype']}, {floor['runs']} runs)")]
        left += [
            ("observed", f"{words.number(floor['observed'])} nats"),
            ("left", f"{words.number(floor['left'])} nats"),
        ]
        left.append(("left / floor", words.number(floor["ratio"])))
        sections.append(Section("What is left, against the noise of this model on these tokens", [Facts(left)]))
    routing = doc["routing"]
    if routing is not None:
        said = f"{words.number(routing['observed'])} of {routing['tokens']} choices of experts are not this model's; "
        sections.append(Section("Routing", [Sayings([f"{said}rounding makes {words.number(routing['expected'])}"])]))
    sections += _sequences(doc["sequences"])
    if doc["next"]:
        sections.append(Section("Next", [Sayings(doc["next"])]))
    if doc["notes"]:
        sections.append(Section("Notes", [Sayings(doc["notes"])]))
    return Handout(word, tone, doc["headline"], facts, sections)


def _gap(gap: GapEntry) -> str:
    figures = (("mean |d|", gap["mean"]), ("p99", gap["p99"]), ("max", gap["max"]), ("k3", gap["k3"]),
               ("e^|d|", gap["multiplier"]))  # fmt: skip
    told = ", ".join(f"{name} {words.number(value, 3)}" for name, value in figures)
    return f"d = trainer - rollout in nats: {told}, {gap['tokens']} tokens"


def _place(sample: int | None, position: int | None) -> str:
    return words.place({"sample": sample, "position": position})


def _share(value: float | str | None) -> str:
    if value is None or isinstance(value, str):
        return value or words.NONE
    return "more left" if value < 0 else f"{value:.0%}"


def _causes(causes: list[GapCause]) -> list[Section]:
    tried = [one for one in causes if one["left"] is not None or one["named"]]
    untried = [f"{one['name']}: {one['why_not']}" for one in causes if one["why_not"]]
    if not tried and not untried:
        return []
    rows = []
    for one in tried[:_ROWS]:
        left = one["left"]
        figures = [words.NONE] * 3 if left is None else [words.number(left[name], 3) for name in ("mean", "max", "k3")]
        shares = [_share(one["share"]), _share(one["tokens_explained"])]
        rows.append(["named" if one["named"] else "", one["name"], one["side"], *shares, *figures, one["told_by"]])
    tones: list[Tone] = ["bad" if one["named"] else "" for one in tried[:_ROWS]]
    head = ["", "cause", "side", "explains", "of tokens", "mean |d| left", "max left", "k3 left", "told by"]
    blocks: list[Block] = [Grid(head, rows, tones, frozenset({3, 4, 5, 6, 7}), len(tried[_ROWS:]))] if rows else []
    sections = [Section("What is left of the gap, were this the cause", blocks)] if blocks else []
    return sections + ([Section("What could not be tried", [Sayings(untried)], folded=True)] if untried else [])


def _sequences(listed: list[SequenceEntry]) -> list[Section]:
    if not listed:
        return []
    rows, tones = [], list[Tone]()
    for one in listed[:_ROWS]:
        spans = "; ".join(f"tokens {span['begin']} to {span['end'] - 1}: {span['weights']}" for span in one["versions"])
        rows.append([str(one["sample"]), str(one["tokens"]), words.number(one["mean"], 3), _share(one["share"]), spans])
        tones.append("warn" if one["is_outlier"] else "")
    marks = [
        StripMark(f"sample {one['sample']}", "outlier" if one["is_outlier"] else "in line",
                  "warn" if one["is_outlier"] else "close", float(one["mean"]))
        for one in sorted(listed, key=lambda one: one["sample"])[:400]
    ]  # fmt: skip
    grid = Grid(["sample", "tokens", "mean |d|", "share of the gap", "weights by token"], rows, tones,
                frozenset({0, 1, 2, 3}), len(listed[_ROWS:]))  # fmt: skip
    left = len(listed) - len(marks)
    strip = [Strip(marks, None, "mean |d| of a sequence, nats", left)] if len(marks) > 1 else []
    return [Section("Sequences, furthest off first", [*strip, grid])]
