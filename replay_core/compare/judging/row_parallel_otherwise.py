"""Whose part of the sum behind a row-parallel layer is off, and how: `y = sum_r x_r W_r^T`, where x_r are a rank's
features of a gate and what it gates, or of what an activation makes, as they were recorded and agree.

The other run's output says which activation makes x of what was recorded. Then one rank's part is left out, counted
twice or scaled, or made with another activation; what makes the difference between the runs is said.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from msgspec import Struct

from replay_core import pages
from replay_core.compare.judging.faults import Fault, whose
from replay_core.compare.judging.products import Array
from replay_core.compare.pairing.ranks import HeldByRanks, laid_of
from replay_core.records import TensorRef

#: What part of the other run's output what is made again may leave (weights may have been recorded after their step),
#: and what part of the difference: of float32, of halves; by how many times all else leaves more.
_NEAR, _LEFT, _CLEARLY = 0.05, (0.05, 0.2), 3.0
#: A part is left out, or there twice, where its factor is as near to it.
_WHOLE = 0.03
_MOST, _TOKENS, _EACH = 1 << 22, 512, 16
_GATES, _UPS = ("gate_proj.output", "w1.output"), ("up_proj.output", "w3.output")
_MADE = ("act_fn.output",)
_FUSED = ("linear_fc1.output", "gate_up_proj.output", "c_fc.output", "fc1.output", "fc_in.output")


def _silu(x: Array) -> Array:
    return np.asarray(x / (1 + np.exp(-np.clip(x, -700, 700))))


def _tanh(x: Array) -> Array:
    return np.asarray(0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))))


def _gelu(x: Array) -> Array:
    """With erf as Abramowitz and Stegun 7.1.26 have it: within 1.5e-7."""
    size = np.abs(x) / math.sqrt(2)
    t = 1 / (1 + 0.3275911 * size)
    sums = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    erf = np.sign(x) * (1 - sums * np.exp(-size * size))
    return np.asarray(0.5 * x * (1 + erf))


_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "SiLU": _silu, "GELU": _gelu, "GELU by tanh": _tanh, "ReLU": lambda x: np.maximum(x, 0),
    "no activation": lambda x: x, "a squared ReLU": lambda x: np.square(np.maximum(x, 0)),
    "a sigmoid": lambda x: 1 / (1 + np.exp(-np.clip(x, -700, 700))),
}  # fmt: skip


class _PartOfSum(Struct, frozen=True):
    """What a rank recorded: what goes through the activation, and what that gates, [token, feature]."""

    ranks: tuple[int, ...]
    gate: Array
    up: Array | None
    weight: Array

    def made(self, activation: Callable[[Array], Array] | None) -> Array:
        x = self.gate if activation is None else activation(self.gate)
        return np.asarray((x if self.up is None else x * self.up) @ self.weight.T)


def of_parts(
    what: str, whole: TensorRef, held: HeldByRanks, slices: Sequence[HeldByRanks], weight: Array, bias: Array
) -> Fault | None:
    """Whose part is otherwise in an output [sample, position, hidden].

    whole: the other run's. slices: what ranks held alike with the other run before. weight: [hidden, features], of all
    ranks; bias: [hidden].

    Raises:
        DumpError: the bytes of one cannot be read.
    """
    if len(whole.shape) != 3 or held.axis not in (None, 0) or whole.numel > _MOST or weight.size > _MOST:
        return None
    if bias.shape != whole.shape[-1:] or weight.shape[0] != whole.shape[-1]:
        return None
    found: list[Fault | None] = []
    for ranks, parts, members in _groups(whole, held):
        first = members[0]
        block = _rows(whole, first)
        refs = [ref for ref in parts if ref.shape == held.parts[0].shape]
        if len(refs) < len(parts) or len(ranks) > _EACH or not all(ref.is_readable for ref in refs):
            return None
        outputs = [_rows(ref, None) for ref in refs]
        if any(one.shape != block.shape or not np.isfinite(one).all() for one in (block, *outputs)):
            return None
        if any(np.linalg.norm(one - outputs[0]) > 1e-3 * np.linalg.norm(outputs[0] - block) for one in outputs[1:]):
            return None
        if not np.linalg.norm(outputs[0] - block) > 1e-3 * np.linalg.norm(block):
            continue  # this group is right
        is_half = bool({"bfloat16", "float16"} & {whole.dtype, refs[0].dtype})
        found.append(_of_group(what, block - bias, outputs[0] - bias, ranks, first, slices, weight, is_half=is_half))
    if not found or any(fault is None for fault in found):
        return None
    those = [fault for fault in found if fault is not None]
    if len({fault.kind for fault in those}) > 1:
        return None
    ranks = tuple(sorted({rank for fault in those for rank in fault.ranks}))
    more = "" if len(those) == 1 else f"; so it is in every group, of {whose(ranks)}"
    return Fault(those[0].kind, ranks, those[0].sentence + more, those[0].factor)


Stretches = tuple[tuple[int, int], ...]


def _groups(
    whole: TensorRef, held: HeldByRanks
) -> Iterator[tuple[tuple[int, ...], list[TensorRef], list[Stretches | None]]]:
    """The ranks that hold one slice of the samples each, and which it is."""
    if held.axis is None:
        yield held.ranks, list(held.parts), [None]
        return
    for stretches in dict.fromkeys(held.stretches):
        members = [number for number, own in enumerate(held.stretches) if own == stretches]
        yield tuple(held.ranks[one] for one in members), [held.parts[one] for one in members], [stretches]


def _rows(ref: TensorRef, stretches: Stretches | None) -> Array:
    values = pages.array(ref).astype(np.float64)
    if stretches is not None:
        values = np.concatenate([values[at : at + long] for at, long in stretches])
    return np.asarray(values.reshape(-1, values.shape[-1])[:_TOKENS])


def _of_group(
    what: str, there: Array, here: Array, ranks: tuple[int, ...], stretches: Stretches | None,
    slices: Sequence[HeldByRanks], weight: Array, *, is_half: bool,
) -> Fault | None:  # fmt: skip
    off = here - there
    size = float(np.linalg.norm(off))
    best: tuple[float, list[_PartOfSum], str | None] | None = None
    for parts, is_made in _recorded(what, ranks, stretches, slices, weight, len(there)):
        for name in (None,) if is_made else _ACTIVATIONS:
            made = sum(part.made(None if name is None else _ACTIVATIONS[name]) for part in parts)
            left = float(np.linalg.norm(made - there))
            if left <= _NEAR * np.linalg.norm(there) and (best is None or left < best[0]):
                best = left, parts, name
    if best is None or len(best[1]) < 2:
        return None
    _, parts, name = best
    right = [part.made(None if name is None else _ACTIVATIONS[name]) for part in parts]
    found: list[tuple[float, Fault]] = []
    for part, own in zip(parts, right, strict=True):
        times = float((own * off).sum() / max(float((own * own).sum()), 1e-300))
        left = float(np.linalg.norm(off - times * own)) / size
        found.append((left, _times(what, part.ranks, 1 + times)))
        for other, activation in _ACTIVATIONS.items():
            if name is None or other == name:
                continue
            left = float(np.linalg.norm(off - (part.made(activation) - own))) / size
            found.append((left, Fault(
                "another activation", part.ranks,
                f"{whose(part.ranks)}'s part of {what} is made with {other}, where the other run's is with {name} "
                "(made again from what was recorded before it): the parts of all other ranks are right",
            )))  # fmt: skip
    found.sort(key=lambda one: one[0])
    others = [left for left, fault in found[1:] if fault.ranks != found[0][1].ranks or fault.kind != found[0][1].kind]
    if found[0][0] > _LEFT[is_half] or (others and others[0] < _CLEARLY * found[0][0]):
        return None
    return found[0][1]


def _times(what: str, ranks: tuple[int, ...], times: float) -> Fault:
    again = "its part is made again from what went into it and its slice of the weight"
    if abs(times) <= _WHOLE:
        return Fault("missing", ranks, f"{whose(ranks)}'s contribution is missing from {what}: {again}")
    if abs(times - 2) <= _WHOLE:
        return Fault("twice", ranks, f"{whose(ranks)}'s contribution is twice in {what}: {again}")
    said = f"{whose(ranks)}'s contribution is in {what} times {times:.3g}: {again}"
    return Fault("scaled part", ranks, said, times)


def _recorded(
    what: str, ranks: tuple[int, ...], stretches: Stretches | None, slices: Sequence[HeldByRanks], weight: Array,
    tokens: int,
) -> Iterator[tuple[list[_PartOfSum], bool]]:  # fmt: skip
    """What ranks recorded before the layer, each its part; and whether it went through its activation already."""
    around = what.removesuffix(".output").rpartition(".")[0]

    def of(endings: Sequence[str]) -> list[tuple[tuple[int, ...], Array]] | None:
        for ending in endings:
            for one in reversed(slices):
                if f".{one.parts[0].name}".endswith(f".{around}.{ending}"):
                    return _shares(one, ranks, stretches)
        return None

    def parts(gates: list[tuple[tuple[int, ...], Array]], ups: list[Array | None]) -> list[_PartOfSum]:
        made, at = [], 0
        for (own, gate), up in zip(gates, ups, strict=True):
            cut = weight[:, at : at + gate.shape[1]]
            at += gate.shape[1]
            made.append(_PartOfSum(own, gate, up, cut))
        return made if at == weight.shape[1] and all(len(one.gate) == tokens for one in made) else []

    gate, up, acted = of(_GATES), of(_UPS), of(_MADE)
    if up is not None and len({len(one) for one in (gate or up, up, acted or up)}) == 1:
        ups: list[Array | None] = [one for _, one in up]
        for source, is_made in ((gate, False), (acted, True)):
            both = zip(source or [], up, strict=False)
            if source is not None and all(one.shape == other.shape for (_, one), (_, other) in both):
                yield from ((made, is_made) for made in (parts(source, ups),) if made)
        if gate is None and (made := parts(up, [None] * len(up))):
            yield made, False
    fused = of(_FUSED)
    if fused is not None:
        if made := parts(fused, [None] * len(fused)):
            yield made, False
        if all(one.shape[1] % 2 == 0 for _, one in fused):
            for number in (0, 1):
                gates = [(own, np.split(one, 2, axis=1)[number]) for own, one in fused]
                beside: list[Array | None] = [np.split(one, 2, axis=1)[1 - number] for _, one in fused]
                if made := parts(gates, beside):
                    yield made, False


def _shares(
    one: HeldByRanks, ranks: tuple[int, ...], stretches: Stretches | None
) -> list[tuple[tuple[int, ...], Array]] | None:
    """What the ranks of a group have of features, in the order of these, and which ranks have each."""
    if stretches is None:
        if one.ranks != ranks or one.axis != len(one.parts[0].shape) - 1:
            return None
        places = dict.fromkeys(sorted(one.stretches))
        members = [[number for number, own in enumerate(one.stretches) if own == place] for place in places]
        refs = [(tuple(ranks[number] for number in own), one.parts[own[0]]) for own in members]
    else:
        if one.axis != 0 or stretches not in one.stretches:
            return None
        laid = laid_of(one.parts[one.stretches.index(stretches)], len(one.parts[0].shape) - 1)
        if laid is None or len(laid.parts) != len(ranks):
            return None
        refs = [((rank,), ref) for rank, ref in zip(ranks, laid.parts, strict=True)]
    if any(not ref.is_readable or ref.numel > _MOST for _, ref in refs):
        return None
    return [(own, _rows(ref, None)) for own, ref in refs]
