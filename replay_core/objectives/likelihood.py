"""The likelihood loss that a model gives for its labels, and the part of it that a trainer starts its backward from."""

from __future__ import annotations


def divided_by(given: float, began: float, marked: int, tokens: float | None) -> float | None:
    """The whole number by which a trainer divided the loss `given` by its model (gradient accumulation); None where the
    backward `began` at another loss. 1 where a sum was divided by the step's `tokens`, of which `marked` are here.
    """
    if not given or not began:
        return 1.0
    times = given / began
    if tokens is not None:
        return 1.0 if min(abs(times - 1), abs(times * marked / tokens - 1)) < 1e-3 else None
    return float(round(times)) if times > 0.5 and abs(times - round(times)) < 1e-5 * times else None
