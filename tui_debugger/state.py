"""What the screen shows, as data. The session changes it; panes draw it and keep nothing of their own.

No textual here: a test can build a state, and a pane is a function of it.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import Any, Literal, TypedDict

from replay_core.documents.comparison import ComparisonDocument, FirstSaid
from replay_core.documents.difference import DifferenceDocument
from replay_core.documents.record import RecordDocument
from replay_core.documents.replay import CellEntry, ReplayDocument
from replay_core.documents.run import RunDocument
from replay_core.documents.tensor import TensorDocument
from replay_core.jobs import Document, Sample
from replay_core.replay.flags import MATRIX, Flags
from tui_debugger import format as fmt
from tui_debugger.cells import dump_beside
from tui_debugger.health import Health
from tui_debugger.live import LiveRun
from tui_debugger.parity_view import ParityView
from tui_debugger.tensor_rows import ROW_CAP, SORTS, TensorRow, comparison_rows, matching, ordered, record_rows, scopes
from tui_debugger.tolerance import Tolerance

SAMPLES_KEPT = 900
#: Dialects of runs that are lines and curves.
LOGS = frozenset({"log", "metrics", "curves"})


class Part(Enum):
    """The parts of the state a pane can depend on."""

    RUNS = auto()
    TENSORS = auto()
    INSPECT = auto()
    FLAGS = auto()
    TELEMETRY = auto()
    ANSWER = auto()
    MATRIX = auto()
    START = auto()
    PARITY = auto()


@dataclass(frozen=True, slots=True)
class Scope:
    """Which computation is looked at: None in a part means all of it."""

    step: int | None = None
    rank: int | None = None
    micro: int | None = None

    @classmethod
    def of(cls, key: Mapping[str, Any]) -> Scope:
        return cls(key.get("step"), key.get("rank"), key.get("micro"))

    def params(self) -> dict[str, int | None]:
        return {"step": self.step, "rank": self.rank, "micro": self.micro}

    def covers(self, key: Mapping[str, Any]) -> bool:
        """Whether a record of this key belongs to it."""
        return all(
            wanted is None or key.get(name) is None or key.get(name) == wanted for name, wanted in self.params().items()
        )

    def __str__(self) -> str:
        return fmt.scope(self.params())


@dataclass(slots=True)
class Matrix:
    """The cells of a matrix, while it runs and after."""

    axes: str = MATRIX
    cells: list[CellEntry] = field(default_factory=list)
    document: ReplayDocument | None = None
    """The whole replay document, once every cell has run."""
    runs: bool = False
    total: int = 0
    doing: str = ""
    is_wanted: bool = False
    """Its screen is to be opened: a saved one is what the user came for."""

    @property
    def is_one_replay(self) -> bool:
        """Whether its cells are those of one replay that was opened from a file: no axes were asked for."""
        return self.document is not None and not self.document["matrix"]

    @property
    def baseline(self) -> CellEntry | None:
        if self.document is not None:
            return self.cells[self.document["baseline"]]
        return next((cell for cell in self.cells if cell["part"] == "reference"), None)


@dataclass(frozen=True, slots=True)
class Mark:
    """A thing marked for comparison: a tensor (sides of an inspection), a record's scope, or a cell's dump."""

    kind: str
    name: str
    what: Mapping[str, Any]


@dataclass(slots=True)
class Busy:
    """A job that runs: what it does and how far it is."""

    what: str
    done: int = 0
    total: int | None = None
    unit: str = ""
    is_replay: bool = False
    began: float = 0.0
    phase_began: float = 0.0
    now: float = 0.0

    def __str__(self) -> str:
        if self.total:
            return f"{self.what}: {self.done:,} of {self.total:,} {self.unit}{self._pace()}".rstrip()
        return f"{self.what}: {self.unit}" if self.unit else self.what

    def _pace(self) -> str:
        """Rate and time left, once a phase has gone on long enough to tell."""
        spent = self.now - self.phase_began
        if not self.total or spent < 2 or not 0 < self.done < self.total:
            return ""
        rate = self.done / spent
        return f" · {fmt.number(rate, 3)}/s · {fmt.seconds((self.total - self.done) / rate)} left"


class FieldNote(TypedDict):
    """In place of an inspection: a line of the list of which there is nothing to read."""

    kind: Literal["note"]
    entry: Mapping[str, Any]


class NoDifference(TypedDict):
    """In place of how a pair's differences are spread: it is being read, or what is wrong."""

    kind: Literal["reading", "problem"]
    message: str


@dataclass(slots=True)
class State:
    a_path: Path | None = None
    b_path: Path | None = None
    more: tuple[str, ...] = ()
    """The other directories of A's run."""
    peeked: list[int] = field(default_factory=list)
    """Steps that A's file names speak of, until A is listed."""
    a: RunDocument | None = None
    b: RunDocument | None = None
    scope: Scope = field(default_factory=Scope)
    record: RecordDocument | None = None
    comparison: ComparisonDocument | None = None
    early: FirstSaid | None = None
    """The first divergence of a comparison that still runs."""
    live: bool = False
    """The rows are those of a comparison that still runs."""
    snapshot: Path | None = None
    """The file that was opened, when it is a saved document."""
    saved: Document | None = None
    """The document it held. What is computed afterwards is another."""
    shows_record: bool = True
    selected: int = 0
    """Index of the selected row among all rows (before the filter)."""
    inspected: TensorDocument | FieldNote | None = None
    here: list[int] | None = None
    """The place of the inspected tensor that was asked for."""
    closer: DifferenceDocument | NoDifference | None = None
    """How the inspected pair's differences are spread; or why they are not known yet, or cannot be."""
    strip_axis: str = "row"
    strip_cells: int = 64
    strip_at: int | None = None
    compared: dict[str, Any] | None = None
    """What the comparison on the screen was asked for; None while there is none, or it was opened from a file."""
    tolerance: Tolerance = field(default_factory=Tolerance)
    parity: ParityView = field(default_factory=ParityView)
    sheet: str = "values"
    place_asked: bool = False
    """The user asked for a place of the tensor: its values come before anything else."""
    filter: str = ""
    sort: str = SORTS[0]
    step_filter: str = ""
    marks: list[Mark] = field(default_factory=list)
    flags: dict[str, Any] = field(default_factory=lambda: Flags().to_mapping())
    flags_given: frozenset[str] = frozenset()
    """Flags the caller set: opening a dump leaves these as they are."""
    model: str | None = None
    replay_dump: Path | None = None
    """The recording a replay takes its micro-batch from, when it is not A."""
    temperature: float | None = None
    seed: int | None = None
    cells: list[CellEntry] = field(default_factory=list)
    """Of the last replay, as they end; or the two of a matrix that are compared."""
    replayed: Document | None = None
    """The whole document of the last replay."""
    matrix: Matrix = field(default_factory=Matrix)
    samples: deque[Sample] = field(default_factory=lambda: deque(maxlen=SAMPLES_KEPT))
    phases: list[tuple[str, float]] = field(default_factory=list)
    """Of the running job: what it did, and the seconds it took."""
    busy: Busy | None = None
    trouble: str | None = None
    """The first line of the last error, until something works again; and what helps."""
    trouble_help: str = ""
    step_verdicts: dict[int | None, str] = field(default_factory=dict)
    health: Health = field(default_factory=Health)
    """What the diagnosis of A says."""
    live_run: LiveRun | None = None
    """A is followed while it is written."""
    rows: list[TensorRow] = field(default_factory=list)
    shown: list[int] = field(default_factory=list)
    """Indexes of `rows` the filter lets through, in the order they are drawn."""
    filter_error: str | None = None
    several_records: bool = False
    """Whether the rows come from more than one rank or micro-batch."""
    _scopes: set[tuple[Any, Any]] = field(default_factory=set)
    """The (rank, micro) of the rows of a comparison that still runs."""

    def show_comparison(
        self, document: Document, listed: tuple[list[TensorRow], list[int], bool] | None = None
    ) -> None:
        """Make a comparison the thing the tensor list shows, its first divergence selected.

        `listed` are its rows, those to be shown, and whether they come from several records (`filtering.listed`).
        """
        self.comparison, self.early, self.shows_record, self.live = document, None, False, False
        if listed is not None:
            self.rows, self.shown, self.several_records = listed
        else:
            self.rows = list(comparison_rows(document.get("tensors") or [], document.get("first_divergence")))
            self.several_records = len(scopes(self.rows)) > 1
            self.refilter()
        self.selected = next((i for i, row in enumerate(self.rows) if row.is_first), self._first_difference())

    def begin_live(self) -> None:
        """A comparison begins: its rows are shown as they are judged."""
        self.rows, self.shown, self.live, self.shows_record = [], [], True, False
        self.selected, self.several_records, self.comparison = 0, False, None
        self._scopes.clear()

    def add_live(self, tensors: Sequence[Mapping[str, Any]]) -> None:
        """More rows of the comparison that runs. The first diverging one is selected, and stays so."""
        start = len(self.rows)
        fresh = list(comparison_rows(tensors, None))
        self.rows += fresh
        self._scopes |= scopes(fresh)
        self.several_records = len(self._scopes) > 1
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

    def show_record(self, document: Document) -> None:
        self.record, self.shows_record, self.live = document, True, False
        self.rows = list(record_rows(document.get("fields") or []))
        self.several_records = False
        self.refilter()
        self.selected = self.shown[0] if self.shown else 0

    def select_named(self, tensor: str | None) -> None:
        """Select the row of a tensor, by the file's name or what it is; where there is none, leave the selection."""
        named = (i for i, row in enumerate(self.rows) if tensor in (row.name, row.entry.get("canonical")))
        found = next(named, None) if tensor is not None else None
        if found is None:
            return
        self.selected = found
        if found not in self.shown:
            self.filter = ""
            self.refilter()

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

    def judged(self, scope: Scope, word: str) -> None:
        """Keep the verdict of a step. A rank or micro-batch of it that agrees says nothing of the whole."""
        if (scope.rank is None and scope.micro is None) or word in fmt.DIVERGING:
            self.step_verdicts[scope.step] = word

    def first(self) -> int | None:
        return next((i for i, row in enumerate(self.rows) if row.is_first), None)

    def select(self, name: str, key: Mapping[str, Any]) -> None:
        """Select the row of a tensor, where the list has it."""
        wanted = (i for i, row in enumerate(self.rows) if row.name == name and row.entry.get("a_key") in (None, key))
        self.selected = next(wanted, self.selected)

    def toggle_mark(self, mark: Mark) -> None:
        """Mark it, or take its mark away; two things of one kind are marked at most, the older goes."""
        if mark in self.marks:
            self.marks.remove(mark)
            return
        self.marks = [*(other for other in self.marks if other.kind == mark.kind), mark][-2:]

    def is_marked(self, kind: str, name: str) -> bool:
        return any(mark.kind == kind and mark.name == name for mark in self.marks)

    @property
    def cell(self) -> CellEntry | None:
        """The cell of a replay whose comparison with its baseline is on the screen."""
        shown = self.compared or {}
        for cells in (self.cells, self.matrix.cells):
            baseline = next((cell for cell in cells if cell["part"] == "reference"), None)
            for cell in cells:
                if cell["dump"] != shown.get("b") or baseline is None:
                    continue
                if dump_beside(baseline, cell) == shown.get("a", ""):
                    return cell
        return None

    @property
    def is_log(self) -> bool:
        """Whether what is open is lines and curves alone: nothing to compare or to replay, but trends."""
        dialects = set(self.a["dialect"].split(" + ")) if self.a else set()
        # What a GRPO trainer captured is tensors, but lies beside its log.
        return bool(dialects & LOGS) and dialects <= LOGS | {"grpo_notes"}

    def findings(self) -> list[dict[str, Any]]:
        """What is wrong with what was read and compared: severity, claim, where."""
        found = []
        for document in (self.a, self.b, self.comparison):
            for problem in document["problems"] if document else ():
                one = {"severity": "warning", "claim": problem["what"], "where": problem["where"]}
                if one not in found:
                    found.append(one)
        return found
