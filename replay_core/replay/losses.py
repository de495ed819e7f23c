"""Which loss a backward replay takes the gradient of, and its value. Formulas are objectives'; no torch import here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from replay_core.errors import RequestError
from replay_core.objectives import kl, policy_loss, reductions

KINDS = ("grpo", "ppo")
KL_ESTIMATORS = {"k1": kl.k1, "k2": kl.k2, "k3": kl.k3}
REDUCTIONS = ("token_mean", "sequence_mean", "token_sum")


@dataclass(frozen=True, slots=True)
class Loss:
    """The clipped policy-gradient loss of GRPO and PPO and its KL term.

    kl: coefficient of the penalty against the reference; 0 takes none.
    reduction: token_mean and sequence_mean are over this micro-batch; token_sum divides the sum by
        `tokens`, so that the micro-batches of a step add up to the step's token mean.
    tokens: the divisor of token_sum; None takes the recorded `tokens_of_step`.
    """

    kind: str = "grpo"
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl: float = 0.0
    kl_estimator: str = "k3"
    reduction: str = "token_mean"
    tokens: int | None = None

    def __post_init__(self) -> None:
        for name, choices in (("kind", KINDS), ("kl_estimator", tuple(KL_ESTIMATORS)), ("reduction", REDUCTIONS)):
            if getattr(self, name) not in choices:
                raise RequestError(
                    f"a loss has no {name} {getattr(self, name)!r}", expected=" | ".join(choices),
                    found=str(getattr(self, name)),
                )  # fmt: skip

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Loss:
        """The loss of JSON-able settings.

        Raises:
            RequestError: a setting that does not exist, or a value it cannot have.
        """
        known = {part.name for part in fields(cls)}
        unknown = sorted(set(mapping) - known)
        if unknown:
            raise RequestError(f"a loss has no {', '.join(unknown)}", expected=", ".join(sorted(known)))
        return cls(**mapping)

    @classmethod
    def parse(cls, text: str) -> dict[str, Any]:
        """The settings that `grpo,kl=0.001,clip_low=0.2,reduction=token_sum` names, and only those.

        Raises:
            RequestError: a setting that does not exist, or a value it cannot have.
        """
        settings: dict[str, Any] = {}
        for number, part in enumerate(text.split(",")):
            name, equals, value = part.partition("=")
            if number == 0 and not equals:
                settings["kind"] = name
                continue
            numeric = name in ("clip_low", "clip_high", "kl", "tokens")
            try:
                settings[name] = (int(value) if name == "tokens" else float(value)) if numeric else value
            except ValueError:
                raise RequestError(f"{name} of a loss is a number", expected="grpo,kl=0.001", found=part) from None
        cls.from_mapping(settings)
        return settings

    def to_mapping(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        penalty = f", {self.kl:g} x KL ({self.kl_estimator})" if self.kl else ", no KL term"
        over = f"{self.reduction.replace('_', ' ')}" + (f" / {self.tokens:,} tokens" if self.tokens else "")
        return f"{self.kind.upper()}: ratio clipped to -{self.clip_low:g}/+{self.clip_high:g}{penalty}, {over}"

    def value(self, logprobs_BT: Any, old_BT: Any, ref_BT: Any, advantages_BT: Any, mask_BT: Any) -> dict[str, Any]:
        """prob_ratio and token_loss [B, T] (0 outside the mask), pg_loss, kl_loss (where there is one) and loss.

        Raises:
            RequestError: a KL term without reference log-probabilities, or a sum without its divisor.
        """
        ratio_BT = policy_loss.ratio(logprobs_BT, old_BT)
        token_loss_BT = policy_loss.clipped(ratio_BT, advantages_BT, clip_low=self.clip_low, clip_high=self.clip_high)
        pg_loss = self._reduced(token_loss_BT, mask_BT)
        answer = {"prob_ratio": ratio_BT * mask_BT, "token_loss": token_loss_BT * mask_BT, "pg_loss": pg_loss}
        if not self.kl:
            return {**answer, "loss": pg_loss}
        if ref_BT is None:
            raise RequestError(
                "the loss has a KL term and the record no reference log-probabilities",
                expected="ref_logprobs",
                hint="--loss grpo,kl=0",
            )
        kl_loss = self._reduced(KL_ESTIMATORS[self.kl_estimator](logprobs_BT, ref_BT), mask_BT)
        return {**answer, "kl_loss": kl_loss, "loss": pg_loss + self.kl * kl_loss}

    def _reduced(self, values_BT: Any, mask_BT: Any) -> Any:
        if self.reduction == "token_mean":
            return reductions.token_mean(values_BT, mask_BT)
        if self.reduction == "sequence_mean":
            return reductions.sequence_mean(values_BT, mask_BT)
        if not self.tokens:
            raise RequestError("token_sum needs the number of tokens to divide by", hint="--loss grpo,tokens=4096")
        return reductions.masked_sum(values_BT, mask_BT) / self.tokens


def resolve(
    asked: Mapping[str, Any] | None, said: Mapping[str, Any] | None, tokens_of_step: int | None
) -> tuple[Loss, str]:
    """The loss to use and one sentence on where it comes from: asked for, recorded in the dump's flags, or assumed."""
    source = "as asked" if asked is not None else "as recorded" if said else "assumed: the dump records no loss"
    chosen = dict(asked if asked is not None else said or {})
    if tokens_of_step and "reduction" not in chosen:
        chosen["reduction"] = "token_sum"
    if chosen.get("reduction") == "token_sum":
        chosen["tokens"] = chosen.get("tokens") or tokens_of_step
    loss = Loss.from_mapping(chosen)
    return loss, f"loss {loss} ({source})"
