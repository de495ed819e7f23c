"""What is left out of garbage collection while a job works."""

from __future__ import annotations

import gc

from replay_core.collecting import settled


def test_what_somebody_left_out_before_stays_left_out() -> None:
    gc.freeze()
    before = gc.get_freeze_count()
    with settled():
        assert gc.get_freeze_count() >= before
    assert gc.get_freeze_count() >= before
