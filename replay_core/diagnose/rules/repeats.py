"""What is of an earlier step: numbers that are no longer computed, rollouts of a full buffer, advantages, old ones."""

from __future__ import annotations

import math

import numpy as np

from replay_core.diagnose.advantage_variants import variants
from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Finding, Where, error, finding, listed, share, shown, warning
from replay_core.diagnose.flat import Array
from replay_core.diagnose.passes import keys_of
from replay_core.diagnose.rule import given, rule, skip_if
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


#: How many times its least the entropy of a policy that became uniform is at the least.
UNIFORM = 1.5


@rule("L18", "the log repeats itself", link="dump", scope="signals", explains=("L08", "L11", "L17", "D25", "D37"),
      source="a dictionary of metrics that is logged again when a step adds nothing to it")  # fmt: skip
def repeats(log: RunLog) -> Finding | None:
    """From some step on, every one of 4 and more figures of the training is exactly what it was in the step before, 3
    steps and more to the end of the log, while they changed in 4 steps before: a warning. Rates, shares and limits do
    not count: they rest in healthy runs. Or reward, KL, entropy or length alone is one number for 8 steps and more to
    the end, and no round number unless it was more and less before (nor an entropy that has come to its largest, half
    as much again as its least and more: a uniform policy's, nor a reward of 0 that was of both signs: a centred one),
    while two others go on.
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
        if series.signal == "entropy" and value >= max(series.values) > UNIFORM * min(series.values):
            continue  # a policy that became uniform has the logarithm of its vocabulary, and no more
        if series.signal == "reward" and value == 0 and min(series.values) < 0 < max(series.values):
            continue  # a reward of both signs is less its group's mean (slime): 0 where none differ
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


#: Samples of a group, and different ones, that come again as no chance has it; the steps that show it.
_GROUP, _DIFFERENT, _STEPS = 4, 3, 3
#: Words for a buffer whose samples are meant to be used again.
_REUSES = ("replay_buffer", "replay_buffer_size", "sample_reuse", "reuse", "experience_replay", "reuse_samples",
           "use_replay_buffer", "enable_replay", "replay_ratio", "replay_fraction", "replay_size")  # fmt: skip


class _GroupsAgain:
    """Groups whose samples are all those of an earlier step."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.groups = self.samples = self.every = 0
        self.where: Where | None = None
        self.is_meant = False

    def take(self, batch: StepBatch, again: list[bytes | None]) -> None:
        """again: of each sample that was there before, its key."""
        group_B = given(batch.group_B)
        self.is_meant = self.is_meant or any(batch.laid.algorithm.value(name) for name in _REUSES)
        self.every += len(again)
        groups = 0
        for group in np.unique(group_B):
            keys = [again[at] for at in np.flatnonzero(group_B == group)]
            if len(keys) >= _GROUP and None not in keys and len(set(keys)) >= _DIFFERENT:
                groups, self.samples = groups + 1, self.samples + len(keys)
                self.where = self.where or batch.laid.where("rollout_logprobs", sample=group_B == group)
        if groups and batch.step is not None:
            self.steps.append(batch.step)
            self.groups += groups

    def told(self, looked: int) -> Finding | None:
        if len(self.steps) < _STEPS or 2 * len(self.steps) < looked - 1 or self.is_meant:
            return None
        return warning(
            f"{self.groups} groups of samples are trained on again in a later step: {share(self.samples, self.every)} "
            "samples have an earlier one's tokens and engine's log-probabilities, bit for bit",
            self.where,
            shown("groups that come again", self.groups, "0"),
            shown("steps that hold such", share(len(self.steps), looked)),
            cause="what was consumed stays in the rollout buffer (or a queue hands it out twice): these samples count "
            "twice, the second time as older ones",
            next_step="take consumed groups out of the buffer before it is filled again",
            steps=self.steps,
        )


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

    A warning, too, where whole groups of 4 samples and more, of 3 different ones and more, come again so in half of the
    steps and in 3 and more, unless the run states that it uses samples again.
    """
    part = _GroupsAgain()
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
        if batch.group_B is not None:
            part.take(batch, [
                key if key in seen and seen[key][0] < batch.step and now is not None and seen[key][1] != now else None
                for key, now in zip(drawn, taken, strict=True)
            ])  # fmt: skip
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
        return part.told(looked)
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


#: How close, and of how many steps, before it is no chance.
CLOSE, IN_A_ROW = 1e-3, 2
#: Values of a single step that no other step has by chance.
ONE = 8


@rule("D76", "advantages are those of the step before", link="advantages", scope="case",
      explains=("D04", "D28", "L08"), lasts=True,
      source="a buffer that is read before it is filled anew")  # fmt: skip
def of_the_step_before(case: Case) -> Finding | None:
    """Advantages that are a known variant of the rewards and groups of the step recorded before, sample by sample, and
    none of their own step's, in 2 steps and more and in most of those that tell the two apart: an error. One step will
    do where it is the only one recorded right after another, and its advantages have 8 values and more.
    """
    before: list[Array] = []
    late: list[int] = []
    looked: list[int] = []
    last, many = -1, False
    where = None
    for each in case.batches():
        # Each pass over a rollout holds its samples: a std over n - 1 is not that of twice as many.
        batch = each.once
        advantage_B, reward_B, group_B = batch.advantage_B, batch.reward_B, batch.group_B
        if advantage_B is None or reward_B is None or group_B is None or batch.step is None:
            continue
        if not (np.isfinite(advantage_B).all() and np.isfinite(reward_B).all()) or np.bincount(group_B).max() < 2:
            before = []
            continue
        own = [values_B for _, values_B in variants(reward_B, group_B) if np.isfinite(values_B).all()]
        if before and len(before[0]) == len(advantage_B) and np.unique(np.round(advantage_B, 4)).size > 3:
            if batch.step == last + 1:
                looked.append(batch.step)
            if not _any_is(own, advantage_B) and _any_is(before, advantage_B):
                late.append(batch.step)
                many = np.unique(np.round(advantage_B, 4)).size >= ONE
                where = where or _place(batch)
        before, last = own, batch.step
    skip_if(not (late or looked), "needs rewards, groups and advantages of two steps in a row, of as many samples")
    # Of steps that do not follow each other, only those that have the last recorded one's advantages tell anything.
    at_once = [step for step in late if step in looked]
    if 2 * len(at_once) < len(looked) or not (len(late) >= IN_A_ROW or (len(at_once) == 1 == len(looked) and many)):
        return None
    return error(
        f"advantages are those of the step before, in {len(late)} of {len({*late, *looked})} steps that tell",
        where,
        shown("steps whose advantages the rewards of the step before give", len(late), "0"),
        cause="the batch that is trained on holds the last step's advantages: a buffer is read before it is filled, or "
        "they are computed after the update they are meant for",
        steps=late,
    )


def _any_is(known: list[Array], advantage_B: Array) -> bool:
    return any(bool((np.abs(each_B - advantage_B) <= CLOSE * np.maximum(1, np.abs(each_B))).all()) for each_B in known)


def _place(batch: StepBatch) -> Where:
    return batch.laid.where("advantages", sample=0)


#: Tokens of a step that tell, how near they are to the step before's, and of how many of them.
TOKENS, NEAR, MOST = 16, 3e-3, 0.9


@rule("D89", "old log-probabilities are those of the step before", link="logprobs", scope="case",
      explains=("D09", "D12", "D14", "D24", "D28", "D50", "D60", "L08", "L10", "L16"), lasts=True,
      source="a buffer that is written after it is read")  # fmt: skip
def old_of_the_step_before(case: Case) -> Finding | None:
    """Old log-probabilities, row by row and place by place of the response, beside the policy's and the rollout's of
    their own step and of the one recorded before: an error where nine tenths (of 16 tokens and more, of those that
    tell the two apart) are the step before's to .003 and at most half their own's, in 2 steps and most.
    """
    before: list[Array] = []
    late: list[int] = []
    looked, last = 0, -1
    where: Where | None = None
    for batch in case.batches():
        if batch.step is None or batch.response_N is None or batch.columns.of("old_logprobs") is None:
            continue
        old_BT = _by_place(batch, "old_logprobs")
        own = [_by_place(batch, name) for name in ("policy_logprobs", "rollout_logprobs")]
        if before and batch.step == last + 1 and old_BT is not None:
            here, there = (max((_shares(old_BT, each) for each in some if each is not None), default=None)
                           for some in (own, before))  # fmt: skip
            if here is not None and there is not None:
                looked += 1
                if there >= MOST and here <= 0.5:
                    late.append(batch.step)
                    where = where or batch.laid.where("old_logprobs", sample=0)
        before, last = [each for each in own if each is not None], batch.step
    skip_if(not looked, "needs old log-probabilities beside the policy's or the rollout's, of two steps in a row")
    if len(late) < IN_A_ROW or 2 * len(late) < looked:
        return None
    return error(
        "old log-probabilities are those of the step before: row by row they are what its samples had, not this "
        "batch's own",
        where,
        shown("steps whose old log-probabilities are the step before's", len(late), "0"),
        shown("steps compared", looked),
        cause="a buffer is read before it is filled anew, or written under the next step's key: ratios are of two "
        "different texts",
        steps=late,
    )


def _by_place(batch: StepBatch, name: str) -> Array | None:
    """A column by row and place of the response [B, T], NaN where it says nothing."""
    column, response_N = batch.columns.of(name), batch.response_N
    if column is None or response_N is None or not len(batch):
        return None
    said_N = column.said_N & response_N & np.isfinite(column.values_N)
    place_N = batch.flat.position_N - np.repeat(batch.flat.first(response_N), batch.flat.lengths_B)
    rows_BT = np.full((len(batch), int(place_N.max(initial=0)) + 1), np.nan)
    rows_BT[batch.flat.sample_N[said_N], place_N[said_N]] = column.values_N[said_N]
    return rows_BT


def _shares(old_BT: Array, other_BT: Array) -> float:
    """Of the places that both have, and that are no probability of 1, the share that is equal; 0 of too few."""
    rows, width = min(len(old_BT), len(other_BT)), min(old_BT.shape[1], other_BT.shape[1])
    if len(old_BT) != len(other_BT):
        return 0.0
    a, b = old_BT[:rows, :width], other_BT[:rows, :width]
    both = np.isfinite(a) & np.isfinite(b) & ((np.abs(a) > NEAR) | (np.abs(b) > NEAR))
    return float((np.abs(a - b)[both] <= NEAR).mean()) if both.sum() >= TOKENS else 0.0
