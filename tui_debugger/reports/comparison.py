"""A comparison document as text: the answer first, then the tensors that differ, then what was not looked at."""

from __future__ import annotations

from typing import Any

from replay_core.errors import SelectionError
from replay_core.jobs import Document
from tui_debugger import format as words
from tui_debugger.reports.columns import columns

#: Rows printed of each list; what is left out is counted.
ROWS = 30


def comparison_report(doc: Document, *, show_all: bool = False) -> str:
    lines = [headline(doc), words.counts(doc["counts"]), f"a  {doc['a']['path']}", f"b  {doc['b']['path']}"]
    lines += [f"note: {note}" for note in doc["notes"][:5]]
    rows = [row for row in doc["tensors"] if show_all or row["verdict"] != "SAME"]
    if rows:
        lines += ["", *_table(rows if show_all else rows[:ROWS])]
        if len(rows) > ROWS and not show_all:
            lines.append(f"... and {len(rows) - ROWS} more that are not SAME (--all lists every tensor)")
    coverage = doc["coverage"]
    lines += ["", _coverage(coverage)]
    lines += [f"problem: {problem['what']}\n  {problem['where']}" for problem in doc["problems"]]
    return "\n".join(lines)


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
        beginning = f"no divergence; {difference['verdict']} first from {difference['name']}"
        return "\n".join(_first(difference, beginning))
    return words.comparison_answer(doc).sentence


def divergence(first: dict[str, Any]) -> str:
    """A first divergence in a few lines."""
    return "\n".join(_first(first, f"{first['verdict']}  first diverging tensor: {first['name']}"))


def _first(first: dict[str, Any], beginning: str) -> list[str]:
    scope = words.scope(first["a_key"] or first["b_key"])
    place = words.place(first["index"])
    lines = [beginning, f"  at      {' · '.join(part for part in (scope, place) if part)}"]
    if first["a"] is not None or first["b"] is not None:
        raw = first["index"]["raw_a"], first["index"]["raw_b"]
        lines.append(
            f"  values  a{raw[0] or ''} = {words.exact(first['a'])}   b{raw[1] or ''} = {words.exact(first['b'])}"
        )
    if first["origin"]:
        lines.append(f"  origin  {first['origin']}: its inputs agree, its output does not")
    lines.append(f"  why     {first['why']}")
    return lines


def explanation(doc: Document, name: str) -> str:
    """One tensor's sentence and both values.

    Raises:
        SelectionError: the comparison has no tensor of that name.
    """
    rows = [row for row in doc["tensors"] if row["name"] == name or name in row["names"]]
    if not rows:
        known = sorted({row["name"] for row in doc["tensors"]})
        near = [other for other in known if name in other][:8]
        raise SelectionError(
            f"no tensor {name!r} was compared",
            expected=", ".join(near or known[:8]),
            found=name,
            hint="--all lists them",
        )
    return "\n\n".join(_explained(row) for row in rows)


def _explained(row: dict[str, Any]) -> str:
    lines = [f"{row['verdict']}{' (suspect)' if row['suspect'] else ''}  {row['name']}", f"  at      {_at(row)}"]
    if row.get("index") is not None:
        lines.append(
            f"  values  a = {words.exact(row['a'])}   b = {words.exact(row['b'])}   {words.place(row['index'])}"
        )
    lines.append(f"  why     {row['reason']}")
    metrics = row["metrics"]
    if metrics and metrics["mismatched"]:
        named = ("mismatched", "compared", "max_abs", "max_rel", "rel_l2", "gain")
        lines.append("  " + "  ".join(f"{label} {words.number(metrics[label])}" for label in named))
    if row["note"]:
        lines.append(f"  note    {row['note']}")
    return "\n".join(lines)


def _at(row: dict[str, Any]) -> str:
    key = row["a_key"] or row["b_key"]
    return f"{words.scope(key)} {key['stage']}".strip()


def _table(rows: list[dict[str, Any]]) -> list[str]:
    table = [["verdict", "tensor", "where", "dtype", "shape", "max abs", "rel L2", "why"]]
    for row in rows:
        metrics = row["metrics"] or {}
        table.append(
            [
                row["verdict"] + ("?" if row["suspect"] else ""),
                words.middle(row["name"], 48),
                _at(row),
                words.pair(row["dtype"], words.short_dtype),
                words.pair(row["shape"], words.shape),
                words.number(metrics.get("max_abs")) if metrics else "",
                words.number(metrics.get("rel_l2")) if metrics else "",
                row["reason"] if row["verdict"] in ("MISSING", "SHAPE", "skipped") else "",
            ]
        )
    return columns(table, right=frozenset({5, 6}))


def _coverage(coverage: dict[str, int]) -> str:
    parts = [
        f"compared {coverage['tensors_compared']:,} tensors, {coverage['elements_compared']:,} elements "
        f"in {coverage['records_paired']} paired micro-batches and steps"
    ]
    for label, what in (
        ("records_only_in_a", "only in a"),
        ("records_only_in_b", "only in b"),
        ("records_unreadable", "records unreadable"),
        ("tensors_skipped", "tensors skipped"),
        ("bookkeeping_fields_not_compared", "bookkeeping fields not compared"),
    ):
        if coverage[label]:
            parts.append(f"{coverage[label]} {what}")
    return "; ".join(parts)
