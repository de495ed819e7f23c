"""The table of compared tensors within the width of a terminal: what other columns say too gives way first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tui_debugger import format as words
from tui_debugger.reports.columns import columns, width_of

if TYPE_CHECKING:
    from replay_core.documents.comparison import MetricsEntry, PairEntry
    from replay_core.documents.parts import KeyEntry, Number

HEAD = ("verdict", "tensor", "where", "dtype", "shape", "max abs", "rel L2", "why")

#: A name as it stands where there is room, and the least that tells tensors apart.
_LONGEST_NAME, _SHORTEST_NAME = 48, 32
#: Fewer cells of a sentence say nothing.
_SHORTEST_WHY = 16
#: Names and places are cut to this, however narrow the terminal is.
_LEAST = 12


def tensor_table(rows: list[PairEntry], width: int | None = None) -> list[str]:
    """A line per row of the document, after one of titles; `width`: cells that there are, None for as many as it takes.

    What is cut or left out is said behind the table.
    """
    table = _Table([list(HEAD), *(tensor_cells(row) for row in rows)], width)
    if width is None or table.fits:
        return table.lines()
    before, lost = table.places(), []
    if table.shrink("why", _SHORTEST_WHY):
        lost.append("all of why")
    for name in ("why", "dtype", "shape"):
        if table.fits or table.shrink("tensor", _SHORTEST_NAME):
            break
        lost += [name] if table.drop(name) else []
    for name in ("tensor", "where"):
        table.shrink(name, _LEAST, as_far_as_it_goes=True)
    if any("…" in line[1] for line in table.rows[1:]):
        lost.append("whole names")
    after = [f"(cut to {width} columns; --explain NAME and --json have {', '.join(lost)})"] if lost else []
    return [*before, *table.lines(), *after]


class _Table:
    """Rows of cells under their titles, and the width they are to fit."""

    def __init__(self, rows: list[list[str]], width: int | None) -> None:
        self.rows, self.width = rows, width

    def lines(self) -> list[str]:
        right = frozenset(i for i, title in enumerate(self.rows[0]) if title in ("max abs", "rel L2"))
        return columns(self.rows, right=right)

    @property
    def excess(self) -> int:
        """Cells beyond the width; negative where there is room."""
        return max(map(width_of, self.lines())) - (self.width or 0)

    @property
    def fits(self) -> bool:
        return self.excess <= 0

    def places(self) -> list[str]:
        """One line for the place that all rows share, in the place of a column; else the column in short words."""
        at = HEAD.index("where")
        shared = {row[at] for row in self.rows[1:]}
        if len(shared) == 1:
            self.drop("where")
            return [f"all of {shared.pop()}:"]
        for row in self.rows[1:]:
            for long, short in (("step ", "s"), ("rank ", "r"), ("micro ", "m")):
                row[at] = row[at].replace(long, short)
        return []

    def shrink(self, name: str, least: int, *, as_far_as_it_goes: bool = False) -> bool:
        """Cut the cells of a column so that the table fits; whether it does. Left as it was where it cannot."""
        if name not in self.rows[0] or self.fits:
            return False
        at = self.rows[0].index(name)
        room = max(width_of(row[at]) for row in self.rows) - self.excess
        if room < least and not as_far_as_it_goes:
            return False
        cut = {"tensor": words.dotted, "where": words.middle, "why": words.end}[name]
        for row in self.rows[1:]:
            row[at] = cut(row[at], max(room, least))
        return self.fits

    def drop(self, name: str) -> bool:
        """Leave a column out; whether it said anything."""
        at = self.rows[0].index(name)
        said = any(row[at] for row in self.rows[1:])
        for row in self.rows:
            del row[at]
        return said


def word(row: PairEntry) -> str:
    """DIFF, or `CLOSE?` where it is only just that (`PADDING?` where it is, but for padding)."""
    return str(row["verdict"]) + ("?" if row["suspect"] else "")


def held_at(row: PairEntry) -> str:
    """Where both sides hold it: step, rank, micro-batch, role and stage."""
    key, other = row["a_key"] or row["b_key"], row["b_key"] or row["a_key"]
    assert key is not None
    assert other is not None
    role = "" if key["role"] in (None, "actor") else f"{key['role']}/"
    place = f"{words.scope(key)} {role}{key['stage']}".strip()
    same = _micro_batch(key) == _micro_batch(other)
    return place if same else f"{place} → {words.scope(other)}"


def _micro_batch(key: KeyEntry) -> tuple[int | None, ...]:
    return key["step"], key["rank"], key["micro"]


def tensor_cells(row: PairEntry) -> list[str]:
    metrics = row["metrics"]
    return [
        word(row),
        words.middle(row["name"], _LONGEST_NAME),
        held_at(row),
        words.pair(row["dtype"], words.short_dtype),
        words.pair(row["shape"], words.shape),
        "" if metrics is None else _size(metrics, metrics["max_abs"]),
        "" if metrics is None else _size(metrics, metrics["rel_l2"]),
        _why(row),
    ]


def _size(metrics: MetricsEntry, figure: Number) -> str:
    """A figure; none where elements differ and no finite number says by how much: NaN, texts, ids beyond 2**53."""
    return words.NONE if metrics["mismatched"] and not figure else words.number(figure)


def _why(row: PairEntry) -> str:
    """The sentence, where the figures beside it do not say it."""
    if row["verdict"] == "PADDING":
        return row["note"] or row["reason"]
    return row["reason"] if row["verdict"] in ("MISSING", "SHAPE", "skipped") else ""
