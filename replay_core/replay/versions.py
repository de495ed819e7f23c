"""What transformers calls by another name in its older versions, or has only since later ones."""

from __future__ import annotations

from typing import Any

import torch
import transformers

#: `torch_dtype` is `dtype` from here on; each version takes the other's word for a setting of the model's class.
_DTYPE_SINCE = (4, 56)


def loaded_in(dtype: torch.dtype) -> dict[str, Any]:
    """The argument of `from_pretrained` and `from_config` that says in which dtype the weights are loaded."""
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    return {"dtype" if version >= _DTYPE_SINCE else "torch_dtype": dtype}


def set_attention(causal_lm: Any, name: str | None) -> None:
    """Have the model run that implementation of attention from now on.

    Raises:
        Exception: of transformers' own, where the model has none of that name.
    """
    if hasattr(causal_lm, "set_attn_implementation"):
        causal_lm.set_attn_implementation(name)
        return
    # Before 4.53 a model's modules look it up in the config that they share, at every call.
    causal_lm.config._attn_implementation = name
    causal_lm._autoset_attn_implementation(causal_lm.config, check_device_map=False)
