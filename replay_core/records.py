"""The nouns every room shares: RecordKey, TensorRef, Record, Run. No numpy at import.

A *record* is one file's worth of one key; samples are rows of its tensors. A *run* is every record
of one dump (or of several directories that belong together).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from replay_core.dtypes import ITEMSIZE
from replay_core.errors import SelectionError
from replay_core.selection import Selection as Selection

if TYPE_CHECKING:
    from replay_core.documents.parts import KeyEntry

#: The dump points a record can come from, in the order a training step passes them.
STAGES = (
    "trajectory",
    "prepared_trajectories",
    "datums",
    "old_log_probs",
    "ref_log_probs",
    "values",
    "forward_data",
    "is_loss_debug",
    "loss",
    "batch_inputs",
    "modules",
    "loss_gradient",
    "gradient",
    "param",
    "optimizer",
    "training_metrics",
    "tensors",
)

#: Who computed a record. `eval` is a rollout nobody trains on.
ROLES = ("rollout", "reward", "actor", "ref", "critic", "eval")

#: What the token axis of a tensor can be said to mean (`TensorRef.alignment`).
ALIGNMENTS = ("response", "prompt", "full", "next", "sample")

#: What a run's flag `gradients` says where each rank recorded the mean over ranks.
MEAN_OVER_RANKS = "mean over ranks"

_STAGE_ORDER = {stage: order for order, stage in enumerate(STAGES)}
_ROLE_ORDER: dict[str | None, int] = {role: order for order, role in enumerate(ROLES)}


@dataclass(slots=True, unsafe_hash=True)
class RecordKey:
    """Which computation a record holds. A part the dialect lacks is `None`.

    `epoch` and `minibatch` stand beside the key: `micro` already runs across them within
    (step, rank), so they explain a record without identifying it.
    """

    step: int | None = None
    micro: int | None = None
    rank: int | None = None
    role: str | None = "actor"
    stage: str = "tensors"
    epoch: int | None = field(default=None, compare=False)
    minibatch: int | None = field(default=None, compare=False)

    def __str__(self) -> str:
        parts = [
            f"{label} {value}"
            for label, value in (("step", self.step), ("rank", self.rank), ("micro", self.micro))
            if value is not None
        ]
        role = f"{self.role}/" if self.role not in (None, "actor") else ""
        return " ".join([*parts, f"{role}{self.stage}"])

    @property
    def order(self) -> tuple[int, int, int, int, int]:
        """Sort key: step, micro, stage as the step passes them, role, rank. None sorts first."""
        return (
            -1 if self.step is None else self.step,
            -1 if self.micro is None else self.micro,
            _STAGE_ORDER.get(self.stage, len(STAGES)),
            _ROLE_ORDER.get(self.role, len(ROLES)),
            -1 if self.rank is None else self.rank,
        )

    def to_mapping(self) -> KeyEntry:
        return {
            "step": self.step, "micro": self.micro, "rank": self.rank, "role": self.role, "stage": self.stage,
            "epoch": self.epoch, "minibatch": self.minibatch,
        }  # fmt: skip

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> RecordKey:
        """The key that `to_mapping` described; parts it lacks are None.

        Raises:
            ValueError: a part is not of its type (the mapping may come from an untrusted index).
        """
        numbers = {name: mapping.get(name) for name in ("step", "micro", "rank", "epoch", "minibatch")}
        role, stage = mapping.get("role"), mapping.get("stage", "tensors")
        if any(isinstance(value, bool) or not isinstance(value, (int, type(None))) for value in numbers.values()):
            raise ValueError(f"step, micro, rank, epoch and minibatch are numbers or null, found {numbers}")
        if not isinstance(role, (str, type(None))) or not isinstance(stage, str):
            raise ValueError(f"role and stage are texts, found {role!r} and {stage!r}")
        return cls(role=role, stage=stage, **numbers)


@dataclass(slots=True, unsafe_hash=True)
class FileBytes:
    """Where a tensor's bytes lie: `nbytes` from `offset` of the file, its first element to its last.

    `strides` are in elements; None means contiguous in C order.
    """

    path: Path
    offset: int
    nbytes: int
    strides: tuple[int, ...] | None = None
    big_endian: bool = False


@dataclass(slots=True, unsafe_hash=True)
class Inline:
    """A value that stood in the file's own structure: a number, a text, a list of numbers, or a tensor's raw bytes."""

    value: Any


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A field whose values cannot be read, and why; `stats` is what a record of level stats keeps instead of them."""

    why: str
    stats: dict[str, Any] | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Parts:
    """Tensors laid end to end along `axis`: a column of ragged samples, or the shards of one tensor.

    Every part is readable and of one dtype. Along axis 0 only their elements count, in C order; along another
    axis they are as long as each other on the rest.
    """

    parts: tuple[TensorRef, ...]
    axis: int = 0


@dataclass(frozen=True, slots=True)
class Reduced:
    """What ranks' tensors of one shape and dtype make: their "sum", "avg", "max" or "min", element by element (a
    DTensor whose placement is Partial).
    """

    parts: tuple[TensorRef, ...]
    how: str


@dataclass(frozen=True, slots=True)
class Marks:
    """Where a tensor's values are not 0: a mask whose marks the file tells apart by numbers."""

    of: TensorRef


class Stated(NamedTuple):
    """What a file says of a tensor's dimensions (`b s h[tp]`), as it stands there, and of its rank: each axis of ranks,
    where on it the rank stands, among how many.
    """

    dims: str
    axes: tuple[tuple[str, int, int], ...]


@dataclass(slots=True, unsafe_hash=True)
class TensorRef:
    """A tensor's name, dtype, shape and where its bytes lie; read by `pages.py`. Not frozen: a listing makes thousands.

    `rows` is set for a ragged list of rows stored one after the other: the length of each row
    (shape is then the shape of the concatenation).
    `canonical` is the project-wide name (`naming.py`); None until a dialect names it.
    `alignment` says what the token axis means: full | response | next | packed | prompt | sample | None.
    `sentinel` says which stored values mean "there is none": "null", "1.0", "0.0 on the prompt".
    `line` is where a text file says it, counted from 1; None in every other container.
    `copies` are what other ranks hold of it, where the file says that all hold the same.
    `stated` is what the file says of its dimensions and of where its rank stands.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    source: FileBytes | Inline | Parts | Reduced | Marks | Unreadable
    canonical: str | None = None
    alignment: str | None = None
    pad: str | None = None
    rows: tuple[int, ...] | None = None
    order: int | None = None
    digest: str | None = None
    sentinel: str | None = None
    line: int | None = None
    copies: tuple[TensorRef, ...] = ()
    stated: Stated | None = None

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the logical tensor (not of the storage a view may share)."""
        return self.numel * ITEMSIZE.get(self.dtype, 0)

    @property
    def is_text(self) -> bool:
        return self.dtype == "text"

    @property
    def is_readable(self) -> bool:
        return not isinstance(self.source, Unreadable)

    def with_(self, **changes: Any) -> TensorRef:
        """The same tensor with some parts said otherwise."""
        changed = TensorRef(
            self.name, self.dtype, self.shape, self.source, self.canonical, self.alignment, self.pad, self.rows,
            self.order, self.digest, self.sentinel, self.line, self.copies, self.stated,
        )  # fmt: skip
        for part, value in changes.items():
            setattr(changed, part, value)
        return changed


@dataclass(frozen=True, slots=True)
class Problem:
    """Something about a dump that a reader must know before trusting it."""

    where: str
    what: str
    #: The place in the run it is about, where that is not a file: the parts that are None are open.
    key: RecordKey | None = field(default=None, compare=False)
    #: Whether it is that what was recorded there is not there any more: whoever compares has not looked at all.
    is_lost: bool = field(default=False, compare=False)

    def is_about(self, record: Record) -> bool:
        """Whether a listing marks this record with it."""
        if f"{self.where}:".startswith(f"{record.path}:"):
            return True
        if self.key is None or self.key.stage != record.key.stage:
            return False
        mine, asked = record.key, self.key
        pairs = ((mine.step, asked.step), (mine.rank, asked.rank), (mine.micro, asked.micro), (mine.role, asked.role))
        return all(None in pair or pair[0] == pair[1] for pair in pairs)


class Fields(list[TensorRef]):
    """A file's fields, and what was found wrong while reading them. A plain list will do where nothing can be."""

    def __init__(self, fields: Iterable[TensorRef] = (), problems: Iterable[Problem] = ()) -> None:
        super().__init__(fields)
        self.problems = tuple(problems)


class Record:
    """One key of a run: where it lies, and its tensors once somebody looks.

    `names` are the field names when they are known without opening the file, else None.
    """

    def __init__(
        self,
        key: RecordKey,
        path: Path,
        load: Callable[[], Sequence[TensorRef]],
        names: tuple[str, ...] | None = None,
    ) -> None:
        self.key = key
        self.path = path
        self.names = names
        #: What reading the fields showed to be wrong; empty until somebody looks.
        self.problems: tuple[Problem, ...] = ()
        #: Whether every field is a single value, which holds no samples; None until somebody looks.
        self.is_flat: bool | None = None
        #: Whether every field is what a line of a text says; None until somebody looks.
        self.is_told: bool | None = None
        #: What an index tells of the fields, digests included, without opening the file; None where no index does.
        self.told: Callable[[], Sequence[TensorRef] | None] | None = None
        self._load = load
        self._listed = names
        self._tensors: tuple[TensorRef, ...] | None = None
        #: Makes the fields again, where they are held in little.
        self._folded: Callable[[], tuple[TensorRef, ...]] | None = None

    def __repr__(self) -> str:
        return f"Record({self.key}, {self.path.name})"

    def tensors(self) -> tuple[TensorRef, ...]:
        """The record's fields in file order. Reads headers, never tensor bytes.

        What a log of ten thousand steps is asked for lies in it: `names`, `is_flat` and `is_told` outlive `release`.

        Raises:
            DumpError: the file cannot be read, or asks to run code.
        """
        if self._tensors is None and self._folded is not None:
            self._tensors, self._folded = self._folded(), None
        if self._tensors is None:
            loaded = self._load()
            self._tensors = tuple(loaded)
            self.problems = loaded.problems if isinstance(loaded, Fields) else ()
            names = tuple([ref.name for ref in self._tensors])
            self.names = self.names if self.names == names else names
            self.is_flat = not any(map(attrgetter("shape"), self._tensors))
            self.is_told = None not in map(attrgetter("line"), self._tensors)
        return self._tensors

    @property
    def is_read(self) -> bool:
        """Whether its fields are held."""
        return self._tensors is not None

    def release(self) -> None:
        """Forget the fields but not their names: containers of text hold every value they have read."""
        self._tensors = self._folded = None

    def fold(self, fold: Callable[[Sequence[TensorRef]], Callable[[], tuple[TensorRef, ...]]]) -> None:
        """Hold the fields in little, if they are held: `tensors` makes them again, and opens no file for it."""
        if self._tensors is not None:
            self._folded = fold(self._tensors)
            self._tensors = None

    def unread(self) -> Record:
        """The same record as it was before anybody looked."""
        record = Record(self.key, self.path, self._load, self._listed)
        record.told = self.told
        return record

    def get(self, name: str) -> TensorRef | None:
        """The tensor of that name or canonical name, or None."""
        for ref in self.tensors():
            if ref.name == name:
                return ref
        for ref in self.tensors():
            if ref.canonical == name:
                return ref
        return None


def weights_noted(models: Mapping[Any, str], step: int | None) -> tuple[int | None, str] | None:
    """(step they are noted for, reference) of the weights that a step is replayed with; None where none are noted.

    Its own, else the last before it: what is noted for a step computes the next ones too until others are noted, and
    a recorder that rotates keeps just these. Else those of every step (None, "*" in a document), else the first after.
    """
    noted = {None if known in (None, "*") else int(known): reference for known, reference in models.items()}
    numbers = sorted(known for known in noted if known is not None)
    before = [known for known in numbers if step is not None and known <= step]
    if before:
        return before[-1], noted[before[-1]]
    if None in noted:
        return None, noted[None]
    return (numbers[0], noted[numbers[0]]) if numbers else None


@dataclass(slots=True)
class Run:
    """Every record of one dump, sorted by key, with what is wrong and what was inferred."""

    path: Path
    dialect: str
    records: list[Record]
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    #: Flags the records were computed with, where the dump says so (a replay's own settings).
    flags: dict[str, Any] | None = None
    #: Step -> directory of the weights that computed it, where the dump says so.
    models: dict[int | None, str] = field(default_factory=dict)
    #: What the trainer noted of the run: its configuration, seeds, tokenizer.
    facts: dict[str, Any] = field(default_factory=dict)
    #: The folders that are runs of their own, where the path is a folder of runs that repeat each other's steps.
    inside: list[Path] = field(default_factory=list)
    #: Further files that the records are read from, which are no record's own path.
    beside: list[Path] = field(default_factory=list)

    def steps(self) -> list[int | None]:
        return sorted({record.key.step for record in self.records}, key=lambda s: (s is not None, s or 0))

    def lost(self, **asked: Selection | str | None) -> list[Problem]:
        """What was recorded and is not there any more: all of it, or what of it is asked for, as `select` has it."""

        def is_asked(key: RecordKey, part: str, wanted: Selection | str | None) -> bool:
            own = getattr(key, part)
            if wanted is None or (own is None and part != "step"):
                return True
            return bool(own == wanted) if isinstance(wanted, str) else wanted.has(own)

        return [
            one for one in self.problems
            if one.is_lost and (one.key is None or all(is_asked(one.key, *part) for part in asked.items()))
        ]  # fmt: skip

    def select(
        self,
        step: Selection | None = None,
        rank: Selection | None = None,
        micro: Selection | None = None,
        stage: str | None = None,
        role: str | None = None,
    ) -> list[Record]:
        """The records that match; a part a record lacks (None) matches every selection but step's.

        Raises:
            SelectionError: nothing matches, or a number asked for is nowhere; names what exists.
        """
        chosen = [
            record
            for record in self.records
            if (step is None or step.has(record.key.step))
            and (stage is None or record.key.stage == stage)
            and (role is None or record.key.role == role)
        ]
        asked_step, asked_parts = step, {"rank": rank, "micro": micro}
        is_whole = step is None or step.is_met(record.key.step for record in self.records)
        for part, wanted in (("rank", rank), ("micro", micro)):
            if wanted is not None:
                numbers = {getattr(record.key, part) for record in chosen}
                is_whole &= wanted.is_met(numbers)
                if numbers - {None}:
                    asked_parts[part] = wanted.missing(numbers)
                chosen = [one for one in chosen if (number := getattr(one.key, part)) is None or wanted.has(number)]
        if chosen and is_whole:
            return chosen
        if asked_step is not None:
            asked_step = asked_step.missing(record.key.step for record in self.records)
        asked = [
            f"{label} {value}"
            for label, value in (("step", asked_step), *asked_parts.items(), ("stage", stage), ("role", role))
            if value is not None
        ]
        raise SelectionError(
            f"no record of {' '.join(asked)}",
            file=str(self.path),
            expected="one of " + self._grid(),
            found=" ".join(asked),
            hint=f"rldbg ls {self.path}",
        )

    def _grid(self) -> str:
        keys = [record.key for record in self.records]
        return (
            f"step {spans(k.step for k in keys)}; rank {spans(k.rank for k in keys)}; "
            f"micro {spans(k.micro for k in keys)}; stage {', '.join(sorted({k.stage for k in keys}))}"
        )


def spans(numbers: Iterable[int | None]) -> str:
    """`0..3, 6` of [0, 1, 2, 3, 6]; "none" where there is no number."""
    parts: list[str] = []
    last: int | None = None
    for number in sorted({number for number in numbers if number is not None}):
        if last is not None and number == last + 1:
            parts[-1] = f"{parts[-1].partition('..')[0]}..{number}"
        else:
            parts.append(str(number))
        last = number
    return ", ".join(parts) or "none"
