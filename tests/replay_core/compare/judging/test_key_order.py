"""Keys in another order than the positions they are masked by, told by the tokens that are right all the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from replay_core.compare.parallel import parallel
from tests.builders import there
from tests.replay_core.compare.ranks.recorded import compared, random

S, HIDDEN = 24, 8


def attended(queries: Tensor, keys: Tensor, at: Tensor, of_keys: Tensor) -> Tensor:
    """Causal attention of queries at positions `at` over keys that are taken to be at `of_keys`."""
    scores = queries @ keys.transpose(-1, -2) / HIDDEN
    return scores.masked_fill(of_keys[None, None, :] > at[None, :, None], -torch.inf).softmax(-1) @ keys


def held(ranks: int, zigzag: bool) -> list[Tensor]:
    chunks = torch.arange(S).chunk(2 * ranks if zigzag else ranks)
    return [torch.cat((chunks[r], chunks[2 * ranks - 1 - r])) if zigzag else chunks[r] for r in range(ranks)]


def faults(tmp_path: Path, ranks: int, zigzag: bool, assumed: Tensor) -> set[tuple[str, tuple[int, ...]]]:
    x, ids = random(2, S, HIDDEN), torch.arange(2 * S).reshape(2, S)
    mine = held(ranks, zigzag)
    gathered = torch.cat(mine)
    one = {
        "batch_inputs": {"input_ids": ids},
        "modules": {"layers.0.output": attended(x, x, torch.arange(S), torch.arange(S))},
    }
    wrong = [
        {
            "batch_inputs": {"input_ids": ids[:, at]},
            "modules": {"layers.0.output": attended(x[:, at], x[:, gathered], at, assumed)},
        }
        for at in mine
    ]
    found = compared(tmp_path, one, *wrong)
    assert found.agrees is torch.equal(assumed, gathered)
    return {(one.fault.kind, one.fault.ranks) for one in there(parallel(found.tensors, found.together)).faults}


@pytest.mark.parametrize(("ranks", "zigzag"), [(2, False), (2, True), (3, False), (3, True), (4, True)])
def test_keys_whose_positions_are_reversed_between_ranks_are_named(ranks: int, zigzag: bool, tmp_path: Path) -> None:
    assumed = torch.cat(held(ranks, zigzag)[::-1])
    assert faults(tmp_path, ranks, zigzag, assumed) == {("keys order", tuple(range(ranks)))}


def test_keys_gathered_in_zigzag_and_taken_to_be_in_order_are_named(tmp_path: Path) -> None:
    assert faults(tmp_path, 2, True, torch.arange(S)) == {("keys order", (0, 1))}


def test_keys_held_in_order_and_masked_as_if_in_zigzag_are_named(tmp_path: Path) -> None:
    assert faults(tmp_path, 2, False, torch.cat(held(2, True))) == {("keys order", (0, 1))}


def test_keys_in_their_order_are_nothing(tmp_path: Path) -> None:
    assert faults(tmp_path, 2, True, torch.cat(held(2, True))) == set()


def test_tokens_that_are_off_for_another_reason_are_no_order_of_keys(tmp_path: Path) -> None:
    """Keys that a rank cannot see at all: its own alone."""
    x, ids = random(2, S, HIDDEN), torch.arange(2 * S).reshape(2, S)
    mine = held(2, zigzag=False)
    whole = attended(x, x, torch.arange(S), torch.arange(S))
    one = {"batch_inputs": {"input_ids": ids}, "modules": {"layers.0.output": whole}}
    wrong = [
        {
            "batch_inputs": {"input_ids": ids[:, at]},
            "modules": {"layers.0.output": attended(x[:, at], x[:, at], at, at)},
        }
        for at in mine
    ]
    found = compared(tmp_path, one, *wrong)
    said = {one.fault.kind for one in there(parallel(found.tensors, found.together)).faults}
    assert "keys order" not in said
    assert found.agrees is False


@pytest.mark.parametrize(("sees", "expected"), [
    (8, {("own keys", (1,))}), (0, {("own mask", (1,))}), (3, {("apart", (1,))}),
])  # fmt: skip
@pytest.mark.parametrize("is_fused", [False, True])
def test_a_first_token_that_sees_one_key_tells_which_through_the_projection(
    sees: int, expected: set[tuple[str, tuple[int, ...]]], is_fused: bool, tmp_path: Path
) -> None:
    """Attention itself is not recorded: what its projection makes of a value is."""
    values, right, weight = random(2, 16, 6), random(2, 16, 5, seed=1), random(5, 6, seed=2)
    put_out = torch.cat([random(2, 16, 12, seed=3), values], 2) if is_fused else values
    bias, wrong, ids = random(5, seed=4), right.clone(), torch.arange(32).reshape(2, 16)
    wrong[:, 8:] = random(2, 8, 5, seed=5)
    wrong[:, 8] = values[:, sees] @ weight.T + bias

    def step(output: Tensor, at: slice) -> dict[str, dict[str, Tensor]]:
        modules = {"layers.0.attn.v.output": put_out, "layers.0.attn.o.output": output}
        return {
            "batch_inputs": {"input_ids": ids[:, at].contiguous()},
            "modules": {name: one[:, at].contiguous() for name, one in modules.items()},
            "param": {"param.layers.0.attn.o.weight": weight, "param.layers.0.attn.o.bias": bias},
        }

    found = compared(tmp_path, step(right, slice(None)), *(step(wrong, at) for at in (slice(0, 8), slice(8, 16))))
    assert {
        (one.fault.kind, one.fault.ranks) for one in there(parallel(found.tensors, found.together)).faults
    } == expected
