"""Whether samples were drawn from the policy: their mean -log p beside its entropy, in a log and in samples.

Of tokens drawn from p, -log p is the entropy of p on average, after whatever came before: the differences of a run's
tokens add up to no more than their own spread makes of them, however long responses are, and wherever they are cut.
"""

from __future__ import annotations

from statistics import median

import numpy as np

from replay_core.diagnose.algorithm import is_truncated
from replay_core.diagnose.case import Case
from replay_core.diagnose.compared import disagrees
from replay_core.diagnose.finding import Finding, shown, warning
from replay_core.diagnose.rule import given, rule, skip_if
from replay_core.diagnose.rules.figures import together
from replay_core.diagnose.signals import RunLog
from replay_core.diagnose.softmax import stated_temperature

#: How far the mean negative log-probability of the samples lies from the entropy, as a share of it: over 12 batches
#: noise comes to a tenth.
APART, SAMPLED = 0.2, 12
#: Of samples: that share, and how many standard errors it is; fewer tokens tell nothing. And how far a
#: micro-batch's log-probabilities may have moved, nats, when its entropies were taken.
OFF, ERRORS, FEWEST, MOVED = 0.1, 6.0, 256, 0.01


@rule("L33", "samples are not drawn from the policy", link="rollout_logprobs", scope="signals",
      needs=("policy_logprob", "entropy"), explains=("D09", "D12", "D14", "D24"), lasts=True,
      source="E[-log p] over samples of p is the entropy of p")  # fmt: skip
def drawn_otherwise(log: RunLog) -> Finding | None:
    """The policy's mean log-probability of the sampled tokens beside its entropy: over its own samples they are each
    other's negative. Less surprise than entropy by a fifth (median of 12 steps and more, nine of ten on that side) is
    sampling that is sharper than the policy (temperature below 1, top-p, top-k), more is one that is flatter: a
    warning.
    """
    rows = [(-logp, h) for _, (logp, h) in together(log.get("policy_logprob"), log.get("entropy")) if h > 0.05]
    skip_if(len(rows) < SAMPLED, f"needs the policy's log-probabilities and entropy of {SAMPLED} steps")
    shares = [surprise / h - 1 for surprise, h in rows]
    middle = median(shares)
    if abs(middle) < APART or sum(share * middle > 0 for share in shares) < 0.9 * len(shares):
        return None
    series = given(log.get("policy_logprob"))
    sharper = middle < 0
    return warning(
        f"samples are drawn from a {'sharper' if sharper else 'flatter'} distribution than the policy: its mean "
        f"-log p of them is {1 + middle:.2f} times its entropy, as another sampling temperature"
        + (" or top-p makes it" if sharper else " makes it"),
        series,
        shown("-mean log p / entropy, median", 1 + middle, "about 1", series.source),
        shown("steps compared", len(shares)),
        cause="the engine samples with a temperature (or top-p, top-k) that the trainer's log-probabilities lack",
        next_step="compare the sampling parameters with what the trainer divides its logits by; rldbg record -- YOUR "
        "COMMAND, then rldbg diagnose rldbg-dump --rule D10",
    )


@rule("L33", "samples are not drawn from the policy", link="rollout_logprobs", scope="case", lasts=True,
      explains=("D09", "D12", "D14", "D24"),
      source="E[-log p] over samples of p is the entropy of p")  # fmt: skip
def drawn_from_another(case: Case) -> Finding | None:
    """Mean of -log p - entropy over the tokens that count, by the policy that sampled them: 0 of its own samples.
    Off by a tenth of the entropy and by 6 standard errors, to one side in every step, over 256 tokens and more: a
    warning. Below is sampling that is sharper than the log-probabilities say (a temperature below 1, top-p, top-k,
    min-p, samples that were chosen), above one that is flatter.

    Of micro-batches that an update has moved by .01 nats before their entropies were taken, none counts, and no step in
    which engine and trainer disagree. Skipped where a temperature other than 1 is stated (entropies may be those at
    1), or top-p, top-k or min-p, or an off-policy run.
    """
    apart: list[np.ndarray] = []
    levels: list[float] = []
    where = None
    # Samples that do not join with what the engine recorded of their step are not what it sampled (D27).
    sampled = {batch.step for batch in case.batches() if batch.has("rollout_logprobs")}
    for batch in case.batches():
        if batch.step in sampled and not batch.has("rollout_logprobs"):
            continue
        policy, old, entropy = (batch.columns.of(name) for name in ("policy_logprobs", "old_logprobs", "entropy"))
        said = policy or old
        if said is None or entropy is None or batch.response_N is None:
            continue
        skip_if(abs((stated_temperature(batch) or 1) - 1) > 1e-6, "a temperature is stated: entropies may lack it")
        skip_if(is_truncated(batch.laid.algorithm), "top-p, top-k or min-p is stated")
        skip_if(batch.laid.algorithm.is_off_policy or batch.has("is_weights"), "the run is off-policy on purpose")
        both_N = batch.pair(said, entropy)
        if (rollout := batch.columns.of("rollout_logprobs")) is not None:
            both_N &= rollout.said_N & (rollout.values_N != 0)  # what no engine sampled is D41's
        if policy is not None and old is not None:
            moved_N = np.where(both_N & old.said_N, np.abs(policy.values_N - old.values_N), 0.0)
            moved_B, count_B = batch.flat.sum(np.nan_to_num(moved_N)), batch.flat.count(both_N)
            # By whole micro-batches: of samples, the sure ones move least, and they are no fair draw.
            keys = batch.laid.keys_of(policy.name)
            still_K = {
                key: sum(moved_B[at] for at in own) < MOVED * sum(count_B[at] for at in own)
                for key in set(keys)
                if (own := [at for at, each in enumerate(keys) if each == key])
            }
            both_N &= np.repeat([still_K[key] for key in keys], batch.flat.lengths_B)
        if not both_N.any() or disagrees(batch):
            continue
        apart.append(-said.values_N[both_N] - entropy.values_N[both_N])
        levels.append(float(entropy.values_N[both_N].mean()))
        where = where or batch.laid.where(said.name, at=int(np.flatnonzero(both_N)[0]))
    every_K = np.concatenate(apart) if apart else np.zeros(0)
    skip_if(every_K.size < FEWEST, f"needs entropies and log-probabilities of {FEWEST} tokens of the policy's own")
    level = sum(each * one.size for each, one in zip(levels, apart, strict=True)) / every_K.size
    off, noise = float(every_K.mean()), float(every_K.std()) / every_K.size**0.5
    if abs(off) < max(OFF * level, ERRORS * noise) or any(one.mean() * off <= 0 for one in apart):
        return None
    sharper = off < 0
    return warning(
        f"samples are drawn from a {'sharper' if sharper else 'flatter'} distribution than the policy: their mean "
        f"-log p is {level + off:.3g}, its entropy {level:.3g}, as a hidden sampling temperature"
        + (" below 1, top-p or top-k makes it" if sharper else " above 1 makes it"),
        where,
        shown("mean -log p of the samples, nats", level + off, f"about {level:.3g}"),
        shown("mean entropy, nats", level),
        shown("standard error of their difference", noise),
        shown("tokens", every_K.size),
        shown("steps", len(apart)),
        cause="the engine samples with settings that nobody states (temperature, "
        + ("top-p, top-k of a generation_config.json), or samples were chosen among more" if sharper else "a ban)")
        + ": the ratio takes them for the policy's own",
        next_step="set the engine's sampling parameters, and let it ignore the model's generation_config.json (vLLM: "
        "generation_config=vllm)",
        steps=[batch.step for batch in case.batches() if batch.step is not None and batch.has("entropy")],
    )
