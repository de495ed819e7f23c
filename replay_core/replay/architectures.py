"""The random models of `random:<arch>`: structure bugs show without anybody's weights. Standard library only."""

from __future__ import annotations

import difflib
from typing import Any

from replay_core.errors import ModelError

_TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_SMALL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 28,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}

_EXPERTS = {"num_experts_per_tok": 2}

#: name -> (transformers' model type, its sizes). The vocabulary is sized to the batch.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-tiny": ("llama", _TINY),
    "llama-small": ("llama", _SMALL),
    "qwen2-tiny": ("qwen2", _TINY),
    "qwen2-small": ("qwen2", _SMALL),
    "qwen3-tiny": ("qwen3", {**_TINY, "head_dim": 16}),
    "mistral-tiny": ("mistral", {**_TINY, "sliding_window": None}),
    "mixtral-tiny": ("mixtral", {**_TINY, "sliding_window": None, **_EXPERTS, "num_local_experts": 4}),
    "qwen3-moe-tiny": (
        "qwen3_moe",
        {**_TINY, "head_dim": 16, "moe_intermediate_size": 64, **_EXPERTS, "num_experts": 4},
    ),
    "gemma2-tiny": ("gemma2", {**_TINY, "head_dim": 16, "query_pre_attn_scalar": 16}),
}

#: Standard deviation of the random weights.
INIT_STD = 0.02
#: Vocabularies are rounded up to this, as real ones are.
_VOCABULARY_MULTIPLE = 64


def settings(arch: str, largest_id: int, longest: int) -> tuple[str, dict[str, Any]]:
    """(model type, config arguments) of a random model whose vocabulary and positions hold the batch.

    Raises:
        ModelError: no such architecture, naming those that exist.
    """
    if arch not in ARCHITECTURES:
        near = difflib.get_close_matches(arch, ARCHITECTURES, n=1)
        raise ModelError(
            f"there is no random architecture {arch!r}",
            expected=", ".join(f"random:{name}" for name in ARCHITECTURES),
            found=f"random:{arch}",
            hint=f"did you mean random:{near[0]}?" if near else None,
        )
    kind, sizes = ARCHITECTURES[arch]
    return kind, {
        **sizes,
        "vocab_size": -(-(largest_id + 1) // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE,
        "max_position_embeddings": max(4096, longest),
        "initializer_range": INIT_STD,
        # The config's own special ids may lie outside so small a vocabulary.
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
