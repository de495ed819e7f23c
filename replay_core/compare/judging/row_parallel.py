"""What is in the output of a layer whose weight is cut along its inputs: of each rank its part `x_r W_r^T`, and the
bias once. With a rank's inputs and weights recorded its part is known, and how often it is in an output is solved for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from replay_core import pages
from replay_core.compare.judging.faults import Fault, whose
from replay_core.compare.judging.products import Array
from replay_core.compare.pairing.ranks import HeldByRanks, named
from replay_core.records import Inline, TensorRef

#: What part of an output the parts may leave (weights may have been recorded after their step), and how far from a
#: whole number they may be in it: of float32, of halves.
_LEFT, _OFF = (3e-2, 5e-2), (0.02, 0.15)
_MOST = 1 << 22
#: Elements of all ranks' parts and outputs, which are in memory at once.
_AT_ONCE = 1 << 24
#: More parts are not told from each other.
_EACH = 16


def of_parts(
    what: str, held: HeldByRanks, inputs: HeldByRanks, weights: HeldByRanks, bias: TensorRef | None
) -> Fault | None:
    """Which parts are not in an output as often as they should be, once; None where they all are, or where the output
    is not made of them.

    held: the output [sample, position, hidden], whole on every rank. inputs: what went into the layer, a slice of its
    features on every rank, or its heads [sample, head, position, width]. weights: [hidden, a rank's features].
    """
    ranks = held.ranks
    if not inputs.ranks == weights.ranks == ranks or not 1 < len(ranks) <= _EACH or weights.axis != 1 or held.is_cut:
        return None
    size = held.parts[0].numel
    if len(set(weights.stretches)) < len(ranks) or size > _MOST or size * (2 * len(ranks) + 1) > _AT_ONCE:
        return None
    parts = [_part(x, weight) for x, weight in zip(inputs.parts, weights.parts, strict=True)]
    hidden = held.parts[0].shape[-1]
    outputs = [pages.array(ref).astype(np.float64).reshape(-1, hidden) for ref in held.parts]
    made = [part for part in parts if part is not None and part.shape == outputs[0].shape]
    if len(made) < len(ranks):
        return None
    if bias is not None and bias.shape == (hidden,):
        made.append(np.broadcast_to(pages.array(bias).astype(np.float64), outputs[0].shape))
    if not all(np.isfinite(one).all() for one in (*outputs, *made)):
        return None
    is_half = held.parts[0].dtype in ("bfloat16", "float16")
    basis = np.stack([one.reshape(-1) for one in made], 1)
    solved, *_ = np.linalg.lstsq(basis, np.stack([output.reshape(-1) for output in outputs], 1), rcond=None)
    times = []
    for output, own in zip(outputs, solved.T, strict=True):
        whole = np.rint(own)
        left = float(np.linalg.norm(output.reshape(-1) - basis @ whole))
        if np.abs(own - whole).max() > _OFF[is_half] or left > _LEFT[is_half] * np.linalg.norm(output):
            return None
        times.append([int(one) for one in whole])
    return _told(what, ranks, times)


def beside_its_bias(what: str, whole: TensorRef, held: HeldByRanks, bias: TensorRef) -> Fault | None:
    """What ranks' outputs [..., hidden] of a layer are, once the bias that each adds is taken off: parts that add up to
    the other run's; or its values, rounded to bfloat16.
    """
    if held.is_cut or any(ref.shape != whole.shape for ref in held.parts) or bias.shape != whole.shape[-1:]:
        return None
    if not 1 < len(held.ranks) <= _EACH or whole.numel * (len(held.ranks) + 1) > _AT_ONCE:
        return None
    bias_H, there = pages.array(bias).astype(np.float64), pages.array(whole).astype(np.float64)
    outputs = [pages.array(ref).astype(np.float64) for ref in held.parts]
    more = (sum(outputs) - there).reshape(-1, bias_H.size)
    too_often_H = (len(outputs) - 1) * bias_H
    mean_H = more.mean(0)
    is_one = np.linalg.norm(more - mean_H) <= 1e-3 * np.linalg.norm(there)
    if is_one and bias_H.any() and np.linalg.norm(mean_H - too_often_H) <= 0.1 * np.linalg.norm(too_often_H):
        return Fault(
            "not summed", held.ranks,
            f"{what} is not summed over ranks {named(held.ranks)}: each holds a part and the bias, and the parts add "
            "up to the other run's",
        )  # fmt: skip
    if whole.dtype == "float32" and all(_is_short(one, bias_H) for one in outputs) and not _is_short(there, bias_H):
        return Fault(
            "rounded", held.ranks,
            f"{what} is float32 and on {whose(held.ranks)} every value but for its bias is one of bfloat16, which the "
            "other run's are not: it was reduced or kept in bfloat16 (half precision)",
        )  # fmt: skip
    return None


def _is_short(output: Array, bias_H: Array) -> bool:
    """Whether what an output is beside its bias are values of bfloat16, as far as a sum in float32 tells them."""
    beside = (output - bias_H).astype(np.float32)
    bits = np.ascontiguousarray(beside).view(np.uint32).astype(np.uint64)
    short = ((bits + 0x8000) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    unit = 2.0**-23 * np.maximum(np.abs(output), np.abs(bias_H))
    return bool((np.abs(short.astype(np.float64) - (output - bias_H)) <= unit).mean() > 0.999)


def gated(slices: Sequence[HeldByRanks]) -> Iterator[HeldByRanks]:
    """What went into a layer behind a gate that was not recorded: silu(gate) * up (Shazeer 2020, SwiGLU), of ranks
    whose slices of both were.
    """
    for gate in slices:
        if not gate.parts[0].name.endswith("gate_proj.output"):
            continue
        name = gate.parts[0].name.replace("gate_proj", "up_proj")
        for up in slices:
            if up.parts[0].name != name or up.ranks != gate.ranks or gate.parts[0].numel > _MOST:
                continue
            made = []
            if any(one.shape != other.shape for one, other in zip(gate.parts, up.parts, strict=True)):
                continue
            for one, other in zip(gate.parts, up.parts, strict=True):
                g, u = (pages.array(ref).astype(np.float64) for ref in (one, other))
                values = g * _sigmoid(g) * u
                made.append(one.with_(dtype="float64", source=Inline(values.tobytes()), digest=None, copies=()))
            yield HeldByRanks(gate.ranks, tuple(made), gate.axis, gate.stretches)


def cut_straight(
    what: str, whole: TensorRef, held: HeldByRanks, fused: HeldByRanks, weights: HeldByRanks
) -> Fault | None:
    """Whether ranks hold slices in turn of a layer that is a gate and what it gates in one, and took the halves of
    their own slice for these, so that one rank gates with what is not the gate.

    held: the output [sample, position, hidden] of the layer behind, whole on every rank; whole: the other run's. fused:
    what the two in one put out, a slice in turn on every rank. weights: of the layer behind.
    """
    ranks, count = held.ranks, len(held.ranks)
    if not fused.ranks == weights.ranks == ranks or not 1 < count <= _EACH or weights.axis != 1 or held.is_cut:
        return None
    if any(len(one) != 1 for one in fused.stretches) or fused.axis != len(fused.parts[0].shape) - 1:
        return None
    refs = (whole, *held.parts, *fused.parts, *weights.parts)
    if not all(ref.is_readable and ref.numel <= _MOST for ref in refs) or whole.numel * 2 * count > _AT_ONCE:
        return None
    own = [pages.array(ref).astype(np.float64).reshape(-1, ref.shape[-1]) for ref in fused.parts]
    cut = [pages.array(ref).astype(np.float64) for ref in weights.parts]
    if any(one.shape[1] != 2 * weight.shape[1] for one, weight in zip(own, cut, strict=True)):
        return None
    hidden = cut[0].shape[0]
    there, *here = (pages.array(ref).astype(np.float64) for ref in (whole, *held.parts))
    # An expert's are of other tokens than the layer's, or of none.
    rows = {len(one) * hidden for one in own} | {one.size for one in here}
    if rows != {there.size} or not there.size or not all(np.isfinite(one).all() for one in (there, *here)):
        return None
    there, *here = (one.reshape(-1, hidden) for one in (there, *here))
    in_turn = [number for _, number in sorted((one[0][0], number) for number, one in enumerate(fused.stretches))]
    every = np.concatenate([own[number] for number in in_turn], 1)
    weight = np.concatenate([cut[number] for _, number in sorted(
        (one[0][0], number) for number, one in enumerate(weights.stretches))], 1)  # fmt: skip
    near = _LEFT[held.parts[0].dtype in ("bfloat16", "float16")]
    for is_gate_first in (True, False):
        right = _gated(every, is_gate_first=is_gate_first) @ weight.T
        if not np.linalg.norm(right - there) <= near * np.linalg.norm(there):
            continue
        wrong = sum(_gated(one, is_gate_first=is_gate_first) @ part.T for one, part in zip(own, cut, strict=True))
        if not all(np.linalg.norm(wrong - one) <= near * np.linalg.norm(one) for one in here):
            continue
        if any(np.linalg.norm(one - there) <= 3 * np.linalg.norm(wrong - one) for one in here):
            continue
        (start, length), *_ = fused.stretches[0]
        layer = fused.parts[0].name.removesuffix(".output")
        return Fault(
            "order", ranks,
            f"{layer} is cut among {whose(ranks)} in turn (rank {ranks[0]} has rows {start} to {start + length - 1}), "
            f"and is a gate and what it gates one after the other: {what} is the sum of what the halves of each rank's "
            "own slice make, and the other run's is made of the whole's halves; each rank is to have a share of both",
        )  # fmt: skip
    return None


def _gated(values: Array, *, is_gate_first: bool) -> Array:
    first, second = np.split(values, 2, axis=1)
    gate, up = (first, second) if is_gate_first else (second, first)
    return np.asarray(gate * _sigmoid(gate) * up)


def _sigmoid(values: Array) -> Array:
    """1 / (1 + exp(-x)), of no number so far below zero that exp is infinite."""
    small = np.exp(-np.abs(values))
    return np.asarray(np.where(values < 0, small, 1.0) / (1 + small))


def _part(x: TensorRef, weight: TensorRef) -> Array | None:
    """A rank's part of the sum: [token, hidden]."""
    if not x.is_readable or not weight.is_readable or len(weight.shape) != 2 or max(x.numel, weight.numel) > _MOST:
        return None
    values = pages.array(x).astype(np.float64)
    width = weight.shape[1]
    if values.ndim == 4 and values.shape[1] * values.shape[3] == width:
        values = values.transpose(0, 2, 1, 3)
        values = values.reshape(*values.shape[:2], -1)
    if values.shape[-1] != width:
        return None
    return np.asarray(values.reshape(-1, width) @ pages.array(weight).astype(np.float64).T)


def _told(what: str, ranks: tuple[int, ...], times: list[list[int]]) -> Fault | None:
    count = len(ranks)
    parts = [of_rank[:count] for of_rank in times]
    biases = [of_rank[count] for of_rank in times if len(of_rank) > count]
    if all(of_rank == [int(other == number) for other in range(count)] for number, of_rank in enumerate(parts)):
        return Fault(
            "not summed", ranks,
            f"{what} is not summed over ranks {named(ranks)}: each holds the part that its own inputs and its slice of "
            "the weight make",
        )  # fmt: skip
    if all(of_rank == parts[0] for of_rank in parts[1:]):
        lost = tuple(rank for rank, times_ in zip(ranks, parts[0], strict=True) if times_ == 0)
        if lost and all(one in (0, 1) for one in parts[0]):
            return Fault(
                "missing", lost,
                f"{whose(lost)}'s contribution is missing from {what}: it is the sum of the other ranks' parts, which "
                "their inputs and slices of the weight make",
            )  # fmt: skip
        if len(set(biases)) == 1 and biases[0] > 1 and set(parts[0]) == {1}:
            return Fault(
                "too much", ranks,
                f"the bias is in {what} {biases[0]} times: each of {whose(ranks)} adds it to its part before the sum",
                float(biases[0]),
            )  # fmt: skip
    without = tuple(rank for rank, one in zip(ranks, biases, strict=False) if one == 0)
    if without and all(one == 1 for of_rank in parts for one in of_rank) and set(biases) <= {0, 1}:
        return Fault("missing", without, f"the bias is missing from {what} on {whose(without)}: the sum alone is there")
    return None
