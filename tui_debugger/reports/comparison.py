"""A comparison document as text: the answer first, then the tensors that differ, then what was not looked at."""

from __future__ import annotations

import difflib
import heapq
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from replay_core.errors import SelectionError
from tui_debugger import format as words
from tui_debugger.reports.columns import columns, width_of
from tui_debugger.reports.summary import summary_lines
from tui_debugger.reports.tensor_table import held_at, tensor_table, word
from tui_debugger.steps_compared import NOT_COMPARED, StepsCompared
from tui_debugger.tolerance import Tolerance

if TYPE_CHECKING:
    from replay_core.documents.comparison import (
        AroundEntry,
        ComparisonDocument,
        CoverageEntry,
        DivergenceEntry,
        ElementEntry,
        PairEntry,
        ParallelFault,
    )

#: Rows printed of each list; what is left out is counted.
ROWS = 30

#: Faults between ranks that are printed.
FAULTS = 5

#: Worst first.
_WORST = ("NAN", "SHAPE", "DIFF", "skipped", "MISSING", "CLOSE?", "PADDING?", "PADDING", "CLOSE", "SAME")


def _ruled(doc: ComparisonDocument) -> list[str]:
    """The ruling before anything the table says: verdicts are distances."""
    ruling = doc["ruling"]
    if ruling is None:
        return []
    counts = doc["counts"]
    differ = counts["CLOSE"] + counts["DIFF"] + counts["NAN"] + counts["PADDING"]
    said = f"{ruling['ruling'] or 'not ruled'}  {differ} tensors differ; {ruling['sentence']}"
    return [words.safe(said), *(words.safe(f"differs: {one}") for one in ruling["differences"]), ""]


def comparison_report(doc: ComparisonDocument, *, show_all: bool = False, width: int | None = None) -> str:
    """`width`: cells of the terminal that tables are to fit; None where none reads it."""
    lines = [*_together(doc), *_ruled(doc), headline(doc, width), *parallel_lines(doc), words.counts(doc["counts"])]
    lines += [f"a  {words.safe(doc['a']['path'])}", f"b  {words.safe(doc['b']['path'])}"]
    if doc["selection"]:
        lines.append("only  " + ", ".join(f"{part} {value}" for part, value in doc["selection"].items()))
    lines += _steps(StepsCompared.of_document(doc))
    given = Tolerance.of_document(doc)
    if not given.is_table:
        lines.append(f"judged by {words.safe(str(given))}")
    lines += [f"note: {note}" for note in doc["notes"][:5]]
    if len(doc["notes"]) > 5:
        lines.append(f"note: ... and {len(doc['notes']) - 5} more in the document (--json)")
    if show_all:
        rows, more = sorted(doc["tensors"], key=_badness), 0
    else:
        rows = heapq.nsmallest(ROWS, (row for row in doc["tensors"] if row["verdict"] != "SAME"), key=_badness)
        more = doc["counts"]["total"] - doc["counts"]["SAME"] - len(rows)
    if rows:
        lines += ["", *tensor_table(rows, width)]
    if more:
        lines.append(f"... and {more} more that are not SAME (--all lists every tensor)")
    if doc["summary"]:
        lines += summary_lines(doc["summary"])
    if doc["hints"]:
        lines += ["", *(f"hint: {hint}" for hint in doc["hints"])]
    lines += ["", coverage_line(doc["coverage"])]
    lines += [
        f"problem: {words.safe(problem['what'])}\n  {words.safe(problem['where'])}" for problem in doc["problems"]
    ]
    for other in doc["others"]:
        lines += ["", "=" * 20, comparison_report(other, show_all=show_all, width=width)]
    return "\n".join(lines)


def parallel_lines(doc: ComparisonDocument) -> list[str]:
    """What went wrong between ranks, each with its ranks, and which ranks part first."""
    block = doc.get("parallel")
    if block is None:
        return []
    faults = block["faults"]
    said = [f"  ranks   {words.safe(one['sentence'])}{_seen_in(one)}" for one in faults[:FAULTS]]
    if len(faults) > FAULTS:
        said.append(f"  ranks   ... and {len(faults) - FAULTS} more in the document (--json)")
    return said + ([f"  ranks   {words.safe(block['sentence'])}"] if block["sentence"] else [])


def _seen_in(fault: ParallelFault) -> str:
    return f" (and {fault['tensors'] - 1} tensors more)" if fault["tensors"] > 1 else ""


def _steps(steps: StepsCompared) -> list[str]:
    """Of a comparison made step by step: how far it came, and what each of the first steps came to."""
    entries = steps.entries()
    said = [f"{one['step']} {one['verdict'] or one['why'] or NOT_COMPARED}" for one in entries[:ROWS]]
    more = f", and {len(entries) - ROWS} more" if len(entries) > ROWS else ""
    return [f"steps {steps.progress()}: {', '.join(said)}{more}"] if steps.progress() else []


def _together(doc: ComparisonDocument) -> list[str]:
    """Of three runs, what each pair of them came to, the worst first: the first pair alone is no answer."""
    if not doc["others"]:
        return []
    every = [doc, *doc["others"]]
    every.sort(key=lambda one: _word_of(one) in words.DIVERGING, reverse=True)
    said = [f"{words.comparison_answer(one).sentence}  ({one['a']['path']} | {one['b']['path']})" for one in every]
    return [*said, ""]


def _word_of(doc: ComparisonDocument) -> str:
    return words.comparison_answer(doc).word


def _badness(row: PairEntry) -> tuple[int, float]:
    """Sorts the worst first; within a verdict by relative L2, what is equally bad as it was computed."""
    size = float(row["metrics"]["rel_l2"]) if row["metrics"] else 0.0
    return _WORST.index(word(row)), -size if size == size else -float("inf")


def headline(doc: ComparisonDocument, width: int | None = None) -> str:
    """The answer in a few lines: where the two first part, both values, the origin, and why."""
    if doc["first_divergence"]:
        return divergence(doc["first_divergence"], width)
    if any(row["verdict"] in words.DIVERGING for row in doc["tensors"]):
        return words.comparison_answer(doc).sentence
    difference = doc["first_difference"]
    if difference and difference["verdict"] != "SAME":
        lone = doc["counts"]["MISSING"] + doc["counts"]["skipped"]
        rest = f"; {lone} not compared" if lone else ""
        beginning = f"no divergence{rest}; {difference['verdict']} first from {difference['name']}"
        return "\n".join(_first(difference, beginning, width))
    return words.comparison_answer(doc).sentence


def divergence(first: DivergenceEntry, width: int | None = None) -> str:
    """A first divergence in a few lines."""
    return "\n".join(_first(first, f"{first['verdict']}  first diverging tensor: {first['name']}", width))


def _first(first: DivergenceEntry, beginning: str, width: int | None) -> list[str]:
    scope = words.scope(first["a_key"] or first["b_key"])
    index = first["index"]
    place = words.place(index)
    if index["sample_b"] is not None:
        place += f" (sample {index['sample_b']} of b)"
    lines = [beginning, f"  at      {' · '.join(part for part in (scope, place) if part)}"]
    other = words.scope(first["b_key"])
    if first["a_key"] and first["b_key"] and other != scope:
        lines.append(f"  in b    {other}")
    if first["a"] is not None or first["b"] is not None:
        raw = index["raw_a"], index["raw_b"]
        a, b = words.exact_pair(first["a"], first["b"])
        lines.append(f"  values  a{raw[0] or ''} = {a}   b{raw[1] or ''} = {b}")
    if origin := words.origin(first):
        lines.append(f"  origin  {origin}")
    lines.append(f"  why     {first['why']}")
    if first["note"]:
        lines.append(f"  note    {first['note']}")
    return lines + _around(first, width)


def _around(first: DivergenceEntry, width: int | None) -> list[str]:
    """The values beside the element, a column per token, itself in brackets; the furthest give way to the width."""
    beside = first["around"]
    if not beside or len(beside["positions"]) < 2:
        return []
    at = first["index"]["position"] if beside["by_token"] else (first["index"]["raw_a"] or [0])[-1]
    positions = beside["positions"]
    nearest = sorted(
        range(len(positions)), key=lambda place: abs(positions[place] - (positions[0] if at is None else at))
    )
    for shown in range(len(positions), 1, -1):
        lines = _beside(beside, sorted(nearest[:shown]), at)
        if width is None or max(map(width_of, lines)) <= width:
            break
    return ["  around", *lines]


def _beside(beside: AroundEntry, places: list[int], at: int | None) -> list[str]:
    def some(values: list[Any]) -> list[Any]:
        return [values[place] for place in places]

    marked = [f"[{position}]" if position == at else str(position) for position in some(beside["positions"])]
    table = [["position" if beside["by_token"] else "index", *marked]]
    if beside["texts"]:
        table.append(["token", *(words.middle(repr(text or "")[1:-1], 10) for text in some(beside["texts"]))])
    elif beside["token_ids"]:
        table.append(["token", *("" if token is None else str(token) for token in some(beside["token_ids"]))])
    for which, values in (("a", beside["a"]), ("b", beside["b"])):
        table.append([which, *(words.counted(value) for value in some(values))])
    return [f"    {line}" for line in columns(table, right=frozenset(range(1, len(marked) + 1)))]


def explanation(doc: ComparisonDocument, name: str) -> str:
    """One tensor's sentence and both values.

    Raises:
        SelectionError: the comparison has no tensor of that name.
    """
    rows = [row for row in doc["tensors"] if row["name"] == name or name in row["names"]]
    if not rows:
        known = sorted({str(word) for row in doc["tensors"] for word in (row["name"], *row["names"]) if word})
        raise SelectionError(
            f"no tensor {name!r} was compared",
            expected=", ".join(_near(name, known)),
            found=name,
            hint="--all lists them",
        )
    said = [_explained(row) for row in sorted(rows, key=_badness)[:ROWS]]
    if len(rows) > ROWS:
        said.append(f"... and {len(rows) - ROWS} more of this name, no worse than these (--json has them all)")
    return "\n\n".join(said)


def _near(name: str, known: list[str]) -> list[str]:
    """The names a person may have meant: those that hold what was typed, then those spelt like it."""
    holding = [other for other in known if name.lower() in other.lower()] if name else []
    return (holding or difflib.get_close_matches(name, known, 8, 0.5) or known)[:8]


def _explained(row: PairEntry) -> str:
    lines = [f"{row['verdict']}{' (suspect)' if row['suspect'] else ''}  {row['name']}", f"  at      {held_at(row)}"]
    if row["a"] is not None or row["b"] is not None:
        told = words.shown_as(row) if row.get("greatest") or row["verdict"] in words.DIVERGING else ""
        lines.append(f"  values  {_values(row, told)}")
    if other := row.get("greatest"):
        lines.append(f"          {_values(other, 'greatest')}")
    lines.append(f"  why     {row['reason']}")
    if asked := row.get("rules"):
        rule = row.get("rule")
        decided = rule and rule["id"]
        table = [
            [f"  {'asked' if not number else ''}", one["id"], words.number(one["value"]), "up to",
             "off" if one["limit"] is None else words.number(one["limit"]), "decided" * (one["id"] == decided)]
            for number, one in enumerate(asked)
        ]  # fmt: skip
        lines += columns(table)
    for label, metrics in (("", row["metrics"]), ("  unmasked, padding included:", row["unmasked"])):
        if metrics and metrics["mismatched"]:
            figures: Mapping[str, object] = metrics
            named = ("mismatched", "compared", "max_abs", "max_rel", "rel_l2", "gain")
            lines.append(label + "  " + "  ".join(f"{name} {words.number(figures[name])}" for name in named))
    if row["note"]:
        lines.append(f"  note    {row['note']}")
    return "\n".join(lines)


def _values(element: ElementEntry | PairEntry, told: str) -> str:
    """Both values, where they stand, and what the place is."""
    place = words.place(element["index"])
    if element["index"]["sample_b"] is not None:
        place += f" (sample {element['index']['sample_b']} of b)"
    a, b = words.exact_pair(element["a"], element["b"])
    return f"a = {a}   b = {b}   {place}{f' ({told})' if told and place else ''}".rstrip()


def coverage_line(coverage: CoverageEntry) -> str:
    parts = [
        f"compared {coverage['tensors_compared']:,} tensors, {coverage['elements_compared']:,} elements "
        f"in {coverage['records_paired']} paired micro-batches and steps"
    ]
    rest = (
        (coverage["tensors_by_digest"], "tensors by digest alone: whether equal, not how far apart"),
        (coverage["records_only_in_a"], "only in a"),
        (coverage["records_only_in_b"], "only in b"),
        (coverage["samples_on_one_side"], "samples on one side alone"),
        (coverage.get("numbers_absent", 0), "ranks and micro-batches asked for that neither has"),
        (coverage["records_unreadable"], "records unreadable"),
        (coverage["tensors_skipped"], "tensors skipped"),
        (coverage["bookkeeping_fields_not_compared"], "bookkeeping fields not compared"),
    )
    return "; ".join([*parts, *(f"{count} {what}" for count, what in rest if count)])
