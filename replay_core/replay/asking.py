"""Questions put to a model that is anybody's: one that raises is named and skipped, and the others still answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from replay_core.jobs import OnEvent, Progress, ignore

T = TypeVar("T")
U = TypeVar("U")

#: Characters of an error's first line that are kept.
_QUOTED = 160


@dataclass
class Asking:
    """What has not been asked, and why: `padding (RuntimeError: ...)`. `on_event` hears of each question."""

    skipped: list[str] = field(default_factory=list)
    on_event: OnEvent = ignore
    _asked: int = 0

    def __call__(self, what: str, ask: Callable[[], T], otherwise: U) -> T | U:
        """The answer of `ask`, or `otherwise` where it raises."""
        self._asked += 1
        self.on_event(Progress(self._asked, None, f"questions, who moves whom: {what}"))
        try:
            return ask()
        except Exception as error:  # a model's own code raises anything
            lines = str(error).strip().splitlines()
            said = f"{what} ({type(error).__name__}{': ' + lines[0][:_QUOTED] if lines else ''})"
            if said not in self.skipped:
                self.skipped.append(said)
            return otherwise
