"""The policy's entropy over the steps: collapsed, or growing."""

from __future__ import annotations

from collections.abc import Iterator

from replay_core.diagnose import trends
from replay_core.diagnose.algorithm import entropy_bonus
from replay_core.diagnose.entropy_term import STRONG, fitted_bonus
from replay_core.diagnose.falling_apart import falls_apart, lost_since, spike_before
from replay_core.diagnose.finding import Finding, finding, shown
from replay_core.diagnose.leaps import falls_in_training_alone
from replay_core.diagnose.rule import Skip, given, rule
from replay_core.diagnose.signals import RunLog, Series

ENTROPY_MIN = 0.05
ENTROPY_GROWTH = 2.0
#: And by how much more, nats, half as much again is too much: near the uniform policy it cannot double.
MORE, HALF = 0.7, 1.5
#: Of a climb, where it begins.
ONSET = 0.1
#: A rise by so much, nats, of a policy whose loss is a bonus on it.
LITTLE = 0.3
#: And how many times its beginning is a policy that falls apart, where the reward falls with it.
APART = 3.0
#: How many times smaller entropy gets before it is a collapse: runs that learn halve it.
FALLEN = 4.0
#: And where the reward rises with it: a policy that learns one answer to a prompt gets sure of it.
FALLEN_LEARNING = 12.0
#: The part of a run in which an entropy that is lost is lost early; what is left of one that is gone; of the best
#: quarter's reward, what the last one holds of a policy that learns.
EARLY, GONE, HELD = 5, 50.0, 0.8
#: A reward near 1; steps that tell where a run began.
RIGHT, MIN_FIRST = 0.8, 5
#: What is left of an entropy that has been low all along.
ALWAYS = 0.5
#: Rank correlation of entropy and reward: it falls as far as the answers get right, however far that is.
IN_PACE = 0.9
#: Normal quantile of p = 0.05, one-sided: a reward that rests does not rise by so much.
GAINS = 1.645


@rule("D25", "entropy collapses or explodes", link="trend", scope="signals", needs=("entropy",),
      explains=("D01", "D20", "L08", "L09", "L10", "L17", "L50"),
      source="verl#5953, #2738; rllm#116")  # fmt: skip
def entropy(log: RunLog) -> Iterator[Finding]:
    """Level of the mean token entropy (nats): under 0.05 a warning (info down to a fifth of that, and a twelfth of
    its beginning, over 16 steps and more where the reward does not fall and is .8 and more of 1, or rises, or the
    entropy began under .1); over twice its beginning (or .7 nats and half as much more; .7 nats alone where the
    reward falls) and rising, or under a quarter of it and falling, too; an error where the reward falls while it
    comes to three times its beginning (a warning where all of it is lost: L08 says so, unless the entropy leaves its
    range first, comes to twice its beginning, and no spike of the gradient stands before), or where it rises by .3 nats
    and more, no reward does, and the loss is minus the entropy times a coefficient over .05 (fitted, all but a
    twentieth of its spread): a bonus that outweighs the reward; or
    where a bonus over .05 is stated and the reward falls. Info where the reward rises meanwhile (and does not
    fall in its last quarter) and the entropy grows without a stated bonus over .05; or where it rises while a twelfth
    of the entropy is left (by what chance explains in one case of twenty), or to .8 and more of 1, or step by step as
    that falls (rank correlation below -.9). Info as well where the entropy goes by and by (no twelfth is left after
    the first fifth of 16 steps and more is early; a fiftieth is gone) while the reward rises and its last quarter
    holds .8 of its best, or rises in the last third from less than that.

    For growth the median of the last 3 steps is held against that of the first 3; it needs 8 steps and a rise that
    chance does not explain. An entropy of exactly 0 in every step is one that was not computed.
    """
    series = log.get("entropy")
    values = [] if series is None else series.finite
    if series is None or not any(values):
        raise Skip("the logged entropy is 0 or not finite in every step: it was not computed")
    if min(values) < 0:
        raise Skip(f"{series.name} is negative: a loss term, not an entropy")
    now = trends.level(values)
    if now < ENTROPY_MIN:
        sure = _is_sure(values, now, log.get("reward"))
        # What was as low at first has not collapsed.
        always = len(values) > MIN_FIRST and max(values[:3]) < ENTROPY_MIN and now > ALWAYS * trends.level(values[:3])
        yield finding(
            # A task of one answer may end there: it contradicts nothing that is stated.
            "info" if sure else "warning",
            f"the policy's entropy is {now:.3g} nats per token: it hardly samples"
            + (", from the first step on" if always else " any more"),
            series.between(under=ENTROPY_MIN),
            series.shown(now, f"> {ENTROPY_MIN:g}"),
            cause="the policy is sure of its answers, and the reward holds; should the reward stop below what is "
            "wanted, it no longer explores"
            if sure
            else "a model that was tuned to be sure, or a low temperature: nothing has fallen"
            if always
            else "entropy collapse: no KL or entropy term, a clip range that favours likely tokens, a low temperature",
            next_step="raise the upper clip bound, add an entropy or KL term, check the sampling temperature",
        )
    begun, now = trends.level(values[:3]), trends.level(values, 3)
    if ENTROPY_MIN <= now < begun / FALLEN and trends.drift(values) < -trends.DRIFT_Z:
        reward = log.get("reward")
        rises = reward is not None and trends.drift(reward.finite) > GAINS
        learns = (
            rises
            and (
                now >= begun / FALLEN_LEARNING
                or trends.together(values, given(reward).finite) < -IN_PACE
                or _is_right(given(reward).finite)
            )
        ) or (reward is not None and _falls_as_it_learns(values, reward.finite))
        # What is lost within one step, in training alone, the entropy has not taken.
        learns = learns or falls_in_training_alone(log) is not None
        yield finding(
            "info" if learns else "warning",
            f"the policy's entropy has fallen from {begun:.3g} to {now:.3g} nats per token",
            series.between(under=begun / FALLEN),
            series.shown(now, f"> {begun / FALLEN:.3g}"),
            cause="the policy gets sure of its answers while the reward rises; should it fall on, it no longer explores"
            if learns
            else "entropy collapse: no KL or entropy term, a clip range that favours likely tokens, a learning rate "
            "too high",
            next_step="raise the upper clip bound, add an entropy or KL term, lower the learning rate",
        )
    yield from _grown(log, series, begun, now)


def _is_sure(values: list[float], now: float, reward: Series | None) -> bool:
    """Whether a low entropy is that of a policy that is right, learns, or was tuned to be sure before the run began."""
    rewards = [] if reward is None else reward.finite
    if _falls_as_it_learns(values, rewards):
        return True
    # A twelfth and less of what it began with is a collapse, whatever the answers earn on the way.
    if min(len(values), len(rewards)) < 2 * trends.MIN_STEPS or (
        now < max(ENTROPY_MIN / 5, trends.level(values[:3]) / FALLEN_LEARNING)
    ):
        return False
    if _is_right(rewards):
        return True
    if trends.level(rewards) <= 0 or trends.drift(rewards) < -trends.DRIFT_Z:
        return False
    return trends.rises(rewards) or trends.level(values[:MIN_FIRST], MIN_FIRST) < 2 * ENTROPY_MIN


def _falls_as_it_learns(values: list[float], rewards: list[float]) -> bool:
    """Whether the entropy goes by and by, to no less than a fiftieth, while the run learns: it is not down to a twelfth
    within the first fifth, and the reward rises and holds what it had, or rises in the last third (a harder stage).
    """
    if min(len(values), len(rewards)) < 2 * trends.MIN_STEPS:
        return False
    begun = trends.level(values[:3])
    early = trends.level(values[: max(trends.MIN_STEPS, len(values) // EARLY)], 3)
    if early < begun / FALLEN_LEARNING or trends.level(values) < begun / GONE:
        return False
    quarter = len(rewards) // 4
    best = max(trends.level(rewards[at : at + quarter], quarter) for at in range(0, 4 * quarter, quarter))
    now = trends.level(rewards, quarter)
    # What rises in the last steps alone was not learnt as the entropy fell.
    if trends.rises(rewards) and trends.rises(rewards[: -(len(rewards) // EARLY)]):
        return now >= HELD * best
    return 0 < now < HELD * best and trends.rises(rewards[-(len(rewards) // 3) :])


def _is_right(rewards: list[float]) -> bool:
    """Whether the run has come to answers that are right; on another scale than 0 to 1 a level alone says nothing."""
    return max(rewards) <= 1 and trends.level(rewards) >= max(RIGHT, 0.9 * max(rewards))


def _grown(log: RunLog, series: Series, begun: float, now: float) -> Iterator[Finding]:
    limit = min(ENTROPY_GROWTH * begun, max(begun + MORE, HALF * begun))
    reward = log.get("reward")
    lost = reward is not None and trends.drift(reward.finite) < -trends.DRIFT_Z
    if lost:
        # Near the uniform policy it can neither double nor grow by half.
        limit = min(limit, begun + MORE)
    bonus = None if reward is not None and trends.rises(reward.finite) else fitted_bonus(log)
    if bonus is not None:
        limit = min(limit, begun + LITTLE)
    if not (begun > 0 and now > limit and trends.rises(series.finite)):
        return
    onset = begun + ONSET * (now - begun)
    stated = entropy_bonus(log.algorithm)
    large = stated is not None and stated > STRONG
    # A bonus that no recipe has, and an entropy that rises until the reward is lost: that is no cause among several.
    outweighs = large and lost
    leads = lost and now > GROWS_AT_LEAST * begun and _goes_first(log, series, given(reward))
    # A policy that falls apart earns less; one that explores more (a higher clip bound, a small bonus) need not.
    learns = not large and bonus is None and reward is not None and trends.rises(reward.finite) and _holds(reward)
    yield finding(
        "error"
        if (lost and now > APART * begun and falls_apart(log) is None) or bonus is not None or leads or outweighs
        else "info"
        if learns
        else "warning",
        f"the policy's entropy has grown from {begun:.3g} to {now:.3g} nats per token"
        + (
            f": the loss is the entropy bonus, {bonus:.3g} times it"
            if bonus is not None
            else f", with an entropy bonus of {stated:g} times it in the loss, where recipes have up to {STRONG:g}"
            if large
            else " while the reward rises"
            if learns
            else f", from step {series.first(over=onset).step} on, and then the reward falls with it"
            if leads and not _while_it_falls(reward)
            else f", from step {series.first(over=onset).step} on, and behind it the reward falls"
            + _while_it_falls(reward).removeprefix(" while the reward falls")
            if leads
            else _while_it_falls(reward)
            if lost
            else ""
        ),
        series.between(over=onset),
        series.shown(now, f"< {limit:.3g}"),
        *([] if bonus is None else [shown("coefficient of the entropy in the loss, fitted", bonus, f"< {STRONG:g}")]),
        cause="the entropy bonus is far too large: it outweighs the reward, and the policy becomes uniform, which "
        "ends no answer and earns nothing"
        if bonus is not None
        else "the entropy bonus is larger than recipes have it: where it outweighs the reward, the policy becomes "
        "uniform"
        if large
        else "the policy explores more, and earns more: a higher clip bound, an entropy bonus; should the reward turn, "
        "it falls apart"
        if learns
        else _LEADS
        if leads
        else "entropy bonus too strong, off-policy noise, or a policy that falls apart (log V is a uniform one)",
        next_step="look at reward and response length at the same steps; lower the entropy bonus or the learning rate",
    )


#: How many times its beginning an entropy comes to that leads what a policy loses; a step that begins a growth, in
#: parts of what it grows by.
GROWS_AT_LEAST, LEFT = 2.0, 0.15
_LEADS = (
    "the entropy leaves its range first, and what is earned follows: an entropy bonus that is too strong (or of "
    "the wrong "
    "sign or unit) drives the policy to a uniform one (log V), which ends no answer and earns nothing; else "
    "updates that "
    "are noise (old samples, a turned sign)"
)


def _goes_first(log: RunLog, series: Series, reward: Series) -> bool:
    """Whether the entropy has left where it began before the reward fell to half, and none of a spike's gradient."""
    if falls_apart(log) is None:
        return False
    begun, now = trends.level(series.finite[:3]), trends.level(series.finite)
    left = next((p.step for p in series.points if p.value > begun + LEFT * (now - begun)), None)
    fell = lost_since(reward).step
    if left is None or fell is None or left >= fell or spike_before(log, fell) is not None:
        return False
    length = log.get("response_length")
    longer = None if length is None else _leaves(length)
    return longer is None or left <= longer


def _leaves(series: Series) -> int | None:
    """The step at which a figure has gone a third of its way from beginning to end, where that way is half and more."""
    begun, now = trends.level(series.finite[:3]), trends.level(series.finite)
    if not abs(now - begun) >= abs(begun) / 2:
        return None
    return next((p.step for p in series.points if abs(p.value - begun) > abs(now - begun) / 3), None)


def _while_it_falls(reward: Series | None) -> str:
    """How far the reward has fallen with it."""
    values = [] if reward is None else reward.finite
    begun, now = trends.level(values[:3]), trends.level(values, 3)
    return f" while the reward falls from {begun:.3g} to {now:.3g}" if now < begun else ""


def _holds(reward: Series) -> bool:
    """Whether the last quarter of the rewards is still above the first half of them, and does not fall."""
    values = reward.finite
    last = values[-max(trends.MIN_STEPS, len(values) // 4) :]
    return trends.level(last, len(last)) > trends.level(values[: len(values) // 2], len(values)) and (
        trends.drift(last) >= -trends.DRIFT_Z
    )
