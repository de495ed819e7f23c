"""What is paid for beside what is right: a reward that is earned while hardly an answer is correct."""

from __future__ import annotations

from replay_core.diagnose import trends
from replay_core.diagnose.finding import Finding, warning
from replay_core.diagnose.rule import given, rule, skip_if
from replay_core.diagnose.signals import RunLog, Series
from replay_core.regexes import regex

#: Steps; the share of right answers that is as good as none, and what is paid beside it; a reward with nothing to gain.
FEWEST, NONE, PAID, ALL = 5, 0.05, 0.5, 0.95
_RIGHT = regex(r"(?i)accura|correct|exact|solved|(?:^|[/_.])acc(?:$|[@/_.])")


@rule("L45", "what is paid for is not what is right", link="rewards", scope="signals", needs=("reward",),
      explains=("L17", "D01", "L40", "L01"), source="a proxy that is rewarded: code that compiles, an answer that is "
      "long")  # fmt: skip
def paid(log: RunLog) -> Finding | None:
    """A reward between 0 and 1 that comes to .5 and more, by a rise that is no chance or at .95 from the first steps
    on,
    while a share of right answers that is logged beside it stays at 5 % and less in every third of the run (5 steps and
    more): a warning.
    """
    reward = given(log.get("reward"))
    rights = [
        one for one in log.all("reward_function")
        if _RIGHT.search(one.name) and len(one.finite) >= FEWEST and min(one.finite) >= 0 and max(one.finite) <= 1
    ]  # fmt: skip
    values = reward.finite
    skip_if(not rights or len(values) < FEWEST, f"needs a reward, and a share of right answers, of {FEWEST} steps")
    third = max(len(values) // 3, 1)
    now = sum(values[-third:]) / third
    if min(values) < 0 or max(values) > 1 or now < PAID:
        return None
    if not (trends.drift(values) > trends.DRIFT_Z or trends.level(values[:3]) >= ALL):
        return None
    right = min(rights, key=_most)
    # A component that weighs little is no measure of right answers: some may be small by what they are.
    if _most(right) > NONE or any(_most(other) > NONE for other in rights):
        return None
    return warning(
        f"{reward.name} comes to {now:.3g} while {right.name} stays at {right.finite[-1]:.2g}: what is paid for is not "
        "what is right",
        reward.ended,
        reward.shown(reward.last.value, f"was {values[0]:.3g}"),
        right.shown(right.last.value, f"> {NONE:g}"),
        cause="the reward is a proxy (code that compiles, a form, a length) that is earned without solving the task, "
        "and "
        "the policy learns the proxy"
        + ("; it is earned by all, so that no group has a spread" if min(values) >= ALL else ""),
        next_step="read ten responses with a full reward; pay for right answers, or nothing without one",
    )


def _most(series: Series) -> float:
    """The largest mean of a third of its steps."""
    values = series.finite
    third = max(len(values) // 3, 1)
    return max(sum(values[at : at + third]) / third for at in range(0, len(values) - third + 1, third))
