"""Keys that ranks of context parallelism gathered in another order than the positions they are masked by.

Attention is a sum over the keys that a token sees, in whatever order. So a token is right where the keys that it is
shown are those it should see: which tokens these are tells what order the keys stand in, without keys or weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from replay_core import pages
from replay_core.compare.judging.faults import Fault, whose
from replay_core.compare.pairing.ranks import HeldByRanks, turns
from replay_core.records import TensorRef
from replay_core.samples.layout import Bools, Ints

Floats = NDArray[np.float64]

#: A token is right where it is off by no more than this part of what the worst is off by: of half precision, else.
_RIGHT_HALF, _RIGHT = 0.03, 3e-4
_MOST = 1 << 24
_FEWEST = 8


def of_keys(what: str, whole: TensorRef, laid: TensorRef, held: HeldByRanks) -> Fault | None:
    """Which order the keys stand in, by which tokens of the first tensor that is off are right; None where none says.

    whole, laid: [sample, position, ...] of one process, and of the ranks put together.
    """
    if held.axis != 1 or whole.shape != laid.shape or not whole.shape[1] >= _FEWEST or whole.numel > _MOST:
        return None
    own = [(rank, stretches) for rank, stretches in zip(held.ranks, held.stretches, strict=True)]
    if len({stretches for _, stretches in own}) != len(own):
        return None
    off_BS = np.abs(pages.array(whole).astype(np.float64) - pages.array(laid).astype(np.float64))
    off_S = off_BS.reshape(*whole.shape[:2], -1).max((0, 2))
    most = float(off_S.max())
    if not np.isfinite(most) or not most:
        return None
    line = most * (_RIGHT_HALF if whole.dtype in ("bfloat16", "float16") else _RIGHT)
    is_right_S = off_S <= line
    wrong = off_S[~is_right_S]
    if not is_right_S.any() or wrong.min() < 3 * line:
        return None  # no clear line between right and wrong
    real = _places([stretches for _, stretches in own])
    for words, assumed in _orders(held, real):
        if np.array_equal(_right(real, assumed), is_right_S):
            last = " or nothing hides later keys:" if is_right_S.sum() == 1 and is_right_S[-1] else ""
            right = np.flatnonzero(is_right_S)
            said = (
                "the last token alone is right, as it"
                if last
                else f"{right.size} of {real.size} tokens are right, as they"
            )
            return Fault(
                "keys order", held.ranks,
                f"the keys that {whose(held.ranks)} gathered for {what} stand in another order than the positions they "
                f"are masked by,{last} {words} ({said} would be then)",
            )  # fmt: skip
    return None


def of_one_key(
    what: str, held: HeldByRanks, values: HeldByRanks, parted: Sequence[int],
    through: tuple[Floats, Floats] | None = None,
) -> Fault | None:  # fmt: skip
    """Whether the first token of the stretches that are off sees one key alone: what attention makes of it is then that
    token's value. Its own, where ranks attend to keys of their own stretch alone; the first of the sequence, where they
    hide keys as if their own tokens stood at its beginning.

    held: attention's output [sample, head, position, width] or [sample, position, hidden], or what its projection makes
    of it, `through` a weight [out, hidden] and a bias [out]; values: what its values were [sample, position, hidden],
    maybe as the last part of what was put out with them. parted: the ranks whose stretch is off.
    """
    axis = {4: 2, 3: 1}.get(len(held.parts[0].shape))
    if held.axis != axis or values.axis != 1 or values.ranks != held.ranks or values.stretches != held.stretches:
        return None
    if held.parts[0].numel > _MOST or values.parts[0].numel > _MOST or len(values.parts[0].shape) != 3:
        return None
    own_at = [stretches[0][0] for stretches in held.stretches]
    first = next((number for number, at in enumerate(own_at) if at == 0), None)
    seen = set()
    for number, rank in enumerate(held.ranks):
        if rank not in parted or own_at[number] == 0:
            continue  # the first token of all sees itself alone
        made = pages.array(held.parts[number]).astype(np.float64)
        made_BH = (made[:, :, 0] if axis == 2 else made[:, 0]).reshape(made.shape[0], -1)
        told = [
            kind for kind, source in (("own", number), ("first", first))
            if source is not None and _is_of(made_BH, values.parts[source], through)
        ]  # fmt: skip
        seen.add(told[0] if told else None)
    if len(seen) != 1 or None in seen:
        return None
    those, verb = tuple(parted), "attends" if len(parted) == 1 else "attend"
    if "own" in seen:
        return Fault(
            "own keys", those,
            f"{what}: {whose(those)} {verb} to keys of the rank's own stretch alone: the first token of it has its own "
            "value, as if no token stood before it",
        )  # fmt: skip
    return Fault(
        "own mask", those,
        f"{what}: on {whose(those)} the first token of the rank's stretch has the value of the first token of the "
        "sequence, as if it stood there: keys are hidden by the rank's own numbers of tokens, not their positions",
    )  # fmt: skip


def _is_of(made_BH: Floats, value: TensorRef, through: tuple[Floats, Floats] | None) -> bool:
    """Whether what attention made of a token is the value of the first token of a stretch."""
    value_BH = pages.array(value).astype(np.float64)[:, 0]
    width = through[0].shape[1] if through is not None else made_BH.shape[1]
    if width > value_BH.shape[1] or len(value_BH) != len(made_BH):
        return False
    value_BH = value_BH[:, value_BH.shape[1] - width :]  # of queries, keys and values in one the last are these
    if through is not None:
        value_BH = value_BH @ through[0].T + through[1]
    return value_BH.shape == made_BH.shape and bool(np.abs(made_BH - value_BH).max() <= 1e-3 * np.abs(value_BH).max())


def _places(every: Sequence[Sequence[tuple[int, int]]]) -> Ints:
    """The positions of tokens in the order in which the ranks' are gathered."""
    return np.concatenate([np.arange(at, at + long) for stretches in every for at, long in stretches])


def _orders(held: HeldByRanks, real: Ints) -> Iterator[tuple[str, Ints]]:
    """Positions that may have been taken for those of the gathered keys, other than they are."""
    each = [_places([stretches]) for stretches in held.stretches]
    ranks = len(each)
    yield "as if they were in order", np.arange(real.size)
    if len({one.size for one in each}) == 1:
        for turn in turns(ranks, each[0].size):
            yield (
                ("as if ranks held them in order" if len(turn[0]) == 1 else "as if ranks held them in zigzag"),
                _places(turn),
            )
    yield "the ranks' in reverse", np.concatenate(each[::-1])
    for by in range(1, ranks):
        yield f"the ranks' turned by {by}", np.concatenate([*each[by:], *each[:by]])


def _right(real: Ints, assumed: Ints) -> Bools:
    """Of each position, whether a token there sees the keys it should."""
    if real.size != assumed.size:
        return np.zeros(real.size, bool)
    # Keys in the order of the positions they are taken for: the first t + 1 of them are to be those of 0 to t.
    shown = real[np.argsort(assumed, kind="stable")]
    return np.asarray(np.maximum.accumulate(shown) == np.arange(real.size))
