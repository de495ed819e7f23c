"""A norm over channels that are cut among ranks, of which each takes the statistic of its own share alone.

Of what went in, x [N, H], and what the other run makes of it, y = w x / sqrt(mean of x^2) (RMSNorm) or
y = w (x - m) / s + b (LayerNorm), w and b are found by least squares. The same with the mean, or the sum, over each
rank's own channels must then leave nothing of what the ranks have, which chance does not do: every token's factor is
told by its input.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from replay_core import naming, pages
from replay_core.compare.judging.attention_made import Ints
from replay_core.compare.judging.faults import Fault, whose
from replay_core.compare.judging.products import NEAR, Array
from replay_core.compare.pairing.ranks import HeldByRanks, standing_for
from replay_core.records import TensorRef
from replay_core.regexes import regex

_NORM = regex(r"norm|(?:^|_)ln(?:_|\d|$)")
#: What part of a difference may be left, and how near the other run's norm is made again, where values are halves.
_LEFT, _NEAR_HALF = 0.02, 1e-2
#: Elements that are read; fewer tokens than these are made so by chance.
_MOST, _FEWEST = 1 << 22, 8
#: Ranks that channels may be cut among where the ranks that hold them stand for these.
_RANKS = (2, 4, 8, 16)
#: What a rank may take of its own channels' squares, and the power of the number of shares that values are larger by.
_STATISTICS = (("mean", 0.0), ("sum over the rank's channels by the number of all", 0.5))


def of_own_shares(
    what: str, whole: TensorRef, held: HeldByRanks, inputs: Sequence[HeldByRanks], every: Sequence[int]
) -> Fault | None:
    """Whether a norm's output [..., H] is made of each rank's own channels alone. inputs: what ranks held alike with
    the other run before; every: all ranks, those too that others stand for.

    Raises:
        DumpError: the bytes of one cannot be read.
    """
    laid = standing_for(held)
    is_asked = _NORM.search(naming.module_of(what).rpartition(".")[2]) and len(whole.shape) >= 2
    if not is_asked or laid.shape != whole.shape or whole.numel > _MOST:
        return None
    if not laid.is_readable or not whole.is_readable:
        return None
    width = whole.shape[-1]
    y_NH, h_NH = (pages.array(ref).astype(np.float64).reshape(-1, width) for ref in (whole, laid))
    if len(y_NH) < _FEWEST or not np.isfinite(h_NH).all() or not np.isfinite(y_NH).all():
        return None
    off = float(np.linalg.norm(h_NH - y_NH))
    is_half = bool({"bfloat16", "float16"} & {whole.dtype, laid.dtype})
    for one in reversed(inputs):
        given = standing_for(one)
        if given.shape != whole.shape or not given.is_readable:
            continue
        x_NH = pages.array(given).astype(np.float64).reshape(-1, width)
        for is_centred in (False, True):
            n_NH = _normed(x_NH, [np.arange(width)], is_centred=is_centred)
            w_H, b_H = _fitted(n_NH, y_NH, has_bias=is_centred)
            if np.linalg.norm(n_NH * w_H + b_H - y_NH) > (_NEAR_HALF if is_half else NEAR) * np.linalg.norm(y_NH):
                continue
            for shares in _shares(held, width):
                for words, times in _STATISTICS[: 1 if is_centred else 2]:
                    own_NH = _normed(x_NH, shares, is_centred=is_centred) * len(shares) ** times
                    if np.linalg.norm(own_NH * w_H + b_H - h_NH) <= _LEFT * off:
                        return _told(what, held, given.name, len(shares), words, every, is_centred=is_centred)
    return None


def _normed(x_NH: Array, shares: Sequence[Ints], *, is_centred: bool) -> Array:
    """Every share of the channels less its mean, if that is taken off, by its root mean square."""
    made_NH = np.empty_like(x_NH)
    for own in shares:
        rows = x_NH[:, own]
        rows = rows - rows.mean(1, keepdims=True) if is_centred else rows
        size = np.sqrt(np.square(rows).mean(1, keepdims=True))
        made_NH[:, own] = rows / np.maximum(size, np.finfo(np.float64).tiny)
    return made_NH


def _fitted(n_NH: Array, y_NH: Array, *, has_bias: bool) -> tuple[Array, Array]:
    """The weight and the bias of each channel."""
    n_H, y_H = n_NH.mean(0) * has_bias, y_NH.mean(0) * has_bias
    w_H = ((n_NH - n_H) * (y_NH - y_H)).sum(0) / np.maximum(np.square(n_NH - n_H).sum(0), 1e-30)
    return w_H, y_H - w_H * n_H


def _shares(held: HeldByRanks, width: int) -> Iterator[list[Ints]]:
    """The channels of each rank: as they are cut, or of so many ranks as may stand behind one."""
    if held.axis == len(held.parts[0].shape) - 1:
        yield [np.concatenate([np.arange(at, at + long) for at, long in one]) for one in dict.fromkeys(held.stretches)]
        return
    for ranks in _RANKS:
        if width % ranks == 0 and width > ranks:
            yield np.split(np.arange(width), ranks)


def _told(
    what: str, held: HeldByRanks, given: str, shares: int, words: str, every: Sequence[int], *, is_centred: bool
) -> Fault:
    is_of_all = held.axis == len(held.parts[0].shape) - 1 or shares * len(held.ranks) != len(every)
    ranks = held.ranks if is_of_all else tuple(every)
    taken = "mean and variance" if is_centred else "mean square" if words == "mean" else f"mean square (the {words})"
    return Fault(
        "own statistic", ranks,
        f"{what} on {whose(ranks)} is made of each rank's own share of the channels: its {taken} is over one of "
        f"{shares} shares of {given}, where the other run's is over all channels, so that it is not reduced over the "
        "ranks that hold them (made again from what went in: every token is off by a factor of its own)",
    )  # fmt: skip
