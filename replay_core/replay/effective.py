"""What really ran: attention read from the operators executed, the rest from the model itself."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from replay_core.replay.attention import is_users_own
from replay_core.replay.flags import FLAGS, Flags
from replay_core.replay.libraries import transformers
from replay_core.replay.model import LoadedModel
from replay_core.replay.twins import CPU_FLASH

NO_ATTENTION = "no attention operator seen"
_FUSED = ("scaled_dot_product", "flash_attn", "flash_attention", "efficient_attention", "cudnn_attention")


#: What is in the name of the operator that a pinned backend runs.
_PINNED = {
    "sdpa-math": ("math", "eager"),
    "sdpa-flash": ("flash",),
    "sdpa-efficient": ("efficient",),
    "sdpa-cudnn": ("cudnn",),
}


class Operators(TorchDispatchMode):  # type: ignore[misc]
    """Counts the operators executed while the context is open."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[_named(func.namespace, func.overloadpacket.__name__)] += 1
        return func(*args, **(kwargs or {}))

    def attention(self) -> str:
        """The attention kernels among them, in words; without a softmax there was none, whatever was multiplied."""
        return attention_in(self.counts, compiled=False)


class Profiled:
    """Counts the operators a compiled graph calls while the context is open; what it fused has no name any more."""

    def __init__(self) -> None:
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        self.counts: Counter[str] = Counter()

    def __enter__(self) -> Profiled:
        self._profile.__enter__()
        return self

    def __exit__(self, *left: Any) -> None:
        self._profile.__exit__(*left)
        for event in self._profile.events():
            space, _, name = event.name.partition("::")
            if space == "aten" or "flash" in space:
                self.counts[_named(space, name)] += 1

    def attention(self) -> str:
        """The attention kernels among them, in words."""
        return attention_in(self.counts)


def _named(space: str, name: str) -> str:
    """An operator's name; with its package's where that alone tells that it is attention (`flash_attn_3::fwd`)."""
    return f"{space}.{name}" if "flash" in space and not any(word in name for word in _FUSED) else name


def attention_in(counts: Counter[str], *, compiled: bool = True) -> str:
    """The attention kernels among counted operators, in words. `compiled`: a softmax may have been fused away."""
    fused = sorted(name for name in counts if any(word in name for word in _FUSED))
    if fused:
        # A kernel's inner operator runs under its name.
        whole = [name for name in fused if not any(name != other and name in other for other in fused)]
        return ", ".join(whole)
    if counts["bmm"] or counts["matmul"] or counts["baddbmm"]:
        if counts["_safe_softmax"]:
            return "math (bmm + _safe_softmax)"
        if counts["_softmax"]:
            return "eager (bmm + softmax)"
        if compiled:
            return "eager (bmm, softmax fused by the compiler)"
    return NO_ATTENTION


def effective_settings(
    flags: Flags, model: LoadedModel, attention: str, temperature: float, position_rule: str
) -> dict[str, Any]:
    """The settings the cell really ran with, as JSON-able data. `attention`: the operators that were seen."""
    causal_lm = model.causal_lm
    implementation = causal_lm.config._attn_implementation
    if attention != NO_ATTENTION and is_users_own(implementation):
        attention = f"{implementation}: a kernel of one's own ({attention})"
    dtypes = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in causal_lm.parameters()})
    return {
        # What nothing can be read back of is what was asked for.
        **{flag.effective: getattr(flags, name) for name, flag in FLAGS.items() if flag.effective},
        "attention": attention,
        "attention_flag": flags.attention,
        "attn_implementation": implementation,
        "dtype": ", ".join(dtypes),
        "mode": "train" if causal_lm.training else "eval",
        "gradient_checkpointing": model.is_checkpointing and causal_lm.training,
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
    if effective["attention"] == NO_ATTENTION and str(effective["attn_implementation"]).startswith("flash_attention"):
        notes.append(f"torch sees no operator of attention={flags.attention}: its kernels may be none of torch's")
    elif effective["attention"] == NO_ATTENTION and flags.compile == "off":
        notes.append(f"no attention ran: attention={flags.attention} changes nothing of this model")
    pinned = _PINNED.get(flags.attention)
    if pinned and effective["attention"] != NO_ATTENTION and not any(one in effective["attention"] for one in pinned):
        notes.append(f"attention={flags.attention} was asked for, and another kernel ran: {effective['attention']}")
    if flags.attention == "flex":
        notes.append("the time includes compiling the flex kernel for each shape")
    if effective["attention"] == CPU_FLASH:
        notes.append("on CPU sdpa and sdpa-flash are one kernel")
    if not flags.block_mask and (not flags.packing or flags.is_reference):
        notes.append("block_mask=off has no effect: no two samples share a row")
    elif not flags.block_mask:
        notes.append("packed WITHOUT a block mask, as asked: tokens see earlier samples")
    if flags.is_reference and flags.packing:
        notes.append("packing has no effect with one row per forward")
    return notes
