"""Figures of a log that must fit each other: a mean within its range, advantages of rewards, a loss of advantages."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from statistics import median

from replay_core.diagnose.algorithm import GROUP_SIZE, severity_of_raw, why_raw
from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Finding, error, finding, share, shown, warning
from replay_core.diagnose.rule import Skip, given, rule, skip_if
from replay_core.diagnose.signals import RunLog, Series
from replay_core.regexes import regex

#: Logs print four decimals and more.
CLOSE, PRINTED = 1e-3, 5.1e-5
#: Steps before two figures that agree are no chance.
FEWEST = 3
#: What a sum over ranks, or a mean of too many, makes of a mean.
WHOLE = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512)
_WORDS = regex(r"[^a-z0-9]+")


def agree(a: float, b: float) -> bool:
    return abs(a - b) <= CLOSE * max(abs(a), abs(b)) + PRINTED


def together(*every: Series | None) -> list[tuple[int | None, tuple[float, ...]]]:
    """(step, values) of the steps that all of these have, where all are finite; none where one series is missing."""
    known = [series for series in every if series is not None]
    if len(known) < len(every):
        return []
    by_step = [{point.step: point.value for point in series.points} for series in known]
    rows = [
        (step, tuple(values[step] for values in by_step))
        for step in sorted(set.intersection(*map(set, by_step)), key=lambda step: -1 if step is None else step)
    ]
    return [row for row in rows if all(map(math.isfinite, row[1]))]


def _statistic(log: RunLog, mean: Series, signal: str, word: str) -> Series | None:
    """The largest or smallest of what a series is the mean of: under its own name with another last word."""

    def stem(name: str) -> list[str]:
        return [each for each in _WORDS.split(name.lower()) if each not in ("mean", "avg", word, "")]

    return next((one for one in log.all(signal) if stem(one.name) == stem(mean.name)), None)


@rule("L13", "a mean lies outside of its range", link="dump", scope="signals",
      needs=("reward_max|response_length_max|advantage_max|value_max|return_max",),
      source="torch.distributed.all_reduce sums; a mean over ranks is divided by the world size")  # fmt: skip
def outside(log: RunLog) -> Finding | None:
    """The mean of rewards, lengths, advantages, values or returns above the largest or below the smallest of the same
    step, in half of the steps and more: a warning. What is logged is a sum over ranks or micro-batches.
    """
    for base, mean_of in (
        ("reward", "reward"), ("response_length", "response_length"), ("advantage", "advantage_mean"),
        ("value", "value_mean"), ("return", "return_mean"),
    ):  # fmt: skip
        for mean in log.all(mean_of):
            high, low = _statistic(log, mean, f"{base}_max", "max"), _statistic(log, mean, f"{base}_min", "min")
            above = [(step, row) for step, row in together(mean, high) if row[0] > row[1] and not agree(*row)]
            below = [(step, row) for step, row in together(mean, low) if row[0] < row[1] and not agree(*row)]
            bad, looked = max(above, below, key=len), len(together(mean, high)) or len(together(mean, low))
            if not bad or 2 * len(bad) < looked:
                continue
            step, (value, limit) = max(bad, key=lambda each: abs(each[1][0] - each[1][1]))
            side = "above the largest" if bad is above else "below the smallest"
            return warning(
                f"{mean.name} is {value:.4g}, {side} of its step ({limit:.4g}): it is a sum over ranks, no mean",
                next(point for point in mean.points if point.step == step).where(mean.name),
                mean.shown(value, f"{'<=' if bad is above else '>='} {limit:.4g}"),
                shown("steps", share(len(bad), looked), "none", "log"),
                cause="the metric is summed over ranks (world size) or micro-batches and not divided; what is trained "
                "on need not be wrong",
                next_step="divide the metric by the number of ranks, or reduce it with ReduceOp.AVG",
                steps=[each for each, _ in bad],
            )
    return None


@rule("D54", "a logged reward is not the recorded one", link="dump", scope="case",
      source="torch.distributed.all_reduce sums")  # fmt: skip
def logged_reward(case: Case) -> Iterator[Finding]:
    """The logged mean reward beside the mean of the recorded rewards, in 2 steps and more: a warning where it is one
    whole number of times as much in every step, or the mean over all steps so far in every step that tells the two
    apart (3 and more).
    """
    log = case.signals.logs[0] if case.signals is not None and case.signals.logs else None
    series = log.get("reward") if log is not None else None
    if series is None:
        raise Skip("needs rewards and a log of their mean")
    values = {point.step: point for point in series.points}
    ratios, at = [], None
    so_far: list[float] = []
    running, apart = 0, 0
    for batch in case.batches():
        point = values.get(batch.step)
        if point is None or batch.reward_B is None or not len(batch):
            continue
        mean = float(batch.reward_B.mean())
        if math.isfinite(mean) and abs(mean) > 1e-3 and math.isfinite(point.value):
            ratios.append(point.value / mean)
            at = at or point
            so_far.append(mean)
            if len(so_far) > 1 and not agree(point.value, mean):
                apart += 1
                running += agree(point.value, sum(so_far) / len(so_far))
    if len(ratios) < 2 or at is None:
        raise Skip("needs two steps with rewards and their logged mean")
    if apart >= FEWEST and running == apart:
        yield warning(
            f"{series.name} is the mean over all steps so far, not of its own step: it is cumulative",
            at.where(series.name),
            shown("steps whose value is the running mean", running, "0", series.source),
            cause="the metric is never reset: it averages over every step since the first, and hides what changes",
            next_step="reset the metric after each step is logged",
            steps=series.steps(),
        )
        return
    for times in WHOLE:
        if all(abs(ratio - times) <= 1e-3 * times for ratio in ratios):
            yield warning(
                f"{series.name} is {times} times the mean of the recorded rewards, in all {len(ratios)} steps",
                at.where(series.name),
                shown("logged / recorded", times, "1", series.source),
                cause="the metric is summed over ranks (a world size of that many) or micro-batches and not divided",
                next_step="divide the metric by the number of ranks, or reduce it with ReduceOp.AVG",
                steps=series.steps(),
            )


@rule("D04", "advantages are the raw rewards", link="advantages", scope="signals",
      needs=("advantage_max", "reward_max"), source="verl logs both: compute_data_metrics")  # fmt: skip
def raw_in_log(log: RunLog) -> Finding | None:
    """Largest and smallest advantage (or mean) equal the largest and smallest reward of the step in 3 steps and more,
    and in every step: an error where the run states an estimator with a baseline, else worth knowing: REINFORCE and
    RAFT need none.
    """
    skip_if(log.get("value_mean") is not None, "a critic's values are the baseline")
    for reward in log.all("reward_max"):
        tops = together(log.get("advantage_max"), reward)
        low = _statistic(log, reward, "reward_min", "min") or next(
            (one for one in log.all("reward_min") if one.name == reward.name.replace("max", "min")), None
        )
        others = together(log.get("advantage_min"), low)
        every = [row for _, row in (*tops, *others)]
        heard = [row for row in every if abs(row[0]) > 1e-6]
        if len(tops) >= FEWEST and others and len(heard) >= FEWEST and all(agree(*row) for row in every):
            top = given(log.get("advantage_max"))
            return finding(
                severity_of_raw(log.algorithm),
                "advantages are the raw rewards, as those of groups of one response "
                + ("are, of which " if (size := log.algorithm.number(*GROUP_SIZE) or 1) > 1 else "(n = 1) are: ")
                + (f"{size:g} are stated: " if size > 1 else "")
                + "nothing is subtracted, "
                "their range is the rewards' in every step",
                top,
                top.shown(top.last.value, "another number than the reward"),
                reward.shown(reward.last.value),
                cause=why_raw(log.algorithm),
                next_step="rldbg record -- YOUR COMMAND, then rldbg diagnose rldbg-dump --rule D04",
            )
    return None


@rule("D28", "the policy loss is not that of its advantages", link="reduction", scope="signals",
      needs=("pg_loss", "advantage_mean"), lasts=True, explains=("L08", "L10", "L02", "L09", "D25"),
      source="-mean(A ratio) at a ratio of 1")  # fmt: skip
def loss_of_advantages(log: RunLog) -> Finding | None:
    """On policy a token mean of the policy loss is -mean(A). Where the logged pg_loss is +mean(A) in three of four
    steps that have one (3 and more, |mean(A)| > 1e-3), it is an error: the sign is turned. Where it is one whole
    number of times -mean(A) in all of them, a warning.
    """
    pg, advantage = given(log.get("pg_loss")), given(log.get("advantage_mean"))
    rows = [(step, row) for step, row in together(pg, advantage) if abs(row[1]) > 1e-3]
    skip_if(len(rows) < FEWEST, f"needs {FEWEST} steps with a mean advantage that is not 0")
    ratios = [row[0] / -row[1] for _, row in rows]

    def many(times: float) -> bool:
        close: Callable[[float], bool] = lambda ratio: abs(ratio - times) <= 2e-3 * abs(times)  # noqa: E731
        return 4 * sum(map(close, ratios)) >= 3 * len(ratios)

    if many(-1):
        return error(
            f"{pg.name} has the wrong sign: it is +mean(advantage), not -mean(advantage)",
            pg.place,
            shown("pg_loss / -mean(advantage), median", median(ratios), "1", "log"),
            shown("steps compared", len(rows)),
            cause="the loss is not negated, or negated twice: the policy learns to avoid what is rewarded",
            next_step="look at the sign where the policy loss is computed; rldbg record -- YOUR COMMAND",
            steps=[step for step, _ in rows],
        )
    # A part of it is how trainers log what they accumulate.
    for times in map(float, WHOLE):
        if len(rows) >= 5 and all(abs(ratio - times) <= 2e-3 * times for ratio in ratios):
            return warning(
                f"{pg.name} is {times:g} times -mean(advantage) in all {len(rows)} steps",
                pg.place,
                shown("pg_loss / -mean(advantage)", times, "1", "log"),
                cause="a factor too many or too few: the world size, or the number of micro-batches (accumulation)",
                next_step="rldbg record -- YOUR COMMAND, then rldbg diagnose rldbg-dump --rule D28",
                steps=[step for step, _ in rows],
            )
    return None
