"""With which weights several reward functions are summed: solved for, step by step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Finding, Where
from replay_core.diagnose.flat import Array
from replay_core.diagnose.rule import Skip, rule
from replay_core.diagnose.stating import finding, shown

#: What a sum of float32 is off, beside the largest reward; and how far apart two weights are that are not one.
EXACT, OTHER = 1e-4, 0.01
#: Samples beyond the number of functions that make a sum no luck, and steps before and after a change.
SPARE, STEPS = 4, 2


@dataclass(frozen=True, slots=True)
class _Summed:
    step: int
    weights_F: Array
    names: tuple[str, ...]
    place: Where


@rule("D104", "reward functions are summed with other weights", link="rewards", scope="case", lasts=True,
      source="TRL's reward_weights; a format reward that stands in the sum twice")  # fmt: skip
def weights(case: Case) -> Iterator[Finding]:
    """A sample's reward as the weighted sum of its recorded reward functions, solved for in every step that tells (the
    functions independent, at least 4 samples more than functions, all rewards met to 1e-4 of the largest). Other
    weights than the run states are an error. Weights that change once, from one step to the next, and were one and the
    same in 2 steps and more on either side, are a warning: a schedule changes them bit by bit, and most runs never do.
    """
    told = [one for batch in case.batches() if (one := _solved(batch)) is not None]
    if not told:
        raise Skip("no step tells with which weights several reward functions are summed")
    stated = _stated(case, told[0])
    if stated is not None:
        wrong = [one for one in told if _differ(one.weights_F, stated)]
        if wrong:
            yield _said(wrong[0], "error", stated, "the run states {:.3g}", wrong)
        return
    changes = [at for at in range(1, len(told)) if _differ(told[at].weights_F, told[at - 1].weights_F)]
    if len(changes) == 1 and min(changes[0], len(told) - changes[0]) >= STEPS:
        at = changes[0]
        yield _said(told[at], "warning", told[0].weights_F, "it was {:.3g} before", told[at:])


def _solved(batch: StepBatch) -> _Summed | None:
    """The weights of a step; None where they are not told."""
    functions_FB, rewards_B = batch.columns.reward_functions_FB, batch.columns.per_sample("reward")
    if batch.step is None or functions_FB is None or rewards_B is None or len(functions_FB) < 2:
        return None
    known_B = np.isfinite(functions_FB).all(axis=0) & np.isfinite(rewards_B)
    parts_BF, rewards_B = functions_FB[:, known_B].T, rewards_B[known_B]
    count = parts_BF.shape[1]
    if len(rewards_B) < count + SPARE or np.linalg.matrix_rank(parts_BF, tol=1e-3) < count:
        return None
    weights_F = np.linalg.lstsq(parts_BF, rewards_B, rcond=None)[0]
    if float(np.abs(parts_BF @ weights_F - rewards_B).max()) > EXACT * max(float(np.abs(rewards_B).max()), 1e-6):
        return None
    names = tuple(name.partition(".")[2] for name in batch.columns.reward_functions)
    return _Summed(batch.step, weights_F, names, batch.laid.where("reward", sample=0))


def _stated(case: Case, one: _Summed) -> Array | None:
    """The weights that the run states, by the functions' names, or one for all."""
    batch = next(iter(case.batches()))
    said = batch.laid.algorithm.value("reward_weights")
    if isinstance(said, dict) and set(said) == set(one.names):
        return np.array([float(said[name]) for name in one.names])
    if isinstance(said, list) and len(said) == len(one.names) and len(set(said)) == 1:
        return np.array(said, dtype=np.float64)
    return None


def _differ(mine_F: Array, others_F: Array) -> bool:
    return mine_F.shape != others_F.shape or bool(
        (np.abs(mine_F - others_F) > OTHER * np.maximum(np.abs(others_F), 0.01)).any()
    )


def _said(one: _Summed, severity: str, right_F: Array, whose: str, every: list[_Summed]) -> Finding:
    off = [at for at in range(len(right_F)) if _differ(one.weights_F[at : at + 1], right_F[at : at + 1])]
    name, now, right = one.names[off[0]], float(one.weights_F[off[0]]), float(right_F[off[0]])
    twice = len(off) == 1 and abs(now - 2 * right) <= OTHER * abs(right)
    return finding(
        "error" if severity == "error" else "warning",
        (
            f"{name} is counted twice in the reward from step {one.step} on, with weight {now:.3g}"
            if twice
            else f"{name} is summed into the reward with weight {now:.3g} from step {one.step} on"
        )
        + f": {whose.format(right)}",
        one.place,
        evidence=[
            shown("weights solved for", _listed(one.names, one.weights_F), _listed(one.names, right_F)),
            shown("steps with these weights", len(every)),
        ],
        cause="the function stands in the sum twice: once by itself, and once more in another that adds it or in a "
        "list that was extended again"
        if twice
        else "the weights of the reward functions were changed, or stand in another order than the functions",
        steps=[each.step for each in every],
    )


def _listed(names: tuple[str, ...], weights_F: Array) -> str:
    return ", ".join(f"{name} {float(weight):.3g}" for name, weight in zip(names, weights_F, strict=True))
