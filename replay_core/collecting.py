"""When Python looks for garbage while a job works: seldom, for what a job makes is a run and a document, and stays."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

#: New objects before the young are looked through, and how often the old are: Python's own 700, 10 and 10 take a
#: quarter of the time of comparing two logs of thirty thousand steps.
_SELDOM = (50_000, 50, 100)


@contextmanager
def importing() -> Iterator[None]:
    """Import large libraries without looking for garbage among what they make, then or later: a sixth of the time of
    importing torch and transformers, and .3 s each time a model is let go.
    """
    was_on, known = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > known:
            gc.freeze()
        if was_on:
            gc.enable()


@contextmanager
def settled() -> Iterator[None]:
    """Leave what is there already out of every collection until the block ends: a whole one walks through all of torch
    and transformers, .3 s each time a model is let go. What somebody had left out before stays so.
    """
    had_frozen = gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not had_frozen:
            gc.unfreeze()


@contextmanager
def seldom() -> Iterator[None]:
    """Collect less often until the block ends; a collector that is off stays off."""
    before = gc.get_threshold()
    gc.set_threshold(*_SELDOM)
    try:
        yield
    finally:
        gc.set_threshold(*before)
