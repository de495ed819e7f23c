"""Weights after an optimizer's step whose gradients agree: what their rounding may leave of the step is no difference.

Adam divides a gradient by its own size: where it is all noise (a key's bias, which softmax does not see) the step goes
up in one run and down in the other by the whole learning rate. From zero moments the step of an element is
u = g / (|g| + eps) learning rates, so |u_a - u_b| <= min(2, |g_a - g_b| / min(|g_a|, |g_b|)), whatever eps is; SGD's is
g itself.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from replay_core import naming, pages
from replay_core.compare.judging.judgement import judge
from replay_core.compare.judging.tensors import TensorVerdict, say
from replay_core.compare.judging.tolerance import Tolerances
from replay_core.errors import RldbgError
from replay_core.records import Run

#: Roundings of the weight itself, before and after the step.
_ROUNDINGS = 4


class Updates:
    """Makes CLOSE of weights that are no further apart than their gradients, which agree, make them.

    Both runs say which optimizer stepped (flags: optimizer), the same. What a person's own limits say stands.
    """

    def __init__(self, a: Run, b: Run, tolerances: Tolerances) -> None:
        of_a, of_b = ((run.flags or {}).get("optimizer") for run in (a, b))
        is_said = isinstance(of_a, dict) and of_a == of_b and isinstance(of_a.get("lr"), (int, float))
        self._optimizer = of_a if is_said else None
        self._tolerances = tolerances
        self._gradients: dict[tuple[Any, ...], TensorVerdict] = {}

    def settle(self, row: TensorVerdict) -> None:
        """Take the next row in order of computation (gradients come before weights), and judge it again if need be."""
        if self._optimizer is None or row.skipped is not None:
            return
        kind = naming.meaning(row.name).kind
        if kind not in ("gradient", "param"):
            return
        name = row.name.removeprefix("grad.").removeprefix("param.")
        place = (row.key.step, row.key.rank, row.key.role, name)
        if kind == "gradient":
            self._gradients[place] = row
            return
        gradient = self._gradients.get(place)
        if gradient is None or row.context is None or row.figures is None or row.context.bitwise_only:
            return
        parted = _parted_by_table(row) and not _parted_by_table(gradient)
        if parted and (why := _explained(row, gradient, self._optimizer)) is not None:
            row.context = replace(row.context, explained=why)
            say(row, judge(row.figures, row.unmasked, row.context, self._tolerances))


def _parted_by_table(row: TensorVerdict) -> bool:
    if row.context is None or row.figures is None:
        return row.verdict.diverges
    return judge(row.figures, row.unmasked, row.context).verdict.diverges


def _explained(row: TensorVerdict, gradient: TensorVerdict, optimizer: dict[str, Any]) -> str | None:
    values = [_read(one, side) for one in (row, gradient) for side in ("a", "b")]
    if any(one is None or one.shape != values[0].shape for one in values):  # type: ignore[union-attr]
        return None
    p_a, p_b, g_a, g_b = values
    assert p_a is not None
    assert p_b is not None
    assert g_a is not None
    assert g_b is not None
    rate = float(optimizer["lr"])
    apart, least = np.abs(g_a - g_b), np.minimum(np.abs(g_a), np.abs(g_b))
    if optimizer.get("kind") == "sgd":
        allowed = rate * apart
    else:
        turned = np.divide(apart, least, out=np.where(apart > 0, 2.0, 0.0), where=least > 0)
        allowed = rate * np.minimum(2.0, turned)
    allowed = allowed + _ROUNDINGS * 2.0**-24 * np.maximum(np.abs(p_a), np.abs(p_b))
    moved = np.abs(p_a - p_b)
    if not bool((moved <= allowed).all()):
        return None
    return (
        f"no further apart than a step of {rate:g} makes of what rounding leaves of the gradient, which agrees: "
        f"greatest difference {float(moved.max()):.2g}, at {int((moved > 0).sum())} of {moved.size} elements"
    )


def _read(row: TensorVerdict, side: str) -> np.ndarray[Any, np.dtype[np.float64]] | None:
    held = row.a if side == "a" else row.b
    if held is None or not held[1].is_readable:
        return None
    try:
        return np.asarray(pages.array(held[1]), np.float64)
    except RldbgError:
        return None
