"""A DTensor's shards put together along their placements, without a process group.

Every rank's file holds the same names; a name's local tensors lie along the mesh as the placements say.
They are laid end to end where they lie, nothing is copied until somebody reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any

from replay_core.dumps.boxes import laid_out
from replay_core.dumps.containers.torch_rebuild import SHARDED
from replay_core.dumps.peeking import class_of
from replay_core.records import Parts, Reduced, TensorRef, Unreadable

CLASS = "torch.distributed.tensor.DTensor"
_OLD_CLASS = "torch.distributed._tensor.api.DTensor"
MAX_RANKS = 1 << 16
#: A cut of what a later axis of the mesh has cut before: FSDP over tensor parallelism.
STRIDED = "_StridedShard"
UNEVEN = "a strided shard that is uneven, or whose factor is not the mesh's"
#: What ranks' tensors along an axis of the mesh are to be made into, by torch's word for it: each holds a part.
PARTIAL = {f"Partial({how})": how for how in ("sum", "avg", "max", "min")}


def is_dtensor(value: Any) -> bool:
    """Whether it is a rank's part of a tensor: a DTensor, or FSDP1's ShardedTensor."""
    return class_of(value) in (CLASS, _OLD_CLASS, SHARDED)


def holds_dtensor(tree: Any, depth: int = 0) -> bool:
    """Whether a DTensor is among the first levels of the tree."""
    if is_dtensor(tree):
        return True
    return isinstance(tree, dict) and depth < 4 and any(holds_dtensor(value, depth + 1) for value in tree.values())


def assembled(shards: Mapping[int, Any]) -> TensorRef:
    """The whole tensor from the DTensors of the ranks; unreadable, with the reason, where it cannot be had."""
    first = next(iter(shards.values()))
    if class_of(first) == SHARDED:
        return _of_sharded(shards)
    whole = _empty(first)
    for value in shards.values():
        local = value.get("local")
        if not isinstance(local, TensorRef) or not local.is_readable:
            return whole.with_(source=Unreadable("a shard without its local tensor"))
        if value.get("shape") != first.get("shape") or local.dtype != whole.dtype:
            return whole.with_(source=Unreadable("the shards are of different shapes or dtypes"))
    mesh, placements = _mesh_shape(first), _placements(first)
    if mesh is None or placements is None or len(mesh) != len(placements):
        return whole.with_(source=Unreadable("a DTensor whose mesh or placements are in no form that is known"))
    odd = next((kind for kind, _ in placements if kind not in ("Shard", "Replicate", STRIDED, *PARTIAL)), None)
    if odd is not None:
        return whole.with_(source=Unreadable(f"placement {odd}: the shards are not slices of the tensor"))
    factors = [_attribute(placement, "split_factor") for placement in _spec(first)["placements"]]
    order = order_of_cuts(factors, whole.shape, placements, mesh)
    if order is None:
        return whole.with_(source=Unreadable(UNEVEN))
    placements = [("Shard" if kind == STRIDED else kind, dim) for kind, dim in placements]
    at: dict[tuple[int, ...], TensorRef] = {}
    for rank, value in shards.items():
        at.setdefault(_coordinate(value, rank, mesh), value["local"])
    missing = [place for place in _needed(mesh, placements) if _face(at, place, placements) is None]
    if missing:
        return whole.with_(source=Unreadable(f"the shard at mesh {list(missing[0])} is missing"))
    built = _built(at, {}, order, mesh, placements)
    if built is None or built.shape != whole.shape:
        found = list(built.shape) if built is not None else "shards that do not fit each other"
        return whole.with_(source=Unreadable(f"the shards make up {found}, the tensor is {list(whole.shape)}"))
    return built.with_(copies=_copies(at, order, mesh, placements))


def _of_sharded(shards: Mapping[int, Any]) -> TensorRef:
    """A ShardedTensor from the ranks' shards, each of which says where it begins."""
    first = next(iter(shards.values()))
    pieces: dict[tuple[int, ...], TensorRef] = {}
    for value in shards.values():
        for shard in value.get("shards") or ():
            state = _instance_state(shard)
            start = _instance_state(state.get("metadata")).get("shard_offsets")
            piece = state.get("tensor")
            if (
                not isinstance(piece, TensorRef)
                or not isinstance(start, list)
                or not all(type(n) is int for n in start)
            ):
                return TensorRef(
                    "", "none", tuple(first["shape"]), Unreadable("a shard without its tensor or its place")
                )
            pieces[tuple(start)] = piece
    return laid_out(pieces, first["shape"], str(first["dtype"]))


def _instance_state(value: Any) -> dict[str, Any]:
    state = value.get("state") if isinstance(value, dict) else None
    if isinstance(state, (tuple, list)) and len(state) == 2:
        state = state[1]  # a class with slots: (attributes, slots)
    return state if isinstance(state, dict) else {}


def laid_together(
    at: Mapping[tuple[int, ...], TensorRef],
    mesh: Sequence[int],
    placements: Sequence[tuple[str, int]],
    shape: Sequence[int],
    order: Sequence[int] | None = (),
) -> TensorRef:
    """The whole tensor from local ones by their place in the mesh; unreadable, with the reason, where it cannot be had.

    placements: (Shard, Replicate or one of PARTIAL, dimension) per axis of the mesh. order: of its axes, in which they
    cut the tensor, the mesh's own if empty; None where it is not known.
    """
    first = next(iter(at.values()))
    empty = TensorRef("", first.dtype, tuple(shape), Unreadable(""))
    odd = next((kind for kind, _ in placements if kind not in ("Shard", "Replicate", *PARTIAL)), None)
    if odd is not None or len(mesh) != len(placements):
        return empty.with_(source=Unreadable(f"placement {odd}: the shards are not slices of the tensor"))
    if order is None:
        return empty.with_(source=Unreadable(UNEVEN))
    missing = [place for place in _needed(mesh, placements) if _face(at, place, placements) is None]
    if missing:
        return empty.with_(source=Unreadable(f"the shard at mesh {list(missing[0])} is missing"))
    built = _built(at, {}, order or range(len(mesh)), mesh, placements)
    if built is None or built.shape != tuple(shape):
        found = list(built.shape) if built is not None else "shards that do not fit each other"
        return empty.with_(source=Unreadable(f"the shards make up {found}, the tensor is {list(shape)}"))
    return built


def _needed(mesh: Sequence[int], placements: Sequence[tuple[str, int]]) -> Iterator[tuple[int, ...]]:
    """The places of the mesh whose local tensors make the whole: of copies the first."""
    return product(
        *(range(1 if kind == "Replicate" else size) for size, (kind, _) in zip(mesh, placements, strict=True))
    )


def _copies(
    at: Mapping[tuple[int, ...], TensorRef],
    order: Sequence[int],
    mesh: Sequence[int],
    placements: Sequence[tuple[str, int]],
) -> tuple[TensorRef, ...]:
    """The tensor as the other ranks along replicated axes hold it, of those whose shards are all there."""
    found: list[TensorRef] = []
    held = [range(size if kind == "Replicate" else 1) for size, (kind, _) in zip(mesh, placements, strict=True)]
    for copy in product(*held):
        shards = [place for place in at if len(place) == len(mesh) and _is_of(place, copy, placements)]
        wanted = prod(size for size, (kind, _) in zip(mesh, placements, strict=True) if kind != "Replicate")
        if any(copy) and len(shards) == wanted:
            built = _built({_first_of(place, placements): at[place] for place in shards}, {}, order, mesh, placements)
            if built is not None:
                found.append(built)
    return tuple(found)


def _is_of(place: Sequence[int], copy: Sequence[int], placements: Sequence[tuple[str, int]]) -> bool:
    along = zip(place, copy, placements, strict=True)
    return all(here == number for here, number, (kind, _) in along if kind == "Replicate")


def _first_of(place: Sequence[int], placements: Sequence[tuple[str, int]]) -> tuple[int, ...]:
    """The place of a shard among those of the first copy."""
    return tuple(0 if kind == "Replicate" else here for here, (kind, _) in zip(place, placements, strict=True))


def order_of_cuts(
    factors: Sequence[Any], shape: Sequence[int], placements: Sequence[tuple[str, int]], mesh: Sequence[int]
) -> list[int] | None:
    """Mesh axes in the order they cut the tensor; None where a strided shard says another order than the mesh's.

    FSDP cuts what tensor parallelism has cut already, though its axis stands before: `_StridedShard(dim, factor)` is
    a cut after the later axes of the same dimension, `factor` how many pieces those made. Uneven ones are left:
    torch and FSDP cut them differently. factors: of every axis, of what is no strided shard any.
    """
    late: list[int] = []
    for axis, (kind, dim) in enumerate(placements):
        if kind != STRIDED:
            continue
        later = [other for other in range(axis + 1, len(mesh)) if placements[other] == ("Shard", dim)]
        factor = prod(mesh[other] for other in later)
        if factors[axis] != factor or not -len(shape) <= dim < len(shape) or shape[dim] % (factor * mesh[axis]):
            return None
        late.insert(0, axis)
    return [axis for axis in range(len(mesh)) if axis not in late] + late


def _attribute(placement: Any, name: str) -> Any:
    state = placement.get("state") if isinstance(placement, dict) else None
    if isinstance(state, (tuple, list)) and len(state) == 2:
        state = state[1]  # a class with slots: (attributes, slots)
    return state.get(name) if isinstance(state, dict) else None


def _empty(value: dict[str, Any]) -> TensorRef:
    local, shape = value.get("local"), value.get("shape")
    size = tuple(shape) if isinstance(shape, (tuple, list)) and all(type(n) is int for n in shape) else ()
    return TensorRef("", local.dtype if isinstance(local, TensorRef) else "none", size, Unreadable(""))


def _spec(value: dict[str, Any]) -> dict[str, Any]:
    spec = value.get("spec")
    state = spec.get("state") if isinstance(spec, dict) else None
    return state if isinstance(state, dict) else {}


def _mesh(value: dict[str, Any]) -> dict[str, Any]:
    mesh = _spec(value).get("mesh")
    state = mesh.get("state") if isinstance(mesh, dict) else None
    return state if isinstance(state, dict) else {}


def _mesh_shape(value: dict[str, Any]) -> tuple[int, ...] | None:
    """Before torch 2.10 the mesh is a tensor of ranks, then a layout of strides, then a layout of axes."""
    state = _mesh(value)
    ranks, layout = state.get("mesh", state.get("_mesh")), state.get("_layout")
    if isinstance(ranks, TensorRef):
        return ranks.shape if ranks.numel <= MAX_RANKS else None
    inner = layout.get("state") if isinstance(layout, dict) else None
    if not isinstance(inner, dict):
        args = layout.get("args") if isinstance(layout, dict) else None
        inner = {"shape": args[0]} if isinstance(args, tuple) and args else {}
    axes = inner.get("axes")
    if isinstance(axes, (tuple, list)):
        states = [axis.get("state") if isinstance(axis, dict) else None for axis in axes]
        sizes = [_size(state.get("shape")) if isinstance(state, dict) else 0 for state in states]
    else:
        shape = inner.get("shape")
        sizes = [_size(size) for size in shape] if isinstance(shape, (tuple, list)) else [_size(shape)]
    known = [size for size in sizes if size]
    return tuple(known) if known and len(known) == len(sizes) and prod(known) <= MAX_RANKS else None


def _size(shape: Any) -> int:
    """How many ranks one axis of a layout has: nested tuples multiply; 0 where it cannot be told."""
    if type(shape) is int:
        return shape if 0 < shape <= MAX_RANKS else 0
    return prod(_size(part) for part in shape) if isinstance(shape, (tuple, list)) and len(shape) < 64 else 0


def _placements(value: dict[str, Any]) -> list[tuple[str, int]] | None:
    """(kind, dimension) per mesh axis."""
    found = _spec(value).get("placements")
    if not isinstance(found, (tuple, list)):
        return None
    answer = []
    for placement in found:
        state = placement.get("state") if isinstance(placement, dict) else None
        args = placement.get("args") if isinstance(placement, dict) else None
        dim = state.get("dim") if isinstance(state, dict) else (args[0] if isinstance(args, tuple) and args else None)
        kind = class_of(placement).rpartition(".")[2]
        if kind == "Partial":
            how = _attribute(placement, "reduce_op") or (args[0] if isinstance(args, tuple) and args else "sum")
            kind = f"Partial({how})"
        answer.append((kind, dim if type(dim) is int else 0))
    return answer


def _coordinate(value: dict[str, Any], rank: int, mesh: Sequence[int]) -> tuple[int, ...]:
    said = _mesh(value).get("_coordinate_on_dim")
    if isinstance(said, (tuple, list)) and len(said) == len(mesh) and all(type(part) is int for part in said):
        return tuple(said)
    place: list[int] = []
    for size in reversed(mesh):
        place.insert(0, rank % size)
        rank //= size
    return tuple(place)


def _face(
    at: Mapping[tuple[int, ...], TensorRef], place: tuple[int, ...], placements: Sequence[tuple[str, int]]
) -> TensorRef | None:
    """The local tensor at a place; along a replicated axis any rank's will do."""
    if place in at:
        return at[place]
    return next(
        (
            local
            for known, local in at.items()
            if len(known) == len(place)
            and all(k == p or kind == "Replicate" for k, p, (kind, _) in zip(known, place, placements, strict=True))
        ),
        None,
    )


def _built(
    at: Mapping[tuple[int, ...], TensorRef],
    place: Mapping[int, int],
    order: Sequence[int],
    mesh: Sequence[int],
    placements: Sequence[tuple[str, int]],
) -> TensorRef | None:
    """Mesh axes from the last cut inwards: the first axis of the order cuts first, so its pieces are joined last."""
    if len(place) == len(mesh):
        return _face(at, tuple(place[axis] for axis in range(len(mesh))), placements)
    axis = order[len(place)]
    kind, dim = placements[axis]
    if kind == "Replicate":
        return _built(at, {**place, axis: 0}, order, mesh, placements)
    pieces = [_built(at, {**place, axis: number}, order, mesh, placements) for number in range(mesh[axis])]
    if kind in PARTIAL:
        every = tuple(piece for piece in pieces if piece is not None)
        if len(every) < len(pieces) or len({(piece.shape, piece.dtype) for piece in every}) != 1:
            return None
        return TensorRef("", every[0].dtype, every[0].shape, Reduced(every, PARTIAL[kind]))
    filled = [piece for piece in pieces if piece is not None and piece.numel]
    if not filled:
        return pieces[0]
    dim = dim + len(filled[0].shape) if dim < 0 else dim
    if any(len(piece.shape) <= dim or _rest(piece, dim) != _rest(filled[0], dim) for piece in filled):
        return None
    shape = list(filled[0].shape)
    shape[dim] = sum(piece.shape[dim] for piece in filled)
    return TensorRef("", filled[0].dtype, tuple(shape), Parts(tuple(filled), dim))


def _rest(ref: TensorRef, dim: int) -> tuple[int, ...]:
    return ref.shape[:dim] + ref.shape[dim + 1 :]
