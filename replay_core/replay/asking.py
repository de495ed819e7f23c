"""Questions put to a model that is anybody's: one that raises is named and skipped, and the others still answer.

How long they take is told of the passes that were timed, and what would begin after the time there is, is left out by
name.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from msgspec import Struct, field

from replay_core.jobs import OnEvent, Partial, Progress, ignore

T = TypeVar("T")
U = TypeVar("U")

#: Characters of an error's first line that are kept.
_QUOTED = 160
#: Less than this is not worth a word.
_WORTH_S = 2.0


class Asking(Struct):
    """What has not been asked, and why: `padding (RuntimeError: ...)`. `on_event` hears of each question.

    most_s: no question begins after so many seconds; None: all are asked. said: what was told so far.
    """

    skipped: list[str] = field(default_factory=list)
    on_event: OnEvent = ignore
    most_s: float | None = None
    said: str | None = None
    _asked: int = 0
    _began: float = field(default_factory=time.monotonic)
    _ahead: int = 0
    _passes: int = 0
    _passed_s: float = 0.0

    def __call__(self, what: str, ask: Callable[[], T], otherwise: U) -> T | U:
        """The answer of `ask`, or `otherwise` where it raises, or where the time is up."""
        self._asked += 1
        if self.is_late:
            self._skip(f"{what} (no time left after {self.most_s:.0f} s)")
            return otherwise
        left_s = self._ahead * self._passed_s / self._passes if self._passes else 0.0
        # First what a narrow terminal must not cut.
        left = f" (up to {left_s:.0f} s left)" if left_s > _WORTH_S else ""
        self.on_event(Progress(self._asked, None, f"questions{left}, who moves whom: {what}"))
        try:
            return ask()
        except Exception as error:  # a model's own code raises anything
            lines = str(error).strip().splitlines()
            self._skip(f"{what} ({type(error).__name__}{': ' + lines[0][:_QUOTED] if lines else ''})")
            return otherwise

    @property
    def is_late(self) -> bool:
        return self.most_s is not None and time.monotonic() - self._began > self.most_s

    def expect(self, passes: int) -> None:
        """So many passes like those from now on are to come, at most."""
        self._ahead, self._passes, self._passed_s = passes, 0, 0.0

    @contextmanager
    def one_pass(self) -> Iterator[None]:
        """A pass of the model, timed."""
        began = time.monotonic()
        yield
        self._passes += 1
        self._ahead = max(0, self._ahead - 1)
        self._passed_s += time.monotonic() - began

    def so_far(self, sentence: str) -> None:
        """What is known already, for who waits, or does not."""
        self.said = sentence
        self.on_event(Partial({"so_far": sentence}))

    def _skip(self, said: str) -> None:
        if said not in self.skipped:
            self.skipped.append(said)
