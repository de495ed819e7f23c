"""Which settings are asked why before any cell has run: where every pass takes seconds, and a few rows answer. numpy
only.

What a few rows and tokens show is the answer only if they are off in the cell's own dump as well, about as far as its
worst token is: else a lesser fault would stand for the one that matters.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from replay_core.records import Run
from replay_core.replay.segments import layout_of, tokens_of

#: Parameters times slots from which on a part of a batch is looked for first, from the small end: some eighty passes
#: are asked for.
LARGE = 2e10
#: A token counts as off from this share of what the worst one is off.
OFF = 0.1
#: Weights are rarely kept in less than so many bytes each.
_BYTES = 2


def is_large(parameters: float, slots: int) -> bool:
    """Whether passes of a whole batch take so long that a part of it is asked first."""
    return parameters * slots > LARGE


def parameters_in(reference: str) -> float:
    """About how many parameters a directory of weights holds, by the size of its files; 0 where there is none."""
    directory = Path(reference)
    if not directory.is_dir():
        return 0.0
    files = [one for one in directory.iterdir() if one.suffix in (".safetensors", ".bin") and one.is_file()]
    return sum(one.stat().st_size for one in files) / _BYTES


def is_shown(
    reference: Run, cell: Run, final_hidden: str, rows: Sequence[int], tokens: Sequence[int]
) -> bool:  # fmt: skip
    """Whether the first tokens (`tokens`: how many of each) of these rows are off in the dumps as the worst token is.

    Raises:
        NothingComparableError: a dump lacks the tensor.
    """
    a_ND, b_ND = (tokens_of(run, final_hidden) for run in (reference, cell))
    distance_N = np.linalg.norm(b_ND - a_ND, axis=-1)
    norm_N = np.linalg.norm(a_ND, axis=-1)
    relative_N = np.divide(distance_N, norm_N, out=np.where(distance_N > 0, np.inf, 0.0), where=norm_N > 0)
    relative_N = np.where(np.isnan(relative_N), np.inf, relative_N)
    layout = layout_of(reference)
    slots = layout.slots()
    sample_N, position_N = layout.sample_BS.reshape(-1)[slots], layout.position_BS.reshape(-1)[slots]
    looked_N = np.zeros(sample_N.size, dtype=bool)
    for row, count in zip(rows, tokens, strict=True):
        looked_N |= (sample_N == row) & (position_N < count)
    most = float(relative_N.max(initial=0.0))
    return most > 0 and bool((relative_N[looked_N] >= min(most, np.finfo(float).max) * OFF).any())
