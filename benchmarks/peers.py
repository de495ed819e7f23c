"""What other tools say of two recordings: True where they find nothing wrong.

The packages themselves where they are installed (`installed.py` says how to install them). Where sglang's comparator
or msprobe is not, its rule stands in for it, written down here from its source without its loading and reporting, which
only makes it look better and faster; its row is then called `(rule)`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.installed import MSPROBE, SGLANG, msprobe_says, sglang_says

Fields = dict[str, Any]
Says = Callable[[Fields, Fields], bool]


def torch_assert_close(a: Fields, b: Fields) -> bool:
    """torch.testing.assert_close on the whole mapping, NaN equal, dtypes free: its most lenient sensible setting."""
    try:
        torch.testing.assert_close(b, a, equal_nan=True, check_dtype=False)
    except AssertionError:
        return False
    return True


def numpy_allclose(a: Fields, b: Fields) -> bool:
    """numpy.allclose with its defaults, tensor by tensor in float64."""
    if a.keys() != b.keys():
        return False
    return all(
        a[name].shape == b[name].shape and np.allclose(_doubles(b[name]), _doubles(a[name]), equal_nan=True)
        for name in a
    )


def sglang_rule(a: Fields, b: Fields) -> bool:
    """sglang's comparator: 1 - 2 <x, y> / (|x|^2 + |y|^2) <= 1e-3 for every dtype, names of the target alone."""
    for name in b:
        if name not in a:
            continue
        x, y = (side[name].float().double().squeeze(0) if side[name].dim() > 1 else side[name].double()
                for side in (a, b))  # fmt: skip
        if x.shape != y.shape:
            return False
        below = (x * x + y * y).sum()
        rel = 1 - 2 * (x * y).sum() / below if below != 0 else torch.zeros(())
        if not bool(rel <= 1e-3):
            return False
    return True


def msprobe_rule(a: Fields, b: Fields) -> bool:
    """msprobe compare: cosine above .99 and the greatest absolute difference below 1e-3, names of the target alone."""
    for name in b:
        if name not in a:
            continue
        x, y = (side[name].double().flatten() for side in (a, b))
        if x.shape != y.shape:
            return False
        if torch.equal(x, y):
            continue
        cosine = torch.nn.functional.cosine_similarity(x, y, dim=0)
        if not (bool(cosine > 0.99) and bool((y - x).abs().max() < 1e-3)):
            return False
    return True


def polygraphy_simple(a: Fields, b: Fields) -> bool:
    """NVIDIA polygraphy's own CompareFunc.simple with its defaults (the package)."""
    from polygraphy.comparator import CompareFunc, IterationResult
    from polygraphy.logger import G_LOGGER

    G_LOGGER.module_severity = G_LOGGER.CRITICAL
    if a.keys() != b.keys():
        return False
    logging.disable(logging.CRITICAL)
    sides = [
        IterationResult({name: _floats(value) for name, value in side.items()}, runner_name=which)
        for which, side in (("a", a), ("b", b))
    ]
    try:
        with contextlib.redirect_stdout(io.StringIO()), np.errstate(all="ignore"):
            return all(bool(found) for found in CompareFunc.simple()(*sides).values())
    finally:
        logging.disable(logging.NOTSET)


def _doubles(value: torch.Tensor) -> np.ndarray:
    return value.double().numpy()


def _floats(value: torch.Tensor) -> np.ndarray:
    """What numpy can hold; bf16 in float32."""
    copy: np.ndarray = (value.float() if value.dtype == torch.bfloat16 else value).numpy().copy()
    return copy


def peers() -> tuple[dict[str, Says], list[str]]:
    """The tools that can be asked here, and a note on each that cannot."""
    asked: dict[str, Says] = {"assert_close": torch_assert_close, "np.allclose": numpy_allclose}
    notes = []
    for tool, says, rule in (
        (SGLANG, sglang_says, sglang_rule),
        (MSPROBE, msprobe_says, msprobe_rule),
    ):
        why = tool.missing()
        if why is None:
            asked[tool.name] = says
            notes.append(f"{tool.name} is {tool.version()} itself, its own dumps and its own command")
        else:
            asked[f"{tool.name} (rule)"] = rule
            notes.append(f"{tool.name} is its rule alone, written down: {why}")
    if importlib.util.find_spec("polygraphy"):
        asked["polygraphy"] = polygraphy_simple
    else:
        notes.append("polygraphy is not installed (pip install --no-deps polygraphy): no column")
    return asked, notes
