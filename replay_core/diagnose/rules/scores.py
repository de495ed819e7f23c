"""Single scores: one that outweighs a whole batch, and rewards that are the scores of other samples."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

import numpy as np

from replay_core.diagnose.advantage_variants import orders
from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.finding import Finding, error, share, shown, warning
from replay_core.diagnose.rule import Skip, given, rule
from replay_core.diagnose.signals import RunLog

#: How far one reward lies from all others, in ranges of the others; and the share of a batch that may.
APART, FEW = 50.0, 0.05
#: Different rewards of the others that make a range, and steps of a log whose mean does not waver.
SEVERAL, STEPS = 3, 8
#: What is left to waver of a mean that one sample makes, as a share of it.
STILL = 5e-3


@rule("D86", "one reward outweighs all others", link="rewards", scope="batch", needs=("rewards",), lasts=True,
      explains=("D04", "D28", "D56", "D73", "L02", "L08"),
      source="a judge that returns another unit, a length, or an error code for one sample")  # fmt: skip
def outlier(batch: StepBatch) -> Iterator[Finding]:
    """Rewards of at most a twentieth of a batch (of 8 and more) that lie 50 times as far from the middle as all
    others, of which there are 3 different ones: a warning. Normalised, such a group's other answers are all alike.
    """
    reward_B = given(batch.reward_B)
    if len(reward_B) < 8 or not np.isfinite(reward_B).all():
        raise Skip("needs finite rewards of 8 samples")
    away_B = np.abs(reward_B - np.median(reward_B))
    order = np.argsort(away_B)
    few = max(int(FEW * len(reward_B)), 1)
    for out in range(1, few + 1):
        rest, far = reward_B[order[:-out]], order[-out:]
        size = float(np.ptp(rest))
        if np.unique(np.round(rest, 9)).size >= SEVERAL and away_B[far].min() > APART * max(size, 1e-9):
            worst = int(far[-1])
            yield warning(
                f"one sample's reward outweighs the batch: {reward_B[worst]:.6g}, and all others lie between "
                f"{rest.min():.4g} and {rest.max():.4g}"
                if out == 1
                else f"{out} samples' rewards outweigh the batch: up to {reward_B[worst]:.6g}, and all others lie "
                f"between {rest.min():.4g} and {rest.max():.4g}",
                batch.laid.where(batch.columns.reward_name, sample=worst),
                evidence=[
                    shown("distance from the middle, in ranges of the others", float(away_B[far].min() / size),
                          f"< {APART:g}", f"rewards of {batch.name}"),
                    shown("sample", worst), shown("samples so far out", out, "0"),
                ],
                cause="an outlier of the judge: another unit, a count or an error code that is taken for a score; what "
                "is normalised by it makes the group's other answers all alike",
            )  # fmt: skip
            return


@rule("D86", "one reward outweighs all others", link="rewards", scope="signals",
      needs=("reward", "reward_std|reward_max"),
      source="a judge that returns another unit, a length, or an error code for one sample")  # fmt: skip
def outweighs(log: RunLog) -> Iterator[Finding]:
    """The mean reward wavers by less than .005 of it over 8 steps and more, and so does its spread (or the largest
    reward), which is twice the mean and more (or 8 times), while rewards are not all one number: a warning. What varies
    from batch to batch is too small to show beside one sample that does not.
    """
    reward = given(log.get("reward"))
    values = reward.finite
    if len(values) < STEPS or not any(values):
        raise Skip(f"needs rewards of {STEPS} steps that are not 0")
    beside = [(one, 2.0) for one in log.all("reward_std")] + [(one, 8.0) for one in log.all("reward_max")]
    for series, times in beside:
        if len(series.finite) < STEPS or not _stands(values) or not _stands(series.finite):
            continue
        if len(set(values)) > STEPS // 2 and median(series.finite) > times * abs(median(values)):
            yield warning(
                f"one sample's reward outweighs the batch: {reward.name} hardly wavers from {median(values):.4g}, and "
                f"{series.name} is {median(series.finite):.4g} in every step",
                series,
                evidence=[reward.shown(median(values)), series.shown(median(series.finite), f"< {times:g} x the mean")],
                cause="an outlier of the judge, far larger than all other rewards: another unit, a count or an error "
                "code that is taken for a score",
                next_step="look at the largest reward of one batch; rldbg record -- YOUR COMMAND keeps them",
            )
            return


def _stands(values: list[float]) -> bool:
    middle = abs(median(values))
    return middle > 0 and max(values) - min(values) < STILL * middle


@rule("D85", "rewards are other samples' scores", link="rewards", scope="batch",
      needs=("token_rewards", "token_scores"), lasts=True, explains=("D04", "D28", "D51", "D53", "D56", "L08"),
      source="verl: token_level_rewards are token_level_scores, less a penalty")  # fmt: skip
def of_other_samples(batch: StepBatch) -> Iterator[Finding]:
    """The sums of token rewards and of token scores, sample by sample: an error where they are the same numbers (4
    different ones and more) in another order.
    """
    rewards_B, scores_B = batch.summed("token_rewards"), batch.summed("token_scores")
    if rewards_B is None or scores_B is None or not np.isfinite(rewards_B).all() or not np.isfinite(scores_B).all():
        raise Skip("token rewards or scores are no finite rows")
    close = 1e-5 * max(float(np.abs(scores_B).max(initial=0.0)), 1e-6)
    other_B = np.abs(rewards_B - scores_B) > close
    same = bool((np.abs(np.sort(rewards_B) - np.sort(scores_B)) <= close).all())
    if not other_B.any():
        return
    if not same or other_B.sum() < 2 or np.unique(np.round(scores_B, 6)).size < 4:
        raise Skip("rewards differ from scores by more than their order: they were shaped")
    groups = int(given(batch.group_B).max()) + 1 if batch.has("group") else 1
    how = next(
        (
            how
            for how, order_B in orders(len(scores_B), groups)
            if np.allclose(rewards_B, scores_B[order_B], atol=close)
        ),
        "",
    )
    yield error(
        "token rewards are other samples' scores: the same numbers in another order, "
        f"{share(int(other_B.sum()), len(other_B))} rows differ" + (f", those {how}" if how else ""),
        batch.laid.where("token_rewards", sample=int(np.flatnonzero(other_B)[0])),
        evidence=[
            shown("rows whose reward is not their score", int(other_B.sum()), "0", f"rewards of {batch.name}"),
            shown("largest difference of both, sorted", float(np.abs(np.sort(rewards_B) - np.sort(scores_B)).max())),
        ],
        cause="rewards come back in another order than the samples, or were rolled or permuted after they were scored: "
        "advantages are made of the neighbours' scores",
    )
