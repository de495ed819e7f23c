"""What carries a value, and the errors that rounding may add to it."""

from __future__ import annotations

import pytest
import torch

from replay_core.referee.arithmetic import SIGNIFICAND, Arithmetic, Noise, TrueTensor, nearest, ulp


@pytest.mark.parametrize("dtype", list(SIGNIFICAND))
@pytest.mark.parametrize("carrier", [torch.float32, torch.float64])
def test_the_unit_of_the_last_place_is_the_distance_to_the_next_number_of_the_dtype(dtype, carrier):
    values = torch.cat([torch.randn(500) * 10.0**power for power in (-20, -3, 0, 4)]).to(dtype)
    # The next number up, by the bits of the one below it.
    whole = torch.int32 if dtype == torch.float32 else torch.int16
    beyond = (values.abs().view(whole) + 1).view(dtype)
    apart = beyond.double() - values.abs().double()
    normal = values.abs().double() >= 2.0 ** SIGNIFICAND[dtype][1]
    assert torch.equal(ulp(values.to(carrier), dtype)[normal].double(), apart[normal])


def test_zeros_have_the_unit_of_the_smallest_normal_number_and_infinities_stay_infinite_under_noise():
    values = torch.tensor([0.0, -float("inf"), float("inf"), float("nan")], dtype=torch.float64)
    assert ulp(values, torch.bfloat16)[0] == 2.0**-133
    moved = Noise(0, 16.0)("add", values, torch.bfloat16)
    assert moved[1:3].tolist() == [-float("inf"), float("inf")]
    assert moved[3].isnan()


def test_noise_of_half_precision_is_carried_in_float32_and_of_float32_in_float64():
    half, single = (TrueTensor(torch.randn(4, 8, dtype=torch.float64), one) for one in (torch.bfloat16, torch.float32))
    with Arithmetic(Noise(0, 16.0)):
        assert (half + half).true.dtype == torch.float32
        assert (half.float() * 2).true.dtype == torch.float64
        assert (half + single).true.dtype == torch.float64
    with Arithmetic(nearest):
        assert (half + half).true.dtype == torch.float64


@pytest.mark.parametrize("count", [1 << 10, 1 << 17])
def test_a_long_sum_may_be_off_by_what_torchs_own_softmax_is_off_by(count):
    logits = (torch.randn(32, count, generator=torch.Generator().manual_seed(0)) * 3).bfloat16().float()
    off = torch.log_softmax(logits, -1)[:, 0].double() - torch.log_softmax(logits.double(), -1)[:, 0]
    with Arithmetic(Noise(1, 16.0)):
        moved = torch.logsumexp(TrueTensor(logits.double(), torch.float32), -1).true
    noise = moved - torch.logsumexp(logits.double(), -1)
    assert 0.3 < float(noise.square().mean().sqrt() / off.square().mean().sqrt()) < 30
