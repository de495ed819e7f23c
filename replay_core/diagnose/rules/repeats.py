"""What comes again: numbers of a log that are no longer computed, rollouts of a buffer that nobody refills."""

from __future__ import annotations

import math

from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Finding, Where, finding, listed, share, shown, warning
from replay_core.diagnose.passes import keys_of
from replay_core.diagnose.rule import rule, skip_if
from replay_core.diagnose.signal_names import MACHINE
from replay_core.diagnose.signals import Point, RunLog, Series

#: Steps in a row whose numbers are all those of the step before; and of one series, while others go on.
AGAIN, ALONE = 3, 8
#: Series that repeat, and steps before: fewer of either happen by chance.
SERIES, BEFORE = 4, 4
#: What is at rest in a healthy run: shares that come to 0 or 1, rates that are set, lengths at their limit.
_AT_REST = frozenset(
    {"learning_rate", "clip_fraction", "frac_zero_std", "truncated", "response_length_max", "reward_max", "reward_min",
     "advantage_max", "advantage_min", "policy_kl", "ratio_mean", "ratio_max"}
)  # fmt: skip
#: Figures of a batch that waver in every step: one of them that stands still alone is told alone.
_WAVERING = ("reward", "kl", "entropy", "response_length", "logprob_diff")


@rule("L18", "the log repeats itself", link="dump", scope="signals", explains=("L08", "L11", "L17", "D25", "D37"),
      source="a dictionary of metrics that is logged again when a step adds nothing to it")  # fmt: skip
def repeats(log: RunLog) -> Finding | None:
    """From some step on, every one of 4 and more figures of the training is exactly what it was in the step before, 3
    steps and more to the end of the log, while they changed in 4 steps before: a warning. Rates, shares and limits do
    not count: they rest in healthy runs. Or reward, KL, entropy or length alone is one number for 8 steps and more to
    the end, and no round number unless it was more and less before, while two others go on.
    """
    moving = [series for series in log.signals() if _counts(series)]
    skip_if(len(moving) < 2, f"needs figures of {BEFORE + AGAIN} steps that change")
    resting = {series.name: _rest(series) for series in moving}
    least = min(resting.values())
    if least >= AGAIN and len(moving) >= SERIES:
        since = moving[0].points[-least]
        return _found(log, since, least, f"all {len(moving)} figures that waver", moving[0])
    alone = [series for series in moving if series.signal in _WAVERING and resting[series.name] >= ALONE]
    going = [series for series in moving if resting[series.name] < 2]
    for series in alone:
        value = series.last.value
        # A bound that a figure comes to rest at is a round number, or the most or least it can be.
        inside = min(series.values) < value < max(series.values) or abs(value - round(value, 3)) > 1e-9
        if len(going) >= 2 and inside:
            return _found(log, series.points[-resting[series.name]], resting[series.name], series.name, series)
    return None


def _counts(series: Series) -> bool:
    """Whether it is a figure of the training that changes from step to step, and is printed finely enough to tell."""
    if series.signal in MACHINE or series.signal in _AT_REST or len(series.points) < BEFORE + AGAIN:
        return False
    if not all(math.isfinite(value) for value in series.values):
        return False
    before = series.values[: len(series.values) - _rest(series)]
    return len(before) >= BEFORE and len(set(before)) > 0.8 * len(before)


def _rest(series: Series) -> int:
    """How many of its last steps say what the step before them said."""
    values = series.values
    return next((n for n in range(len(values) - 1) if values[-1 - n] != values[-2 - n]), len(values) - 1)


def _found(log: RunLog, since: Point, steps: int, what: str, series: Series) -> Finding:
    return warning(
        f"the log repeats itself: {what} {'is' if what == series.name else 'are'} the same in the last {steps} steps",
        since.where(series.name),
        series.shown_at(since, "another number in every step"), shown("steps that repeat the one before", steps),
        cause="what is logged is cached: the metrics are not computed anew (a dictionary that is not refreshed, a rank "
        "that no longer reduces), or the steps do not run at all",
        next_step="rldbg record -- YOUR COMMAND, then compare two of these steps",
        steps=[p.step for p in series.points[-steps:]],
    )  # fmt: skip


#: Share of a step's samples that an earlier step has before it is no replay of some; and steps that repeat before it is
#: no step taken once more after a crash, and that do not before it is no test on one batch.
SHARE, STEPS = 0.9, 2


@rule("D75", "samples of an earlier step come again", link="tokens", scope="case", lasts=True,
      explains=("D09", "D12", "D31", "D43", "D56", "L17"),
      source="a rollout buffer, queue or file that is not advanced; old log-probabilities are of the policy that "
      "sampled (PPO)")  # fmt: skip
def trained_on_again(case: Case) -> Finding | None:
    """Nine tenths and more of a step's samples have the tokens and, bit for bit, the engine's log-probabilities of an
    earlier step's, and other old log-probabilities: those were taken anew, as of a new batch. An error in 2 steps and
    more of a run that has 2 of new samples, else a warning; worth knowing in a run that states that its samples are
    older. Later passes over one rollout (TRL's num_iterations, mini-batches that count as steps) keep their old
    log-probabilities and are none.
    """
    seen: dict[bytes, tuple[int, bytes]] = {}
    found: list[tuple[int, int, int, int]] = []
    where: Where | None = None
    looked = 0
    off_policy = False
    for batch in case.batches():
        rollout, old = batch.columns.of("rollout_logprobs"), batch.columns.of("old_logprobs")
        if batch.step is None or batch.tokens_N is None or rollout is None or old is None:
            continue
        drawn, taken = keys_of(batch, "rollout_logprobs"), keys_of(batch)
        looked += 1
        origins = [
            seen[key][0] for key, now in zip(drawn, taken, strict=True)
            if key is not None and now is not None and key in seen and seen[key][0] < batch.step and seen[key][1] != now
        ]  # fmt: skip
        for key, now in zip(drawn, taken, strict=True):
            if key is not None and now is not None:
                seen.setdefault(key, (batch.step, now))
        known = sum(key is not None for key in drawn)
        if known and len(origins) >= SHARE * known:
            found.append((batch.step, max(origins), len(origins), known))
            where = where or batch.laid.where("rollout_logprobs", sample=0)
            off_policy = off_policy or batch.laid.algorithm.is_off_policy
    skip_if(looked < 2, "needs tokens, rollout and old log-probabilities of 2 steps")
    if not found:
        return None
    steps = sorted({step for step, *_ in found})
    _, origin, again, known = found[0]
    return finding(
        "info" if off_policy else "error" if min(len(steps), looked - len(found)) >= STEPS else "warning",
        f"the rollouts of step {origin} are trained on again in step{'s' if len(steps) > 1 else ''} {listed(steps)}: "
        "nothing new is sampled",
        where,
        shown("samples with an earlier one's tokens and engine's log-probabilities", share(again, known), "0"),
        shown("of them with other old log-probabilities than then", again),
        cause="the rollout buffer is not refilled (a queue or file that is not advanced, a cache that is not "
        "cleared): old log-probabilities are taken anew each time, so the ratio starts at 1 and does not correct for "
        "the weights that sampled. What engine and trainer disagree by grows with the samples' age, and tells nothing "
        "of the engine",
        steps=steps,
    )
