"""With how few of its first layers a model still shows what is wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from replay_core.replay.model import LoadedModel


def layers_of(model: LoadedModel) -> torch.nn.ModuleList | None:
    """The layers that a model runs one after the other; None where it has no such list, or several."""
    count = getattr(model.config, "num_hidden_layers", 0)
    lists = [one for one in model.backbone.modules() if isinstance(one, torch.nn.ModuleList) and len(one) == count > 0]
    return lists[0] if len(lists) == 1 else None


@contextlib.contextmanager
def first_layers(layers: torch.nn.ModuleList, count: int) -> Iterator[None]:
    """The model without those after its first `count`."""
    held = dict(layers._modules)
    known = list(held)[count:]
    try:
        for name in known:
            del layers._modules[name]
        yield
    finally:
        layers._modules.clear()
        layers._modules.update(held)


def fewest_layers(model: LoadedModel, fails: Callable[[], bool]) -> tuple[int, int] | None:
    """(with how many of its first layers a model fails, how many it has); None where they cannot be told apart.

    Doubled until it fails, then halved between: what fails with few layers is taken to fail with more.
    """
    layers = layers_of(model)
    if layers is None:
        return None
    low, high, whole = 0, 1, len(layers)

    def fails_with(count: int) -> bool:
        with first_layers(layers, count):
            return fails()

    while high < whole and not fails_with(high):
        low, high = high, high * 2
    high = min(high, whole)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fails_with(middle) else (middle, high)
    return high, whole
