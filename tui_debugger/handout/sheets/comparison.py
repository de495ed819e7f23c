"""A comparison: where two runs part, the layers and steps around it, every tensor in the order it was computed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from tui_debugger import format as words
from tui_debugger.handout.blocks import (
    Block,
    Facts,
    Grid,
    Handout,
    Sayings,
    Section,
    Strip,
    StripMark,
    TokenMark,
    Tokens,
    Tone,
)
from tui_debugger.handout.sheets.ruling import ruling_sections
from tui_debugger.reports.comparison import coverage_line
from tui_debugger.reports.tensor_table import HEAD, tensor_cells, word

if TYPE_CHECKING:
    from replay_core.documents.comparison import ComparisonDocument, DivergenceEntry, PairEntry

#: Rows of one table, marks of one strip; what is more is counted, and stands in the document.
ROWS, MARKS = 200, 400

TONES: dict[str, Tone] = {
    "NAN": "bad", "SHAPE": "bad", "DIFF": "bad", "MISSING": "warn", "skipped": "muted", "CLOSE?": "warn",
    "PADDING?": "warn",
    "PADDING": "muted", "CLOSE": "close", "SAME": "same",
}  # fmt: skip
#: Worst first.
_RANK = {name: rank for rank, name in enumerate(TONES)}
_ANSWER: dict[str, Tone] = {"first": "bad", "close": "close", "same": "same", "missing": "warn", "muted": "muted"}


def comparison_sheet(doc: ComparisonDocument) -> Handout:
    answer = words.comparison_answer(doc)
    first = doc["first_divergence"]
    sentence = answer.where if answer.is_claim or first is None else f"first diverging tensor: {answer.where}"
    facts = [] if first is None else first_facts(first)
    facts += [("tensors", words.counts(doc["counts"]))]
    if doc["selection"]:
        facts.append(("only", ", ".join(f"{part} {value}" for part, value in doc["selection"].items())))
    sections = [*_first_section(first), *_strips(doc)]
    if doc["ruling"] is not None:
        sections += ruling_sections(doc["ruling"])
    sections += [_tensors(doc), *settings("Settings of both sides", doc["a"]["flags"], doc["b"]["flags"])]
    said = [f"a  {doc['a']['path']}  ({doc['a']['dialect']})", f"b  {doc['b']['path']}  ({doc['b']['dialect']})"]
    said += [coverage_line(doc["coverage"]), *(f"hint: {hint}" for hint in doc["hints"])]
    said += [f"note: {note}" for note in doc["notes"]]
    said += [f"problem: {one['what']} ({one['where']})" for one in doc["problems"]]
    sections.append(Section("What was compared, and what was not", [Sayings(said)]))
    for other in doc["others"]:
        beside = comparison_sheet(other)
        title = f"{beside.word} {beside.sentence}  ({other['a']['path']} | {other['b']['path']})"
        sections.append(Section(title, [Facts(beside.facts)], tone=beside.tone))
    return Handout(answer.word, _ANSWER.get(answer.token, ""), sentence, facts, [one for one in sections if one.blocks])


def first_facts(first: DivergenceEntry) -> list[tuple[str, str]]:
    """Where, both values, from which module, and why."""
    scopes = [words.scope(first["a_key"]), words.scope(first["b_key"])]
    place = [*dict.fromkeys(scope for scope in scopes if scope), words.place(first["index"])]
    facts = [("where", " · ".join(part for part in place if part))]
    if first["a"] is not None or first["b"] is not None:
        raw = first["index"]["raw_a"], first["index"]["raw_b"]
        for side, at, value in zip("ab", raw, words.exact_pair(first["a"], first["b"]), strict=True):
            facts.append((f"value in {side}", f"{value}" + (f"  at [{', '.join(map(str, at))}]" if at else "")))
    if origin := words.origin(first):
        facts.append(("origin", origin))
    facts.append(("why", first["why"]))
    return [*facts, ("note", first["note"])] if first["note"] else facts


def _first_section(first: DivergenceEntry | None) -> list[Section]:
    """The values beside the element where the two part first: by token where the layout tells."""
    beside = first and first["around"]
    if first is None or not beside:
        return []
    at = first["index"]["position"] if beside["by_token"] else (first["index"]["raw_a"] or [0])[-1]
    texts, ids = beside["texts"], beside["token_ids"]
    gaps = [_gap(a, b) for a, b in zip(beside["a"], beside["b"], strict=True)]
    most = max((gap for gap in gaps if math.isfinite(gap)), default=0.0)
    marks, rows = [], []
    for place, position in enumerate(beside["positions"]):
        token = texts[place] if texts else None
        text = token if token is not None else str(ids[place]) if ids and ids[place] is not None else str(position)
        a, b = words.exact_pair(beside["a"][place], beside["b"][place])
        level = 1.0 if not math.isfinite(gaps[place]) else gaps[place] / most if most else 0.0
        marks.append(TokenMark(text, f"{position}: a {a}, b {b}", level, position == at))
        named = [str(position), text] if beside["by_token"] else [str(position)]
        rows.append([*named, a, b, words.number(gaps[place])])
    by_token = beside["by_token"]
    head = [*(("position", "token") if by_token else ("index",)), "a", "b", "|b - a|"]
    tones: list[Tone] = ["bad" if mark.here else "" for mark in marks]
    title = "The token and those beside it" if by_token else "The element and those beside it"
    blocks: list[Block] = [Tokens(marks, "|b - a| of this element")] if by_token else []
    return [Section(title, [*blocks, Grid(head, rows, tones, frozenset({0, *range(len(head) - 3, len(head))}))])]


def _gap(a: Any, b: Any) -> float:
    """|b - a|; infinite where they differ and no number says by how much."""
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        # Integers are subtracted as such: doubles do not tell those of 64 bits apart.
        gap = abs(float(b - a)) if isinstance(a, int) and isinstance(b, int) else abs(float(b) - float(a))
        return gap if gap == gap else math.inf
    return 0.0 if a == b else math.inf


def _strips(doc: ComparisonDocument) -> list[Section]:
    """Steps, micro-batches and layers, each as good as the worst of it; then every tensor by its distance."""
    rows = [row for row in doc["tensors"] if row["a_key"] or row["b_key"]]
    if not rows:
        return []
    first = doc["first_divergence"]
    key: Any = next(
        (row["a_key"] or row["b_key"] for row in rows if first and row["name"] == first["name"]
         and row["a_key"] == first["a_key"]), rows[0]["a_key"] or rows[0]["b_key"],
    )  # fmt: skip
    steps = _marks(rows, lambda row: f"step {_key(row)['step']}")
    if compared := doc.get("steps"):
        steps = [
            StripMark(f"step {one['step']}", one["verdict"] or "not compared", TONES.get(one["verdict"] or "", "muted"))
            for one in compared
        ]
    here = [row for row in rows if _key(row)["step"] == key["step"]]
    micros = _marks(here, lambda row: words.scope({**_key(row), "step": None}) or "all")
    inner = [row for row in here if words.scope(_key(row)) == words.scope(key)]
    layers = _marks(inner, lambda row: _layer(row["name"]))
    scope = words.scope(key)
    sections = []
    for title, marks in (
        ("Steps", steps),
        (f"Ranks and micro-batches of step {key['step']}", micros),
        (f"Layers and tensors of {scope}" if scope else "Layers and tensors", layers),
    ):
        if len(marks) > 1:
            sections.append(Section(title, [_strip(marks)]))
    each = [
        StripMark(row["name"], word(row), TONES.get(word(row), ""), _size(row))
        for row in inner
        if row["metrics"] is not None
    ]
    if len(each) > 1:
        title = "How far apart, in the order of computation"
        sections.append(Section(title, [_strip(each, "relative L2 of b - a")]))
    return sections


def _key(row: PairEntry) -> Any:
    return row["a_key"] or row["b_key"]


def _layer(name: str) -> str:
    """`layers.3` of `layers.3.mlp.output`; a tensor outside of any layer is its own."""
    parts = name.split(".")
    numbered = next((place for place, part in enumerate(parts[:-1]) if part.isdecimal()), None)
    return name if numbered is None else ".".join(parts[: numbered + 1])


def _marks(rows: Iterable[PairEntry], named: Any) -> list[StripMark]:
    """One mark per name, in order, with the worst word of its rows."""
    groups: dict[str, list[PairEntry]] = {}
    for row in rows:
        groups.setdefault(named(row), []).append(row)
    marks = []
    for name, members in groups.items():
        worst = min(map(word, members), key=lambda one: _RANK.get(one, 99))
        marks.append(StripMark(name, worst, TONES.get(worst, "")))
    return marks


def _size(row: PairEntry) -> float | None:
    metrics = row["metrics"]
    return None if metrics is None else float(metrics["rel_l2"])


def _strip(marks: list[StripMark], sizes: str = "") -> Strip:
    """At most so many marks as a page can draw: stretches of more are as good as the worst of each."""
    if len(marks) > MARKS:
        per = -(-len(marks) // MARKS)
        stretches = [marks[at : at + per] for at in range(0, len(marks), per)]
        marks = [_worst(stretch) for stretch in stretches]
    first = next((place for place, mark in enumerate(marks) if mark.tone == "bad"), None)
    return Strip(marks, first, sizes)


def _worst(stretch: list[StripMark]) -> StripMark:
    worst = min(stretch, key=lambda one: (_RANK.get(one.word, 99), -(one.size or 0.0)))
    return StripMark(f"{worst.label} (worst of {len(stretch)})", worst.word, worst.tone, worst.size)


def _tensors(doc: ComparisonDocument) -> Section:
    rows = [row for row in doc["tensors"] if row["verdict"] != "SAME"]
    shown = rows[:ROWS]
    table = Grid(
        HEAD, [tensor_cells(row) for row in shown], [TONES.get(word(row), "") for row in shown],
        frozenset({5, 6}), len(rows) - len(shown),
    )  # fmt: skip
    title = f"Tensors that are not SAME, in the order of computation ({len(rows)} of {len(doc['tensors'])})"
    return Section(title, [table] if rows else [], folded=len(rows) > 12)


def settings(title: str, a: Any, b: Any) -> list[Section]:
    """Settings of two sides beside each other: those that differ, and folded those that do not."""
    one, other = dict(_flat(a or {})), dict(_flat(b or {}))
    names = dict.fromkeys([*one, *other])
    rows = [[name, one.get(name, words.NONE), other.get(name, words.NONE)] for name in names]
    sections = []
    for said, tone, some in (
        (("differ", "differs"), "warn", [row for row in rows if row[1] != row[2]]),
        (("are alike", "is alike"), "", [row for row in rows if row[1] == row[2]]),
    ):
        if some:
            tones: list[Tone] = ["warn" if tone else ""] * len(some[:ROWS])
            table = Grid(["setting", "a", "b"], some[:ROWS], tones, left_out=len(some[ROWS:]))
            sections.append(Section(f"{title}: {len(some)} {said[len(some) == 1]}", [table], folded=not tone))
    return sections


def _flat(value: Any, before: str = "") -> Iterable[tuple[str, str]]:
    if not isinstance(value, dict) or not value:
        yield before, words.setting(value) if not isinstance(value, (list, dict)) else json.dumps(value)
        return
    for name, inner in value.items():
        yield from _flat(inner, f"{before}.{name}" if before else str(name))


def shortened(rows: Sequence[Sequence[str]], head: Sequence[str], right: frozenset[int] = frozenset()) -> Grid:
    """A table of at most ROWS rows, the rest counted."""
    return Grid(head, rows[:ROWS], (), right, max(0, len(rows) - ROWS))
