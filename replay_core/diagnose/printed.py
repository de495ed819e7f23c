"""Numbers of a log that were rounded for printing: what lies below the last decimal is not 0, it is not told.

verl's console printed three decimals of everything (`f"{k}:{v:.3f}"`): a learning rate of 1e-6 is `0.000` there, and so
are a KL and a loss that are well. No rule can judge those; one that took them for zeros would be wrong of every run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from itertools import islice

#: Decimals that somebody prints everything with; numbers that have a fraction, and different ones, from which it shows.
DECIMALS = (1, 2, 3, 4)
FEWEST, DIFFERENT = 20, 8
#: Signals that may lie below what is printed while all is well. Of the others a printed 0 is as good as one.
FINE = frozenset({
    "learning_rate", "critic_learning_rate", "kl", "policy_kl", "loss", "micro_loss", "pg_loss", "clip_fraction",
    "value_clip_fraction", "is_weight_clipped", "kl_coefficient", "rollout_k1", "rollout_k3", "logprob_diff",
    "prob_diff", "mult_prob_error", "advantage_mean", "update_norm", "value_loss", "repetition", "phase_seconds",
    "step_seconds",
})  # fmt: skip
#: A series of these is judged where its largest number is so many units of the last decimal.
UNITS = 10


def decimals(values: Iterable[float]) -> int | None:
    """With how many decimals every one of these numbers was printed; None where they were not rounded, or too few."""
    fractions = {value for value in values if math.isfinite(value) and value != int(value)}
    numbers = list(fractions)
    if len(numbers) < DIFFERENT:
        return None
    return next((d for d in DECIMALS if all(round(value, d) == value for value in numbers)), None)


def untold(series: Mapping[tuple[str, str], list[float]]) -> tuple[int, list[tuple[str, str]]] | None:
    """The decimals of a log, and those of its series (signal, name) that lie below what they show; None of a log whose
    numbers are not rounded.
    """
    every = [value for values in series.values() for value in values]
    if sum(math.isfinite(value) and value != int(value) for value in every) < FEWEST:
        return None
    shown = decimals(every)
    if shown is None:
        return None
    below = [
        key for key, values in series.items()
        if key[0] in FINE and max((abs(value) for value in values if math.isfinite(value)), default=math.inf)
        < UNITS * 10.0**-shown
    ]  # fmt: skip
    return (shown, below) if below else None


def is_zero_rounded(path: str | None, line: int | None, shown: int) -> bool:
    """Whether that line of a text holds a 0 of so many decimals: `0.0` is a number as it is, `0.000` a rounded one."""
    return re.search(rf"(?<![\d.])0\.0{{{shown}}}(?![\d])", _line(path, line)) is not None


def is_of_decimals(name: str, path: str | None, line: int | None) -> bool:
    """Whether that line tells this number as a 0 of two decimals and more, as `lr:0.000`: it may be 1e-6."""
    return re.search(rf"{re.escape(name)}\W{{1,4}}0\.00+(?![\de])", _line(path, line)) is not None


def half_a_digit(name: str, path: str | None, line: int | None) -> float:
    """Half a unit of the last decimal that this number is printed with, as far as it may be off: `lr:0.001` may be
    6e-4. 0 where another number of the line has more decimals, or a power of ten: none was rounded then.
    """
    text = _line(path, line)
    told = re.search(rf"{re.escape(name)}\W{{1,4}}\d+\.(\d+)(?![\de])", text)
    every = re.findall(r"\d\.(\d+)(e[-+]?\d)?", text)
    if told is None or any(power or len(digits) > len(told[1]) for digits, power in every):
        return 0.0
    return 0.5 * 10.0 ** -len(told[1])


def _line(path: str | None, line: int | None) -> str:
    """A line of a text; empty where it cannot be read. A progress bar's carriage returns end none."""
    if path is None or line is None:
        return ""
    try:
        with open(path, encoding="utf-8", errors="replace", newline="\n") as file:
            return next(islice(file, line - 1, None), "")
    except OSError:
        return ""
