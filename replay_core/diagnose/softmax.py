"""Whether log-probabilities were divided by a temperature after the softmax, where logits have to be before it.

log p / T is no log-probability: over a vocabulary its exponentials sum to another number than 1. Beside a trainer at
temperature 1 the rollout is then one factor of it, through the origin. Beside one that divides its logits, the two
differ by -log sum_i p_i^(1/T), which lies between what one other token and what all of them, equally, would leave.
"""

from __future__ import annotations

import numpy as np

from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.flat import Array

#: How far a factor is off 1 before it is one, and what it may leave of the difference (rms over rms).
FACTOR, LEFT = 0.1, 0.05
#: A temperature nearer to 1 tells nothing; tokens that have to lie within the bounds, give or take (nats).
NEAR, WITHIN, SLACK = 0.1, 0.98, 0.03
#: What part of the larger bound the difference has to come to; and of a temperature above 1, where a distribution that
#: is cut and renormalised has the same sign, its correlation with the bounds' middle.
PART, ALIKE = 0.5, 0.6
#: A difference that is less is rounding, nats; fewer tokens say nothing.
LEAST, FEWEST = 0.03, 16


def stated_temperature(batch: StepBatch) -> float | None:
    """The sampling temperature the dump states, where it is one for all."""
    stated = {
        scalar.value for scalar in batch.columns.scalars("temperature", "meta_info.generation_config.temperature")
    }
    each = batch.columns.per_sample("temperature")
    stated |= set() if each is None else set(each.tolist())
    if not stated:
        stated = {
            float(value) for name, value in batch.laid.flags.items()
            if isinstance(value, (int, float)) and (name == "temperature" or name.endswith("rollout.temperature"))
        }  # fmt: skip
    return stated.pop() if len(stated) == 1 else None


def divided_after_softmax(batch: StepBatch, trainer_K: Array, rollout_K: Array) -> float | None:
    """The temperature that the rollout's log-probabilities were divided by after the softmax, None where none is told.

    Args:
        trainer_K, rollout_K: of the compared tokens, nats.
    """
    d_K = trainer_K - rollout_K
    apart = float(np.sqrt((d_K * d_K).mean())) if d_K.size >= FEWEST else 0.0
    if apart < LEAST:
        return None
    factor = float(trainer_K @ rollout_K) / max(float(trainer_K @ trainer_K), 1e-12)
    left = float(np.sqrt(((rollout_K - factor * trainer_K) ** 2).mean()))
    if factor > 0 and abs(factor - 1) > FACTOR and left < LEFT * apart:
        return 1 / factor
    temperature = stated_temperature(batch)
    if temperature is None or temperature <= 0 or abs(temperature - 1) <= NEAR or batch.tokens_N is None:
        return None
    return temperature if _is_within(d_K, rollout_K * temperature, temperature, batch.tokens_N) else None


def _is_within(d_K: Array, at_one_K: Array, temperature: float, tokens_N: Array) -> bool:
    """Whether trainer - rollout is -log sum p^(1/T) of some distribution that gives the tokens `at_one_K` = log p."""
    log_p, others = np.minimum(at_one_K, -1e-9), max(int(tokens_N.max()), 1)
    log_rest = np.log(-np.expm1(log_p))
    one = -np.logaddexp(log_p / temperature, log_rest / temperature)
    every = -np.logaddexp(log_p / temperature, log_rest / temperature + (1 - 1 / temperature) * np.log(others))
    low, high = np.minimum(one, every), np.maximum(one, every)
    inside = float(((d_K > low - SLACK) & (d_K < high + SLACK)).mean())
    middle = (low + high) / 2
    far = np.abs(d_K).mean() > PART * max(float(np.abs(one).mean()), float(np.abs(every).mean()))
    if inside < WITHIN or not far:
        return False
    return temperature < 1 or bool(np.ptp(middle) > 0 and np.corrcoef(d_K, middle)[0, 1] > ALIKE)
