"""Whether answers to held-out prompts are cut where those of training are not."""

from __future__ import annotations

from statistics import median

from replay_core.diagnose import trends
from replay_core.diagnose.finding import Finding, shown, warning
from replay_core.diagnose.rule import rule, skip_if
from replay_core.diagnose.signals import RunLog, Series

#: Evaluations of one length that is no chance, and how much longer training's answers are in the mean.
EVALUATIONS, LONGER = 6, 1.05
#: The share of held-out answers that is cut, evaluations of it, and what part of that training's may come to.
CUT, SEEN, OF_IT = 0.5, 3, 0.5
_CAUSE = (
    "the evaluation has its own limit of tokens (another key of the configuration, a default), shorter than the "
    "training's: answers that need more are wrong, however well they are learnt"
)
_NEXT = "compare max_new_tokens (max_response_length, max_completion_length) of evaluation and training"


@rule("L75", "held-out answers are cut where training's are not", link="trend", scope="signals",
      needs=("held_out_length|held_out_truncated",), lasts=True, explains=("D116", "L25", "L60"),
      source="an evaluation that has a limit of tokens of its own")  # fmt: skip
def cut_short(log: RunLog) -> Finding | None:
    """A share of cut answers of .5 and more in 3 evaluations and more, of which training has less than half: a warning.
    Or a mean length of held-out answers that is one whole number in all of 6 evaluations and more, which training's
    mean is above by a twentieth, while the reward rises and no held-out result does: all of them end at a limit.
    """
    for held in log.all("held_out_truncated"):
        share, here = trends.level(held.finite, SEEN), log.get("truncated")
        if len(held.finite) < SEEN or here is None or not here.finite or min(held.finite[-SEEN:]) < CUT or share > 1:
            continue
        if (trained := trends.level(here.finite)) < OF_IT * share:
            return warning(
                f"{share:.0%} of the held-out answers are cut, and {trained:.0%} of training's: {held.name}",
                held.ended,
                held.shown(share, f"about {trained:.2g}"),
                here.shown(trained),
                cause=_CAUSE,
                next_step=_NEXT,
            )
    lengths, here, reward = log.all("held_out_length"), log.get("response_length"), log.get("reward")
    skip_if(here is None or reward is None, "needs the lengths and the reward of training")
    assert here is not None
    assert reward is not None
    for held in lengths:
        values = held.finite
        one = len(values) >= EVALUATIONS and len(set(values)) == 1 and values[0] == int(values[0]) and values[0] > 1
        if not one or not here.finite or median(here.finite) < LONGER * values[0] or not _parts(log, reward):
            continue
        return warning(
            f"held-out answers all end at {values[0]:g} tokens: {held.name} is that in all {len(values)} evaluations, "
            f"training's mean is {median(here.finite):.3g}, and no held-out result rises with the reward",
            held,
            held.shown(values[0], "another mean as the policy learns"),
            here.shown(median(here.finite)),
            *(shown(f"{each.name}, first and last", f"{each.finite[0]:.3g}, {each.finite[-1]:.3g}")
              for each in log.all("held_out")[:1]),
            cause=_CAUSE,
            next_step=_NEXT,
        )  # fmt: skip
    return None


def _parts(log: RunLog, reward: Series) -> bool:
    """Whether the reward rises, and no held-out result does."""
    held = [one for one in log.all("held_out") if len(one.finite) >= EVALUATIONS]
    return trends.rises(reward.finite) and bool(held) and not any(trends.rises(one.finite) for one in held)
