"""What NexRL's own script reports, as text: a line per field over all ranks and micro-batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tui_debugger import format as words
from tui_debugger.reports.columns import columns

if TYPE_CHECKING:
    from replay_core.documents.comparison import DatumsEntry, SummaryBlock, SummaryField, TrajectoryEntry


def summary_lines(summary: SummaryBlock) -> list[str]:
    """Trajectories, forward data, loss, importance-sampling loss and datums; nothing of what neither dump has."""
    lines: list[str] = []
    for title, rows in (
        ("trajectories", [_samples(one, f"{one['stage']} {one['name']}") for one in summary["trajectories"]]),
        ("datums", [_samples(one, f"tokens {one['tokens_a']} and {one['tokens_b']}") for one in summary["datums"]]),
    ):
        if rows:
            lines += ["", f"{title}, paired by their ids, then by their tokens", *columns([_LEFT, *rows])]
    if summary["fields"]:
        table = [["field", "count", "not close", "max |d|", "min |d|", "mean |d|", "lowest r"]]
        table += [_field(field) for field in summary["fields"]]
        lines += ["", "largest difference of each rank and micro-batch, padding included"]
        lines += columns(table, right=frozenset(range(1, 7)))
    return lines


_LEFT = ["step", "what", "verdict", "paired", "only in a", "only in b"]


def _samples(row: TrajectoryEntry | DatumsEntry, what: str) -> list[str]:
    counts = (row["paired"], row["only_in_a"], row["only_in_b"])
    return [str(row["step"]), what, row["verdict"], *("—" if count is None else str(count) for count in counts)]


def _field(field: SummaryField) -> list[str]:
    entries = field["entries"]
    known = [float(entry["pearson"]) for entry in entries if entry["pearson"] is not None]
    return [
        f"{field['section']} {field['name']}",
        str(field["count"]),
        str(sum(entry["is_close"] is False for entry in entries)),
        *(words.number(figure) for figure in (field["max"], field["min"], field["mean"])),
        words.number(min(known)) if known else "—",
    ]
