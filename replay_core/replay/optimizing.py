"""The optimizer step of a backward replay: which one it is, said; the weights it leaves; and the model as it was.

A trainer's optimizer carries moments from earlier steps, which no dump holds: AdamW starts from zero here, so only
the first step of a run can come out the same, and the sentence says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

from replay_core.errors import RequestError
from replay_core.replay import spec

KINDS = ("adamw", "adam", "sgd")


class Optimizer(Struct, frozen=True):
    """Settings of one step; the defaults are torch's own AdamW, the clipping that every framework has.

    max_grad_norm: gradients are scaled down to this total norm first; 0 leaves them.
    """

    kind: str = "adamw"
    lr: float = 1e-6
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise RequestError(f"there is no optimizer {self.kind!r} here", expected=" | ".join(KINDS), found=self.kind)
        if not self.lr > 0:
            raise RequestError("the learning rate must be above 0", expected="adamw,lr=1e-6", found=str(self.lr))

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Optimizer:
        """The optimizer of JSON-able settings.

        Raises:
            RequestError: a setting that does not exist, or a value it cannot have.
        """
        return spec.made(cls, mapping, "an optimizer")

    @classmethod
    def parse(cls, text: str) -> dict[str, Any]:
        """The settings that `adamw,lr=1e-6,beta2=0.95` names, and only those; none of an empty text.

        Raises:
            RequestError: a setting that does not exist, or a value it cannot have.
        """
        numbers = {name: float for name in cls.__struct_fields__ if name != "kind"}
        settings = spec.parsed(text, "an optimizer", numbers, "adamw,lr=1e-6") if text else {}
        cls.from_mapping(settings)
        return settings

    def __str__(self) -> str:
        clip = f"gradients clipped to {self.max_grad_norm:g}" if self.max_grad_norm else "gradients not clipped"
        moments = "" if self.kind == "sgd" else f", betas {self.beta1:g}/{self.beta2:g}, eps {self.eps:g}"
        return f"{self.kind} lr {self.lr:g}{moments}, weight decay {self.weight_decay:g}, {clip}"

    def to_mapping(self) -> dict[str, Any]:
        return asdict(self)

    def build(self, parameters: Any) -> Any:
        """The torch optimizer over `parameters`."""
        import torch

        if self.kind == "sgd":
            return torch.optim.SGD(parameters, lr=self.lr, weight_decay=self.weight_decay)
        kind = torch.optim.AdamW if self.kind == "adamw" else torch.optim.Adam
        betas = (self.beta1, self.beta2)
        return kind(parameters, lr=self.lr, betas=betas, eps=self.eps, weight_decay=self.weight_decay)


def resolve(asked: Mapping[str, Any] | None, said: Mapping[str, Any] | None, step: int) -> tuple[Optimizer, str]:
    """The optimizer to use, and one sentence on where it comes from and what it lacks."""
    source = "as asked" if asked else "as recorded" if said else "assumed: the dump records no optimizer"
    optimizer = Optimizer.from_mapping(dict(asked or said or {}))
    moments = ""
    if optimizer.kind != "sgd":
        moments = "; its moments start from zero, as in the first step of a run"
        moments += f", which step {step} is not: the trainer's own were not recorded" if step else ""
    return optimizer, f"optimizer {optimizer} ({source}){moments}"


@contextmanager
def restored(causal_lm: Any) -> Iterator[None]:
    """The weights as they were, afterwards: the model is held for the next replay."""
    before = {name: parameter.detach().clone() for name, parameter in causal_lm.named_parameters()}
    try:
        yield
    finally:
        for name, parameter in causal_lm.named_parameters():
            parameter.data.copy_(before[name])


def stepped(optimizer: Optimizer, causal_lm: Any) -> tuple[dict[str, Any], float]:
    """(every weight after one step of its gradients, param.<name>; the norm of the whole update).

    The gradients are scaled in place where they are clipped.
    """
    import torch

    parameters = dict(causal_lm.named_parameters())
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    if optimizer.max_grad_norm:
        torch.nn.utils.clip_grad_norm_(list(parameters.values()), optimizer.max_grad_norm)
    optimizer.build(list(parameters.values())).step()
    update = torch.sqrt(
        sum(((parameter.detach() - before[name]).double() ** 2).sum() for name, parameter in parameters.items())
    )
    after = {f"param.{name}": parameter.detach().clone() for name, parameter in parameters.items()}
    return after, float(update)
