"""What one untrusted file may cost: bytes made of it, values walked, seconds. Every reader spends from here.

    with reading(path):
        spend_bytes(len(text), "texts of a column")
        spend_values(rows * columns, "cells of a table")

The limits follow from what is stored, never from what is declared: a few bytes can declare a table, a tensor or a
tree of any size. Past one of them that file is a BudgetError and the rest of the dump opens. `RLDBG_BUDGET=8`
multiplies every limit by eight, in the command line, the screen and its children alike.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from math import prod
from pathlib import Path
from types import TracebackType

from replay_core.errors import BudgetError
from replay_core.mirrored import is_mirrored

OPTION = "RLDBG_BUDGET"
#: What `RLDBG_BUDGET` may raise the limits by: `inf` is no number of bytes.
MOST_FACTOR = 1e6
#: Bytes made of a file: decoded texts, copied lists, inflated arrays. A mask of zeros deflates to a thousandth, so
#: the ratio alone would refuse what numpy writes; the floor is for those.
FLOOR_BYTES, BYTES_PER_BYTE = 64 << 20, 64
#: Values walked: cells of a table, leaves of a tree, elements of a tensor that overlap. A group's rows share a prompt.
FLOOR_VALUES, VALUES_PER_BYTE = 1 << 20, 8
#: Elements of a tensor that overlap, and rows of one that holds none: a mask may be expanded over heads and samples.
FLOOR_ELEMENTS, ELEMENTS_PER_BYTE = 1 << 20, 32
#: Rows of such a tensor, which whoever looks for samples walks one by one.
FLOOR_ROWS = 1 << 16
#: A file of more stretches between its holes is taken for whole.
_MOST_STRETCHES = 4096
#: So many payments are made between two looks at the clock.
_UNTIMED = 64
#: Fields of one record: a tensor's name and place take more bytes, and so does a metric's.
FLOOR_FIELDS, BYTES_PER_FIELD = 1 << 13, 32
#: CPU seconds of all readings of one file since it was opened. Genuine files take .02 s for a megabyte of JSON, up to
#: 3 for one of a log's short lines, more where other processes share the cores and their caches.
FLOOR_SECONDS, SECONDS_PER_MIB = 0.75, 4.0
#: Of each record, so much is not counted: a log of 15,000 steps is asked for each of them once it is known.
FREE_SECONDS = 0.0005
#: A look at the thread's clock may be so many seconds old. It costs a call of the kernel, and on a box that others use
#: it is where the thread loses its turn: not for each of thousands of short readings.
_STALE = 0.02
#: What a process may hold beyond what it held when it began to read a file.
FLOOR_MEMORY = 256 << 20


class Budget:
    """What is left for one reading of one file.

    Most readings end within the floors, and what is stored is asked for only past one of them: asking the file system
    and the environment costs as much as a header.
    """

    __slots__ = ("bytes_left", "file", "memory_before", "patience", "payments", "seconds", "stored", "values_left")

    def __init__(self, file: str, took: float, patience: float = 1.0) -> None:
        self.file, self.patience = file, patience
        #: Bytes that the file system keeps of it; -1 as long as nobody had to know.
        self.stored = -1
        self.payments = 0
        #: What the process's limit of memory was, where this reading lowered it.
        self.memory_before: int | None = None
        self.bytes_left, self.values_left, self.seconds = FLOOR_BYTES, FLOOR_VALUES, FLOOR_SECONDS * patience - took

    def widen(self) -> bool:
        """What is stored, and the option, raise the limits; False where they were raised already."""
        if self.stored >= 0:
            return False
        self.stored, raised = stored_bytes(self.file), factor()
        self.bytes_left += int((FLOOR_BYTES + BYTES_PER_BYTE * self.stored) * raised) - FLOOR_BYTES
        self.values_left += int((FLOOR_VALUES + VALUES_PER_BYTE * self.stored) * raised) - FLOOR_VALUES
        seconds = (FLOOR_SECONDS + SECONDS_PER_MIB * self.stored / (1 << 20)) * self.patience
        self.seconds += seconds * raised - FLOOR_SECONDS * self.patience
        return True

    def spend_bytes(self, count: int, what: str) -> None:
        self.bytes_left -= count
        if self.bytes_left < 0 and (not self.widen() or self.bytes_left < 0):
            limit = int((FLOOR_BYTES + BYTES_PER_BYTE * self.stored) * factor())
            raise self.over(f"{limit:,} bytes made of it", f"{limit - self.bytes_left:,}, at {what}")

    def spend_values(self, count: int, what: str) -> None:
        self.values_left -= count
        if self.values_left < 0 and (not self.widen() or self.values_left < 0):
            limit = int((FLOOR_VALUES + VALUES_PER_BYTE * self.stored) * factor())
            raise self.over(f"{limit:,} values", f"{limit - self.values_left:,}, at {what}")

    def check_fields(self, count: int) -> None:
        self.widen()
        limit = int((FLOOR_FIELDS + self.stored // BYTES_PER_FIELD) * factor())
        if count > limit and not os.path.isdir(self.file):
            raise self.over(f"{limit:,} fields of a record", f"{count:,} or more")

    def spend_seconds(self, now: float) -> None:
        """`now`: the thread's CPU seconds, from which `seconds` counts."""
        if now > self.seconds and (not self.widen() or now > self.seconds):
            self.seconds = -1.0
            limit = (FLOOR_SECONDS + SECONDS_PER_MIB * self.stored / (1 << 20)) * self.patience * factor()
            raise self.over(f"{limit:.1f} s of reading", "more")

    def over(self, allowed: str, claimed: str) -> BudgetError:
        return BudgetError(
            "the file asks for more than what is stored in it may cost",
            file=self.file,
            expected=f"at most {allowed}, as {self.stored:,} bytes are stored",
            found=claimed,
            hint=f"if you trust the file, {OPTION}=8 before the command raises every limit eightfold",
        )


class _Reading(threading.local):
    budget: Budget | None = None
    #: The thread's CPU seconds when they were last looked at, and when that was.
    cpu: float = 0.0
    looked: float = -1.0

    def look(self) -> float:
        self.cpu, self.looked = time.thread_time(), time.perf_counter()
        return self.cpu


_now = _Reading()
#: CPU seconds that the readings of a file took since `forget`.
_took: dict[str, float] = {}
_is_limited = False


def factor() -> float:
    """What `RLDBG_BUDGET` multiplies every limit by."""
    return _factor(os.environ.get(OPTION, "1"))


@cache
def _factor(text: str) -> float:
    try:
        return min(max(1.0, float(text)), MOST_FACTOR)
    except ValueError:
        return 1.0


def forget() -> None:
    """Whoever opens a run begins anew."""
    _took.clear()


class reading:  # noqa: N801 - reads as the words of a `with`
    """One file is read, and what it costs is its own; a reading inside that of the same file belongs to it.

    Args:
        records: so many of the file's are read: of each a little is not counted.
        patience: how many times the seconds of other files it may take.

    Raises:
        BudgetError: the readings of the file took their time already.
    """

    __slots__ = ("_began", "_budget", "_cpu", "_file", "_outer", "_patience", "_records", "_took")

    def __init__(self, path: Path | str, records: int = 1, patience: float = 1.0) -> None:
        self._file, self._records, self._patience = str(path), records, patience

    def __enter__(self) -> None:
        self._outer = _now.budget
        self._budget: Budget | None = None
        if self._outer is not None and self._outer.file == self._file:
            return
        self._began, self._took = time.perf_counter(), _took.get(self._file, 0.0)
        self._cpu = _now.cpu if self._began - _now.looked < _STALE else _now.look()
        budget = Budget(self._file, self._took, self._patience)
        if budget.seconds < 0:
            budget.spend_seconds(0.0)
        budget.seconds += self._cpu
        self._budget = _now.budget = budget
        if self._file not in _took:
            _limit_memory(budget)

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        budget = self._budget
        if budget is None:
            return
        _now.budget = self._outer
        # Nobody works longer than it lasts: a reading that was short has cost nothing that counts.
        lasted, free = time.perf_counter() - self._began, self._records * FREE_SECONDS
        _took[self._file] = self._took + (
            max(0.0, min(lasted, _now.look() - self._cpu) - free) if lasted > free else 0.0
        )
        if budget.memory_before is not None:
            _set_limit(budget.memory_before)
        if isinstance(error, MemoryError):
            allowed = f"{FLOOR_MEMORY >> 20} MiB and {BYTES_PER_BYTE} times what is stored in memory"
            raise budget.over(allowed, "more") from None


def stored_bytes(path: Path | str) -> int:
    """Bytes of a file that are no holes: a sparse one declares more. 0 of what cannot be asked."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return 0
    # Blocks alone say too little of a file that compresses, or is not on the disk yet: only what looks sparse is asked.
    # What is not fetched yet of a remote object is no hole of it.
    if is_mirrored(path):
        return status.st_size
    if getattr(status, "st_blocks", 0) * 512 >= status.st_size or not hasattr(os, "SEEK_DATA"):
        return status.st_size
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return status.st_size
    try:
        return sum(end - start for start, end in _stretches(fd, status.st_size))
    except OSError:
        return status.st_size
    finally:
        os.close(fd)


def _stretches(fd: int, size: int) -> Iterator[tuple[int, int]]:
    """Where a file has data: (start, end) of each stretch; what lies behind the last of very many counts whole."""
    end = 0
    for _ in range(_MOST_STRETCHES):
        try:
            start = os.lseek(fd, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return
            raise
        end = os.lseek(fd, start, os.SEEK_HOLE)
        yield start, end
    yield end, size


def _clock(budget: Budget, count: int) -> None:
    budget.payments += 1
    if budget.payments % _UNTIMED and count < 1 << 12:
        return
    if budget.memory_before is None:
        _limit_memory(budget)
    budget.spend_seconds(_now.look())


def spend_bytes(count: int, what: str) -> None:
    """So many bytes are made of the file that is read.

    Raises:
        BudgetError: more than it may cost.
    """
    budget = _now.budget
    if budget is not None:
        budget.spend_bytes(count, what)
        _clock(budget, count)


def spend_values(count: int, what: str) -> None:
    """So many values of the file that is read are walked, or made.

    Raises:
        BudgetError: more than it may cost.
    """
    budget = _now.budget
    if budget is not None:
        budget.spend_values(count, what)
        _clock(budget, count)


def check_fields(count: int) -> None:
    """A record of the file that is read has so many fields.

    Raises:
        BudgetError: more than it may have: each of them costs whoever shows, compares or judges it.
    """
    budget = _now.budget
    if budget is not None and count > FLOOR_FIELDS:
        budget.check_fields(count)


def is_walkable(shape: tuple[int, ...], numel: int, stored: int) -> bool:
    """Whether a tensor of `stored` bytes may declare that many elements: they may overlap, or there may be none."""
    if numel == 0:
        return prod(length or 1 for length in shape) <= FLOOR_ROWS * factor()
    elements, rows = FLOOR_ELEMENTS + ELEMENTS_PER_BYTE * stored, FLOOR_ROWS + stored
    return numel <= stored or (numel <= elements * factor() and shape[0] <= rows * factor())


def limit_process() -> None:
    """RLIMIT_DATA for a process that reads: half of the machine's memory, at least 2 GiB; while a file is read, less.

    A reader streams, so it needs a fraction of this; a file that makes it ask for more becomes a MemoryError of one
    file and not a machine that swaps. Only for processes of rldbg's own: another thread's memory counts as well.
    """
    global _is_limited
    with suppress(ImportError, OSError, ValueError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = _process_limit(hard)
        if soft < 0 or limit < soft:
            _set_limit(limit)
        _is_limited = True


def lift_limit() -> None:
    """Undo the `limit_process` of a parent, which its children inherit; a limit that somebody else set stays."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        if soft == _process_limit(hard):
            _set_limit(hard)


def _process_limit(hard: int) -> int:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = int(max(memory // 2, 2 << 30))
    return limit if hard < 0 else min(limit, hard)


def _limit_memory(budget: Budget) -> None:
    """Lower the process's limit until the reading ends, where that can be done.

    The first reading of a file does it at once, a later one at its first payment that counts: asking the kernel costs
    more than one row of a table of thirty thousand.
    """
    if not _is_limited:
        return
    budget.widen()
    with suppress(ImportError, OSError, ValueError, IndexError):
        import resource

        with open("/proc/self/statm", "rb") as statm:
            held = int(statm.read().split()[5]) * resource.getpagesize()
        before = resource.getrlimit(resource.RLIMIT_DATA)[0]
        asked = held + int((FLOOR_MEMORY + BYTES_PER_BYTE * budget.stored) * factor())
        if before < 0 or asked < before:
            _set_limit(asked)
            budget.memory_before = before


def _set_limit(nbytes: int) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_DATA, (nbytes, resource.getrlimit(resource.RLIMIT_DATA)[1]))
