"""What some ranks alone have otherwise of a tensor's rows (its tokens, its samples): told by those of the other run.

Of y [N, H] of the other run and h of a rank: every row a multiple of its own (h_n = f_n y_n) is what a norm by another
statistic makes, or weights that do not add up to one. One factor and a constant of each channel (h = f y + c) is a
layer with f times the weight, whose bias is as it was. The same rows elsewhere are another
order. Each leaves nothing of the difference, which chance does not do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from replay_core import naming, pages
from replay_core.compare.judging.faults import Fault, whose
from replay_core.compare.judging.products import Array
from replay_core.compare.pairing.ranks import HeldByRanks
from replay_core.records import Inline, TensorRef

#: Fewer rows, or narrower ones, may be multiples of others by chance.
_FEWEST, _NARROWEST = 8, 8
#: Fewer numbers, of a sample each, are those of others by chance.
_FEWEST_SAMPLES = 3
#: What part of the numbers of tokens that are all moved by one is another one's.
_MOSTLY_OFF = 0.5
#: What part of a difference may be left, of what explains it; and how far factors may be from one.
_LEFT = 0.02
_MOST = 1 << 22
_MOST_ROWS = 4096
_MOST_RANKS = 64
#: Rows vary by this part of their norm.
_VARIES = 0.1


class Own(Struct):
    """What a rank has, and the other run's of the same place."""

    rank: int
    here: Array
    there: Array


def each_of(whole: TensorRef, held: HeldByRanks, parted: Sequence[int]) -> Iterator[Own]:
    there = pages.array(whole).astype(np.float64)
    for number, (rank, ref) in enumerate(zip(held.ranks, held.parts, strict=True)):
        if rank not in parted:
            continue
        own = there
        if held.axis is not None:
            places = [at for start, long in held.stretches[number] for at in range(start, start + long)]
            own = np.take(there, places, held.axis)
        yield Own(rank, pages.array(ref).astype(np.float64), own)


def are_asked(whole: TensorRef, held: HeldByRanks, parted: Sequence[int]) -> bool:
    return bool(parted) and whole.numel <= _MOST and all(ref.is_readable for ref in (whole, *held.parts))


def of_rows(what: str, whole: TensorRef, held: HeldByRanks, parted: Sequence[int]) -> Fault | None:
    """Of an output [..., H] of which ranks have all or some of the rows: by what these are the other run's."""
    if len(whole.shape) < 2 or whole.shape[-1] < _NARROWEST or held.axis == len(whole.shape) - 1:
        return None
    if not are_asked(whole, held, parted):
        return None
    found: list[tuple[str, str]] = []
    for own in each_of(whole, held, parted):
        if own.here.shape != own.there.shape or not np.isfinite(own.here).all():
            return None
        width = whole.shape[-1]
        said = _said(own.here.reshape(-1, width), own.there.reshape(-1, width))
        if said is None and not naming.is_of_experts(what):  # whose rows are neither samples nor tokens in turn
            said = _in_order(own)
        if said is None:
            return None
        found.append(said)
    kinds = {kind for kind, _ in found}
    # What a stage of a pipeline alone has may be as it was handed to it.
    if len(kinds) != 1 or (kinds == {"times"} and len(held.ranks) == 1):
        return None
    return Fault(kinds.pop(), tuple(parted), f"{what} on {whose(parted)}: {found[0][1]}")


def of_own_words(whole: TensorRef, held: HeldByRanks, ids: TensorRef | None) -> TensorRef | None:
    """What a lookup of words that are spread over ranks puts out, each rank its own words' rows and at all others what
    is to be masked: the rows of the ranks whose words they are. None where some token is right on no rank, or the words
    that are right on a rank are not one stretch of its own.
    """
    if held.is_cut or not 2 <= len(held.ranks) <= _MOST_RANKS or len(whole.shape) < 2 or ids is None:
        return None
    if whole.shape[:-1] != ids.shape or not are_asked(whole, held, held.ranks) or not ids.is_readable:
        return None
    if any(ref.shape != whole.shape for ref in held.parts):
        return None
    ids_N = pages.array(ids).reshape(-1).astype(np.int64)
    there = pages.array(whole).astype(np.float64).reshape(ids_N.size, -1)
    made, end = np.zeros_like(there), -1
    least = np.maximum(np.linalg.norm(there, axis=1), 1e-300)
    for ref in held.parts:
        here = pages.array(ref).astype(np.float64).reshape(there.shape)
        is_right_N = np.linalg.norm(here - there, axis=1) <= 1e-3 * least
        right, wrong = ids_N[is_right_N], ids_N[~is_right_N]
        if len(right) < _FEWEST or len(wrong) < _FEWEST or right.min() <= end:
            return None
        if ((wrong >= right.min()) & (wrong <= right.max())).any():
            return None
        end = int(right.max())
        made[is_right_N] = here[is_right_N]
    if np.linalg.norm(made - there) > 1e-3 * np.linalg.norm(there):
        return None
    return whole.with_(dtype="float64", source=Inline(made.reshape(whole.shape).tobytes()), digest=None)


def _said(h_NH: Array, y_NH: Array) -> tuple[str, str] | None:
    """What the rows are to those of the other run, in place."""
    has = y_NH.any(1)
    h_NH, y_NH = h_NH[has], y_NH[has]
    off_NH = h_NH - y_NH
    off = float(np.linalg.norm(off_NH))
    if len(h_NH) < _FEWEST or not off:
        return None
    f_N = (h_NH * y_NH).sum(1) / np.square(y_NH).sum(1)
    if np.linalg.norm(h_NH - f_N[:, None] * y_NH) <= _LEFT * off:
        low, high = float(f_N.min()), float(f_N.max())
        if high - low <= _LEFT * max(abs(low - 1), abs(high - 1)):
            return "times", f"every value is {float(np.median(f_N)):.4g} times the other run's"
        return "row factors", (
            f"every token's row is the other run's times a factor of its own ({low:.4g} to {high:.4g}): what a norm "
            "makes whose epsilon or statistic is another, or weights (a router's, of a mask) that are not normalised "
            "as the other run's are"
        )  # fmt: skip
    moved_NH = off_NH - off_NH.mean(0)
    spread = float(np.linalg.norm(moved_NH))
    if spread <= _LEFT * off:
        return None  # a bias, of which the layers around say more
    y_NH = y_NH - y_NH.mean(0)
    more = float((moved_NH * y_NH).sum() / max(float(np.square(y_NH).sum()), 1e-300))
    if np.linalg.norm(moved_NH - more * y_NH) <= _LEFT * spread and len(h_NH) >= 2 * _FEWEST:
        return "times", (
            f"every token is {1 + more:.4g} times the other run's, but for a constant of each channel: it is made with "
            f"{1 + more:.4g} times the weight (or of as large an input), and a bias as the other run's"
        )  # fmt: skip
    return None


def _in_order(own: Own) -> tuple[str, str] | None:
    """Whether samples, or tokens, are the other run's in another order."""
    for axes, called in ((1, "samples"), (2, "tokens")):
        if own.here.ndim <= axes:
            continue
        count = int(np.prod(own.here.shape[:axes]))
        place = _places(own.here.reshape(count, -1), own.there.reshape(count, -1))
        if place is not None:
            return "rows order", (
                f"the {called} are the other run's in another order ({int((place != np.arange(count)).sum())} of "
                f"{count} elsewhere; they stand as {_first(place)})"
            )  # fmt: skip
    return None


def _places(here: Array, there: Array) -> NDArray[np.intp] | None:
    """Where each row stands in the other run; None where one stands nowhere, or two in one place."""
    count = len(here)
    if not 2 <= count <= _MOST_ROWS or here.shape != there.shape:
        return None
    size = [np.square(one).sum(1) for one in (here, there)]
    place = (size[0][:, None] - 2 * here @ there.T + size[1][None]).argmin(1)
    off = np.linalg.norm(here - there[place], axis=1)
    if (off > 1e-4 * np.sqrt(size[0])).any() or not np.array_equal(np.sort(place), np.arange(count)):
        return None
    return place if (place != np.arange(count)).any() else None


def _first(place: NDArray[np.intp]) -> str:
    return ", ".join(map(str, place[:8].tolist())) + (", ..." if len(place) > 8 else "")


def of_ids(what: str, whole: TensorRef, held: HeldByRanks, parted: Sequence[int]) -> Fault | None:
    """Of a number for every token [sample, position]: whether ranks have those of other samples of theirs."""
    if len(whole.shape) != 2 or held.axis == 1 or whole.shape[1] < _FEWEST or not are_asked(whole, held, parted):
        return None
    said = ""
    for own in each_of(whole, held, parted):
        if own.here.shape != own.there.shape or len({row.tobytes() for row in own.there}) < len(own.there):
            return None
        place = _places(own.here, own.there)
        if place is None or not np.array_equal(own.here, own.there[place]):
            return None
        said = said or _first(place)
    return Fault(
        "rows order", tuple(parted),
        f"{what} on {whose(parted)}: the samples' rows are the other run's in another order (they stand as {said}), "
        "while the tokens are in theirs: they belong to other samples or micro-batches of the rank",
    )  # fmt: skip


def of_samples(what: str, whole: TensorRef, held: HeldByRanks, parted: Sequence[int]) -> Fault | None:
    """Of numbers of samples [sample] or tokens [sample, position] that are no ids: whether ranks have those of other
    samples of theirs, or every token has its neighbour's.
    """
    if not 1 <= len(whole.shape) <= 2 or held.axis == 1 or not are_asked(whole, held, parted):
        return None
    said: dict[str, str] = {}
    for own in each_of(whole, held, parted):
        if own.here.shape != own.there.shape or not np.isfinite(own.here).all():
            return None
        here, there = (one.reshape(len(one), -1) for one in (own.here, own.there))
        place = _places(here, there) if len({row.tobytes() for row in there}) == len(there) else None
        moved = _moved_by(here, there)
        if place is not None and len(place) >= _FEWEST_SAMPLES:
            words = f"the samples' are the other run's in another order (they stand as {_first(place)})"
            said.setdefault("rows order", words)
        elif moved is not None:
            late = "before" if moved > 0 else "behind"
            said.setdefault("moved", f"every token has what the other run has of the token {late} it")
        else:
            return None
    if len(said) != 1:
        return None
    ((kind, words),) = said.items()
    return Fault(kind, tuple(parted), f"{what} on {whose(parted)}: {words}, while the tokens are in theirs")


def _moved_by(here: Array, there: Array) -> int | None:
    """By how many tokens a row stands later than the other run's: one or minus one; None where it does not."""
    for by in (1, -1):
        mine, others = (here[:, 1:], there[:, :-1]) if by > 0 else (here[:, :-1], there[:, 1:])
        if mine.shape[1] < _FEWEST or np.abs(mine - others).max() > 1e-5 * np.abs(others).max(initial=0.0):
            continue
        # Where neighbours are alike (advantages of whole responses), whoever is moved stands as before.
        is_off = np.abs(here - there) > 1e-5 * np.abs(there).max(initial=0.0)
        return by if is_off.mean() > _MOSTLY_OFF else None
    return None


def own_constant(what: str, whole: TensorRef, held: HeldByRanks, parted: Sequence[int]) -> Fault | None:
    """Whether all that ranks have otherwise of an output [..., H] is a number of each channel, the same for every
    token: a bias or a buffer of their own, as a router's that balances its experts.
    """
    if len(whole.shape) < 2 or held.axis == len(whole.shape) - 1 or not 0 < len(parted) < len(held.ranks):
        return None
    if not are_asked(whole, held, parted):
        return None
    for own in each_of(whole, held, parted):
        if own.here.shape != own.there.shape or not np.isfinite(own.here).all():
            return None
        off_NH = (own.here - own.there).reshape(-1, whole.shape[-1])
        size = float(np.linalg.norm(off_NH))
        if len(off_NH) < _FEWEST or not size or np.linalg.norm(off_NH - off_NH.mean(0)) > _LEFT * size:
            return None
        there_NH = own.there.reshape(off_NH.shape)
        # Rows that are all alike are off by a constant whatever is wrong.
        if np.linalg.norm(there_NH - there_NH.mean(0)) < _VARIES * np.linalg.norm(there_NH):
            return None
    return Fault(
        "own constant", tuple(parted),
        f"{what} on {whose(parted)} is the other run's plus a number of each channel, the same for every token: it is "
        f"made there with a bias or buffer of {whose(parted)} alone (one that counts a rank's own tokens, as a "
        "router's balance, and is not brought together over ranks)",
    )  # fmt: skip


def in_another_turn(what: str, whole: TensorRef, held: HeldByRanks, every: Sequence[int]) -> Fault | None:
    """Of a number for every token [sample, position] that some of the ranks alone have (the last stage of a pipeline),
    and that is off where samples are paired by their tokens: whether it stands as the other run's do, so that the
    samples themselves stand otherwise on the ranks before.
    """
    others = [rank for rank in every if rank not in held.ranks]
    if len(whole.shape) != 2 or whole.shape[0] < 2 or not others or not are_asked(whole, held, held.ranks):
        return None
    if not all(np.array_equal(own.here, own.there) for own in each_of(whole, held, held.ranks)):
        return None
    return Fault(
        "micro-batches order", tuple(every),
        f"{what} on {whose(held.ranks)} stand sample by sample as the other run's do, while the tokens on "
        f"{whose(others)} stand in another order: the stages go through the micro-batches in another order each, and "
        "what is handed on meets another micro-batch's",
    )  # fmt: skip
