"""How a tensor is cut while it is compared: into rows, and so many rows at a time."""

from __future__ import annotations

from replay_core.measure.sums import FEWEST_ROWS

#: Elements of one chunk. Two threads hand the interpreter to each other around every NumPy call, which takes as long as
#: a call on 128 k elements: small chunks fit the L2 cache, and make two threads slower than one. Wall seconds of 160
#: pairs of 4 MB in bf16 on two cores, one thread and two: 1.6, 1.9 at 128 k; 1.6, 1.4 at 256 k; 1.8, 1.2 at 512 k; 1.9,
#: 1.1 at 1 M, which holds twice the memory.
CHUNK = 524_288
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
