"""Policy against reference: where the KL starts, and which estimator the logged one is."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from replay_core.diagnose.batch import Batch
from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Finding
from replay_core.diagnose.flat import Array
from replay_core.diagnose.mismatch import FEWEST
from replay_core.diagnose.rule import Skip, rule
from replay_core.diagnose.stating import finding, look_at, shown
from replay_core.objectives import kl

#: Policy and reference are one model before the first update: from here on the difference is no kernel's.
MOVED = 1e-4
#: What no resumed run explains: about 0.8 per token is another chat template; above 1 another model.
OTHER_PROMPT, OTHER_MODEL = 0.5, 1.0


@rule("D15", "policy and reference differ before the first update", link="ref", scope="case",
      source="slime and miles debug guides (1e-8 with one kernel; about 0.8 per token: chat template)")  # fmt: skip
def reference_moved(case: Case) -> Iterator[Finding]:
    """mean |policy - ref| at step 0. Above 1e-4 it is worth saying (a run that resumed has it); 0.5 and more is a
    warning, more than 1 an error: another template, or another model. Skipped where step 0 is not in the dump.
    """
    for batch in case.batches():
        trainer, ref = batch.trainer, batch.column("ref_logprobs")
        if batch.step != 0 or trainer is None or ref is None:
            continue
        both_N = batch.pair(trainer, ref)
        if both_N.sum() < FEWEST:
            continue
        apart = np.abs(trainer.values_N[both_N] - ref.values_N[both_N])
        mean = float(apart.mean())
        if mean <= MOVED:
            return
        at = int(np.flatnonzero(both_N)[apart.argmax()])
        place = batch.where("ref_logprobs", at=at)
        yield finding(
            "D15",
            "error" if mean > OTHER_MODEL else "warning" if mean > OTHER_PROMPT else "info",
            f"policy and reference differ by {mean:.3g} nats per token at step 0",
            evidence=[
                shown("mean |policy - ref| at step 0", mean, "<= 1e-4", f"{trainer.source} - {ref.source}"),
                shown("largest", float(apart.max())),
            ],
            cause="the reference has other weights than the policy began with, or sees another chat template"
            if mean > OTHER_PROMPT
            else "the run resumed from a checkpoint, or policy and reference run different kernels",
            next_step=batch.replay_command(place, "--model POLICY --model REFERENCE --against ref_logprobs"),
            where=place,
            steps=(0,),
            scope="case",
        )
        return
    raise Skip("needs the policy's and the reference's log-probabilities of step 0")


#: KL estimators by the name a framework would use; the right order first.
_ESTIMATORS = {
    "k1": kl.k1,
    "k2": kl.k2,
    "k3": kl.k3,
    "k3 clamped to +-20 and +-10": kl.k3_clamped,
    "|log ratio|": kl.absolute,
}


def named_estimator(kl_N: Array, policy_N: Array, ref_N: Array) -> tuple[str, bool] | None:
    """Which estimator the values are, and whether policy and reference are swapped in it; None where none agrees."""
    for swapped in (False, True):
        a_N, b_N = (ref_N, policy_N) if swapped else (policy_N, ref_N)
        for name, estimate in _ESTIMATORS.items():
            expected = estimate(a_N, b_N)
            if (np.abs(kl_N - expected) <= 1e-5 + 1e-3 * np.abs(expected)).all():
                return name, swapped
    return None


@rule("D29", "the KL estimator is turned around", link="ref", scope="batch",
      needs=("kl", "ref_logprobs", "trainer_logprobs"),
      source="trl#2854, grail#42, marin#1708; Schulman 2020")  # fmt: skip
def estimator(batch: Batch) -> Iterator[Finding]:
    """Recomputes k1, k2, k3, k3 with verl's clamps, and |log r| from policy and reference, and with the two swapped.
    The recorded KL that agrees only with the swapped order is an error; a k3 below -1e-6 is impossible and an
    error; one that is none of them a warning. k1 itself may be negative. Zeros where nothing is penalised are
    fine.
    """
    recorded, ref = batch.column("kl"), batch.column("ref_logprobs")
    assert recorded is not None
    assert ref is not None
    policies = [column for column in (batch.column("policy_logprobs"), batch.column("old_logprobs")) if column]
    place = batch.where("kl", sample=0)
    best: tuple[str, bool] | None = None
    compared = 0
    for policy in policies:
        both_N = batch.pair(policy, ref) & recorded.said_N & np.isfinite(recorded.values_N)
        compared = max(compared, int(both_N.sum()))
        if both_N.sum() < FEWEST or not np.abs(policy.values_N[both_N] - ref.values_N[both_N]).max() > 1e-4:
            continue
        if not np.abs(recorded.values_N[both_N]).max() > 0:
            raise Skip("the recorded KL is 0 everywhere: no penalty was computed")
        found = named_estimator(recorded.values_N[both_N], policy.values_N[both_N], ref.values_N[both_N])
        if found is not None and not found[1]:
            return
        best = best or found
        lowest = float(recorded.values_N[both_N].min())
        if found is None:
            best = best or ("", False)
    if best is None:
        raise Skip("policy and reference are equal, or share too few tokens: every estimator is 0")
    if best[1]:
        yield finding(
            "D29",
            "error",
            f"the recorded KL is {best[0]} with policy and reference swapped",
            evidence=[shown("tokens that agree", compared, None, recorded.source)],
            cause="the arguments of the estimator are in the wrong order: its sign, or its weighting, is turned around",
            next_step=look_at(place),
            where=place,
        )
        return
    yield finding(
        "D29",
        "warning",
        "the recorded KL is none of k1, k2, k3 (clamped or not), |log ratio| of policy and reference",
        evidence=[
            shown("smallest recorded KL", lowest, "k2 and k3 are never negative", recorded.source),
            shown("tokens compared", compared),
        ],
        cause="it is computed from other log-probabilities than those recorded, or another estimator",
        next_step=look_at(place),
        where=place,
    )
