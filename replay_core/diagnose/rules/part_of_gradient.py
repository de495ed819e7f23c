"""A gradient's norm that is taken over a part of the gradients: the rest is never clipped."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from itertools import combinations

import numpy as np
from msgspec import Struct

from replay_core import pages
from replay_core.budget import stored_bytes
from replay_core.diagnose.algorithm import largest_norm
from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Evidence, Finding, Where, finding, listed, shown
from replay_core.diagnose.rule import Skip, rule, skip_if
from replay_core.records import Record, TensorRef
from replay_core.regexes import regex

#: Steps that show it, how near a norm is to the logged one, by how much all of them are more, and bytes that are read.
STEPS, NEAR, MORE, MOST = 3, 1e-4, 1e-2, 1 << 29
#: Kinds of weights by their names, the surest first.
_KINDS = (
    ("adapters", regex(r"lora_|adapter", re.IGNORECASE)),
    ("norms", regex(r"norm|(?:^|\.)ln_?[\df]|layer_?norm", re.IGNORECASE)),
    ("embeddings", regex(r"embed|wte|wpe", re.IGNORECASE)),
    ("head", regex(r"lm_head|output_layer|(?:^|\.)(?:head|v_head|score|output)\.", re.IGNORECASE)),
    ("experts", regex(r"expert|router|mlp\.gate\.", re.IGNORECASE)),
    ("attention", regex(r"att|[qkvo]_proj|qkv", re.IGNORECASE)),
    ("MLPs", regex(r"mlp|ffn|feed_forward|fc\d|gate_proj|up_proj|down_proj", re.IGNORECASE)),
)
#: Weights that have an optimizer, and a bound, of their own.
_VALUES = regex(r"(?:^|[._])(?:v_head|value_head|critic|value_model)(?:[._]|$)")
_BLOCK = regex(r"(?:^|\.)(?:layers|h|blocks?|layer)\.(\d+)\.")


class _Gradient(Struct):
    """One weight's gradient of a step."""

    square: float
    rank: int | None
    size: int
    dims: int
    ref: TensorRef


class _Norms(Struct):
    """A step's gradients by name, and the norm that is logged of them."""

    step: int
    held: dict[str, _Gradient]
    logged: float
    record: Record
    place: Where

    def of(self, names: set[str]) -> float:
        return math.sqrt(sum(self.held[name].square for name in names))


@rule("D163", "the gradient's norm is of a part of the gradients", link="gradient", scope="case", lasts=True,
      explains=("L02", "L15", "L37", "L39"),
      source="parameter groups of which the first alone is clipped; huggingface/transformers#614")  # fmt: skip
def of_a_part(case: Case) -> Finding | None:
    """The norm of all recorded gradients of an update is more than the logged grad_norm (by 1 % and more, in 3 steps
    and more, all there are), and that of some kinds of weights (attention, MLPs, norms, embeddings, head, adapters,
    experts), of matrices alone, of some layers or of one rank's weights is the logged one, to 1e-4 in every step; or
    that part has been clipped to it, to the stated bound, in every step. A warning; an error where weights recorded
    step by step move by plain SGD, that part by as much less of its gradient as clipping leaves, the others by all of
    theirs. Worth knowing where nothing is to be clipped, or the rest is a value head or a critic, which is clipped by
    itself as a rule. Nothing where gradients of weights that move are not recorded, where another norm is logged that
    is the rest's, or where several updates share a step and a norm.
    """
    steps = list(_steps(case))
    skip_if(
        len(steps) < STEPS, f"needs the gradients of {STEPS} steps, and the logged norm: rldbg record --gradients ."
    )
    names = set(steps[0].held)
    if any(set(one.held) != names for one in steps):
        raise Skip("the recorded gradients are of other weights from step to step")
    bound = largest_norm(case.algorithm)
    clips = bound is not None and 0 < bound < 1e6
    if any(one.of(names) <= (1 + MORE) * one.logged for one in steps):
        return None
    for what, part in _parts(steps[0].held):
        is_before = all(abs(one.of(part) - one.logged) <= NEAR * one.logged for one in steps)
        is_after = not is_before and clips and all(_is_clipped(one.of(part), one.logged, bound or 1.0) for one in steps)
        if not is_before and not is_after:
            continue
        rest = names - part
        if _unrecorded(case, names) or _is_logged(case, steps, rest):
            return None
        # Weights are those of a step: they tell of its update where it has one.
        single = len({one.step for one in steps}) == len(steps)
        told = (
            _by_updates(case, steps, part, rest, bound) if clips and bound is not None and is_before and single else []
        )
        first = steps[0]
        # A critic's weights are clipped by themselves, and that norm need not be logged.
        own = not told and not is_after and all(map(_VALUES.search, rest))
        return finding(
            "info"
            if own
            else "error"
            if clips and (is_after or told)
            else "warning"
            if clips or bound is None
            else "info",
            f"the gradient's norm is of {what} alone, {len(part)} of {len(names)} weights, in all {len(steps)} steps: "
            f"logged is {first.logged:.4g}, and all recorded gradients have {first.of(names):.4g}"
            + (f"; the others are not clipped to {bound:g}" if clips and not own else ""),
            first.place,
            shown("norm of all recorded gradients", first.of(names), f"{first.logged:.4g}", first.record.path.name),
            shown(f"norm of {what}" + (", clipped" if is_after else ""), first.of(part)),
            shown("norm of the others", first.of(rest), None, listed(sorted(rest), 3)),
            *([shown("stated bound (max_grad_norm)", bound)] if clips else []),
            *told,
            cause="clipping is given a part of the parameters (the first parameter group, one module, the unsharded "
            "ones, one rank's): the others' updates are as large as their gradients, whatever the bound"
            if clips or bound is None
            else "the norm is taken of a part of the parameters; the run states no bound that they are clipped at",
            next_step="clip_grad_norm_ over the parameters of all groups: [p for group in optimizer.param_groups for p "
            "in group['params']]",
            steps=sorted({one.step for one in steps}),
        )
    return None


def _is_clipped(norm: float, logged: float, bound: float) -> bool:
    """Whether a norm is what clipping leaves of the logged one, as torch clips."""
    left = logged * min(1.0, bound / (logged + 1e-6))
    return abs(norm - left) <= NEAR * left


#: The record of an update within its step: the rank's micro-batch that it is recorded with, epoch and mini-batch.
_Update = tuple[int | None, int | None, int | None]


def _update(record: Record) -> _Update:
    return record.key.micro, record.key.epoch, record.key.minibatch


def _steps(case: Case) -> Iterator[_Norms]:
    """Every update's float32 gradients and its logged norm. Where a step has several, the norm is one that is recorded
    with the gradients: the step's own is of any of them.
    """
    by_update: dict[int, dict[_Update, list[Record]]] = {}
    logged: dict[int, list[Record]] = {}
    for record in case.records():
        key = record.key
        if key.step is None or key.role == "critic":
            continue
        if key.stage == "gradient":
            by_update.setdefault(key.step, {}).setdefault(_update(record), []).append(record)
        elif key.stage in ("training_metrics", "optimizer", "loss"):
            logged.setdefault(key.step, []).append(record)
    by_step: list[tuple[int, list[Record], list[Record]]] = []
    for step, updates in sorted(by_update.items()):
        for own, records in updates.items():
            beside = [
                one for one in logged.get(step, ())
                if _update(one) == own or (len(updates) == 1 and one.key.micro is None)
            ]  # fmt: skip
            by_step.append((step, records, beside))
    if sum(stored_bytes(record.path) for _, records, _ in by_step for record in records) > MOST:
        return
    for step, records, beside in by_step:
        held: dict[str, _Gradient] = {}
        twins: dict[tuple[float, int], str] = {}
        for record in records:
            for ref in record.tensors():
                if ref.is_text or not ref.shape or not ref.is_readable or ref.dtype != "float32":
                    continue
                square = float(np.square(np.asarray(pages.array(ref), dtype=np.float64)).sum())
                name = ref.name.removeprefix("grad.")
                # Tied weights have one gradient, under two names.
                if square and twins.setdefault((square, ref.numel), name) != name:
                    continue
                one = _Gradient(square, record.key.rank, ref.numel, len(ref.shape), ref)
                known = held.setdefault(name, one)
                if known is not one and abs(known.square - square) > 1e-6 * square:
                    return  # shards, ranks' own or several updates: their norm is no sum of these
        norm = next((one for one in _norm_of([*records, *beside]) if one > 0), None)
        if held and norm is not None and all(math.isfinite(one.square) for one in held.values()):
            yield _Norms(step, held, norm, records[0], Where.of(records[0], next(iter(held))))


def _norm_of(records: list[Record]) -> Iterator[float]:
    for record in records:
        for ref in record.tensors():
            if ref.canonical == "grad_norm" and ref.numel == 1 and ref.is_readable and not ref.is_text:
                yield float(pages.array(ref).reshape(-1)[0])


def _parts(held: dict[str, _Gradient]) -> Iterator[tuple[str, set[str]]]:
    """Parts of the weights that a trainer may take for all, none of them all; the plainest first."""
    every, seen = set(held), set[frozenset[str]]()
    for what, part in _every_part(held, every):
        if part and part != every and frozenset(part) not in seen:
            seen.add(frozenset(part))
            yield what, part


def _every_part(held: dict[str, _Gradient], every: set[str]) -> Iterator[tuple[str, set[str]]]:
    def those(holds: Callable[[str], bool]) -> set[str]:
        return {name for name in every if holds(name)}

    kinds: dict[str, set[str]] = {}
    for name in every:
        kind = next((kind for kind, pattern in _KINDS if pattern.search(name)), "other weights")
        kinds.setdefault(kind, set()).add(name)
    order = [kind for kind, _ in _KINDS[::-1]] + ["other weights"]
    known = [kind for kind in order if kind in kinds]
    for count in range(1, len(known)):
        for some in combinations(known, count):
            yield " and ".join(some), set().union(*(kinds[kind] for kind in some))
    yield "the matrices", those(lambda name: held[name].dims > 1)
    yield (
        "the matrices, embeddings and head left out,",
        those(
            lambda name: (
                held[name].dims > 1 and name not in kinds.get("embeddings", ()) and name not in kinds.get("head", ())
            )
        ),
    )
    yield "the vectors", those(lambda name: held[name].dims == 1)
    yield "the weights without a bias", those(lambda name: not name.endswith("bias"))
    for rank in sorted({one.rank for one in held.values() if one.rank is not None}):
        yield f"rank {rank}'s weights", those(lambda name, rank=rank: held[name].rank == rank)  # type: ignore[misc]
    block = {name: int(found[1]) for name in every if (found := _BLOCK.search(name)) is not None}
    layers = sorted(set(block.values()))
    if layers:
        yield "the layers", set(block)
        yield "what is not in the layers", every - set(block)
    for at in layers:
        yield f"layer {at}", those(lambda name, at=at: block.get(name) == at)  # type: ignore[misc]
        yield f"all but layer {at}", those(lambda name, at=at: block.get(name) != at)  # type: ignore[misc]
        yield f"the layers up to {at}", those(lambda name, at=at: block.get(name, at + 1) <= at)  # type: ignore[misc]
        yield f"the layers from {at} on", those(lambda name, at=at: block.get(name, -1) >= at)  # type: ignore[misc]
    for name in sorted(every) if len(every) <= 64 else ():
        yield f"all but {name}", every - {name}


def _weights(case: Case) -> dict[int, dict[str, TensorRef]]:
    """The policy's recorded weights of a whole step, by step and name."""
    found: dict[int, dict[str, TensorRef]] = {}
    for record in case.records():
        if record.key.stage == "param" and record.key.step is not None and record.key.role != "critic":
            refs = {ref.name: ref for ref in record.tensors() if ref.is_readable and ref.shape and not ref.is_text}
            found.setdefault(record.key.step, {}).update(refs)
    return dict(sorted(found.items()))


def _unrecorded(case: Case, names: set[str]) -> bool:
    """Whether a weight moves whose gradient is not recorded, and that is no other name of one whose is."""
    weights = _weights(case)
    if len(weights) < 2:
        return False
    first, last = weights[min(weights)], weights[max(weights)]
    for name in (first.keys() & last.keys()) - names:
        before, after = pages.array(first[name]), pages.array(last[name])
        tied = any(
            first[one].shape == first[name].shape and np.array_equal(pages.array(first[one]), before)
            for one in names & first.keys()
        )
        if not tied and not np.array_equal(before, after):
            return True
    return False


def _is_logged(case: Case, steps: list[_Norms], rest: set[str]) -> bool:
    """Whether a norm of the rest is logged beside: each part is then clipped by itself."""
    for one in steps:
        wanted = one.of(rest)
        near = [
            ref for record in case.records()
            if record.key.step == one.step and record.key.stage in ("training_metrics", "optimizer", "gradient")
            for ref in record.tensors()
            if "norm" in ref.name and ref.numel == 1 and not ref.is_text and ref.is_readable
            and abs(float(pages.array(ref).reshape(-1)[0]) - wanted) <= 10 * NEAR * wanted
        ]  # fmt: skip
        if not near:
            return False
    return True


def _by_updates(case: Case, steps: list[_Norms], part: set[str], rest: set[str], bound: float) -> list[Evidence]:
    """What recorded weights tell: by how much of their gradients both move, where they move along these alone, in
    updates whose logged norm is above the bound.
    """
    weights, ratios, off = _weights(case), list[float](), list[float]()
    for one in steps:
        if one.logged <= (1 + 10 * MORE) * bound:
            continue
        for before, after in ((one.step, one.step + 1), (one.step - 1, one.step)):
            if before not in weights or after not in weights:
                continue
            moved = [_along(one, weights[before], weights[after], names) for names in (part, rest)]
            if moved[0] and moved[1]:
                ratios.append(moved[1] / moved[0])
                off.append(abs(ratios[-1] * bound / one.logged - 1))
                break
    # Another rate of a group is one factor in all updates; what clipping takes from one part is another in each.
    if len(ratios) < STEPS or max(off) > MORE:
        return []
    return [
        shown(
            "how many times as much of their gradients the others move by, at least", min(ratios), "1",
            f"weights of {len(ratios)} updates, which move along their gradients alone",
        )
    ]  # fmt: skip


def _along(
    one: _Norms, before: dict[str, TensorRef], after: dict[str, TensorRef], names: set[str]
) -> float | None:  # fmt: skip
    """How much of their gradients these weights move by; None where they do not move along them."""
    if not names <= before.keys() & after.keys():
        return None
    order = sorted(names)
    step = np.concatenate([
        (np.asarray(pages.array(before[name]), np.float64) - np.asarray(pages.array(after[name]), np.float64)).ravel()
        for name in order
    ])  # fmt: skip
    gradient = np.concatenate([np.asarray(pages.array(one.held[name].ref), np.float64).ravel() for name in order])
    if step.size != gradient.size or not step.any():
        return None
    by = float(step @ gradient) / float(gradient @ gradient)
    left = float(np.linalg.norm(step - by * gradient))
    return by if by > 0 and left <= 1e-2 * float(np.linalg.norm(step)) else None
