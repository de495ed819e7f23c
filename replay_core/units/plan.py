"""The units of a job: which parts of the run are looked at one by one.

`compare` has a unit per step, for samples of one step may stand in other ranks and micro-batches of the other run, and
one for what both have of no step;
where its tensors are to be shared by name, units in front of it measure them, and it judges by what these left;
`diagnose` one per run of a folder, else per step where steps lie in files of their own; `replay` and `referee` one per
micro-batch of a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from msgspec import Struct, field
from msgspec.structs import replace

import replay_core
from replay_core import naming
from replay_core.dumps import open_run
from replay_core.errors import RequestError, RldbgError, SelectionError
from replay_core.jobs import Job, OnEvent, ignore
from replay_core.records import Record, Run, Selection, weights_noted
from replay_core.units.identity import digest, files_seen, reference_seen

Command: TypeAlias = Literal["compare", "diagnose", "replay", "referee"]

#: Parameters of a job that name files: what is in them counts, not how they are called.
_FILES = ("map", "tolerance")
#: Those that say where the runs lie; their records stand for them.
_PLACES = ("a", "b", "path", "paths", "dump", "out")
#: Records of a step that no forward of a micro-batch computed.
_OF_STEPS = ("gradient", "optimizer", "param", "training_metrics", "loss_gradient")


class Unit(Struct, frozen=True):
    """A job on one part of a run. `id` names the file of its answer."""

    id: str
    label: str
    job: Job
    run: str | None = None
    step: int | None = None
    rank: int | None = None
    micro: int | None = None
    #: It leaves figures for another unit, and has no document.
    measures: bool = False
    #: The ids of the units whose figures it judges by.
    needs: tuple[str, ...] = ()


class Request(Struct, frozen=True):
    """What was asked of every unit.

    params: the job's own parameters (`desk`), without the part of the run.
    select: step, rank, micro as they were typed, and role.
    judged: what `export.outcome.exit_code` is told: allow_missing, fail_on, fail_above.
    """

    command: Command
    params: Mapping[str, Any]
    select: Mapping[str, str] = field(default_factory=dict)
    judged: Mapping[str, Any] = field(default_factory=dict)

    def to_mapping(self) -> dict[str, Any]:
        return {
            "command": self.command, "params": dict(self.params), "select": dict(self.select),
            "judged": dict(self.judged),
        }  # fmt: skip


class Plan(Struct, frozen=True):
    """A request and its units in order of computation; steps that only one side of a comparison has are in none."""

    request: Request
    units: tuple[Unit, ...]
    only_a: tuple[int, ...] = ()
    only_b: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()


def planned(request: Request, on_event: OnEvent = ignore) -> Plan:
    """Look at the names of the runs and cut the request into units; no tensor is read.

    Raises:
        SelectionError: nothing matches.
        DumpError, RequestError: a run cannot be opened.
    """
    made = {"compare": _comparing, "diagnose": _diagnosing, "replay": _replaying, "referee": _refereeing}
    plan = made[request.command](request, on_event)
    if not plan.units:
        raise SelectionError("there is nothing to do one by one", expected="a step that both runs have", found="none")
    return plan


class _Cutter:
    """Makes the units of a request: the settings that all share are digested once."""

    def __init__(self, request: Request) -> None:
        self._request = request
        plain = {name: value for name, value in request.params.items() if name not in _PLACES and value is not None}
        if isinstance(plain.get("plan"), dict):
            plain["plan"] = {name: value for name, value in plain["plan"].items() if name not in _PLACES}
        files = {name: reference_seen(plain.pop(name)) for name in _FILES if plain.get(name)}
        self._settings = [plain, files, dict(request.judged), replay_core.__version__]

    def unit(
        self,
        label: str,
        params: Mapping[str, Any],
        sides: Iterable[tuple[Run, Iterable[Record]]],
        *weights: str | None,
        **place: Any,
    ) -> Unit:
        """The unit of these records of the runs, with the weights that it loads."""
        return self._unit(label, params, [_seen(run, records) for run, records in sides], weights, place)

    def with_parts(
        self, label: str, params: Mapping[str, Any], sides: Iterable[tuple[Run, Iterable[Record]]], **place: Any
    ) -> list[Unit]:
        """The unit of these records; in front of it, where tensors are to be shared by name, those that measure."""
        looked = [_seen(run, records) for run, records in sides]
        parts = self._request.params.get("parts")
        if not parts:
            return [self._unit(label, params, looked, (), place)]
        measuring = [
            self._unit(f"{label}, names {number + 1}/{parts}", {**params, "part": [number, parts]}, looked, (), place,
                       part=number)
            for number in range(parts)
        ]  # fmt: skip
        judging = self._unit(label, params, looked, (), place)
        return [*measuring, replace(judging, needs=tuple(one.id for one in measuring))]

    def _unit(
        self,
        label: str,
        params: Mapping[str, Any],
        looked: list[Any],
        weights: Sequence[str | None],
        place: Mapping[str, Any],
        *,
        part: int | None = None,
    ) -> Unit:
        loaded = [reference_seen(one) for one in weights]
        known: dict[str, Any] = {name: place.get(name) for name in ("run", "step", "rank", "micro")}
        of_part = () if part is None else (part,)
        id = digest(self._request.command, self._settings, known, looked, loaded, *of_part)
        job = Job(self._request.command, {**self._request.params, **params})
        return Unit(id, label, job, **known, measures=part is not None)


def _seen(run: Run, records: Iterable[Record]) -> Any:
    paths = [record.path for record in records]
    folders = {path.parent for path in paths}
    # A record of a file per tensor is read from more than its own path.
    return files_seen([*paths, *(one for one in run.beside if one.parent in folders)], run.path)


def _selections(select: Mapping[str, str], *parts: str) -> dict[str, Any]:
    return {part: Selection.parse(select[part]) for part in parts if part in select}


def _comparing(request: Request, on_event: OnEvent) -> Plan:
    runs = [open_run(Path(request.params[side]), on_event=on_event) for side in ("a", "b")]
    chosen = _selections(request.select, "step", "rank", "micro")
    sides = [_by_step(run.select(**chosen) if chosen else run.records) for run in runs]
    cutter = _Cutter(request)
    beside = {part: request.select[part] for part in ("rank", "micro") if part in request.select}
    both = [step for step in sides[0] if step in sides[1] and step is not None]
    is_beside = None in sides[0] or None in sides[1]
    if not both or (is_beside and (request.params.get("name") or not _share_a_name(sides))):
        # A side without steps, or steps called otherwise on either side, or what is of no step and would be nothing to
        # compare by itself: pairing them is the comparison's own question.
        whole = [(run, [one for many in side.values() for one in many]) for run, side in zip(runs, sides, strict=True)]
        params = {**beside, **({"step": request.select["step"]} if "step" in request.select else {})}
        return Plan(request, tuple(cutter.with_parts("every step", params, whole)))
    units = []
    for one in [*([None] if is_beside else []), *both]:
        looked = [(run, side[one]) for run, side in zip(runs, sides, strict=True)]
        label, step = ("no step", "none") if one is None else (f"step {one}", str(one))
        units += cutter.with_parts(label, {**beside, "step": step}, looked, step=one)
    only_a, only_b = (
        tuple(step for step in this if step is not None and step not in other) for this, other in (sides, sides[::-1])
    )
    return Plan(request, tuple(units), only_a, only_b)


def _share_a_name(sides: Sequence[Mapping[int | None, Sequence[Record]]]) -> bool:
    """Whether both sides have a tensor of one name of no step."""
    try:
        names = [{ref.canonical or ref.name for record in side.get(None, ()) for ref in record.tensors()
                  if ref.is_readable} for side in sides]  # fmt: skip
    except RldbgError:
        return False
    return any(naming.meaning(name).kind != "note" for name in names[0] & names[1])


def _by_step(records: Iterable[Record]) -> dict[int | None, list[Record]]:
    found: dict[int | None, list[Record]] = {}
    for record in records:
        found.setdefault(record.key.step, []).append(record)
    return found


def _diagnosing(request: Request, on_event: OnEvent) -> Plan:
    first, *more = map(Path, request.params["paths"])
    run = open_run(first, *more, on_event=on_event)
    cutter = _Cutter(request)
    asked = {"step": request.select["step"]} if "step" in request.select else {}
    if run.inside:
        units = []
        for path in run.inside:
            inner, name = open_run(path), str(path.relative_to(first))
            units.append(cutter.unit(name, {**asked, "paths": [str(path)]}, [(inner, inner.records)], run=name))
        return Plan(request, tuple(units))
    steps = _by_step(run.select(**_selections(request.select, "step")) if asked else run.records)
    files = [{record.path for record in records} for records in steps.values()]
    if len(steps) < 2 or len(set().union(*files)) < sum(map(len, files)):
        # A log holds every step in one file: it is one question.
        every = [record for records in steps.values() for record in records]
        return Plan(request, (cutter.unit("every step", asked, [(run, every)]),))
    units = [
        cutter.unit(f"step {step}", {"step": str(step)}, [(run, records)], step=step)
        for step, records in steps.items()
        if step is not None
    ]
    said = "what shows over several steps (trends, ranks that drift) no unit sees"
    return Plan(request, tuple(units), notes=(f"{said}: rldbg diagnose {first}",))


#: step, micro, rank.
_Place: TypeAlias = tuple[int | None, int | None, int | None]


def _places(records: Iterable[Record], role: str | None) -> dict[_Place, list[Record]]:
    """Every forward that the records hold, in order: its own records, and those of its whole step."""
    every = list(records)
    known = [record.key for record in every if record.key.role == (role or "actor")] or [one.key for one in every]
    forwards = {(key.step, key.micro, key.rank) for key in known if key.stage not in _OF_STEPS}
    if any(micro is not None for _, micro, _ in forwards):
        forwards = {place for place in forwards if place[1] is not None}
    of_place: dict[_Place, list[Record]] = {}
    for record in every:
        of_place.setdefault((record.key.step, record.key.micro, record.key.rank), []).append(record)
    found = {}
    for step, micro, rank in sorted(forwards, key=lambda place: tuple(-1 if part is None else part for part in place)):
        where = dict.fromkeys((step, m, r) for m in (micro, None) for r in (rank, None))
        found[step, micro, rank] = [record for place in where for record in of_place.get(place, ())]
    return found


def _of_micro_batches(
    request: Request, run: Run, made: Callable[[str, list[Record], dict[str, int | None]], Unit]
) -> Plan:
    chosen = _selections(request.select, "step", "rank", "micro")
    records = run.select(**chosen) if chosen else run.records
    role = request.select.get("role")
    if role is not None and not any(record.key.role == role for record in records):
        found = sorted({str(record.key.role) for record in records})
        raise SelectionError(f"no record of role {role}", file=str(run.path), expected=", ".join(found), found=role)
    units = []
    for (step, micro, rank), mine in _places(records, role).items():
        numbers = (("step", step), ("rank", rank), ("micro", micro))
        label = " ".join(f"{name} {number}" for name, number in numbers if number is not None) or "the only micro-batch"
        units.append(made(label, mine, dict(numbers)))
    return Plan(request, tuple(units))


def _replaying(request: Request, on_event: OnEvent) -> Plan:
    asked = dict(request.params["plan"])
    run = open_run(Path(asked["dump"]), on_event=on_event)
    cutter = _Cutter(request)

    def made(label: str, mine: list[Record], place: dict[str, int | None]) -> Unit:
        models = request.params.get("models") or (asked.get("model") or "checkpoint",)
        noted = weights_noted(run.models, place["step"])
        weights = [noted[1] if one == "checkpoint" and noted else one for one in models]
        return cutter.unit(label, {"plan": {**asked, **place}}, [(run, mine)], *weights, **place)

    return _of_micro_batches(request, run, made)


def _refereeing(request: Request, on_event: OnEvent) -> Plan:
    run = open_run(Path(request.params["a"]), on_event=on_event)
    other = open_run(Path(request.params["b"]), on_event=on_event) if request.params.get("b") else None
    cutter = _Cutter(request)

    def made(label: str, mine: list[Record], place: dict[str, int | None]) -> Unit:
        sides = [(run, mine)]
        if other is not None:
            facing = [one for one in other.records if one.key.step in (None, place["step"])]
            sides.append((other, facing))
        weights = [
            request.params.get(f"weights_{side}")
            or (noted[1] if (noted := weights_noted(one.models, place["step"])) else None)
            for side, one in (("a", run), ("b", other))
            if one is not None
        ]
        part = {name: str(number) for name, number in place.items() if number is not None}
        return cutter.unit(label, part, sides, *weights, **place)

    return _of_micro_batches(request, run, made)


def refused(found: Mapping[str, Any], request: Request, file: Path) -> RequestError:
    """The error where a directory holds the units of another request."""
    ours, theirs = request.to_mapping(), dict(found)
    apart = [name for name in ours if ours[name] != theirs.get(name)]
    return RequestError(
        "the directory holds the units of another request",
        file=str(file),
        expected=", ".join(f"{name} {ours[name]}" for name in apart)[:400],
        found=", ".join(f"{name} {theirs.get(name)}" for name in apart)[:400],
        hint="another --out DIR for another question",
    )
