"""What the ranks' own losses are: means over their own tokens, the whole of each, or the other run's."""

from __future__ import annotations

import numpy as np

from replay_core import pages
from replay_core.compare.judging import before_its_sum, contributions, limits, own_counts
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
        return _of_own_tokens(of) or _of_own_counts(of) or _of_own_parts(of)
    return fault


def _of_own_counts(of: RowOfRanks) -> Fault | None:
    """Whether each rank's loss is divided by what it counts itself, whatever it is made of."""
    ranks = of.held.ranks
    if len(ranks) < 2 or not all(ref.is_readable for ref in (of.whole, *of.held.parts)):
        return None
    losses = [float(pages.array(part).reshape(-1)[0]) for part in of.held.parts]
    whole = float(pages.array(of.whole).reshape(-1)[0])
    if not np.isfinite([whole, *losses]).all():
        return None
    return own_counts.explain(
        of.name, whole, losses, ranks, list(own_counts.counts(of.side, of.other, of.together, ranks))
    )


def _of_own_parts(of: RowOfRanks) -> Fault | None:
    """Whether each rank's loss is made of its own part of another tensor of the loss, before these were added up."""
    losses = [float(pages.array(part).reshape(-1)[0]) for part in of.held.parts]
    whole = float(pages.array(of.whole).reshape(-1)[0])
    for place, (_, ref) in of.side.tensors.items():
        held, facing = of.together.held.get(id(ref)), of.other.tensors.get(place)
        if held is None or facing is None or place[1] != "loss" or not ref.shape or ref.numel > MOST:
            continue
        refs = facing[1], *held.parts
        if held.is_cut or held.ranks != of.held.ranks or any(
            not one.dtype.startswith(("float", "bfloat")) or not one.is_readable or one.shape != ref.shape
            for one in refs
        ):  # fmt: skip
            continue
        x, *parts = (pages.array(one).astype(np.float64).reshape(-1) for one in refs)
        fault = before_its_sum.of_own_parts(of.name, held.ranks, whole, losses, place[0], x, parts)
        if fault is not None:
            return fault
    return None


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
