"""The list of tensors on the screen: rows of a comparison or of a record, which of them are shown, and the selected."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field

from tui_debugger.tensor_rows import ROW_CAP, SORTS, Places, TensorRow, comparison_rows, matching, ordered, record_rows

if TYPE_CHECKING:
    from replay_core.documents.comparison import ComparisonDocument, FirstSaid
    from replay_core.documents.record import RecordDocument


class TensorList(Struct, eq=False):
    """The tensors of the comparison or the record that is looked at."""

    comparison: ComparisonDocument | None = None
    record: RecordDocument | None = None
    shows_record: bool = True
    live: bool = False
    """The rows are those of a comparison that still runs."""
    early: FirstSaid | None = None
    """The first divergence of a comparison that still runs."""
    rows: list[TensorRow] = field(default_factory=list)
    shown: list[int] = field(default_factory=list)
    """Indexes of `rows` the filter lets through, in the order they are drawn."""
    selected: int = 0
    """Index of the selected row among all rows (before the filter)."""
    filter: str = ""
    filter_error: str | None = None
    sort: str = SORTS[0]
    places: Places = field(default_factory=Places)
    """What tells the rows of a comparison apart that have one name."""

    def show_comparison(
        self, document: ComparisonDocument, listed: tuple[list[TensorRow], list[int], Places] | None = None
    ) -> None:
        """Make a comparison the thing the tensor list shows, its first divergence selected.

        `listed` are its rows, those to be shown, and what tells their records apart (`filtering.listed`).
        """
        self.comparison, self.early, self.shows_record, self.live = document, None, False, False
        if listed is not None:
            self.rows, self.shown, self.places = listed
        else:
            self.rows = list(comparison_rows(document.get("tensors") or [], document.get("first_divergence")))
            self.places = Places()
            self.places.add(self.rows)
            self.refilter()
        self.selected = next((i for i, row in enumerate(self.rows) if row.is_first), self._first_difference())

    def begin_live(self) -> None:
        """A comparison begins: its rows are shown as they are judged."""
        self.rows, self.shown, self.live, self.shows_record = [], [], True, False
        self.selected, self.places, self.comparison = 0, Places(), None

    def go_back_to(self, before: TensorList) -> None:
        """The comparison that runs came to no end: show what was there before it, as it is filtered and sorted now."""
        for name in ("comparison", "record", "shows_record", "rows", "shown", "selected", "places"):
            setattr(self, name, getattr(before, name))
        self.live, self.early = False, None
        if (self.filter, self.sort) != (before.filter, before.sort):
            self.refilter()

    def add_live(self, tensors: Sequence[Mapping[str, Any]]) -> None:
        """More rows of the comparison that runs. The first diverging one is selected, and stays so."""
        start = len(self.rows)
        fresh = list(comparison_rows(tensors, None))
        self.rows += fresh
        self.places.add(fresh)
        self.shown += matching(self.rows, self.wanted(), start, len(self.rows))
        if self.early is None or not any(row.diverges for row in fresh):
            return
        here = self.row
        if here is None or not here.diverges:
            self.selected = next(start + i for i, row in enumerate(fresh) if row.diverges)

    def _first_difference(self) -> int:
        """The row to look at where nothing diverges: the first that is not bitwise the same."""
        first = self.comparison["first_difference"] if self.comparison else None
        if not first:
            return 0
        here = (first.get("name"), first.get("a_key"))
        return next((i for i, row in enumerate(self.rows) if (row.name, row.entry.get("a_key")) == here), 0)

    def show_record(self, document: RecordDocument) -> None:
        self.record, self.shows_record, self.live = document, True, False
        self.rows = list(record_rows(document.get("fields") or []))
        self.places = Places()
        self.refilter()
        self.selected = self.shown[0] if self.shown else 0

    def select_named(self, tensor: str | None) -> bool:
        """Select the row of a tensor, by the file's name or what it is; False, and the selection left, where there is
        none."""
        named = (i for i, row in enumerate(self.rows) if tensor in (row.name, row.entry.get("canonical")))
        found = next(named, None) if tensor is not None else None
        if found is None:
            return False
        self.selected = found
        if found not in self.shown:
            self.filter = ""
            self.refilter()
        return True

    def wanted(self) -> Callable[[str], object]:
        """The filter, a regular expression on `VERDICT name`; a text where it is none."""
        self.filter_error = None
        try:
            return re.compile(self.filter, re.IGNORECASE).search
        except re.error as error:
            self.filter_error = str(error)
            return re.compile(re.escape(self.filter), re.IGNORECASE).search

    def refilter(self) -> None:
        """Apply filter and order to every row at once; of a long list `filtering.shown` does it between two keys."""
        hits = matching(self.rows, self.wanted(), 0, len(self.rows)) if self.filter else range(len(self.rows))
        self.shown = ordered(self.rows, hits, self.sort)[:ROW_CAP]

    @property
    def row(self) -> TensorRow | None:
        return self.rows[self.selected] if self.selected < len(self.rows) else None

    def row_is_shown(self) -> bool:
        """Whether the filter lets the selected row through."""
        row = self.row
        return row is not None and self.wanted()(row.said) is not None

    def diverging(self, after: int, direction: int) -> int | None:
        """The nearest diverging row beyond `after`, in the order shown."""
        order = self.shown if direction > 0 else self.shown[::-1]
        start = order.index(after) + 1 if after in order else 0
        return next((index for index in order[start:] if self.rows[index].diverges), None)

    def first(self) -> int | None:
        return next((i for i, row in enumerate(self.rows) if row.is_first), None)

    def select(self, name: str, key: Mapping[str, Any]) -> None:
        """Select the row of a tensor, where the list has it."""
        wanted = (i for i, row in enumerate(self.rows) if row.name == name and row.entry.get("a_key") in (None, key))
        self.selected = next(wanted, self.selected)
