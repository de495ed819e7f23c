"""What a line of an end tells: why, or only that another process has ended; and which run of a file it ended.

    ends = of_the_last_run(log.events(*DEATHS), log)
    one = min(ends, key=tells)

A console that is appended to holds several starts of a program: what ended an earlier one is not why the last one
ended. A start is told by a launcher's, a tracker's or a shell's line; of a program that Ray runs, by its driver's end,
of which each run has one.
"""

from __future__ import annotations

import re

from replay_core.diagnose.failure_texts import failure_of
from replay_core.diagnose.signals import RunLog, Told
from replay_core.regexes import regex

#: What Ray says of a worker that is gone without a word: a list of what it may have been.
GUESSES = regex(r"Worker exit (?:type|detail): ")
#: An exception of another process, as the one that asked it tells it.
_RELAYED = regex(r"^Unhandled error|Ray(?:Task)?Error\b|TaskCancelledError|CancelledError|DistBackendError|^SystemExit")
#: NCCL's own failures that no other rank has caused.
_ALONE = regex(r"nccl(?:System|Internal|InvalidUsage|UnhandledCuda)\w*|invalid usage|unhandled (?:system|cuda) error")
#: How a process ends after a C++ exception or an assertion, which is told before it or by another line.
_ABORT = regex(
    r"terminate called|code:? 134\b|code(?: =|:)? -6\b|SIGABRT|exitcode\s*: -6\b|signal: 6\b|Signal 6\b|Received 6 "
    r"|\bAborted\b"
)
#: What a launcher or scheduler does to the others, and says of the one that failed.
_ENDED = regex(
    r"return code = [1-9]|code:? 143\b|SIGTERM|exitcode\s*: (?:-15|[1-9])|^\s*rank\s+: |signal: 15\b|Terminated"
    r"|Received 15 |Sending|[Ee]xit(?:ed with)? (?:exit )?code"
)
SIGKILL = regex(
    r"SIGKILL|code(?: =|:)? (?:137|-9)\b|[Tt]erminated by signal 9\b|exitcode\s*: -9|signal: 9\b|Killed|Received 9 "
)


def waited_in_vain(one: Told) -> bool:
    """Whether it tells of a collective that others did not come to."""
    return one.kind == "nccl" and "CUDA error" not in one.text and (_ALONE.search(one.text) is None)


def follows(one: Told) -> bool:
    """Whether a line only tells that another process has ended."""
    if one.kind == "killed":
        if GUESSES.search(one.text):
            return False
        if _ABORT.search(one.text):
            return True
        return SIGKILL.search(one.text) is None and _ENDED.search(one.text) is not None
    if one.kind in ("oom", "oom_host"):
        return False
    known = failure_of(said(one))
    return (known is not None and known.follows) or (known is None and _RELAYED.search(one.text) is not None)


def said(one: Told) -> str:
    """Its words without the frames; Ray's and torch's envelopes hold the cause behind them."""
    return one.text.splitlines()[0]


def weight(one: Told) -> int:
    """How little a line tells of the cause: 0 a particular text or an exception of any kind, 1 one that says how and
    not why, 2 a collective that others did not come to, 3 a consequence.
    """
    if follows(one):
        return 3
    if waited_in_vain(one):
        return 2
    known = None if one.kind == "killed" else failure_of(said(one))
    return 1 if known is None or known.general else 0


def tells(one: Told) -> tuple[int, bool]:
    """The same, and of two alike the one that raised before the one that relays it: its frames say where."""
    return weight(one), _RELAYED.search(said(one)) is not None


#: An exception as Ray's driver tells it: the process it comes from is named, and its own words follow.
_DRIVERS = regex(r"^(?:ray\.exceptions\.)?RayTaskError\b")


def of_the_last_run(ends: list[Told], log: RunLog) -> list[Told]:
    """The ends of the last run of each file that has any which tells more than that another process has ended."""
    kept: list[Told] = []
    for path in dict.fromkeys(one.point.path for one in ends):
        here = [one for one in ends if one.point.path == path]
        kept += _after_drivers(_after_starts(here, log), log)
    return kept


def _after_starts(ends: list[Told], log: RunLog) -> list[Told]:
    starts = {_line(one) for one in log.events("started") if one.point.path == ends[0].point.path}
    for start in sorted(starts, reverse=True):
        later = [one for one in ends if _line(one) > start]
        if any(weight(one) < 2 for one in later):
            return later
    return ends


def _after_drivers(ends: list[Told], log: RunLog) -> list[Told]:
    """Those that say what the last driver died of, where several have. Lines of workers and driver are interleaved: the
    driver's own exception says which.
    """
    relayed = [one for one in ends if _DRIVERS.search(one.text)]
    failed = [_line(one) for one in log.events("main_failed") if one.point.path == ends[0].point.path]
    drivers = sorted(at for at in failed if any(at < _line(one) for one in relayed))
    if not relayed or not drivers or _line(relayed[0]) > drivers[-1]:
        return ends
    before = max(_line(one) for one in relayed if _line(one) < drivers[-1])
    last = [one for one in ends if _line(one) > _line(relayed[-1])] or relayed[-1:]
    words = {_words(one) for one in last if weight(one) < 2}
    # Where it died of another process's end, whose own words stand behind the run before, every end from there on.
    return [one for one in ends if _line(one) > before and (not words or _words(one) in words)]


def _words(one: Told) -> str:
    return re.sub(r"[\d.:]+", "#", said(one))


def _line(one: Told) -> int:
    return one.point.line or 0
