"""What a model needs besides its weights to compute in float64."""

from __future__ import annotations

import inspect
from typing import Any

import torch


def ready_for_float64(causal_lm: torch.nn.Module) -> None:
    """Make a model whose weights are float64 one that computes in it for good."""
    finite_masks(causal_lm)
    if hasattr(causal_lm, "set_experts_implementation"):
        causal_lm.set_experts_implementation("eager")  # grouped products know no float64


def finite_masks(causal_lm: torch.nn.Module) -> list[Any]:
    """Hooks by which no mask is less than float32 holds: to a softmax in float32 float64's minimum is an infinity, and
    a row that sees nothing would be NaN. What removes them is returned.
    """
    return [
        module.register_forward_pre_hook(_with_finite_masks, with_kwargs=True)
        for module in causal_lm.modules()
        if "attention_mask" in inspect.signature(module.forward).parameters
    ]


def _with_finite_masks(_module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    least = torch.finfo(torch.float32).min

    def finite(value: Any) -> Any:
        is_mask = torch.is_tensor(value) and value.dtype is torch.float64 and value.ndim == 4
        return value.clamp(min=least) if is_mask else value

    return tuple(map(finite, args)), {name: finite(value) for name, value in kwargs.items()}
