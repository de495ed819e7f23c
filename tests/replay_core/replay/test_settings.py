"""A replay's threads, seed and determinism hold while it runs, and the process is as before afterwards."""

import pytest
import torch

from replay_core.replay import settings
from replay_core.replay.flags import Flags


def state():
    return torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark


def test_settings_hold_inside_and_are_set_back_even_after_a_failure(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    before, generator = state(), torch.get_rng_state()
    threads = before[0] + 1
    inside = []

    def fail():
        with settings.applied(Flags.parse(f"deterministic=on threads={threads}"), seed=3):
            inside.extend((state(), settings.in_words(3)))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert inside == [
        (threads, True, False),
        {"deterministic": True, "cudnn_benchmark": False, "cublas_workspace": ":4096:8", "seed": 3},
    ]
    assert state() == before
    assert torch.equal(torch.get_rng_state(), generator)


def test_a_workspace_the_user_chose_is_kept(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    with settings.applied(Flags.parse("deterministic=on"), seed=0):
        assert settings.in_words(0)["cublas_workspace"] == ":16:8"


def test_one_seed_draws_the_same_numbers_whatever_was_drawn_before():
    drawn = []
    for _ in range(2):
        torch.rand(7)
        with settings.applied(Flags(), seed=5):
            drawn.append(torch.rand(4))
    assert torch.equal(*drawn)
