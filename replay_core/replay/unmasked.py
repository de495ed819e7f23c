"""A deliberate mistake: attention is handed the padding's mask, and modules that carry a state are not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from replay_core.replay.module_kinds import kind_of


@contextlib.contextmanager
def states_unmasked(backbone: torch.nn.Module) -> Iterator[None]:
    """Every convolution, scan and recurrence takes padding for tokens."""

    def before(_module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args, {name: None if name in _MASKS else value for name, value in kwargs.items()}

    handles = [
        module.register_forward_pre_hook(before, with_kwargs=True)
        for name, module in backbone.named_modules()
        if name and kind_of(name, module) == "state"
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


#: What transformers' modules call it.
_MASKS = ("attention_mask", "mask", "mamba_attention_mask", "linear_attention_mask")
