"""A factory's own code in a finer pass: its casts to the dtype that the model was built in round nothing there."""

from __future__ import annotations

import pytest
import torch

from replay_core.replay.mixed_dtypes import widened

_BUILT = frozenset({torch.bfloat16})
_THIRD = torch.tensor([1 / 3], dtype=torch.float64)


@pytest.mark.parametrize(
    "cast",
    [
        lambda x: x.to(torch.bfloat16),
        lambda x: x.to(dtype=torch.bfloat16),
        lambda x: x.to("cpu", torch.bfloat16),
        lambda x: x.type(torch.bfloat16),
        lambda x: x.bfloat16(),
        lambda x: x.to(torch.zeros(1, dtype=torch.bfloat16)),
        lambda x: x.type_as(torch.zeros(1, dtype=torch.bfloat16)),
    ],
    ids=["to", "to by name", "to of a device", "type", "bfloat16", "to a tensor's", "type_as"],
)
def test_a_cast_to_the_dtype_it_was_built_in_rounds_nothing_in_a_finer_pass(cast) -> None:
    with widened("factory:policy:build", is_cast=True, built=_BUILT, asked=torch.float64):
        assert cast(_THIRD).equal(_THIRD)
    assert cast(_THIRD).dtype is torch.bfloat16


def test_other_casts_are_the_policys_own_and_stay() -> None:
    with widened("factory:policy:build", is_cast=True, built=_BUILT, asked=torch.float64):
        assert _THIRD.half().dtype is torch.float16
        assert _THIRD.float().dtype is torch.float32
        assert torch.tensor([3]).to(torch.bfloat16).dtype is torch.bfloat16
    with widened("checkpoint", is_cast=True, built=_BUILT, asked=torch.float64):
        assert _THIRD.bfloat16().dtype is torch.bfloat16


def test_two_dtypes_that_torch_refuses_are_both_the_wider() -> None:
    half = torch.ones(2, 2, dtype=torch.bfloat16)
    with widened("factory:policy:build", is_cast=True, built=_BUILT, asked=torch.float64):
        assert (torch.ones(2, 2, dtype=torch.float64) @ half).dtype is torch.float64


def test_what_is_written_in_place_is_never_written_to_a_copy() -> None:
    held = torch.zeros(3, 2, dtype=torch.bfloat16)
    with widened("factory:policy:build", is_cast=True), pytest.raises(RuntimeError, match="same scalar type"):
        held.index_add_(0, torch.tensor([0]), torch.ones(1, 2, dtype=torch.float64))
    with widened("factory:policy:build", is_cast=True), pytest.raises(RuntimeError):
        torch.mm(held, torch.ones(2, 2, dtype=torch.float64), out=torch.zeros(3, 2, dtype=torch.bfloat16))
