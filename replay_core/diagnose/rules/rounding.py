"""Rewards that differ by the rounding of their numbers alone, and advantages of full size that are made of it."""

from __future__ import annotations

from statistics import median

from replay_core.diagnose.finding import Finding, shown, warning
from replay_core.diagnose.log_steps import NO_STD, StepTold, steps_of, steps_told
from replay_core.diagnose.rule import rule, skip_if
from replay_core.diagnose.signals import RunLog

#: A spread within groups below this, beside rewards of 1: float32 rounds such a reward at 6e-8, a sum of ten parts at
#: 1e-6. The least reward that anybody pays apart is a thousand times it.
ROUNDED = 1e-5
#: Steps before it is no chance, the largest advantage that is no rounding's, and what of a usual gradient is one of
#: full size.
STEPS, FULL, OF_USUAL = 3, 0.5, 0.02


@rule("D125", "rewards differ by rounding, and are trained on", link="advantages", scope="signals", lasts=True,
      needs=("reward_std", "grad_norm|advantage_max"), explains=("D02", "D25", "L10", "L02"),
      source="GRPO divides by the std of a group: TRL adds 1e-4 to it, verl 1e-6, against a std of 0")  # fmt: skip
def made_of_rounding(log: RunLog) -> Finding | None:
    """The std of rewards within groups between 0 and 1e-5 (times the mean reward where that is over 1), while the
    largest advantage is .5 and more, or the gradient has a fiftieth of its median over the steps whose groups have a
    spread (ten times what 1e-4 beside the std leaves of it), in 3 steps and more: a warning. An epsilon of 1e-4 or 1e-6
    makes such advantages small: without one, noise in the last digit of a reward is divided by its own std, and answers
    that are equally right get advantages of order 1.
    """
    rewards = log.get("reward")
    means = {} if rewards is None else {point.step: abs(point.value) for point in rewards.points}
    known = [step for step in steps_told(log) if step.group_std is not None and step.of_groups and not step.has_critic]
    skip_if(not known, "needs the std of rewards within groups")
    bounds = {step.step: ROUNDED * max(1.0, means.get(step.step, 1.0)) for step in known}
    fine = [step for step in known if NO_STD < (step.group_std or 0) < bounds[step.step]]
    usual = median([step.grad for step in known if (step.group_std or 0) > 1e-2 and step.grad] or [0.0])
    bad = [step for step in fine if _is_full(step, usual)]
    if len(bad) < STEPS:
        return None
    first = bad[0]
    return warning(
        "rewards of a group differ by rounding alone, and are normalised to advantages of full size: their std is "
        f"{first.group_std:.2g} in {len(bad)} of {len(known)} steps, and the gradient does not vanish there",
        first.point.where("reward_std"),
        shown("std of rewards within groups", first.group_std, f"0, or > {bounds[first.step]:g}", "log"),
        *([shown("mean reward of that step", means[first.step], None, "log")] if first.step in means else []),
        *([shown("grad_norm of that step", first.grad, "next to 0", "log")] if first.grad is not None else []),
        *([shown("its median where groups have a spread", usual, None, "log")] if usual else []),
        *([shown("share of groups without a spread", first.frac_zero, "about 1", "log")]
          if first.frac_zero is not None else []),
        cause="advantages are divided by the group's std without an epsilon (or with one far below 1e-6), and rewards "
        "that should be equal carry noise in their last digits (a float that is summed or averaged, a judge's jitter): "
        "answers that are equally right are pushed apart at random, and the policy drifts and gets sure of them",
        next_step="add an epsilon to the std (1e-4 as TRL, 1e-6 as verl), take no gradient of groups whose std is "
        "below 1e-4, or round the rewards; rldbg record -- YOUR COMMAND, then rldbg diagnose rldbg-dump --rule D04",
        steps=steps_of(bad),
    )  # fmt: skip


def _is_full(step: StepTold, usual: float) -> bool:
    """Whether a step is trained on as others are."""
    if step.frac_zero is not None and step.frac_zero > 1 - FULL:
        return False  # most of its groups are known to be without a spread
    if step.advantage is not None:
        return step.advantage >= FULL
    return usual > 0 and step.grad is not None and step.grad >= OF_USUAL * usual
