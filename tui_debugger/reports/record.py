"""Record and tensor documents as text: what `rldbg show` prints."""

from __future__ import annotations

from typing import Any

from replay_core.jobs import Document
from tui_debugger import format as words
from tui_debugger.reports.columns import columns


def record_report(doc: Document) -> str:
    lines = [f"{_key(doc['key'])}  {doc['path']}", ""]
    rows = [["field", "is", "dtype", "shape", "min", "max", "mean", "nan", "value"]]
    for field in doc["fields"]:
        stats = field["stats"] or {}
        is_called = field["canonical"] if field["canonical"] != field["name"] else ""
        value = field["problem"] or ("" if field["value"] is None else _short(field["value"]))
        rows.append(
            [
                field["name"],
                is_called or "",
                field["dtype"],
                words.shape(field["shape"]),
                *(words.number(stats[name]) if name in stats else "" for name in ("min", "max", "mean", "nan")),
                value,
            ]
        )
    return "\n".join(lines + columns(rows, right=frozenset({4, 5, 6, 7})))


def tensor_report(doc: Document) -> str:
    side = doc["a"]
    lines = [f"{side['name']}  {side['dtype']} {words.shape(side['shape'])}  {_key(side['key'])}"]
    if side["value"] is not None:
        return "\n".join([*lines, _short(side["value"], 2000)])
    if side["stats"]:
        lines.append("  ".join(f"{name} {words.number(value)}" for name, value in side["stats"].items()))
    window = doc["window"]
    rows = [[str(index), words.exact(value)] for index, value in zip(window["index"], window["a"], strict=True)]
    return "\n".join([*lines, "", *columns(rows, right=frozenset({1}))])


def _key(key: dict[str, Any]) -> str:
    scope = words.scope(key)
    role = f"{key['role']} " if key["role"] not in (None, "actor") else ""
    return f"{scope} {role}{key['stage']}".strip()


def _short(value: Any, limit: int = 40) -> str:
    text = words.exact(value) if isinstance(value, float) else str(value)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
