"""How a tensor is cut while it is compared: into rows, and so many rows at a time."""

from __future__ import annotations

from replay_core.measure.sums import FEWEST_ROWS

#: Elements of one chunk: the bytes and the float32 numbers of both sides fit in 2 MB of L2. CPU seconds of a command
#: over 160 pairs of 4 MB in bf16: 2.9 at 64 k, 2.6 at 128 k, 2.8 at 256 k.
CHUNK = 131_072
#: A vector is one row as far as this.
LONGEST_ROW = 262_144


def rows_of_a_chunk(width: int) -> int:
    """As many rows as fit; of wide ones up to FEWEST_ROWS, from which massive columns are told."""
    width = max(1, width)
    return max(1, CHUNK // width, min(FEWEST_ROWS, LONGEST_ROW // width))


def row_width(shape: tuple[int, ...]) -> int:
    """A row is the last axis; a vector is one row, as far as LONGEST_ROW."""
    width = max(1, shape[-1] if shape else 1)
    return min(width, LONGEST_ROW) if len(shape) == 1 else width
