"""One dialect for each kind of file whose rows are samples: what tells them apart is a `RowSpec`.

Most frameworks that log rollouts write the same thing, a file of samples, and differ in names, in where the
step stands and in what a filler value means. That is data; the tables are in `row_tables.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from replay_core.dumps.columns import columns
from replay_core.dumps.containers import read_container
from replay_core.dumps.containers.columns import Table
from replay_core.dumps.dialect import Dialect, Index, any_of
from replay_core.dumps.fields import flatten, ragged_alike
from replay_core.dumps.file_places import told_apart
from replay_core.dumps.json_rows import decoded, first_row, is_broken, names_with, rows_by_place
from replay_core.dumps.listing import listing
from replay_core.dumps.words import Words, named
from replay_core.errors import DumpError, RldbgError
from replay_core.records import Fields, Problem, RecordKey, TensorRef
from replay_core.regexes import regex


class RowSpec(Struct, frozen=True):
    """How one framework writes a file of samples."""

    name: str
    """The dialect's name."""
    file: str
    """A regular expression on the end of the file's path; groups `step`, `rank`, `eval` where the name says so."""
    needs: str
    """Fields that every row has, as words: the content that settles what the name suggests."""
    words: Words
    stage: str = "trajectory"
    role: str = "rollout"
    step_field: str | None = None
    """The row's own step, where the file name has none."""
    columnar: bool = False
    """A row is a whole step: each field holds a list over its samples."""
    unwrap: bool = False
    """Each value stands in a list of length one."""
    pad: str | None = None
    sentinels: Mapping[str, str] = field(default_factory=dict)
    """field -> which stored values mean that there is none."""
    notes: tuple[str, ...] = ()
    distinctive: bool = True
    """Nothing else is called so: a damaged file of that name is this framework's all the same."""
    others: str | None = None
    """What every other number of a row is: a column of its own for each reward function."""
    one_per_task: bool = False
    """Thousands of small files of one step: the first is looked into, the others are known by name."""


#: What every table's pattern ends in: a folder of tensors is passed over without its names being matched.
_SUFFIXES = frozenset({".jsonl", ".parquet"})


class RowFiles:
    """A `RowSpec` at work."""

    def __init__(self, spec: RowSpec) -> None:
        self.spec = spec
        self._path, self._needs = regex(spec.file), frozenset(spec.needs.split())

    @property
    def dialect(self) -> Dialect:
        return Dialect(self.spec.name, "names", any_of(self._files), self.index, self.read, grows=r"\.jsonl$")

    def index(self, path: Path) -> Index:
        found = Index([], notes=list(self.spec.notes))
        entries = [(key, file) for file, match in self._files(path) for key in self._keys(file, match, found.problems)]
        found.files = told_apart(entries)
        if found.files != entries:
            found.notes.append("several files hold rows of one step: micro numbers them in the order of their names")
        return found

    def _files(self, path: Path) -> Iterator[tuple[Path, re.Match[str]]]:
        for folder in listing(path).folders:
            trusted, ours, unclear = False, False, []
            for name in names_with(folder, *_SUFFIXES):
                match = self._path.search(f"{folder.path}/{name}")
                if match is None:
                    continue
                file = folder.file(name)
                if trusted or self._is_ours(file):
                    trusted, ours = self.spec.one_per_task, True
                    yield file, match
                elif not _shows_its_fields(file):
                    unclear.append((file, match))
            if ours:  # an empty file, or one damaged at its start, is what its neighbours are
                yield from unclear

    def _is_ours(self, file: Path) -> bool:
        if file.suffix == ".parquet":
            return True
        row = first_row(file)
        if row is None or is_broken(row):
            return self.spec.distinctive
        if not self._needs <= row.keys():
            return False
        return self.spec.unwrap or self._is_columnar(row) == self.spec.columnar

    def _is_columnar(self, row: Mapping[str, Any]) -> bool:
        return all(isinstance(row[name], list) for name in self._needs if name not in ("step", "global_step"))

    def _keys(self, file: Path, match: re.Match[str], problems: list[Problem]) -> list[RecordKey]:
        groups = match.groupdict()
        role = "eval" if groups.get("eval") else self.spec.role
        rank, step = _number(groups.get("rank")), _number(groups.get("step"))
        if step is not None or self.spec.step_field is None:
            return [RecordKey(step, None, rank, role, self.spec.stage)]
        try:
            rows = rows_by_place(file, (self.spec.step_field,))
        except RldbgError as error:
            problems.append(Problem(str(file), error.message))
            return [RecordKey(None, None, rank, role, self.spec.stage)]
        problems += rows.problems
        steps = sorted({row.places[0] for row in rows.rows}, key=lambda step: (step is not None, step or 0))
        return [RecordKey(step, None, rank, role, self.spec.stage) for step in steps]

    def read(self, key: RecordKey, path: Path) -> list[TensorRef]:
        """The record's rows as columns.

        Raises:
            DumpError: no row of the record can be read.
        """
        if path.suffix == ".parquet":
            content = read_container(path)
            return Fields(self._named(flatten(content.tree)), (Problem(str(path), what) for what in content.problems))
        return self._rows(key, path)

    def _rows(self, key: RecordKey, path: Path) -> Fields:
        field = self.spec.step_field
        rows = rows_by_place(path, (field,) if field else ())
        chosen = rows.of(key.step) if field and rows.is_placed else rows.rows
        problems = list(rows.problems)
        samples = decoded(path, chosen, problems)
        if self.spec.columnar:
            fields = _columnar(list(samples), path, problems)
        else:
            fields = table_of(samples, _unwrapped if self.spec.unwrap else None)
        if not fields:
            found = problems[0].what if problems else None
            raise DumpError("no row of the record can be read", file=str(path), found=found)
        return Fields(self._named(fields), problems)

    def _named(self, fields: list[TensorRef]) -> list[TensorRef]:
        answer = []
        for ref in named(fields, self.spec.words, self.spec.pad):
            sentinel = self.spec.sentinels.get(ref.name)
            both = "; ".join(part for part in (sentinel, ref.sentinel) if part)
            is_other = self.spec.others and ref.name not in self.spec.words and _is_number_each(ref)
            answer.append(ref.with_(
                sentinel=both or None, alignment=ref.alignment or _sample(ref),
                canonical=f"{self.spec.others}.{ref.name}" if is_other else ref.canonical,
            ))  # fmt: skip
        return ragged_alike(answer)


def _shows_its_fields(file: Path) -> bool:
    row = first_row(file)
    return row is not None and not is_broken(row)


def table_of(
    samples: Iterator[dict[str, Any]], prepare: Callable[[dict[str, Any]], dict[str, Any]] | None = None
) -> list[TensorRef]:
    """Samples as columns, one row held at a time."""
    table = Table()
    for sample in samples:
        table.add(prepare(sample) if prepare else sample)
    return [ref.with_(order=order) for order, ref in enumerate(table.fields().values())]


def _columnar(samples: list[dict[str, Any]], path: Path, problems: list[Problem]) -> list[TensorRef]:
    if len(samples) > 1:
        problems.append(Problem(str(path), f"{len(samples)} lines hold this step; the last one is shown"))
    if not samples:
        return []
    # A reward that a sample has none of is null: still a value per sample.
    return flatten({name: columns({name: value})[0] if _lacks_some(value) else value
                    for name, value in samples[-1].items()})  # fmt: skip


def _lacks_some(value: Any) -> bool:
    return isinstance(value, list) and None in value and any(one is not None for one in value)


def _unwrapped(sample: dict[str, Any]) -> dict[str, Any]:
    return {name: value[0] if isinstance(value, list) and len(value) == 1 else value for name, value in sample.items()}


def _sample(ref: TensorRef) -> str | None:
    """A value per row, where the table says nothing else."""
    return "sample" if len(ref.shape) == 1 and ref.rows is None else None


#: Numbers of a row that are bookkeeping, whatever else a table holds.
_COUNTS = frozenset({"step", "global_step", "gen_step", "epoch", "index", "sample_index", "rank"})


def _is_number_each(ref: TensorRef) -> bool:
    """Whether it is one number of each row, and none that counts them."""
    is_column = len(ref.shape) == 1 and ref.rows is None and not ref.is_text
    return is_column and ref.dtype.startswith(("float", "int")) and ref.name not in _COUNTS


def _number(text: str | None) -> int | None:
    return None if text is None else int(text)
