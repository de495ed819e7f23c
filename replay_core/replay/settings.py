"""What a replay sets in the whole process, and sets back: threads, seeds, deterministic algorithms."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator

import numpy as np
import torch

from replay_core.replay.flags import Flags

#: cuBLAS is deterministic only with one of two workspace settings, read when its first handle is made.
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@contextlib.contextmanager
def applied(flags: Flags, seed: int) -> Iterator[None]:
    """Run under the thread count, determinism and seed of a plan."""
    threads = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    benchmark = torch.backends.cudnn.benchmark
    if flags.threads is not None:
        torch.set_num_threads(flags.threads)
    if flags.deterministic:
        os.environ.setdefault(_WORKSPACE, ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    try:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
        torch.backends.cudnn.benchmark = benchmark


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw under a seed, whoever draws (torch, numpy, Python), and go on afterwards as if nothing had been drawn."""
    drawn, python = np.random.get_state(), random.getstate()
    try:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            np.random.seed(seed)
            random.seed(seed)
            yield
    finally:
        np.random.set_state(drawn)
        random.setstate(python)


def in_words(seed: int) -> dict[str, object]:
    """The settings that decide whether a run can be repeated, as they are now."""
    return {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cublas_workspace": os.environ.get(_WORKSPACE),
        "seed": seed,
    }
