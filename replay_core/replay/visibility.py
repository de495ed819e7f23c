"""What the inputs of a forward let its tokens see, read from the inputs themselves before they go in. numpy only.

A library keeps packed samples apart by position ids that restart, or by a mask; anything else it takes for
one sequence, silently. These checks read what was given, so they name the mistake whatever made it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import Struct

from replay_core.replay.causes import samples
from replay_core.replay.packing import Arrangement, Forward
from replay_core.samples.layout import Bools, Ints

#: Numbers quoted in a sentence.
_QUOTED = 4


class InputFault(Struct, frozen=True):
    """A way in which the inputs are not those of separate samples: a code, and one sentence."""

    code: str
    text: str

    def to_mapping(self) -> dict[str, str]:
        return {"code": self.code, "text": self.text}


def check(arrangement: Arrangement, *, use_cache: bool = False) -> list[InputFault]:
    """What is wrong with the inputs of a cell; empty where every token may see its own past and nothing else."""
    findings: list[InputFault] = []
    for forward in arrangement.forwards:
        found = _packed(forward, use_cache) if arrangement.cu_seqlens is not None else _padded(forward)
        findings += [one for one in found if one.code not in {known.code for known in findings}]
    return findings


def _packed(forward: Forward, use_cache: bool) -> list[InputFault]:
    if forward.segments < 2 or forward.valid is None:
        return []
    lengths = np.asarray(forward.valid, dtype=np.int64)
    if forward.allowed_TT is not None:
        return _foreign_keys(forward.allowed_TT, lengths)
    findings = boundaries(forward.position_ids, lengths)
    if forward.attention_mask is not None:
        text = "an attention_mask is set: the library takes the pack for one sequence, whatever the position_ids"
        findings.append(InputFault("mask_set", text))
    if use_cache:
        text = "use_cache is on: the library takes the pack for one sequence, whatever the position_ids"
        findings.append(InputFault("use_cache", text))
    return findings


def boundaries(position_ids: Any, lengths: Ints) -> list[InputFault]:
    """Whether position ids [1, T] restart where samples of these lengths begin."""
    if position_ids is None:
        return [InputFault("positions_dropped", "no position_ids are given: the library counts on through the pack")]
    positions_T = np.asarray(position_ids).reshape(-1)
    starts = (np.cumsum(lengths) - lengths)[1:]
    restarts = np.flatnonzero(np.diff(positions_T) != 1) + 1
    if np.array_equal(restarts, starts):
        return []
    if not restarts.size:
        return [InputFault("positions_dropped", "position_ids count through the pack: no sample begins anew")]
    where = f"samples begin at {_quoted(starts)}, position_ids restart at {_quoted(restarts)}"
    if restarts.shape == starts.shape and len(set((restarts - starts).tolist())) == 1:
        off = int(restarts[0] - starts[0])
        late = "late" if off > 0 else "early"
        text = f"every boundary is {abs(off)} token{'s' * (abs(off) > 1)} {late}: {where}"
        return [InputFault("boundary", text)]
    return [InputFault("boundary", f"the boundaries are wrong: {where}")]


def _foreign_keys(allowed_TT: Bools, lengths: Ints) -> list[InputFault]:
    sample_T = np.repeat(np.arange(lengths.size), lengths)
    foreign_TT = allowed_TT & (sample_T[:, None] != sample_T)
    if not foreign_TT.any():
        return []
    readers = np.unique(sample_T[foreign_TT.any(1)])
    most = int(foreign_TT.sum(1).max())
    first = int(np.flatnonzero(foreign_TT.any(1))[0])
    key = int(np.flatnonzero(foreign_TT[first])[0])
    text = (
        f"the mask lets tokens of {samples(readers.tolist())} see {most} key{'s' * (most > 1)} of another sample: "
        f"token {first} sees token {key} of sample {int(sample_T[key])}"
    )
    return [InputFault("foreign_keys", text)]


def _padded(forward: Forward) -> list[InputFault]:
    valid_BS = forward.valid
    if valid_BS is None or valid_BS.ndim != 2 or bool(valid_BS.all()):
        return []
    if forward.attention_mask is None:
        return [InputFault("mask_missing", "no attention_mask is given to a batch with padding")]
    given_BS = np.asarray(forward.attention_mask).astype(bool)
    shown, hidden = int((given_BS & ~valid_BS).sum()), int((~given_BS & valid_BS).sum())
    if not shown and not hidden:
        return []
    parts = []
    if shown:
        parts.append(f"{shown:,} slots of padding for tokens")
    if hidden:
        parts.append(f"{hidden:,} tokens for padding")
    return [InputFault("padded_mask", f"the attention_mask takes {' and '.join(parts)}")]


def _quoted(values: Ints) -> str:
    more = ", ..." if values.size > _QUOTED else ""
    return "[" + ", ".join(str(int(value)) for value in values[:_QUOTED]) + more + "]"
