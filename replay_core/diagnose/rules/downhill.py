"""A run that unlearns: what it was paid at first is gone within its first updates."""

from __future__ import annotations

from collections.abc import Iterator

from replay_core.diagnose import trends
from replay_core.diagnose.finding import Finding, error, shown
from replay_core.diagnose.rule import Skip, given, rule
from replay_core.diagnose.signals import RunLog

#: Steps in which it is lost, and what is left of the first reward in every step after them.
WITHIN, LEFT = 6, 0.1
#: Less than this a few answers that were right by chance make.
AT_FIRST = 0.1


@rule("L36", "the reward is lost from the first update on", link="loss", scope="signals", needs=("reward",),
      lasts=True, explains=("D01", "D03", "D20", "D25", "L08", "L09", "L10", "L17", "L20"),
      source="a sign that is turned in loss or advantage")  # fmt: skip
def lost(log: RunLog) -> Iterator[Finding]:
    """The reward, .1 and more in the first step, falls in each of the next 2, to a tenth of the first within 6 steps,
    and stays below that in 8 steps and more: an error. What else breaks (length, answers cut off, entropy) comes after
    it. Not where a held-out result rises.
    """
    series = given(log.get("reward"))
    values = series.values
    if len(values) < trends.MIN_STEPS + 3 or len(series.finite) < len(values):
        raise Skip(f"needs the reward of {trends.MIN_STEPS + 3} steps")
    first = values[0]
    gone = next((at for at, value in enumerate(values) if value <= LEFT * first), len(values))
    falls = first >= AT_FIRST and values[1] < first and values[2] < values[1]
    if (
        not falls
        or not 2 <= gone < WITHIN
        or len(values) - gone < trends.MIN_STEPS
        or max(values[gone:]) > LEFT * first
    ):
        return
    if log.has("held_out") and trends.rises(given(log.get("held_out")).finite):
        return
    cut = log.get("truncated")
    before = cut is not None and cut.finite and max(cut.values[:gone]) < 0.25
    yield error(
        f"the reward falls from the first update on: {series.name} goes from {first:.3g} to {values[gone]:.3g} within "
        f"{gone + 1} steps and never comes back: the policy is trained to be worse",
        series.points[gone].where(series.name),
        evidence=[
            series.shown_at(series.points[gone], f"> {LEFT * first:.3g}"),
            shown("the largest reward after it", max(values[gone:]), f"was {first:.3g}"),
            *(
                [shown("largest share cut off until then", max(cut.values[:gone]))]
                if cut is not None and before
                else []
            ),
        ],
        cause="the sign of the loss or of the advantages is turned, or the judge pays the opposite while the logged "
        "reward is another; else one update destroys the policy: a learning rate that is far too high, a loss that is "
        "summed and not divided. Lengths, cut answers and groups without a spread follow from it",
        next_step="rldbg record -- YOUR COMMAND, then rldbg diagnose rldbg-dump; a turned sign shows in the first "
        "step's advantages and losses",
        steps=[p.step for p in series.points[gone:]],
    )
