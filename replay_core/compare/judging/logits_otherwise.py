"""Log-probabilities that are off though the logits they are made of agree: logits divided by a temperature, or capped
on the way or not, on some ranks or in a rank's slice of the vocabulary.

The other run's log-probabilities say whether its recorded logits were capped (c tanh(z / c), Gemma 2) and what the
targets are; what does not make these again says nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from replay_core.compare.judging.faults import Fault, whose
from replay_core.compare.judging.products import Array
from replay_core.compare.judging.solving import solved
from replay_core.compare.judging.vocabulary import logprobs
from replay_core.compare.pairing.ranks import HeldByRanks

Ints = NDArray[np.int64]

#: How near log-probabilities are to what is made again: of the other run, and of the difference between the runs.
_AGAIN, _LEFT = 2e-3, 0.02
_FEWEST = 4
#: Tokens of which a cap is solved for.
_SOLVED = 64
#: How near, of itself, what is solved for must be on every rank.
_ALIKE = 0.02


class OfTokens(Struct, frozen=True):
    """What ranks say of their tokens: which of all tokens these are, [n], and the log-probabilities, [n]."""

    ranks: tuple[int, ...]
    rows: Ints
    values: Array


class OfLogits(Struct, frozen=True):
    """Logits [N, V], targets and log-probabilities [N] of the other run; at what its logits are capped."""

    logits: Array
    targets: Ints
    said: Array
    cap: float | None


def made_of(said: Array, logits: Array, targets: Sequence[Ints]) -> tuple[OfLogits, Ints] | None:
    """What the other run's log-probabilities [N] are made of, and which of the tokens count; None where nothing is."""
    for own in targets:
        told = np.flatnonzero((said != 0) & (own >= 0) & (own < logits.shape[1]))
        if told.size < _FEWEST:
            continue
        values, those = logits[told], own[told]
        sign = -1 if said[told].mean() > 0 else 1
        size = float(np.linalg.norm(said[told]))

        def off(cap: float | None, values: Array = values, those: Ints = those, told: Ints = told,
                sign: int = sign) -> float:  # fmt: skip
            return float(np.linalg.norm(sign * logprobs(_capped(values, cap), those) - said[told]))

        if off(None) <= _AGAIN * size:
            return OfLogits(values, those, said[told], None), told
        # A cap is solved for on a few tokens, and then asked of all.
        few = np.unique(np.linspace(0, told.size - 1, min(told.size, _SOLVED)).astype(int))
        of_few = values[few], those[few], told[few]
        log, left = solved(lambda log: off(math.exp(log), *of_few), np.linspace(0, 5, 26))  # noqa: B023
        if left > _AGAIN * float(np.linalg.norm(said[told[few]])):
            continue
        if off(math.exp(log)) <= _AGAIN * size:
            return OfLogits(values, those, said[told], math.exp(log)), told
    return None


def explain(what: str, made: OfLogits, every: Sequence[OfTokens], slices: HeldByRanks | None) -> Fault | None:
    """What is otherwise of ranks' log-probabilities. every: of ranks that are off, in rows of `made`."""
    sign = -1 if made.said.mean() > 0 else 1
    by_kind: dict[str, list[tuple[float, float, tuple[int, ...], OfTokens]]] = {}
    for said in every:
        off_n = said.values - made.said[said.rows]
        size = float(np.linalg.norm(off_n))
        if said.rows.size < _FEWEST or not size or not np.isfinite(size):
            return None
        logits, targets = made.logits[said.rows], made.targets[said.rows]

        def left(values: Array, targets: Ints = targets, said: OfTokens = said, size: float = size) -> float:
            return float(np.linalg.norm(sign * logprobs(values, targets) - said.values)) / size

        of_said: dict[str, tuple[float, float, tuple[int, ...]]] = {}
        for kind, ranks, make, grid in _ways(made, said, logits, slices):
            where, rest = 0.0, left(make(0.0))
            if grid is not None:
                log, rest = solved(lambda log: left(make(log)), grid)  # noqa: B023
                where = math.exp(log)
            if rest < of_said.setdefault(kind, (np.inf, 0.0, ()))[0]:
                of_said[kind] = rest, where, ranks
        for kind, (rest, where, ranks) in of_said.items():
            by_kind.setdefault(kind, []).append((rest, where, ranks, said))
    found = sorted(
        (max(one[0] for one in told), kind) for kind, told in by_kind.items()
        if len(told) == len(every) and len({one[2] for one in told if one[3].ranks == told[0][3].ranks}) == 1
    )  # fmt: skip
    if not found or found[0][0] > _LEFT or (len(found) > 1 and found[1][0] < 3 * found[0][0]):
        return None
    kind = found[0][1]
    wheres = [one[1] for one in by_kind[kind]]
    ranks = tuple(sorted({rank for one in by_kind[kind] for rank in one[2]}))
    if max(wheres) - min(wheres) > _ALIKE * max(wheres) or (kind == "temperature" and abs(wheres[0] - 1) < _ALIKE):
        return None
    capped = "" if made.cap is None else f" (the other run's are, at {made.cap:.3g})"
    words = {
        "temperature": f"divided by {wheres[0]:.3g} (a temperature): all log-probabilities are scaled so",
        "not capped": f"not capped{capped}: the head's output agrees, what is made of it does not (logit soft cap)",
        "slice not capped": f"not capped in {whose(ranks)}'s slice of the vocabulary{capped} (logit soft cap)",
        "capped": f"capped at {wheres[0]:.3g}{capped or ', which the other run does not'} (logit soft cap)",
    }[kind]
    return Fault(
        f"logits {kind}", ranks,
        f"{what} of {whose(ranks)} is what the recorded logits make, {words}",
    )  # fmt: skip


def _ways(
    made: OfLogits, said: OfTokens, logits: Array, slices: HeldByRanks | None
) -> Iterator[tuple[str, tuple[int, ...], Callable[[float], Array], Array | None]]:
    due = _capped(logits, made.cap)
    yield "temperature", said.ranks, lambda log: due / math.exp(log), np.linspace(-3, 3, 31)
    if made.cap is not None:
        yield "not capped", said.ranks, lambda _: logits, None
    yield "capped", said.ranks, lambda log: _capped(logits, math.exp(log)), np.linspace(-1, 5, 31)
    if slices is None or made.cap is None:
        return
    for rank, stretches in zip(slices.ranks, slices.stretches, strict=True):
        part = due.copy()
        for start, length in stretches:
            part[:, start : start + length] = logits[:, start : start + length]
        yield "slice not capped", (rank,), lambda _, part=part: part, None  # type: ignore[misc]


def _capped(logits: Array, cap: float | None) -> Array:
    return logits if cap is None else np.asarray(cap * np.tanh(logits / cap))
