"""The precision that trailing bits show."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from replay_core.measure.precision import Precision


def shown(values: torch.Tensor) -> str | None:
    precision = Precision()
    for part in values.numpy().reshape(-1, 64):
        precision.look(part)
    return precision.dtype


@pytest.fixture
def values() -> torch.Tensor:
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(0))


def test_halves_stored_as_fp32_are_seen(values: torch.Tensor):
    assert shown(values.bfloat16().float()) == "bfloat16"
    assert shown(values.half().float()) == "float16"


def test_full_precision_shows_nothing(values: torch.Tensor):
    assert shown(values) is None
    assert shown(values.double()) is None


@pytest.mark.parametrize("few", [(0.0, 1.0), (0.5, -1.0, 2.0), (1.0, 2.0, 3.0, 4.0)])
def test_rewards_and_counts_prove_nothing(few: tuple[float, ...]):
    assert shown(torch.tensor(few).repeat(1024)[:2048].reshape(-1, 64)) is None


def test_one_number_of_full_precision_is_enough(values: torch.Tensor):
    mixed = values.bfloat16().float()
    mixed[31, 63] = 0.1
    assert shown(mixed) is None


def test_a_few_numbers_are_too_few(values: torch.Tensor):
    precision = Precision()
    precision.look(np.ascontiguousarray(values.bfloat16().float().numpy()[:2]))
    assert precision.dtype is None
