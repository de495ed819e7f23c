"""A tensor of which the pieces are known by where in it they begin: ShardedTensors, distributed checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from replay_core.records import Parts, TensorRef, Unreadable

#: Where a piece begins in the whole, a number per axis -> the piece.
Pieces = Mapping[tuple[int, ...], TensorRef]


def laid_out(pieces: Pieces, shape: Sequence[int], dtype: str) -> TensorRef:
    """The whole tensor; unreadable, with the reason, where the pieces do not fill it. Nothing is copied."""
    whole = TensorRef("", dtype, tuple(shape), Unreadable(""))
    for start, piece in pieces.items():
        if len(start) != len(whole.shape) or len(piece.shape) != len(whole.shape):
            return whole.with_(source=Unreadable(f"a piece {list(piece.shape)} at {list(start)} of {list(shape)}"))
        if not piece.is_readable or piece.dtype != dtype:
            return whole.with_(source=Unreadable(f"the piece at {list(start)} is {piece.dtype} and not to be read"))
    built = _built(dict(pieces), whole.shape, (0,) * len(whole.shape), 0) if pieces else None
    return whole.with_(source=Unreadable("its pieces do not fill it")) if built is None else built


def _built(
    pieces: dict[tuple[int, ...], TensorRef], shape: Sequence[int], start: Sequence[int], axis: int
) -> TensorRef | None:
    """The box of `shape` that begins at `start`, cut along `axis` and later ones; None where pieces lack or overlap."""
    if len(pieces) == 1:
        ((at, piece),) = pieces.items()
        return piece if at == tuple(start) and piece.shape == tuple(shape) else None
    if axis == len(shape):
        return None
    by_cut: dict[int, dict[tuple[int, ...], TensorRef]] = {}
    for at, piece in pieces.items():
        by_cut.setdefault(at[axis], {})[at] = piece
    if len(by_cut) == 1:
        return _built(pieces, shape, start, axis + 1)
    parts, reached = [], start[axis]
    for cut, mine in sorted(by_cut.items()):
        length = next(iter(mine.values())).shape[axis]
        inner = [*shape[:axis], length, *shape[axis + 1 :]]
        part = _built(mine, inner, [*start[:axis], cut, *start[axis + 1 :]], axis + 1) if cut == reached else None
        if part is None:
            return None
        reached += length
        if length:
            parts.append(part)
    if reached != start[axis] + shape[axis] or not parts:
        return None
    return parts[0] if len(parts) == 1 else TensorRef("", parts[0].dtype, tuple(shape), Parts(tuple(parts), axis))
