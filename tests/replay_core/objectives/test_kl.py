from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from replay_core.objectives import kl


def test_one_token_worked_by_hand() -> None:
    # The policy gives the token 0.5, the reference 0.25: r = 0.5.
    policy, reference = np.log(np.array([0.5])), np.log(np.array([0.25]))
    np.testing.assert_allclose(kl.k1(policy, reference), [math.log(2)])
    np.testing.assert_allclose(kl.k2(policy, reference), [math.log(2) ** 2 / 2])
    np.testing.assert_allclose(kl.k3(policy, reference), [math.log(2) - 0.5])


def test_k1_and_k3_average_to_the_true_divergence() -> None:
    policy_V, reference_V = np.array([0.7, 0.2, 0.1]), np.array([0.2, 0.5, 0.3])
    true = float((policy_V * np.log(policy_V / reference_V)).sum())
    for estimator in (kl.k1, kl.k3):
        assert float((policy_V * estimator(np.log(policy_V), np.log(reference_V))).sum()) == pytest.approx(true)


@pytest.mark.parametrize("estimator", [kl.k1, kl.k2, kl.k3])
@given(st.lists(st.tuples(st.floats(-20, 0), st.floats(-20, 0)), min_size=1, max_size=20))
def test_numpy_and_torch_give_the_same_numbers(
    estimator: Callable[[Any, Any], Any], rows: list[tuple[float, float]]
) -> None:
    policy_T, reference_T = np.array([row[0] for row in rows]), np.array([row[1] for row in rows])
    from_numpy_T = estimator(policy_T, reference_T)
    from_torch_T = estimator(torch.from_numpy(policy_T), torch.from_numpy(reference_T)).numpy()
    np.testing.assert_allclose(from_numpy_T, from_torch_T, rtol=1e-12, atol=1e-15)
    if estimator is not kl.k1:
        assert (from_numpy_T >= 0).all()
