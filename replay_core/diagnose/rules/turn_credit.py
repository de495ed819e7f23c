"""Advantages of turns that are made of another turn's reward: credit that lies a turn late or early."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
from msgspec import Struct

from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Finding, error, share, shown
from replay_core.diagnose.flat import Array
from replay_core.diagnose.rule import rule, skip_if
from replay_core.diagnose.rules.turns_paid import by_turn

#: Turns with an advantage that tell, different values among them, and the share of them that a formula has to make.
TURNS, VALUES, ALL = 24, 8, 0.98
#: What else is added to a std.
_EPSILONS = (0.0, 1e-8, 1e-6, 1e-5, 1e-4)
_SHIFTS = {1: "before it", -1: "after it"}
_CELLS = ("turns of one number in a group", "all turns of a group", "all turns of the batch")


class _Turns(Struct, frozen=True):
    """The turns [B, K] of a batch: their rewards and advantages, NaN where a sample has no such turn."""

    batch: StepBatch
    name: str
    reward_BK: Array
    advantage_BK: Array

    @property
    def there_BK(self) -> Array:
        there: Array = np.isfinite(self.reward_BK)
        return there


@rule("D171", "turns are paid for another turn's reward", link="advantages", scope="case", lasts=True,
      explains=("D04", "D28", "L08"),
      source="turn-level credit (MT-GRPO, GiGPO): rewards that are appended after the next turn has begun")  # fmt: skip
def shifted_credit(case: Case) -> Finding | None:
    """Advantages that have one value in each turn (a run of tokens that count), beside a reward for each turn, over 24
    turns and more of 8 different advantages. Each turn's own reward, or what it and those after it earn (discounted
    where a discount is stated), less the mean over turns of one number in a group, over a group or over the batch, left
    so or divided by its std (over n or n - 1), is held against them: an error where one of these formulas makes .98 of
    them with rewards that lie one turn late, or one early, and none with the rewards as they are.
    """
    every = [turns for batch in case.batches() if (turns := _turns_of(batch)) is not None]
    told = sum(int(turns.there_BK.sum()) for turns in every)
    values = {round(float(value), 5) for turns in every for value in turns.advantage_BK[turns.there_BK]}
    skip_if(told < TURNS or len(values) < VALUES, f"needs rewards and advantages of {TURNS} turns")
    discount = case.algorithm.number("gamma", "discount") or 1.0
    if any(_share_made(every, 0, *formula) >= ALL for formula in _formulas(discount)):
        return None
    for shift, formula in product(_SHIFTS, _formulas(discount)):
        if (made := _share_made(every, shift, *formula)) < ALL:
            continue
        first = every[0]
        to_go, of_cell, _ = formula
        return error(
            f"each turn's advantage is made of the reward of the turn {_SHIFTS[shift]}: credit lies a turn "
            + ("late" if shift > 0 else "early"),
            first.batch.laid.where("advantages"),
            shown("turns whose advantage it makes", share(round(made * told), told), None, first.name),
            shown("with each turn's own reward", f"{_best(every, discount):.0%}", "all"),
            shown("what is normalised", ("reward" if to_go is None else "return to go") + f" over {of_cell}"),
            cause="the environment's answer to a turn is booked on the next one: its reward is read after the turn "
            "counter went on, or the list begins with a reward from before anything was done"
            if shift > 0
            else "rewards are booked one turn early: the first one is dropped, or the list begins at the turn after",
            next_step="print turns, rewards and advantages of one trajectory side by side",
            steps=[turns.batch.step for turns in every if turns.batch.step is not None],
        )  # fmt: skip
    return None


_Formula = tuple[float | None, str, tuple[int, float] | None]


def _formulas(discount: float) -> Iterator[_Formula]:
    """Discount of the return to go (None: the turn's reward alone), what is one cell, and what the std is taken of."""
    for to_go, cell in product(dict.fromkeys((1.0, discount, None)), _CELLS):
        yield to_go, cell, None
        for ddof, epsilon in product((1, 0), _EPSILONS):
            yield to_go, cell, (ddof, epsilon)


def _best(every: list[_Turns], discount: float) -> float:
    return max(_share_made(every, 0, *formula) for formula in _formulas(discount))


def _share_made(
    every: list[_Turns], shift: int, to_go: float | None, cell: str, std: tuple[int, float] | None
) -> float:
    """The share of the turns whose advantage the formula makes, with rewards that lie so many turns late."""
    made = told = 0
    for turns in every:
        there_BK = turns.there_BK
        earned_BK = _shifted(turns.reward_BK, shift)
        if to_go is not None:
            earned_BK = _to_go(earned_BK, to_go)
        cells_BK = _cells(turns, cell)
        made_T = _normalised(earned_BK[there_BK], cells_BK[there_BK], std)
        held_T = turns.advantage_BK[there_BK]
        made += int((np.abs(made_T - held_T) <= 2e-3 * max(1.0, float(np.abs(held_T).max(initial=0.0)))).sum())
        told += held_T.size
    return made / told


def _shifted(reward_BK: Array, shift: int) -> Array:
    """Rewards so many turns later within each trajectory; what falls off its end is lost, what comes in is 0."""
    if not shift:
        return reward_BK
    moved_BK = np.zeros_like(reward_BK)
    filled_BK = np.nan_to_num(reward_BK)
    if shift > 0:
        moved_BK[:, 1:] = filled_BK[:, :-1]
    else:
        moved_BK[:, :-1] = filled_BK[:, 1:]
    return np.where(np.isfinite(reward_BK), moved_BK, np.nan)


def _to_go(reward_BK: Array, discount: float) -> Array:
    going_BK, after_B = np.zeros_like(reward_BK), np.zeros(len(reward_BK))
    for turn in range(reward_BK.shape[1] - 1, -1, -1):
        after_B = np.nan_to_num(reward_BK[:, turn]) + discount * after_B
        going_BK[:, turn] = after_B
    return going_BK


def _cells(turns: _Turns, cell: str) -> Array:
    """The number of the cell that each turn is measured in."""
    group_B = turns.batch.group_B
    shape = turns.reward_BK.shape
    group_BK = np.broadcast_to((np.zeros(shape[0], int) if group_B is None else group_B)[:, None], shape)
    if cell == _CELLS[2]:
        return np.zeros(shape, dtype=int)
    return group_BK * shape[1] + np.arange(shape[1]) if cell == _CELLS[0] else np.array(group_BK)


def _normalised(earned_T: Array, cell_T: Array, std: tuple[int, float] | None) -> Array:
    number_T = np.unique(cell_T, return_inverse=True)[1].reshape(-1)
    counts = np.bincount(number_T)
    left_T = earned_T - (np.bincount(number_T, weights=earned_T) / counts)[number_T]
    if std is None:
        return left_T
    ddof, epsilon = std
    spread = np.sqrt(np.bincount(number_T, weights=left_T**2) / np.maximum(counts - ddof, 1))[number_T]
    found: Array = np.divide(left_T, spread + epsilon, out=np.zeros_like(left_T), where=spread > 1e-9)
    return found


def _turns_of(batch: StepBatch) -> _Turns | None:
    """Rewards and advantages by turn; None where these change within turns, or turns are not those of the table."""
    table, column, trained_N = by_turn(batch), batch.columns.of("advantages"), batch.trained_N
    if table is None or column is None or trained_N is None or batch.advantage_B is not None:
        return None
    name, reward_BK = table
    held_BK = np.full(reward_BK.shape, np.nan)
    for sample, span in enumerate(batch.flat.spans):
        at = np.flatnonzero(trained_N[span] & column.said_N[span])
        if not at.size:
            return None
        each = np.split(column.values_N[span][at], np.flatnonzero(np.diff(at) > 1) + 1)
        if len(each) > reward_BK.shape[1] or any(np.ptp(turn) > 2e-3 for turn in each):
            return None
        held_BK[sample, : len(each)] = [turn[0] for turn in each]
    there_BK = np.isfinite(held_BK)
    # A table that is filled up with 0 has a reward for turns that never were.
    if not np.isfinite(reward_BK[there_BK]).all() or np.nan_to_num(reward_BK[~there_BK]).any():
        return None
    return _Turns(batch, name, np.where(there_BK, reward_BK, np.nan), held_BK)
