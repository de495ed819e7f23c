"""sglang's dumper: a tensor per file, the metadata in the name: step=0___rank=0___dump_index=14___name=….pt.

The files of one (step, rank) that hold one kind of tensor are one record. A record's path is its first
file; the rest lie beside it. Steps count forwards, so a training step may be several of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from replay_core import naming
from replay_core.dumps.containers import read_container
from replay_core.dumps.dialect import Index
from replay_core.dumps.fields import flatten
from replay_core.dumps.listing import Folder, listing
from replay_core.dumps.peeking import has
from replay_core.errors import DumpError, RldbgError
from replay_core.records import Fields, Problem, RecordKey, TensorRef, Unreadable

name = "sglang_dumper"

_SEPARATOR = "___"
_NON_INTRUSIVE = "non_intrusive__"
_PREFIX = re.compile(r"(?:non_intrusive__)?(grad|param)__(?:non_intrusive__)?")
#: Parallel ranks beside `rank`: they tell apart files that agree in everything else.
_AXES = ("tp_rank", "pp_rank", "cp_rank", "ep_rank", "etp_rank", "dp_rank")


class _File(NamedTuple):
    """What a file's name says."""

    file: str
    step: int
    rank: int
    order: int
    field: str
    stage: str


def detect(path: Path) -> bool:
    return any(
        _said(entry) is not None for folder in listing(path).folders for entry in _likely(folder, only=path.is_file())
    )


def _likely(folder: Folder, only: bool = False) -> Iterator[str]:
    if only or any("step=___" in shape for shape in folder.shapes):
        for entry in folder.names:
            if "___dump_index=" in entry and "step=" in entry:
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
    return _File(entry, step, rank, order, field + axes, stage)


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
    if path.is_file():
        said = _said(path.name)
        if said is not None:
            found.files.append((RecordKey(said.step, None, said.rank, "actor", said.stage), path))
        return found
    for folder in listing(path).folders:
        for (step, rank, stage), members in _records(folder).items():
            first = folder.file(members[0].file)
            found.files.append((RecordKey(step, None, rank, "actor", stage), first))
            found.names[first] = tuple(_unique(members))
            found.beside += [folder.file(member.file) for member in members[1:]]
            missing = _missing(members)
            if missing:
                found.notes.append(missing)
    found.notes = list(dict.fromkeys(found.notes))
    return found


def _missing(members: list[_File]) -> str:
    """dump_index runs over everything the dumper saw: a hole is a tensor that was filtered out or taken away."""
    span = members[-1].order - members[0].order + 1
    return "dump_index has holes: not every tensor the dumper saw is here" if span > len(members) else ""


def _unique(members: list[_File]) -> list[str]:
    """Names in order of the dump; a tensor dumped twice in one step gets a number."""
    seen: dict[str, int] = {}
    names = []
    for said in members:
        count = seen[said.field] = seen.get(said.field, 0) + 1
        names.append(said.field if count == 1 else f"{said.field}#{count}")
    return names


def read(key: RecordKey, path: Path) -> list[TensorRef]:
    said = _said(path.name)
    if said is None:
        raise DumpError("the name is not one of sglang's dumper", file=str(path))
    folder = Folder(str(path.parent), sorted(entry.name for entry in path.parent.iterdir()))
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
    value = tree["value"] if has(tree, ("value", "meta")) else tree
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
        )
        for ref in found
    ]
