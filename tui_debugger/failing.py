"""What went wrong, as the user reads it."""

from __future__ import annotations

import sys

from replay_core.mirrored import as_addressed
from tui_debugger.aside import aside
from tui_debugger.format import safe


def fail(message: str, hint: str | None = None) -> None:
    """An error, on standard error: what is wrong, then what helps."""
    begun = "\x1b[31m\x1b[1merror: \x1b[0m" if sys.stderr.isatty() else "error: "
    told = f"{begun}{safe(as_addressed(message), lines=True)}\n"
    if hint:
        told += f"\nhint: {safe(as_addressed(hint), lines=True)}\n"
    aside(told)
