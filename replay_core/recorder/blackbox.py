"""The black box: the last steps in memory, written only when something goes wrong.

    recorder = Recorder("dump", black_box=BlackBox(steps=3))

Nothing reaches the disk until a trigger fires at the end of a step, an exception leaves a step or the program,
or `StepRecorder.examine` finds a gradient that is not finite. A killed process takes what it held with it.
"""

from __future__ import annotations

import math
import statistics
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any

from replay_core.recorder.patience import tell
from replay_core.recorder.values import HeldRecord, is_finite, is_tensor, leaves

#: The records of a step: (key, fields), in the order they were taken.
StepRecords = Sequence[tuple[dict[str, Any], dict[str, Any]]]
#: Looks at a step that ended; says what is wrong with it, or None.
Trigger = Callable[[StepRecords], "str | None"]


def non_finite(records: StepRecords) -> str | None:
    """A floating-point value of the step is NaN or infinite."""
    for key, fields in records:
        for name, value in leaves(fields):
            finite = is_finite(value) if is_tensor(value) else not isinstance(value, float) or math.isfinite(value)
            if not finite:
                return f"{name} of {key['stage']} holds a value that is not finite{_micro(key)}"
    return None


def zero_advantage(records: StepRecords) -> str | None:
    """Every advantage of a record is zero: nothing in it can be learnt from."""
    for key, fields in records:
        for name, value in leaves(fields):
            if name.rpartition(".")[2] not in ("advantages", "advantage"):
                continue
            numbers = value if is_tensor(value) else _flat(value)
            if (
                len(numbers) and not any(numbers)
                if isinstance(numbers, list)
                else numbers.numel() and not numbers.any()
            ):
                return f"every advantage of {key['stage']} is zero{_micro(key)}"
    return None


class GradNormSpike:
    """The gradient's norm is `times` the median of the last steps' (of at least five).

    Reads the field `grad_norm`, of a record of its own or within `metrics`.
    """

    def __init__(self, times: float = 10.0, window: int = 50) -> None:
        self._times = times
        self._seen: deque[float] = deque(maxlen=window)

    def __call__(self, records: StepRecords) -> str | None:
        for _, fields in records:
            for name, value in leaves(fields):
                if name.rpartition(".")[2] == "grad_norm" and (norm := _number(value)) is not None:
                    return self._judge(norm)
        return None

    def _judge(self, norm: float) -> str | None:
        usual = statistics.median(self._seen) if len(self._seen) >= 5 else None
        if usual is not None and norm > self._times * usual:
            return f"grad_norm {norm:.4g} is more than {self._times:g} times the usual {usual:.4g}"
        if math.isfinite(norm):
            self._seen.append(norm)
        return None


class BlackBox:
    """A bounded ring of the last steps' records.

    Args:
        steps: how many steps it holds, the one being recorded included.
        nbytes: host memory they may take; beyond it the oldest records go first, counted and said once.
        triggers: look at each step when it ends; the first that has something to say commits the ring.
        incidents: after so many nothing more is committed: a run that has gone bad stays bad.
    """

    def __init__(
        self,
        *,
        steps: int = 3,
        nbytes: int = 4 << 30,
        triggers: Sequence[Trigger] | None = None,
        incidents: int = 10,
    ) -> None:
        if steps < 1 or nbytes < 1:
            raise ValueError("a black box holds at least one step and one byte")
        self._steps, self._nbytes = steps, nbytes
        usual: tuple[Trigger, ...] = (non_finite, zero_advantage, GradNormSpike())
        self._triggers = list(usual if triggers is None else triggers)
        self._left = incidents
        self._ring: OrderedDict[int, list[HeldRecord]] = OrderedDict()
        self._held_bytes = 0
        #: SIGTERM has it released while the trainer goes on.
        self._using = threading.RLock()
        #: Records that had to go before their step did, because the ring was full.
        self.evicted = 0

    @property
    def steps(self) -> list[int]:
        """The steps it holds now."""
        with self._using:
            return list(self._ring)

    def hold(self, held: HeldRecord) -> None:
        """Keep a record; let go of what is too old or too much."""
        with self._using:
            self._ring.setdefault(held.key["step"], []).append(held)
            self._held_bytes += held.snapshots.nbytes
            while len(self._ring) > self._steps:
                _, old = self._ring.popitem(last=False)
                self._held_bytes -= sum(record.snapshots.nbytes for record in old)
            while self._held_bytes > self._nbytes and sum(map(len, self._ring.values())) > 1:
                self._evict()

    def _evict(self) -> None:
        if not self.evicted:
            tell(
                f"rldbg: the black box is full at {self._nbytes:,} bytes and holds fewer than {self._steps} steps; "
                "its oldest records go"
            )
        step, records = next(iter(self._ring.items()))
        self._held_bytes -= records.pop(0).snapshots.nbytes
        self.evicted += 1
        if not records:
            del self._ring[step]

    def close(self, step: int, failure: BaseException | None) -> dict[str, Any] | None:
        """Look at a step that ended. What went wrong, or None."""
        if failure is not None and isinstance(failure, Exception):
            return self.incident("crash", f"{type(failure).__name__}: {failure}", step)
        with self._using:
            of_step = list(self._ring.get(step, ()))
        for held in of_step:
            held.snapshots.ready()
        records = [(held.key, held.fields) for held in of_step]
        # Every trigger looks at every step: some learn from it what is usual.
        said = [(trigger, trigger(records)) for trigger in self._triggers]
        for trigger, what in said:
            if what is not None:
                name = getattr(trigger, "__name__", type(trigger).__name__)
                return self.incident(name, what, step)
        return None

    def incident(self, trigger: str, what: str, step: int | None) -> dict[str, Any]:
        return {"trigger": trigger, "what": what, "step": step, "steps_held": self.steps, "evicted": self.evicted}

    def release(self) -> list[HeldRecord]:
        """Everything it holds, oldest first; it is empty then. Nothing once `incidents` are used up."""
        if self._left <= 0:
            return []
        self._left -= 1
        if not self._left:
            tell("rldbg: the black box commits nothing after this incident")
        with self._using:
            records = [held for step in self._ring.values() for held in step]
            self._ring.clear()
            self._held_bytes = 0
        return records


def _micro(key: dict[str, Any]) -> str:
    return "" if key["micro"] is None else f", micro {key['micro']}"


def _number(value: Any) -> float | None:
    if is_tensor(value):
        return float(value) if value.numel() == 1 else None
    return float(value) if isinstance(value, (int, float)) else None


def _flat(value: Any) -> list[float]:
    if isinstance(value, list):
        return [number for item in value for number in _flat(item)]
    return [value] if isinstance(value, (int, float)) else []
