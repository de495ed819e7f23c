"""What else a block may hold: each suspect is a word, a sentence and the values the engine would have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct

from replay_core import pages
from replay_core.regexes import regex
from replay_core.weight_sync.blocks import Block
from replay_core.weight_sync.state import Values, WeightState

if TYPE_CHECKING:
    from replay_core.documents.weights import Arrival

_LAYER = regex(r"(?<![^.])layers\.(\d+)(?=\.)|(?<![^.])h\.(\d+)(?=\.)")
#: Coarser types a push may have gone through, finest first.
_COARSER = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


class Suspect(Struct, frozen=True):
    """`values` are of the sender's dtype; None where the suspect does not apply after all."""

    arrival: Arrival
    what: str
    values: Callable[[], Values | None]


class Known(Struct, frozen=True):
    """What the user gave to explain with: the trainer's state, the engine's before the push, other steps."""

    sender: WeightState
    before: WeightState | None = None
    older: tuple[WeightState, ...] = ()

    def earlier(self, name: str, block: Block) -> Values | None:
        """What a block of a destination held before the push; None where that is not known.

        `before` may be in the trainer's names or in the engine's own.
        """
        if self.before is None:
            return None
        values = block.of(self.before)
        if values is None and self.before.has(name) and self.before.tensors[name].is_readable:
            whole = self.before.values(name)
            values = block.inside(whole) if block.fits(whole.shape) else None
        return values


def suspects(name: str, block: Block, beside: Sequence[Block], known: Known, dtype: str) -> Iterator[Suspect]:
    """Of one block of a destination of that dtype, likeliest first. `beside` are the destination's blocks."""
    sender = known.sender
    if known.before is not None:
        yield Suspect("untouched", "what it held before the push", lambda: known.earlier(name, block))
    for state in known.older:
        yield Suspect("older", f"the weights of {state.label}", lambda state=state: block.of(state))  # type: ignore[misc]
    yield Suspect("zero", "zeros", lambda: _zeros(block.of(sender)))
    for other in beside:
        if other is not block and _is_neighbour(block, other):
            arrival: Arrival = "swapped" if other.expert == block.expert else "other expert"
            yield Suspect(arrival, f"the values of {other.piece.label}", lambda other=other: other.of(sender))  # type: ignore[misc]
    if block.shards is not None and block.cut is not None:
        here = block.cut[1] // max(1, block.cut[2] - block.cut[1])
        for number in range(block.shards[0]):
            if number != here:
                yield Suspect(
                    "other shard",
                    f"shard {number} of {block.shards[0]}, in place of shard {here}",
                    lambda number=number: block.of_shard(number).of(sender),  # type: ignore[misc]
                )
    yield Suspect("transposed", "the transposed values", lambda: _transposed(block.of(sender)))
    ways = dict.fromkeys((sender.tensors[block.piece.source].dtype, dtype))
    for coarse in _COARSER:
        for way in ways:
            if coarse != way:
                yield Suspect(
                    "rounded",
                    f"the values rounded to {coarse} on the way",
                    lambda way=way, coarse=coarse: _rounded(block.of(sender), way, coarse),  # type: ignore[misc]
                )


def layers_beside(block: Block, sender: WeightState) -> Iterator[Suspect]:
    """The same parameter of other layers."""
    found = _LAYER.search(block.piece.source)
    if found is None:
        return
    at = found.span(1) if found.group(1) is not None else found.span(2)
    for number in range(_layers(sender)):
        name = f"{block.piece.source[: at[0]]}{number}{block.piece.source[at[1] :]}"
        if name != block.piece.source and sender.has(name):
            piece = block.piece.__class__(block.piece.label, name, block.piece.expert, block.piece.of_stack)
            moved = Block(piece, block.cut, block.rows, block.expert, block.shards)
            yield Suspect("other layer", f"the values of layer {number}", lambda moved=moved: moved.of(sender))  # type: ignore[misc]


def siblings(block: Block, sender: WeightState) -> Iterator[Suspect]:
    """Parameters of one module that are called alike and have one shape: k in the place of q, up in that of gate."""
    parts = block.piece.source.split(".")
    shape = sender.shape(block.piece.source)
    for name, ref in sender.tensors.items():
        others = name.split(".")
        apart = [at for at, (one, other) in enumerate(zip(parts, others, strict=False)) if one != other]
        if len(others) != len(parts) or len(apart) != 1 or parts[apart[0]].isdigit() or ref.shape != shape:
            continue
        piece = block.piece.__class__(block.piece.label, name, block.piece.expert, block.piece.of_stack)
        moved = Block(piece, block.cut, block.rows, block.expert, block.shards)
        yield Suspect("swapped", f"the values of {name}", lambda moved=moved: moved.of(sender))  # type: ignore[misc]


def _layers(sender: WeightState) -> int:
    numbers = [int(found.group(1) or found.group(2)) for name in sender.tensors if (found := _LAYER.search(name))]
    return max(numbers, default=-1) + 1


def _is_neighbour(block: Block, other: Block) -> bool:
    """Another part of the same expert, or the same part of another."""
    if block.expert == other.expert:
        return True
    return block.rows == other.rows


def _zeros(values: Values | None) -> Values | None:
    return None if values is None else np.zeros_like(values)


def _transposed(values: Values | None) -> Values | None:
    return values.T if values is not None and values.ndim == 2 else None


def _rounded(values: Values | None, *ways: str) -> Values | None:
    for dtype in ways:
        values = None if values is None else cast(values, dtype)
    return values


def cast(values: Values, dtype: str) -> Values:
    """Values in another dtype, rounded to nearest even as torch does."""
    if values.dtype == pages.numpy_dtype(dtype):
        return values
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(pages.numpy_dtype(dtype))
