"""What logits will take is known before they are made; what a stretch of work took is its own peak."""

import pytest
import torch

from replay_core.errors import UnavailableError
from replay_core.replay.flags import Flags
from replay_core.replay.footprint import PeakMemory, need_logits

MIB = 2**20


def test_whole_logits_are_forecast_twice_and_chunks_do_not_grow_with_the_batch():
    assert need_logits(Flags.parse("logits=whole"), 1024, 1024, 512) == 2 * 1024 * 1024 * 4 / MIB
    assert need_logits(Flags(), 1024, 1024, 512) == need_logits(Flags(), 10**6, 1024, 512)
    assert need_logits(Flags(), 100, 1024, 512) < need_logits(Flags(), 512, 1024, 512)


def test_logits_that_do_not_fit_are_unavailable_with_both_figures():
    with pytest.raises(UnavailableError, match="do not fit in memory") as refused:
        need_logits(Flags.parse("logits=whole"), 10**7, 10**6, 512)
    assert refused.value.expected == f"about {2 * 10**7 * 10**6 * 4 / 2**30:.1f} GiB"
    assert "logits=chunked" in refused.value.hint


def test_the_peak_is_of_the_stretch_and_not_of_what_came_before():
    before = torch.ones(64 * MIB)
    del before
    small = PeakMemory("cpu")
    if not small._reset:
        pytest.skip("this system does not set a process's high-water mark back")
    floor = small.mib()
    held = torch.ones(32 * MIB)  # 128 MiB
    assert 100 < small.mib() - floor < 200
    del held
