"""Where each part of the checkpoint lies in a parameter of the engine: fused, stacked, cut for tensor parallelism."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from replay_core.engine_names import VOCABULARY, Piece
from replay_core.weight_sync.state import Values, WeightState

Span = tuple[int, int]
#: So many rows the trainer's vocabulary is longer than the engine's at most: less than any whole shard of a real one.
_TRAINERS_PADDING = 1024


class Block(Struct, frozen=True):
    """A part of a checkpoint's parameter and its place in the engine's.

    cut: (axis, start, stop) of the source, None for all of it. rows: (start, stop) along axis 0 of the destination,
    or of the expert's matrix where there is an `expert`. shards: into how many the source is cut, and along which axis.
    """

    piece: Piece
    cut: tuple[int, int, int] | None
    rows: Span
    expert: int | None = None
    shards: tuple[int, int] | None = None

    def of(self, state: WeightState) -> Values | None:
        """The block as a state has it; None where the state has no values of such a parameter, or another shape."""
        if not state.has(self.piece.source) or not state.tensors[self.piece.source].is_readable:
            return None
        values = state.values(self.piece.source)
        if self.piece.of_stack and self.piece.expert is not None:
            if self.piece.expert >= len(values):
                return None
            values = values[self.piece.expert]
        if self.cut is None:
            return values
        axis, start, stop = self.cut
        if axis >= values.ndim or stop > values.shape[axis]:
            return None
        return values[(slice(None),) * axis + (slice(start, stop),)]

    def inside(self, destination: Values) -> Values:
        """The same place of the engine's parameter."""
        values = destination if self.expert is None else destination[self.expert]
        return values[self.rows[0] : self.rows[1]] if values.ndim else values

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether a parameter of that shape has this place."""
        inner = shape if self.expert is None else shape[1:]
        return (self.expert is None or (len(shape) == 3 and self.expert < shape[0])) and (
            not inner or self.rows[1] <= inner[0]
        )

    def of_shard(self, number: int) -> Block:
        """The block that another shard would hold."""
        assert self.cut is not None
        axis, start, stop = self.cut
        return replace(self, cut=(axis, number * (stop - start), (number + 1) * (stop - start)))


class Layout(Struct, frozen=True):
    """How a destination is made: its blocks, and the rows of padding behind them. `why` says what does not fit."""

    blocks: tuple[Block, ...]
    padding: int = 0
    why: str | None = None


def laid_out(
    name: str, shape: Sequence[int], made_of: Sequence[Piece], sender: WeightState, parallel: int, shard: int
) -> Layout:
    """The blocks of an engine's parameter of that shape, one of `parallel` shards."""
    shapes = [_piece_shape(piece, sender) for piece in made_of]
    shape = tuple(shape)
    if len(made_of) > 1 and made_of[0].expert is not None:
        return _stack(shape, made_of, shapes, shard)
    if len(made_of) > 1:
        return _fused(shape, made_of, shapes, parallel, shard)
    return _direct(name, shape, made_of[0], shapes[0], parallel, shard)


def _piece_shape(piece: Piece, sender: WeightState) -> tuple[int, ...]:
    shape = sender.shape(piece.source)
    return shape[1:] if piece.of_stack else shape


def _direct(
    name: str, shape: tuple[int, ...], piece: Piece, source: tuple[int, ...], parallel: int, shard: int
) -> Layout:
    rows = shape[0] if shape else 1
    if shape == source or (len(shape) == 2 and shape == source[::-1]):
        return Layout((Block(piece, None, (0, rows)),))
    if len(shape) == len(source) and VOCABULARY.fullmatch(name) and shape[1:] == source[1:]:
        start = shard * rows
        # The trainer's may be padded, too (Megatron: to a multiple of 128 for each of its own ranks).
        if (rows > source[0] or rows * parallel > source[0] - _TRAINERS_PADDING) and start < source[0]:
            stop = min(start + rows, source[0])
            cut = None if (start, stop) == (0, source[0]) else (0, start, stop)
            return Layout((Block(piece, cut, (0, stop - start)),), rows - (stop - start))
    axis = _cut_axis(shape, source)
    if axis is None:
        return _misfit(shape, [source])
    count = source[axis] // shape[axis]
    length, at = shape[axis], shard % count
    return Layout((Block(piece, (axis, at * length, (at + 1) * length), (0, rows), None, (count, axis)),))


def _cut_axis(shape: tuple[int, ...], source: tuple[int, ...]) -> int | None:
    """The one axis along which the source is a whole number of times as long."""
    if len(shape) != len(source):
        return None
    unlike = [axis for axis, (one, whole) in enumerate(zip(shape, source, strict=True)) if one != whole]
    if len(unlike) != 1:
        return None
    one, whole = shape[unlike[0]], source[unlike[0]]
    return unlike[0] if one and whole % one == 0 else None


def _misfit(shape: tuple[int, ...], sources: Sequence[tuple[int, ...]]) -> Layout:
    return Layout((), why=f"{list(shape)} is not made of {' + '.join(str(list(one)) for one in sources)}")


def _fused(
    shape: tuple[int, ...], made_of: Sequence[Piece], shapes: Sequence[tuple[int, ...]], parallel: int, shard: int
) -> Layout:
    if any(one[1:] != shape[1:] for one in shapes):
        return _misfit(shape, shapes)
    rows = [one[0] for one in shapes]
    counts = _fused_counts(shape[0], rows, parallel)
    if counts is None:
        return _misfit(shape, shapes)
    # Fewer key heads than ranks: neighbours share one (vLLM's num_kv_head_replicas).
    ranks = max(counts)
    blocks, start = [], 0
    for piece, whole, count in zip(made_of, rows, counts, strict=True):
        length, at = whole // count, shard % ranks * count // ranks
        cut = None if count == 1 else (0, at * length, (at + 1) * length)
        blocks.append(Block(piece, cut, (start, start + length), None, (count, 0) if count > 1 else None))
        start += length
    return Layout(tuple(blocks))


def _fused_counts(total: int, rows: Sequence[int], parallel: int) -> list[int] | None:
    """Into how many shards each part is cut, so that their rows add up; `parallel` is tried first."""
    if sum(rows) == total:
        return [1] * len(rows)
    for ranks in dict.fromkeys((parallel, *range(2, 129))):
        if ranks < 2 or rows[0] % ranks:
            continue
        rest = total - rows[0] // ranks
        if len(rows) == 3 and rows[1] == rows[2] and rest > 0 and rest % 2 == 0:
            each = rest // 2
            if rows[1] % each == 0 and ranks % (rows[1] // each) == 0:
                return [ranks, rows[1] // each, rows[2] // each]
        elif all(one % ranks == 0 for one in rows) and sum(rows) // ranks == total:
            return [ranks] * len(rows)
    return None


def _stack(shape: tuple[int, ...], made_of: Sequence[Piece], shapes: Sequence[tuple[int, ...]], shard: int) -> Layout:
    """[experts, rows, columns]; experts are cut over ranks, or each expert's matrix is."""
    per_expert = Counter(piece.expert for piece in made_of)[made_of[0].expert]
    experts = len(made_of) // per_expert
    held, each = shape[0], shapes[:per_expert]
    whole = (sum(one[0] for one in each), *each[0][1:])
    if experts % held or any(shapes[at : at + per_expert] != each for at in range(0, len(shapes), per_expert)):
        return _misfit(shape, [(experts, *whole)])
    first = shard % (experts // held) * held
    axis = None if shape[1:] == whole else _cut_axis(shape[1:], whole)
    if shape[1:] != whole and (axis is None or held != experts):
        return _misfit(shape, [(experts, *whole)])
    blocks = []
    for at, piece in enumerate(made_of):
        expert = at // per_expert
        if not first <= expert < first + held:
            continue
        rows = [_rows(one, whole, shape[1:], axis) for one in each]
        start = sum(rows[: at % per_expert])
        cut, shards = None, None
        if axis is not None:
            count = whole[axis] // shape[1:][axis]
            length = each[at % per_expert][axis] // count
            cut, shards = (axis, shard % count * length, (shard % count + 1) * length), (count, axis)
        blocks.append(Block(piece, cut, (start, start + rows[at % per_expert]), expert - first, shards))
    return Layout(tuple(blocks))


def _rows(one: tuple[int, ...], whole: tuple[int, ...], held: tuple[int, ...], axis: int | None) -> int:
    return one[0] if axis != 0 else one[0] * held[0] // whole[0]


def parallelism(shapes: dict[str, tuple[int, ...]], sender: WeightState) -> int:
    """Over how many ranks the engine's parameters are cut, as most of their shapes say; 1 where none is cut."""
    counts: Counter[int] = Counter()
    for name, shape in shapes.items():
        if sender.has(name) and not VOCABULARY.fullmatch(name) and 0 not in shape:
            axis = _cut_axis(shape, sender.shape(name))
            if axis is not None:
                counts[sender.shape(name)[axis] // shape[axis]] += 1
    return counts.most_common(1)[0][0] if counts else 1
