"""What a weight that is off says of the optimizer's step before it, where the gradient of that step agrees: it was not
taken, taken more than once or at another rate, with another decay of the weight, or with another state; of all of it or
of one rank's shard.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from msgspec import Struct

from replay_core import pages
from replay_core.compare.judging.faults import Fault, whose
from replay_core.compare.judging.products import Array
from replay_core.compare.pairing.ranks import HeldByRanks
from replay_core.records import TensorRef

#: What part of a step what explains it may leave; how far the weights before it may be from each other, of the step.
_LEFT, _BEFORE = 0.05, 0.05
#: A shard is right where it is off by no more than this part of the step.
_RIGHT = 0.02
#: Gradients that are off by more than float32's noise move elements next to 0 either way under an adaptive optimizer,
#: each by a whole step: what its state is they do not tell.
_MOST_NOISE = 1e-3
_MOST, _FEWEST = 1 << 22, 4
#: Weights vary by this part of their norm, where what is off is said to be a part of them.
_VARIES = 0.3


class Before(Struct, frozen=True):
    """A weight a step ago: of the other run, and of each rank."""

    step: int
    whole: TensorRef
    held: HeldByRanks
    #: Whether its gradient of that step was looked at and is off, or is the other run's; None where it is not recorded.
    gradient_is_off: bool | None
    #: By how much of itself it is off at most, where it is the other run's but for noise.
    gradient_noise: float = 0.0


def of_the_step(
    what: str, step: int, whole: TensorRef, held: HeldByRanks, parted: Sequence[int], before: Before,
    every: Sequence[int],
) -> Fault | None:  # fmt: skip
    """What the step before a weight that is off did otherwise, and on which ranks.

    parted: the ranks whose copy or slice is off; every: all ranks, among which a weight that each has whole may be
    kept up to date in shards of its rows.

    Raises:
        DumpError: the bytes of one cannot be read.
    """
    if before.gradient_is_off or before.held.ranks != held.ranks or before.held.stretches != held.stretches:
        return None
    refs = (whole, before.whole, *held.parts, *before.held.parts)
    if any(not ref.is_readable or ref.numel > _MOST for ref in refs) or before.whole.shape != whole.shape:
        return None
    if (stretch := _stale_stretch(what, step, whole, held, parted, before)) is not None:
        return stretch
    found: dict[tuple[int, ...], tuple[str, str, float | None]] = {}
    for ranks, there, was_there, here, was_here in _pieces(whole, held, parted, before, every):
        due, made = there - was_there, here - was_here
        size = float(np.linalg.norm(due))
        if not size or not np.isfinite(made).all() or np.linalg.norm(was_here - was_there) > _BEFORE * size:
            return None
        if np.linalg.norm(made - due) <= _RIGHT * size:
            continue
        is_next = step == before.step + 1 and before.gradient_noise <= _MOST_NOISE
        told = _told(made, due, size, was_there, is_next=is_next, has_gradient=before.gradient_is_off is not None)
        if told is None:
            return None
        found[ranks] = told
    if not found or len({kind for kind, _, _ in found.values()}) > 1:
        return None
    ranks = tuple(sorted({rank for own in found for rank in own}))
    kind, said, factor = next(iter(found.values()))
    shard = (
        f"the shard of {whose(ranks)} of "
        if not held.is_cut and len(found) < len(every) and _is_shard(found, parted)
        else ""
    )
    return Fault(
        kind, ranks,
        f"{shard}{what} on {whose(ranks)} {said.format(begun=before.step, now=step)}; its weights before are the "
        "other run's",
        factor,
    )  # fmt: skip


def _stale_stretch(
    what: str, step: int, whole: TensorRef, held: HeldByRanks, parted: Sequence[int], before: Before
) -> Fault | None:
    """One stretch of a weight that all have whole which was not moved, of any length: whose it is to move is a guess
    where shards of flat weights end anywhere.
    """
    if held.is_cut or not whole.shape or set(parted) != set(held.ranks) or len(held.ranks) < 2:
        return None
    there, was_there, here, was_here = (
        pages.array(ref).astype(np.float64).reshape(-1)
        for ref in (whole, before.whole, held.parts[0], before.held.parts[0])
    )
    if not there.size == was_there.size == here.size == was_here.size:
        return None
    moved = np.flatnonzero(there != was_there)
    size = np.abs(there - was_there).max(initial=0.0)
    if moved.size < _FEWEST or np.abs(was_here - was_there).max() > _BEFORE * size:
        return None
    stale = np.flatnonzero((here == was_here)[moved])
    if not _FEWEST <= stale.size < moved.size or stale[-1] - stale[0] + 1 > stale.size:
        return None
    rest = np.delete(moved, stale)
    if np.abs(here - there)[rest].max() > _RIGHT * size:
        return None
    first, last, rows = int(moved[stale[0]]), int(moved[stale[-1]]), there.size // whole.shape[0]
    long = -(-whole.shape[0] // len(held.ranks)) * rows
    if first % long == 0 and (last + 1) % long == 0:
        return None  # the rows of a rank
    return Fault(
        "stale weight", tuple(parted),
        f"elements {first} to {last} of {what}, which {whose(parted)} have whole, are what they were at step "
        f"{before.step}: this stretch is stale, no step was taken with it by step {step}, and all others are the other "
        "run's (a shard of the optimizer that did not arrive)",
    )  # fmt: skip


def frozen(
    what: str, step: int, whole: TensorRef, held: HeldByRanks, parted: Sequence[int], before: Before
) -> Fault | None:
    """Whether ranks whose weight was off before already have it unmoved since, where the other run's moved.

    Raises:
        DumpError: the bytes of one cannot be read.
    """
    if before.held.ranks != held.ranks or before.held.stretches != held.stretches:
        return None
    if any(not ref.is_readable for ref in (whole, before.whole, *held.parts, *before.held.parts)):
        return None
    moved = np.flatnonzero(pages.array(whole).reshape(-1) != pages.array(before.whole).reshape(-1))
    if not moved.size:
        return None
    those = tuple(
        rank for rank, now, was in zip(held.ranks, held.parts, before.held.parts, strict=True)
        if now.shape == was.shape and np.array_equal(pages.array(now), pages.array(was))
    )  # fmt: skip
    if not those or not set(those) <= set(parted or held.ranks):
        return None
    return Fault(
        "stale weight", those,
        f"{what} is on {whose(those)} at step {step} bit by bit what it is at step {before.step}, and off at both, "
        "where the other run's moves: no step is taken with it there (frozen, left out of the optimizer, or its update "
        "does not arrive)",
    )  # fmt: skip


def _is_shard(found: dict[tuple[int, ...], tuple[str, str, float | None]], parted: Sequence[int]) -> bool:
    return all(len(own) == 1 for own in found) and len(parted) > len(found)


def _told(
    made: Array, due: Array, size: float, was: Array, *, is_next: bool, has_gradient: bool
) -> tuple[str, str, float | None] | None:
    if np.linalg.norm(made) <= 1e-3 * size:
        return (
            "stale weight",
            "is what it was at step {begun}: it is stale, no step was taken with it by step {now}",
            None,
        )
    times = float((made * due).sum()) / (size * size)
    if np.linalg.norm(made - times * due) <= _LEFT * np.linalg.norm(made) and abs(times - 1) > 0.01:
        twice = "the step was taken twice, or its learning rate is twice" if abs(times - 2) < 0.05 else (
            "its learning rate is another"
        )  # fmt: skip
        if times < 0:
            twice = "it moved the other way, as where the loss or the step has the other sign"
        twice += "" if has_gradient else ", or its gradient is (it was not recorded)"
        return (
            "another rate",
            f"moved {times:.3g} x as far as the other run's from step {{begun}} to {{now}}: {twice}",
            times,
        )
    if is_next and (decay := _decay(made - due, was)) is not None:
        less = "less" if decay > 0 else "more"
        return (
            "weight decay",
            "moved otherwise than the other run's from step {begun} to {now} by "
            f"{abs(decay):.3g} of the weight itself, {less} towards 0, and by nothing else: its weight decay is another"
            f"{', or is not applied' * (decay > 0)} (the learning rate times the decay's difference is that)",
            None,
        )
    if not is_next or not has_gradient:
        return None
    return (
        "optimizer's state",
        "moved otherwise than the other run's from step {begun} to {now}, though the gradient agrees: what the "
        "optimizer keeps (moments, a master weight, weight decay) is not the other run's, as after a resume with "
        "another's state",
        None,
    )


def _decay(off: Array, was: Array) -> float | None:
    """How many times the weight a step is off, where it is so by one number."""
    size = float(np.square(was).sum())
    # One number may be added to weights that are all alike (a norm's) for any reason.
    if not size or was.size < _FEWEST or np.linalg.norm(was - was.mean()) <= _VARIES * size**0.5:
        return None
    times = float((off * was).sum()) / size
    return times if times and np.linalg.norm(off - times * was) <= _LEFT * np.linalg.norm(off) else None


def _pieces(
    whole: TensorRef, held: HeldByRanks, parted: Sequence[int], before: Before, every: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], Array, Array, Array, Array]]:
    """The ranks whose piece it is; of the other run now and before, and of the rank."""
    there, was_there = (pages.array(ref).astype(np.float64) for ref in (whole, before.whole))
    is_copy_of_all = not held.is_cut and set(parted) == set(held.ranks) and len(held.ranks) > 1
    if is_copy_of_all and there.ndim and len(there) >= len(every):
        here, was_here = (pages.array(ref).astype(np.float64) for ref in (held.parts[0], before.held.parts[0]))
        if here.shape != there.shape or was_here.shape != there.shape:
            return
        long = -(-len(there) // len(every))
        shards = [
            ((rank,), slice(number * long, (number + 1) * long)) for number, rank in enumerate(every)
            if number * long < len(there)
        ]  # fmt: skip
        is_right = [
            np.linalg.norm((here - there)[cut]) <= _RIGHT * np.linalg.norm((there - was_there)[cut])
            for _, cut in shards
        ]
        if any(is_right) and not all(is_right):
            for ranks, cut in shards:
                if there[cut].size >= _FEWEST:
                    yield ranks, there[cut], was_there[cut], here[cut], was_here[cut]
            return
        yield tuple(parted), there, was_there, here, was_here
        return
    for number, rank in enumerate(held.ranks):
        if rank not in parted:
            continue
        here, was_here = (pages.array(one.parts[number]).astype(np.float64) for one in (held, before.held))
        own, was_own = there, was_there
        if held.axis is not None:
            places = np.concatenate([np.arange(at, at + long) for at, long in held.stretches[number]])
            own, was_own = (np.take(values, places, held.axis) for values in (there, was_there))
        if here.shape == own.shape == was_here.shape:
            yield (rank,), own, was_own, here, was_here
