"""The lines of a text log as their program wrote them, whatever stood between it and the file.

    (TaskRunner pid=812, ip=10.0.0.7) step:1 - ...     Ray
    (Server pid=7) (EngineCore_DP0 pid=9) ERROR ...    Ray, and an engine of its actor's
    [rank1]: {'loss': 0.1}                             torchrun, torch's own tracebacks
    \\x1b[36m(pid=3)\\x1b[0m ...                         colours
    Epoch 1:  10%|#   |\\rEpoch 1:  20%|##  |           tqdm: one line of the file, several of the program
    2025-11-26T15:19:51.393857013Z step:1 - ...        docker and kubectl logs --timestamps

Lines are numbered as an editor numbers them: by newlines, from 1. What several processes wrote is interleaved;
each is a *stream*, and what is counted is counted within its stream.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from replay_core.budget import spend_bytes
from replay_core.file_spans import regular
from replay_core.regexes import regex

#: Past this a line is no line of a log: it is read in pieces.
MAX_LINE = 1 << 16
#: Lines that are longer are paid for by their bytes.
_LONG = 1 << 12

_ANSI = regex(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]{0,200}\x07")
_RAY = regex(r"^\s*\(([^()]{0,80}?)\s?pid=(\d{1,10})(?:,[^()]{0,120})?\)\s?")
_RANK = regex(r"^\s*\[(?:rank|default|Rank |RANK )\s?(\d{1,6})\]:?\s?")


#: What `srun --label` puts before every line: the number of its task. How much is looked at, and how many lines of it.
_LABEL = regex(r"^\s{0,4}(\d{1,4}):(?: |$)")
_HEAD, _FEWEST = 1 << 14, 8
#: A bar that tells nothing but how far it is: no number before it, none behind its times; not one at its beginning.
_DRAWN = regex(
    r"^[^|=\d]{0,80}\d{1,3}%\|[^|]{0,200}\| ?[1-9][\d.,]{0,12}\w?/[\d.,]{1,12}\w? \[[\d:]+<[\d:?]+, [^,\]]{0,30}\]\s*$"
)


def _is_labelled(head: bytes) -> bool:
    """Whether nearly all of a file's first lines begin with a task's number."""
    lines = [line for line in head.decode(errors="replace").splitlines()[:200] if line.strip()]
    return len(lines) >= _FEWEST and sum(_LABEL.match(line) is not None for line in lines) > 0.9 * len(lines)


#: What a container's runtime puts before every line (`docker logs --timestamps`, `kubectl logs --timestamps`).
_STAMP = regex(r"^(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6,9}(?:Z|[+-]\d\d:\d\d)) ?(?:std(?:out|err) [FP] )?")


def _is_stamped(head: bytes) -> bool:
    """Whether nearly all of a file's first lines begin with a container's clock."""
    lines = [line for line in head.decode(errors="replace").split("\n")[:200] if line.strip()]
    return len(lines) >= _FEWEST and sum(_STAMP.match(line) is not None for line in lines) > 0.9 * len(lines)


_STRAIGHT = {0x2018: "'", 0x2019: "'", 0x201C: '"', 0x201D: '"'}


class TrainerLine(Struct, frozen=True):
    """One line of one process. `stream` is empty where the line names none."""

    number: int
    text: str
    stream: str = ""
    rank: int | None = None
    stamp: str = ""
    """The clock that a container's runtime has put before it."""
    bar: str = ""
    """The last bar that was drawn on the line before it, and wiped away."""


def is_text(head: bytes) -> bool:
    """Whether a file's first bytes are text. A log may hold NUL bytes: a disk that lost power leaves them, and so does
    a shell that writes UTF-16.
    """
    text = head.removeprefix(b"\xff\xfe").translate(None, b"\0")
    if b"\0" in head and b"\n" not in text:
        return False
    try:
        # A character may be cut at the end of what was read: an incremental decoder waits for the rest of it.
        return bool(getincrementaldecoder("utf-8")().decode(text) or text)
    except UnicodeDecodeError:
        return False


def lines_of(path: Path) -> Iterator[TrainerLine]:
    """Every line that holds something, in file order.

    Raises:
        DumpError: the file cannot be read.
    """
    number = 1
    with regular(path) as file:
        head = file.read(_HEAD)
        labelled, stamped = _is_labelled(head), _is_stamped(head)
        file.seek(0)
        for raw in iter(lambda: file.readline(MAX_LINE), b""):
            if len(raw) > _LONG:
                spend_bytes(len(raw), "lines of a log")  # the hole of a sparse file has no end
            text, stamp = raw.translate(None, b"\0").decode(errors="replace"), ""
            if stamped and (found := _STAMP.match(text)) is not None:
                text, stamp = text[found.end() :], found[1]
            pieces, bar = text.rstrip("\r\n\t ").split("\r"), ""
            for at, piece in enumerate(pieces):
                # A bar that is drawn again says what the next one says.
                if at + 1 < len(pieces) and _DRAWN.match(piece):
                    bar = piece
                    continue
                if not piece.strip():
                    continue
                label = _LABEL.match(piece) if labelled else None
                line = line_of(number, piece[label.end() :] if label else piece)
                if label is not None:
                    line = replace(line, stream=f"{label[1]}:{line.stream}")
                yield replace(line, stamp=stamp, bar=bar) if stamp or bar else line
            number += raw.endswith(b"\n")


def line_of(number: int, text: str) -> TrainerLine:
    """The line without colours and without the prefix that names its process."""
    # Most lines have none of these: to ask for a character is a tenth of asking for an expression.
    text = (_ANSI.sub("", text) if "\x1b" in text else text).rstrip()
    if "\u2018" in text or "\u201c" in text:
        text = text.translate(_STRAIGHT)  # a word processor's quotes, as mail and chat make them
    stream, rank = "", None
    begins = text.lstrip()[:1]
    # An engine that an actor of Ray has started names its own process behind the actor's.
    while begins == "(" and (match := _RAY.match(text)):
        stream, text = f"{stream}:{match.group(2)}" if stream else match.group(2), text[match.end() :]
        begins = text.lstrip()[:1]
    if begins == "[" and (match := _RANK.match(text)):
        rank = int(match.group(1))
        stream, text = f"{stream}/{rank}", text[match.end() :]
    return TrainerLine(number, text, stream, rank)
