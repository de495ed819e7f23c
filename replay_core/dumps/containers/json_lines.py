"""JSON: one document, or one per line. Bare NaN and Infinity are read, as the frameworks write them.

Several lines become columns (`columns.py`), a line at a time. A line cut short, the mark of a writer that
was stopped or still writes, costs that line and is a problem; it does not end the file.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from replay_core.budget import spend_bytes
from replay_core.dumps.containers.columns import Table
from replay_core.dumps.containers.loading import Loading
from replay_core.dumps.containers.region import Region
from replay_core.errors import DumpError
from replay_core.file_spans import open_regular, regular

#: One line of a dump; NexRL writes a whole micro-batch as one.
MAX_LINE = 1 << 30
#: A document over several lines is read whole.
MAX_DOCUMENT = 1 << 28
#: Damaged lines that are named one by one.
NAMED_LINES = 5
#: A log may look like JSON at its first character.
HOPELESS = 1000
#: A description that is nested deeper ends in the stacks of whoever walks it.
MAX_DEPTH = 64
_BLOCK = 1 << 20

NAN_NOTE = "bare NaN or Infinity, which strict JSON does not know, stands for itself"


class NoJsonError(ValueError):
    """The text is no JSON; its text says why."""


def decode(text: bytes) -> tuple[Any, bool]:
    """The value of a JSON text, and whether it held a bare NaN or Infinity.

    Raises:
        NoJsonError: it is no JSON, or nested deeper than Python recurses.
    """
    fast, refused = _fast()
    if fast is not None:
        try:
            return fast(text), False
        except RecursionError:
            raise NoJsonError("nested too deeply") from None
        except refused:
            pass
    _own.constants = 0
    try:
        # A mapping whose second byte is one is in UTF-8: to ask again costs as much as to decode a short line.
        encoding = "utf-8" if text[:1] == b"{" and text[1:2] > b"\0" else json.detect_encoding(text)
        return _own.decoder.decode(text.decode(encoding, "surrogatepass")), bool(_own.constants)
    except RecursionError:
        raise NoJsonError("nested too deeply") from None
    except ValueError as error:
        raise NoJsonError(str(error)) from None


def decode_rows(text: bytes, count: int) -> list[Any] | None:
    """The values of so many lines, each a mapping from { to }; None where they have to be looked at one by one."""
    lines, refused = _fast_lines()
    if lines is None:
        return None
    try:
        values = lines(text)
    except refused:
        return None
    except RecursionError:
        return None
    return values if len(values) == count else None


class _Tolerant(threading.local):
    """Python's own decoder, made once in a thread: a log may say NaN in every line."""

    def __init__(self) -> None:
        self.constants = 0
        self.decoder = json.JSONDecoder(parse_constant=self._constant)

    def _constant(self, word: str) -> float:
        self.constants += 1
        return float(word)


_own = _Tolerant()


@cache
def _fast() -> tuple[Callable[[bytes], Any] | None, tuple[type[Exception], ...]]:
    """msgspec's decoder, and what it raises; None for a trainer that drives itself from a dump with rldbg alone."""
    try:
        import msgspec  # 10 ms; opening by names decodes nothing
    except ImportError:
        return None, ()
    return msgspec.json.decode, (msgspec.MsgspecError, UnicodeDecodeError)


@cache
def _fast_lines() -> tuple[Callable[[bytes], list[Any]] | None, tuple[type[Exception], ...]]:
    """The same of many lines."""
    fast, refused = _fast()
    if fast is None:
        return None, ()
    import msgspec

    return msgspec.json.Decoder().decode_lines, refused


def lines_of(region: Region) -> Iterator[tuple[int, bytes, bool]]:
    """(offset, line, whether it ends) of every line that is not blank, one held at a time.

    Raises:
        DumpError: a line longer than any dump's.
    """
    parts: list[bytes] = []
    held, start, at = 0, region.start, region.start
    while at < region.end:
        block = region.read(at, min(_BLOCK, region.end - at))
        at += len(block)
        *ended, rest = block.split(b"\n")
        for piece in ended:
            line = b"".join([*parts, piece]) if parts else piece
            parts, held = [], 0
            if line.strip():
                yield start, line, True
            start += len(line) + 1
        if rest:
            parts.append(rest)
            held += len(rest)
            spend_bytes(len(rest), "one line")
        if held > MAX_LINE:
            raise DumpError(
                "one line is longer than any dump's", file=str(region.path), expected=f"at most {MAX_LINE:,} bytes"
            )
    line = b"".join(parts)
    if line.strip():
        yield start, line, False


def _rows(loading: Loading) -> Iterator[Any]:
    """Every line's value. A line that is none is a problem; bare NaNs are noted, once.

    Raises:
        DumpError: the file begins with `HOPELESS` lines that are no JSON; it is not read to its end.
    """
    problem, note = loading.problems.append, loading.note
    damaged = 0
    for number, (_, line, ended) in enumerate(lines_of(loading.region), 1):
        try:
            value, constants = decode(line)
        except NoJsonError as error:
            damaged += 1
            if damaged <= NAMED_LINES:
                problem(damaged_line(number, line, ended, str(error)))
            if number == damaged == HOPELESS:
                raise loading.malformed(
                    f"none of the first {HOPELESS:,} lines of the file is JSON; it was not read further",
                    expected="a JSON value in a line",
                    found=loading.problems[0],
                ) from None
            continue
        if constants:
            note(NAN_NOTE)
        yield value
    if damaged > NAMED_LINES:
        problem(f"{damaged - NAMED_LINES} more lines are no JSON")


def damaged_line(number: int, line: bytes, ended: bool, why: str) -> str:
    """What a reader must know of a line that could not be read."""
    if ended:
        return f"line {number} is no JSON and was left out: {why}"
    return f"the last line ({number}) is cut short after {len(line):,} bytes: its writer was stopped, or still writes"


def read_json(loading: Loading) -> Any:
    """A document's tree; for several lines of mappings, their columns.

    Raises:
        DumpError: not one line of it is JSON.
    """
    region = loading.region
    first = next(lines_of(region), None)
    if first is None:
        raise loading.malformed("the file holds only blank space", expected="JSON")
    _, line, ended = first
    if ended and not _is_json(line) and region.end - region.start <= MAX_DOCUMENT:
        # A document over several lines begins with one that is none.
        with suppress(NoJsonError):
            value, constants = decode(region.read(region.start, region.end - region.start))
            if constants:
                loading.note(NAN_NOTE)
            return value
    return _lines(loading)


def _lines(loading: Loading) -> Any:
    table, alone = Table(), None
    others: list[Any] = []
    for value in _rows(loading):
        alone = value if table.rows + len(others) == 0 else None
        if isinstance(value, dict):
            table.add(value)
        else:
            others.append(value)
        if table.rows + len(others) == loading.most_rows:
            loading.is_cut = True
            break
    if table.rows + len(others) == 0:
        raise loading.malformed(
            "no line of the file is JSON",
            expected="a JSON value in a line",
            found=loading.problems[0] if loading.problems else "nothing",
        )
    if alone is not None:
        return alone
    if others and table.rows:
        loading.problems.append(f"{len(others)} lines are no mappings and were left out")
    return table.fields() if table.rows else others


def _is_json(line: bytes) -> bool:
    try:
        decode(line)
    except NoJsonError:
        return False
    return True


def read_object(path: Path, what: str, limit: int) -> dict[str, Any]:
    """A JSON object that a dump is described by. `what` it is goes into the errors.

    Raises:
        DumpError: it cannot be read, is longer than `limit` bytes, or is no object.
    """
    try:
        with regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > limit:
                raise DumpError(f"{what} is too large", file=str(path), expected=f"at most {limit:,} bytes")
            text = file.read(size)
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DumpError(f"{what} is not JSON: {error}", file=str(path)) from None
    if not isinstance(document, dict):
        raise DumpError(f"{what} is not an object", file=str(path), found=type(document).__name__)
    if not _is_shallow(document):
        raise DumpError(f"{what} is nested too deeply", file=str(path), expected=f"at most {MAX_DEPTH} levels")
    return document


def _is_shallow(document: Any) -> bool:
    level = [document]
    for _ in range(MAX_DEPTH):
        inner = [value.values() if isinstance(value, dict) else value for value in level]
        level = [one for values in inner for one in values if isinstance(one, (dict, list))]
        if not level:
            return True
    return False


def file_region(path: Path) -> Region:
    """A file to read lines from; the caller closes `fd`.

    Raises:
        DumpError: it cannot be opened.
    """
    fd, size = open_regular(path)
    return Region(path, fd, 0, size)
