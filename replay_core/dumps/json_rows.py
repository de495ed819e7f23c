"""Which rows of a JSON-lines file belong to which record, found without decoding them.

A file of rollouts holds many steps, a token export many micro-batches. One pass notes where every line
lies and the few numbers that place it; a record then decodes its own lines only. Standard library alone.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from msgspec import Struct

from replay_core.budget import reading
from replay_core.dumps.containers.json_lines import (
    NAMED_LINES,
    NoJsonError,
    damaged_line,
    decode,
    decode_rows,
    file_region,
    lines_of,
)
from replay_core.dumps.listing import Folder
from replay_core.errors import DumpError
from replay_core.file_spans import kept_while_unchanged, regular
from replay_core.records import Problem
from replay_core.regexes import regex

#: A first row longer than this is decoded all the same, but not to find out what a file is.
MAX_FIRST_ROW = 1 << 26
#: Bytes of short lines that are read together.
_AT_ONCE = 1 << 16


class Row(Struct, frozen=True):
    """Where one line lies, its number in the file, and the numbers asked for (None: it has no such field)."""

    offset: int
    nbytes: int
    number: int
    places: tuple[int | None, ...]


class JsonRows(Struct, frozen=True, dict=True):
    """Every line of a file, and what is wrong with some."""

    rows: tuple[Row, ...]
    problems: tuple[Problem, ...]

    @cached_property
    def _by_place(self) -> dict[int | None, list[Row]]:
        placed: dict[int | None, list[Row]] = {}
        for row in self.rows:
            placed.setdefault(row.places[0] if row.places else None, []).append(row)
        return placed

    @property
    def is_placed(self) -> bool:
        """Whether a line says where it belongs."""
        return any(place is not None for place in self._by_place)

    def of(self, place: int | None) -> tuple[Row, ...]:
        """The lines whose first number is that one. A file may hold a record for every line."""
        return tuple(self._by_place.get(place, ()))


def names_with(folder: Folder, *suffixes: str) -> list[str]:
    """The folder's names that end so. Of ten thousand tensor files none is looked at."""
    if folder.suffixes.isdisjoint(suffixes):
        return []
    return [name for name in folder.names if name.endswith(suffixes)]


def first_row(path: Path) -> dict[str, Any] | None:
    """The first line's mapping; None where it is none. Reads that line only.

    A file cut inside its first line still shows the fields that the line begins with.
    """
    try:
        return _first_row(path)
    except DumpError:
        return None


@kept_while_unchanged(256)
def _first_row(path: Path) -> dict[str, Any] | None:
    with regular(path) as file:
        line = file.readline(MAX_FIRST_ROW)
        while line and not line.strip():
            line = file.readline(MAX_FIRST_ROW)
    if not line.lstrip().startswith(b"{"):
        return None
    try:
        value = json.loads(line)
    except RecursionError:
        return None
    except ValueError:
        return dict.fromkeys(_KEY.findall(line[:65536].decode(errors="replace"))) or None
    return value if isinstance(value, dict) else None


_KEY = regex(r'"(\w+)"\s*:')


def is_broken(row: dict[str, Any]) -> bool:
    """Whether a first row is only the names that a damaged line begins with."""
    return all(value is None for value in row.values())


@kept_while_unchanged(64)
def rows_by_place(path: Path, fields: tuple[str, ...]) -> JsonRows:
    """Every line with the numbers of `fields`, which say what record it belongs to.

    Raises:
        DumpError: the file cannot be opened, or holds no line.
    """
    wanted = [(_number_of(field), f'"{field}"'.encode(), field) for field in fields]
    region = file_region(path)
    rows: list[Row] = []
    damaged: list[str] = []
    try:
        with reading(path):
            for number, (offset, line, ended) in enumerate(lines_of(region), 1):
                text = line.strip()
                if not (text.startswith(b"{") and text.endswith(b"}")):
                    damaged.append(damaged_line(number, line, ended, "it is no mapping from { to }"))
                    continue
                # A word that is not there is found sooner than a pattern.
                places = tuple([_place(*one, text) if one[1] in text else None for one in wanted])
                rows.append(Row(offset, len(line), number, places))
    finally:
        os.close(region.fd)
    if not rows:
        raise DumpError(
            "the file holds no row", file=str(path), expected="a JSON mapping in a line",
            found=damaged[0] if damaged else "an empty file",
        )  # fmt: skip
    more = [f"{len(damaged) - NAMED_LINES} more lines are damaged"] if len(damaged) > NAMED_LINES else []
    return JsonRows(tuple(rows), tuple(Problem(str(path), what) for what in damaged[:NAMED_LINES] + more))


def _number_of(field: str) -> re.Pattern[bytes]:
    """Finds the field's number, also the first of a list, as a text, and before a slash: 9, [9, 9], "9", "9/547"."""
    return re.compile(rb'"' + re.escape(field.encode()) + rb'"\s*:\s*(?:\[\s*)?"?(-?\d{1,18})(?=\s*["/,\]}])')


def _place(pattern: re.Pattern[bytes], _quoted: bytes, field: str, text: bytes) -> int | None:
    """The line's number of a field. Inside texts quotes are escaped, so only nested mappings can mislead."""
    found = pattern.findall(text)
    if len(found) == 1:
        return int(found[0])
    if not found:
        return None
    try:
        value, _ = decode(text)
    except NoJsonError:
        return int(found[0])
    number = value.get(field) if isinstance(value, dict) else None
    return number if isinstance(number, int) and not isinstance(number, bool) else None


def decoded(path: Path, rows: Sequence[Row], problems: list[Problem]) -> Iterator[dict[str, Any]]:
    """The mappings of some lines, one held at a time. What cannot be decoded goes to `problems`.

    Raises:
        DumpError: the file cannot be opened, or has become shorter.
    """
    for _, value in numbered(path, rows):
        if isinstance(value, Problem):
            problems.append(value)
        else:
            yield value


def numbered(path: Path, rows: Sequence[Row]) -> Iterator[tuple[int, dict[str, Any] | Problem]]:
    """(number, mapping) of some lines, one held at a time; a problem in the place of what is none.

    Raises:
        DumpError: the file cannot be opened, or has become shorter.
    """
    region = file_region(path)
    try:
        for together in _beside(rows):
            start = together[0].offset
            text = region.read(start, together[-1].offset + together[-1].nbytes - start)
            values = decode_rows(text, len(together))
            if values is not None and set(map(type, values)) == {dict}:
                yield from zip([row.number for row in together], values, strict=True)
                continue
            for row in together:
                at = row.offset - start
                try:
                    value, _ = decode(text[at : at + row.nbytes])
                except NoJsonError as error:
                    yield row.number, Problem(str(path), damaged_line(row.number, b"", True, str(error)))
                    continue
                if isinstance(value, dict):
                    yield row.number, value
                else:
                    yield row.number, Problem(str(path), f"line {row.number} is no mapping and was left out")
    finally:
        os.close(region.fd)


def _beside(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Rows that lie one after the other, at most so many bytes that reading them at once is no burden."""
    together: list[Row] = []
    end = held = 0
    for row in rows:
        if together and (row.offset - end not in range(3) or held + row.nbytes > _AT_ONCE):
            yield together
            together, held = [], 0
        together.append(row)
        end, held = row.offset + row.nbytes, held + row.nbytes
    if together:
        yield together
