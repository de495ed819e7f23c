"""A GPU is not taken from a running trainer, nor by two replays at once."""

import os

import pytest
import torch

from replay_core.errors import UnavailableError
from replay_core.jobs import ignore
from replay_core.replay import gpu
from replay_core.replay.flags import Flags

ON_GPU = Flags.parse("device=cuda")


@pytest.fixture
def card(monkeypatch, tmp_path):
    """`card(free, own)` is a GPU of 80 GiB with so many GiB free and so many reserved by this process."""

    def put(free: float, own: float = 0) -> None:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (int(free * 2**30), 80 * 2**30))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: int(own * 2**30))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))

    return put


def test_the_cpu_asks_nobody():
    with gpu.taken(Flags(), False, ignore):
        pass


def test_a_gpu_another_process_uses_is_left_alone_unless_asked(card):
    card(free=20)
    with pytest.raises(UnavailableError, match="another process uses this GPU") as refused, \
            gpu.taken(ON_GPU, False, ignore):  # fmt: skip
        pass
    assert refused.value.found == "60.0 of 80.0 GiB in use"
    with gpu.taken(ON_GPU, True, ignore):
        pass


def test_what_this_process_itself_holds_is_nobody_elses(card):
    card(free=20, own=60)
    lines = []
    with gpu.taken(ON_GPU, False, lines.append):
        pass
    assert "20.0 of 80.0 GiB free" in lines[0].text


@pytest.mark.skipif(os.name == "nt", reason="there is no lock")
def test_two_replays_do_not_fight_for_one_gpu(card):
    card(free=79.5)
    with gpu.taken(ON_GPU, False, ignore):
        with pytest.raises(UnavailableError, match="another replay holds this GPU"), gpu.taken(ON_GPU, False, ignore):
            pass
        with gpu.taken(ON_GPU, True, ignore):
            pass
    with gpu.taken(ON_GPU, False, ignore):
        pass
