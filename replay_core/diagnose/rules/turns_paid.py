"""What turns of a trajectory earn and weigh: rewards of earlier turns that are lost, rows that have one vote each."""

from __future__ import annotations

import numpy as np

from replay_core import pages
from replay_core.diagnose.algorithm import aggregation, settings_of, stated_by
from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Finding, Where, finding, share, shown, warning
from replay_core.diagnose.flat import Array
from replay_core.diagnose.rule import rule, skip_if
from replay_core.diagnose.trajectories import earned_T, trajectory_B
from replay_core.records import TensorRef
from replay_core.regexes import regex
from replay_core.samples.batch import rows_of

#: Rewards of every turn, as a table of samples and turns.
_OF_TURNS = regex(r"(?i)(?:^|\.)(?:step|turn)_?(?:level_?)?rewards?$|(?:^|\.)rewards?_?(?:per|by)_?(?:step|turn)s?$")
#: Settings of how rewards of turns become one, and their words for the last of them.
_HOW = regex(r"(?i)(?:reward|turn|step|prm).*(?:aggreg|reduc|mode|type|from|combin)|(?:aggreg|reduc|combin).*reward")
_LAST = frozenset({"last", "final", "outcome", "last_turn", "last_step", "final_turn", "terminal"})
#: Samples that tell, the share of them in which earlier turns earn something, and how close is equal.
SAMPLES, EARLIER, CLOSE = 16, 0.2, 1e-5


def by_turn(batch: StepBatch) -> tuple[str, Array] | None:
    """The name and values [B, turns] of a table of rewards by turn, NaN where a ragged row has ended."""
    for sheet, places in batch.columns.sheets:
        if None in places:
            continue
        for name in sorted(sheet.names()):
            refs = sheet.refs(name) if _OF_TURNS.search(name) else None
            if not refs or any(ref.is_text or (ref.rows is None and len(ref.shape) != 2) for ref in refs):
                continue
            each = [_filled(ref) for ref in refs]
            most = max(one.shape[1] for one in each)
            if any(ref.rows is not None for ref in refs):
                each = [np.pad(one, ((0, 0), (0, most - one.shape[1])), constant_values=np.nan) for one in each]
            if len({one.shape[1] for one in each}) != 1 or each[0].shape[1] < 2:
                continue
            if any(len(one) != len(part) for one, part in zip(each, sheet.parts, strict=True)):
                continue
            at = [sheet.index[place] for place in places if place is not None]
            return name, np.array([each[part][row] for part, row in at])
    return None


def _filled(ref: TensorRef) -> Array:
    """The rows of a table, side by side."""
    rows = rows_of(ref) if ref.rows is not None else list(pages.array(ref))
    table = np.full((len(rows), max(map(len, rows), default=0)), np.nan)
    for number, row in enumerate(rows):
        table[number, : len(row)] = row
    return table


def _means_the_last(case: Case) -> bool:
    settings = settings_of(stated_by(case.run))
    told = [value for name, each in settings.items() if _HOW.search(name) for value in each]
    return any(isinstance(value, str) and value.lower() in _LAST for value in told)


@rule("D134", "rewards of earlier turns are lost", link="rewards", scope="case", lasts=True,
      explains=("D04", "L08"), source="SkyRL#201: the last step's reward alone reaches the trainer")  # fmt: skip
def earlier_turns_lost(case: Case) -> Finding | None:
    """Rewards of every turn (step_rewards, turn_rewards: a table of samples and turns) beside the reward that is
    trained on, over 16 samples and more: a warning where that is the last turn's in all of them (to 1e-5; of several
    turns the last that has a number), and earlier turns of a fifth of the samples and more have one, so that it is
    neither their sum nor their mean. Not where the run states that the last one is meant (a setting of rewards that
    says last, final or outcome).
    """
    skip_if(_means_the_last(case), "the run states that the last turn's reward is meant")
    last: list[Array] = []
    sums: list[Array] = []
    means: list[Array] = []
    earlier: list[Array] = []
    rewards: list[Array] = []
    where: Where | None = None
    steps: list[int | None] = []
    named = ""
    for batch in case.batches():
        found, reward_B = by_turn(batch), batch.reward_B
        if found is None or reward_B is None or not np.isfinite(reward_B).all():
            continue
        name, turns_BK = found
        named = name
        heard_BK = np.isfinite(turns_BK)
        at_B = turns_BK.shape[1] - 1 - heard_BK[:, ::-1].argmax(1)
        filled_BK = np.where(heard_BK, turns_BK, 0.0)
        last.append(filled_BK[np.arange(len(turns_BK)), at_B])
        sums.append(filled_BK.sum(1))
        means.append(filled_BK.sum(1) / np.maximum(heard_BK.sum(1), 1))
        earlier.append(np.abs(sums[-1] - last[-1]) > CLOSE)
        rewards.append(reward_B)
        where = where or batch.laid.where(batch.columns.reward_name, sample=int(earlier[-1].argmax()))
        steps.append(batch.step)
    count = sum(map(len, rewards))
    skip_if(count < SAMPLES, f"needs the reward of each turn of {SAMPLES} samples, and the one that is trained on")
    reward, of_last, whole, mean, more = (np.concatenate(each) for each in (rewards, last, sums, means, earlier))
    close = CLOSE * max(float(np.abs(reward).max()), 1.0)
    if (np.abs(reward - of_last) > close).any() or more.mean() < EARLIER:
        return None
    if not (np.abs(reward - whole) > close).any() or not (np.abs(reward - mean) > close).any():
        return None
    return warning(
        f"the reward is that of the last turn: what earlier turns earned in {more.mean():.0%} of the samples is lost",
        where,
        shown("samples whose reward is their last turn's", share(count, count), None, named),
        shown("mean reward", float(reward.mean()), f"{whole.mean():.4g} summed over turns"),
        shown("samples whose earlier turns earn something", share(int(more.sum()), count)),
        cause="rewards of turns are recorded and only the final one is handed to the trainer: what leads to a good end "
        "is not paid for. Sum them, or place each at the end of its turn",
        next_step="add up one sample's turns by hand; state it where the last is meant",
        steps=steps,
    )


#: Trajectories that tell; how many times as many rows some have; how many standard errors the lower rewards' rows are
#: above the others', and how many times as many.
TRAJECTORIES, TIMES, SURE, MORE = 24, 2, 4.0, 1.5


@rule("D135", "trajectories weigh as they have turns", link="loss", scope="case", lasts=True, explains=("L08", "L09"),
      source="rllm#512: a mean over rows with a row per turn")  # fmt: skip
def weigh_by_turns(case: Case) -> Finding | None:
    """Rows of one trajectory, a row for each turn, which share its one reward, and a loss that is stated to be a mean
    over rows (seq-mean): some trajectories have twice the rows of others and more. Worth knowing; a warning where those
    that earn less than the rest of their group have 1.5 times as many rows as those that earn more, by 4 standard
    errors, over 24 trajectories that tell.
    """
    how = aggregation(case.algorithm)
    skip_if(not how.startswith("seq"), "needs a loss that is stated to be a mean over rows (sequences)")
    low: list[int] = []
    high: list[int] = []
    rows: list[int] = []
    first: StepBatch | None = None
    steps: list[int | None] = []
    for batch in case.batches():
        whole = batch.once
        each_B, reward_B, group_B = trajectory_B(whole), whole.reward_B, whole.group_B
        if each_B is None or reward_B is None or group_B is None:
            continue
        of, reward_T = next(earned_T(reward_B, each_B))
        if of:
            continue
        count_T = np.bincount(each_B)
        group_T = np.zeros(len(reward_T), dtype=np.int64)
        group_T[each_B] = group_B
        mean_T = (np.bincount(group_T, weights=reward_T) / np.maximum(np.bincount(group_T), 1))[group_T]
        low += count_T[reward_T < mean_T - 1e-6].tolist()
        high += count_T[reward_T > mean_T + 1e-6].tolist()
        rows += count_T.tolist()
        first = first or batch
        steps.append(batch.step)
    if first is None or len(rows) < TRAJECTORIES or max(rows) < TIMES * max(min(rows), 1):
        skip_if(first is None, "needs trajectories of several turns with a row for each, and one reward")
        return None
    told = min(len(low), len(high)) > 1
    apart = float(np.mean(low) - np.mean(high)) if told else 0.0
    error = float(np.sqrt(np.var(low) / len(low) + np.var(high) / len(high))) if told else 0.0
    leans = (
        len(low) + len(high) >= TRAJECTORIES
        and told
        and apart > SURE * error
        and float(np.mean(low)) >= MORE * float(np.mean(high))
    )
    return finding(
        "warning" if leans else "info",
        f"trajectories weigh as they have turns ({min(rows)} to {max(rows)}): the loss is a mean over rows, one for "
        "each turn"
        + (f", and those of lower rewards have {np.mean(low) / np.mean(high):.3g} times as many" if leans else ""),
        first.laid.where("advantages", sample=0),
        shown("rows of a trajectory, mean", float(np.mean(rows))),
        *([shown("rows of those below and above their group's mean", f"{np.mean(low):.3g}, {np.mean(high):.3g}")]
          if told else []),
        shown("loss aggregation that is stated", how),
        cause="each turn is a row of its own, and every row has one vote: a long trajectory (often one that fails) has "
        "as many votes as turns, and the push down outweighs the push up",
        next_step="weigh each row by 1 / the rows of its trajectory, or sum over tokens of a trajectory first"
        if leans
        else "rldbg diagnose --explain D135",
        steps=steps,
    )  # fmt: skip
