"""Whether looking changed the answer."""

import math

import pytest
import torch

from replay_core.replay.answer import observer_effect

HIDDEN = torch.tensor([[[3.0, 4.0], [0.0, 2.0]]])


def test_equal_bits_are_bitwise_equal_nan_included():
    assert observer_effect(HIDDEN, HIDDEN.clone()) == {"bitwise": True, "worst_token": 0.0}
    broken = torch.full_like(HIDDEN, float("nan"))
    assert observer_effect(broken, broken.clone())["bitwise"] is True


def test_the_worst_token_is_relative_to_its_own_length():
    hooked = HIDDEN + torch.tensor([[[0.0, 0.5], [0.0, 0.1]]])
    found = observer_effect(hooked, HIDDEN)
    assert found["bitwise"] is False
    assert found["worst_token"] == pytest.approx(0.1)


def test_a_negative_zero_is_another_bit_and_no_distance():
    zero = torch.zeros(1, 1, 2)
    assert observer_effect(-zero, zero) == {"bitwise": False, "worst_token": 0.0}


def test_a_token_that_only_hooked_is_not_finite_is_no_agreement():
    hooked = HIDDEN.clone()
    hooked[0, 0, 0] = float("nan")
    found = observer_effect(hooked, HIDDEN)
    assert found["bitwise"] is False
    assert not math.isfinite(found["worst_token"])
