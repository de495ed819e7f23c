"""A record document as text: what `rldbg show` prints of a record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tui_debugger import format as words
from tui_debugger.reports.columns import columns

if TYPE_CHECKING:
    from replay_core.documents.parts import KeyEntry
    from replay_core.documents.record import FieldEntry, RecordDocument


def record_report(doc: RecordDocument) -> str:
    lines = [f"{key_words(doc['key'])}  {words.safe(doc['path'])}", ""]
    rows = [["field", "is", "dtype", "shape", "tokens", "min", "max", "mean", "nan", "value"]]
    for field in doc["fields"]:
        stats: Mapping[str, Any] = field["stats"] or {}
        is_called = field["canonical"] if field["canonical"] != field["name"] else ""
        value = field["problem"] or ("" if field["value"] is None else short(field["value"]))
        if not value and field["sentinel"]:
            value = f"none is {field['sentinel']}"
        rows.append(
            [
                field["name"],
                is_called or "",
                field["dtype"],
                _shape(field),
                " ".join(part for part in (field["alignment"], field["pad"] and f"pad {field['pad']}") if part),
                *(words.number(stats[name]) if name in stats else "" for name in ("min", "max", "mean")),
                words.not_finite(stats),
                value,
            ]
        )
    lines += columns(rows, right=frozenset({5, 6, 7, 8}))
    problems = [f"problem: {words.safe(one['what'])}\n  {words.safe(one['where'])}" for one in doc["problems"]]
    return "\n".join([*lines, *([""] if problems else []), *problems])


def _shape(field: FieldEntry) -> str:
    rows = field["rows"]
    if rows is None:
        return words.shape(field["shape"])
    return f"{words.shape(field['shape'])} in {len(rows)} rows"


def key_words(key: KeyEntry) -> str:
    scope = words.scope(key)
    role = f"{key['role']} " if key["role"] not in (None, "actor") else ""
    return f"{scope} {role}{key['stage']}".strip()


def short(value: Any, limit: int = 40) -> str:
    if isinstance(value, list):
        # A column may hold a hundred thousand long texts: what is cut off is not spelled out before.
        value = [one[:limit] if isinstance(one, str) else one for one in value[:limit]]
    text = words.exact(value) if isinstance(value, float) else str(value)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
