"""An engine's worker as vLLM's and sglang's loaders fill it; shares nothing with the rules.

Parameters are allocated fused and stacked; each tensor of the checkpoint is narrowed to the rank's shard and copied
into its place, one after the other (`weight_loader` of QKVParallelLinear, MergedColumnParallelLinear,
RowParallelLinear, VocabParallelEmbedding, FusedMoE).
"""

from __future__ import annotations

from typing import Any

import torch


def padded_vocabulary(rows: int) -> int:
    return (rows + 63) // 64 * 64


class EngineWorker:
    """The parameters of one tensor parallel rank."""

    def __init__(self, config: Any, checkpoint: dict[str, torch.Tensor], tp: int = 1, rank: int = 0) -> None:
        self.config, self.tp, self.rank = config, tp, rank
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = checkpoint["model.layers.0.self_attn.q_proj.weight"].shape[0] // self.heads
        self.parameters: dict[str, torch.Tensor] = {}
        self.dtype = torch.bfloat16

    def load(self, checkpoint: dict[str, torch.Tensor]) -> EngineWorker:
        for name, tensor in checkpoint.items():
            self.load_one(name, tensor)
        return self

    def load_one(self, name: str, tensor: torch.Tensor) -> None:
        for part in ("q_proj", "k_proj", "v_proj"):
            if f".{part}." in name:
                return self._qkv(name.replace(part, "qkv_proj"), part[0], tensor)
        if ".experts." in name:
            return self._expert(name, tensor)
        for at, part in enumerate(("gate_proj", "up_proj")):
            if f".{part}." in name:
                return self._merged(name.replace(part, "gate_up_proj"), at, tensor)
        if ".o_proj." in name or ".down_proj." in name:
            return self._store(name, self._shard(tensor, 1))
        if "embed_tokens" in name or "lm_head" in name:
            return self._vocabulary(name, tensor)
        return self._store(name, tensor)

    def _shard(self, tensor: torch.Tensor, dim: int, count: int | None = None, at: int | None = None) -> torch.Tensor:
        size = tensor.shape[dim] // (count or self.tp)
        return tensor.narrow(dim, (self.rank if at is None else at) * size, size)

    def _store(self, name: str, tensor: torch.Tensor) -> None:
        self.parameters[name] = tensor.to(self.dtype).clone()

    def _qkv(self, name: str, which: str, tensor: torch.Tensor) -> None:
        q_rows = self.heads // self.tp * self.head_dim
        kv_local = max(1, self.kv_heads // self.tp)
        replicas = max(1, self.tp // self.kv_heads)
        kv_rows = kv_local * self.head_dim
        place = {"q": (0, q_rows), "k": (q_rows, kv_rows), "v": (q_rows + kv_rows, kv_rows)}[which]
        shape = (q_rows + 2 * kv_rows, *tensor.shape[1:])
        into = self.parameters.setdefault(name, torch.zeros(shape, dtype=self.dtype))
        at = self.rank if which == "q" else self.rank // replicas
        into.narrow(0, *place).copy_(tensor.narrow(0, at * place[1], place[1]))

    def _merged(self, name: str, at: int, tensor: torch.Tensor) -> None:
        part = self._shard(tensor, 0)
        into = self.parameters.setdefault(name, torch.zeros((2 * len(part), *part.shape[1:]), dtype=self.dtype))
        into.narrow(0, at * len(part), len(part)).copy_(part)

    def _vocabulary(self, name: str, tensor: torch.Tensor) -> None:
        rows = padded_vocabulary(len(tensor)) // self.tp
        start = self.rank * rows
        into = self.parameters.setdefault(name, torch.zeros((rows, tensor.shape[1]), dtype=self.dtype))
        mine = tensor[start : start + rows]
        into[: len(mine)].copy_(mine)

    def _expert(self, name: str, tensor: torch.Tensor) -> None:
        prefix, _, rest = name.partition(".experts.")
        number, part, _ = rest.split(".")
        experts = self.config.num_experts
        if part == "down_proj":
            mine = self._shard(tensor, 1)
            stack = self.parameters.setdefault(
                f"{prefix}.experts.w2_weight", torch.zeros((experts, *mine.shape), dtype=self.dtype)
            )
            stack[int(number)].copy_(mine)
            return
        mine = self._shard(tensor, 0)
        stack = self.parameters.setdefault(
            f"{prefix}.experts.w13_weight",
            torch.zeros((experts, 2 * len(mine), mine.shape[1]), dtype=self.dtype),
        )
        stack[int(number)].narrow(0, 0 if part == "gate_proj" else len(mine), len(mine)).copy_(mine)
