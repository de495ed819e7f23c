"""What is left out of garbage collection while a job works."""

from __future__ import annotations

import gc

from replay_core.collecting import settled


def _is_looked_at(one: object) -> bool:
    return any(other is one for other in gc.get_objects())


def test_what_somebody_left_out_before_stays_left_out() -> None:
    left_out: list[object] = []
    assert _is_looked_at(left_out)
    gc.freeze()
    assert not _is_looked_at(left_out)
    with settled():
        assert not _is_looked_at(left_out)
    assert not _is_looked_at(left_out)
