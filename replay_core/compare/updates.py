"""Weights after an optimizer's step whose gradients agree: what their rounding may leave of the step is no difference.

Adam divides a gradient by its own size: where it is all noise (a key's bias, which softmax does not see) the step goes
up in one run and down in the other by the whole learning rate. From zero moments the step of an element is
u = g / (|g| + eps) learning rates, so |u_a - u_b| <= min(2, |g_a - g_b| / min(|g_a|, |g_b|)), whatever eps is; SGD's is
g itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from replay_core import naming, pages
from replay_core.compare.judging.tensors import TensorVerdict
from replay_core.compare.judging.verdict import Verdict
from replay_core.errors import RldbgError
from replay_core.records import Run

#: Roundings of the weight itself, before and after the step.
_ROUNDINGS = 4


def clear_updates(rows: Sequence[TensorVerdict], a: Run, b: Run) -> None:
    """Make CLOSE of weights that are no further apart than their gradients, which agree, make them.

    Both runs say which optimizer stepped (flags: optimizer), the same.
    """
    said = [(run.flags or {}).get("optimizer") for run in (a, b)]
    if not isinstance(said[0], dict) or said[0] != said[1] or not isinstance(said[0].get("lr"), (int, float)):
        return
    gradients = {(row.key.step, row.key.rank, row.key.role, row.name): row for row in rows
                 if naming.meaning(row.name).kind == "gradient"}  # fmt: skip
    for row in rows:
        if row.verdict is not Verdict.DIFF or naming.meaning(row.name).kind != "param":
            continue
        name = "grad." + row.name.removeprefix("param.")
        gradient = gradients.get((row.key.step, row.key.rank, row.key.role, name))
        if gradient is not None and not gradient.verdict.diverges:
            _clear(row, gradient, said[0])


def _clear(row: TensorVerdict, gradient: TensorVerdict, optimizer: dict[str, Any]) -> None:
    values = [_read(one, side) for one in (row, gradient) for side in ("a", "b")]
    if any(one is None or one.shape != values[0].shape for one in values):  # type: ignore[union-attr]
        return
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
        return
    row.verdict, row.suspect, row.rule = Verdict.CLOSE, False, None
    row.reason = (
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
