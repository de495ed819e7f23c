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


def test_clamps_hold_the_log_ratio_and_the_estimate() -> None:
    policy, reference = np.array([-30.0, -1.0, -0.5]), np.array([-1.0, -30.0, -0.25])
    # Log ratios 29, -29, 0.25: held at 20 and -20; e^20 - 21 is held at 10, e^-20 + 19 at 10.
    np.testing.assert_allclose(kl.k3_clamped(policy, reference), [10.0, 10.0, math.exp(0.25) - 1.25])
    # Unheld from outside, the second is e^-20 + 20 - 1.
    np.testing.assert_allclose(kl.k3_clamped(policy, reference, outside=1e9)[1], math.exp(-20) + 19)


def test_the_absolute_log_ratio_has_no_sign() -> None:
    np.testing.assert_array_equal(kl.absolute(np.array([-1.0, -3.0]), np.array([-2.0, -1.0])), [1.0, 2.0])
    both = torch.tensor([-1.0, -3.0]), torch.tensor([-2.0, -1.0])
    np.testing.assert_array_equal(kl.absolute(*both), [1.0, 2.0])
    assert torch.isfinite(kl.k3_clamped(*both)).all()
