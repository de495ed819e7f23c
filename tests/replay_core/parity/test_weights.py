"""Weights between the two layouts: exact both ways, and one qkv written out by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replay_core.errors import ModelError
from replay_core.parity.weights import Shape, fuse_qkv, split_qkv, to_huggingface, to_megatron


def huggingface_state(shape: Shape, *, bias: bool, inner: int = 6) -> dict[str, torch.Tensor]:
    hidden = shape.heads * shape.head_dim
    wide = {"q": hidden, "k": shape.groups * shape.head_dim, "v": shape.groups * shape.head_dim}
    state = {"embed_tokens.weight": torch.randn(11, hidden), "norm.weight": torch.randn(hidden)}
    for layer in range(shape.layers):
        here = f"layers.{layer}."
        for one, rows in wide.items():
            state[f"{here}self_attn.{one}_proj.weight"] = torch.randn(rows, hidden)
            if bias:
                state[f"{here}self_attn.{one}_proj.bias"] = torch.randn(rows)
        state[f"{here}self_attn.o_proj.weight"] = torch.randn(hidden, hidden)
        state[f"{here}mlp.gate_proj.weight"] = torch.randn(inner, hidden)
        state[f"{here}mlp.up_proj.weight"] = torch.randn(inner, hidden)
        state[f"{here}mlp.down_proj.weight"] = torch.randn(hidden, inner)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            state[f"{here}{norm}.weight"] = torch.randn(hidden)
    return {**state, "v_head.summary.weight": torch.randn(1, hidden)}


@given(
    groups=st.integers(1, 4),
    share=st.integers(1, 4),
    head_dim=st.integers(1, 5),
    layers=st.integers(1, 3),
    bias=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_there_and_back_is_the_same_bits(groups: int, share: int, head_dim: int, layers: int, bias: bool):
    shape = Shape(layers, groups * share, groups, head_dim)
    state = huggingface_state(shape, bias=bias)
    back = to_huggingface(to_megatron(state, shape), shape)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)


def test_a_group_holds_its_queries_then_its_key_then_its_value():
    shape = Shape(1, heads=4, groups=2, head_dim=1)
    q, k, v = torch.tensor([[0.0], [1], [2], [3]]), torch.tensor([[10.0], [11]]), torch.tensor([[20.0], [21]])
    assert fuse_qkv(q, k, v, shape).flatten().tolist() == [0, 1, 10, 20, 2, 3, 11, 21]


def test_what_a_fused_layer_puts_out_is_cut_as_its_weights_are():
    shape = Shape(1, heads=4, groups=2, head_dim=3)
    q, k, v = torch.randn(12, 5), torch.randn(6, 5), torch.randn(6, 5)
    hidden_BSD = torch.randn(2, 7, 5)
    cut = split_qkv(hidden_BSD @ fuse_qkv(q, k, v, shape).T, shape, dim=-1)
    for found, weight in zip(cut, (q, k, v), strict=True):
        torch.testing.assert_close(found, hidden_BSD @ weight.T)


def test_a_missing_weight_and_one_too_many_are_named():
    shape = Shape(1, 2, 1, 2)
    state = huggingface_state(shape, bias=False)
    with pytest.raises(ModelError, match="no place") as more:
        to_megatron({**state, "layers.0.self_attn.q_norm.weight": torch.ones(2)}, shape)
    assert more.value.tensor == "layers.0.self_attn.q_norm.weight"
    del state["layers.0.mlp.up_proj.weight"]
    with pytest.raises(ModelError, match="missing") as less:
        to_megatron(state, shape)
    assert less.value.tensor == "layers.0.mlp.up_proj.weight"
