"""What every critic can do, whatever runs it; the batch it takes, and its value head."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from msgspec import Struct, field

from replay_core.errors import ModelError
from replay_core.parity.config import CriticConfig
from replay_core.parity.engines import CriticEngine

Tensors = dict[str, torch.Tensor]

#: What a readback takes from the configuration: nothing of a built model shows it.
_AS_CONFIGURED = (
    "seed", "training_seed", "data_seed", "shuffle", "learning_rate", "weight_decay", "max_grad_norm", "value_clip",
    "reduction",
)  # fmt: skip

HEAD_WEIGHT, HEAD_BIAS = "v_head.summary.weight", "v_head.summary.bias"


class CriticBatch(Struct, frozen=True):
    """Padded rows [B, S]: token ids, which slots hold tokens, which of those were generated."""

    name: str
    ids_BS: torch.Tensor
    attention_BS: torch.Tensor
    response_BS: torch.Tensor

    def rows(self, chosen: Any) -> CriticBatch:
        return CriticBatch(self.name, self.ids_BS[chosen], self.attention_BS[chosen], self.response_BS[chosen])

    def alone(self, row: int) -> CriticBatch:
        """One row without its padding."""
        slots = self.attention_BS[row].bool()
        return CriticBatch(
            self.name,
            self.ids_BS[row][slots][None],
            self.attention_BS[row][slots][None],
            self.response_BS[row][slots][None],
        )

    @property
    def loss_mask(self) -> torch.Tensor:
        """[B, S - 1]: index t counts where token t + 1 was generated (ROLL's response_mask[:, 1:])."""
        return (self.response_BS * self.attention_BS)[:, 1:]


class ValueHead(torch.nn.Module):  # type: ignore[misc]
    """Dropout, then one number per token: TRL's ValueHead with a bias, the Megatron wrapper's without.

    Hidden states are cast to the weight's dtype first, as TRL does (trl 0.9.6 `ValueHead.forward`).
    """

    def __init__(self, hidden_size: int, dropout: float, *, bias: bool, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.summary = torch.nn.Linear(hidden_size, 1, bias=bias)
        self.dropout = torch.nn.Dropout(dropout) if dropout else torch.nn.Identity()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., D] to [..., 1]."""
        hidden = self.dropout(hidden)
        if hidden.dtype != self.summary.weight.dtype:
            hidden = hidden.to(self.summary.weight.dtype)
        value: torch.Tensor = self.summary(hidden)
        return value


class Critic(ABC):
    """A value model that can be asked, trained, and looked into.

    backend names the implementation (what every label is taken from), engine what runs it.
    """

    backend: str
    engine: str
    config: CriticConfig
    model: torch.nn.Module
    head: ValueHead
    notes: list[str]
    _engine: CriticEngine

    @abstractmethod
    def values(self, batch: CriticBatch) -> torch.Tensor:
        """[B, S - 1] float32: index t is the value of the state after token t. Differentiable, in the current mode."""

    @abstractmethod
    def positions(self, batch: CriticBatch) -> torch.Tensor:
        """[B, S]: the position every token really had."""

    @abstractmethod
    def state(self) -> Tensors:
        """Weights on the host in float32 under Hugging Face's names, the head as `v_head.summary.*`."""

    @abstractmethod
    def captured(self, batch: CriticBatch) -> Tensors:
        """Module inputs and outputs of one forward, [B, S, D] under Hugging Face's names, in call order."""

    @abstractmethod
    def attends(self) -> dict[str, Any]:
        """How it attends, as a readback says it: attention, padding_mask, positions."""

    def backward(self, loss: torch.Tensor, *, of: int, last: bool) -> None:
        """Add the gradients of one micro-batch's loss divided by the `of` micro-batches of this step."""
        self._engine.backward(loss, of=of, last=last)

    def step(self) -> float | None:
        """Apply the added gradients. Returns their norm before clipping, where the engine tells."""
        return self._engine.step()

    def readback(self) -> dict[str, Any]:
        """The controls as found in the built model, JSON-able."""
        config, head = self.config, self.head
        parameter, weight = next(self.model.parameters()), head.summary.weight.detach().float()
        drops = ((name, module) for name, module in self.model.named_modules() if isinstance(module, torch.nn.Dropout))
        return {
            "dtype": str(parameter.dtype).removeprefix("torch."),
            "device": str(parameter.device),
            "dropout": {name: float(module.p) for name, module in drops if module.p > 0},
            "head_dropout": float(head.dropout.p) if isinstance(head.dropout, torch.nn.Dropout) else 0.0,
            "head_weight_mean": float(weight.mean()),
            "head_weight_std": float(weight.std()) if weight.numel() > 1 else 0.0,
            "head_is_constant": bool((weight == weight.flatten()[0]).all()),
            "head_bias": None if head.summary.bias is None else float(head.summary.bias.detach().float()),
            "norm_eps": norm_eps(self.model),
            "padding_idx": _padding_idx(self.model),
            **{name: getattr(config, name) for name in _AS_CONFIGURED},
            "sources": dict(config.sources),
            **self.attends(),
            "float32_copies": self._engine.copies,
        }


class Built(Struct):
    """The Hugging Face model a critic starts from, and the head its checkpoint holds, if any."""

    causal_lm: Any
    head: Tensors = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def shape(self) -> Any:
        config = self.causal_lm.config
        return config.get_text_config() if hasattr(config, "get_text_config") else config


def make_head(config: CriticConfig, built: Built, notes: list[str]) -> ValueHead:
    """The head a configuration asks for: from the checkpoint, set by VALUE_HEAD_INIT, or drawn from the seed.

    Raises:
        ModelError: `value_head: checkpoint`, and the checkpoint has none.
    """
    head = ValueHead(built.shape.hidden_size, config.dropout, bias=config.value_head_bias, seed=config.seed)
    if config.value_head == "checkpoint" and not built.head:
        raise ModelError(
            "the checkpoint has no value head",
            file=config.pretrain,
            expected=f"a tensor {HEAD_WEIGHT}",
            found="a language model only",
            hint="value_head: fresh in critic.model_args draws one, VALUE_HEAD_INIT sets one",
        )
    with torch.no_grad():
        if built.head and config.value_head != "fresh":
            _take(head, built.head, config, notes)
        if config.value_head_init:
            head.summary.weight.fill_(config.value_head_init)
            if head.summary.bias is not None:
                head.summary.bias.zero_()
        elif not built.head or config.value_head == "fresh":
            drawn = f"drawn from seed {config.seed}"
            notes.append(f"the value head is fresh, {drawn}" + ("" if built.head else ": the checkpoint has none"))
        head.summary.weight.mul_(config.value_head_scale)
        if config.value_head_offset:
            if head.summary.bias is None:
                raise ModelError(
                    "value_head_offset needs a head with a bias", file=config.path, expected="value_head_bias: true"
                )
            head.summary.bias.add_(config.value_head_offset)
    return head


def _take(head: ValueHead, found: Tensors, config: CriticConfig, notes: list[str]) -> None:
    weight = found[HEAD_WEIGHT]
    if tuple(weight.shape) != tuple(head.summary.weight.shape):
        raise ModelError(
            "the checkpoint's value head does not fit its model",
            file=config.pretrain, tensor=HEAD_WEIGHT,
            expected=str(tuple(head.summary.weight.shape)), found=str(tuple(weight.shape)),
        )  # fmt: skip
    head.summary.weight.copy_(weight)
    if HEAD_BIAS in found and head.summary.bias is not None:
        head.summary.bias.copy_(found[HEAD_BIAS])
    elif HEAD_BIAS in found:
        notes.append("the checkpoint's value head has a bias, which this backend's head has not")


def head_state(head: ValueHead) -> Tensors:
    return {f"v_head.{name}": value.detach().float().cpu() for name, value in head.state_dict().items()}


def norm_eps(model: torch.nn.Module) -> list[float]:
    """The distinct epsilons of the model's norms."""
    found = set()
    for module in model.modules():
        if "norm" in type(module).__name__.lower():
            value = getattr(module, "variance_epsilon", getattr(module, "eps", None))
            if isinstance(value, float):
                found.add(value)
    return sorted(found)


def _padding_idx(model: torch.nn.Module) -> int | None:
    """The token whose embedding never trains: torch leaves its gradient out."""
    found = [module.padding_idx for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    return next((one for one in found if one is not None), None)
