"""With what weight each token stands in the gradient of a head, told by the gradient itself.

The gradient of the head's weight [V, H] is a sum over tokens of what the loss leaves at the token's logits times what
went into the head, g = sum_t c_t (softmax(z_t) - onehot(y_t)) h_t. Logits z, targets y and inputs h are recorded, so
that the weights c are found by least squares, whatever the loss is made of (advantages, ratios, means), as long as it
depends on the target's log-probability alone; where it does not (an entropy bonus), what is left over says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from replay_core import pages
from replay_core.compare.judging import token_rows
from replay_core.compare.judging.faults import Fault, whose
from replay_core.compare.judging.products import Array
from replay_core.compare.pairing.dims import Stretch
from replay_core.compare.pairing.micro_batch_pair import Side
from replay_core.records import TensorRef

#: Tokens that are solved for, elements of logits that are read, rows and columns of the gradient that are asked.
_MOST_TOKENS, _MOST_LOGITS, _ROWS, _COLUMNS = 2048, 1 << 27, 2048, 48
#: What may be left over of a gradient that its tokens explain, and how near factors are to what a rule makes; where the
#: activations are float32, and where they are of half precision.
_LEFT, _LEFT_HALF, _NEAR, _NEAR_HALF = 2e-3, 2e-2, 1e-2, 5e-2
#: What part of a gradient is made of no token, at least, where that is said of it.
_FOREIGN = 0.1


class GivenToHead(Struct):
    """What a micro-batch gave a head, as the other run has it: logits [..., V] and inputs [..., H].

    targets: what the targets of its tokens may be, in several ways; below 0 where a token has none. cuts: of the
    axes of samples and tokens that are cut, what each rank has. micros: by rank, those laid together.
    """

    micro: int
    logits: TensorRef
    inputs: TensorRef
    targets: tuple[NDArray[np.int64], ...]
    ranks: tuple[int, ...]
    cuts: tuple[tuple[int, tuple[tuple[Stretch, ...], ...]], ...]
    micros: dict[int, tuple[int, ...]]
    #: Which tokens count as both runs' masks say alike, in several ways; nothing where these differ or are not known.
    counted: tuple[NDArray[np.bool_], ...] = ()


class _Tokens(Struct):
    """The tokens of some ranks in one micro-batch: their numbers, and by what factor they count."""

    ranks: tuple[int, ...]
    micro: int
    tokens: list[int]
    factor: float = 1.0
    #: How many of them count by the masks; None where these are not known.
    counted: int | None = None


def targets(side: Side, lead: tuple[int, ...]) -> Iterator[NDArray[np.int64]]:
    """The targets of a micro-batch's tokens as they may be: as recorded, shifted by one, or the next tokens."""
    for name, shifts in (("target_ids", (0,)), ("labels", (0, 1)), ("input_ids", (1,))):
        ref = side.find(name)
        if ref is None or ref.shape != lead or not ref.is_readable or not ref.dtype.startswith("int"):
            continue
        for shift in shifts:
            ids = pages.array(ref).astype(np.int64)
            if shift:
                ids = np.concatenate([ids[..., 1:], np.full((*ids.shape[:-1], 1), -1)], -1)
            yield ids.reshape(-1)


def masks(side: Side, other: Side, lead: tuple[int, ...]) -> Iterator[NDArray[np.bool_]]:
    """Which tokens count, where both runs' masks are the same: as recorded, or each the one of the token before."""
    mine, theirs = side.find("response_mask"), other.find("response_mask")
    if mine is None or theirs is None or not mine.is_readable or not theirs.is_readable:
        return
    if mine.shape != lead or theirs.shape != lead or len(lead) != 2:
        return
    counts, others = (pages.array(ref) != 0 for ref in (mine, theirs))
    if np.array_equal(counts, others) and counts.any():
        yield counts.reshape(-1)
        yield np.roll(counts, -1, 1).reshape(-1)


def explain(
    what: str, whole: TensorRef, laid: TensorRef, heads: Sequence[GivenToHead], *, is_first: bool
) -> Fault | None:
    """Whose tokens are missing from a head's gradient, are in it twice, or weigh otherwise than in the other run's.

    whole, laid: the gradient [V, H] of the other run, and of the ranks together. heads: of the micro-batches of the
    step, whose logits agree. is_first: whether all that was computed before it agrees.
    """
    if not heads or whole.shape != laid.shape or len(whole.shape) != 2 or not (whole.is_readable and laid.is_readable):
        return None
    if any(one.logits.shape[-1] != whole.shape[0] or one.inputs.shape[-1] != whole.shape[1] for one in heads):
        return None
    count = sum(one.logits.numel // one.logits.shape[-1] for one in heads)
    if count > _MOST_TOKENS or sum(one.logits.numel for one in heads) > _MOST_LOGITS:
        return None
    is_half = any(ref.dtype in ("bfloat16", "float16") for one in heads for ref in (one.logits, one.inputs))
    most, near = (_LEFT_HALF, _NEAR_HALF) if is_half else (_LEFT, _NEAR)
    for targets in zip(*(one.targets for one in heads), strict=False):
        rows, columns = _asked(whole.shape, np.concatenate(targets))
        left_NR = np.concatenate(
            [_left_at_logits(one.logits, of, rows) for one, of in zip(heads, targets, strict=True)]
        )
        inputs_NC = np.concatenate([_matrix(one.inputs)[:, columns] for one in heads])
        there_RC, here_RC = (pages.array(ref)[np.ix_(rows, columns)].astype(np.float64) for ref in (whole, laid))
        if not (np.isfinite(here_RC).all() and np.isfinite(there_RC).all()):
            return None
        weights_N, left = _weights(left_NR, inputs_NC, there_RC)
        if left <= most:
            break
    else:
        return None
    weights_N, counted_N = _of_counted(heads, left_NR, inputs_NC, there_RC, weights_N, most)
    parts = _parts(heads)
    if counted_N is not None:  # the weights of all others are 0, on both sides
        left_NR = left_NR * counted_N[:, None]
        for part in parts:
            part.counted = int(counted_N[part.tokens].sum())
    made = np.stack([
        ((left_NR[part.tokens] * weights_N[part.tokens, None]).T @ inputs_NC[part.tokens]).reshape(-1) for part in parts
    ], 1)  # fmt: skip
    sizes = np.linalg.norm(made, axis=0)
    parts = [part for part, size in zip(parts, sizes, strict=True) if size > 1e-3 * sizes.max(initial=0.0)]
    made = made[:, sizes > 1e-3 * sizes.max(initial=0.0)]
    if len(parts) < 2 or np.linalg.matrix_rank(made, 1e-3 * sizes.max()) < len(parts):
        return None
    factors = np.linalg.lstsq(made, here_RC.reshape(-1), rcond=None)[0]
    size = max(np.linalg.norm(there_RC), np.linalg.norm(here_RC))
    if np.linalg.norm(made @ factors - here_RC.reshape(-1)) > most * size:
        own_N, left = _weights(left_NR, inputs_NC, here_RC)
        if left <= most:
            if counted_N is None:
                return _of_tokens(what, parts, weights_N, own_N, near)
            # What is off before the loss (advantages) weighs tokens otherwise, and says why itself.
            by_rows = _by_rows(what, heads, parts, weights_N, own_N, counted_N, near)
            if by_rows is not None or not is_first:
                return by_rows
            return _of_counted_tokens(what, parts, weights_N, own_N, counted_N, near)
        is_told = is_first and 4 * len(left_NR) <= here_RC.size and left >= _FOREIGN
        return _foreign(what, parts, left) if is_told else None
    for part, factor in zip(parts, factors, strict=True):
        part.factor = float(factor)
    return _by_own_counts(what, parts, near) or _told(what, parts, near)


def _of_counted(
    heads: Sequence[GivenToHead], left_NR: Array, inputs_NC: Array, there_RC: Array, weights_N: Array, most: float
) -> tuple[Array, NDArray[np.bool_] | None]:
    """The weights of the tokens that count by both runs' masks, and which these are; as they were, and None, where the
    masks are not known to be the same, or do not say it.
    """
    for counted in zip(*(one.counted for one in heads), strict=False) if all(one.counted for one in heads) else ():
        counted_N = np.concatenate(counted)
        if len(counted_N) != len(left_NR) or counted_N.all():
            continue
        found_N, left = _weights(left_NR * counted_N[:, None], inputs_NC, there_RC)
        if left <= most:
            return found_N, counted_N
    return weights_N, None


def of_parts(what: str, heads: Sequence[GivenToHead], made_NH: Array, here_H: Array, by: str) -> Fault | None:
    """What weights of the tokens that ranks have, or of micro-batches, make a gradient of these ranks, as whole parts.

    made_NH: of each token of all micro-batches, what it adds to the other run's.
    """
    parts = _parts(heads)
    made = np.stack([made_NH[part.tokens].sum(0) for part in parts], 1)
    sizes = np.linalg.norm(made, axis=0)
    if len(parts) < 2 or 2 * len(parts) > len(here_H) or np.linalg.matrix_rank(made, 1e-3 * sizes.max()) < len(parts):
        return None
    factors = np.linalg.lstsq(made, here_H, rcond=None)[0]
    if np.linalg.norm(made @ factors - here_H) > _LEFT * np.linalg.norm(here_H):
        return None
    for part, factor in zip(parts, factors, strict=True):
        part.factor = float(factor)
    return _told(what, parts, _NEAR, by)


def _told(what: str, parts: list[_Tokens], near: float, by: str = "the logits and inputs of the head") -> Fault | None:
    every = tuple(sorted({rank for part in parts for rank in part.ranks}))
    keys: tuple[Callable[[_Tokens], Any], ...] = (
        lambda one: one.ranks, lambda one: one.micro, lambda one: (one.ranks, one.micro)
    )  # fmt: skip
    for key in keys:
        groups: dict[Any, list[_Tokens]] = {}
        for part in parts:
            groups.setdefault(key(part), []).append(part)
        # Those that are asked for together count alike.
        if any(max(one.factor for one in of) - min(one.factor for one in of) > near for of in groups.values()):
            continue
        made = [
            token_rows.Group(
                sorted({rank for one in of for rank in one.ranks}), sorted({one.micro for one in of}),
                np.empty(0, np.int64), _whole_number(float(np.mean([one.factor for one in of])), near),
            ) for of in groups.values()
        ]  # fmt: skip
        if len(made) > 1 and (fault := token_rows.told(what, every, every, made, by=by)):
            return fault
    usual = float(np.median([part.factor for part in parts]))
    often = [part for part in parts if abs(part.factor - usual) > near * abs(usual)]
    if not often:
        return None  # one factor for all: told without tokens
    said = ", ".join(f"{part.factor:.4g} on {_called(part, parts)}" for part in parts[:8])
    return Fault(
        "weighed", tuple(sorted({rank for part in often for rank in part.ranks})),
        f"{what} weighs the tokens of each {'micro-batch' if len({one.micro for one in parts}) > 1 else 'rank'} by a "
        f"factor of its own ({said}): its loss is scaled, or its share of the sum over ranks",
    )  # fmt: skip


def _by_own_counts(what: str, parts: list[_Tokens], near: float) -> Fault | None:
    """Whether each part's tokens weigh as many times too much as it has fewer of them than all: each is divided by its
    own number of tokens that count.
    """
    total = sum(one.counted or 0 for one in parts)
    if any(not one.counted for one in parts) or len({one.counted for one in parts}) < 2:
        return None
    micros = len({one.micro for one in parts})
    for shares, divided in {1: "", len(parts) // micros: ", and by the ranks"}.items():
        own = [total / (one.counted or 1) / shares for one in parts]
        if micros > 1 or any(abs(one.factor - by) > near * by for one, by in zip(parts, own, strict=True)):
            continue
        said = ", ".join(f"{one.factor:.4g} on {_called(one, parts)}, of {one.counted} tokens" for one in parts[:8])
        return Fault(
            "own token count", tuple(sorted({rank for one in parts for rank in one.ranks})),
            f"{what} weighs the tokens of each rank by a factor of its own ({said}), which is {total}, the number of "
            f"all tokens that count, by the rank's own{divided}: each divides by the number of its own tokens, which "
            "is not summed over the ranks that have the others",
        )  # fmt: skip
    return None


def _by_rows(
    what: str, heads: Sequence[GivenToHead], parts: list[_Tokens], there_N: Array, here_N: Array,
    counted_N: NDArray[np.bool_], near: float,
) -> Fault | None:  # fmt: skip
    """Whether what each rank has of a row weighs as many times too much as it has fewer of its tokens than all: each
    row is divided by the rank's own number of its tokens.
    """
    row_N = np.concatenate([
        number * (1 << 20) + np.repeat(np.arange(one.inputs.shape[0]), one.inputs.shape[1])
        for number, one in enumerate(heads) if len(one.inputs.shape) == 3
    ] or [np.zeros(0, np.int64)])  # fmt: skip
    if len(row_N) != len(there_N):
        return None
    size, shared, every = float(np.abs(there_N).max(initial=0.0)), 0, []
    for part in parts:
        mine_N = np.zeros(len(there_N), np.bool_)
        mine_N[part.tokens] = True
        for row in np.unique(row_N[mine_N & counted_N]):
            of_row = (row_N == row) & counted_N
            own = of_row & mine_N
            asked = own & (np.abs(there_N) > near * size)
            if not asked.any():
                continue
            factors = here_N[asked] / there_N[asked]
            expected = of_row.sum() / own.sum()
            # Of few tokens the weights are solved for less well than those of all.
            if abs(float(np.median(factors)) - expected) > 3 * near * expected:
                return None
            shared += expected > 1
            every.append(float(expected))
    if shared < 2 or max(every) - min(every) < 0.01:
        return None
    return Fault(
        "own token count", tuple(sorted({rank for part in parts for rank in part.ranks})),
        f"{what} weighs what each rank has of a row by a factor of its own ({min(every):.3g} to {max(every):.3g}), "
        "which is the number of the row's tokens that count by the rank's own of them: each row's mean is over the "
        "rank's own tokens of it, and is not reduced over the ranks that have the others",
    )  # fmt: skip


def _of_counted_tokens(
    what: str, parts: list[_Tokens], there_N: Array, here_N: Array, counted_N: NDArray[np.bool_], near: float
) -> Fault | None:
    """Tokens that count by both runs' masks, and weigh otherwise than the rest of their rank's do."""
    size = float(np.abs(there_N).max(initial=0.0))
    has_N = counted_N & (np.abs(there_N) > near * size)
    usual = float(np.median(here_N[has_N] / there_N[has_N])) if has_N.any() else 1.0
    is_off_N = counted_N & (np.abs(here_N - usual * there_N) > near * size)
    those = [part for part in parts if is_off_N[part.tokens].any()]
    if not those:
        return None
    said = "; ".join(
        f"of {_called(part, parts)}'s {part.counted} that count {int(is_off_N[part.tokens].sum())}"
        for part in those[:4]
    )
    return Fault(
        "tokens", tuple(sorted({rank for part in those for rank in part.ranks})),
        f"{what} weighs tokens otherwise than the other run's, by the logits and inputs of the head, while the masks "
        f"count the same ones ({said}): what the loss makes of each is another (its advantage, ratio, clipping, or the "
        "number it is divided by)",
    )  # fmt: skip


def _whole_number(factor: float, near: float) -> float:
    """The whole number that a factor is near, which noise left of it; else the factor."""
    return float(round(factor)) if abs(factor - round(factor)) <= near else factor


def _of_tokens(what: str, parts: list[_Tokens], there_N: Array, here_N: Array, near: float) -> Fault | None:
    """Tokens that count otherwise than the rest of their rank's do."""
    counted = np.abs(there_N) > near * np.abs(there_N).max(initial=0.0)
    usual = float(np.median(here_N[counted] / there_N[counted])) if counted.any() else 1.0
    is_off_N = np.abs(here_N - usual * there_N) > near * np.abs(there_N).max(initial=0.0)
    is_lost_N = is_off_N & counted & (np.abs(here_N) <= near * np.abs(there_N).max(initial=0.0))
    is_new_N = is_off_N & ~counted
    said, those = [], set()
    for part in parts:
        off, lost, new = (int(one[part.tokens].sum()) for one in (is_off_N, is_lost_N, is_new_N))
        if not off:
            continue
        those |= set(part.ranks)
        words = [f"{lost} do not count" if lost else "", f"{new} count that do not there" if new else "",
                 f"{off - lost - new} weigh otherwise" if off > lost + new else ""]  # fmt: skip
        said.append(f"of {_called(part, parts)}'s {len(part.tokens)} tokens {', '.join(filter(None, words))}")
    if not said or int(is_off_N.sum()) > 0.9 * len(is_off_N):
        return None
    return Fault(
        "tokens", tuple(sorted(those)),
        f"{what} is made of other tokens than the other run's: {'; '.join(said[:4])}: their mask, or what the loss "
        "weighs them by",
    )  # fmt: skip


def _foreign(what: str, parts: list[_Tokens], left: float) -> Fault:
    every = tuple(sorted({rank for part in parts for rank in part.ranks}))
    return Fault(
        "of no token", every,
        f"{left:.0%} of {what} is made of none of the step's tokens, of which the other run's is: it was left by an "
        "earlier step or micro-batch (gradients not set to zero), or added by what the dump does not hold",
    )  # fmt: skip


def _called(part: _Tokens, parts: Sequence[_Tokens]) -> str:
    """`rank 1`, `micro-batch 0`, `micro-batch 0 of rank 1`."""
    if len({one.micro for one in parts}) == 1:
        return whose(part.ranks)
    called = f"micro-batch {part.micro}"
    return called if len({one.ranks for one in parts}) == 1 else f"{called} of {whose(part.ranks)}"


def _asked(shape: tuple[int, ...], targets_N: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows and columns of a gradient by which it is asked: all where they are few."""
    rows = np.arange(shape[0])
    if shape[0] > _ROWS:
        words = np.unique(targets_N[targets_N >= 0])[: _ROWS // 2]
        rows = np.unique(np.concatenate([words, np.linspace(0, shape[0] - 1, _ROWS // 2).astype(np.int64)]))
    columns = np.arange(shape[1])
    if shape[1] > _COLUMNS:
        columns = np.unique(np.linspace(0, shape[1] - 1, _COLUMNS).astype(np.int64))
    return rows, columns


def _matrix(ref: TensorRef) -> Array:
    return np.asarray(pages.array(ref).astype(np.float64).reshape(-1, ref.shape[-1]))


def _left_at_logits(logits: TensorRef, targets_N: NDArray[np.int64], rows: NDArray[np.int64]) -> Array:
    """softmax(z) - onehot(y) of every token, in some of its rows; 0 where a token has no target."""
    logits_NV = pages.array(logits).reshape(-1, logits.shape[-1])
    made = []
    for start in range(0, len(logits_NV), 64):
        z_NV = logits_NV[start : start + 64].astype(np.float64)
        z_NV -= z_NV.max(1, keepdims=True)
        p_NV = np.exp(z_NV)
        made.append((p_NV / p_NV.sum(1, keepdims=True))[:, rows])
    left_NR = np.concatenate(made)
    left_NR -= targets_N[:, None] == rows[None]
    left_NR[targets_N < 0] = 0.0
    return np.asarray(left_NR)


def _weights(left_NR: Array, inputs_NC: Array, there_RC: Array) -> tuple[Array, float]:
    """The weight of every token in a gradient by least squares, and what part of the gradient's norm is left over."""
    gram_NN = (left_NR @ left_NR.T) * (inputs_NC @ inputs_NC.T)
    onto_N = ((left_NR @ there_RC) * inputs_NC).sum(1)
    if not (np.isfinite(gram_NN).all() and np.isfinite(onto_N).all()):
        return np.zeros(len(left_NR)), 1.0
    weights_N = np.linalg.lstsq(gram_NN, onto_N, rcond=1e-12)[0]
    made_RC = (left_NR * weights_N[:, None]).T @ inputs_NC
    return weights_N, float(np.linalg.norm(made_RC - there_RC) / (np.linalg.norm(there_RC) or 1.0))


def _parts(heads: Iterable[GivenToHead]) -> list[_Tokens]:
    """Of every micro-batch, the tokens of each rank; of ranks that have the same ones, once."""
    found: list[_Tokens] = []
    before = 0
    for head in heads:
        lead = head.inputs.shape[:-1]
        numbers = before + np.arange(int(np.prod(lead))).reshape(lead)
        before += numbers.size
        if len(lead) != 2 or not head.cuts:
            found.append(_Tokens(head.ranks, head.micro, numbers.reshape(-1).tolist()))
            continue
        by_place: dict[object, list[int]] = {}
        for number in range(len(head.ranks)):
            by_place.setdefault(tuple(stretches[number] for _, stretches in head.cuts), []).append(number)
        for members in by_place.values():
            ranks = tuple(head.ranks[number] for number in members)
            mine = numbers
            for axis, stretches in head.cuts:
                mine = np.take(mine, [at for start, n in stretches[members[0]] for at in range(start, start + n)], axis)
            micros = head.micros.get(ranks[0], (head.micro,))
            of_rows = np.split(mine, len(micros)) if len(micros) > 1 and len(mine) % len(micros) == 0 else [mine]
            for micro, part in zip(micros, of_rows, strict=False):
                found.append(_Tokens(ranks, micro, part.reshape(-1).tolist()))
    return found
