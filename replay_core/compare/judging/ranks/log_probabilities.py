"""What the ranks' log-probabilities say of the logits they were made of."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from replay_core import naming, pages
from replay_core.compare.judging import algebra, at_boundaries, label_ends, logits_otherwise, vocabulary
from replay_core.compare.judging.faults import Fault, is_open, whose
from replay_core.compare.judging.ranks.row import MOST, RowOfRanks
from replay_core.compare.pairing.ranks import HeldByRanks, standing_for
from replay_core.records import TensorRef

#: What part of a head's gradient its rows' sum is at most where a softmax made all of it; and at least where not.
_ADDS_UP, _FAR_FROM_0 = 1e-4, 1e-2


#: Fewer tokens may all be off in one direction by chance; and the least that each is off, of the greatest of them, by
#: whether both are float32.
_FEWEST_TOKENS, _BEYOND_ROUNDING = 24, (2e-2, 1e-5)


def of_vocabulary(of: RowOfRanks, fault: Fault | None) -> Fault | None:
    """Which rank's slice of the words is off."""
    is_asked = of.row.key.stage == "modules" or of.kind == "logprob"
    if len(of.whole.shape) == 2 and not of.held.is_cut and is_asked:
        fault = _of_slices(of) or fault
    return fault


def of_logits(of: RowOfRanks, fault: Fault | None) -> Fault | None:
    """What was made of the logits otherwise."""
    if of.kind == "logprob" and is_open(fault):
        fault = _of_logits(of) or fault
    return fault


def of_stretches(of: RowOfRanks, fault: Fault | None, *, forward_is_off: bool) -> Fault | None:
    """Whether what is said of each token's next one is off by where ranks' stretches of the sequence begin and end.

    forward_is_off: whether anything of the step's forward is off, which says more of it.
    """
    is_asked = of.kind == "logprob" or of.name == "token_loss"
    if not is_asked or not is_open(fault) or forward_is_off or len(of.whole.shape) != 2:
        return fault
    fault = label_ends.explain(of.name, of.whole, of.held, of.together.ranks) or fault
    if is_open(fault) and of.held.axis == 1:  # the ranks are known to share sequences
        fault = at_boundaries.explain(of.name, of.whole, of.held, 1) or fault
    return fault


def of_its_sum(of: RowOfRanks, fault: Fault | None, *, forward_is_off: bool) -> Fault | None:
    """Whether every token's log-probability is off in one direction, as where the softmax is over more words or fewer:
    another temperature, or other logits, make some greater and some less.

    forward_is_off: whether anything of the step's forward is off, which says more of it.
    """
    laid = of.laid
    if of.kind != "logprob" or not is_open(fault) or forward_is_off or laid.shape != of.whole.shape:
        return fault
    there, here = (pages.array(ref).astype(np.float64).reshape(-1) for ref in (of.whole, laid))
    asked = (there != 0) & (here != 0) & np.isfinite(there) & np.isfinite(here)
    off = (here - there)[asked]
    if off.size < _FEWEST_TOKENS or not (np.all(off < 0) or np.all(off > 0)):
        return fault
    least, most = float(np.abs(off).min()), float(np.abs(off).max())
    if least <= _BEYOND_ROUNDING[of.whole.dtype == "float32" == laid.dtype] * float(np.abs(there[asked]).max()):
        return fault
    lower, what = ("lower", (
        "more is added up than the words' (those the vocabulary is padded with, which are no words and are to be left "
        "out; a slice of the words twice), or, of tokens that are all likely ones, the temperature is higher"
    )) if off[0] < 0 else ("higher", (
        "words are missing (a slice of them that another rank has: the sum is not made over all ranks, or a rank's "
        "words are left out)"
    ))  # fmt: skip
    return Fault(
        "softmax's sum", of.held.ranks,
        f"{of.name} is {lower} on {whose(of.held.ranks)} at every one of {off.size} tokens, by {least:.2g} to "
        f"{most:.2g}, and at none the other way: in the sum of the softmax (log-sum-exp) over the vocabulary {what}",
    )  # fmt: skip


def _of_slices(of: RowOfRanks) -> Fault | None:
    """What the slices of the logits say of what is said of every token's target [sample, position]: the logits are
    those that, by the other run's values, make its log-probabilities.
    """
    whole, held, side, other = of.whole, of.held, of.side, of.other
    of_samples = [
        (name, cut, facing[1]) for (name, stage), (_, ref) in side.tensors.items()
        if (cut := of.together.held.get(id(ref))) is not None and cut.axis == len(whole.shape)
        and (facing := other.tensors.get((name, stage))) is not None and not name.startswith("grad.")
        and facing[1].shape[:-1] == whole.shape and facing[1].numel <= 1 << 27
    ]  # fmt: skip
    called = [one for one in of_samples if naming.makes_logits(one[0])]
    said = [pages.array(ref).astype(np.float64).reshape(-1) for ref in (whole, *held.parts)]
    candidates = []
    for name in ("target_ids", "labels", "input_ids"):
        if (targets := other.find(name)) is not None and targets.shape == whole.shape:
            ids = pages.array(targets).astype(np.int64)
            candidates += [] if name == "input_ids" else [ids.reshape(-1)]
            candidates.append(np.roll(ids, -1, 1).reshape(-1))
    for _, cut, other_logits in called or of_samples[-1:]:
        logits = pages.array(other_logits).astype(np.float64).reshape(-1, other_logits.shape[-1])
        found = vocabulary.targets_of(said[0], logits, candidates)
        if found is not None:
            told, targets_N, sign = found
            return vocabulary.explain(of.name, [sign * one[told] for one in said], logits[told], cut, targets_N)
    return None


def _of_logits(of: RowOfRanks) -> Fault | None:
    """Whether log-probabilities of ranks are what the other run's logits make under a temperature or a cap."""
    row, whole, held, side, other = of.row, of.whole, of.held, of.side, of.other
    if len(whole.shape) != 2 or row.ranks is None or not row.ranks.parted:
        return None
    called = [
        (name, ref) for (name, _), (_, ref) in other.tensors.items()
        if naming.makes_logits(name) and not name.startswith("grad.") and ref.shape[:-1] == whole.shape
        and ref.is_readable and ref.numel <= MOST >> 2
    ]  # fmt: skip
    ids = [other.find(name) for name in ("target_ids", "labels", "input_ids")]
    candidates = [
        made.reshape(-1) for ref in ids if ref is not None and ref.shape == whole.shape
        for values in (pages.array(ref).astype(np.int64),) for made in (values, np.roll(values, -1, 1))
    ]  # fmt: skip
    said_N = pages.array(whole).astype(np.float64).reshape(-1)
    laid = standing_for(held)
    for name, ref in called[:2]:
        logits_NV = pages.array(ref).astype(np.float64).reshape(said_N.size, -1)
        known = logits_otherwise.made_of(said_N, logits_NV, candidates)
        if known is None:
            continue
        made, told = known
        places = np.full(said_N.size, -1)
        places[told] = np.arange(told.size)
        every = []
        if not held.is_cut or held.axis not in (0, 1):
            own = pages.array(held.parts[held.ranks.index(row.ranks.parted[0])]).astype(np.float64).reshape(-1)
            if own.size != said_N.size:
                return None
            every.append(logits_otherwise.OfTokens(row.ranks.parted, np.arange(told.size), own[told]))
        elif laid.shape == whole.shape:
            here_N = pages.array(laid).astype(np.float64).reshape(-1)
            grid = np.arange(said_N.size).reshape(whole.shape)
            for rank, stretches in zip(held.ranks, held.stretches, strict=True):
                if rank in row.ranks.parted:
                    mine = np.concatenate([np.arange(at, at + long) for at, long in stretches])
                    rows = np.take(grid, mine, held.axis).reshape(-1)
                    rows = rows[places[rows] >= 0]
                    every.append(logits_otherwise.OfTokens((rank,), places[rows], here_N[rows]))
        mine_too = next((one for (_, _), (_, one) in side.tensors.items() if one.name.endswith(name)), None)
        cut = of.together.held.get(id(mine_too)) if mine_too is not None else None
        if mine_too is not None and not _are_logits_alike(ref, mine_too, cut, row.ranks.parted):
            return None  # then these are what is off
        slices = cut if cut is not None and cut.axis == 2 else None
        return logits_otherwise.explain(row.name, made, every, slices) if every else None
    return None


def _are_logits_alike(whole: TensorRef, laid: TensorRef, held: HeldByRanks | None, parted: Sequence[int]) -> bool:
    """Whether ranks' own logits are the other run's."""
    own = [laid] if held is None or held.is_cut else [
        ref for rank, ref in zip(held.ranks, held.parts, strict=True) if rank in parted
    ]  # fmt: skip
    return all(ref.is_readable and ref.shape == whole.shape and algebra.is_near(whole, ref) for ref in own)


def of_softmax(of: RowOfRanks, fault: Fault | None, *, forward_is_off: bool) -> Fault | None:
    """Whether a head's gradient lacks what the softmax hands back to other words than the target: what a loss hands
    back to a token's logits adds up to 0 over the vocabulary, so that the rows of the head's gradient do.

    forward_is_off: whether anything of the step's forward is off, of which the gradient then is as well.
    """
    name = of.name.removeprefix("grad.")
    is_head = of.is_gradient and name.endswith(naming.HEADS) and len(of.whole.shape) == 2
    # Ranks with samples of their own share no softmax's sum.
    is_shared = len(of.held.ranks) > 1 and of.together.samples == 1
    is_left_over = fault is not None and fault.kind == "of no token"
    if (
        not is_head
        or not is_shared
        or not (is_open(fault) or is_left_over)
        or forward_is_off
        or of.laid.shape != of.whole.shape
    ):
        return fault
    sums = []
    for ref in (of.whole, of.laid):
        values = pages.array(ref).astype(np.float64)
        sums.append(float(np.linalg.norm(values.sum(0)) / max(float(np.linalg.norm(values)), 1e-300)))
    if not (sums[0] <= _ADDS_UP and sums[1] >= _FAR_FROM_0):
        return fault
    told = Fault(
        "softmax's backward", of.held.ranks,
        f"the forward agrees, and {of.what} does not: its rows on {whose(of.held.ranks)}, one for each "
        f"word, add up to {sums[1]:.2g} of its norm, where those of the other run add up to 0 ({sums[0]:.1g}), "
        "as a softmax makes them: what comes back of the log-sum-exp through the words of other ranks is missing (a "
        "sum over the vocabulary's ranks in the log-probabilities or the loss that carries no gradient, or carries it "
        "otherwise)",
    )  # fmt: skip
    if fault is None or not is_left_over:
        return told
    # What was left of another step adds up to anything as well.
    return Fault(fault.kind, fault.ranks, f"{told.sentence}; or {fault.sentence}", fault.factor)
