"""Outputs that are off the other run's by the same thing at every token: one vector (a bias that is added once for each
rank, or not at all), or one factor and one number of each channel (a norm's weight that is another).

Of y [N, H] of the other run and h of a rank, h = y + c leaves nothing of h - y but its mean over tokens; and
h = y g + c leaves nothing of what is off once g and c are solved for, channel by channel. What is off for any other
reason depends on the token. Where the bias or weight itself was recorded, c and g are held against it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from replay_core import naming, pages
from replay_core.compare.judging.faults import Fault, whose
from replay_core.compare.judging.own_rows import are_asked, each_of
from replay_core.compare.judging.products import Array
from replay_core.compare.pairing.ranks import HeldByRanks, standing_for
from replay_core.records import TensorRef

#: Fewer rows, or narrower ones, are off by the same by chance.
_FEWEST, _NARROWEST = 8, 4
#: What part of what is off may be left over.
_LEFT = 0.02
#: Rows vary by this part of their norm; of such as are all alike anything is off by the same.
_VARIES = 0.1
#: A bias or weight may have been recorded after its step: by what part of its norm a multiple may be off it.
_STEPPED = 0.1
#: A number of times is a whole one, or one over a whole one, to this.
_TIMES = 0.08
CONSTANT, CHANNELS = "constant", "channel factors"


def explain(what: str, whole: TensorRef, held: HeldByRanks, parted: Sequence[int]) -> Fault | None:
    """Of an output [..., H], of whose rows or channels ranks have all or some."""
    found = []
    for _, there_NH, here_NH in _rows(whole, held, parted):
        off_NH = here_NH - there_NH
        kind = CONSTANT if _is_constant(off_NH) else CHANNELS if _channels(there_NH, here_NH) is not None else None
        if kind is None or np.linalg.norm(there_NH - there_NH.mean(0)) < _VARIES * np.linalg.norm(there_NH):
            return None
        found.append(kind)
    if not found or len(set(found)) != 1:
        return None
    if found[0] == CONSTANT:
        return Fault(
            CONSTANT, tuple(parted),
            f"{what} on {whose(parted)} is the other run's plus one vector, the same for every token: a bias that is "
            "added once for each rank, left out, or another one",
        )  # fmt: skip
    if _are_of_slices(whole, held, parted):
        return None
    low, high = _range(whole, held, parted)
    return Fault(
        CHANNELS, tuple(parted),
        f"{what} on {whose(parted)} is the other run's channel by channel times a factor of its own ({low:.4g} to "
        f"{high:.4g}), the same for every token: a weight of each channel (a norm's, a gate's scale) is another, left "
        "out, or applied once too often",
    )  # fmt: skip


def is_of_values(fault: Fault) -> bool:
    """Whether a fault says what values look like alone, which a weight may say the cause of."""
    return fault.kind in (CONSTANT, CHANNELS)


def by_bias(what: str, whole: TensorRef, held: HeldByRanks, parted: Sequence[int], bias: HeldByRanks) -> Fault | None:
    """How often the layer's bias is in an output that is off by the same vector at every token."""
    if (slices := _by_slice(what, whole, held, parted, bias)) is not None:
        return slices
    times = []
    for rank, there_NH, here_NH in _rows(whole, held, parted):
        own = _own(bias, rank)
        mean_H = (here_NH - there_NH).mean(0)
        if own is None or own.shape != mean_H.shape or not own.any():
            return None
        factor = float((mean_H * own).sum() / np.square(own).sum())
        if np.linalg.norm(mean_H - factor * own) > _STEPPED * np.linalg.norm(mean_H):
            return None
        times.append(1 + factor)
    if not times or max(times) - min(times) > _TIMES:
        return None
    count, often = len(held.ranks), float(np.mean(times))
    said = _often(often, count)
    if said is None:
        return None
    return Fault(
        "too much" if often > 1 + _TIMES else CONSTANT, tuple(parted),
        f"{what} on {whose(parted)} is the other run's plus one vector, the same for every token, which is "
        f"{often - 1:.3g} times its bias: {said}",
    )  # fmt: skip


def _by_slice(what: str, whole: TensorRef, held: HeldByRanks, parted: Sequence[int], bias: HeldByRanks) -> Fault | None:
    """Whether some ranks' channels of an output alone are off, by what the bias of another rank's channels makes."""
    count = len(held.ranks)
    rows, width = _rows(whole, held, parted[:1]), whole.shape[-1]
    laid = standing_for(bias) if bias.is_cut else bias.parts[0]
    if held.axis == len(whole.shape) - 1:
        rows = [(0, *_as_rows(whole, held))]
    if not rows or count < 2 or width % count or laid.shape != (width,) or not laid.is_readable:
        return None
    _, there_NH, here_NH = rows[0]
    if there_NH.shape[-1] != width:
        return None
    each = width // count
    off_RC = (here_NH - there_NH).mean(0).reshape(count, each)
    bias_RC = pages.array(laid).astype(np.float64).reshape(count, each)
    size_R = np.linalg.norm(off_RC, axis=1)
    odd = [at for at in range(count) if size_R[at] > _LEFT * size_R.max()]
    if not 0 < len(odd) < count:
        return None
    said = []
    for at in odd:
        left = [float(np.linalg.norm(off_RC[at] + bias_RC[at] - other)) for other in bias_RC]
        nearest = int(np.argmin(left))
        if nearest == at or left[nearest] > _STEPPED * size_R[at]:
            return None
        said.append(f"rank {held.ranks[at]} adds the bias of rank {held.ranks[nearest]}'s channels")
    return Fault(
        CONSTANT, tuple(held.ranks[at] for at in odd),
        f"{what} is off by one vector, the same for every token, in the channels of some ranks alone: "
        f"{'; '.join(said)} (its bias is not cut as its weight is)",
    )  # fmt: skip


def _as_rows(whole: TensorRef, held: HeldByRanks) -> tuple[Array, Array]:
    there, here = (pages.array(ref).astype(np.float64) for ref in (whole, standing_for(held)))
    return there.reshape(-1, whole.shape[-1]), here.reshape(-1, whole.shape[-1])


def by_weight(what: str, whole: TensorRef, held: HeldByRanks, parted: Sequence[int], weight_H: Array) -> Fault | None:
    """What was done with the weight of each channel, of an output that is off by a factor of each."""
    those = []
    for _, there_NH, here_NH in _rows(whole, held, parted):
        made = _channels(there_NH, here_NH)
        if made is None or made.shape != weight_H.shape or not weight_H.all():
            return None
        ways = {
            "applied twice": weight_H, "left out": 1 / weight_H, "taken for one that is added to 1": 1 + 1 / weight_H,
            "taken as it is, and not added to 1": weight_H / (1 + weight_H),
        }  # fmt: skip
        near = [said for said, by in ways.items() if np.abs(made - by).max() <= _STEPPED * np.abs(made - 1).max()]
        those += near[:1] or [""]
    if not those or len(set(those)) != 1 or not those[0]:
        return None
    return Fault(
        CHANNELS, tuple(parted),
        f"{what} on {whose(parted)} is the other run's channel by channel times a factor of its own, the same for "
        f"every token, which its weight makes: the weight is {those[0]}",
    )  # fmt: skip


def _often(often: float, count: int) -> str | None:
    """How often a bias is in an output, in words; None where no rule makes it so."""
    if abs(often) <= _TIMES:
        return "the bias is not added"
    if abs(often - count) <= _TIMES and count > 1:
        return f"the bias is added once for each of the {count} ranks (before their sum), where it is due once"
    if often > 1 and abs(often - round(often)) <= _TIMES:
        return f"the bias is added {round(often)} times, where it is due once"
    if 0 < often < 1 and abs(1 / often - round(1 / often)) <= _TIMES:
        return f"only 1/{round(1 / often)} of the bias is added (divided by ranks over which it is not summed)"
    return None


def _is_constant(off_NH: Array) -> bool:
    size = float(np.linalg.norm(off_NH))
    return bool(size > 0 and np.linalg.norm(off_NH - off_NH.mean(0)) <= _LEFT * size)


def _channels(there_NH: Array, here_NH: Array) -> Array | None:
    """The factor of every channel, where such factors and a number of each channel make all that is off."""
    if len(there_NH) < 2 * _FEWEST:
        return None
    y_NH, h_NH = there_NH - there_NH.mean(0), here_NH - here_NH.mean(0)
    size_H = np.square(y_NH).sum(0)
    if (size_H <= 1e-12 * size_H.max()).any():
        return None
    factor_H = np.asarray((y_NH * h_NH).sum(0) / size_H)
    off = float(np.linalg.norm(h_NH - y_NH))
    is_so = off > 0 and np.linalg.norm(h_NH - factor_H * y_NH) <= _LEFT * off
    return factor_H if is_so and np.ptp(factor_H) > _LEFT * np.abs(factor_H - 1).max() else None


def _are_of_slices(whole: TensorRef, held: HeldByRanks, parted: Sequence[int]) -> bool:
    """Whether the factors are one number in all channels that one of the ranks' slices makes: of a slice of a matrix
    that is zeros, or scaled. A weight of each channel is another in each.
    """
    count = len(held.ranks)
    for _, there_NH, here_NH in _rows(whole, held, parted):
        factor_H = _channels(there_NH, here_NH)
        if factor_H is None or count < 2 or len(factor_H) % count or len(factor_H) < 2 * count:
            return False
        if np.ptp(factor_H.reshape(count, -1), axis=1).max() > _LEFT * np.abs(factor_H - 1).max():
            return False
    return True


def _range(whole: TensorRef, held: HeldByRanks, parted: Sequence[int]) -> tuple[float, float]:
    every = [made for _, there, here in _rows(whole, held, parted) if (made := _channels(there, here)) is not None]
    return min(float(one.min()) for one in every), max(float(one.max()) for one in every)


def _rows(whole: TensorRef, held: HeldByRanks, parted: Sequence[int]) -> list[tuple[int, Array, Array]]:
    """What the ranks that part have, and the other run's of the same place, as rows; none where it cannot be asked."""
    if len(whole.shape) < 2 or naming.is_of_experts(held.parts[0].name) or not are_asked(whole, held, parted):
        return []
    found = []
    for own in each_of(whole, held, parted):
        width = own.here.shape[-1]
        if own.here.shape != own.there.shape or width < _NARROWEST or own.here.size < _FEWEST * width:
            return []
        if not (np.isfinite(own.here).all() and np.isfinite(own.there).all()):
            return []
        here, there = (one.reshape(-1, width) for one in (own.here, own.there))
        has = there.any(1)  # of padding a rank may have anything
        if has.sum() < _FEWEST:
            return []
        found.append((own.rank, there[has], here[has]))
    return found


def _own(bias: HeldByRanks, rank: int) -> Array | None:
    if rank not in bias.ranks:
        return None
    ref = bias.parts[bias.ranks.index(rank)]
    return pages.array(ref).astype(np.float64).reshape(-1) if ref.is_readable and ref.numel <= 1 << 20 else None
