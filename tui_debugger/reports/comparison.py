"""A comparison document as text: the answer first, then the tensors that differ, then what was not looked at."""

from __future__ import annotations

import difflib
from typing import Any

from replay_core.errors import SelectionError
from replay_core.jobs import Document
from tui_debugger import format as words
from tui_debugger.reports.columns import columns
from tui_debugger.reports.summary import summary_lines
from tui_debugger.tolerance import Tolerance

#: Rows printed of each list; what is left out is counted.
ROWS = 30

#: Worst first.
_WORST = ("NAN", "SHAPE", "DIFF", "skipped", "MISSING", "CLOSE?", "PADDING", "CLOSE", "SAME")


def comparison_report(doc: Document, *, show_all: bool = False) -> str:
    lines = [*_together(doc), headline(doc), words.counts(doc["counts"])]
    lines += [f"a  {words.safe(doc['a']['path'])}", f"b  {words.safe(doc['b']['path'])}"]
    if doc["selection"]:
        lines.append("only  " + ", ".join(f"{part} {value}" for part, value in doc["selection"].items()))
    given = Tolerance.of_document(doc)
    if not given.is_table:
        lines.append(f"judged by {words.safe(str(given))}")
    lines += [f"note: {note}" for note in doc["notes"][:5]]
    if len(doc["notes"]) > 5:
        lines.append(f"note: ... and {len(doc['notes']) - 5} more in the document (--json)")
    rows = sorted((row for row in doc["tensors"] if show_all or row["verdict"] != "SAME"), key=_badness)
    if rows:
        lines += ["", *_table(rows if show_all else rows[:ROWS])]
        if len(rows) > ROWS and not show_all:
            lines.append(f"... and {len(rows) - ROWS} more that are not SAME (--all lists every tensor)")
    if doc["summary"]:
        lines += summary_lines(doc["summary"])
    if doc["hints"]:
        lines += ["", *(f"hint: {hint}" for hint in doc["hints"])]
    lines += ["", _coverage(doc["coverage"])]
    lines += [
        f"problem: {words.safe(problem['what'])}\n  {words.safe(problem['where'])}" for problem in doc["problems"]
    ]
    for other in doc["others"]:
        lines += ["", "=" * 20, comparison_report(other, show_all=show_all)]
    return "\n".join(lines)


def _together(doc: Document) -> list[str]:
    """Of three runs, what each pair of them came to, the worst first: the first pair alone is no answer."""
    if not doc["others"]:
        return []
    every = [doc, *doc["others"]]
    every.sort(key=lambda one: _word_of(one) in words.DIVERGING, reverse=True)
    said = [f"{words.comparison_answer(one).sentence}  ({one['a']['path']} | {one['b']['path']})" for one in every]
    return [*said, ""]


def _word_of(doc: Document) -> str:
    return words.comparison_answer(doc).word


def _badness(row: dict[str, Any]) -> tuple[int, float]:
    """Sorts the worst first; within a verdict by relative L2, what is equally bad as it was computed."""
    rel = (row["metrics"] or {}).get("rel_l2")
    size = float(rel) if isinstance(rel, (int, float, str)) else 0.0
    return _WORST.index(_word(row)), -size if size == size else -float("inf")


def _word(row: dict[str, Any]) -> str:
    return str(row["verdict"]) + ("?" if row["suspect"] else "")


def headline(doc: Document) -> str:
    """The answer in a few lines: where the two first part, both values, the origin, and why."""
    if doc["first_divergence"]:
        return divergence(doc["first_divergence"])
    apart = [row["name"] for row in doc["tensors"] if row["verdict"] in words.DIVERGING]
    if apart:
        more = f" and {len(apart) - 3} more" if len(apart) > 3 else ""
        return f"DIFF  only masks differ, nothing that was computed: {', '.join(apart[:3])}{more}"
    difference = doc.get("first_difference")
    if difference and difference["verdict"] != "SAME":
        lone = doc["counts"]["MISSING"] + doc["counts"]["skipped"]
        rest = f"; {lone} not compared" if lone else ""
        beginning = f"no divergence{rest}; {difference['verdict']} first from {difference['name']}"
        return "\n".join(_first(difference, beginning))
    return words.comparison_answer(doc).sentence


def divergence(first: dict[str, Any]) -> str:
    """A first divergence in a few lines."""
    return "\n".join(_first(first, f"{first['verdict']}  first diverging tensor: {first['name']}"))


def _first(first: dict[str, Any], beginning: str) -> list[str]:
    scope = words.scope(first["a_key"] or first["b_key"])
    index = first["index"]
    place = words.place(index)
    if index.get("sample_b") is not None:
        place += f" (sample {index['sample_b']} of b)"
    lines = [beginning, f"  at      {' · '.join(part for part in (scope, place) if part)}"]
    other = words.scope(first["b_key"])
    if first["a_key"] and first["b_key"] and other != scope:
        lines.append(f"  in b    {other}")
    if first["a"] is not None or first["b"] is not None:
        raw = index["raw_a"], index["raw_b"]
        a, b = words.exact_pair(first["a"], first["b"])
        lines.append(f"  values  a{raw[0] or ''} = {a}   b{raw[1] or ''} = {b}")
    if first["origin"]:
        lines.append(f"  origin  {first['origin']}: its inputs agree, its output does not")
    lines.append(f"  why     {first['why']}")
    if first.get("note"):
        lines.append(f"  note    {first['note']}")
    return lines + _around(first)


def _around(first: dict[str, Any]) -> list[str]:
    """The values beside the element, a column per token; the element itself in brackets."""
    beside = first.get("around")
    if not beside or len(beside["positions"]) < 2:
        return []
    at = first["index"]["position"] if beside["by_token"] else (first["index"]["raw_a"] or [None])[-1]
    marked = [f"[{position}]" if position == at else str(position) for position in beside["positions"]]
    table = [["position" if beside["by_token"] else "index", *marked]]
    if beside["texts"]:
        table.append(["token", *(words.middle(repr(text or "")[1:-1], 10) for text in beside["texts"])])
    elif beside["token_ids"]:
        table.append(["token", *("" if token is None else str(token) for token in beside["token_ids"])])
    table += [[which, *(words.number(value) for value in beside[which])] for which in ("a", "b")]
    return ["  around", *(f"    {line}" for line in columns(table, right=frozenset(range(1, len(marked) + 1))))]


def explanation(doc: Document, name: str) -> str:
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


def _explained(row: dict[str, Any]) -> str:
    lines = [f"{row['verdict']}{' (suspect)' if row['suspect'] else ''}  {row['name']}", f"  at      {_at(row)}"]
    if row["a"] is not None or row["b"] is not None:
        place = words.place(row["index"])
        if row["index"]["sample_b"] is not None:
            place += f" (sample {row['index']['sample_b']} of b)"
        a, b = words.exact_pair(row["a"], row["b"])
        lines.append(f"  values  a = {a}   b = {b}   {place}".rstrip())
    lines.append(f"  why     {row['reason']}")
    for label, metrics in (("", row["metrics"]), ("  unmasked, padding included:", row["unmasked"])):
        if metrics and metrics["mismatched"]:
            named = ("mismatched", "compared", "max_abs", "max_rel", "rel_l2", "gain")
            lines.append(label + "  " + "  ".join(f"{name} {words.number(metrics[name])}" for name in named))
    if row["note"]:
        lines.append(f"  note    {row['note']}")
    return "\n".join(lines)


def _at(row: dict[str, Any]) -> str:
    key, other = row["a_key"] or row["b_key"], row["b_key"] or row["a_key"]
    role = "" if key["role"] in (None, "actor") else f"{key['role']}/"
    place = f"{words.scope(key)} {role}{key['stage']}".strip()
    same = all(key[part] == other[part] for part in ("step", "rank", "micro"))
    return place if same else f"{place} → {words.scope(other)}"


def _table(rows: list[dict[str, Any]]) -> list[str]:
    table = [["verdict", "tensor", "where", "dtype", "shape", "max abs", "rel L2", "why"]]
    for row in rows:
        metrics = row["metrics"] or {}
        table.append(
            [
                _word(row),
                words.middle(row["name"], 48),
                _at(row),
                words.pair(row["dtype"], words.short_dtype),
                words.pair(row["shape"], words.shape),
                _size(metrics, "max_abs"),
                _size(metrics, "rel_l2"),
                _why(row),
            ]
        )
    return columns(table, right=frozenset({5, 6}))


def _size(metrics: dict[str, Any], name: str) -> str:
    """A figure; none where elements differ and no finite number says by how much: NaN, texts, ids beyond 2**53."""
    if not metrics:
        return ""
    return words.NONE if metrics["mismatched"] and not metrics[name] else words.number(metrics[name])


def _why(row: dict[str, Any]) -> str:
    """The sentence, where the figures beside it do not say it."""
    if row["verdict"] == "PADDING":
        return str(row["note"] or row["reason"])
    return str(row["reason"]) if row["verdict"] in ("MISSING", "SHAPE", "skipped") else ""


def _coverage(coverage: dict[str, int]) -> str:
    parts = [
        f"compared {coverage['tensors_compared']:,} tensors, {coverage['elements_compared']:,} elements "
        f"in {coverage['records_paired']} paired micro-batches and steps"
    ]
    for label, what in (
        ("tensors_by_digest", "tensors by digest alone: whether equal, not how far apart"),
        ("records_only_in_a", "only in a"),
        ("records_only_in_b", "only in b"),
        ("samples_on_one_side", "samples on one side alone"),
        ("numbers_absent", "ranks and micro-batches asked for that neither has"),
        ("records_unreadable", "records unreadable"),
        ("tensors_skipped", "tensors skipped"),
        ("bookkeeping_fields_not_compared", "bookkeeping fields not compared"),
    ):
        if coverage.get(label):
            parts.append(f"{coverage[label]} {what}")
    return "; ".join(parts)
