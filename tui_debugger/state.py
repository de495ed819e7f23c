"""What the screen shows, as data. The session changes it; panes draw it and keep nothing of their own.

No textual here: a test can build a state, and a pane is a function of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict

from msgspec import Struct, field

from replay_core.jobs import Sample
from replay_core.replay.axes import Axes
from replay_core.replay.flags import MATRIX, Flags
from tui_debugger import format as fmt
from tui_debugger.busy import Busy
from tui_debugger.cells import dump_beside
from tui_debugger.health import Health
from tui_debugger.live import LiveRun
from tui_debugger.parity_view import ParityView
from tui_debugger.steps_compared import StepsCompared
from tui_debugger.tensor_list import TensorList
from tui_debugger.tolerance import Tolerance

if TYPE_CHECKING:
    from replay_core.documents.comparison import ComparisonDocument
    from replay_core.documents.difference import DifferenceDocument
    from replay_core.documents.kinds import Document
    from replay_core.documents.replay import CellEntry, ReplayDocument
    from replay_core.documents.ruling import RulingDocument
    from replay_core.documents.run import RunDocument
    from replay_core.documents.tensor import TensorDocument

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


class Scope(NamedTuple):
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


class Matrix(Struct, eq=False):
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
    at: int = 0
    """The line under its cursor."""

    @property
    def is_one_replay(self) -> bool:
        """Whether its cells are those of one replay that was opened from a file: no axes were asked for."""
        return self.document is not None and not self.document["matrix"]

    @property
    def asked(self) -> list[CellEntry]:
        """Those of the axes: not each row alone, not the recording."""
        return [cell for cell in self.cells if cell["part"] == "cell"]

    @property
    def first_number(self) -> int:
        """The number of the first of `cells`: the recording is 0, and joins them when all have run."""
        return 0 if self.document is not None else 1

    def to_run(self, base: Flags) -> list[dict[str, Any] | None]:
        """The settings of the cells that have not run yet, in the order in which they will (`base`: of the pane); None
        for each row alone, which all of them are held to."""
        if self.document is not None:
            return []
        return [None, *(flags.to_mapping() for flags in Axes.parse(self.axes).cells(base))][len(self.cells) :]

    @property
    def baseline(self) -> CellEntry | None:
        if self.document is not None:
            return self.cells[self.document["baseline"]]
        return next((cell for cell in self.cells if cell["part"] == "reference"), None)


class Mark(NamedTuple):
    """A thing marked for comparison: a tensor (sides of an inspection), a record's scope, or a cell's dump."""

    kind: str
    name: str
    what: Mapping[str, Any]


class FieldNote(TypedDict):
    """In place of an inspection: a line of the list of which there is nothing to read."""

    kind: Literal["note"]
    entry: Mapping[str, Any]


class NoDifference(TypedDict):
    """In place of how a pair's differences are spread: it is being read, or what is wrong."""

    kind: Literal["reading", "problem"]
    message: str


class Opened(Struct, eq=False):
    """The runs that are open: A, B beside it, and what is known of A's steps."""

    a_path: Path | None = None
    b_path: Path | None = None
    more: tuple[str, ...] = ()
    """The other directories of A's run."""
    peeked: list[int] = field(default_factory=list)
    """Steps that A's file names speak of, until A is listed."""
    a: RunDocument | None = None
    b: RunDocument | None = None
    snapshot: Path | None = None
    """The file that was opened, when it is a saved document."""
    saved: Document | None = None
    """The document it held. What is computed afterwards is another."""
    scope: Scope = field(default_factory=Scope)
    step_filter: str = ""
    steps: StepsCompared = field(default_factory=StepsCompared)
    """What the comparison with B, or a replay, comes to at every step."""
    health: Health = field(default_factory=Health)
    """What the diagnosis of A says."""
    ruled: dict[Scope, RulingDocument] = field(default_factory=dict)
    """What the referee says of A where nothing is compared with it."""
    live_run: LiveRun | None = None
    """A is followed while it is written."""

    def judged(self, scope: Scope, document: ComparisonDocument) -> None:
        """Keep what a step came to. A rank or micro-batch of it that agrees says nothing of the whole."""
        if scope.rank is None and scope.micro is None:
            self.steps.take(scope.step, document)
        elif scope.step not in self.steps.verdicts and document["first_divergence"]:
            self.steps.take(scope.step, document)
            self.steps.found[scope.step]["counts"] = None  # of a part of the step

    @property
    def is_log(self) -> bool:
        """Whether what is open is one run of lines and curves alone: nothing compared or to replay, but trends."""
        dialects = set(self.a["dialect"].split(" + ")) if self.a else set()
        # What a GRPO trainer captured is tensors, but lies beside its log.
        return self.b is None and bool(dialects & LOGS) and dialects <= LOGS | {"grpo_notes"}


class Inspection(Struct, eq=False):
    """The tensor, or pair of tensors, that is looked into."""

    document: TensorDocument | FieldNote | None = None
    sheet: str = "values"
    here: list[int] | None = None
    """The place of the tensor that was asked for."""
    place_asked: bool = False
    """The user asked for a place of the tensor: its values come before anything else."""
    closer: DifferenceDocument | NoDifference | None = None
    """How the pair's differences are spread; or why they are not known yet, or cannot be."""
    strip_axis: str = "row"
    strip_cells: int = 64
    strip_at: int | None = None


class RunningJob(Struct, eq=False):
    """The job that runs, and what is left of the last one."""

    busy: Busy | None = None
    phases: list[tuple[str, float]] = field(default_factory=list)
    """What it did, and the seconds it took."""
    samples: deque[Sample] = field(default_factory=lambda: deque(maxlen=SAMPLES_KEPT))
    trouble: str | None = None
    """The first line of the last error, until something works again; and what helps."""
    trouble_help: str = ""
    cancelled: str = ""
    """The job that was called off last, until another begins."""


class ReplaySetup(Struct, eq=False):
    """What a replay is asked for, and what came of the last one."""

    flags: dict[str, Any] = field(default_factory=lambda: Flags().to_mapping())
    flags_given: frozenset[str] = frozenset()
    """Flags the caller set: opening a dump leaves these as they are."""
    model: str | None = None
    dump: Path | None = None
    """The recording a replay takes its micro-batch from, when it is not A."""
    temperature: float | None = None
    seed: int | None = None
    cells: list[CellEntry] = field(default_factory=list)
    """Of the last replay, as they end; or the two of a matrix that are compared."""
    document: ReplayDocument | None = None
    """The whole document of the last replay."""
    matrix: Matrix = field(default_factory=Matrix)


class State(Struct, eq=False):
    opened: Opened = field(default_factory=Opened)
    tensors: TensorList = field(default_factory=TensorList)
    inspection: Inspection = field(default_factory=Inspection)
    job: RunningJob = field(default_factory=RunningJob)
    replay: ReplaySetup = field(default_factory=ReplaySetup)
    parity: ParityView = field(default_factory=ParityView)
    compared: dict[str, Any] | None = None
    """What the comparison on the screen was asked for; None while there is none, or it was opened from a file."""
    tolerance: Tolerance = field(default_factory=Tolerance)
    marks: list[Mark] = field(default_factory=list)
    trail: str = ""
    """The screen that was left for what is looked at now: esc leads back to it."""

    def toggle_mark(self, mark: Mark) -> None:
        """Mark it, or take its mark away; two things of one kind are marked at most, the older goes."""
        if mark in self.marks:
            self.marks.remove(mark)
            return
        self.marks = [*(other for other in self.marks if other.kind == mark.kind), mark][-2:]

    def is_marked(self, kind: str, name: str) -> bool:
        return any(mark.kind == kind and mark.name == name for mark in self.marks)

    @property
    def of_two(self) -> str:
        """Whose diagnosis stands beside a comparison: of two that are open `A`'s, of a replay's the recording's. Clean
        is then no word for what was compared. Empty where nothing is."""
        if self.opened.b is not None:
            return "A"
        return "the recording" if self.tensors.comparison is not None and not self.tensors.shows_record else ""

    @property
    def cell(self) -> CellEntry | None:
        """The cell of a replay whose comparison with its baseline is on the screen."""
        shown = self.compared or {}
        for cells in (self.replay.cells, self.replay.matrix.cells):
            baseline = next((cell for cell in cells if cell["part"] == "reference"), None)
            for cell in cells:
                if cell["dump"] != shown.get("b") or baseline is None:
                    continue
                if dump_beside(baseline, cell) == shown.get("a", ""):
                    return cell
        return None

    def findings(self) -> list[dict[str, Any]]:
        """What is wrong with what was read and compared: severity, claim, where."""
        found = []
        for document in (self.opened.a, self.opened.b, self.tensors.comparison):
            for problem in document["problems"] if document else ():
                one = {"severity": "warning", "claim": problem["what"], "where": problem["where"]}
                if one not in found:
                    found.append(one)
        return found
