"""sglang's dumper: a tensor per file, the metadata in the name: step=0___rank=0___dump_index=14___name=….pt.

The files of one (step, rank) that hold one kind of tensor are one record. A record's path is its first
file; the rest lie beside it. Steps count forwards, so a training step may be several of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from replay_core import naming
from replay_core.dumps.containers import read_container
from replay_core.dumps.dialect import Dialect, Index
from replay_core.dumps.fields import flatten
from replay_core.dumps.listing import Folder, is_file, listing
from replay_core.dumps.peeking import has
from replay_core.errors import DumpError, RldbgError
from replay_core.records import Fields, Problem, RecordKey, Stated, TensorRef, Unreadable
from replay_core.regexes import regex

_SEPARATOR = "___"
_NON_INTRUSIVE = "non_intrusive__"
_PREFIX = regex(r"(?:non_intrusive__)?(grad|param)__(?:non_intrusive__)?")
#: Parallel ranks beside `rank`: they tell apart files that agree in everything else.
_PHASES = ("fwd_only", "fwd_bwd")
_ENGINE, _ROLLOUT = regex(r"engine_(\d{1,6})"), regex(r"(.*?)rollout_(\d{1,18})")
_PARALLEL = ("sglang_parallel_info", "megatron_parallel_info")
_AXES = ("tp_rank", "pp_rank", "cp_rank", "ep_rank", "etp_rank", "dp_rank")


class _File(NamedTuple):
    """What a file's name says."""

    file: str
    step: int
    rank: int
    order: int
    field: str
    stage: str
    axes: str


def detect(path: Path) -> bool:
    return any(
        _said(entry) is not None for folder in listing(path).folders for entry in _likely(folder, only=is_file(path))
    )


def _likely(folder: Folder, only: bool = False) -> Iterator[str]:
    if only or any("step=" in shape and "dump_index=" in shape for shape in folder.shapes):
        for entry in folder.names:
            if "dump_index=" in entry and "step=" in entry and "name=" in entry:
                yield entry


def _said(entry: str) -> _File | None:
    """The metadata of a name, None when it is not the dumper's."""
    parts = entry.removesuffix(".pt").split(_SEPARATOR)
    said: dict[str, str] = {}
    for part in parts:
        key, _, value = part.partition("=")
        said.setdefault(key, value)
    numbers = [said.get(key, "0") for key in ("step", "rank", "dump_index")]
    if "name" not in said or not all(n.isascii() and n.isdigit() and len(n) < 19 for n in numbers):
        return None
    field, stage = _canonical(said["name"])
    axes = "".join(f"@{axis}={said[axis]}" for axis in _AXES if said.get(axis))
    step, rank, order = map(int, numbers)
    return _File(entry, step, rank, order, field, stage, axes)


def _canonical(field: str) -> tuple[str, str]:
    """The project's name for what the dumper calls `field`, and the stage it belongs to."""
    match = _PREFIX.match(field)
    if match is not None:
        kind, rest = match.group(1), field[match.end() :]
        return naming.canonical(f"{kind}.{rest}"), "gradient" if kind == "grad" else "param"
    return naming.canonical(field.removeprefix(_NON_INTRUSIVE)), "modules"


def _records(folder: Folder) -> dict[tuple[int, int, str], list[_File]]:
    records: dict[tuple[int, int, str], list[_File]] = {}
    for entry in _likely(folder):
        said = _said(entry)
        if said is not None:
            records.setdefault((said.step, said.rank, said.stage), []).append(said)
    for members in records.values():
        members.sort(key=lambda said: said.order)
    return records


def index(path: Path) -> Index:
    found = Index([], notes=["a step is one forward, as sglang's dumper counts them"])
    if is_file(path):
        said = _said(path.name)
        if said is not None:
            found.files.append((RecordKey(said.step, None, said.rank, "actor", said.stage), path))
        return found
    forwards: dict[int, int] = {}
    for folder in sorted(listing(path).folders, key=_phase):
        records = _records(folder)
        place = _place(folder)
        before = forwards.get(place.step, 0) if place.step is not None else 0
        ranks = max((rank for _, rank, _ in records), default=0) + 1
        for (step, rank, stage), members in records.items():
            first = folder.file(members[0].file)
            key = RecordKey(step, None, rank + place.engine * ranks, place.role, stage)
            if place.step is not None:
                key = RecordKey(place.step, before + step, rank, place.role, stage)
                forwards[place.step] = max(forwards.get(place.step, 0), before + step + 1)
            found.files.append((key, first))
            found.names[first] = tuple(_unique(members))
            found.beside += [folder.file(member.file) for member in members[1:]]
        if records and place.step is not None:
            found.notes.append("the step is the folder's rollout, micro the forwards of its phases in order")
        if place.engine and records:
            found.notes.append("the ranks of the engines are numbered on, engine after engine")
        found.notes += _missing(records)
    found.notes = list(dict.fromkeys(found.notes))
    return found


class _Place(NamedTuple):
    """What miles' folders say: engines/engine_N, fwd_only/[prefix]rollout_N, fwd_bwd/rollout_N."""

    step: int | None = None
    role: str = "actor"
    engine: int = 0


def _place(folder: Folder) -> _Place:
    above = Path(folder.path).parent.name
    engine, rollout = _ENGINE.fullmatch(folder.name), _ROLLOUT.fullmatch(folder.name)
    if engine and above == "engines":
        return _Place(None, "rollout", int(engine.group(1)))
    if rollout and above in _PHASES:
        return _Place(int(rollout.group(2)), "ref" if rollout.group(1).startswith("ref") else "actor")
    return _Place()


def _phase(folder: Folder) -> tuple[int, str]:
    above = Path(folder.path).parent.name
    return (_PHASES.index(above) if above in _PHASES else -1, folder.path)


def _missing(records: dict[tuple[int, int, str], list[_File]]) -> list[str]:
    """dump_index runs over everything a rank saw: a hole is a tensor that was filtered out or taken away."""
    seen: dict[int, set[int]] = {}
    for (_, rank, _), members in records.items():
        seen.setdefault(rank, set()).update(said.order for said in members)
    holes = any(max(orders) - min(orders) + 1 > len(orders) for orders in seen.values())
    return ["dump_index has holes: not every tensor the dumper saw is here"] if holes else []


def _unique(members: list[_File]) -> list[str]:
    """Names in order of the dump; a tensor dumped twice in one step gets a number.

    Parallel ranks are named only where a record holds several of them: else the record's rank says it.
    """
    axes: dict[str, set[str]] = {}
    for said in members:
        axes.setdefault(said.field, set()).add(said.axes)
    seen: dict[str, int] = {}
    names = []
    for said in members:
        field = said.field + said.axes if len(axes[said.field]) > 1 else said.field
        count = seen[field] = seen.get(field, 0) + 1
        names.append(field if count == 1 else f"{field}#{count}")
    return names


def read(key: RecordKey, path: Path) -> list[TensorRef]:
    said = _said(path.name)
    if said is None:
        raise DumpError("the name is not one of sglang's dumper", file=str(path))
    with os.scandir(path.parent) as entries:
        # A slash in the name of a tensor made a folder: what is in it is listed on its own.
        folder = Folder(str(path.parent), sorted(entry.name for entry in entries if entry.is_file()))
    members = _records(folder).get((said.step, said.rank, said.stage)) or [said]
    fields: list[TensorRef] = []
    problems: list[Problem] = []
    for order, (member, field) in enumerate(zip(members, _unique(members), strict=True)):
        file = folder.file(member.file)
        try:
            fields += _one(file, field, order)
        except RldbgError as error:
            problems.append(Problem(str(file), error.message))
            fields.append(TensorRef(field, "none", (), Unreadable(error.message), canonical=field, order=order))
    return Fields(fields, problems)


def _one(file: Path, field: str, order: int) -> list[TensorRef]:
    tree = read_container(file).tree
    is_told = has(tree, ("value", "meta"))
    value, stated = (tree["value"], _stated(tree["meta"])) if is_told else (tree, None)
    found = [ref for ref in flatten({field: value}) if ref.name]
    if not found:
        return [TensorRef(field, "none", (), Unreadable("the dumper stored nothing"), canonical=field, order=order)]
    bare = field.partition("@")[0].partition("#")[0]
    single = len(found) == 1 and found[0].name == field
    return [
        ref.with_(
            canonical=field if single else ref.name,
            alignment="full" if naming.meaning(bare).alignment == "full" and len(ref.shape) >= 2 else None,
            order=order,
            stated=stated if single else None,
        )
        for ref in found
    ]


def _stated(meta: Any) -> Stated | None:
    """What a dumper's `dims` say, and where the rank stands: tp_rank of tp_size in sglang's words or Megatron's."""
    dims = meta.get("dims") if isinstance(meta, Mapping) else None
    if not isinstance(dims, str):
        return None
    axes: dict[str, tuple[int, int]] = {}
    for said in (meta, *(meta[key] for key in _PARALLEL if isinstance(meta.get(key), Mapping))):
        for key, rank in said.items():
            size = said.get(f"{key.removesuffix('_rank')}_size") if isinstance(key, str) else None
            if str(key).endswith("_rank") and type(rank) is int and type(size) is int and 0 <= rank < size > 1:
                axes[key.removesuffix("_rank")] = rank, size
    return Stated(dims, tuple((axis, *place) for axis, place in axes.items()))


DIALECT = Dialect("sglang_dumper", "names", detect, index, read)
