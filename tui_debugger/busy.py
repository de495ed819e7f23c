"""A job that runs: what it does, how far it is, since when, and what it will cost.

What is left is told of what was measured, never of a guess: of this job's own counts, or of the last one of its kind.
"""

from __future__ import annotations

from msgspec import Struct

from replay_core.jobs import IMPORTING, Progress
from tui_debugger import format as fmt

#: A phase that goes on for less says nothing of its pace.
_TOLD_AFTER_S = 1.0


class Busy(Struct, eq=False):
    """A job that runs. Times are those of `time.monotonic`, in seconds."""

    what: str
    is_replay: bool = False
    began: float = 0.0
    now: float = 0.0
    usual_s: float | None = None
    """What the last job of this kind took."""
    far: Progress | None = None
    """What it said last."""
    phase_began: float = 0.0
    phase_from: int = 0
    """What was done already when its phase was heard of first."""
    told: float = 0.0
    part_began: float = 0.0
    imported_s: float = 0.0
    """What its first part waited for torch, where the others need not: a child of their own imports it again."""

    def __str__(self) -> str:
        return f"{self.what}: {self.how_far}" if self.how_far else self.what

    def begins_phase(self, far: Progress) -> bool:
        """Whether what is told of is another count. Tensors give their own names as what is done."""
        return self.far is None or far.total != self.far.total or far.done < self.far.done

    def take(self, far: Progress, now: float) -> None:
        """What it says of itself."""
        self.now = now
        if self.begins_phase(far):
            self.phase_began, self.phase_from = now, far.done
        if self.far is None or far.part != self.far.part:
            self.part_began = now
        if far.part == 0 and self.far is not None and self.far.what == IMPORTING.what:
            self.imported_s = now - self.began
        elif far.part and far.what == IMPORTING.what:
            self.imported_s = 0.0
        self.far, self.told = far, now

    @property
    def how_far(self) -> str:
        """What of it is done; empty where it says nothing of that."""
        far = self.far
        part = f"part {far.part + 1} of {far.parts} · " if far is not None and far.parts > 1 else ""
        return f"{part}{self.doing}"

    @property
    def doing(self) -> str:
        """What of its part is done."""
        far = self.far
        if far is None:
            return ""
        count = f"{far.done:,} of {far.total:,} " if far.total else f"{far.done:,} " if far.done else ""
        return f"{count}{fmt.safe(far.what)}".rstrip()

    @property
    def how_long(self) -> str:
        """Since when it runs, what is left, and how to stop it."""
        return f"{fmt.seconds(self.spent_s)}{self.cost} · ctrl+c cancels"

    @property
    def spent_s(self) -> float:
        return max(0.0, self.now - self.began)

    @property
    def cost(self) -> str:
        """What is left, or what the last one took; empty before either was measured."""
        left = self._left_s()
        if left is not None:
            return f", about {_about(left)} left"
        return f", the last took {_about(self.usual_s)}" if self.usual_s and self.spent_s < self.usual_s else ""

    def _left_s(self) -> float | None:
        """Seconds left, of the parts that have ended; of a job of one part, of what its phase has counted. None before
        anything was measured, or where that does not tell."""
        far = self.far
        if far is None:
            return None
        if far.parts > 1:
            each = (self.part_began - self.began - self.imported_s) / far.part if far.part else 0.0
            spent = self.now - self.part_began
            # A part that takes longer than those before it is of another kind, and the rest may be of its kind.
            return each * (far.parts - far.part) - spent if spent < each else None
        spent, done = self.told - self.phase_began, far.done - self.phase_from
        if not far.total or far.done >= far.total or not done or spent < _TOLD_AFTER_S:
            return None
        left = (far.total - far.done) * spent / done - (self.now - self.told)
        return left if left > 0 else None


def _about(seconds: float) -> str:
    return f"{max(1, round(seconds))} s" if seconds < 120 else f"{round(seconds / 60):,} min"
