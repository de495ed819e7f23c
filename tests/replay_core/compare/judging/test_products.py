"""Norms of sums and differences of tensors, of the inner products that one pass makes."""

from __future__ import annotations

import time

import numpy as np
import pytest

from replay_core.compare.judging.products import products_of
from replay_core.records import Inline, TensorRef


def ref(values: np.ndarray) -> TensorRef:
    return TensorRef("x", "float64", values.shape, Inline(values.tobytes()))


def test_norms_are_those_of_the_combinations_and_of_what_is_nearly_alike() -> None:
    random = np.random.default_rng(0)
    first, second = random.standard_normal((2, 5000))
    near = first + 1e-11 * second
    products = products_of([ref(first), ref(near), ref(second), ref(second + 1e-5 * first)])
    assert products.norm({0: -1, 1: 1}) == pytest.approx(np.linalg.norm(near - first), rel=1e-12)
    assert products.norm({2: 1, 3: -1}) == pytest.approx(1e-5 * np.linalg.norm(first), rel=1e-3)
    assert products.norm({0: 1, 2: 2.0, 3: -1}) == pytest.approx(np.linalg.norm(first * (1 - 1e-5) + second), rel=1e-9)


def test_many_tensors_are_not_held_each_against_each() -> None:
    """Of 512 tensors there are 130,816 pairs: to go through them one by one took a second."""
    refs = [ref(row) for row in np.random.default_rng(0).standard_normal((512, 2000))]
    taken = []
    for _ in range(3):
        begun = time.process_time()
        products_of(refs)
        taken.append(time.process_time() - begun)
    assert min(taken) < 0.3
