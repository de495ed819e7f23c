"""Weights between Hugging Face's layout (Llama, Qwen2) and Megatron-core's, both ways, exactly.

Megatron fuses what Hugging Face keeps apart. linear_qkv holds, for each group of queries that share a key, first the
group's query heads, then its key, then its value. linear_fc1 holds the gate, then the up projection. Nothing is
computed: every number is copied.
"""

from __future__ import annotations

from typing import Any

import torch
from msgspec import Struct

from replay_core.errors import ModelError

Tensors = dict[str, torch.Tensor]

#: Hugging Face's name within a layer -> Megatron's, where the tensor is the same.
_SAME = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attn.o_proj.weight": "self_attention.linear_proj.weight",
    "post_attention_layernorm.weight": "pre_mlp_layernorm.weight",
    "mlp.down_proj.weight": "mlp.linear_fc2.weight",
}
_OUTER = {
    "embed_tokens.weight": "embedding.word_embeddings.weight",
    "norm.weight": "decoder.final_layernorm.weight",
    "v_head.summary.weight": "output_layer.value_head.summary.weight",
    "v_head.summary.bias": "output_layer.value_head.summary.bias",
}


class Shape(Struct, frozen=True):
    """What the conversion must know of a model."""

    layers: int
    heads: int
    groups: int
    head_dim: int

    @classmethod
    def of(cls, config: Any) -> Shape:
        """From a Hugging Face config."""
        heads = config.num_attention_heads
        return cls(
            layers=config.num_hidden_layers,
            heads=heads,
            groups=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        )


def to_megatron(state: Tensors, shape: Shape) -> Tensors:
    """Megatron's state of a Hugging Face state (names without `model.`; the head as `v_head.summary.*`).

    Raises:
        ModelError: a weight is missing, or there is one that Megatron has no place for.
    """
    left = dict(state)
    made: Tensors = {}
    for theirs, ours in _OUTER.items():
        if theirs in left:
            made[ours] = left.pop(theirs)
    for layer in range(shape.layers):
        here, there = f"layers.{layer}.", f"decoder.layers.{layer}."
        for theirs, ours in _SAME.items():
            made[there + ours] = _pop(left, here + theirs)
        for part in ("weight", "bias"):
            names = [f"{here}self_attn.{one}_proj.{part}" for one in "qkv"]
            if part == "weight" or names[0] in left:
                q, k, v = (_pop(left, name) for name in names)
                made[f"{there}self_attention.linear_qkv.{part}"] = fuse_qkv(q, k, v, shape)
        gate_up = (_pop(left, f"{here}mlp.gate_proj.weight"), _pop(left, f"{here}mlp.up_proj.weight"))
        made[f"{there}mlp.linear_fc1.weight"] = torch.cat(gate_up)
    if left:
        raise ModelError(
            "Megatron's GPTModel has no place for some weights",
            tensor=", ".join(sorted(left)[:3]), expected="a Llama or Qwen2 backbone", found=f"{len(left)} weights more",
        )  # fmt: skip
    return made


def to_huggingface(state: Tensors, shape: Shape) -> Tensors:
    """The Hugging Face state of a Megatron state: the inverse of `to_megatron`."""
    left = dict(state)
    made: Tensors = {"embed_tokens.weight": _pop(left, _OUTER["embed_tokens.weight"])}
    for layer in range(shape.layers):
        here, there = f"layers.{layer}.", f"decoder.layers.{layer}."
        made[f"{here}input_layernorm.weight"] = _pop(left, f"{there}input_layernorm.weight")
        for part in ("weight", "bias"):
            fused = left.pop(f"{there}self_attention.linear_qkv.{part}", None)
            if fused is not None:
                for one, tensor in zip("qkv", split_qkv(fused, shape), strict=True):
                    made[f"{here}self_attn.{one}_proj.{part}"] = tensor
        for theirs, ours in _SAME.items():
            made.setdefault(here + theirs, left.pop(there + ours, made.get(here + theirs)))
        gate, up = _pop(left, f"{there}mlp.linear_fc1.weight").chunk(2)
        made[f"{here}mlp.gate_proj.weight"], made[f"{here}mlp.up_proj.weight"] = gate, up
    for theirs, ours in _OUTER.items():
        if ours in left:
            made[theirs] = left.pop(ours)
    return made


def fuse_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shape: Shape) -> torch.Tensor:
    """[heads d, ...], [groups d, ...] twice -> [groups (heads/groups + 2) d, ...], group by group."""
    rest = q.shape[1:]
    parts = [one.reshape(shape.groups, -1, *rest) for one in (q, k, v)]
    return torch.cat(parts, dim=1).reshape(-1, *rest)


def split_qkv(fused: torch.Tensor, shape: Shape, dim: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The inverse of `fuse_qkv` along `dim`: also cuts the activations [..., qkv] that the fused layer puts out."""
    moved = fused.movedim(dim, 0)
    rest = moved.shape[1:]
    grouped = moved.reshape(shape.groups, -1, *rest)
    width = shape.heads // shape.groups * shape.head_dim
    cut = grouped.split([width, shape.head_dim, shape.head_dim], dim=1)
    q, k, v = (one.reshape(-1, *rest).movedim(0, dim).contiguous() for one in cut)
    return q, k, v


def _pop(state: Tensors, name: str) -> torch.Tensor:
    if name not in state:
        raise ModelError("a weight is missing from the backbone", tensor=name, expected="a Llama or Qwen2 layout")
    return state.pop(name)
