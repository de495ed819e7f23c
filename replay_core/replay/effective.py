"""What really ran: attention read from the operators executed, the rest from the model itself."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from replay_core.replay.flags import Flags

_FUSED = ("scaled_dot_product", "flash_attn", "flash_attention", "efficient_attention", "cudnn_attention")
_CPU_FLASH = "_scaled_dot_product_flash_attention_for_cpu"


class Operators(TorchDispatchMode):  # type: ignore[misc]
    """Counts the operators executed while the context is open."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))

    def attention(self) -> str:
        """The attention kernels among them, in words."""
        fused = sorted(name for name in self.counts if any(word in name for word in _FUSED))
        if fused:
            return ", ".join(fused)
        if self.counts["bmm"] or self.counts["matmul"]:
            if self.counts["_safe_softmax"]:
                return "math (bmm + _safe_softmax)"
            if self.counts["_softmax"]:
                return "eager (bmm + softmax)"
        return "no attention operator seen"


def effective_settings(
    flags: Flags, causal_lm: Any, operators: Operators | None, temperature: float, position_rule: str
) -> dict[str, Any]:
    """The settings the cell really ran with, as JSON-able data."""
    implementation = causal_lm.config._attn_implementation
    dtypes = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in causal_lm.parameters()})
    return {
        "attention": operators.attention() if operators else f"{implementation} (a higher-order operator)",
        "attn_implementation": implementation,
        "dtype": ", ".join(dtypes),
        "packing": flags.packing,
        "block_mask": flags.block_mask,
        "use_cache": False,
        "rows_per_forward": flags.rows_per_forward,
        "position_ids": position_rule,
        "temperature": temperature,
        "threads": torch.get_num_threads(),
        "device": str(next(causal_lm.parameters()).device),
        "float32_matmul": torch.get_float32_matmul_precision(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def notes_on(flags: Flags, effective: dict[str, Any]) -> list[str]:
    """What a reader of the settings must know: flags that had no effect, kernels that two flags share."""
    notes = []
    if flags.attention == "flex":
        notes.append("the time includes compiling the flex kernel for each shape")
    if effective["attention"] == _CPU_FLASH:
        notes.append("on CPU sdpa and sdpa-flash are one kernel")
    if not flags.block_mask and (not flags.packing or flags.is_reference):
        notes.append("block_mask=off has no effect: no two samples share a row")
    elif not flags.block_mask:
        notes.append("packed WITHOUT a block mask, as asked: tokens see earlier samples")
    if flags.is_reference and flags.packing:
        notes.append("packing has no effect with one row per forward")
    return notes
