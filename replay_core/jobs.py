"""What crosses a process boundary: Job in, Events and one document (or error) out. No numpy at import.

The wire is JSON lines. A request is `{"id", "job", "params"}`; an answer is any number of
`{"id", "event", ...}` lines and then one `{"id", "result"}` or `{"id", "error"}`.
Every result is a document of the published schema (`documents/`), so both ends of a pipe, the
command line and the screen speak one language.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, TypedDict

if TYPE_CHECKING:
    from replay_core.documents.comparison import FirstSaid, PairEntry
    from replay_core.documents.diagnosis import SeriesEntry
    from replay_core.documents.replay import CellEntry

#: Jobs a light child answers without torch, and those that need torch.
READER_JOBS = (
    "open", "record", "inspect", "difference", "compare", "compare_step", "compare_into", "measure", "rejudge",
    "reopen", "diagnose", "explain", "follow", "recorded_parity", "samples",
)  # fmt: skip
#: Of the former, those that nobody waits for: they have a child of their own, so that looking never waits for them.
BACKGROUND_JOBS = ("compare_step", "diagnose", "explain")
REPLAYER_JOBS = (
    "replay_cell", "replay_why", "replay_own", "replay_library", "replay_slice", "replay_blame", "capsule",
    "demo_train", "replay", "critic", "parity", "referee", "mismatch",
)  # fmt: skip


# Named tuples: a dataclass of a few fields is made in .7 ms, and every command waits for these.


class Job(NamedTuple):
    """One piece of work: its kind (a name of READER_JOBS or REPLAYER_JOBS) and JSON-able parameters."""

    kind: str
    params: Mapping[str, Any] = {}


def is_coordinating(job: Job) -> bool:
    """Whether a replayer hands the work to children of its own: a fresh one for every cell of a matrix or critic.

    `is_apart` asks for that where one setting is replayed: one of its cells takes its process along.
    """
    is_of_many = job.params.get("matrix") is not None or bool(job.params.get("is_apart"))
    return job.kind == "parity" or (job.kind == "replay" and is_of_many)


class Progress(NamedTuple):
    """How far a job is: `done` of `total` (None when unknown) of the thing `what` names, in `part` of its `parts`."""

    done: int
    total: int | None
    what: str
    part: int = 0
    parts: int = 1


#: What a job says before it imports torch: on a busy machine that takes longer than many a replay.
IMPORTING = Progress(0, None, "importing torch and transformers")


class LogLine(NamedTuple):
    """A line something printed: the job itself, or the model it runs."""

    text: str


class Sample(NamedTuple):
    """Memory and time of a running job: seconds since it began, MiB resident on the host and held on the GPU."""

    elapsed_s: float
    host_mib: float
    gpu_mib: float | None
    cpu_percent: float


class DocumentPiece(TypedDict, total=False):
    """One of these: what is first of a comparison, pairs as they are judged (`rows`) and in order (`tensors`), signals
    of a diagnosis, a cell of a replay, what is known so far of why one (`number`) disagrees, rewards of the demo's
    training.
    """

    first_divergence: FirstSaid
    rows: list[PairEntry]
    tensors: list[PairEntry]
    series: list[SeriesEntry]
    cell: CellEntry
    so_far: str
    number: int
    rewards: list[float]


class Partial(NamedTuple):
    """A piece of the final document, sent early."""

    document: DocumentPiece


Event = Progress | LogLine | Sample | Partial
OnEvent = Callable[[Event], None]

_EVENTS: dict[str, type[Event]] = {"progress": Progress, "log": LogLine, "sample": Sample, "partial": Partial}
_NAMES = {kind: name for name, kind in _EVENTS.items()}


def event_to_mapping(event: Event) -> dict[str, Any]:
    return {"event": _NAMES[type(event)], **event._asdict()}


#: What stands in an event's fields.
_NUMBER, _NONE = (int, float), type(None)
_TYPES: dict[str, tuple[type, ...]] = {
    "done": (int,), "total": (int, _NONE), "what": (str,), "part": (int,), "parts": (int,), "text": (str,),
    "document": (dict,), "elapsed_s": _NUMBER, "host_mib": _NUMBER, "gpu_mib": (*_NUMBER, _NONE),
    "cpu_percent": _NUMBER,
}  # fmt: skip


def event_from_mapping(mapping: Mapping[str, Any]) -> Event:
    """The event that `event_to_mapping` described.

    Raises:
        ValueError: it is none: unknown, or a field is missing or of another type.
    """
    name = mapping["event"]
    kind = _EVENTS.get(name) if isinstance(name, str) else None
    fields = () if kind is None else kind._fields
    if kind is None or not all(one in mapping and isinstance(mapping[one], _TYPES[one]) for one in fields):
        raise ValueError(f"no event: {name!r:.40}")
    return kind(**{field: mapping[field] for field in kind._fields})


def in_part(on_event: OnEvent, part: int, parts: int) -> OnEvent:
    """Hears one of several parts of a job that cost about as much as each other: cells of a replay, two critics."""

    def heard(event: Event) -> None:
        on_event(event._replace(part=part, parts=parts) if isinstance(event, Progress) else event)

    return heard


def ignore(_event: Event) -> None:
    """The listener of a caller that only wants the answer."""


#: What a child answers: JSON from another process. Who sends a job knows which of `documents.kinds` it asked for, or
#: which part of one (`replay_cell`, `critic`), and says so where it takes the answer.
Answer: TypeAlias = Any


class Runner(Protocol):
    """Runs a job to its end in some process.

    Raises:
        RldbgError: the error the job raised, or ChildDiedError when its process ended without an answer.
    """

    def run(self, job: Job, on_event: OnEvent = ignore) -> Answer: ...
