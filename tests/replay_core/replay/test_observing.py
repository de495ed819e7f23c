"""What a replay keeps as the final hidden states, whoever made them."""

import torch

from replay_core.replay.observing import _hold


def test_the_final_states_are_the_backbones_where_its_norm_is_called_row_by_row():
    whole = torch.randn(3, 12, 8)
    tensors = {"norm.output": whole[:1], "norm.output[1]": whole[1:2]}
    _hold(tensors, "norm.output", whole)
    assert torch.equal(tensors["norm.output"], whole)


def test_the_final_states_are_the_norms_own_where_it_put_them_out():
    whole = torch.randn(3, 12, 8)
    tensors = {"norm.output": whole}
    _hold(tensors, "norm.output", whole.clone())
    assert tensors["norm.output"] is whole
