"""How the trainer made log-probabilities of hidden states, and the same done again: the order in which a head adds up
is part of its gradients' last bits.

`whole`: the model's own logits of every slot, as transformers' losses take them. `rows`: of these, a row's
log-probabilities at once (TRL's `selective_log_softmax`, in its preference trainer before 1.0). `fused`: TRL's
`add_fused_lm_head` (since 1.0), tiles with a backward of their own, by TRL itself where it is installed. Else a few
rows of logits at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from msgspec import Struct
from msgspec.structs import replace
from torch.utils.checkpoint import checkpoint

from replay_core.errors import UnavailableError
from replay_core.replay import compiling
from replay_core.replay.cell import BatchReplay
from replay_core.replay.flags import Flags
from replay_core.replay.footprint import need_logits
from replay_core.replay.logprobs import Head

#: Of a label that no loss counts, everywhere in transformers.
_IGNORED = -100


class TrainedHead(Struct, frozen=True):
    """How the logits of a backward replay are held: chunked, whole, rows or fused; why, for the cell's notes."""

    held: str
    forecast_mib: float
    note: str | None = None

    @classmethod
    def chosen(cls, flags: Flags, said: str | None, cell: BatchReplay, slots: int, chunk: int) -> TrainedHead:
        """As the flags ask; where they leave it open, as the trainer did (`said`), if it can be had here.

        Args:
            slots: token slots of the largest micro-batch.

        Raises:
            UnavailableError: what was asked for does not fit in memory.
        """
        words = cell.model.config.vocab_size
        as_padded = cell.arrangement.cu_seqlens is None and not cell.plan.is_critic
        if flags.logits == "whole" or not as_padded or said not in ("whole", "rows", "fused"):
            mib = need_logits(flags, slots, words, chunk)
            return cls("whole" if flags.logits == "whole" and as_padded else "chunked", mib)
        if said == "fused":
            mib = need_logits(flags, slots, words, chunk)
            if _fused() is not None:
                return cls("fused", mib, "log-probabilities by TRL's own fused head, as the trainer's")
            return cls("chunked", mib, "the trainer's head was TRL's fused one, and no TRL that has it is installed "
                                       "here: last bits of its gradients may differ")  # fmt: skip
        try:
            mib = need_logits(replace(flags, logits="whole"), slots, words, chunk)
        except UnavailableError as error:
            note = f"logits in chunks, though the trainer held them whole: {error.message}; last bits may differ"
            return cls("chunked", need_logits(flags, slots, words, chunk), note)
        return cls(said, mib, "logits whole, as the trainer held them")

    def logprobs(
        self, cell: BatchReplay, head: Head, labels_BS: torch.Tensor, temperature: float, chunk: int, *,
        with_entropy: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:  # fmt: skip
        """(log-probabilities [B, S-1] of every next token, or a critic's values; the entropy there, where it is asked
        for; final hidden states), differentiable.

        Args:
            labels_BS: which tokens the loss counts, as ids; -100 elsewhere.
        """
        if self.held == "chunked" or with_entropy:
            return _chunked(cell, head, temperature, chunk, with_entropy=with_entropy)
        parts, hidden, row = [], [], 0
        for forward in cell.arrangement.forwards:
            inputs, rows = cell.inputs(forward), len(forward.input_ids)
            if self.held in ("whole", "rows"):
                answer = cell.model.causal_lm(**inputs, output_hidden_states=True)
                logits_BSV = answer.logits if self.held == "rows" else wide(answer.logits)
                if temperature != 1.0:
                    logits_BSV = logits_BSV / temperature
                of_next = _by_rows if self.held == "rows" else _at_once
                parts.append(of_next(logits_BSV[:, :-1], inputs["input_ids"][:, 1:]))
                hidden.append(answer.hidden_states[-1].detach())
            else:
                with _with_fused_head(cell.model, temperature, hidden):
                    labels = labels_BS[row : row + rows].to(inputs["input_ids"].device)
                    parts.append(cell.model.causal_lm(**inputs, labels=labels, fused_lm_head=True).log_probs)
            row += rows
        return torch.cat(parts) if len(parts) > 1 else parts[0], None, torch.cat(hidden)


def of_next_tokens(said: str | None) -> Callable[[Any, Any], Any]:
    """How a trainer that held its logits so makes log-probabilities [B, T] of logits [B, T, V] and ids, as arrays."""
    made = _by_rows if said == "rows" else _at_once
    return lambda logits_BTV, next_BT: made(torch.from_numpy(logits_BTV), torch.from_numpy(next_BT)).numpy()


def _at_once(logits_BTV: torch.Tensor, next_BT: torch.Tensor) -> torch.Tensor:
    return logits_BTV.log_softmax(-1).gather(-1, next_BT[..., None])[..., 0]


def _by_rows(logits_BTV: torch.Tensor, next_BT: torch.Tensor) -> torch.Tensor:
    """As TRL's `selective_log_softmax`: the logit less its row's logsumexp; in half precision by `log_softmax`."""
    if logits_BTV.dtype in (torch.float32, torch.float64):
        chosen_BT = logits_BTV.contiguous().gather(-1, next_BT[..., None])[..., 0]
        return chosen_BT - torch.stack([row_TV.logsumexp(-1) for row_TV in logits_BTV])
    return torch.stack([_at_once(row_TV, next_T) for row_TV, next_T in zip(logits_BTV, next_BT, strict=True)]).float()


def wide(values: torch.Tensor) -> torch.Tensor:
    """In float32 at least."""
    return values if values.dtype is torch.float64 else values.float()


def labels_of(ids_BS: torch.Tensor, counted_BT: torch.Tensor) -> torch.Tensor:
    """[B, S]: the ids of tokens that are counted (by the slot before them, [B, S-1]), -100 elsewhere."""
    labels_BS = torch.full_like(ids_BS, _IGNORED)
    labels_BS[:, 1:] = torch.where(counted_BT != 0, ids_BS[:, 1:], _IGNORED)
    return labels_BS


def _fused() -> Any:
    try:
        from trl.trainer.utils import add_fused_lm_head
    except ImportError:
        return None
    return add_fused_lm_head


@contextmanager
def _with_fused_head(model: Any, temperature: float, hidden: list[torch.Tensor]) -> Iterator[None]:
    """The model with TRL's head for a call, whose final hidden states [b, S, D] are appended."""
    causal_lm = model.causal_lm
    handle = model.backbone.register_forward_hook(
        lambda _module, _args, answer: hidden.append(answer.last_hidden_state.detach())
    )
    _fused()(causal_lm, temperature=temperature)
    try:
        yield
    finally:
        del causal_lm.forward  # what TRL put over the class's own
        handle.remove()


def _chunked(
    cell: BatchReplay, head: Head, temperature: float, chunk: int, *, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    arrangement = cell.arrangement
    states = [compiling.plain(cell.model.computes, cell.inputs(forward)) for forward in arrangement.forwards]
    hidden_BSD = states[0] if len(states) == 1 else torch.cat(states, dim=arrangement.axis)
    slots, targets = (torch.from_numpy(part).to(hidden_BSD.device) for part in arrangement.next_tokens())
    hidden_ND = hidden_BSD.flatten(0, 1)[slots]
    bounds = [len(targets) * number // max(1, -(-len(targets) // chunk)) for number in
              range(max(1, -(-len(targets) // chunk)) + 1)]  # fmt: skip

    def some(hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if cell.plan.is_critic:
            return wide(head(hidden))[:, :1]
        scaled = wide(head(hidden)) / temperature
        normaliser = scaled.logsumexp(-1)
        answer = [scaled.gather(-1, target[:, None])[:, 0] - normaliser]
        if with_entropy:
            answer.append(normaliser - (scaled.softmax(-1) * scaled).sum(-1))
        return torch.stack(answer, dim=-1)

    # One chunk's logits live at a time, in backward as well: each is computed again there.
    pieces = [
        checkpoint(some, hidden_ND[start:end], targets[start:end], use_reentrant=False)
        for start, end in pairwise(bounds)
        if end > start
    ]
    own = cell.batch.layout()
    found_NC = torch.cat(pieces)
    grid_NC = found_NC.new_zeros(own.sample_BS.size, found_NC.shape[1])
    grid_NC = grid_NC.index_put((torch.from_numpy(own.slots("next")).to(grid_NC.device),), found_NC)
    grid_BTC = grid_NC.reshape(*own.shape, -1)[:, :-1]
    return grid_BTC[..., 0], grid_BTC[..., 1] if with_entropy else None, hidden_BSD.detach()
