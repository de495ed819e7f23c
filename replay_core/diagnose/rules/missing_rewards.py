"""Samples that no reward function gave a number."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.finding import Finding, share, shown, warning
from replay_core.diagnose.rule import Skip, rule


@rule("D98", "samples have no reward: every function gives NaN", link="rewards", scope="batch", lasts=True,
      explains=("D01", "D04", "D21", "D28", "D54", "L08"),
      source="TRL sums with nansum: a sample without any reward counts as 0, R1-V#69")  # fmt: skip
def missing(batch: StepBatch) -> Iterator[Finding]:
    """Samples for which every recorded reward function gives a number that is not finite: a warning where the
    reward that is summed of them is finite all the same, or is not recorded. (NaN of some functions is TRL's way to say
    that they are not meant for a sample.)
    """
    functions_FB = batch.columns.reward_functions_FB
    if functions_FB is None:
        raise Skip("no reward functions are recorded apart")
    none_B = ~np.isfinite(functions_FB).any(axis=0)
    if not none_B.any():
        return
    reward_B = batch.columns.per_sample("reward")
    if reward_B is not None and not np.isfinite(reward_B[none_B]).any():
        raise Skip("their summed reward is not finite either (D21)")
    sample = int(np.flatnonzero(none_B)[0])
    counted = None if reward_B is None else float(reward_B[none_B][np.isfinite(reward_B[none_B])][0])
    yield warning(
        f"{share(int(none_B.sum()), int(none_B.size))} samples have no reward: every function gives NaN for them"
        + ("" if counted is None else f", and they count as {counted:g}"),
        batch.laid.where(batch.columns.reward_functions[0], sample=sample),
        evidence=[
            shown("samples that are not finite in every function", share(int(none_B.sum()), int(none_B.size)), "none",
                  batch.columns.reward_functions[0]),
            shown("reward they are counted with", counted),
            shown("reward functions", len(functions_FB)),
        ],
        cause="the reward function fails on these answers (a division by 0, a parser that finds nothing, a judge that "
        "does not answer) and its NaN is summed as 0 (nansum): answers that nobody judged are taught as bad ones. "
        "Return a number, or leave such samples out of their groups",
    )  # fmt: skip
