"""Tensors whose files name their dimensions (`t num_heads[tp] head_dim`), laid alike: in one order, fused where the
other run's are, without those of length 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from math import prod
from typing import NamedTuple

import numpy as np

from replay_core import pages
from replay_core.compare.pairing.dims import Dim, Dims, parsed, written
from replay_core.compare.pairing.micro_batch_pair import MicroBatchPair, Side
from replay_core.dtypes import ITEMSIZE
from replay_core.errors import DumpError
from replay_core.records import FileBytes, Inline, TensorRef

#: Elements of a tensor that is copied because no strides of its file say what is asked of it.
_MOST_COPIED = 1 << 24


class Turn(NamedTuple):
    """How a tensor is laid otherwise: of each dimension it will have, which of its own; and what it is then."""

    own: tuple[tuple[int, ...], ...]
    dims: Dims


def lay_alike(micro_pairs: list[MicroBatchPair]) -> list[str]:
    """Lay the stated tensors of a step as the first run has them, wherever both runs' files name the same dimensions in
    another way. What to say of those of which they name others.
    """
    notes: list[str] = []
    places: dict[tuple[str, str], tuple[set[str], set[str]]] = {}
    for micro_pair in micro_pairs:
        for number, side in enumerate((micro_pair.a, micro_pair.b)):
            for place, (_, ref) in side.tensors.items():
                if ref.stated is not None:
                    places.setdefault(place, (set(), set()))[number].add(ref.stated.dims)
    for place, (of_a, of_b) in places.items():
        if len(of_a) != 1 or len(of_b) != 1 or of_a == of_b:
            continue
        texts = next(iter(of_a)), next(iter(of_b))
        try:
            _lay(micro_pairs, place, laid_alike(*texts))
        except DumpError as error:
            notes.append(f"{place[0]}: {error.message}; its dimensions are taken as they lie")
    return notes


def _lay(micro_pairs: list[MicroBatchPair], place: tuple[str, str], turned: tuple[Turn | None, Turn | None]) -> None:
    made: list[tuple[Side, TensorRef]] = []
    for micro_pair in micro_pairs:
        for side, turn in zip((micro_pair.a, micro_pair.b), turned, strict=True):
            if turn is not None and place in side.tensors:
                made.append((side, laid(side.tensors[place][1], turn)))
    for side, ref in made:
        side.exchange(place, ref)


@cache
def laid_alike(a: str, b: str) -> tuple[Turn | None, Turn | None]:
    """How the tensors of either statement are laid, that both have the same dimensions; None for one that has them.

    Raises:
        DumpError: the two name other dimensions, or fuse them so that one has no part of the other.
    """
    of_a, of_b = parsed(a), parsed(b)
    names_a, names_b = (tuple(name for dim in _long(dims) for name in dim.names) for dims in (of_a, of_b))
    if set(names_a) != set(names_b):
        raise DumpError(f"dims {a!r} of a and {b!r} of b name other dimensions")
    groups = _groups(of_a, of_b)
    ordered = tuple(dict.fromkeys(groups[name] for name in names_a))
    if ordered == tuple(dim.names for dim in of_a.dims) == tuple(dim.names for dim in of_b.dims):
        return None, None
    first, second = (_turn(dims, ordered) for dims in (of_a, of_b))
    return first, second


def _long(dims: Dims) -> Iterator[Dim]:
    return (dim for dim in dims.dims if dim.names != ("1",))


def _groups(a: Dims, b: Dims) -> dict[str, tuple[str, ...]]:
    """Of every name, the dimension it will be a part of."""
    found: dict[str, tuple[str, ...]] = {}
    for dim in sorted([*_long(a), *_long(b)], key=lambda dim: -len(dim.names)):
        for name in dim.names:
            if name in found and found[name] != dim.names and len(dim.names) > 1:
                raise DumpError(f"dims fuse {'*'.join(found[name])} in one run and {dim.name} in the other")
            found.setdefault(name, dim.names)
    return found


def _turn(dims: Dims, ordered: Sequence[tuple[str, ...]]) -> Turn | None:
    at = {dim.names: number for number, dim in enumerate(dims.dims)}
    own, made = [], []
    for names in ordered:
        parts = [at[names]] if names in at else [at[(name,)] for name in names]
        first = dims.dims[parts[0]]
        if any(dims.dims[part].cuts for part in parts[1:]):
            raise DumpError(f"dims: {'*'.join(names)} is cut within, where the other run has it as one")
        own.append(tuple(parts))
        made.append(Dim(names, first.cuts))
    if own == [(number,) for number in range(len(dims.dims))]:
        return None
    return Turn(tuple(own), dims._replace(dims=tuple(made)))


def laid(ref: TensorRef, turn: Turn) -> TensorRef:
    """The tensor laid so: where its strides say it, without a copy.

    Raises:
        DumpError: it has another number of dimensions, one that is not 1 where it is said to be, or is too large to be
            copied.
    """
    kept = {axis for axes in turn.own for axis in axes}
    dropped = [axis for axis in range(len(ref.shape)) if axis not in kept]
    if max(kept, default=-1) >= len(ref.shape) or any(ref.shape[axis] != 1 for axis in dropped):
        raise DumpError(f"dims name other dimensions than shape {list(ref.shape)} has")
    shape = tuple(prod(ref.shape[axis] for axis in axes) for axes in turn.own)
    stated = ref.stated and ref.stated._replace(dims=written(turn.dims))
    strides = _strides(ref, turn)
    if strides is not None and isinstance(where := ref.source, FileBytes):
        extent = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) if all(shape) else 0
        lies = replace(where, nbytes=extent * ITEMSIZE[ref.dtype], strides=strides)
        return ref.with_(shape=shape, source=lies, stated=stated, digest=None)
    if not ref.is_readable:
        return ref.with_(shape=shape, stated=stated)
    if ref.numel > _MOST_COPIED or ref.rows is not None or ref.is_text:
        raise DumpError(f"shape {list(ref.shape)} cannot be laid as the other run has it without a copy")
    turned = pages.array(ref).reshape(ref.shape).transpose([axis for axes in turn.own for axis in axes] + dropped)
    source = Inline(np.ascontiguousarray(turned).tobytes())
    return ref.with_(shape=shape, source=source, stated=stated, digest=None)


def _strides(ref: TensorRef, turn: Turn) -> tuple[int, ...] | None:
    """Elements from one to the next along each dimension it will have; None where no number says it."""
    if not isinstance(ref.source, FileBytes) or ref.rows is not None:
        return None
    own = ref.source.strides or tuple(prod(ref.shape[axis + 1 :]) for axis in range(len(ref.shape)))
    found = []
    for axes in turn.own:
        for before, after in pairwise(axes):
            if own[before] != own[after] * ref.shape[after]:
                return None
        found.append(own[axes[-1]])
    return tuple(found)
