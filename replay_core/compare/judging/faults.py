"""A fault between ranks: what it is, whose, and the sentence that says so."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from replay_core.compare.pairing.ranks import named

#: What input that nobody thought of may raise where a cause is looked for: the comparison stands without one.
UNEXPECTED = (ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, TypeError, ValueError)


class Fault(Struct, frozen=True):
    """What went wrong between ranks. factor: of a value that is a multiple of what it should be."""

    kind: str
    ranks: tuple[int, ...]
    sentence: str
    factor: float | None = None


def whose(ranks: Sequence[int]) -> str:
    """`rank 1`, `ranks 0 and 1`."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {named(ranks)}"


def is_open(fault: Fault | None) -> bool:
    """Whether a cause is still looked for: none is known, or no more than that ranks hold other values."""
    return fault is None or fault.kind == "apart"
