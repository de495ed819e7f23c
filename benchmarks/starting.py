"""`rldbg ls` from the shell, against a Python that does nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from benchmarks.inputs import Inputs
from benchmarks.racing import Result, Side, child, race


def rows(inputs: Inputs) -> Iterator[Result]:
    dump = inputs.small()
    words = [sys.executable, "-m", "tui_debugger", "ls", str(dump)]
    yield race(
        "start-up",
        Side("`rldbg ls` of 24 small records", lambda: child(words, expect=0)),
        Side("`python -c pass`", lambda: child([sys.executable, "-c", "pass"], expect=0)),
        bar=None,
        rounds=7,
    )
