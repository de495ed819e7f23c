"""A KL term that stands in the loss as a number, and in no gradient."""

from __future__ import annotations

import numpy as np

from replay_core.diagnose.algorithm import Algorithm, of_loss
from replay_core.diagnose.batch import StepBatch, largest_advantage
from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Finding, Where, shown, warning
from replay_core.diagnose.log_steps import steps_told
from replay_core.diagnose.rule import rule, skip_if
from replay_core.diagnose.signals import RunLog

#: Steps without an advantage that tell; nats per token that policy and reference are apart there; a KL, and what of it
#: is in the loss, that is no rounding.
STEPS, LINES, APART, KL, WEIGHED = 2, 3, 1e-2, 1e-3, 1e-7
_SOURCE = "SkyRL#1340, #1353: the KL of the loss is computed under no_grad"
_CAUSE = (
    "the KL is computed without a graph (torch.no_grad, detach, log-probabilities of the rollout, or the old ones): it "
    "is in the loss, and in the log, and holds the policy by nothing, whatever its coefficient; or such steps are "
    "skipped before the backward"
)
_NEXT = "print kl_loss.requires_grad; compute it of the log-probabilities that the policy loss is made of"


def in_loss(algorithm: Algorithm, flags: object) -> float:
    """The coefficient of a KL that is stated to be a term of the loss; 0 where none is."""
    own = of_loss(flags, "kl") if isinstance(flags, dict) else None
    if isinstance(own, (int, float)) and own:
        return float(own)
    switch = algorithm.is_on("use_kl_loss")
    weight = algorithm.number("kl_loss_coef") if switch else algorithm.number("beta") if switch is None else None
    return weight or 0.0


def _is_free(batch: StepBatch) -> float | None:
    """mean |policy - reference| of a batch without any advantage whose gradient is 0; None where it is not so."""
    norms = [one.value for one in batch.columns.scalars("grad_norm")]
    policy = batch.columns.of("policy_logprobs") or batch.trainer
    ref = batch.columns.of("ref_logprobs")
    if not norms or policy is None or ref is None or not batch.has("advantages") or largest_advantage(batch) > 0:
        return None
    both_N = batch.pair(policy, ref)
    if not both_N.any() or batch.trained_N is None:
        return None
    apart = float(np.abs(policy.values_N - ref.values_N)[both_N].mean())
    return apart if apart > APART and not any(norms) else -1.0 if apart > APART else None


@rule("D159", "the KL of the loss has no gradient", link="gradient", scope="case", lasts=True,
      explains=("D15", "L08", "L09"), source=_SOURCE)  # fmt: skip
def no_gradient(case: Case) -> Finding | None:
    """Steps in which every advantage of a token that counts is exactly 0 while policy and reference are .01 nats per
    token apart and more: all of the gradient is the KL's then. A warning where it is exactly 0 in all such steps (2 and
    more), a KL in the loss is stated with its coefficient, and other steps have a gradient.
    """
    weight = in_loss(case.algorithm, case.run.flags)
    skip_if(not weight, "no KL is stated to be in the loss")
    told: list[tuple[int | None, Where, float]] = []
    others = False
    for batch in case.batches():
        free = _is_free(batch)
        if free is None:
            others = others or any(one.value for one in batch.columns.scalars("grad_norm"))
            continue
        if free < 0:
            return None
        norm = batch.columns.scalars("grad_norm")[0]
        told.append((batch.step, batch.laid.where_record(norm.record, norm.name), free))
    if len(told) < STEPS or not others:
        return None
    return warning(
        f"the KL is in the loss and holds nothing: in {len(told)} steps without any advantage the gradient is exactly "
        "0 "
        f"although policy and reference are {told[0][2]:.2g} nats per token apart",
        told[0][1],
        shown("gradient norm", 0.0, "> 0"),
        shown("mean |policy - reference| there, nats", told[0][2]),
        shown("coefficient of the KL in the loss", weight),
        shown("steps that agree", len(told)),
        cause=_CAUSE,
        next_step=_NEXT,
        steps=[step for step, *_ in told],
    )


@rule("D159", "the KL of the loss has no gradient", link="gradient", scope="signals", needs=("kl", "grad_norm"),
      explains=("L08", "L09"), source=_SOURCE)  # fmt: skip
def logged_without(log: RunLog) -> Finding | None:
    """The same of a log: steps none of whose groups has a spread of rewards, with a KL of .001 and more: their gradient
    is the KL's. A warning where it is exactly 0 in all of them (3 and more), others have one, and the run states a
    coefficient of a KL in its loss.
    """
    weight = in_loss(log.algorithm, None)
    skip_if(not weight, "no KL is stated to be in the loss")
    far = log.get("kl")
    kl = {} if far is None else {point.step: point.value for point in far.points}
    known = [step for step in steps_told(log) if step.grad is not None and step.is_dead is not None]
    dead = [step for step in known if step.is_dead and kl.get(step.step, 0.0) > KL]
    dead = [step for step in dead if abs(weight * kl[step.step]) > WEIGHED and not step.is_cut]
    if len(dead) < LINES or any(step.grad for step in dead) or not any(step.grad for step in known):
        return None
    first = dead[0]
    return warning(
        f"the KL is in the loss and holds nothing: in {len(dead)} steps whose rewards do not differ the gradient is "
        f"exactly 0 although the KL is up to {max(kl[step.step] for step in dead):.3g}",
        first.point.where("grad_norm"),
        shown("gradient norm", 0.0, "> 0"),
        shown("KL there", kl[first.step]),
        shown("coefficient of the KL in the loss", weight),
        cause=_CAUSE,
        next_step=_NEXT,
        steps=[step.step for step in dead if step.step is not None],
    )
