"""What applies a critic's gradients: the plain torch loop here, DeepSpeed's engine beside its critic."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch

from replay_core.parity.config import CriticConfig


class CriticEngine(ABC):
    """Owns a model's optimizer. Micro-batches are added up, then applied at once."""

    name: str
    config: CriticConfig
    optimizer: torch.optim.Optimizer
    #: Whether half-precision weights are updated through float32 copies; None where the weights are float32.
    copies: bool | None = None
    _steps = 0

    @abstractmethod
    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """The model's values."""

    @abstractmethod
    def backward(self, loss: torch.Tensor, *, of: int, last: bool) -> None:
        """Add the gradients of one of a step's `of` micro-batches."""

    @abstractmethod
    def step(self) -> float | None:
        """Apply what was added; the norm before clipping, or None where the engine does not tell."""

    @staticmethod
    def adam(parameters: Iterable[torch.nn.Parameter], config: CriticConfig) -> torch.optim.Optimizer:
        """The same AdamW for every engine: torch's, single-tensor, so that only the critics can differ."""
        return torch.optim.AdamW(
            [parameter for parameter in parameters if parameter.requires_grad],
            lr=config.learning_rate, weight_decay=config.weight_decay, foreach=False,
        )  # fmt: skip

    def warm_up(self) -> None:
        """Set the learning rate of the coming step: linear over `warmup_steps`, then constant."""
        self._steps += 1
        share = min(1.0, self._steps / self.config.warmup_steps) if self.config.warmup_steps else 1.0
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate * share


class TorchEngine(CriticEngine):
    """Forward, backward, clip, AdamW. Weights of half precision are updated through float32 copies of them, as
    DeepSpeed's and Megatron's own optimizers do."""

    def __init__(self, model: torch.nn.Module, config: CriticConfig, why: str = "") -> None:
        self.config, self._model = config, model
        self._own = [parameter for parameter in model.parameters() if parameter.requires_grad]
        half = any(parameter.dtype != torch.float32 for parameter in self._own)
        self._updated = [one.detach().float().requires_grad_() for one in self._own] if half else self._own
        self.copies = True if half else None
        self.optimizer = self.adam(self._updated, config)
        self.name = f"torch {torch.__version__}" + (f" ({why})" if why else "")

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = self._model(*inputs)
        return value

    def backward(self, loss: torch.Tensor, *, of: int, last: bool) -> None:
        (loss / of).backward()
        if self._updated is self._own:
            return
        for own, copy in zip(self._own, self._updated, strict=True):
            if own.grad is not None:
                copy.grad = own.grad.float() if copy.grad is None else copy.grad + own.grad.float()
                own.grad = None

    def step(self) -> float | None:
        norm = torch.nn.utils.clip_grad_norm_(self._updated, self.config.max_grad_norm or float("inf"))
        self.warm_up()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self._updated is not self._own:
            with torch.no_grad():
                for own, copy in zip(self._own, self._updated, strict=True):
                    own.copy_(copy)
        return float(norm)


def lone_process_group(backend: str) -> None:
    """A process group of this process alone, without a port: nothing else can join it."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
