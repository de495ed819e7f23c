"""Log-probabilities and entropy of the next token, the logits never held whole (OpenRLHF's Actor, in chunks).

Logits come from the head in the model's dtype, then float32, divided by the temperature.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from typing import Any

import torch

from replay_core.errors import CellError, OwnForwardError
from replay_core.jobs import OnEvent, Progress, ignore
from replay_core.replay.footprint import ENTROPY_ROWS
from replay_core.replay.libraries import transformers
from replay_core.replay.whole_model import has_own_forward, taken

#: What part of the logits is no rounding, where other rows stand beside.
_OF_OTHER_ROWS = 0.02

HeadFunction = Callable[[torch.Tensor], torch.Tensor]


def token_logprobs(
    head: HeadFunction,
    hidden_ND: torch.Tensor,
    targets_N: torch.Tensor,
    temperature: float = 1.0,
    chunk: int | None = 512,
    on_event: OnEvent = ignore,
    rows: torch.Tensor | None = None,
    *,
    is_half: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probability of each target, entropy of its distribution), float32 [N], on the CPU.

    Chunks are of nearly equal length: a last chunk of one row would take another matrix kernel.
    `chunk` None holds the logits of all rows at once; `rows` then says which of them have a target. `is_half`: the
    log-softmax is taken in bfloat16, as nobody means to.
    """
    if chunk is None:
        logits = head(hidden_ND)
        scaled = logits.float() if temperature == 1.0 else logits.float() / temperature
        on_event(Progress(int(targets_N.numel()), int(targets_N.numel()), "tokens through the head"))
        return _of_logits(scaled if rows is None else scaled[rows], targets_N, 1.0, is_half=is_half)
    count = int(targets_N.numel())
    logprobs_N, entropy_N = torch.empty(count), torch.empty(count)
    chunks = max(1, -(-count // chunk))
    bounds = [count * number // chunks for number in range(chunks + 1)]
    for start, end in pairwise(bounds):
        if end > start:
            logits = head(hidden_ND[start:end])
            part = _of_logits(logits, targets_N[start:end], temperature, is_half=is_half)
            logprobs_N[start:end], entropy_N[start:end] = part
            del logits
        on_event(Progress(end, count, "tokens through the head"))
    return logprobs_N, entropy_N


def _of_logits(
    logits_NV: torch.Tensor, targets_N: torch.Tensor, temperature: float, *, is_half: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs, entropies = [], []
    for rows in range(0, logits_NV.shape[0], ENTROPY_ROWS):
        some = slice(rows, rows + ENTROPY_ROWS)
        scaled = logits_NV[some].float()
        if temperature != 1.0:
            scaled = scaled / temperature
        normaliser = torch.logsumexp(scaled, dim=-1)
        taken = scaled.gather(-1, targets_N[some, None]).squeeze(-1) - normaliser
        if is_half:
            taken = scaled.bfloat16().log_softmax(-1).gather(-1, targets_N[some, None]).squeeze(-1).float()
        logprobs.append(taken)
        probabilities = torch.softmax(scaled, dim=-1)
        entropies.append(normaliser - probabilities.mul_(scaled).sum(dim=-1))
    return torch.cat(logprobs).cpu(), torch.cat(entropies).cpu()


@cache
def _output() -> Any:
    """A backbone's output that has whatever is asked for: a mixture of experts asks for router logits, a decoder of
    BERT's for cross attentions. None of it is there.
    """

    class Output(transformers.modeling_outputs.BaseModelOutputWithPast):  # type: ignore[misc]
        def __getattr__(self, name: str) -> None:
            if name.startswith("__"):
                raise AttributeError(name)

    return Output


class _Stub(torch.nn.Module):  # type: ignore[misc]
    """Stands where the backbone stands and returns hidden states that are already computed."""

    hidden: torch.Tensor | None = None

    def forward(self, *_args: Any, **_kwargs: Any) -> Any:
        assert self.hidden is not None
        return _output()(last_hidden_state=self.hidden)


def has_own_code(causal_lm: Any) -> bool:
    """Whether the model or its output embedding was given another `forward`, or hooks."""
    head = causal_lm.get_output_embeddings()
    is_moved = hasattr(head, "_hf_hook")  # accelerate's, which takes a module's inputs to its device
    is_heads = head is not None and bool("forward" in vars(head) or head._forward_hooks or head._forward_pre_hooks)
    return (is_heads and not is_moved) or has_own_forward(causal_lm)


class Head:
    """The causal LM's own code after its backbone: head, softcap, logit scale, whatever it does.

    Args:
        causal_lm: the model.
        hidden_1ND: hidden states of a short probe row.
        logits_1NV: the model's own logits of the same row; the head must reproduce them.
        is_repeatable: False where two forwards of that row put out different hidden states.

    Raises:
        CellError: neither the model's own code on given hidden states nor its output embedding reproduces them.
        OwnForwardError: that code is not transformers' and does not reproduce them, or gives a row other logits beside
            another row or in a later call, which a head that is run on hidden states cannot.
    """

    def __init__(
        self, causal_lm: Any, hidden_1ND: torch.Tensor, logits_1NV: torch.Tensor, *, is_repeatable: bool = True
    ) -> None:
        self._causal_lm = causal_lm
        self._stub = _Stub()
        self.note: str | None = None
        self._is_one_product = self._agrees(causal_lm.get_output_embeddings(), hidden_1ND, logits_1NV)
        if self._agrees(self._own_code, hidden_1ND, logits_1NV):
            self._compute: HeadFunction = self._own_code
        elif self._is_one_product:
            self._compute = causal_lm.get_output_embeddings()
            if not isinstance(self._compute, torch.nn.Identity):
                self.note = "logits come from the output embedding: the model's own forward does not take hidden states"
        elif not is_repeatable:
            # The two passes had other hidden states: nothing to hold the head to, but that it can be run.
            self._compute = self._own_code if self._runs(hidden_1ND) else causal_lm.get_output_embeddings()
            self.note = "two forwards of the same tokens differ: the model carries state over from call to call"
        else:
            # What its own code makes of more than hidden states (its tokens) is seen where the whole of it is called.
            refused = OwnForwardError if has_own_code(causal_lm) else CellError
            raise refused(
                "the model's head cannot be run on hidden states alone: its logits come out different",
                found=type(causal_lm).__name__,
                hint="this architecture needs its own forward; please report it",
            )

        on = self._depends_on(hidden_1ND) if has_own_code(causal_lm) else None
        if on is not None:
            raise OwnForwardError(
                f"the model's head depends on {on[0]}: it gives a row other logits {on[1]}, and is not run on rows "
                "here",
                expected="the logits that it gives the row alone",
                hint="--forward MODULE:FUNCTION runs your own code and reads its log-probabilities",
            )

    def _depends_on(self, hidden_1ND: torch.Tensor) -> tuple[str, str] | None:
        """What else than a row's own hidden states comes into its logits, and when they are others; None where nothing
        does.
        """
        if self._compute == self._own_code and self._depends_on_calls(hidden_1ND):
            return "what was called before", "in its next call"
        return ("the batch", "beside another row") if self._depends_on_rows(hidden_1ND) else None

    def _depends_on_calls(self, hidden_1ND: torch.Tensor) -> bool:
        """Whether the same hidden states come out otherwise after a call with others."""
        tokens_1N = 1 + torch.arange(hidden_1ND.shape[1], device=hidden_1ND.device)[None] % 7
        try:
            first = self._own_code(hidden_1ND).float()
            self._own_code(1.5 * hidden_1ND.flip(1), tokens_1N)
            later = self._own_code(hidden_1ND).float()
        except Exception:  # as `_agrees`
            return False
        size = float(first.norm())
        is_known = first.shape == later.shape and math.isfinite(size)
        return is_known and float((later - first).norm()) > _OF_OTHER_ROWS * size

    def _depends_on_rows(self, hidden_1ND: torch.Tensor) -> bool:
        """Whether the same hidden states come out otherwise beside a row of others, larger and in another order."""
        try:
            alone, again = (self._compute(hidden_1ND).float() for _ in range(2))
            beside = self._compute(torch.cat((hidden_1ND, 1.5 * hidden_1ND.flip(1)))).float()[:1]
        except Exception:  # as `_agrees`
            return False
        size = float(alone.norm())
        if beside.shape != alone.shape or not math.isfinite(size) or not torch.equal(alone, again):
            return False
        return float((beside - alone).norm()) > _OF_OTHER_ROWS * size

    @property
    def output_embedding(self) -> Any:
        """The model's own output embedding."""
        return self._causal_lm.get_output_embeddings()

    @property
    def is_one_product(self) -> bool:
        """Whether the head is its output embedding and nothing else: no softcap, no scale."""
        return self._is_one_product

    def __call__(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """Logits [N, V] of hidden states [N, D], in the model's dtype."""
        return self._compute(hidden_ND[None])[0]

    def _own_code(self, hidden_1ND: torch.Tensor, ids_1N: torch.Tensor | None = None) -> torch.Tensor:
        with self._swapped():
            self._stub.hidden = hidden_1ND
            if ids_1N is None:
                ids_1N = torch.zeros(hidden_1ND.shape[:2], dtype=torch.long, device=hidden_1ND.device)
            try:
                given = taken(self._causal_lm, {"input_ids": ids_1N, "use_cache": False})
                logits: torch.Tensor = self._causal_lm(**given).logits
            finally:
                self._stub.hidden = None
            return logits

    def _runs(self, hidden_1ND: torch.Tensor) -> bool:
        try:
            self._own_code(hidden_1ND)
        except Exception:  # as `_agrees`
            return False
        return True

    @contextmanager
    def _swapped(self) -> Iterator[None]:
        place = self._causal_lm.base_model_prefix
        backbone = self._causal_lm._modules[place]
        self._causal_lm._modules[place] = self._stub
        try:
            yield
        finally:
            self._causal_lm._modules[place] = backbone

    @staticmethod
    def _agrees(compute: HeadFunction | None, hidden_1ND: torch.Tensor, logits_1NV: torch.Tensor) -> bool:
        if compute is None:
            return False
        try:
            # A model may put its logits out in float32, whatever its head computes in.
            found = compute(hidden_1ND).to(logits_1NV.dtype)
        except Exception:  # whatever an unknown model raises on a stand-in, the answer is: not this way
            return False
        slack = torch.finfo(logits_1NV.dtype).eps * 4
        return found.shape == logits_1NV.shape and bool(
            torch.allclose(found, logits_1NV, rtol=slack, atol=slack, equal_nan=True)
        )
