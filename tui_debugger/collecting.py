"""When Python's collector looks at everything: in a moment of rest, never between a key and its paint."""

from __future__ import annotations

import gc
import time

#: Nobody has pressed a key for so long.
REST_S = 3.0
#: How often a moment of rest is looked for.
LOOK_S = 10.0
#: Collections of what is young, after which what is old is worth a look.
_YOUNG = 20
#: What a look at everything may take; what stays after a longer one is not looked through again.
_LONG_S = 0.02
#: Never by itself: a hundred thousand rows are looked through for 80 ms, in which no key is read.
_NEVER = 1_000_000


def begin() -> None:
    """Leave what stands now out of every later look, and collect by itself only what is young."""
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], _NEVER)
    gc.enable()


class Collecting:
    """Looks at everything when nobody works; `touched` says that somebody does."""

    def __init__(self) -> None:
        self._touched = time.monotonic()

    def touched(self) -> None:
        self._touched = time.monotonic()

    def collect_at_rest(self, *, is_busy: bool) -> bool:
        """Collect, where nobody would wait for it and there may be something. Returns whether it did."""
        if is_busy or time.monotonic() - self._touched < REST_S or gc.get_count()[2] < _YOUNG:
            return False
        began = time.monotonic()
        gc.collect()
        if time.monotonic() - began > _LONG_S:
            gc.freeze()
        return True
