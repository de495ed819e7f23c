"""Where a child process does its jobs: a Job from the pipe becomes a call of the workbench, its answer a document."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replay_core import workbench
from replay_core.collecting import importing
from replay_core.documents.version import SCHEMA_VERSION
from replay_core.dumps import open_run
from replay_core.dumps.following import Follower
from replay_core.errors import RequestError
from replay_core.export import documents
from replay_core.export.numbers import clean
from replay_core.jobs import IMPORTING, READER_JOBS, Answer, Job, OnEvent, Partial, ignore, is_coordinating
from replay_core.mirrored import names_a_mirror
from replay_core.records import RecordKey, Run, Selection

if TYPE_CHECKING:
    from replay_core.demo.train import TrainedDemo
    from replay_core.documents.comparison import ComparisonDocument, PairEntry
    from replay_core.documents.diagnosis import DiagnosisDocument
    from replay_core.documents.difference import DifferenceDocument
    from replay_core.documents.explanation import ExplanationDocument
    from replay_core.documents.following import FollowingDocument
    from replay_core.documents.kinds import Document
    from replay_core.documents.mismatch import MismatchDocument
    from replay_core.documents.parity import ParityDocument
    from replay_core.documents.record import RecordDocument
    from replay_core.documents.replay import ReplayDocument
    from replay_core.documents.ruling import RulingDocument
    from replay_core.documents.run import RunDocument
    from replay_core.documents.samples import SamplesDocument
    from replay_core.documents.tensor import PointedTensor, TensorDocument
    from replay_core.inspection.step_samples import StepSamples
    from replay_core.parity.sides import CriticAnswer


#: Asked of a remote dump, too: they read through `file_spans` alone. A snapshot of one does not grow.
_READING = frozenset(READER_JOBS) - {"follow"}


def perform(job: Job, on_event: OnEvent = ignore) -> Answer:
    """Do a job of `jobs.READER_JOBS` or `jobs.REPLAYER_JOBS`.

    Raises:
        RldbgError: what the job raised, or RequestError for an unknown kind or missing parameter.
    """
    actions: dict[str, Callable[[dict[str, Any], OnEvent], Answer]] = {
        "open": _open_job,
        "record": _record_job,
        "inspect": _inspect_job,
        "difference": _difference_job,
        "rejudge": _rejudge_job,
        "compare": _compare_job,
        "compare_step": _compare_step_job,
        "compare_into": _compare_into_job,
        "measure": _measure_job,
        "reopen": _reopen_job,
        "diagnose": _diagnose_job,
        "explain": _explain_job,
        "follow": _follow_job,
        "replay": _replay_job,
        "replay_cell": _replay_cell_job,
        "replay_why": _replay_why_job,
        "replay_own": _replay_own_job,
        "replay_library": _replay_library_job,
        "replay_slice": _replay_slice_job,
        "replay_blame": _replay_blame_job,
        "capsule": _capsule_job,
        "demo_train": _demo_train_job,
        "critic": _critic_job,
        "parity": _parity_job,
        "recorded_parity": _recorded_parity_job,
        "referee": _referee_job,
        "mismatch": _mismatch_job,
        "samples": _samples_job,
    }
    if job.kind not in actions:
        raise RequestError(f"there is no job {job.kind!r}", expected=", ".join(actions))
    if job.kind not in _READING and names_a_mirror(repr(job.params)):
        raise RequestError(
            "a dump behind a URL is read, not run",
            expected=f"for {job.kind}, a dump on this machine",
            hint="libraries that load models open files themselves: copy the dump first",
        )
    try:
        return actions[job.kind](dict(job.params), on_event)
    except KeyError as error:
        raise RequestError(f"the job {job.kind} lacks the parameter {error}") from None


def _open_job(params: dict[str, Any], on_event: OnEvent) -> RunDocument:
    return workbench.open_dump(
        Path(params["path"]), *_more(params), headers=bool(params.get("headers")), on_event=on_event
    )


def _more(params: dict[str, Any], name: str = "more") -> list[Path]:
    """The other directories of a run, where it has several."""
    return [Path(path) for path in params.get(name) or ()]


def _record_job(params: dict[str, Any], _on_event: OnEvent) -> RecordDocument:
    key = RecordKey.from_mapping(params["key"])
    return workbench.show_record(Path(params["path"]), key, *_more(params), stats=bool(params.get("stats")))


def _inspect_job(params: dict[str, Any], _on_event: OnEvent) -> TensorDocument:
    """A tensor looked at; `token` is [sample, position or null] of a's record in place of a raw index."""
    token = params.get("token")
    if token is not None and params.get("at") is None:
        params["at"] = _index_of(params["a"], *token)
    names = ("part", "at_a", "at_b", "judge", "tokens")
    more = {name: params[name] for name in names if params.get(name) is not None}
    count = int(params.get("count", 64))
    return workbench.inspect(params["a"], params.get("b"), at=params.get("at"), count=count, **more)


def _index_of(named: PointedTensor, sample: int, position: int | None) -> list[int] | None:
    """The raw index of a token, as the layout of its record has it; None where the record lays nothing out."""
    from replay_core.samples.batch import Batch

    subject = workbench.subject(named)
    batch = Batch(subject.record, subject.record.tensors(), by_shape=True)
    return batch.index_of(subject.ref, sample, position)


def _difference_job(params: dict[str, Any], _on_event: OnEvent) -> DifferenceDocument:
    axis, cells = str(params.get("axis", "row")), int(params.get("cells", 64))
    return workbench.difference(params["a"], params["b"], axis=axis, cells=cells)


def _rejudge_job(params: dict[str, Any], on_event: OnEvent) -> ComparisonDocument:
    file = params.get("tolerance")
    doc = workbench.rejudge(
        Path(params["a"]), Path(params["b"]), tolerance_file=Path(file) if file else None,
        exact=bool(params.get("exact")), atol=params.get("atol"), rtol=params.get("rtol"),
    )  # fmt: skip
    if params.get("stream"):
        doc["tensors"] = _RowStream(on_event).whole(doc["tensors"])
    return doc


def _compare_job(params: dict[str, Any], on_event: OnEvent) -> ComparisonDocument:
    a, b = Path(params["a"]), Path(params["b"])
    rows = _RowStream(on_event) if params.get("stream") else None
    if params.get("replayed"):
        doc = workbench.compared_by_replay(a, b)
        return {**doc, "tensors": rows.whole(doc["tensors"])} if rows is not None else doc
    doc = workbench.compare_dumps(
        a,
        b,
        on_event=on_event,
        on_row=None if rows is None else rows.add,
        scope_b=params.get("scope_b"),
        more_a=_more(params, "more_a"),
        more_b=_more(params, "more_b"),
        measured=_more(params, "measured"),
        **_compared(params),
    )
    if rows is not None:
        doc["tensors"] = rows.whole(doc["tensors"])
    return doc


def _compared(params: dict[str, Any]) -> dict[str, Any]:
    """What is compared of two dumps, and by which limits."""
    parts = ("step", "rank", "micro")
    return {
        "exact": bool(params.get("exact")),
        "digests": bool(params.get("digests")),
        "name": tuple(params.get("name") or ()),
        "map_file": Path(params["map"]) if params.get("map") else None,
        "tolerance_file": Path(params["tolerance"]) if params.get("tolerance") else None,
        "atol": params.get("atol"),
        "rtol": params.get("rtol"),
        "stage": params.get("stage"),
        **{part: Selection.parse(params[part]) for part in parts if params.get(part) is not None},
    }


def _measure_job(params: dict[str, Any], on_event: OnEvent) -> dict[str, Any]:
    """What measuring a part came to, whose figures lie in the file `into`."""
    number, parts = map(int, params["part"])
    a, b, into = Path(params["a"]), Path(params["b"]), Path(params["into"])
    pairs = workbench.measure_dumps(a, b, into, (number, parts), on_event=on_event, **_compared(params))
    return {"exit_code": 0, "said": f"{pairs:,} pairs measured"}


def _compare_into_job(params: dict[str, Any], on_event: OnEvent) -> dict[str, Any]:
    """What a comparison came to, whose document lies in the file `into`: its rows are never all in memory."""
    a, b, into = Path(params["a"]), Path(params["b"]), Path(params["into"])
    said = workbench.compare_into(a, b, into, params["judged"], on_event=on_event,
                                  measured=_more(params, "measured"), **_compared(params))  # fmt: skip
    return {"exit_code": int(said[0]), "said": said[1]}


def _compare_step_job(params: dict[str, Any], on_event: OnEvent) -> ComparisonDocument:
    """A comparison of which nobody looks at the rows: what it comes to, without them."""
    return {**_compare_job({**params, "stream": False}, on_event), "tensors": []}


def _reopen_job(params: dict[str, Any], _on_event: OnEvent) -> Document:
    return workbench.reopen(Path(params["path"]))


def _diagnose_job(params: dict[str, Any], on_event: OnEvent) -> DiagnosisDocument:
    step = Selection.parse(params["step"]) if params.get("step") is not None else None
    paths = [Path(one) for one in params.get("paths") or [params["path"]]]
    rules, known = params.get("rules") or (), params.get("known")
    doc = workbench.diagnose(*paths, rules=rules, step=step, known=known, on_event=on_event)
    if params.get("stream"):
        # A run of ten thousand steps has a megabyte of series: one line of it would stop whoever reads it.
        for one in doc["series"]:
            on_event(Partial({"series": [one]}))
        doc["series"] = []
    return doc


def _said_of(run: Run) -> tuple[Any, ...]:
    """What a listing says beside the records."""
    return run.dialect, run.problems, run.notes, run.models, run.flags


def _explain_job(params: dict[str, Any], _on_event: OnEvent) -> ExplanationDocument:
    id = str(params["id"])
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "explanation",
        **documents.stamp(),
        "id": id,
        "text": workbench.explain_rule(id),
    }


#: Runs that are followed, by path: who asks every second must not have them listed every second.
_followed: dict[str, Follower] = {}


def _follow_job(params: dict[str, Any], _on_event: OnEvent) -> FollowingDocument:
    """What has come to a run since the last time; `have` is how many of its records the asker holds."""
    path = str(params["path"])
    follower = _followed.get(path)
    if follower is None:
        _followed.clear()
        follower = _followed.setdefault(path, Follower(path))
        came, is_news = [], True
    else:
        before = follower.run
        came = follower.poll()
        is_news = bool(came) or _said_of(follower.run) != _said_of(before)
    whole = len(follower.run.records) - len(came) != int(params["have"])
    return documents.following_document(follower.run, came, follower.pulse(), changed=is_news or whole, whole=whole)


#: The samples that are looked through: who goes from one to the next must not have all read again.
_read: list[tuple[Any, StepSamples]] = []


def _samples_job(params: dict[str, Any], _on_event: OnEvent) -> SamplesDocument:
    """Samples of a step in some order; `anew` reads them again, as they lie there now."""
    from replay_core.inspection.step_samples import StepSamples

    step = params.get("step")
    asked = (params["path"], tuple(params.get("more") or ()), step, params.get("tokenizer"))
    if params.get("anew") or not _read or _read[0][0] != asked:
        _read.clear()
        run = open_run(Path(params["path"]), *_more(params))
        tokenizer = Path(params["tokenizer"]) if params.get("tokenizer") else None
        _read.append((asked, StepSamples(run, None if step is None else Selection.parse(str(step)), tokenizer)))
    options = {name: params[name] for name in ("by", "search", "shown", "most") if params.get(name) is not None}
    return _read[0][1].document(**options)


class _RowStream:
    """Sends a comparison's entries in small pieces: as they fall (`rows`), and the whole list at the end (`tensors`).

    One line of a hundred thousand entries would keep whoever reads it from doing anything else for a second.
    """

    PIECE = 50
    PAUSE_S = 0.2

    def __init__(self, on_event: OnEvent) -> None:
        self._on_event = on_event
        self._waiting: list[PairEntry] = []
        self._sent = time.monotonic()

    def add(self, row: PairEntry) -> None:
        self._waiting.append(row)
        now = time.monotonic()
        if len(self._waiting) >= self.PIECE or now - self._sent > self.PAUSE_S:
            self._on_event(Partial({"rows": clean(self._waiting)}))
            self._waiting, self._sent = [], now

    def whole(self, tensors: Sequence[PairEntry]) -> list[PairEntry]:
        """What is left for the document itself: nothing, once every piece is sent."""
        if self._waiting:
            self._on_event(Partial({"rows": clean(self._waiting)}))
        for start in range(0, len(tensors), self.PIECE):
            self._on_event(Partial({"tensors": list(tensors[start : start + self.PIECE])}))
        return []


#: What a replay may be asked for beside its plan.
_ASKED = ("matrix", "models", "against", "twice", "is_warm", "why")
#: How long a cell of a matrix may take: a model that never returns must not hold up the others.
CELL_LIMIT_S = 1800.0


def _replay_job(params: dict[str, Any], on_event: OnEvent) -> ReplayDocument:
    """One setting runs in this process, which stays warm; every cell of a matrix, or `is_apart`, in a fresh child."""
    from replay_core.executors.child import ChildRunner
    from replay_core.executors.in_process import InProcess

    asked = {name: params[name] for name in _ASKED if params.get(name) is not None}
    plan, out = dict(params["plan"]), Path(params["out"])
    if not is_coordinating(Job("replay", params)):
        return workbench.replay(plan, out, InProcess(perform), on_event, is_held=True, **asked)
    with ChildRunner(warm=bool(asked.get("is_warm")), time_limit_s=CELL_LIMIT_S) as runner:
        return workbench.replay(plan, out, runner, on_event, **asked)


def prepare() -> None:
    """Import what every part of a replay does, before the processes are forked that run them."""
    with importing():
        import replay_core.replay.run
        import replay_core.replay.why  # noqa: F401


def _replay_cell_job(params: dict[str, Any], on_event: OnEvent) -> Answer:
    from replay_core.replay.plan import ReplayPlan

    on_event(IMPORTING)
    with importing():
        from replay_core.replay.run import run_cell  # torch and transformers: 3.4 s

    return clean(run_cell(ReplayPlan.from_mapping(params["plan"]), on_event))


def _replay_why_job(params: dict[str, Any], on_event: OnEvent) -> Answer:
    from replay_core.replay.flags import Flags
    from replay_core.replay.plan import ReplayPlan

    on_event(IMPORTING)
    with importing():
        from replay_core.replay.why import explain  # torch and transformers: 3.4 s

    plan, reference = ReplayPlan.from_mapping(params["plan"]), Flags.from_mapping(params["reference"])
    always, is_ahead, is_agreeing = (bool(params.get(name)) for name in ("always", "is_ahead", "is_agreeing"))
    return clean(
        explain(
            plan, reference, params["dumps"], params["final_hidden"], on_event,
            always=always, is_ahead=is_ahead, is_agreeing=is_agreeing,
        )
    )  # fmt: skip


def _replay_own_job(params: dict[str, Any], on_event: OnEvent) -> Answer:
    from replay_core.replay.plan import ReplayPlan

    on_event(IMPORTING)
    with importing():
        from replay_core.replay.own_asked import ask  # torch and transformers: 3.4 s

    return {"shown": ask(ReplayPlan.from_mapping(params["plan"]), str(params["said"]), float(params["off"]), on_event)}


def _replay_library_job(params: dict[str, Any], on_event: OnEvent) -> Answer:
    from replay_core.replay.plan import ReplayPlan

    on_event(IMPORTING)
    with importing():
        from replay_core.replay.beside_library import ask  # torch and transformers: 3.4 s

    plan = ReplayPlan.from_mapping(params["plan"])
    return clean(ask(plan, str(params["library"]), int(params["row"]), on_event))


def _replay_slice_job(params: dict[str, Any], on_event: OnEvent) -> Answer:
    from replay_core.replay.flags import Flags
    from replay_core.replay.plan import ReplayPlan

    on_event(IMPORTING)
    with importing():
        from replay_core.replay.slicing import cut  # torch and transformers: 3.4 s

    plan, reference = ReplayPlan.from_mapping(params["plan"]), Flags.from_mapping(params["reference"])
    return cut(plan, reference, Path(plan.out), str(params["said"]), on_event)


def _replay_blame_job(params: dict[str, Any], on_event: OnEvent) -> Answer:
    from replay_core.replay.plan import ReplayPlan

    on_event(IMPORTING)
    with importing():
        from replay_core.replay.blaming import blame  # torch and transformers: 3.4 s

    return blame(ReplayPlan.from_mapping(params["plan"]), on_event)


def _capsule_job(params: dict[str, Any], on_event: OnEvent) -> ReplayDocument:
    """One file, and a script, of the cell whose dump `replay` is; in this process, as a replay of one setting is."""
    from replay_core.executors.in_process import InProcess

    doc, cell = workbench.replay_of(Path(params["replay"]))
    file, script = Path(params["file"]), Path(params["script"])
    for place in (file, script):
        documents.check_place(place)
    return workbench.capsule(doc, file, Path(params["out"]), InProcess(perform), on_event, cell=cell, script=script)


def _critic_job(params: dict[str, Any], on_event: OnEvent) -> CriticAnswer:
    with importing():
        from replay_core.parity.worker import run_critic  # torch, and the critic's own framework

    return clean(run_critic(params, on_event))


def _parity_job(params: dict[str, Any], on_event: OnEvent) -> ParityDocument:
    """Two critics, each in a child of this one; without `a` and `b` the two that come with rldbg."""
    from replay_core.executors.child import ChildRunner

    examples = workbench.parity_examples()
    a, b = (Path(params.get(side) or example) for side, example in zip("ab", examples, strict=True))
    with ChildRunner(time_limit_s=params.get("time_limit_s")) as runner:
        return workbench.parity(a, b, Path(params["out"]), runner, on_event, **params.get("asked") or {})


def _recorded_parity_job(params: dict[str, Any], on_event: OnEvent) -> ParityDocument:
    a = Path(params["a"])
    b = Path(params.get("b") or a)
    return workbench.recorded_parity(a, b, threshold=params.get("threshold"), on_event=on_event)


def _referee_job(params: dict[str, Any], on_event: OnEvent) -> RulingDocument:
    selection: dict[str, Any] = {
        name: Selection.parse(params[name]) for name in ("step", "rank", "micro") if params.get(name) is not None
    }
    if params.get("role"):
        selection["role"] = params["role"]
    b = Path(params["b"]) if params.get("b") else None
    weights = {f"weights_{side}": params.get(f"weights_{side}") for side in "ab"}
    graft = bool(params.get("graft"))
    return workbench.referee(Path(params["a"]), b, graft=graft, on_event=on_event, **weights, **selection)


def _mismatch_job(params: dict[str, Any], on_event: OnEvent) -> MismatchDocument:
    asked = {name: params[name] for name in ("model", "base_model", "older", "tokenizer", "most") if params.get(name)}
    return workbench.mismatch(Path(params["path"]), *_more(params), step=params.get("step"), on_event=on_event, **asked)


def _demo_train_job(params: dict[str, Any], on_event: OnEvent) -> TrainedDemo:
    on_event(IMPORTING)
    with importing():
        from replay_core.demo.train import train_demo  # torch and transformers: 3.4 s

    return train_demo(Path(params["directory"]), on_event, fault=params.get("fault"))
