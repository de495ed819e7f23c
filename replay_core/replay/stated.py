"""What a model's config states of a number that may differ from layer to layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from replay_core.regexes import regex

_LAYER = regex(r"\.(\d+)\.")


def stated(config: Any, name: str, module: str = "") -> int | None:
    """The number in the layer of `module`, or the greatest of all layers where the module is in none; None: no number.

    transformers refuses to say one number for all layers where theirs differ, and a model's own code may list them.
    """
    layer = _LAYER.search(f".{module}.")
    found = list(_of_layers(config, name))
    if layer and int(layer[1]) < len(found) > 1:
        return found[int(layer[1])]
    return max((one for one in found if one is not None), default=None)


def _of_layers(config: Any, name: str) -> Iterator[int | None]:
    """One number, or as many as there are layers."""
    try:
        value = getattr(config, name, None)
    except RuntimeError:  # of each layer there is a config of its own
        value = [getattr(one, name, None) for one in config.per_layer_config]
    for one in value if isinstance(value, (list, tuple)) else [value]:
        yield one if isinstance(one, int) and not isinstance(one, bool) else None
