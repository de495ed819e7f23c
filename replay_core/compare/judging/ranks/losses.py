"""What the ranks' own losses are: means over their own tokens, the whole of each, or the other run's."""

from __future__ import annotations

import numpy as np

from replay_core import pages
from replay_core.compare.judging import contributions, limits
from replay_core.compare.judging.faults import Fault
from replay_core.compare.judging.ranks.row import MOST, RowOfRanks


class OwnMeans:
    """Of a step, what its losses say of the means they are, until a gradient that is off is explained by it."""

    def __init__(self) -> None:
        self._of_steps: dict[int | None, Fault] = {}

    def note(self, of: RowOfRanks) -> None:
        if of.kind == "loss" and not of.held.is_cut and not of.whole.shape:
            fault = _of_own_tokens(of)
            if fault is not None:
                self._of_steps[of.step] = fault

    def take(self, step: int | None) -> Fault | None:
        return self._of_steps.pop(step, None)


def of_losses(of: RowOfRanks, fault: Fault | None) -> Fault | None:
    if of.kind == "loss" and fault is None and not of.held.is_cut and not of.whole.shape:
        return _of_own_tokens(of)
    return fault


def _of_own_tokens(of: RowOfRanks) -> Fault | None:
    """Whether the ranks' losses are means over their own tokens, or each has the whole of what is beside them, as the
    log-probabilities of these say.
    """
    held = of.held
    refs = [of.other.find("policy_logprobs"), *(of.together.logprobs.get(rank) for rank in held.ranks)]
    if any(ref is None or not ref.is_readable or ref.numel > MOST for ref in refs):
        return None
    values = [pages.array(ref).astype(np.float64) for ref in refs if ref is not None]
    numbers = [float(pages.array(part).reshape(-1)[0]) for part in (of.whole, *held.parts)]
    return contributions.own_means(
        of.name, numbers[0], numbers[1:], held.ranks, values[1:]
    ) or contributions.whole_of_each(of.name, numbers[0], numbers[1:], held.ranks, values)


def off_their_own(of: RowOfRanks) -> tuple[int, ...]:
    """Ranks whose number is not what the same rank of the other run has, where that run's ranks stand for one process;
    nothing where these are not the same ranks.
    """
    held, together = of.held, of.together
    if together.whole_of is None:
        return ()
    there = together.whole_of.by_name.get(of.pair.name)
    if there is None or there.ranks != held.ranks or any(ref.numel != 1 for ref in (*held.parts, *there.parts)):
        return ()
    numbers = [
        tuple(float(pages.array(ref).reshape(-1)[0]) for ref in both)
        for both in zip(held.parts, there.parts, strict=True)
    ]  # fmt: skip
    return tuple(
        rank for rank, (one, other) in zip(held.ranks, numbers, strict=True)
        if abs(one - other) > limits.SCALAR[1] * max(abs(one), abs(other))
    )  # fmt: skip
