"""A log in which nothing changes: every figure is the same in every step."""

from __future__ import annotations

import math

from replay_core.diagnose.finding import Finding, shown, warning
from replay_core.diagnose.rule import rule, skip_if
from replay_core.diagnose.signal_names import MACHINE
from replay_core.diagnose.signals import RunLog

#: Steps, figures of them, and digits behind which no two batches are alike by chance.
STEPS, FIGURES, DIGITS = 5, 3, 4
#: What a setting or a schedule says, and no batch.
_SET = MACHINE | {"learning_rate", "critic_learning_rate", "kl_coefficient", "difficulty", "weight_version"}


@rule("L48", "nothing changes from step to step", link="trend", scope="signals", lasts=True,
      explains=("L17", "L18", "L40", "D15", "D46", "D01", "L14", "L08", "L09"),
      source="a policy that is not updated says the same of the same prompts")  # fmt: skip
def frozen(log: RunLog) -> Finding | None:
    """Every figure of the training (3 and more of 5 steps and more) is one and the same number in all steps, and of at
    least two the number has four digits and more: a warning. Batches differ: even a policy that is not trained has
    other figures of other prompts. Settings, rates and times do not count.
    """
    figures = [one for one in log.signals() if one.signal not in _SET and len(one.points) >= STEPS]
    skip_if(len(figures) < FIGURES, f"needs {FIGURES} figures of {STEPS} steps")
    if any(len(set(one.values)) > 1 or not math.isfinite(one.last.value) for one in figures):
        return None
    fine = [one for one in figures if _is_fine(one.last.value)]
    if len(fine) < 2:
        return None
    far = log.get("kl")
    return warning(
        f"nothing changes: all {len(figures)} figures ({', '.join(one.name for one in figures[:3])}"
        + (" and more" if len(figures) > 3 else "")
        + f") are the same to the last digit in all {len(figures[0].points)} steps: the policy is not updated",
        fine[0],
        *(one.shown(one.last.value, "another number in every step") for one in fine[:3]),
        shown("figures that change", 0, f"{len(figures)}"),
        cause="no update reaches the policy (the optimizer's step is never called or holds other parameters, the loss "
        "is detached, the learning rate is 0), and each step is measured on the same prompts with the same seed; or "
        "what is logged is computed once and logged again"
        + (
            f". A KL of {far.last.value:.3g} that stands is no KL of a policy that is trained"
            if far is not None and far.last.value
            else ""
        ),
        next_step="compare one weight before and after a step, and its gradient; print the optimizer's parameters",
    )


def _is_fine(value: float) -> bool:
    """Whether a number has more digits than a share of a few answers."""
    return value != 0 and abs(value - float(f"{value:.{DIGITS - 1}g}")) > 1e-9 * abs(value)
