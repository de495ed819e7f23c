"""What a rotary embedding keeps of earlier calls: under dynamic NTK, the frequencies of the longest row there was."""

from __future__ import annotations

from typing import Any


def forget_lengths(backbone: Any) -> None:
    """Give every dynamic rotary embedding the frequencies it was built with, as before its first call.

    transformers (`dynamic_rope_update`) grows them with the longest row and keeps them: a row alone after a longer one
    would be computed with the other's, and agree with a batch in which it is.
    """
    for module in backbone.modules():
        kinds = getattr(module, "rope_type", None)
        of_layers = {f"{layer}_": kind for layer, kind in kinds.items()} if isinstance(kinds, dict) else {"": kinds}
        for prefix, kind in of_layers.items():
            if not isinstance(kind, str) or "dynamic" not in kind:
                continue
            first, built = getattr(module, "original_max_seq_len", None), f"{prefix}original_inv_freq"
            if first is None or getattr(module, f"{prefix}max_seq_len_cached", first) == first:
                continue
            now = getattr(module, f"{prefix}inv_freq")
            module.register_buffer(f"{prefix}inv_freq", getattr(module, built).to(now.device), persistent=False)
            setattr(module, f"{prefix}max_seq_len_cached", first)
