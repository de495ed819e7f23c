"""A folder of JSON lines nobody's table knows, whose rows hold arrays: columns under the names they have.

Where no name says a step and the rows do, each step is a record.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from replay_core.dumps.containers import read_container
from replay_core.dumps.dialect import Dialect, Index
from replay_core.dumps.fields import flatten, ragged_alike
from replay_core.dumps.file_places import STEP_FIELDS, step_within, told_apart
from replay_core.dumps.json_rows import decoded, first_row, names_with, rows_by_place
from replay_core.dumps.listing import listing
from replay_core.dumps.row_dialect import table_of
from replay_core.dumps.words import named
from replay_core.errors import DumpError, RldbgError
from replay_core.records import Fields, Problem, RecordKey, TensorRef
from replay_core.regexes import regex

_PLACES = {
    "step": regex(r"(?:step|rollout|iter)[_=-]?(\d{1,12})", re.IGNORECASE),
    "rank": regex(r"rank[_=-]?(\d{1,9})", re.IGNORECASE),
    "micro": regex(r"micro(?:_?(?:batch|step|idx))?[_=-]?(\d{1,9})", re.IGNORECASE),
}

#: How often rows that count turns begin anew, at least; a run that is resumed does so once.
AGAIN = 2

NAMED = "no framework writes such files: step, rank and micro are what the file names say, else the step of each row"
NUMBERED = "files that name no step of their own are numbered as micro, in the order of their names"


def detect(path: Path) -> bool:
    return path.is_dir() and next(_files(path), None) is not None


def _files(path: Path) -> Iterator[Path]:
    for folder in listing(path).folders:
        for file in names_with(folder, ".jsonl", ".ndjson"):
            if _holds_arrays(first_row(folder.file(file))):
                yield folder.file(file)


def _holds_arrays(row: dict[str, Any] | None) -> bool:
    return row is not None and any(
        isinstance(value, list) and any(isinstance(item, (int, float, list)) for item in value)
        for value in row.values()
    )


def index(path: Path) -> Index:
    found = Index([], notes=[NAMED])
    named_so = [(key, file) for file in _files(path) for key in _keys(file)]
    found.files = told_apart(named_so)
    if found.files != named_so:
        found.notes.append(NUMBERED)
    return found


def _keys(file: Path) -> list[RecordKey]:
    """A record for each step that the file's rows say where its name says none; else the file is one record."""
    key, field = _key(file), _step_field(file)
    if field is None:
        return [key]
    try:
        rows = rows_by_place(file, (field,))
    except RldbgError:  # what is wrong with the file is said when it is read
        return [key]
    steps = {row.places[0] for row in rows.rows}
    return [replace(key, step=step) for step in sorted(steps, key=lambda step: (step is not None, step or 0))]


def _counts_something_else(file: Path, field: str) -> bool:
    """Whether the rows count from the beginning over and over: turns of trajectories, and no steps of a training. Or
    whether each rollout is one row, of a sample's tokens: a number of its own is a sample's.
    """
    try:
        numbers = [row.places[0] for row in rows_by_place(file, (field,)).rows]
    except RldbgError:  # what is wrong with the file is said when it is read
        return False
    if field == "rollout_id" and len(set(numbers)) == len(numbers) > 1 and _is_of_one_sample(first_row(file)):
        return True
    first = numbers[0]
    return sum(now == first and before not in (first, None) for before, now in pairwise(numbers)) >= AGAIN


def _is_of_one_sample(row: dict[str, Any] | None) -> bool:
    """Whether a row has lists of numbers, and no list of lists."""
    lists = [value for value in (row or {}).values() if isinstance(value, list)]
    return bool(lists) and not any(isinstance(one, list) for value in lists for one in value[:1])


def _step_field(file: Path) -> str | None:
    """What the rows of a file whose name says no step call their step."""
    row = first_row(file)
    if row is None or _key(file).step is not None:
        return None
    field = next((name for name in STEP_FIELDS if step_within({name: row.get(name)}) is not None), None)
    return None if field is None or _counts_something_else(file, field) else field


def _key(file: Path) -> RecordKey:
    # The folder often names the step, the file the rank.
    text = f"{file.parent.name}/{file.name}"
    found = {part: pattern.findall(text) for part, pattern in _PLACES.items()}
    places = {part: int(numbers[-1]) if numbers else None for part, numbers in found.items()}
    return RecordKey(places["step"], places["micro"], places["rank"], None, "tensors")


def read(key: RecordKey, path: Path) -> list[TensorRef]:
    """The file's columns, or its one row's tree.

    Raises:
        DumpError: not one line of it can be read.
    """
    field = _step_field(path)
    if field is not None:
        rows = rows_by_place(path, (field,))
        problems = list(rows.problems)
        fields = table_of(decoded(path, rows.of(key.step), problems))
        if not fields:
            raise DumpError("no row of the record can be read", file=str(path))
        return Fields(ragged_alike(_by_neighbours(named(fields, {}))), problems)
    content = read_container(path)
    return Fields(
        ragged_alike(_by_neighbours(named(flatten(content.tree), {}))),
        (Problem(str(path), what) for what in content.problems),
    )


#: What engines call the tokens that they gave back.
_ANSWERS = ("output_token_ids", "output_ids", "output_tokens")


def _by_neighbours(fields: list[TensorRef]) -> list[TensorRef]:
    """Words that mean something by what stands beside them: an engine's output is the responses where the prompts are
    there and no row of both, `logprobs` are the trainer's beside the rollout's, and an `id` is the sample's where
    nothing else is.
    """
    known = [ref.canonical for ref in fields]
    said: dict[str, str] = {}
    if "prompt_ids" in known and "input_ids" not in known and "response_ids" not in known:
        said |= {next((ref.name for ref in fields if ref.name in _ANSWERS), ""): "response_ids"}
    if known.count("rollout_logprobs") > 1 and "policy_logprobs" not in known:
        said["logprobs"] = "policy_logprobs"
    if "sample_id" not in known:
        said["id"] = "sample_id"
    return [ref.with_(canonical=said[ref.name]) if ref.name in said else ref for ref in fields]


DIALECT = Dialect("file", "rest", detect, index, read, grows=r"\.(?:jsonl|ndjson)$")
