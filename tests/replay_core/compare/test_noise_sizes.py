"""Steps of noise are as long in both runs, whichever way they point."""

from __future__ import annotations

import numpy as np
import pytest

from replay_core.compare.noise_sizes import NoiseSizes

RATE = 1e-3


def _sizes(*, times: float = 1.0, louder: float = 1.0, decay: float = 0.0, biases: int = 4, width: int = 64) -> bool:
    """Whether steps of b that are so many times a's are of one size; gradients: b's so much louder."""
    drawn, sizes, is_one = np.random.default_rng(1), NoiseSizes(), True
    for _step in range(3):
        for number in range(biases):
            a, b = drawn.uniform(-RATE, RATE, (2, width))
            weight = 0.1 * np.random.default_rng(number).normal(size=width)
            gradients = 1e-8 * drawn.normal(size=(2, width))
            made = a, b * times - decay * weight
            sizes.take("actor", number, made, (gradients[0], gradients[1] * louder), weight)
            is_one = is_one and sizes.are_one("actor", number)
    return is_one


def test_noise_of_one_rate_is_of_one_size():
    assert _sizes()


@pytest.mark.parametrize("times", [0.5, 2.0])
def test_another_rate_is_another_size(times: float):
    assert not _sizes(times=times)


def test_a_louder_gradient_may_step_further_and_no_smaller():
    assert _sizes(times=2.0, louder=2.5)
    assert not _sizes(times=0.5, louder=2.5)


def test_a_decay_is_along_the_weights():
    assert not _sizes(decay=5e-3)


def test_few_elements_tell_nothing():
    assert _sizes(times=4.0, biases=1, width=8)
