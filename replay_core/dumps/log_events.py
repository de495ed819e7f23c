"""What a log tells beside its numbers: out of memory, recompiles, graph breaks, warnings of the trainer.

Every event keeps its own words; what the words mean is for the reader of the run to say.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass

from replay_core.dumps.log_lines import LogLine

#: Events of one kind that are kept word by word; the rest are counted.
KEPT = 200
_FRAMES = 12
_LONGEST = 2000

_PATTERNS: tuple[tuple[str, re.Pattern[str]], ...] = (
    # torch's CUDA allocator, torch's CPU allocator, Ray's memory monitor, the kernel.
    ("oom", re.compile(r"(?:CUDA|HIP|NPU|XPU) out of memory\. Tried to allocate")),
    (
        "oom_host",
        re.compile(r"can't allocate memory: you tried to allocate|ray\.exceptions\.OutOfMemoryError|oom-kill"),
    ),
    ("recompile_limit", re.compile(r"torch\._dynamo hit config\.(?:\w*recompile_limit|\w*cache_size_limit)")),
    ("recompile", re.compile(r"Recompiling function \S+ in ")),
    ("graph_break", re.compile(r"Graph break (?:in user code|from|due to|:)|Graph Break Reason")),
    (
        "not_finite",
        re.compile(r"grad_norm is not finite|Gradient overflow|found (?:NaN|Inf|nan|inf) in", re.IGNORECASE),
    ),
    ("traceback", re.compile(r"^(?:[\w.]+\.)?(?:\w+Error|\w+Exception): ")),
)
KINDS = tuple(kind for kind, _ in _PATTERNS)
#: A cheap look before the patterns: most lines of a log hold none of these.
_ANY = re.compile(
    r"out of memory|OutOfMemory|allocate memory|oom-kill|torch\._dynamo hit|Recompiling|[Gg]raph [Bb]reak"
    r"|not finite|Gradient overflow|found (?i:nan|inf)|Error: |Exception: "
)
_FRAME = re.compile(r'^\s*File "[^"]+", line \d+, in ')


@dataclass(frozen=True, slots=True)
class Event:
    """One thing the log tells: its kind, its words, and the frames of the traceback that led to it."""

    kind: str
    text: str
    line: int
    rank: int | None
    frames: tuple[str, ...] = ()


class Watch:
    """Looks at every line; hands out what is an event."""

    def __init__(self) -> None:
        self._frames: dict[str, deque[str]] = {}
        self._code_follows: set[str] = set()

    def event(self, line: LogLine) -> Event | None:
        """The line as an event, if it is one."""
        if _FRAME.match(line.text) or line.stream in self._code_follows:
            kept = self._frames.setdefault(line.stream, deque(maxlen=_FRAMES))
            kept.append(line.text.strip()[:200])
            self._code_follows ^= {line.stream}
            return None
        if not _ANY.search(line.text):
            return None
        for kind, pattern in _PATTERNS:
            if pattern.search(line.text):
                frames = tuple(self._frames.pop(line.stream, ())) if kind in ("oom", "oom_host", "traceback") else ()
                return Event(kind, line.text.strip()[:_LONGEST], line.number, line.rank, frames)
        return None
