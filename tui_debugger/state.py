"""What the screen shows, as data. The session changes it; panes draw it and keep nothing of their own.

No textual here: a test can build a state, and a pane is a function of it.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import Any

from replay_core.jobs import Document, Sample
from replay_core.replay.flags import ATTENTIONS, DEVICES, DTYPES, Flags
from tui_debugger import format as fmt

#: Rows a list draws at most; what is left out is counted on its border.
ROW_CAP = 200_000
SAMPLES_KEPT = 900


class Part(Enum):
    """The parts of the state a pane can depend on."""

    RUNS = auto()
    TENSORS = auto()
    INSPECT = auto()
    FLAGS = auto()
    USAGE = auto()
    ANSWER = auto()


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

    def __str__(self) -> str:
        return fmt.scope(self.params())


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One line of the tensor list."""

    name: str
    verdict: str
    entry: Mapping[str, Any]
    """The document's own entry: a comparison's `tensors` item, or a record's `fields` item."""
    is_first: bool = False

    @property
    def diverges(self) -> bool:
        return self.verdict in fmt.DIVERGING


@dataclass(frozen=True, slots=True)
class Choice:
    """A flag and the settings its key goes through."""

    name: str
    label: str
    key: str
    settings: tuple[Any, ...]


FLAGS = (
    Choice("attention", "attention", "a", ATTENTIONS),
    Choice("packing", "packing", "p", (False, True)),
    Choice("dtype", "dtype", "t", DTYPES),
    Choice("block_mask", "block mask", "b", (True, False)),
    Choice("rows_per_forward", "rows at once", "w", (None, 1)),
    Choice("device", "device", "", DEVICES),
)


def default_flags() -> dict[str, Any]:
    defaults = Flags()
    return {choice.name: getattr(defaults, choice.name) for choice in FLAGS}


def asked_flags(document: Mapping[str, Any] | None) -> dict[str, Any]:
    """The flags a run or a side of a comparison was computed with, as they were asked for; empty when unknown."""
    flags = (document or {}).get("flags") or {}
    return dict(flags.get("asked", flags))


@dataclass(slots=True)
class Cell:
    """One replay of this session, as its own document tells it."""

    label: str
    document: Document


@dataclass(slots=True)
class Busy:
    """A job that runs: what it does and how far it is."""

    what: str
    done: int = 0
    total: int | None = None
    unit: str = ""
    is_replay: bool = False

    def __str__(self) -> str:
        if self.total:
            return f"{self.what}: {self.done} of {self.total} {self.unit}".rstrip()
        return f"{self.what}: {self.unit}" if self.unit else self.what


@dataclass(slots=True)
class State:
    a_path: Path | None = None
    b_path: Path | None = None
    a: Document | None = None
    b: Document | None = None
    scope: Scope = field(default_factory=Scope)
    record: Document | None = None
    comparison: Document | None = None
    early: Document | None = None
    """The first divergence of a comparison that still runs."""
    shows_record: bool = True
    selected: int = 0
    """Index of the selected row among all rows (before the filter)."""
    inspected: Document | None = None
    filter: str = ""
    flags: dict[str, Any] = field(default_factory=default_flags)
    flags_given: frozenset[str] = frozenset()
    """Flags the caller set: opening a dump leaves these as they are."""
    model: str | None = None
    replay_dump: Path | None = None
    """The recording a replay takes its micro-batch from, when it is not A."""
    temperature: float | None = None
    seed: int | None = None
    plan: dict[str, Any] = field(default_factory=dict)
    """Of the last replay, as its document holds it."""
    cells: list[Cell] = field(default_factory=list)
    samples: deque[Sample] = field(default_factory=lambda: deque(maxlen=SAMPLES_KEPT))
    busy: Busy | None = None
    trouble: str | None = None
    """The first line of the last error, until something works again."""
    step_verdicts: dict[int | None, str] = field(default_factory=dict)
    rows: list[TensorRow] = field(default_factory=list)
    shown: list[int] = field(default_factory=list)
    """Indexes of `rows` the filter lets through."""
    filter_error: str | None = None

    def show_comparison(self, document: Document) -> None:
        """Make a comparison the thing the tensor list shows, its first divergence selected."""
        self.comparison, self.early, self.shows_record = document, None, False
        self.rows = list(comparison_rows(document))
        self.refilter()
        self.selected = next((i for i, row in enumerate(self.rows) if row.is_first), self._first_difference())

    def _first_difference(self) -> int:
        """The row to look at where nothing diverges: the first that is not bitwise the same."""
        first = (self.comparison or {}).get("first_difference") or {}
        here = (first.get("name"), first.get("a_key"))
        return next((i for i, row in enumerate(self.rows) if (row.name, row.entry.get("a_key")) == here), 0)

    def show_record(self, document: Document) -> None:
        self.record, self.shows_record = document, True
        self.rows = [
            TensorRow(str(entry["name"]), "BAD" if entry.get("problem") else "", entry)
            for entry in document.get("fields") or []
        ]
        self.refilter()
        self.selected = self.shown[0] if self.shown else 0

    def refilter(self) -> None:
        """Apply the filter: a regular expression on `VERDICT name`."""
        self.filter_error = None
        try:
            wanted = re.compile(self.filter, re.IGNORECASE)
        except re.error as error:
            self.filter_error = str(error)
            wanted = re.compile(re.escape(self.filter), re.IGNORECASE)
        hits = [i for i, row in enumerate(self.rows) if wanted.search(f"{row.verdict} {row.name}")]
        self.shown = hits[:ROW_CAP]

    @property
    def row(self) -> TensorRow | None:
        return self.rows[self.selected] if self.selected < len(self.rows) else None

    def diverging(self, after: int, direction: int) -> int | None:
        """The nearest diverging row beyond `after`, among those shown."""
        order = self.shown if direction > 0 else reversed(self.shown)
        for index in order:
            if (index - after) * direction > 0 and self.rows[index].diverges:
                return index
        return None

    def first(self) -> int | None:
        return next((i for i, row in enumerate(self.rows) if row.is_first), None)

    def answer(self) -> fmt.Answer:
        """What the top of the screen says now."""
        if self.early:
            return fmt.first_answer(self.early)
        if self.comparison and not self.busy and not self.shows_record:
            answer = fmt.comparison_answer(self.comparison)
            if len(self.step_verdicts) > 1 and answer.token != "first":
                answer.facts.append(f"{len(self.step_verdicts)} steps compared: none diverges")
            return answer
        if self.busy:
            return fmt.Answer("RUN", "muted", str(self.busy), [], ["ctrl+c cancels"])
        if self.trouble:
            return fmt.Answer("ERROR", "missing", self.trouble, [], ["the log pane (4) has all of it"])
        if self.a is None:
            where = "no dump open" if self.a_path is None else f"opening {self.a_path}"
            return fmt.Answer("RLDBG", "muted", where, [], ["rldbg DIR opens a dump, rldbg A B compares two"])
        keys, notes = "nothing compared yet: press c or r", [run_line(self.a)]
        notes.append("c compares with another dump, r replays this record (5: its flags)")
        if self.comparison:
            keys = f"{self.scope}: press r to replay it, v to go back to the comparison"
        return fmt.Answer("READY", "muted", keys, [], notes)


def comparison_rows(document: Mapping[str, Any]) -> Iterator[TensorRow]:
    """The rows of a comparison in order of computation, the first divergence marked once."""
    first = document.get("first_divergence") or {}
    marked = False
    for entry in document.get("tensors") or []:
        is_first = (
            not marked
            and entry.get("name") == first.get("name")
            and (first.get("a_key") is None or entry.get("a_key") == first.get("a_key"))
        )
        marked = marked or is_first
        yield TensorRow(str(entry["name"]), str(entry.get("verdict", "")), entry, is_first)


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def run_line(document: Mapping[str, Any]) -> str:
    """One line about an opened run."""
    records, steps = document.get("records") or [], document.get("steps") or []
    parts = [f"{document.get('dialect')} dump", plural(len(steps), "step"), plural(len(records), "record")]
    problems = document.get("problems") or []
    if problems:
        parts.append(f"{plural(len(problems), 'problem')}: {problems[0].get('what', '')}")
    notes = document.get("notes") or []
    if notes and not problems:
        parts.append(str(notes[0]))
    return " · ".join(parts)


def model_for(document: Mapping[str, Any] | None, step: int | None) -> tuple[str | None, str | None]:
    """The model to replay a step with, and what must be said when its weights are another step's."""
    models: Mapping[str, str] = (document or {}).get("models") or {}
    if not models:
        return None, None
    if str(step) in models or "*" in models:
        return "checkpoint", None
    key, model = next(iter(models.items()))
    return model, f"no weights of step {step} were recorded: those of step {key} are used"
