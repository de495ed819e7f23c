"""What is said beside an answer, on standard error."""

from __future__ import annotations

import os
import sys


def aside(text: str) -> None:
    """Say it as it stands. Where nobody hears it (`2>&1 | head`, a full disk) the answer and its code are what they
    were: a command that ended over its own progress would leave with 1, which means that something differs.
    """
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # nothing is left to flush at exit
