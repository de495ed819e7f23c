"""A model's config as a trainer or an engine may read it wrongly: its window of attention lost or one token off, its
rotations unscaled or of another base, its soft-caps left out.

Weights say nothing of these, so a model built from the wrong config loads without a word. No torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

#: A window that no row reaches: how layers are told apart stays as it is.
_ENDLESS = 1 << 24
#: The base that a library takes where none is stated.
_THETA = 10000.0
_ROPES = ("rope_parameters", "rope_scaling")
_CAPS = {"no_final_cap": "final_logit_softcapping", "no_score_cap": "attn_logit_softcapping"}


class Misreading(Struct, frozen=True):
    """name: what `misread` takes; said: what each row then is computed with; kind: of `kinds.KINDS`."""

    name: str
    said: str
    kind: str


def misreadings(folder: Path, longest: int) -> Iterator[Misreading]:
    """Those that change what this model computes of rows of up to `longest` tokens, likeliest first; none of an adapter
    or of weights that lie in shards without a config beside them.
    """
    stated = _stated(folder)
    window = stated.get("sliding_window")
    if isinstance(window, int) and stated.get("use_sliding_window") is not False and 1 < window < longest:
        yield Misreading("no_window", f"each row without the config's window of {window} tokens", "maths")
        yield Misreading(
            "longer_window", f"each row with a window one token longer than the config's {window}", "maths"
        )
        said = f"each row with a window one token shorter than the config's {window}"
        yield Misreading("shorter_window", said, "own_keys")
    ropes = [one for name in _ROPES for one in _ropes_of(stated.get(name))]
    if any(_is_scaled(one) for one in ropes):
        yield Misreading("unscaled_rope", "each row without the config's scaling of its rotations", "positions")
    bases = [one["rope_theta"] for one in (stated, *ropes) if isinstance(one.get("rope_theta"), int | float)]
    if any(one != _THETA for one in bases):
        yield Misreading(
            "other_base", f"each row rotated with the base {_THETA:g}, and the config has another", "positions"
        )
    for name, cap in _CAPS.items():
        if stated.get(cap):
            yield Misreading(name, f"each row without the config's {cap}", "maths")


def misread(config: Any, name: str) -> None:
    """Put the mistake of that name into a config of transformers."""
    config = config.get_text_config()
    if name in _CAPS:
        setattr(config, _CAPS[name], None)
    elif name.endswith("_window"):
        by = {"no_window": _ENDLESS, "longer_window": 1, "shorter_window": -1}[name]
        config.sliding_window = config.sliding_window + by
    else:
        change = _unscaled if name == "unscaled_rope" else _rebased
        if getattr(config, "rope_parameters", None) is not None:
            config.rope_parameters = _each(config.rope_parameters, change)
        elif name == "unscaled_rope":
            config.rope_scaling = None
        if hasattr(config, "rope_theta") and name == "other_base":
            config.rope_theta = _THETA


def _stated(folder: Path) -> dict[str, Any]:
    try:
        whole = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    part = whole.get("text_config") if isinstance(whole, dict) else None
    return part if isinstance(part, dict) else whole if isinstance(whole, dict) else {}


def _ropes_of(stated: Any) -> list[Mapping[str, Any]]:
    """Those of every kind of layer, where kinds have their own."""
    if not isinstance(stated, Mapping):
        return []
    within = [one for one in stated.values() if isinstance(one, Mapping)]
    return within or [stated]


def _is_scaled(rope: Mapping[str, Any]) -> bool:
    return (rope.get("rope_type") or rope.get("type") or "default") not in ("default", "proportional")


def _each(ropes: Mapping[str, Any], change: Any) -> dict[str, Any]:
    if any(isinstance(one, Mapping) for one in ropes.values()):
        return {name: change(one) if isinstance(one, Mapping) else one for name, one in ropes.items()}
    changed: dict[str, Any] = change(ropes)
    return changed


def _unscaled(rope: Mapping[str, Any]) -> dict[str, Any]:
    if not _is_scaled(rope):
        return dict(rope)
    kept = {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    return {"rope_type": "default", **kept}


def _rebased(rope: Mapping[str, Any]) -> dict[str, Any]:
    return {**rope, "rope_theta": _THETA}
