"""The steps a dump's file names speak of, at a glance: what a person sees while the reader lists it properly.

Standard library only, and bounded: a listing of a hundred thousand files may take seconds, this may not.
"""

from __future__ import annotations

import os
import time
from itertools import islice
from pathlib import Path

from replay_core.regexes import regex

#: How long a look may take, and how many names it reads at most.
LOOK_S = 0.06
NAMES = 50_000
#: Folders below the dump: role and dump point.
_DEPTH = 3

#: Names are looked at so many at a time.
_AT_ONCE = 512
#: The step a name speaks of; names are held apart by a zero byte, which none has.
_STEP = regex(r"(?:^|[_\-/\0])step[_\-]?(\d{1,9})")
#: The same where names begin with it, as most do: a pattern that begins with letters is searched for twice as fast.
_BEGINS = regex(r"\0step[_\-]?(\d{1,9})")


def steps_in(path: Path) -> list[int]:
    """The step numbers in the names of files and folders of a dump, rising; what was not seen in time is left out."""
    end, seen = time.monotonic() + LOOK_S, 0
    steps: set[int] = set()
    waiting = [(str(path), 0)]
    while waiting:
        folder, depth = waiting.pop()
        try:
            with os.scandir(folder) as entries:
                while some := list(islice(entries, _AT_ONCE)):
                    seen += len(some)
                    names = [entry.name for entry in some]
                    text = "\0" + "\0".join(names)
                    found = _BEGINS.findall(text)
                    if text.count("step") > len(found):
                        found = _STEP.findall(text)
                    steps.update(map(int, found))
                    if len(found) < len(some) and depth < _DEPTH:
                        others = [entry for entry in some if not _STEP.search(entry.name)]
                        waiting += [(entry.path, depth + 1) for entry in others if entry.is_dir(follow_symlinks=False)]
                    if seen >= NAMES or time.monotonic() > end:
                        return sorted(steps)
        except OSError:
            continue
    return sorted(steps)
