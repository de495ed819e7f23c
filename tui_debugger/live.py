"""How a run is doing that is followed while it is written, in words."""

from __future__ import annotations

from msgspec import Struct

from tui_debugger import format as fmt

#: A run is called silent after this long, or after so many times what a step takes.
SILENT_S, SILENT_STEPS = 30.0, 5.0


class LiveRun(Struct, eq=False):
    """How a run is doing that is followed while it is written."""

    last_step: int | None = None
    silent_s: float | None = None
    pace_s: float | None = None
    waits: bool = False
    """Nothing of it can be read yet."""

    @property
    def is_silent(self) -> bool:
        """Nothing was written for much longer than a step takes."""
        return self.silent_s is not None and self.silent_s > max(SILENT_S, SILENT_STEPS * (self.pace_s or 0.0))

    def __str__(self) -> str:
        if self.waits:
            return "following · nothing is written yet"
        parts = ["following" if not self.is_silent else "stopped?"]
        parts.append("no step yet" if self.last_step is None else f"last step {self.last_step}")
        if self.silent_s is not None:
            past = fmt.span(self.silent_s)
            parts.append(f"nothing written for {past}" if self.is_silent else f"{past} ago")
        return " · ".join(parts)
