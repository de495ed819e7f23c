"""The collector looks at everything in a moment of rest, and never by itself."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tui_debugger import collecting


@pytest.fixture
def begun() -> Iterator[collecting.Collecting]:
    before = gc.get_threshold()
    collecting.begin()
    yield collecting.Collecting()
    # What was left out before stays so: later tests would look through all of torch each time.
    gc.set_threshold(*before)


def test_what_is_old_is_not_looked_through_by_itself(begun: collecting.Collecting) -> None:
    collected = gc.get_stats()[2]["collections"]
    kept = [[number] for number in range(300_000)]
    assert gc.get_stats()[2]["collections"] == collected
    assert len(kept) == 300_000


def test_it_waits_for_a_moment_in_which_nobody_waits(begun: collecting.Collecting) -> None:
    kept = [[number] for number in range(300_000)]
    begun.touched()
    assert not begun.collect_at_rest(is_busy=False), "a key was pressed just now"
    begun._touched -= 2 * collecting.REST_S
    assert not begun.collect_at_rest(is_busy=True)
    assert begun.collect_at_rest(is_busy=False)
    assert not begun.collect_at_rest(is_busy=False), "nothing has come since"
    assert len(kept) == 300_000
