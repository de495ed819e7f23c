"""What a log tells beside its numbers: out of memory, how a run died, recompiles, graph breaks.

Every event keeps its own words; what the words mean is for the reader of the run to say.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass

from replay_core.dumps.log_lines import TrainerLine
from replay_core.regexes import regex

#: Events of one kind that are kept word by word; the rest are counted.
KEPT = 200
_FRAMES = 12
_LONGEST = 2000

#: Compiled when a line asks for them (`re` keeps them): listing a dump of tensors never does.
_PATTERNS: tuple[tuple[str, str], ...] = (
    # torch's CUDA allocator, torch's CPU allocator, Ray's memory monitor, the kernel.
    ("oom", r"(?:CUDA|HIP|NPU|XPU) out of memory\. Tried to allocate"),
    (
        "oom_host",
        r"can't allocate memory: you tried to allocate|ray\.exceptions\.OutOfMemoryError|OOMKilled"
        r"|oom[-_]kill(?:er)?:|oom[-_]kill event"
        r"|[Oo]ut of memory: Killed process",
    ),
    # A collective that a rank waited for in vain: torch's watchdog, NCCL's own results.
    (
        "nccl",
        r"Watchdog caught collective operation timeout|[Ww]atchdog (?:thread terminated|got stuck)"
        r"|Heartbeat monitor timed out|Some NCCL operations have failed or timed out|NCCL error[: ]"
        r"|nccl(?:UnhandledCuda|System|Internal|Remote)Error|detected by watchdog at work",
    ),
    (
        "cuda_error",
        r"(?:CUDA|HIP|NPU|XPU|cuDNN|cuBLAS)(?: kernel)?(?: driver)? error: |CUBLAS_STATUS_(?!SUCCESS)[A-Z]"
        r"|[Dd]evice-side assert triggered|NVRM: Xid|CUDA error \d+",
    ),
    # torchrun's agent, the shell, Python's fault handler, C++, Slurm; a word in a sentence is none of them.
    (
        "killed",
        r"closing signal SIG[A-Z]+|Closing process \d+ via signal SIG|Received \d+ death signal"
        r"|Signal \d+ \(SIG[A-Z]+\) received by PID|got signal: \d+|failed \(exitcode: -?\d+\)"
        r"|\b(?:[Rr]eceived|[Cc]aught|[Gg]ot|[Tt]erminated by|[Kk]illed by)(?: signal)?:? SIG[A-Z]{2,5}\b"
        r"|^\W*SIG(?:TERM|KILL|SEGV|ABRT|BUS|INT|HUP|XCPU)\b|\bSIG[A-Z]{2,5} received\b"
        r"|^(?:\S+: line \d+:\s+\d+ )?\s*(?:Killed|Terminated|Aborted|Segmentation fault|Bus error)"
        r"(?: \(core dumped\))?(?:\s{2,}.*)?$"
        r"|Fatal Python error: |terminate called (?:after throwing|without an active)"
        r"|slurmstepd: error: .*CANCELLED|srun: error: .*: (?:Killed|Terminated|Exited with exit code)",
    ),
    ("recompile_limit", r"torch\._dynamo hit config\.(?:\w*recompile_limit|\w*cache_size_limit)"),
    ("recompile", r"Recompiling function \S+ in "),
    ("graph_break", r"Graph break (?:in user code|from|due to|:)|Graph Break Reason"),
    # What a process says again and again while it waits for another.
    ("waiting", r"(?i)\b(?:still )?waiting (?:for|on|until)\b|\bno progress (?:for|in|since)\b|\bblocked (?:on|for)\b"),
    ("negative_kl", r"KL divergence is starting to become negative: -?\d"),
    (
        "not_finite",
        r"(?i)grad_norm is not finite|Gradient overflow|found (?:nan|inf) in",
    ),
    ("traceback", r"^(?:[\w.]+\.)?(?:\w+Error|\w+Exception)(?:\(\w+\))?: |^\W*EXC\b"),
)
KINDS = tuple(kind for kind, _ in _PATTERNS)
#: Of these a run dies, and the frames that led there are kept.
DEATHS = ("oom", "oom_host", "nccl", "cuda_error", "killed", "traceback")
#: A cheap look before the patterns: most lines of a log hold none of these.
HINT = regex(
    r"[Oo]ut of memory|OutOfMemory|allocate memory|oom[-_]kill|OOMKilled|torch\._dynamo hit|Recompiling"
    r"|[Gg]raph [Bb]reak|not finite|Gradient overflow|found (?:[Nn]a[Nn]|[Ii]nf|NAN|INF)"
    r"|Error|Exception|EXC\b|Traceback|SIG[A-Z]|[Ss]ignal|[Ww]atchdog|Heartbeat|NCCL|nccl"
    r"|CUDA error|[A-Z] error: |CUBLAS|assert triggered|Xid|exitcode|core dumped|CANCELLED"
    r"|[Ww]aiting (?:for|on|until)|[Nn]o progress|[Bb]locked (?:on|for)|KL divergence is starting"
    r"|Killed|Terminated|Aborted|Segmentation|Bus error|Fatal Python|terminate called|srun: error"
)
_FRAME = regex(r'^\s*File "[^"]+", line \d+, in ')
_BEGINS = "Traceback (most recent call last)"
#: What Python says of an exception that ends nothing.
_HARMLESS = "Exception ignored in"


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
        #: Streams that are inside a traceback, and whether its exception ends nothing.
        self._inside: dict[str, bool] = {}
        self._harmless: set[str] = set()

    def event(self, line: TrainerLine) -> Event | None:
        """The line as an event, if it is one."""
        is_frame, is_indented = _FRAME.match(line.text), line.text[:1].isspace()
        if is_frame or (is_indented and line.stream in self._code_follows):
            kept = self._frames.setdefault(line.stream, deque(maxlen=_FRAMES))
            kept.append(line.text.strip()[:200])
            (self._code_follows.add if is_frame else self._code_follows.discard)(line.stream)
            return None
        self._code_follows.discard(line.stream)
        is_exception = line.stream in self._inside and not is_indented
        if not is_exception and not HINT.search(line.text):
            return None
        if _BEGINS in line.text:
            self._inside[line.stream] = line.stream in self._harmless
            self._harmless.discard(line.stream)
            self._frames.pop(line.stream, None)
            return None
        if line.text.lstrip().startswith(_HARMLESS):
            self._harmless.add(line.stream)
            return None
        if is_exception and self._inside.pop(line.stream):
            return None
        kind = next((kind for kind, pattern in _PATTERNS if re.search(pattern, line.text)), None)
        if kind is None and is_exception:
            kind = "traceback"
        if kind is None:
            return None
        frames = tuple(self._frames.pop(line.stream, ())) if kind in DEATHS else ()
        return Event(kind, line.text.strip()[:_LONGEST], line.number, line.rank, frames)
