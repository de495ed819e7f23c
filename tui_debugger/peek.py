"""The steps a dump's file names speak of, at a glance: what a person sees while the reader lists it properly.

Standard library only, and bounded: a listing of a hundred thousand files may take seconds, this may not.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from replay_core.regexes import regex

#: How long a look may take, and how many names it reads at most.
LOOK_S = 0.06
NAMES = 50_000
#: Folders below the dump: role and dump point.
_DEPTH = 3

_STEP = regex(r"(?:^|[_\-/])step[_\-]?(\d{1,9})")


def steps_in(path: Path) -> list[int]:
    """The step numbers in the names of files and folders of a dump, rising; what was not seen in time is left out."""
    end, seen = time.monotonic() + LOOK_S, 0
    steps: set[int] = set()
    waiting = [(str(path), 0)]
    while waiting:
        folder, depth = waiting.pop()
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    seen += 1
                    found = _STEP.search(entry.name)
                    if found:
                        steps.add(int(found.group(1)))
                    elif depth < _DEPTH and entry.is_dir(follow_symlinks=False):
                        waiting.append((entry.path, depth + 1))
                    if seen >= NAMES or (not seen % 512 and time.monotonic() > end):
                        return sorted(steps)
        except OSError:
            continue
    return sorted(steps)
