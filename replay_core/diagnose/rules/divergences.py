"""A distance to a teacher that a loss should bring down, and that it pushes up."""

from __future__ import annotations

from statistics import fmean

import numpy as np

from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Finding, Where, error, share, shown
from replay_core.diagnose.rule import rule, skip_if
from replay_core.regexes import regex

#: Steps before it is no chance, the share of tokens below 0, and what a mean has to be below.
STEPS, NEARLY_ALL, BELOW = 3, 0.98, -1e-4
_DIVERGENCE = regex(r"(?i)(?:reverse|forward|rev|fwd)_?kl|kld?$|^kl|jsd|jensen|gkd|skew|divergence")
#: Steps in which the distance itself has to grow, and how many times.
GROWS, TIMES = 6, 1.5


@rule("D170", "the divergence from a teacher is negative", link="loss", scope="case", lasts=True,
      explains=("D147", "L08", "L10"),
      source="a Kullback-Leibler or Jensen-Shannon divergence is never below 0")  # fmt: skip
def turned(case: Case) -> Finding | None:
    """Where a teacher's log-probabilities are recorded and no advantages: losses of single tokens that are 0 and below
    in 98 of 100 that count, and below on average, in every step (3 and more): an error, as a divergence of two
    distributions is never negative, while a sample's log ratio is so at some tokens and not at others. Where one loss
    a step is recorded alone, and a divergence is stated: an error where it is below 0 in all of 6 and more, and the
    policy's distance to the teacher on what it sampled grows by half and more, from the first two steps to the last.
    """
    losses: list[float] = []
    tokens = below = 0
    means: list[float] = []
    apart: list[float] = []
    where: Where | None = None
    steps: list[int | None] = []
    for batch in case.batches():
        teacher = batch.columns.of("teacher_logprobs")
        own = batch.columns.of("policy_logprobs") or batch.columns.of("rollout_logprobs")
        if teacher is None or own is None or batch.columns.ref("advantages") is not None:
            continue
        both_N = batch.pair(teacher, own)
        if not both_N.any():
            continue
        steps.append(batch.step)
        apart.append(float((own.values_N - teacher.values_N)[both_N].mean()))
        losses += [one.value for one in batch.columns.scalars("loss")[:1]]
        each = batch.columns.of("token_loss")
        if each is not None:
            heard = each.values_N[both_N & each.said_N]
            tokens, below = tokens + heard.size, below + int((heard <= 0).sum())
            means.append(float(heard.mean()) if heard.size else 0.0)
            where = where or batch.laid.where("token_loss", sample=0)
        elif where is None:
            scalar = next(iter(batch.columns.scalars("loss")), None)
            where = None if scalar is None else Where.of(scalar.record, "loss")
    skip_if(not steps, "needs a teacher's log-probabilities, and losses made of them without advantages")
    if len(means) >= STEPS and len(means) == len(steps):
        if below < NEARLY_ALL * tokens or max(means) >= BELOW:
            return None
        evidence = [
            shown("tokens whose loss is 0 or below", share(below, tokens), "few"),
            shown("mean loss of a token", fmean(means), "> 0"),
        ]
    else:
        stated = case.algorithm.word("loss_type", "kl_loss_type", "distillation_loss", "divergence", "kd_loss_type")
        if not _DIVERGENCE.search(stated) or len(losses) < GROWS or max(losses) >= BELOW:
            return None
        if not np.mean(apart[-2:]) > TIMES * max(float(np.mean(apart[:2])), 0.0) + 1e-3:
            return None
        evidence = [shown("loss, first and last step", f"{losses[0]:.4g}, {losses[-1]:.4g}", "> 0")]
    return error(
        "the divergence from the teacher is negative: the loss drives the policy away from it",
        where,
        *evidence,
        shown("mean log policy - log teacher of what was sampled, first and last step",
              f"{apart[0]:.4g}, {apart[-1]:.4g}", "falls"),
        cause="the sign of the divergence is turned, or its two distributions stand the wrong way round in one "
        "difference: what is to be brought down is pushed up",
        steps=steps,
    )  # fmt: skip
