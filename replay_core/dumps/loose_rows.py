"""A folder of JSON lines nobody's table knows, whose rows hold arrays: columns under the names they have."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from replay_core.dumps.containers import read_container
from replay_core.dumps.dialect import Dialect, Index
from replay_core.dumps.fields import flatten
from replay_core.dumps.file_places import told_apart
from replay_core.dumps.json_rows import first_row, names_with
from replay_core.dumps.listing import listing
from replay_core.dumps.words import named
from replay_core.records import Fields, Problem, RecordKey, TensorRef
from replay_core.regexes import regex

_PLACES = {
    "step": regex(r"(?:step|rollout|iter)[_=-]?(\d{1,12})", re.IGNORECASE),
    "rank": regex(r"rank[_=-]?(\d{1,9})", re.IGNORECASE),
    "micro": regex(r"micro(?:_?(?:batch|step|idx))?[_=-]?(\d{1,9})", re.IGNORECASE),
}

NAMED = "no framework writes such files: step, rank and micro are what the file names say"
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
    named_so = [(_key(file), file) for file in _files(path)]
    found.files = told_apart(named_so)
    if found.files != named_so:
        found.notes.append(NUMBERED)
    return found


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
    content = read_container(path)
    return Fields(named(flatten(content.tree), {}), (Problem(str(path), what) for what in content.problems))


DIALECT = Dialect("file", "rest", detect, index, read, grows=r"\.(?:jsonl|ndjson)$")
