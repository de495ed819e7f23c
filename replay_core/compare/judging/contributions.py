"""What each rank adds to a sum: whose part is missing, there twice, or never added; told by tensors beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from replay_core import pages
from replay_core.compare.judging.faults import Fault, whose
from replay_core.compare.judging.products import NEAR, Array, products_of
from replay_core.compare.pairing.ranks import HeldByRanks, named
from replay_core.records import TensorRef

#: A token is off by this part of what the worst is, where others may be by what noise made of the weights.
_APART = 0.03
#: More ranks than this are not held each against each.
_EACH = 16
#: Fewer tokens say too little of which of them count.
_FEWEST_TOKENS = 16
#: Elements of other ranks' rows for which it is asked, of each rank, what they span.
_SPANNED = 1 << 20


def not_summed_into(what: str, whole: TensorRef, held: HeldByRanks, before: TensorRef, called: str) -> Fault | None:
    """Whether each rank added its own part to what all hold alike (a residual stream), where the sum of the "
    "parts was due."""
    count = len(held.parts)
    if count < 2 or {ref.shape for ref in held.parts} != {whole.shape} or before.shape != whole.shape:
        return None
    products = products_of([whole, *held.parts, before])
    left = products.norm({0: -1, **dict.fromkeys(range(1, count + 1), 1.0), count + 1: 1.0 - count})
    if left > NEAR * products.norm({0: 1, count + 1: -1}):
        return None
    return Fault(
        "not summed", held.ranks,
        f"what goes into {what} is not summed over ranks {named(held.ranks)}: each adds a part to {called}, and "
        "the parts add up to what "
        "the other run adds",
    )  # fmt: skip


def parts_and_bias(what: str, whole: TensorRef, held: HeldByRanks) -> Fault | None:
    """Whether ranks hold parts of an output that add up to it but for one vector at every token, the bias that each of
    them added to its own part.
    """
    count = len(held.parts)
    if not 2 <= count <= _EACH or {ref.shape for ref in held.parts} != {whole.shape} or whole.numel > 1 << 22:
        return None
    width = whole.shape[-1] if len(whole.shape) > 1 else 0
    if not width or whole.numel // width < _FEWEST_TOKENS:
        return None
    there_ND, *parts = (pages.array(ref).astype(np.float64).reshape(-1, width) for ref in (whole, *held.parts))
    left_ND = np.sum(parts, axis=0) - there_ND
    bias_D, size = left_ND.mean(0), float(np.linalg.norm(there_ND - there_ND.mean(0)))
    own = [part - bias_D / (count - 1) for part in parts]
    if not np.linalg.norm(left_ND - bias_D) <= NEAR * size or min(map(np.linalg.norm, own)) <= NEAR * size:
        return None
    if any(float(np.linalg.norm(part - there_ND)) <= NEAR * size for part in parts):
        return None
    also = ", but for one vector at every token, which each has added to its own (the bias)" * bool(
        np.linalg.norm(bias_D) * len(there_ND) ** 0.5 > NEAR * size
    )
    return Fault(
        "not summed", held.ranks,
        f"{what} is not summed over ranks {named(held.ranks)}: each holds a part, and the parts add up to the whole"
        f"{also}",
    )  # fmt: skip


def norm_of_parts(
    what: str, whole: TensorRef, held: HeldByRanks, before: TensorRef, parts: HeldByRanks, called: str
) -> Fault | None:
    """Whether each rank normed what all hold alike (a residual stream) plus its own part, where the parts' sum was due.

    A norm is y_d = w_d n_d + b_d at every token, n being x less its mean (LayerNorm) or not (RMSNorm), by its root mean
    square. The other run's norm of the sum tells w and b; each rank's output must be these of its own part.
    """
    if parts.ranks != held.ranks or len(held.ranks) > _EACH or whole.numel > 1 << 22:
        return None
    if {ref.shape for ref in (*held.parts, *parts.parts, before)} != {whole.shape}:
        return None
    width = whole.shape[-1]
    x_ND, y_ND, *values = (
        pages.array(ref).astype(np.float64).reshape(-1, width) for ref in (before, whole, *parts.parts, *held.parts)
    )
    own, outputs = values[: len(parts.parts)], values[len(parts.parts) :]

    def normed(rows_ND: Array, *, is_centred: bool) -> Array:
        rows_ND = rows_ND - rows_ND.mean(1, keepdims=True) if is_centred else rows_ND
        size_N1 = np.sqrt(np.square(rows_ND).mean(1, keepdims=True))
        return np.asarray(rows_ND / np.maximum(size_N1, np.finfo(np.float64).tiny))

    for is_centred in (False, True):
        n_ND = normed(x_ND + sum(own), is_centred=is_centred)
        n_D, y_D = n_ND.mean(0) * is_centred, y_ND.mean(0) * is_centred
        w_D = ((n_ND - n_D) * (y_ND - y_D)).sum(0) / np.maximum(np.square(n_ND - n_D).sum(0), 1e-30)
        b_D = y_D - w_D * n_D

        def is_made(
            rows_ND: Array, output_ND: Array, *, w_D: Array = w_D, b_D: Array = b_D, is_centred: bool = is_centred
        ) -> bool:
            made = normed(rows_ND, is_centred=is_centred) * w_D + b_D
            return float(np.linalg.norm(made - output_ND)) <= NEAR * float(np.linalg.norm(output_ND))

        if not is_made(x_ND + sum(own), y_ND):
            continue
        if all(is_made(x_ND + part, output) for part, output in zip(own, outputs, strict=True)):
            return Fault(
                "not summed", held.ranks,
                f"{called} is not summed over ranks {named(held.ranks)}: {what} of each is the norm of what all hold "
                "plus the rank's own part",
            )  # fmt: skip
    return None


def missing_from(
    what: str, whole: TensorRef, laid: TensorRef, held: HeldByRanks, parts: HeldByRanks, called: str
) -> Fault | None:
    """Whose part of a sum, recorded as parts, is missing from what was computed with the sum, or is in it twice.

    laid: what the ranks hold, their slices put together.
    """
    ranks = parts.ranks
    if {ref.shape for ref in parts.parts} != {whole.shape} or laid.shape != whole.shape or len(ranks) > _EACH:
        return None
    has = (laid,) if held.is_cut else held.parts
    products = products_of([whole, *has, *parts.parts])
    first = 1 + len(has)
    each = dict.fromkeys(range(first, first + len(ranks)), 1.0)

    def is_off_by(number: int, sign: float, which: dict[int, float]) -> bool:
        off = {0: 1.0, number: -1.0}
        return products.norm({**off, **dict.fromkeys(which, -sign)}) <= NEAR * products.norm({0: 1, number: -1})

    if len(has) == len(ranks):
        alone = [{place: 1.0 for place in each if place != first + number} for number in range(len(ranks))]
        if all(is_off_by(1 + number, 1, alone[number]) for number in range(len(ranks))):
            return Fault(
                "not summed", ranks,
                f"what goes into {what} is not summed over {whose(ranks)}: each has only its own part of {called}",
            )  # fmt: skip
    for sign, kind, words in ((1.0, "missing", "is missing from"), (-1.0, "twice", "is twice in")):
        for place, rank in zip(each, ranks, strict=True):
            if is_off_by(1, sign, {place: 1.0}):
                return Fault(
                    kind, (rank,), f"rank {rank}'s contribution {words} {what}: its part is {called} on rank {rank}"
                )
    if is_off_by(1, -1.0, each):
        return Fault("twice", ranks, f"the sum over {whose(ranks)} is twice in {what}: its parts are {called}")
    return None


def tied_apart(what: str, whole: TensorRef, one: HeldByRanks, other: HeldByRanks) -> Fault | None:
    """Whether a tied weight's gradient is two parts, of the embedding on one rank and the head on another."""
    refs = (one.parts[0], other.parts[0])
    if {ref.shape for ref in refs} != {whole.shape}:
        return None
    products = products_of([whole, *refs])
    if products.norm({0: -1, 1: 1, 2: 1}) > NEAR * products.norm({0: 1}) or not products.norm({2: 1}):
        return None
    ranks = (*one.ranks, *(rank for rank in other.ranks if rank not in one.ranks))
    if products.norm({1: 1, 2: -1}) <= NEAR * products.norm({0: 1}):
        return Fault(
            "too little", ranks,
            f"{what} is half of the other run's in both of its places: {refs[0].name} on {whose(one.ranks)} and "
            f"{refs[1].name} on {whose(other.ranks)} are one tied weight, and the mean of what the two stages have is "
            "taken where their sum is due",
            0.5,
        )  # fmt: skip
    return Fault(
        "not summed", ranks,
        f"{what} is not summed over its two places: {refs[0].name} on {whose(one.ranks)} and {refs[1].name} on "
        f"{whose(other.ranks)} are "
        "one tied weight and hold parts that add up to the whole",
    )  # fmt: skip


def own_means(
    what: str, whole: float, losses: Sequence[float], ranks: tuple[int, ...], logprobs: Sequence[Array]
) -> Fault | None:
    """Whether the loss of each rank is the mean of its own log-probabilities, where the whole's is that of all.

    logprobs: of each rank, 0 where no token counts.
    """
    counts = [int(np.count_nonzero(one)) for one in logprobs]
    sums = [-float(one.sum()) for one in logprobs]
    if min(counts, default=0) < 1 or len(set(counts)) < 2:
        return None
    if abs(whole - sum(sums) / sum(counts)) > 1e-3 * abs(whole):
        return None
    for shares in (1, len(ranks)):
        means = [one / count / shares for one, count in zip(sums, counts, strict=True)]
        if all(abs(one - mean) <= 1e-3 * abs(mean) for one, mean in zip(losses, means, strict=True)):
            said = ", ".join(f"{count} on rank {rank}" for rank, count in zip(ranks, counts, strict=True))
            return Fault(
                "own token mean", ranks,
                f"{what} of each of {whose(ranks)} is the mean over the rank's own number of tokens ({said}), where "
                "that of the other run is over all",
            )  # fmt: skip
    return None


def whole_of_each(
    what: str, whole: float, losses: Sequence[float], ranks: tuple[int, ...], logprobs: Sequence[Array]
) -> Fault | None:
    """Whether each rank has its own tokens' part of a mean over all, and beside it the whole of what the other run has
    once (an auxiliary loss of a router, a penalty): added up or averaged over ranks as the parts are, it counts as many
    times.

    logprobs: of the whole and of each rank, 0 where no token counts.
    """
    counts = [int(np.count_nonzero(one)) for one in logprobs]
    if len(ranks) < 2 or min(counts) < 1 or sum(counts[1:]) != counts[0]:
        return None
    sums = [-float(one.sum()) for one in logprobs]
    for times in (1, len(ranks)):
        beside = whole - sums[0] / counts[0]
        of_ranks = [loss - times * total / counts[0] for loss, total in zip(losses, sums[1:], strict=True)]
        # Of its own tokens each rank's may be somewhat another; together they are as many times the one.
        is_so = all(abs(one - times * beside) <= 0.25 * abs(times * beside) for one in of_ranks)
        every = abs(sum(of_ranks) - len(ranks) * times * beside)
        if abs(beside) > 1e-3 * abs(whole) and is_so and every <= max(1e-3 * abs(whole), 0.02 * abs(beside)):
            return Fault(
                "beside the tokens", ranks,
                f"{what} of each of {whose(ranks)} has its own tokens' part and beside it {beside * times:.4g}, all of "
                f"what the other run adds once (an auxiliary loss of a router, a penalty): summed over ranks it counts "
                f"{len(ranks)} times",
                float(len(ranks)),
            )  # fmt: skip
    return None


def without_inputs(what: str, whole: TensorRef, held: HeldByRanks, inputs: HeldByRanks) -> Fault | None:
    """Of a weight's gradient [out, in] that all ranks hold alike: the rank of whose tokens nothing is in it. Its rows
    are made of what went into the layer; those of the other ranks' tokens span all of it, and not the other run's.
    """
    ours = held.parts[0]
    if held.is_cut or ours.shape != whole.shape or len(whole.shape) != 2 or whole.numel > 1 << 22:
        return None
    if len(held.ranks) > _EACH or sum(ref.numel for ref in inputs.parts) > 2 * _SPANNED:
        return None
    width = whole.shape[1]
    if inputs.ranks != held.ranks or any(ref.shape[-1] != width or ref.numel > 1 << 22 for ref in inputs.parts):
        return None
    rows = [pages.array(ref).astype(np.float64).reshape(-1, width) for ref in inputs.parts]
    there, here = (pages.array(ref).astype(np.float64) for ref in (whole, ours))
    for number, rank in enumerate(held.ranks):
        others = np.concatenate([one for other, one in enumerate(rows) if other != number])
        if len(others) > 0.75 * width or others.size > _SPANNED:
            return None
        basis = np.linalg.svd(others, full_matrices=False)[2]
        outside = [float(np.linalg.norm(one - (one @ basis.T) @ basis) / (np.linalg.norm(one) or 1.0))
                   for one in (there, here)]  # fmt: skip
        if outside[1] <= 1e-3 and outside[0] > 30 * outside[1] and outside[0] > 0.02:
            return Fault(
                "missing", (rank,),
                f"rank {rank}'s contribution is missing from {what}: it is made of what the other ranks' tokens gave "
                "the layer alone",
            )  # fmt: skip
    return None


def of_own_experts(what: str, whole: TensorRef, held: HeldByRanks) -> Fault | None:
    """Of a layer of experts that are spread over the ranks, each with tokens of its own: whether what the other ranks'
    experts made was not summed in, so that tokens of which none is a rank's own are 0 there.
    """
    if held.axis not in (0, 1) or len(whole.shape) < 2 or len(set(held.stretches)) < len(held.ranks):
        return None
    empty = right = 0
    those = []
    for rank, ref, stretches in zip(held.ranks, held.parts, held.stretches, strict=True):
        places = np.concatenate([np.arange(start, start + length) for start, length in stretches])
        there = np.take(pages.array(whole).astype(np.float64), places, held.axis).reshape(-1, whole.shape[-1])
        here = pages.array(ref).astype(np.float64).reshape(-1, whole.shape[-1])
        has, is_zero = there.any(1), ~here.any(1)
        is_right = np.abs(there - here).max(1) <= 1e-3 * np.abs(there).max()
        empty += int((has & is_zero).sum())
        right += int((has & is_right & ~is_zero).sum())
        if not is_right.all():
            those.append(rank)
    if empty < 3 or not right:
        return None
    return Fault(
        "not summed", tuple(those),
        f"{what} is not summed over {whose(held.ranks)}: each has what its own experts made of its tokens, and those "
        "of which none is its own are 0",
    )  # fmt: skip


def without_tokens(
    what: str,
    whole: TensorRef,
    held: HeldByRanks,
    left: TensorRef,
    stretches: Sequence[Sequence[tuple[int, int]]],
    axis: int,
) -> Fault | None:
    """Of the head's weight's gradient that all ranks hold alike: the rank of whose tokens nothing is in it.

    It is a sum over tokens of what the loss left at the token's logits times what went into the head. So every column
    of it is a combination of what was left at the tokens that are in it: `left` [sample, position, vocabulary], of
    which a rank has `stretches` of an axis.
    """
    ours = held.parts[0]
    if held.is_cut or ours.shape != whole.shape or len(left.shape) != 3 or left.shape[2] != whole.shape[0]:
        return None
    tokens, vocabulary = left.shape[0] * left.shape[1], left.shape[2]
    if tokens * vocabulary > 1 << 25 or len(held.ranks) > _EACH:
        return None
    left_BSV = pages.array(left).astype(np.float64)
    columns = slice(0, 64)
    there, here = (pages.array(ref)[:, columns].astype(np.float64) for ref in (whole, ours))
    for number, rank in enumerate(held.ranks):
        others = [
            left_BSV[(slice(None),) * axis + (slice(start, start + length),)].reshape(-1, vocabulary)
            for one, mine in enumerate(stretches) if one != number for start, length in mine
        ]  # fmt: skip
        rows = np.concatenate(others)
        if rows.shape[0] >= vocabulary:
            return None
        basis = np.linalg.svd(rows, full_matrices=False)[2]
        outside = [
            float(np.linalg.norm(one - basis.T @ (basis @ one)) / (np.linalg.norm(one) or 1.0)) for one in (there, here)
        ]
        if outside[1] <= 1e-3 and outside[0] > 30 * outside[1] and outside[0] > 0.02:
            return Fault(
                "missing", (rank,),
                f"rank {rank}'s contribution is missing from {what}: it is made of what the loss left at the "
                "other ranks' tokens alone",
            )  # fmt: skip
    return None


def of_gathered(
    what: str, whole: TensorRef, held: HeldByRanks, parted: Sequence[int], slices: Sequence[HeldByRanks]
) -> Fault | None:
    """Of what one rank alone has another of [sample, position, ...]: whether it is off at the tokens that another rank
    had before, and at no others, so that what it gathered of that one is off, and no weight.

    slices: what ranks held of the tokens just before, cut along them.
    """
    if len(parted) != 1 or held.axis in (0, 1) or len(whole.shape) < 3 or whole.numel > 1 << 24:
        return None
    rank, number = parted[0], held.ranks.index(parted[0])
    there = pages.array(whole).astype(np.float64)
    if held.is_cut:
        there = np.concatenate(
            [np.take(there, range(start, start + long), held.axis or 0) for start, long in held.stretches[number]],
            held.axis or 0,
        )
    here = pages.array(held.parts[number]).astype(np.float64)
    if here.shape != there.shape:
        return None
    off_S = np.abs(here - there).reshape(*here.shape[:2], -1).max((0, 2))
    is_off_S = off_S > _APART * off_S.max(initial=0.0)
    for cut in slices:
        if cut.axis != 1 or rank not in cut.ranks:
            continue
        for other, stretches in zip(cut.ranks, cut.stretches, strict=True):
            is_its_S = np.zeros(is_off_S.size, bool)
            for start, long in stretches:
                is_its_S[start : start + long] = True
            if other == rank or is_its_S.all() or is_off_S[is_its_S].mean() < 0.75 or is_off_S[~is_its_S].any():
                continue
            said = ", ".join(f"{start} to {start + long - 1}" for start, long in stretches)
            return Fault(
                "gathered", (rank,),
                f"{what} on rank {rank} is off at the tokens that rank {other} holds ({said}), and at no others: what "
                f"it gathered of rank {other} is not what that one holds: stale, or of another place",
            )  # fmt: skip
    return None


def weighed_otherwise(
    what: str, whole: TensorRef, laid: TensorRef, experts: Sequence[tuple[int, TensorRef]]
) -> Fault | None:
    """Of a layer of experts: the rank of whose experts' rows the tokens' differences are multiples, so that what these
    made is right and counts with another weight (a router's gate) than it should.

    experts: of all ranks, what each expert put out [its tokens, hidden], which is right.
    """
    width = whole.shape[-1]
    if whole.shape != laid.shape or any(ref.shape[-1] != width for _, ref in experts):
        return None
    off = pages.array(laid).astype(np.float64).reshape(-1, width) - pages.array(whole).astype(np.float64).reshape(
        -1, width
    )
    size = np.linalg.norm(off, axis=1)
    off = off[size > 1e-3 * size.max(initial=0.0)]
    if not len(off) or len(off) * sum(ref.numel for _, ref in experts) > 1 << 28 or not np.isfinite(off).all():
        return None
    off /= np.linalg.norm(off, axis=1, keepdims=True)
    along: dict[int, NDArray[np.bool_]] = {}
    for rank, ref in experts:
        rows = pages.array(ref).astype(np.float64).reshape(-1, width)
        rows = rows[rows.any(1)]
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
        is_along = np.abs(off @ rows.T).max(1, initial=0.0) >= 1 - 1e-6
        along[rank] = along.get(rank, np.zeros(len(off), bool)) | is_along
    count = {rank: int(own.sum()) for rank, own in along.items()}
    those = [rank for rank, number in count.items() if number]
    if len(along) < 2 or len(those) != 1 or count[those[0]] < max(3, 0.3 * len(off)):
        return None
    return Fault(
        "contribution", tuple(those),
        f"{what} is off at {count[those[0]]} of {len(off)} tokens by a multiple of what one of rank {those[0]}'s "
        "experts made of the token, and by none of another rank's: what they made is right, and counts with another "
        "weight (the router's), or not at all",
    )  # fmt: skip


def with_the_last(
    name: str, whole: TensorRef, laid: TensorRef, last: TensorRef, ranks: tuple[int, ...], every: tuple[int, ...]
) -> Fault | None:
    """Whether a gradient is off by a multiple of the ranks' own of the step before, which was not set to 0: by all of
    it, or, where the ranks' are averaged, by as many parts of it as there are ranks that kept theirs.
    """
    if {whole.shape, laid.shape, last.shape} != {whole.shape} or not all(
        ref.is_readable for ref in (whole, laid, last)
    ):
        return None
    products = products_of([whole, laid, last])
    size = products.norm({2: 1})
    off = products.norm({0: -1, 1: 1})
    if not size or not off:
        return None
    for kept in range(1, len(every) + 1):
        times = kept / len(every)
        if products.norm({0: -1, 1: 1, 2: -times}) > NEAR * off:
            continue
        what = f"{name.removeprefix('grad.')}'s gradient"
        many = whose(every) if kept == len(every) else f"{kept} of the {len(every)} ranks"
        return Fault(
            "kept", ranks,
            f"{what} is the other run's and {times:.4g} times what it was in the step before: {many} did not set "
            f"{'their' if kept > 1 else 'its'} gradients to zero between the steps",
        )  # fmt: skip
    return None


def with_another(
    what: str, own: tuple[TensorRef, TensorRef], others: Iterator[tuple[str, TensorRef, tuple[int, ...]]],
    ranks: tuple[int, ...],
) -> Fault | None:  # fmt: skip
    """Whether an expert's gradient is its own and another expert's, added up as if the two were copies of one.

    own: the gradient as the ranks have it, and as the other run has it. others: the other run's of the other experts,
    with their names and the ranks whose they are.
    """
    for name, ref, of in others:
        if ref.shape != own[0].shape or set(of) <= set(ranks) or not all(one.is_readable for one in (*own, ref)):
            continue
        products = products_of([own[1], own[0], ref])
        if not products.norm({2: 1}) or products.norm({1: 1, 0: -1, 2: -1}) > NEAR * products.norm({0: -1, 1: 1}):
            continue
        return Fault(
            "summed with another", tuple(sorted({*ranks, *of})),
            f"{what} on {whose(ranks)} is its own and that of another expert, {name.removeprefix('grad.')}, which is "
            f"{whose(of)}'s: experts of different ranks are summed as if they were copies of one",
        )  # fmt: skip
    return None


def other_tokens_count(what: str, whole: TensorRef, held: HeldByRanks) -> Fault | None:
    """Of what the loss left at the logits [sample, position, vocabulary]: ranks on which it is not 0 at tokens where
    the other run's is, or is 0 at tokens where that is not. Which tokens count is what their labels or masks say.
    """
    if len(whole.shape) != 3 or whole.numel > 1 << 26 or not all(ref.is_readable for ref in (whole, *held.parts)):
        return None
    counts_BS = pages.array(whole).any(-1)
    more: dict[int, int] = {}
    less: dict[int, int] = {}
    total = 0
    for number, rank in enumerate(held.ranks):
        there = counts_BS
        if held.axis in (0, 1):
            mine = [place for at, long in held.stretches[number] for place in range(at, at + long)]
            there = np.take(counts_BS, mine, held.axis)
        elif held.is_cut:
            return None
        here = pages.array(held.parts[number]).any(-1)
        if here.shape != there.shape:
            return None
        total += there.size
        more |= {rank: int((here & ~there).sum())} if (here & ~there).any() else {}
        less |= {rank: int((there & ~here).sum())} if (there & ~here).any() else {}
    ranks = tuple(sorted({*more, *less}))
    if total < _FEWEST_TOKENS or not ranks or len(ranks) == len(held.ranks) > 1:
        return None
    said = [
        f"{sum(of.values())} tokens of {whose(tuple(of))} {words}"
        for of, words in ((more, "count that do not in the other run"), (less, "do not count that do in the other run"))
        if of
    ]
    return Fault(
        "tokens that count", ranks,
        f"{what}: {' and '.join(said)}: labels, the response mask or the loss mask of {whose(ranks)} are others "
        "(prompt tokens or padding in the loss, or answers left out)",
    )  # fmt: skip


def at_the_ends(what: str, whole: TensorRef, held: HeldByRanks) -> Fault | None:
    """Of what is said of each token's next token, of a sequence that is cut: whether it is 0 at the ends of stretches
    whose next token is another rank's, and right elsewhere.
    """
    if held.axis != 1 or len(whole.shape) != 2:
        return None
    there = pages.array(whole).astype(np.float64)
    most = np.abs(there).max(initial=0.0)
    those = []
    for rank, ref, stretches in zip(held.ranks, held.parts, held.stretches, strict=True):
        ends = [(sum(long for _, long in stretches[: number + 1]) - 1, start + length - 1)
                for number, (start, length) in enumerate(stretches)]  # fmt: skip
        mine = pages.array(ref).astype(np.float64)
        places = [column for start, length in stretches for column in range(start, start + length)]
        is_off = np.abs(mine - there[:, places]) > 1e-3 * most
        lost = [own for own, at in ends if is_off[:, own].any() and not mine[:, own].any() and at + 1 < whole.shape[1]]
        if is_off.any() and not np.delete(is_off, lost, 1).any():
            those.append(rank)
        elif is_off.any():
            return None
    if not those:
        return None
    verb = "has" if len(those) == 1 else "have"
    return Fault(
        "boundary label", tuple(those),
        f"{what} is 0 at the last token of a stretch of {whose(those)}, and right at all others: the token at the "
        f"boundary, whose next token is another rank's, {verb} no target",
    )  # fmt: skip


def labels_at_the_ends(what: str, whole: TensorRef, held: HeldByRanks) -> Fault | None:
    """Of each token's target [sample, position], of a sequence that is cut: whether it is another at the ends of
    stretches whose next token is another rank's, and right elsewhere.
    """
    if held.axis != 1 or len(whole.shape) != 2 or not all(ref.dtype.startswith("int") for ref in (whole, *held.parts)):
        return None
    there = pages.array(whole)
    those, lost = [], set()
    for rank, ref, stretches in zip(held.ranks, held.parts, held.stretches, strict=True):
        mine = pages.array(ref)
        places = [column for start, length in stretches for column in range(start, start + length)]
        ends = [number for number, at in enumerate(places) if at + 1 not in places[number + 1 : number + 2]]
        is_off = (mine != there[:, places]).any(0)
        if not is_off.any():
            continue
        if not set(np.flatnonzero(is_off).tolist()) <= set(ends):
            return None
        those.append(rank)
        lost |= set(np.unique(mine[:, is_off]).tolist())
    if not those:
        return None
    is_ignored = len(lost) == 1 and min(lost) < 0
    more = f"is {min(lost)}, so that it has no target" if is_ignored else "is another token's"
    return Fault(
        "boundary label", tuple(those),
        f"{what} at the last token of a stretch of {whose(those)}, whose next token is another rank's, {more}, and "
        "right at all others: it was shifted within the rank's own tokens",
    )  # fmt: skip
