"""What a module of a model is, by its name and its class: what gives positions, carries a state, mixes tokens, routes
them to experts, or works on each by itself. torch is imported by whoever has a module.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from replay_core.regexes import regex

if TYPE_CHECKING:
    import torch

_POSITIONAL = regex(r"(?i)rotary|rope|wpe|embed_positions|position|alibi")
_TURNING = regex(r"(?i)rotary|rope|alibi")
_STATE = regex(r"(?i)conv|mamba|ssm|linear_?attn|deltanet|recurrent|rg_?lru|rwkv|retention")
_ROUTER = regex(r"(?i)router|gate$|moe|expert")
_MIXER = regex(r"(?i)att")


def kind_of(name: str, module: torch.nn.Module) -> str:
    """position, state, mixer (attention), router, or other: what works on each token by itself."""
    from torch.nn import Conv1d

    own = _said(name, module)
    if _POSITIONAL.search(own):
        return "position"
    if any(True for _ in module.children()) or isinstance(module, Conv1d):
        for kind, pattern in (("state", _STATE), ("mixer", _MIXER), ("router", _ROUTER)):
            if pattern.search(own):
                return kind
    return "router" if _ROUTER.search(own) else "other"


def turns(name: str, module: torch.nn.Module) -> bool:
    """Whether what gives positions is felt as differences of positions alone: a rotation, or a slope."""
    return bool(_TURNING.search(_said(name, module)))


def _said(name: str, module: torch.nn.Module) -> str:
    """What it is called, and its class; one of several experts has a number alone. What else has one is a block, of
    which its list's name says as little as a layer's.
    """
    of_list, _, own = name.rpartition(".")
    return f"{'experts' if own.isdecimal() and of_list.endswith('experts') else own} {type(module).__name__}"


def names_state(names: Iterable[str]) -> bool:
    """Whether any of these names of modules is one that carries a state."""
    return any(_STATE.search(name) for name in names)
