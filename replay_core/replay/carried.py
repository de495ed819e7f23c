"""The gradient that a trainer's own loss left at the logits, carried back through the model once more.

A loss that is a plain function of a script (PPO's, whatever its masks and weights) leaves no hook to form it by. What
it does to the model is its gradient at the logits, which `rldbg record` keeps: from there on the backward is the
model's.
"""

from __future__ import annotations

import numpy as np
import torch
from msgspec.structs import replace

from replay_core import pages
from replay_core.errors import DumpError
from replay_core.records import Run, TensorRef
from replay_core.replay.cell import BatchReplay
from replay_core.replay.footprint import need_logits
from replay_core.replay.reading import RecordedBatch
from replay_core.replay.recorded import records_of

#: As `rldbg record` names it.
AT_LOGITS = "grad.forward.output.logits"
SENTENCE = "loss the trainer's own, not formed again: the gradient it left at the logits, as recorded, is carried back"


def left_at_logits(run: Run, recorded: RecordedBatch) -> TensorRef | None:
    """The recorded gradient of a micro-batch's loss at its logits, [B, S, V]."""
    refs = (record.get(AT_LOGITS) for record in records_of(run, recorded.key))
    return next((ref for ref in refs if ref is not None and ref.is_readable), None)


def carry_back(
    ref: TensorRef, recorded: RecordedBatch, cell: BatchReplay, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the forwards of a cell and carry the gradient back to the weights: (log-probabilities [B, S-1] of every next
    token, final hidden states).

    Raises:
        UnavailableError: the logits do not fit in memory.
        DumpError: the gradient is not of this micro-batch's logits.
    """
    need_logits(replace(cell.flags, logits="whole"), cell.arrangement.slots, cell.model.config.vocab_size, 0)
    arrangement, parts, hidden = cell.arrangement, [], []
    for forward in arrangement.forwards:
        answer = cell.model.causal_lm(**cell.inputs(forward), output_hidden_states=True)
        parts.append(answer.logits)
        hidden.append(answer.hidden_states[-1].detach())
    logits = parts[0] if len(parts) == 1 else torch.cat(parts, dim=arrangement.axis)
    gradient = _laid_as(ref, recorded, cell, tuple(logits.shape))
    torch.autograd.backward(logits, gradient.to(logits.device, logits.dtype))
    slots, targets = (torch.from_numpy(part).to(logits.device) for part in arrangement.next_tokens())
    scaled_NV = logits.detach().flatten(0, 1)[slots].float() / temperature
    own = cell.batch.layout()
    grid = torch.zeros(own.sample_BS.size, device=logits.device)
    grid[torch.from_numpy(own.slots("next"))] = scaled_NV.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    return grid.reshape(own.shape)[:, :-1], torch.cat(hidden, dim=arrangement.axis)


def _laid_as(ref: TensorRef, recorded: RecordedBatch, cell: BatchReplay, shape: tuple[int, ...]) -> torch.Tensor:
    """The gradient on the cell's token axes: slot by slot where they are the recorded ones, else token by token."""
    there, here = recorded.samples.layout, cell.arrangement.layout
    if there is None or ref.shape != (*there.shape, shape[-1]) or recorded.rows is not None:
        raise DumpError(
            "the recorded gradient is not of this micro-batch's logits",
            file=str(recorded.samples.held.record.path),
            tensor=ref.name,
            expected=f"{list(shape)}, all rows of the micro-batch",
            found=str(list(ref.shape)),
            hint="--backward without --rows; --loss forms a loss from what is recorded",
        )
    values = np.asarray(pages.array(ref), np.float32)
    if np.array_equal(there.sample_BS, here.sample_BS):
        return torch.from_numpy(values)
    laid = np.zeros((here.sample_BS.size, shape[-1]), np.float32)
    laid[here.slots()] = values.reshape(-1, shape[-1])[there.slots()]
    return torch.from_numpy(laid.reshape(shape))
