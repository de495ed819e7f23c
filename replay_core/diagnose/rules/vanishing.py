"""A gradient that fades away while the reward is far from its best: what is trained no longer moves."""

from __future__ import annotations

from statistics import median

from replay_core.diagnose import trends
from replay_core.diagnose.finding import Finding, finding, shown
from replay_core.diagnose.rule import given, rule, skip_if
from replay_core.diagnose.signals import RunLog

#: Lines, what is left of the first lines' norm, and what a norm is at most that moves next to nothing.
LINES, LEFT, NOTHING = 16, 1e-3, 1e-3
#: A share of what a reward that lies between 0 and 1 can be, from which on there is little left to learn.
SOLVED = 0.9


@rule("L51", "the gradient fades away", link="gradient", scope="signals", needs=("grad_norm", "reward"),
      explains=("L40", "L01", "L14"),
      source="rldbg; saturated heads and logits, losses that are scaled down step by step")  # fmt: skip
def fades(log: RunLog) -> Finding | None:
    """The gradient norm's last third (16 lines and more) is below a thousandth of its first lines', and below .001,
    and it has come there by and by, while the reward is below .9 of the 1 that it can come to, and does not rise: a
    warning. Worth knowing alone where every answer is right, or the reward has risen over the run and is at .9 of its
    best.
    """
    norms, reward = given(log.get("grad_norm")), given(log.get("reward"))
    values = norms.finite
    skip_if(len(values) < LINES or not reward.finite, f"needs the gradient norm of {LINES} lines")
    last = values[-(len(values) // 3) :]
    begun, now = trends.level(values[: max(3, len(values) // 8)]), median(last)
    if not 0 <= now < min(LEFT * begun, NOTHING) or max(last) > 10 * NOTHING:
        return None
    # A norm that is 0 from one step to the next is no fading: D23 asks why.
    fading = values[: values.index(0.0)] if 0.0 in values else values
    if trends.drift(fading) > -trends.DRIFT_Z:
        return None
    level = trends.level(reward.finite)
    best = max(reward.finite)
    solved = min(reward.finite) >= 0 and best <= 1 and level >= SOLVED
    # The most that an answer can get is often another number than 1.
    at_best = best > 0 and level >= SOLVED * best and trends.rises(reward.finite)
    return finding(
        "info" if solved or at_best or trends.rises(reward.finite[-len(last) :]) else "warning",
        f"the gradient fades away: {norms.name} goes from {begun:.3g} to {now:.2g}, and {reward.name} is at "
        f"{level:.3g}",
        norms.first(under=LEFT * begun),
        norms.shown(now, f"about {begun:.3g}"),
        shown(reward.name, level, None, reward.source),
        cause="nothing is left that pulls: policy and probabilities are saturated (an entropy that is used up, "
        "logits that "
        "ran away), groups whose rewards are equal, a weight of the loss or a mask that shrinks step by step, or a "
        "loss "
        "scale that underflows in fp16"
        if not solved and not at_best
        else "every answer is right, so that no advantage differs from 0"
        if solved
        else "the reward has risen to its best and rests there: where answers can get no more, no advantage differs "
        "from 0; else the policy is saturated short of it (an entropy that is used up)",
        next_step="look at the entropy and at the spread of rewards within groups where it fades; rldbg record "
        "--gradients "
        ". -- YOUR COMMAND tells which layers it is",
        steps=norms.steps(under=LEFT * begun),
    )
