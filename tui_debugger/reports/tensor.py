"""A tensor document as text: what `rldbg show --tensor` prints."""

from __future__ import annotations

from typing import Any

from replay_core.jobs import Document
from tui_debugger import format as words
from tui_debugger.reports.columns import columns
from tui_debugger.reports.record import key_words, short

#: Cells of the longest bar of a histogram.
_BAR = 40


def tensor_report(doc: Document) -> str:
    side = doc["a"]
    lines = [f"{words.safe(side['name'])}  {side['dtype']} {words.shape(side['shape'])}  {key_words(side['key'])}"]
    lines += [f"{name}: {side[name]}" for name in ("alignment", "pad", "sentinel") if side.get(name)]
    if doc.get("detected"):
        lines.append(f"{doc['detected']['why']}, against {doc['detected']['against']}")
    if side["value"] is not None:
        return "\n".join([*lines, *_texts(side["value"])])
    if side["stats"]:
        lines.append("  ".join(f"{name} {words.number(value)}" for name, value in side["stats"].items()))
    lines += _histogram(doc.get("histogram"))
    lines += ["", *(_part(doc["part"]) if doc.get("part") else _window(doc))]
    text = doc.get("text")
    if text:
        lines += ["", f"decoded with {text['tokenizer']}"]
        lines += [f"  {row}: {words.safe(sample)}" for row, sample in enumerate(text["samples"])]
    return "\n".join(lines)


def _texts(value: Any) -> list[str]:
    if isinstance(value, list):
        return [f"  {row}: {words.safe(short(text, 400))}" for row, text in enumerate(value)]
    return [short(value, 2000)]


def _histogram(histogram: dict[str, Any] | None) -> list[str]:
    """Magnitudes by power of two, a bar each."""
    if not histogram or not histogram["bins"]:
        return []
    top = max(entry["count"] for entry in histogram["bins"])
    rows = [["|x|", "count", ""]]
    rows += [
        [f"2^{entry['exponent']}", words.number(entry["count"]), "#" * max(1, _BAR * entry["count"] // top)]
        for entry in histogram["bins"]
    ]
    return ["", *columns(rows, right=frozenset({0, 1}))]


def _window(doc: Document) -> list[str]:
    window = doc["window"]
    pieces = (doc.get("text") or {}).get("pieces") or [""] * len(window["a"])
    rows = [
        [str(index), words.exact(value), piece]
        for index, value, piece in zip(window["index"], window["a"], pieces, strict=True)
    ]
    return columns(rows, right=frozenset({1}))


def _part(part: dict[str, Any]) -> list[str]:
    """The values asked for, a line per row of the last axis."""
    width = part["shape"][-1] if part["shape"] else 1
    values = [words.exact(value) for value in part["values"]]
    rows = [values[start : start + width] for start in range(0, len(values), width)]
    rows = [row + [""] * (width - len(row)) for row in rows]
    where = f"row {part['row']}, from {part['start']}" if part["row"] is not None else f"from {part['start']}"
    more = [f"{part['left_out']:,} more values"] if part["left_out"] else []
    return [where, *columns(rows, right=frozenset(range(width))), *more]
