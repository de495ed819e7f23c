"""A decoder as inference engines write it (vLLM, sglang), whole or one rank's part of it in tensor parallel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

#: Adds what the ranks computed.
AllReduce = Callable[[Tensor], Tensor]


class _Linear(nn.Module):
    """A parallel linear of vLLM's: it returns (out, bias). Of a part of the columns the ranks' products are added."""

    def __init__(self, *weights: Tensor, all_reduce: AllReduce | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.cat(weights))
        self.all_reduce = all_reduce

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        out = functional.linear(x, self.weight)
        return (out if self.all_reduce is None else self.all_reduce(out)), None


@dataclass(frozen=True)
class Part:
    """One rank of a tensor-parallel group; `all_reduce` None: there is one rank alone."""

    rank: int = 0
    of: int = 1
    all_reduce: AllReduce | None = None

    def rows(self, weight: Tensor, heads: int | None = None) -> Tensor:
        """Its rows; of fewer heads than ranks, the head that it shares with others."""
        parts = min(self.of, heads or self.of)
        return weight.chunk(parts)[self.rank * parts // self.of]

    def columns(self, weight: Tensor) -> Tensor:
        return weight.chunk(self.of, 1)[self.rank]


class _Norm(nn.Module):
    """RMSNorm of vLLM's: it adds the residual, and rounds once."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(norm.weight.detach().clone()), norm.variance_epsilon

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        dtype = x.dtype
        wide = x.float() if residual is None else x.float() + residual.float()
        after = wide.to(dtype)
        wide = after.float()
        normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight.float()).to(dtype)
        return normed if residual is None else (normed, after)


class _Attention(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, bounds: list[int]) -> Tensor:
        out = torch.empty_like(q)
        for start, end in pairwise(bounds):
            queries, keys, values = (x[start:end].transpose(0, 1)[None].float() for x in (q, k, v))
            mixed = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
            out[start:end] = mixed[0].transpose(0, 1).to(q.dtype)
        return out.flatten(1)


class _SelfAttention(nn.Module):
    def __init__(self, theirs: Any, part: Part) -> None:
        super().__init__()
        heads = theirs.config.num_key_value_heads
        q, k, v = theirs.q_proj.weight, theirs.k_proj.weight, theirs.v_proj.weight
        cut = part.rows(q), part.rows(k, heads), part.rows(v, heads)
        self.qkv_proj, self.sizes = _Linear(*cut), [len(one) for one in cut]
        self.o_proj = _Linear(part.columns(theirs.o_proj.weight), all_reduce=part.all_reduce)
        self.attn, self.head = _Attention(), theirs.head_dim

    def forward(self, positions: Tensor, hidden: Tensor, bounds: list[int]) -> Tensor:
        q, k, v = (x.unflatten(-1, (-1, self.head)) for x in self.qkv_proj(hidden)[0].split(self.sizes, -1))
        half = self.head // 2
        angle = positions[:, None].float() / 10000.0 ** (torch.arange(half) / half)
        cos, sin = (table[:, None].to(hidden.dtype) for table in (angle.cos(), angle.sin()))

        def turn(x: Tensor) -> Tensor:
            x1, x2 = x.chunk(2, -1)
            return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1)

        mixed: Tensor = self.o_proj(self.attn(turn(q), turn(k), v, bounds))[0]
        return mixed


class _SiluAndMul(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return (functional.silu(gate.float()) * up.float()).to(x.dtype)


class _MLP(nn.Module):
    def __init__(self, theirs: Any, part: Part) -> None:
        super().__init__()
        self.gate_up_proj = _Linear(part.rows(theirs.gate_proj.weight), part.rows(theirs.up_proj.weight))
        self.act_fn = _SiluAndMul()
        self.down_proj = _Linear(part.columns(theirs.down_proj.weight), all_reduce=part.all_reduce)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.act_fn(self.gate_up_proj(x)[0]))[0]
        return out


class _Layer(nn.Module):
    def __init__(self, theirs: Any, part: Part) -> None:
        super().__init__()
        self.self_attn, self.mlp = _SelfAttention(theirs.self_attn, part), _MLP(theirs.mlp, part)
        self.input_layernorm = _Norm(theirs.input_layernorm)
        self.post_attention_layernorm = _Norm(theirs.post_attention_layernorm)

    def forward(self, positions: Tensor, hidden: Tensor, residual: Tensor | None, bounds: list[int]) -> Any:
        if residual is None:
            residual, hidden = hidden, self.input_layernorm(hidden)
        else:
            hidden, residual = self.input_layernorm(hidden, residual)
        hidden = self.self_attn(positions, hidden, bounds)
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.mlp(hidden), residual


class _Model(nn.Module):
    def __init__(self, theirs: Any, part: Part) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding.from_pretrained(theirs.embed_tokens.weight.detach())
        self.layers = nn.ModuleList(_Layer(layer, part) for layer in theirs.layers)
        self.norm = _Norm(theirs.norm)

    def forward(self, input_ids: Tensor, positions: Tensor, bounds: list[int]) -> Tensor:
        hidden, residual = self.embed_tokens(input_ids), None
        for layer in self.layers:
            hidden, residual = layer(positions, hidden, residual, bounds)
        normed: Tensor = self.norm(hidden, residual)[0]
        return normed


class Engine(nn.Module):
    """A decoder as an inference engine writes it: tokens flat, projections fused, the residual carried along."""

    def __init__(self, theirs: Any, part: Part | None = None) -> None:
        super().__init__()
        self.model = _Model(theirs.model, part or Part())

    def forward(self, *args: Any) -> Tensor:
        out: Tensor = self.model(*args)
        return out


def tiny_llama(folder: Path) -> Path:
    """Random weights of two layers, as a trainer saves them: what the engine is made of."""
    config = LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.1, pad_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder
