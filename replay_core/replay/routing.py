"""Recorded MoE routing, replayed: each token goes to the experts it went to then (rollout routing replay).

A router's answer (logits, weights [N, K], experts [N, K]) is replaced for the tokens that were recorded. Where the
weights were not recorded they are the router's own probabilities of the recorded experts, normalised as the model does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from msgspec import Struct, field
from numpy.typing import NDArray

from replay_core import pages
from replay_core.errors import CellError, DumpError, UnavailableError
from replay_core.records import Run, TensorRef
from replay_core.replay.reading import RecordedBatch
from replay_core.replay.recorded import records_of
from replay_core.samples.batch import Batch
from replay_core.samples.layout import Ints, TokenLayout

#: What frameworks call the experts of each token (verl, slime, SkyRL, NeMo-RL), and their weights.
_EXPERTS = ("routed_experts", "rollout_routed_experts", "rollout_expert_indices", "routing_matrices")
_WEIGHTS = ("routing_weights", "routed_experts_weights", "rollout_expert_weights")
#: Weights that add up to 1 within this are normalised by the model.
_ROUNDING = 1e-2


class Routing(Struct, frozen=True):
    """Experts [T, L, K] of every token, by (sample, position); -1 where none is recorded; their weights or None."""

    experts_TLK: Ints
    weights_TLK: NDArray[np.float32] | None
    name: str


def read(run: Run, recorded: RecordedBatch) -> Routing:
    """The recorded routing of a micro-batch.

    Raises:
        DumpError: none is recorded, or it does not fit the tokens.
    """
    fields = [ref for record in records_of(run, recorded.key) for ref in record.tensors()]
    experts, weights = routing_fields(fields)
    if experts is None:
        names = ", ".join(dict.fromkeys(ref.name for ref in fields))
        raise DumpError(
            "the record holds no routing to replay", file=str(run.path), tensor=_EXPERTS[0],
            expected="experts of every token, [B, S, layers, K]", found=names or "no field",
            hint="routing=live lets the model route by itself",
        )  # fmt: skip
    if weights is not None and weights.shape != experts.shape:
        raise DumpError("the routing weights do not fit the experts", file=str(run.path), tensor=weights.name,
                        expected=str(list(experts.shape)), found=str(list(weights.shape)))  # fmt: skip
    chosen = by_token(experts, recorded.samples, -1, recorded.rows).astype(np.int64)
    values = None if weights is None else by_token(weights, recorded.samples, 0, recorded.rows).astype(np.float32)
    return Routing(chosen, values, experts.name)


def routing_fields(fields: Iterable[TensorRef]) -> tuple[TensorRef | None, TensorRef | None]:
    """(the experts of each token, their weights) among a record's fields, by what frameworks call them."""
    found: dict[str, TensorRef] = {}
    for ref in fields:
        if ref.is_readable and not ref.is_text:
            found.setdefault(ref.name.rpartition(".")[2], ref)
    experts, weights = (next((found[name] for name in names if name in found), None) for names in (_EXPERTS, _WEIGHTS))
    return experts, weights


def by_token(ref: TensorRef, samples: Batch, absent: int, chosen: Sequence[int] | None = None) -> NDArray[Any]:
    """[T, L, K] of the tokens of the `chosen` samples (None: all). Of a sample's last token, for which nothing was
    sampled, none may be there.

    Raises:
        DumpError: the tensor does not speak of every token.
    """
    placed = samples.place(ref.with_(alignment="full"), by_shape=True)
    if placed is None or not placed.by_token or placed.axes + 2 != len(ref.shape):
        raise _misfit(ref, samples)
    at = samples.flat(placed.tokens)
    lacking = np.setdiff1d(np.arange(samples.position_N.size), at)
    if np.setdiff1d(lacking, samples.starts + samples.lengths - 1).size:
        raise _misfit(ref, samples)
    values = pages.array(ref)
    by_token_NLK = np.full((samples.position_N.size, *ref.shape[-2:]), absent, dtype=values.dtype)
    by_token_NLK[at] = values.reshape(-1, *ref.shape[-2:])[placed.rows]
    rows = np.split(by_token_NLK, samples.starts[1:])
    return np.concatenate(rows if chosen is None else [rows[row] for row in chosen])


def _misfit(ref: TensorRef, samples: Batch) -> DumpError:
    return DumpError(
        "the recorded routing does not fit the tokens", tensor=ref.name,
        expected=f"layers and choices of each of {samples.position_N.size:,} tokens in {samples.count} samples",
        found=str(list(ref.shape)) + (f" in {len(ref.rows)} rows" if ref.rows is not None else ""),
    )  # fmt: skip


def token_numbers(layout: TokenLayout) -> Ints:
    """[B, S] of an arrangement: which token (by sample and position) stands in each slot; -1 in padding."""
    numbers = np.full(layout.sample_BS.size, -1, dtype=np.int64)
    slots = layout.slots("full")
    numbers[slots] = np.arange(slots.size)
    return numbers.reshape(layout.shape)


class Imposed(Struct):
    """Hooks on a model's routers that put the recorded experts in place of the live ones.

    `numbers` says which token stands in each slot of the forward that runs next (`token_numbers`, flattened).
    """

    routing: Routing
    numbers: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    tokens: int = 0
    changed: int = 0
    layers: int = 0

    @contextmanager
    def on(self, backbone: Any) -> Iterator[Imposed]:
        """Impose the routing while the context is open.

        Raises:
            UnavailableError: the model has no routers, or another number of them.
        """
        found = routers(backbone)
        recorded = self.routing.experts_TLK.shape[1]
        self.layers = len(found)
        if len(found) != recorded:
            raise UnavailableError(
                "the model's routers are not those of the recorded routing",
                tensor=self.routing.name, expected=f"{recorded} layers with a router", found=f"{len(found)}",
                hint="routing=live" if found else "routing=live: this model has no experts to choose from",
            )  # fmt: skip
        handles = [module.register_forward_hook(self._hook(layer)) for layer, module in enumerate(found)]
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, layer: int) -> Any:
        def hook(_module: Any, _args: Any, output: Any) -> Any:
            logits_NE, weights_NK, experts_NK = output
            numbers_N = torch.from_numpy(self.numbers).to(experts_NK.device)
            if numbers_N.numel() != experts_NK.shape[0]:
                raise CellError("the recorded routing does not stand on this forward's tokens")
            all_TK = torch.from_numpy(self.routing.experts_TLK[:, layer]).to(experts_NK.device)
            recorded_NK = all_TK[numbers_N.clamp(min=0)]
            if recorded_NK.shape != experts_NK.shape or int(recorded_NK.max()) >= logits_NE.shape[-1]:
                raise CellError(
                    "the recorded experts are not this model's", tensor=self.routing.name,
                    expected=f"{experts_NK.shape[-1]} of {logits_NE.shape[-1]} experts a token",
                    found=f"{recorded_NK.shape[-1]} a token, up to number {int(recorded_NK.max())}",
                )  # fmt: skip
            known_N1 = ((numbers_N >= 0) & (recorded_NK >= 0).all(-1))[:, None]
            weights = self._weights(layer, logits_NE, weights_NK, recorded_NK.clamp(min=0), numbers_N)
            moved = (recorded_NK.sort(-1).values != experts_NK.sort(-1).values).any(-1, keepdim=True) & known_N1
            self.tokens += int(known_N1.sum())
            self.changed += int(moved.sum())
            return (
                logits_NE,
                torch.where(known_N1, weights, weights_NK),
                torch.where(known_N1, recorded_NK.to(experts_NK.dtype), experts_NK),
            )

        return hook

    def _weights(self, layer: int, logits_NE: Any, live_NK: Any, experts_NK: Any, numbers_N: Any) -> Any:
        if self.routing.weights_TLK is not None:
            all_TK = torch.from_numpy(self.routing.weights_TLK[:, layer]).to(live_NK.device)
            return all_TK[numbers_N.clamp(min=0)].to(live_NK.dtype)
        chosen_NK = logits_NE.float().softmax(-1).gather(-1, experts_NK)
        if bool((live_NK.float().sum(-1) - 1).abs().max() < _ROUNDING):
            chosen_NK = chosen_NK / chosen_NK.sum(-1, keepdim=True)
        return chosen_NK.to(live_NK.dtype)

    def sentence(self) -> str:
        """What was imposed, and how much of it the live router would have done otherwise."""
        share = 100 * self.changed / self.tokens if self.tokens else 0.0
        weights = "and weights" if self.routing.weights_TLK is not None else "with the router's own weights for them"
        return (
            f"recorded experts {weights}: {self.tokens:,} choices in {self.layers} layers, of which the live router "
            f"would have made {share:.2f} % otherwise"
        )


def routers(backbone: Any) -> list[Any]:
    """The routers of a model, in order: transformers' answer (logits, weights, experts) and are named so."""
    return [module for module in backbone.modules() if type(module).__name__.endswith("TopKRouter")]
