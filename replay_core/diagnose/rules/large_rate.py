"""A learning rate that no recipe has, and a policy that is lost as soon as it is reached."""

from __future__ import annotations

import math
from statistics import median

from replay_core.diagnose.algorithm import learning_rate
from replay_core.diagnose.entropy_term import fitted_bonus
from replay_core.diagnose.finding import Finding, error, shown
from replay_core.diagnose.rule import given, rule, skip_if
from replay_core.diagnose.rules.ratio import NO_ADAPTERS
from replay_core.diagnose.signals import Point, RunLog, Series

#: Steps on either side; what is left of the reward that the first steps had, and from where on it is lost.
FEWEST, LEFT, LOST = 3, 0.25, 0.5
#: KL per token of a policy that has left its reference altogether; what is left of an entropy, and how far it grows.
FAR, SURE, NOISE = 1.0, 0.5, 2.0


@rule("L59", "the learning rate is far too high", link="optimizer", scope="signals", needs=("reward",), lasts=True,
      explains=("D01", "D02", "D03", "D20", "D24", "D25", "D46", "D74", "L01", "L02", "L08", "L09", "L10", "L14",
                "L16", "L17", "L18"),
      source="recipes: 1e-6 to 1e-5 for all weights, 1e-5 to 5e-4 for adapters (verl, TRL, tinker)")  # fmt: skip
def far_too_high(log: RunLog) -> Finding | None:
    """A learning rate over 1e-3 (logged, else stated), and a reward that falls within the first half of the run to a
    quarter of what its first 3 steps had and stays there, while the policy changes with it: KL to the reference over 1,
    or the entropy at half or at twice its beginning: an error. Half is left from the step on that is named.
    """
    rates = log.get("learning_rate")
    rate = max(rates.finite, default=0.0) if rates is not None else learning_rate(log.algorithm) or 0.0
    skip_if(not rate, "needs a learning rate, logged or stated")
    reward = given(log.get("reward"))
    at = _lost_from(reward)
    if rate <= NO_ADAPTERS or at is None or not (moved := _moved(log, reward.points[at])):
        return None
    skip_if(fitted_bonus(log) is not None, "the loss is the entropy bonus, which takes the reward: D25 tells of it")
    begun, now = median(reward.finite[:FEWEST]), median(reward.values[at:])
    from_here = reward.of(reward.points[at:])
    return error(
        f"the learning rate is far too high: it comes to {rate:.2g}, and the policy is destroyed at step "
        f"{reward.points[at].step}: {reward.name} falls from {begun:.3g} to {now:.3g} and does not come back",
        from_here,
        *([rates.shown(rate, f"< {NO_ADAPTERS:g}")] if rates is not None
          else [shown("learning rate that is stated", rate, f"< {NO_ADAPTERS:g}")]),
        reward.shown_at(reward.points[at], f"about {begun:.3g}"),
        *(series.shown_at(point) for series, point in moved),
        cause=f"updates of a rate {rate / 1e-5:,.0f} times 1e-5 take from the policy what it could do: a digit or unit "
        "of the rate, a scale by the number of ranks or micro-batches, a warm-up that ends there. What else is odd "
        "behind it (entropy, lengths, groups without a spread) follows from it",
        next_step="start again from a checkpoint before that step with 1e-6 to 1e-5 (adapters: 1e-5 to 5e-4), and a "
        "bound on the gradient (max_grad_norm 1)",
    )  # fmt: skip


def _lost_from(reward: Series) -> int | None:
    """From which point on the reward is lost, in the first half of its steps."""
    values = reward.values
    if len(values) < 4 * FEWEST or not all(map(math.isfinite, values)):
        return None
    begun = median(values[:FEWEST])
    # Of rewards that begin at nothing, or below, a share says nothing.
    if begun <= 0 or min(values) < 0:
        return None
    for at in range(1, len(values) // 2):
        if values[at] < LOST * begun and median(values[at:]) <= LEFT * begun:
            last = values[-max(FEWEST, len(values) // 4) :]
            return at if median(last) <= LEFT * begun else None
    return None


def _moved(log: RunLog, since: Point) -> list[tuple[Series, Point]]:
    """What tells that the policy is another one since then: a judge that fails leaves it as it was."""
    found = []
    for name in ("kl", "entropy"):
        series = log.get(name)
        if series is None or len(series.finite) < 2 * FEWEST or min(series.finite) < 0:
            continue
        begun = median(series.finite[:FEWEST])
        points = [p for p in series.points if math.isfinite(p.value) and (p.step or 0) + FEWEST >= (since.step or 0)]
        bad = next(
            (p for p in points
             if (p.value > FAR if name == "kl" else not SURE * begun <= p.value <= NOISE * begun)), None,
        )  # fmt: skip
        if bad is not None:
            found.append((series, bad))
    return found
