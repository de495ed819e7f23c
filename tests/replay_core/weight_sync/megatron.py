"""A checkpoint as Megatron writes it, of one as Hugging Face writes it; shares nothing with the rules.

`mp_rank_TT_PPP/model_optim_rng.pt`: each pipeline stage counts its layers from 0; each tensor rank holds its query
groups (queries, key, value, group after group), its gate over its up, its columns of what follows.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

Weights = dict[str, torch.Tensor]


def write(checkpoint: Weights, config: Any, folder: Path, tensor: int, pipeline: int, padded: int = 0) -> Path:
    heads, groups, depth = config.num_attention_heads, config.num_key_value_heads, config.num_hidden_layers // pipeline
    args = argparse.Namespace(num_attention_heads=heads, num_query_groups=groups, group_query_attention=True,
                              swiglu=True, untie_embeddings_and_output_weights=False)  # fmt: skip
    for stage in range(pipeline):
        for rank in range(tensor):
            state: Weights = {}
            if stage == 0:
                words = checkpoint["model.embed_tokens.weight"]
                words = torch.cat([words, words.new_zeros(padded, words.shape[1])])
                state["embedding.word_embeddings.weight"] = words.chunk(tensor)[rank]
            for local in range(depth):
                _layer(checkpoint, f"model.layers.{stage * depth + local}.", state, f"decoder.layers.{local}.",
                       heads, groups, tensor, rank)  # fmt: skip
            if stage == pipeline - 1:
                state["decoder.final_layernorm.weight"] = checkpoint["model.norm.weight"]
            place = folder / (f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pipeline > 1 else ""))
            place.mkdir(parents=True)
            torch.save({"args": args, "checkpoint_version": 3.0, "iteration": 2,
                        "model": {name: value.clone() for name, value in state.items()},
                        "optimizer": {"state": {}}}, place / "model_optim_rng.pt")  # fmt: skip
    return folder


def _layer(checkpoint: Weights, here: str, state: Weights, there: str, heads: int, groups: int, tensor: int,
           rank: int) -> None:  # fmt: skip
    for part in ("weight", "bias"):
        q, k, v = (checkpoint[f"{here}self_attn.{one}_proj.{part}"] for one in "qkv")
        size, fused = len(q) // heads, []
        for group in range(groups):
            own = heads // groups * size
            span = slice(group * size, (group + 1) * size)
            fused += [q[group * own : (group + 1) * own], k[span], v[span]]
        state[f"{there}self_attention.linear_qkv.{part}"] = torch.cat(fused).chunk(tensor)[rank]
    state[f"{there}self_attention.linear_proj.weight"] = checkpoint[f"{here}self_attn.o_proj.weight"].chunk(tensor, 1)[
        rank
    ]
    gate, up = (checkpoint[f"{here}mlp.{one}_proj.weight"].chunk(tensor)[rank] for one in ("gate", "up"))
    state[f"{there}mlp.linear_fc1.weight"] = torch.cat([gate, up])
    state[f"{there}mlp.linear_fc2.weight"] = checkpoint[f"{here}mlp.down_proj.weight"].chunk(tensor, 1)[rank]
    state[f"{there}self_attention.linear_qkv.layer_norm_weight"] = checkpoint[f"{here}input_layernorm.weight"]
    state[f"{there}mlp.linear_fc1.layer_norm_weight"] = checkpoint[f"{here}post_attention_layernorm.weight"]
