"""Regular expressions that look at what a file holds: none takes longer than its text is long."""

from __future__ import annotations

import re
import time
from importlib import import_module
from itertools import product

import pytest

from replay_core import regexes

#: Modules whose patterns look at lines of any length; those of the others look at names of files.
MODULES = ("log_text", "log_lines", "log_events", "metric_lines", "step_log", "json_rows", "containers.tensor_shortcut",
           "containers.pickle_machine")  # fmt: skip
PATTERNS = {
    f"{module}.{name}": value
    for module in MODULES
    for name, value in vars(import_module(f"replay_core.dumps.{module}")).items()
    if isinstance(value, (re.Pattern, regexes._Later))
}
LENGTH = 1 << 12
MOST_S = 0.05
#: What the patterns begin with, and what they repeat.
BEGINNINGS = (
    "", "step:1 - a:", "step 1: {", "{'a': ", "'a':", "iter 1: loss ", "[Micro 0] 1. ", "step: 1 ", "step 1 |",
    "WARNING: ", "a=", "x error", "(a pid=",
)  # fmt: skip
PUMPS = (
    "A", "1", " ", "a", "\\", "'", '"', "1,", "1.", "a b", "a:1 ", " - a:1", "{'", "step 1: {", "step: 1 ",
    "iter 1: loss 1 ", "a=1", "'a': 1, ", "\x1b[", "\x1b]", "[Micro 1] 1. a", "np.float64(", "(", "step:1 - a:1",
)  # fmt: skip


@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_takes_no_longer_than_its_text_is_long(name: str) -> None:
    pattern = PATTERNS[name]
    for begins, pump in product(BEGINNINGS, PUMPS):
        text = (begins + pump * LENGTH)[:LENGTH] + "\0"
        began = time.thread_time()
        pattern.search(text if isinstance(pattern.pattern, str) else text.encode())
        assert time.thread_time() - began < MOST_S, (begins, pump)
