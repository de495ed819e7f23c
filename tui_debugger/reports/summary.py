"""What NexRL's own script reports, as text: a line per field over all ranks and micro-batches."""

from __future__ import annotations

from typing import Any

from tui_debugger import format as words
from tui_debugger.reports.columns import columns


def summary_lines(summary: dict[str, Any]) -> list[str]:
    """Trajectories, forward data, loss, importance-sampling loss and datums; nothing of what neither dump has."""
    lines: list[str] = []
    for title, rows in (("trajectories", summary["trajectories"]), ("datums", summary["datums"])):
        if rows:
            lines += [
                "",
                f"{title}, paired by their ids, then by their tokens",
                *columns([_LEFT, *map(_samples, rows)]),
            ]
    if summary["fields"]:
        table = [["field", "count", "not close", "max |d|", "min |d|", "mean |d|", "lowest r"]]
        table += [_field(field) for field in summary["fields"]]
        lines += ["", "largest difference of each rank and micro-batch, padding included"]
        lines += columns(table, right=frozenset(range(1, 7)))
    return lines


_LEFT = ["step", "what", "verdict", "paired", "only in a", "only in b"]


def _samples(row: dict[str, Any]) -> list[str]:
    what = f"{row['stage']} {row['name']}" if "stage" in row else f"tokens {row['tokens_a']} and {row['tokens_b']}"
    counts = ("—" if row[part] is None else str(row[part]) for part in ("paired", "only_in_a", "only_in_b"))
    return [str(row["step"]), what, row["verdict"], *counts]


def _field(field: dict[str, Any]) -> list[str]:
    entries = field["entries"]
    known = [entry["pearson"] for entry in entries if entry["pearson"] is not None]
    return [
        f"{field['section']} {field['name']}",
        str(field["count"]),
        str(sum(entry["is_close"] is False for entry in entries)),
        *(words.number(field[figure]) for figure in ("max", "min", "mean")),
        words.number(min(known)) if known else "—",
    ]
