"""Which loss a backward replay takes the gradient of, and its value. Formulas are objectives'; no torch import here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

from replay_core.errors import RequestError
from replay_core.objectives import kl, policy_loss, preference, reductions, value_loss
from replay_core.objectives.arrays import library
from replay_core.replay import spec

KINDS = ("grpo", "ppo", "gspo", "cispo", "nll", "dpo", "value")
#: Those that a loss is made with: |log r| is a penalty in rewards.
KL_ESTIMATORS = {name: kl.ESTIMATORS[name] for name in ("k1", "k2", "k3")}
REDUCTIONS = ("token_mean", "sequence_mean", "sequence_sum", "token_sum")
#: A critic's loss is reduced the way its framework does it.
VALUE_REDUCTIONS = tuple(value_loss.REDUCTIONS)
_NUMBERS = {
    **dict.fromkeys(
        (
            "clip_low",
            "clip_high",
            "kl",
            "value_clip",
            "dual_clip",
            "divisor",
            "tokens",
            "beta",
            "entropy",
            "tis",
            "mis",
        ),
        float,
    )
}


class Loss(Struct, frozen=True):
    """The clipped policy-gradient loss of GRPO and PPO and its KL term; what the labels leave of the likelihood; DPO's
    loss of pairs; or PPO's value loss, of a critic.

    kind: grpo and ppo are one formula; gspo has the response's ratio for each token's, cispo clips it as a weight
        that has no gradient; nll is the negative log-likelihood of the labels; dpo is of rows of which the
        first half was chosen and the second rejected, pair by pair; value is the critic's.
    beta: how far DPO's policy may leave its reference.
    divisor: what a trainer divides each micro-batch's loss by: the micro-batches of a step.
    value_clip: how far a value may leave the recorded one; 0 does not clip. A critic's reduction is its framework's.
    kl: coefficient of the penalty against the reference; 0 takes none.
    entropy: coefficient of the bonus for entropy, which is taken from the loss.
    tis, mis: up to which ratio of trainer to engine a token's loss is weighed by it, or beyond which it is left out; 0
        does neither. rollout_level: the ratio of the token, or of its whole response (sequence).
    reduction: token_mean, sequence_mean and sequence_sum (the mean over responses of each one's sum) are over this
        micro-batch; token_sum divides the sum by
        `tokens`, so that the micro-batches of a step add up to the step's token mean.
    tokens: the divisor of token_sum; None takes the recorded `tokens_of_step`.
    """

    kind: str = "grpo"
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl: float = 0.0
    kl_estimator: str = "k3"
    reduction: str = "token_mean"
    tokens: float | None = None
    value_clip: float = 0.2
    dual_clip: float = 0.0
    divisor: float = 1.0
    beta: float = 0.0
    entropy: float = 0.0
    tis: float = 0.0
    mis: float = 0.0
    rollout_level: str = "token"

    def __post_init__(self) -> None:
        reductions_ = VALUE_REDUCTIONS if self.kind == "value" else REDUCTIONS
        for name, choices in (
            ("kind", KINDS),
            ("kl_estimator", tuple(KL_ESTIMATORS)),
            ("reduction", reductions_),
            ("rollout_level", ("token", "sequence")),
        ):
            if getattr(self, name) not in choices:
                raise RequestError(
                    f"a loss has no {name} {getattr(self, name)!r}", expected=" | ".join(choices),
                    found=str(getattr(self, name)),
                )  # fmt: skip

        if (self.kind == "dpo") != (self.beta > 0):
            raise RequestError(
                "beta is how far DPO's policy may leave its reference: above 0, and no other loss has it",
                expected="dpo,beta=0.1, or grpo,kl=0.1", found=f"{self.kind},beta={self.beta:g}",
            )  # fmt: skip

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Loss:
        """The loss of JSON-able settings.

        Raises:
            RequestError: a setting that does not exist, or a value it cannot have.
        """
        return spec.made(cls, mapping, "a loss")

    @classmethod
    def parse(cls, text: str) -> dict[str, Any]:
        """The settings that `grpo,kl=0.001,clip_low=0.2,reduction=token_sum` names, and only those.

        Raises:
            RequestError: a setting that does not exist, or a value it cannot have.
        """
        settings = spec.parsed(text, "a loss", _NUMBERS, "grpo,kl=0.001")
        said = settings.get("reduction")
        if isinstance(said, str):
            settings["reduction"] = _CALLED.get(said, said)
        cls.from_mapping({**_VALUE_DEFAULTS, **settings} if settings.get("kind") == "value" else settings)
        return settings

    def to_mapping(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        if self.kind == "value":
            clip = f"values clipped to +-{self.value_clip:g} around the recorded" if self.value_clip else "no clipping"
            return f"VALUE: half the squared error, {clip}, reduced as {self.reduction}"
        penalty = f", {self.kl:g} x KL ({self.kl_estimator})" if self.kl else ", no KL term"
        penalty += f", {self.entropy:g} x entropy taken off" if self.entropy else ""
        for word, cap in (("weighed by the engine's ratio up to", self.tis), ("left out past the engine's", self.mis)):
            penalty += f", {word} {cap:g} ({self.rollout_level})" if cap else ""
        over = f"{self.reduction.replace('_', ' ')}" + (f" / {self.tokens:,g} tokens" if self.tokens else "")
        over += f", divided by {self.divisor:g}" if self.divisor != 1 else ""
        if self.kind == "nll":
            return f"NLL: the negative log-likelihood of the labels, {over}"
        if self.kind == "dpo":
            parts = f", divided by {self.divisor:g}" if self.divisor != 1 else ""
            return f"DPO: chosen against rejected, beta {self.beta:g}, mean over pairs{parts}"
        clip = f"ratio clipped to -{self.clip_low:g}/+{self.clip_high:g}{self._dual()}"
        return f"{self.kind.upper()}: {clip}{penalty}, {over}"

    def _dual(self) -> str:
        return f" and at most {self.dual_clip:g} where the advantage is negative" if self.dual_clip else ""

    def of_values(self, values_BT: Any, old_values_BT: Any, returns_BT: Any, mask_BT: Any) -> dict[str, Any]:
        """token_loss [B, T] (the squared error, 0 outside the mask) and loss, of a critic.

        Raises:
            RequestError: the settings are an actor's.
        """
        if self.kind != "value":
            raise RequestError("a critic has a value loss", expected="--loss value,reduction=roll", found=str(self))
        error_BT = value_loss.squared_error(values_BT, returns_BT, old_values_BT, self.value_clip or None)
        loss = value_loss.REDUCTIONS[self.reduction](error_BT, mask_BT)
        return {"token_loss": error_BT * mask_BT, "loss": loss}

    def value(
        self, logprobs_BT: Any, old_BT: Any, ref_BT: Any, advantages_BT: Any, mask_BT: Any, rollout_BT: Any = None,
        entropy_BT: Any = None,
    ) -> dict[str, Any]:  # fmt: skip
        """prob_ratio and token_loss [B, T] (0 outside the mask), pg_loss, kl_loss and entropy where there are, loss.

        Raises:
            RequestError: a term without what it is made of, or a sum without its divisor.
        """
        if self.kind == "nll":
            return {"token_loss": -logprobs_BT * mask_BT, "loss": self._reduced(-logprobs_BT, mask_BT)}
        if self.kind == "dpo":
            return self._of_pairs(logprobs_BT, ref_BT, mask_BT)
        ratio_BT = policy_loss.ratio(logprobs_BT, old_BT)
        clips = {"clip_low": self.clip_low, "clip_high": self.clip_high}
        if self.kind == "cispo":
            token_loss_BT = policy_loss.clipped_weight(logprobs_BT, ratio_BT, advantages_BT, **clips)
        else:
            if self.kind == "gspo":
                ratio_BT = policy_loss.sequence_ratio(logprobs_BT, old_BT, mask_BT)
            token_loss_BT = policy_loss.clipped(ratio_BT, advantages_BT, **clips)
        if self.dual_clip:
            # Dual-clip PPO (arXiv 1912.09729) equation 5, as verl's clip_ratio_c.
            bounded_BT = token_loss_BT.clip(max=-advantages_BT * self.dual_clip)
            token_loss_BT = library(ratio_BT).where(advantages_BT < 0, bounded_BT, token_loss_BT)
        for cap, masks in ((self.tis, False), (self.mis, True)):
            if cap:
                rollout_BT = _needed(rollout_BT, "a weight by the engine's ratio", "rollout_logprobs")
                weight_BT = policy_loss.rollout_weight(old_BT, rollout_BT, mask_BT, cap, masks=masks,
                                                       of_sequence=self.rollout_level == "sequence")  # fmt: skip
                token_loss_BT = token_loss_BT * weight_BT
        pg_loss = self._reduced(token_loss_BT, mask_BT)
        answer = {"prob_ratio": ratio_BT * mask_BT, "token_loss": token_loss_BT * mask_BT, "pg_loss": pg_loss}
        loss = pg_loss
        if self.entropy:
            spread = self._reduced(_needed(entropy_BT, "a bonus for entropy", "logits"), mask_BT)
            answer, loss = {**answer, "entropy": spread}, loss - self.entropy * spread
        if not self.kl:
            return {**answer, "loss": loss}
        if ref_BT is None:
            raise RequestError(
                "the loss has a KL term and the record no reference log-probabilities",
                expected="ref_logprobs",
                hint="--loss grpo,kl=0",
            )
        kl_loss = self._reduced(KL_ESTIMATORS[self.kl_estimator](logprobs_BT, ref_BT), mask_BT)
        return {**answer, "kl_loss": kl_loss, "loss": loss + self.kl * kl_loss}

    def _of_pairs(self, logprobs_BT: Any, ref_BT: Any, mask_BT: Any) -> dict[str, Any]:
        if ref_BT is None or len(logprobs_BT) % 2:
            raise RequestError(
                "DPO's loss is of pairs and their reference's log-probabilities",
                expected="an even number of rows, chosen first, and ref_logprobs or a call of role ref on them",
                found=f"{len(logprobs_BT)} rows, {'no' if ref_BT is None else 'with'} reference log-probabilities",
            )
        each_P = preference.dpo((logprobs_BT * mask_BT).sum(-1), (ref_BT * mask_BT).sum(-1), beta=self.beta)
        return {"loss": each_P.mean() if self.divisor == 1 else each_P.mean() / self.divisor}

    def _reduced(self, values_BT: Any, mask_BT: Any) -> Any:
        of_sequences = {"sequence_mean": reductions.sequence_mean, "sequence_sum": reductions.sequence_sum_mean}
        if self.reduction not in of_sequences:
            return self.of_sum(reductions.masked_sum(values_BT, mask_BT), mask_BT)
        mean = of_sequences[self.reduction](values_BT, mask_BT)
        return mean if self.divisor == 1 else mean / self.divisor

    def of_sum(self, total: Any, mask_BT: Any) -> Any:
        """The loss of a sum over the tokens of the mask, by the reductions that are over tokens.

        Raises:
            RequestError: a sum without its divisor.
        """
        if self.reduction == "token_mean":
            mean = total / (mask_BT != 0).sum().clip(1)
        elif self.tokens:
            mean = total / self.tokens
        else:
            raise RequestError("token_sum needs the number of tokens to divide by", hint="--loss grpo,tokens=4096")
        return mean if self.divisor == 1 else mean / self.divisor


def _needed(values_BT: Any, term: str, name: str) -> Any:
    if values_BT is None:
        raise RequestError(f"the loss has {term}, and no {name} of this micro-batch are there", expected=name)
    return values_BT


#: What a value loss takes where nothing is said: OpenRLHF's mean over all tokens.
#: verl's names of the same (verl.trainer.ppo.core_algos.agg_loss, `loss_agg_mode`).
_CALLED = {"token-mean": "token_mean", "seq-mean-token-sum": "sequence_sum", "seq-mean-token-mean": "sequence_mean"}
_VALUE_DEFAULTS = {"kind": "value", "reduction": "openrlhf"}


def resolve(
    asked: Mapping[str, Any] | None,
    said: Mapping[str, Any] | None,
    tokens_of_step: float | None,
    *,
    is_critic: bool = False,
    is_labelled: bool = False,
) -> tuple[Loss, str]:
    """The loss to use and one sentence on where it comes from: asked for, recorded in the dump's flags, or assumed."""
    source = "as asked" if asked is not None else "as recorded" if said else "assumed: the dump records no loss"
    chosen = dict(asked if asked is not None else said or {})
    if is_critic:
        loss = Loss.from_mapping({**_VALUE_DEFAULTS, **chosen})
        return loss, f"loss {loss} ({source})"
    if is_labelled and "kind" not in chosen:
        chosen["kind"] = "nll"
        source = "assumed: labels are recorded and no advantages" if not said and asked is None else source
    if tokens_of_step and "reduction" not in chosen:
        chosen["reduction"] = "token_sum"
        source += f"; its reduction was not named: the record holds the step's {tokens_of_step:,g} tokens"
    if chosen.get("reduction") == "token_sum":
        chosen["tokens"] = chosen.get("tokens") or tokens_of_step
    loss = Loss.from_mapping(chosen)
    return loss, f"loss {loss} ({source})"
