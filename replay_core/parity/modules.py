"""Megatron's captured modules under Hugging Face's names, fused layers cut apart, so that one compare holds both."""

from __future__ import annotations

import re

import torch

from replay_core.parity.weights import Shape, split_qkv
from replay_core.regexes import regex

Tensors = dict[str, torch.Tensor]

#: Megatron's tensor within a layer -> Hugging Face's.
_LAYER = {
    "inputs.hidden_states": "inputs.0",
    "input_layernorm.inputs.0": "input_layernorm.inputs.0",
    "input_layernorm.output": "input_layernorm.output",
    "self_attention.linear_proj.inputs.0": "self_attn.o_proj.inputs.0",
    "self_attention.linear_proj.output.0": "self_attn.o_proj.output",
    "pre_mlp_layernorm.inputs.0": "post_attention_layernorm.inputs.0",
    "pre_mlp_layernorm.output": "post_attention_layernorm.output",
    "mlp.linear_fc2.inputs.0": "mlp.down_proj.inputs.0",
    "mlp.linear_fc2.output.0": "mlp.down_proj.output",
    "output.0": "output",
}
_OUTER = {
    "embedding.output": "embed_tokens.output",
    "decoder.final_layernorm.inputs.0": "norm.inputs.0",
    "decoder.final_layernorm.output": "norm.output",
    "output_layer.value_head.inputs.0": "v_head.inputs.0",
    "output_layer.value_head.output": "v_head.output",
}
_IN_LAYER = regex(r"decoder\.(layers\.\d+\.)(.+)")


def from_megatron(tensors: Tensors, shape: Shape) -> Tensors:
    """What two backbones both have, [B, S, ...] in call order. Megatron keeps [S, B, ...]."""
    made: Tensors = {}
    turned: dict[int, torch.Tensor] = {}

    def batch_first(tensor: torch.Tensor) -> torch.Tensor:
        # A tensor under several names is one; it stays one.
        return turned.setdefault(id(tensor), tensor.transpose(0, 1).contiguous())

    for name, tensor in tensors.items():
        found = _IN_LAYER.fullmatch(name)
        if found is None:
            if name in _OUTER:
                made[_OUTER[name]] = batch_first(tensor)
            continue
        layer, inner = found.groups()
        if inner in _LAYER:
            made[layer + _LAYER[inner]] = batch_first(tensor)
        elif inner == "self_attention.linear_qkv.inputs.0":
            made.update({f"{layer}self_attn.{one}_proj.inputs.0": batch_first(tensor) for one in "qkv"})
        elif inner == "self_attention.linear_qkv.output.0":
            cut = split_qkv(batch_first(tensor), shape, dim=-1)
            made.update({f"{layer}self_attn.{one}_proj.output": part for one, part in zip("qkv", cut, strict=True)})
        elif inner == "mlp.linear_fc1.inputs.0":
            made.update({f"{layer}mlp.{one}_proj.inputs.0": batch_first(tensor) for one in ("gate", "up")})
        elif inner == "mlp.linear_fc1.output.0":
            gate, up = batch_first(tensor).chunk(2, dim=-1)
            made[f"{layer}mlp.gate_proj.output"] = gate.contiguous()
            made[f"{layer}mlp.up_proj.output"] = up.contiguous()
    return made


def common(tensors: Tensors) -> Tensors:
    """The part of a Hugging Face capture that `from_megatron` has names for, in call order."""
    layer = {*_LAYER.values()} | {f"self_attn.{one}_proj.{part}" for one in "qkv" for part in ("inputs.0", "output")}
    layer |= {f"mlp.{one}_proj.{part}" for one in ("gate", "up") for part in ("inputs.0", "output")}
    kept: Tensors = {}
    for name, tensor in tensors.items():
        found = re.fullmatch(r"layers\.\d+\.(.+)", name)
        inner = found.group(1) if found else name
        # A layer's first input goes by position or by keyword.
        inner = {
            "inputs.hidden_states": "inputs.0",
            "output.0": "output",
            "v_head.inputs.hidden_states": "v_head.inputs.0",
        }.get(inner, inner)
        if found and inner in layer:
            kept[name[: found.start(1)] + inner] = tensor
        elif not found and inner in _OUTER.values():
            kept[inner] = tensor
    return kept
