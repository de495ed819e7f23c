"""A reward function of several that pays nothing any more from one step of a dump on."""

from __future__ import annotations

import numpy as np

from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Finding, share, shown, warning
from replay_core.diagnose.flat import Array
from replay_core.diagnose.rule import rule, skip_if

#: Steps before and since, samples since; how likely chance may be, as a logarithm; what of its usual share of the
#: samples a function still pays in the step before it ends.
STEPS, SAMPLES, CHANCE, STILL = 2, 16, -20.0, 0.5
#: And how likely, as a logarithm, by the prompts: a prompt's answers are often right or wrong all together.
OF_PROMPTS = -7.0


@rule("D172", "a reward function pays nothing any more", link="rewards", scope="case", lasts=True,
      explains=("D01", "D03", "D02", "D23", "L01", "L08", "L17"),
      source="a parser that a library's new version breaks: the format's bonus alone is left")  # fmt: skip
def ends(case: Case) -> Finding | None:
    """One of several recorded reward functions is exactly 0 for all samples of every step from one on, 2 steps and 16
    samples and more, after 2 steps and more in which it paid some of them and still half as many in the last as in all;
    chance, by the share it paid in that step, comes to e^-20 at the most (to e^-7 by the share of prompts of which it
    paid an answer before), and another function pays since: a warning.
    """
    steps: list[tuple[StepBatch, Array]] = []
    for batch in case.batches():
        functions_FB = batch.columns.reward_functions_FB
        if functions_FB is not None and batch.step is not None and len(functions_FB) > 1:
            steps.append((batch, functions_FB))
    skip_if(len(steps) < 2 * STEPS, f"needs the rewards of several functions in {2 * STEPS} steps")
    count = len(steps[0][1])
    if any(len(functions_FB) != count for _, functions_FB in steps):
        return None
    for at in range(count):
        paid = [float((functions_FB[at] != 0).mean()) for _, functions_FB in steps]
        since = len(paid)
        while since and paid[since - 1] == 0:
            since -= 1
        before, after = steps[:since], steps[since:]
        if min(len(before), len(after)) < STEPS or paid[since - 1] < STILL * float(np.mean(paid[:since])):
            continue
        samples = sum(functions_FB.shape[1] for _, functions_FB in after)
        if samples < SAMPLES or samples * np.log1p(-min(paid[since - 1], 0.999)) > CHANCE:
            continue
        if _are_hard_prompts(before, after, at):
            continue
        # What was a fine nobody has to pay any more was learnt.
        if min(float(np.nanmin(functions_FB[at])) for _, functions_FB in before) < 0:
            continue
        others = [other for other in range(count) if other != at and all((each[other] != 0).any() for _, each in after)]
        if not others:
            continue
        batch = after[0][0]
        name = batch.columns.reward_functions[at]
        return warning(
            f"the reward function {name} pays nothing from step {batch.step} on: all {samples} samples since have 0, "
            f"and {paid[since - 1]:.0%} had more in the step before",
            batch.laid.where(batch.columns.reward_name, sample=0),
            shown("samples it paid, by step", ", ".join(f"{each:.0%}" for each in paid[:16])),
            shown("steps since", share(len(after), len(steps)), "none"),
            shown("other functions that go on", ", ".join(batch.columns.reward_functions[each] for each in others)),
            cause="its parser, verifier or judge broke (a format that is no longer matched, an exception or a time-out "
            "that is scored 0, other ground truths): no policy loses all of it from one step to the next, and the "
            "other functions (a format's bonus) are all that is learnt; or its prompts are drawn no more",
            next_step=f"grade a response of step {before[-1][0].step} and one of step {batch.step} by hand",
            steps=[each.step for each, _ in after if each.step is not None],
        )  # fmt: skip
    return None


def _are_hard_prompts(before: list[tuple[StepBatch, Array]], after: list[tuple[StepBatch, Array]], at: int) -> bool:
    """Whether chance may have drawn no prompt since whose answers the function pays."""
    paid = [each for batch, functions_FB in before for each in _paid_prompts(batch, functions_FB[at])]
    since = sum(len(_paid_prompts(batch, functions_FB[at])) for batch, functions_FB in after)
    return bool(since * np.log1p(-min(float(np.mean(paid)), 0.999)) > OF_PROMPTS)


def _paid_prompts(batch: StepBatch, function_B: Array) -> list[bool]:
    """Of each prompt, whether the function pays one of its answers."""
    prompt_B = batch.group_B if batch.group_B is not None else batch.prompt_B
    if prompt_B is None or len(prompt_B) != function_B.size:
        return [bool(value) for value in function_B != 0]
    return [bool((function_B[prompt_B == prompt] != 0).any()) for prompt in np.unique(prompt_B)]
