"""What a block that is not what was sent comes near to: a grid is one only where its values lie on it."""

from __future__ import annotations

import pytest
import torch

from replay_core.weight_sync.fits import fit
from replay_core.weight_sync.state import Values

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def held(tensor: torch.Tensor) -> Values:
    """As a reader gives it."""
    if tensor.dtype == torch.bfloat16:
        import ml_dtypes

        return tensor.float().numpy().astype(ml_dtypes.bfloat16)
    return tensor.numpy()


def norm(size: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.ones(size) + 0.05 * torch.randn(size)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [4, 16, 128, 896])
@pytest.mark.parametrize("spread", [1e-4, 1e-3, 8e-3])
def test_another_step_of_training_is_on_no_grid(size: int, spread: float, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    for sent in (norm(size, dtype), torch.ones(size).to(dtype), (0.1 * torch.randn(size)).to(dtype)):
        got = (sent.float() * (1 + spread * torch.randn(size)) + spread).to(dtype)
        if torch.equal(got, sent):
            continue
        found = fit(held(got), held(sent), None)
        assert found is None or found[0] != "quantised", found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 8), (16, 4), (8, 16), (64, 192)])
def test_a_matrix_of_another_step_is_on_no_grid(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    sent = torch.randn(shape).to(dtype)
    for got in (sent.float() + 1e-3, sent.float() * (1 + 2e-3 * torch.randn(shape))):
        found = fit(held(got.to(dtype)), held(sent), None)
        assert found is None or found[0] != "quantised", found


def scales(sent: torch.Tensor, scope: str) -> torch.Tensor:
    size = sent.float().abs()
    if scope == "row":
        return size.amax(1, keepdim=True)
    if scope == "128 columns":
        return size.reshape(len(sent), -1, 128).amax(2).repeat_interleave(128, 1)
    if scope == "128 x 128 block":
        blocks = size.reshape(len(sent) // 128, 128, -1, 128).amax((1, 3))
        return blocks.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return size.amax().reshape(1, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scope", ["tensor", "row", "128 columns", "128 x 128 block"])
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize(("grid", "top"), [(E4M3, 448.0), (E5M2, 57344.0)])
def test_values_on_a_float8_grid_are_said_to_be(
    grid: torch.dtype, top: float, power_of_two: bool, scope: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(4)
    sent = (0.02 * torch.randn(256, 384) * torch.rand(256, 1)).to(dtype)
    scale = scales(sent, scope) / top
    if power_of_two:
        scale = scale.log2().ceil().exp2()
    got = ((sent.float() / scale).to(grid).float() * scale).to(dtype)
    found = fit(held(got), held(sent), None)
    assert found is not None
    assert found[0] == "quantised"
    assert str(grid).removeprefix("torch.") in found[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cast_to_float8_without_a_scale_is_on_its_grid(dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    sent = torch.randn(16, 24).to(dtype)
    found = fit(held(sent.to(E4M3).to(dtype)), held(sent), None)
    assert found == ("quantised", "the values on a grid of float8_e4m3fn, no scale")


@pytest.mark.parametrize(("levels", "name"), [(127, "int8"), (7, "int4")])
def test_integer_grids_are_still_found(levels: int, name: str) -> None:
    torch.manual_seed(6)
    for dtype in (torch.float32, torch.bfloat16):
        sent = torch.randn(32, 64).to(dtype)
        scale = scales(sent, "row") / levels
        found = fit(held(((sent.float() / scale).round() * scale).to(dtype)), held(sent), None)
        assert found is not None
        assert f"{name} grid" in found[1]
