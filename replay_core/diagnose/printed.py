"""Numbers of a log that were rounded for printing: what lies below the last decimal is not 0, it is not told.

verl's console printed three decimals of everything (`f"{k}:{v:.3f}"`): a learning rate of 1e-6 is `0.000` there, and so
are a KL and a loss that are well. No rule can judge those; one that took them for zeros would be wrong of every run.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

#: Step, micro-batch and rank of a value.
Place = tuple[Any, Any, Any]
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
#: Those of them whose zeros alone, among numbers that are printed otherwise, may be any small number. A loss that is
#: printed as 0 is next to it, which tells enough.
FINE_ALONE = FINE - {"loss", "micro_loss", "pg_loss", "value_loss"}
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


#: Values of one quantity, printed twice, before one is the other's rounding, and the share of steps that have both.
SHARED, NEARLY = 3, 0.9


def is_rounding_of(coarse: Mapping[Place, float], exact: Mapping[Place, float], places: int | None) -> bool:
    """Whether numbers are those of another series, of the same steps, rounded to so many decimals: a table of four
    beside a line that prints all of them.
    """
    half = 0.5 * 10.0 ** -(places or 0) * (1 + 1e-6)
    pairs = [(value, exact[at]) for at, value in coarse.items() if at in exact]
    if places is None or len(pairs) < max(SHARED, NEARLY * len(coarse)):
        return False
    return all(a == b or abs(a - b) <= half for a, b in pairs) and any(a != b for a, b in pairs)


def decimals_of_zero(name: str, path: str | None, line: int | None) -> int | None:
    """With how many decimals, two and more, that line prints this number as a 0, as `lr:0.000` and `-0.00`; None where
    it does not: such a number is known to half its last place, and is no 0.
    """
    text = _line(path, line)
    # A panel tells the room apart from the name.
    said = name if name in text else name.rpartition("/")[2]
    found = re.search(rf"(?<![\w.]){re.escape(said)}\W{{1,4}}-?0\.(00+)(?![\de])", text)
    return None if found is None else len(found[1])


def is_zero_rounded(path: str | None, line: int | None, shown: int) -> bool:
    """Whether that line of a text holds a 0 of so many decimals: `0.0` is a number as it is, `0.000` a rounded one."""
    return re.search(rf"(?<![\d.])0\.0{{{shown}}}(?![\d])", _line(path, line)) is not None


def is_of_decimals(name: str, path: str | None, line: int | None) -> bool:
    """Whether that line tells this number as a 0 of two decimals and more, as `lr:0.000`: it may be 1e-6."""
    return decimals_of_zero(name, path, line) is not None


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


#: Lines of a mapping that is printed over several.
_MOST = 400
#: How a panel of rich (and a table) begins and ends.
_PANELS = (("\u256d", "\u2570"), ("\u250c", "\u2514"), ("\u250f", "\u2517"))


def _line(path: str | None, line: int | None) -> str:
    """A line of a text, with the mapping or drawn panel that it opens or the panel that it ends; empty where it cannot
    be read. A progress bar's carriage returns end none.
    """
    if path is None or line is None:
        return ""
    try:
        with open(path, encoding="utf-8", errors="replace", newline="\n") as file:
            before = deque(islice(file, line - 1), maxlen=_MOST)
            text = next(file, "")
            begins = next((a for a, b in _PANELS if b in text and a not in text), None)
            if begins is not None:  # a panel is told at its end
                while before and begins not in text:
                    text = before.pop() + text
                return text
            end = "}" if text.count("{") > text.count("}") else next((b for a, b in _PANELS if a in text), None)
            for more in islice(file, _MOST if end is not None else 0):
                text += more
                if end is not None and end in more:
                    break
            return text
    except OSError:
        return ""
