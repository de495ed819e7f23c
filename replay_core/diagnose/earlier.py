"""What moved first in a log, where a symptom may have several causes: entropy before the spread of rewards is lost, or
before responses are cut.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from statistics import median

from replay_core.diagnose import trends
from replay_core.diagnose.signals import RunLog, Series, Told
from replay_core.regexes import regex

#: Nats per token of a policy that hardly samples; and of one that samples noise from the first step on.
HARDLY, NOISE = 0.1, 2.5
#: What is left of an entropy that has collapsed, steps that it is known of, and the share of all steps that are dead.
LEFT, STEPS, LATE = 0.25, 8, 0.6
#: How many times as long responses have got that grow into their limit.
GROWN = 1.3


def sure_policy(log: RunLog, dead: Sequence[int | None]) -> tuple[str, str] | None:
    """Words and cause, where groups have no spread since the policy is sure of one answer to each prompt: its entropy
    is next to 0 from the first step on, or has come down to a quarter and less before the steps that are `dead`.
    """
    series = log.get("entropy")
    if series is None or len(series.finite) < STEPS or min(series.finite) < 0 or not any(series.finite):
        return None
    begun, at = trends.level(series.finite[:3]), {point.step: point.value for point in series.points}
    there = [at[step] for step in dead if step in at]
    if not there:
        return None
    now = median(there)
    if begun < HARDLY and now < HARDLY:
        return (
            f": the policy hardly samples, its entropy is {now:.2g} nats per token from the first step on",
            "sampling is (nearly) greedy, so that all completions of a prompt are one: a temperature next to 0, a "
            "small top-p or top-k, or a model that was tuned to be sure",
        )
    if now < LEFT * begun and trends.drift(series.finite) < -trends.DRIFT_Z:
        return (
            f", after the policy's entropy fell from {begun:.3g} to {now:.2g} nats per token",
            "entropy collapse: the policy gives one answer to each prompt, so that its completions are alike and "
            "nothing is left to learn from. No KL or entropy term, a clip range that favours likely tokens, an entropy "
            "term of the wrong sign, or a learning rate that is too high",
        )
    return None


def noisy_policy(log: RunLog) -> float | None:
    """The entropy of a policy that samples noise from the first step on, while it earns next to nothing; else None."""
    series, reward = log.get("entropy"), log.get("reward")
    if series is None or reward is None or len(series.finite) < STEPS or not reward.finite:
        return None
    least = min(series.finite)
    # A tenth of the best that a reward of 0 to 1 comes to.
    return trends.level(series.finite) if least > NOISE and trends.level(reward.finite) <= 0.1 else None


#: Weights that a policy cannot do without, as the line names them that says they begin at random: a value's or a
#: score's head is meant to.
_FRESH = regex(r"newly initialized:?\s*(?P<names>\[[^\]\n]*\]?|[^\n]{1,200})")
_HEADS = regex(r"(?:score|v_head|value_head|classifier|summary)\b")


def fresh_weights(log: RunLog) -> Told | None:
    """What the log says of the policy's weights that no checkpoint held, and that begin at random."""
    for told in log.told:
        found = _FRESH.search(told.text)
        if found is not None and not _HEADS.search(found["names"]):
            return told
    return None


def names_in(text: str) -> str:
    """The names of such weights, the first few of them."""
    found = _FRESH.search(text)
    names = [] if found is None else re.findall(r"[\w.]+\.\w+", found["names"])
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return ", ".join(names[:2]) + more if names else "some of them"


def grown_lengths(log: RunLog, cut: Series) -> tuple[float, float] | None:
    """Mean lengths at first and now, where responses have grown into their limit: hardly any was cut at first, more and
    more are, and the length rises with it.
    """
    length = log.get("response_length")
    if length is None or min(len(length.finite), len(cut.finite)) < trends.MIN_STEPS:
        return None
    begun, now = median(length.finite[:3]), median(length.finite[-3:])
    rising = trends.rises(length.finite) and trends.rises(cut.finite)
    return (begun, now) if rising and now > GROWN * begun and median(cut.finite[:3]) < 0.1 else None
