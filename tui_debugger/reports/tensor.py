"""A tensor document as text: what `rldbg show --tensor` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tui_debugger import format as words
from tui_debugger.reports.columns import columns
from tui_debugger.reports.record import key_words, short

if TYPE_CHECKING:
    from replay_core.documents.tensor import HistogramEntry, SliceEntry, TensorDocument

#: Cells of the longest bar of a histogram.
_BAR = 40


def tensor_report(doc: TensorDocument) -> str:
    side = doc["a"]
    lines = [f"{words.safe(side['name'])}  {side['dtype']} {words.shape(side['shape'])}  {key_words(side['key'])}"]
    said = {"alignment": side["alignment"], "pad": side["pad"], "sentinel": side["sentinel"]}
    lines += [f"{name}: {value}" for name, value in said.items() if value]
    if doc["detected"]:
        lines.append(f"{doc['detected']['why']}, against {doc['detected']['against']}")
    if side["value"] is not None:
        return "\n".join([*lines, *_texts(side["value"])])
    if side["stats"]:
        lines.append("  ".join(f"{name} {words.number(value)}" for name, value in side["stats"].items()))
    lines += _histogram(doc["histogram"])
    lines += ["", *(_part(doc["part"]) if doc["part"] else _window(doc))]
    text = doc["text"]
    if text:
        lines += ["", f"decoded with {text['tokenizer']}"]
        lines += [f"  {row}: {words.safe(sample)}" for row, sample in enumerate(text["samples"])]
    return "\n".join(lines)


def _texts(value: Any) -> list[str]:
    if isinstance(value, list):
        return [f"  {row}: {words.safe(short(text, 400))}" for row, text in enumerate(value)]
    return [short(value, 2000)]


def _histogram(histogram: HistogramEntry | None) -> list[str]:
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


def _window(doc: TensorDocument) -> list[str]:
    values = doc["window"]["a"] or []
    pieces = doc["text"]["pieces"] if doc["text"] else [""] * len(values)
    rows = [
        [str(index), words.exact(value), piece]
        for index, value, piece in zip(doc["window"]["index"], values, pieces, strict=True)
    ]
    return columns(rows, right=frozenset({1}))


def _part(part: SliceEntry) -> list[str]:
    """The values asked for, a line per row of the last axis."""
    width = part["shape"][-1] if part["shape"] else 1
    values = [words.exact(value) for value in part["values"]]
    rows = [values[start : start + width] for start in range(0, len(values), width)]
    rows = [row + [""] * (width - len(row)) for row in rows]
    where = f"row {part['row']}, from {part['start']}" if part["row"] is not None else f"from {part['start']}"
    more = [f"{part['left_out']:,} more values"] if part["left_out"] else []
    return [where, *columns(rows, right=frozenset(range(width))), *more]
