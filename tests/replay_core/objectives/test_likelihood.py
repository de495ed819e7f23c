"""The likelihood of labels, as the libraries form it."""

from __future__ import annotations

import pytest
import torch

from replay_core.objectives.likelihood import cross_entropy_sum


@pytest.mark.parametrize("seed", range(3))
def test_the_sum_is_cross_entropys_to_the_last_bit_and_so_is_its_gradient(seed: int) -> None:
    torch.manual_seed(seed)
    logits_BSV, ids_BS = torch.randn(3, 41, 57), torch.randint(0, 57, (3, 41))
    counted_BT = torch.rand(3, 40) < 0.6
    labels_BS = torch.full_like(ids_BS, -100)
    labels_BS[:, :-1] = torch.where(counted_BT, ids_BS[:, 1:], -100)
    a, b = logits_BSV.clone().requires_grad_(True), logits_BSV.clone().requires_grad_(True)
    theirs = torch.nn.functional.cross_entropy(a.flatten(0, 1), labels_BS.flatten(), reduction="sum")
    logprobs_BT = b[:, :-1].log_softmax(-1).gather(-1, ids_BS[:, 1:, None])[..., 0]
    ours = cross_entropy_sum(logprobs_BT, counted_BT)
    assert torch.equal(theirs, ours)
    theirs.backward()
    ours.backward()
    assert a.grad is not None
    assert b.grad is not None
    assert torch.equal(a.grad, b.grad)
