"""A model that can only be called whole: its forward sorts, splits or packs the rows it is given, or its head looks at
several of them. Its logits are taken as they come out, and none of its modules is watched.
"""

from __future__ import annotations

import math
import time

import numpy as np
import torch
from msgspec.structs import replace

from replay_core.errors import CellError
from replay_core.jobs import Progress
from replay_core.replay import attention
from replay_core.replay.answer import Computed
from replay_core.replay.cell import BatchReplay
from replay_core.replay.effective import Operators
from replay_core.replay.footprint import PeakMemory, need_logits
from replay_core.replay.packing import Forward
from replay_core.replay.rope import forget_lengths
from replay_core.replay.whole_model import taken
from replay_core.samples.layout import Ints

#: More than other kernels of half precision make of the same logits.
_OF_ITS_SIZE = 0.02


def computed(cell: BatchReplay) -> Computed:
    """What the model itself makes of every forward of the cell.

    Raises:
        UnavailableError: it is to be compiled, or its logits do not fit in memory.
        CellError: it puts out no logits of the tokens it is given.
    """
    if cell.flags.compile != "off":
        raise cell.not_compiled()
    whole = replace(cell.flags, logits="whole")
    forecast_mib = need_logits(whole, cell.arrangement.slots, cell.words(), cell.plan.logit_chunk)
    memory, started = PeakMemory(cell.flags.device), time.perf_counter()
    logprobs, entropy = _answer(cell)
    steady_s, peak_mib = time.perf_counter() - started, memory.mib()
    ran = f"{cell.model.causal_lm.config._attn_implementation} (a higher-order operator)"
    if cell.flags.attention != "flex":
        with Operators() as operators:
            _logits(cell, cell.arrangement.forwards[0])
        ran = operators.attention()
    return Computed({}, None, logprobs, entropy, ran, steady_s, None, peak_mib, forecast_mib)


def logprobs_BS(cell: BatchReplay, ids_BS: Ints | None = None) -> torch.Tensor:
    """The same log-probabilities in the slots of the batch, index t about token t + 1, else 0; `ids_BS`: of other
    tokens in those slots.
    """
    batch = cell.batch if ids_BS is None else replace(cell.batch, ids_BS=ids_BS)
    there = BatchReplay(cell.plan, cell.flags, batch, cell.model, cell.temperature, cell.on_event)
    said, own = _answer(there)[0].reshape(-1), batch.layout()
    found = torch.zeros(batch.ids_BS.size)
    found[own.slots("next")] = said[there.arrangement.layout.slots("next")]
    return found.reshape(batch.ids_BS.shape)


def moved_by_label(cell: BatchReplay) -> bool:
    """Whether the last token of a row moves logits before it, those whose label it is among them: log-probabilities
    alone do not tell, as that of another label is another.
    """
    forward = cell.arrangement.forwards[0]
    ids_BS = forward.input_ids.copy()
    mask_BS = forward.attention_mask
    last = int(np.flatnonzero(mask_BS[0])[-1]) if mask_BS is not None else ids_BS.shape[1] - 1
    words = np.unique(ids_BS)
    if last == 0 or words.size < 2:
        return False
    ids_BS[0, last] = words[0] if ids_BS[0, last] != words[0] else words[1]
    before, after = (_logits(cell, one)[0, :last].float() for one in (forward, replace(forward, input_ids=ids_BS)))
    off, size = float((after - before).norm()), float(before.norm())
    return math.isfinite(size) and off > _OF_ITS_SIZE * size


def _answer(cell: BatchReplay) -> tuple[torch.Tensor, torch.Tensor | None]:
    forwards, parts = cell.arrangement.forwards, []
    for done, forward in enumerate(forwards, start=1):
        parts.append(_logits(cell, forward))
        cell.on_event(Progress(done, len(forwards), "forwards of the whole model"))
    logits = parts[0] if len(parts) == 1 else torch.cat(parts, dim=cell.arrangement.axis)
    return cell.values(_as_it_is, logits) if cell.plan.is_critic else cell.logprobs(_as_it_is, logits)


def _as_it_is(logits_NV: torch.Tensor) -> torch.Tensor:
    return logits_NV


def _logits(cell: BatchReplay, forward: Forward) -> torch.Tensor:
    causal_lm = cell.model.causal_lm
    forget_lengths(cell.model.backbone)
    with attention.pinned(cell.flags):
        put = causal_lm(**taken(causal_lm, cell.inputs(forward)))
    logits = put[0] if isinstance(put, tuple) else getattr(put, "logits", None)
    shape = None if logits is None else tuple(logits.shape[:2])
    if logits is None or shape != forward.input_ids.shape:
        raise CellError(
            "the model's own forward puts out no logits of the tokens it is given",
            expected=str(forward.input_ids.shape), found=str(shape or type(put).__name__),
            hint="--forward MODULE:FUNCTION runs your own code and reads its log-probabilities",
        )  # fmt: skip
    return logits
