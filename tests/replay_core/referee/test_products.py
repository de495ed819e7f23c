"""Products of a layer's weight: what was widened piece by piece is the product, and what is kept is of that weight."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from replay_core.referee import products
from replay_core.referee.arithmetic import Arithmetic, Noise, TrueTensor, exactly, ulp
from replay_core.referee.products import KeptProducts, Products


def _x(dtype: torch.dtype, source: str | None = "q_proj.inputs.0") -> TrueTensor:
    made = TrueTensor(torch.randn(2, 5, 24, dtype=torch.float64).to(dtype).double(), dtype)
    made.source = source
    return made


def _run(x: TrueTensor, weight: torch.Tensor, kept: KeptProducts, rounding=exactly, bias=None) -> torch.Tensor:
    with torch.no_grad(), Products(rounding, kept, is_narrow=isinstance(rounding, Noise)), Arithmetic(rounding):
        return functional.linear(x, weight, bias).true.double()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("piece", [1, 100, 1 << 21])
def test_a_product_in_pieces_is_the_product_whatever_their_size(dtype, piece, monkeypatch):
    monkeypatch.setattr(products, "_PIECE", piece)
    x, weight, bias = _x(dtype), torch.nn.Parameter(torch.randn(31, 24).to(dtype)), torch.randn(31).to(dtype)
    right = x.true @ weight.detach().double().T + bias.double()
    torch.testing.assert_close(_run(x, weight, KeptProducts(1 << 20), bias=bias), right, rtol=1e-13, atol=1e-13)
    noise = _run(x, weight, KeptProducts(1 << 20), Noise(0, 16.0), bias) - right
    squares = x.true.square() @ weight.detach().double().square().T
    sigma = (ulp(right, dtype).square() / 12 + 2.0**-48 / 3 * 16 * squares).sqrt()
    assert 0.8 < float((noise / sigma).square().mean().sqrt()) < 1.2


def test_the_product_of_a_recorded_input_is_computed_once_and_its_noise_is_drawn_anew(monkeypatch):
    runs = []
    own = products._multiplied
    monkeypatch.setattr(products, "_multiplied", lambda *args, **kwargs: runs.append(kwargs) or own(*args, **kwargs))
    kept, x, weight = KeptProducts(1 << 20), _x(torch.bfloat16), torch.nn.Parameter(torch.randn(31, 24).bfloat16())
    exact = _run(x, weight, kept)
    first, second = _run(x, weight, kept, Noise(0, 16.0)), _run(x, weight, kept, Noise(1, 16.0))
    assert [(run["needs_product"], run["needs_squares"]) for run in runs] == [(True, True)]
    assert not torch.equal(first, second)
    torch.testing.assert_close(_run(x, weight, kept), exact, rtol=2**-23, atol=2**-20)
    _run(_x(torch.bfloat16, None), weight, kept)
    assert runs[-1]["needs_product"], "what was computed is not what was recorded"


def test_nothing_that_is_kept_outlives_a_change_of_the_weight():
    kept, x, weight = KeptProducts(1 << 20), _x(torch.float32), torch.nn.Parameter(torch.randn(31, 24))
    before = _run(x, weight, kept)
    with torch.no_grad():
        weight.mul_(2)
    torch.testing.assert_close(_run(x, weight, kept), 2 * before)
    other = torch.nn.Parameter(torch.zeros(31, 24))
    assert not _run(x, other, kept).any()


def test_a_hypothesis_weight_is_not_kept_and_room_ends():
    kept, x = KeptProducts(1 << 20), _x(torch.float32)
    _run(x, torch.randn(31, 24), kept)
    assert kept.room == 1 << 20
    small, weight = KeptProducts(100), torch.nn.Parameter(torch.randn(31, 24))
    torch.testing.assert_close(_run(x, weight, small), _run(x, weight, small))
    assert small.room == 100


def test_an_expert_of_a_stack_is_widened_alone():
    stack = torch.nn.Parameter(torch.randn(4, 31, 24).bfloat16())
    kept, x = KeptProducts(1 << 20), _x(torch.bfloat16)
    with torch.no_grad(), Products(exactly, kept, is_narrow=False), Arithmetic(exactly):
        made = functional.linear(x, stack[2])
    torch.testing.assert_close(made.true, x.true @ stack[2].detach().double().T)
    assert made.dtype == torch.bfloat16
