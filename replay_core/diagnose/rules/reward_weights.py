"""How a reward is made of its functions: with which weights they are summed, and what becomes of the sum."""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Finding, Where, finding, listed, shown
from replay_core.diagnose.flat import Array
from replay_core.diagnose.function_weights import stated_weights
from replay_core.diagnose.rule import given, rule, skip_if
from replay_core.diagnose.signals import RunLog
from replay_core.regexes import regex

#: What a sum of float32 is off, beside the largest reward; and how far apart two weights are that are not one.
EXACT, OTHER = 1e-4, 0.01
#: Samples beyond the number of functions that make a sum no luck, and steps before and after a change.
SPARE, STEPS = 4, 2


class _Summed(Struct, frozen=True):
    step: int
    weights_F: Array
    names: tuple[str, ...]
    place: Where


@rule("D104", "rewards are not the sum of their functions", link="rewards", scope="case", lasts=True,
      explains=("D01", "D03", "D04", "D85", "D100", "L08"),
      source="TRL's reward_weights; a format reward that stands in the sum and in the function of it")  # fmt: skip
def weights(case: Case) -> Finding | None:
    """A sample's reward as the weighted sum of its recorded reward functions, solved for in every step that tells (the
    functions independent, at least 4 samples more than functions, all rewards met to 1e-4 of the largest). Other
    weights than the run states are an error. Weights that change once, from one step to the next, and were one and the
    same in 2 steps and more on either side, are a warning: a schedule changes them bit by bit, and most runs never do.

    A function that gives all samples of a step (8 and more) one number, and another one in each of 3 steps and more,
    while another tells them apart, is a warning before all that.

    Where a step's rewards are no such sum: an error if they are that of another row, as many rows away in all or the
    same numbers in another order, or that sum made a whole number (cut off, rounded) where other steps have the sum
    itself; a warning where none has. The sum is made with the weights of the run's other steps, else with those that
    are stated, else with 1 each.
    """
    if (one_number := _one_for_all(case)) is not None:
        return one_number
    told, others = [], []
    for batch in case.batches():
        if (one := _solved(batch)) is not None:
            told.append(one)
        elif (left := _parts(batch)) is not None:
            others.append((batch, *left))
    if (made := _made_otherwise(case, told, others)) is not None:
        return made
    skip_if(not told, "no step tells with which weights several reward functions are summed")
    stated = _stated(case, told[0])
    if stated is not None:
        wrong = [one for one in told if _differ(one.weights_F, stated)]
        if wrong:
            return _said(wrong[0], "error", stated, "the run states {:.3g}", wrong)
        return None
    changes = [at for at in range(1, len(told)) if _differ(told[at].weights_F, told[at - 1].weights_F)]
    if len(changes) == 1 and min(changes[0], len(told) - changes[0]) >= STEPS:
        at = changes[0]
        return _said(told[at], "warning", told[0].weights_F, "it was {:.3g} before", told[at:])
    return None


#: Samples of a step, and steps with another number each, before one number for all samples is no chance.
OF_A_STEP, NUMBERS = 8, 3


def _one_for_all(case: Case) -> Finding | None:
    """A function of several that gives all samples of a step one number, and another one in each step, while another
    function tells samples apart.
    """
    numbers: dict[str, list[float]] = {}
    apart: set[str] = set()
    first: StepBatch | None = None
    steps: list[int | None] = []
    for batch in case.batches():
        names = _names(batch)
        if len(names) < 2 or len(batch) < OF_A_STEP:
            continue
        first = first or batch
        steps.append(batch.step)
        for name in names:
            values_B = batch.columns.per_sample(name)
            if values_B is None or not np.isfinite(values_B).all() or np.ptp(values_B) > 1e-6:
                apart.add(name)
            else:
                numbers.setdefault(name, []).append(float(values_B[0]))
    for name, values in numbers.items():
        several = np.unique(np.round(values, 6))
        # All right, or none: a share of 0 or 1 is every sample's own.
        is_share = np.isin(several, (0.0, 1.0)).any()
        if name in apart or not apart or len(values) < NUMBERS or several.size < len(values) or is_share:
            continue
        assert first is not None
        return finding(
            "warning",
            f"{name} is one number for all samples of a step ({listed([f'{value:.4g}' for value in values], 4)}): it "
            "tells no answer from another",
            first.laid.where(name, sample=0),
            shown("steps in which all samples have one number", f"{len(values)} of {len(steps)}", "none"),
            shown("different numbers, by step", int(several.size)),
            shown("functions that tell samples apart", listed(sorted(apart))),
            cause="the function returns one value (a mean over the batch, a list of one) where one for each completion "
            "is asked for, and it is spread over all of them: it cancels in every group's baseline",
            next_step="call it on two completions of which one is worse, and count what it returns",
            steps=steps,
        )
    return None


#: Names of a reward's parts beside `rewards`, as trainers of one's own have them.
_PART = regex(r"^(?:reward|score)s?[_/]\w+$")


def _names(batch: StepBatch) -> list[str]:
    """The reward's functions, in the order in which they are recorded."""
    known = set(batch.columns.reward_functions)
    sheet = next((sheet for sheet, _ in batch.columns.sheets if sheet.refs("reward")), batch.spine)
    written = [ref.canonical or ref.name for ref in sheet.parts[0].held.fields()]
    if known:
        return [name for name in written if name in known] if known <= set(written) else batch.columns.reward_functions
    return [name for name in written if _PART.search(name) and batch.columns.per_sample(name) is not None]


def _parts(batch: StepBatch) -> tuple[Array, Array] | None:
    """What each function gave [B, F], and the rewards [B], of a step that has both for every sample."""
    each = [batch.columns.per_sample(name) for name in _names(batch)]
    rewards_B = batch.columns.per_sample("reward")
    if batch.step is None or rewards_B is None or not each or any(one is None for one in each):
        return None
    parts_BF = np.stack([one for one in each if one is not None], axis=1)
    return (parts_BF, rewards_B) if np.isfinite(parts_BF).all() and np.isfinite(rewards_B).all() else None


def _solved(batch: StepBatch) -> _Summed | None:
    """The weights of a step; None where they are not told."""
    known = _parts(batch)
    if batch.step is None or known is None or known[0].shape[1] < 2:
        return None
    parts_BF, rewards_B = known
    count = parts_BF.shape[1]
    if len(rewards_B) < count + SPARE or np.linalg.matrix_rank(parts_BF, tol=1e-3) < count:
        return None
    weights_F = np.linalg.lstsq(parts_BF, rewards_B, rcond=None)[0]
    if float(np.abs(parts_BF @ weights_F - rewards_B).max()) > EXACT * max(float(np.abs(rewards_B).max()), 1e-6):
        return None
    names = tuple(name.partition(".")[2] or name for name in _names(batch))
    return _Summed(batch.step, weights_F, names, batch.laid.where("reward", sample=0))


def _stated(case: Case, one: _Summed) -> Array | None:
    """The weights that the run states, by the functions' names, or one for all."""
    batch = next(iter(case.batches()))
    # TRL's mixin records the functions in the order in which their weights are stated; others in any.
    in_order = all(name.startswith("rewards_per_func.") for name in _names(batch))
    return stated_weights(batch.laid.algorithm, one.names, in_order=in_order)


#: Rows that are not the sum of their own parts, and different sums, before a number of rows between them is no chance;
#: and as many sums as rows before another order is none.
ROWS, VALUES = 6, 3
_WHOLE = (("cut off", np.trunc), ("rounded", np.rint), ("rounded down", np.floor))


def _made_otherwise(case: Case, told: list[_Summed], others: list[tuple[StepBatch, Array, Array]]) -> Finding | None:
    """Steps whose rewards are another row's sum, or the sum as a whole number; None where none are."""
    found: list[tuple[StepBatch, str, str, str]] = []
    for batch, parts_BF, rewards_B in others:
        names = tuple(name.partition(".")[2] or name for name in _names(batch))
        same = [one for one in told if one.names == names]
        stated = None if same else _stated(case, _Summed(0, rewards_B, names, batch.laid.where("reward", sample=0)))
        weights_F = same[0].weights_F if same else np.ones(len(names)) if stated is None else stated
        sums_B = parts_BF @ weights_F
        close = EXACT * max(float(np.abs(sums_B).max()), 1e-6)
        off_B = np.abs(sums_B - rewards_B) > close
        if off_B.sum() < ROWS or np.unique(np.round(sums_B, 6)).size < VALUES:
            continue
        by = next((by for by in sorted(range(1 - len(off_B), len(off_B)), key=abs)
                   if by and (np.abs(np.roll(sums_B, by) - rewards_B) <= close).all()), None)  # fmt: skip
        same_numbers = (np.abs(np.sort(sums_B) - np.sort(rewards_B)) <= close).all()
        if by is not None or (same_numbers and np.unique(np.round(sums_B, 6)).size >= ROWS):
            away = "" if by is None else f"{abs(by)} row{'s' * (abs(by) > 1)} {'before' if by > 0 else 'after'}"
            whose = (
                f"each is the sum of the functions of the row {away}"
                if away
                else "the functions' sums, in another order"
            )
            cause = "rewards come back in another order than the samples, or were rolled or taken at a wrong index: "
            cause += "a row is paid for its neighbour's answer"
            found.append((batch, "error", f"rewards belong to other samples: {whose}", cause))
            continue
        # One function alone may be held to a threshold on purpose, and so may what nobody says the weights of.
        is_sum = len(names) > 1 and bool(same or stated is not None)
        how = next(
            (how for how, made in _WHOLE if is_sum and (np.abs(made(sums_B + close) - rewards_B) <= close).all()), None
        )
        if how is not None:
            found.append((batch, "error" if same else "warning", f"rewards are whole numbers, and the sums of their "
                          f"functions are not: each is its sum, {how}", "the rewards' tensor has an integer dtype, or "
                          "they are cast (int(), .long()): what an answer earns in part is lost"))  # fmt: skip
    if not found:
        return None
    batch, severity, claim, cause = found[0]
    every = [each for each in found if each[2] == claim]
    return finding(
        "error" if severity == "error" else "warning",
        f"{claim}, from step {batch.step} on",
        batch.laid.where("reward", sample=0),
        shown("functions that are summed", ", ".join(_names(batch))), shown("steps made so", len(every)),
        shown("steps whose rewards are the sums themselves", len(told)),
        cause=cause,
        steps=[one.step for one, *_ in every],
    )  # fmt: skip


def _differ(mine_F: Array, others_F: Array) -> bool:
    return mine_F.shape != others_F.shape or bool(
        (np.abs(mine_F - others_F) > OTHER * np.maximum(np.abs(others_F), 0.01)).any()
    )


def _said(one: _Summed, severity: str, right_F: Array, whose: str, every: list[_Summed]) -> Finding:
    off = [at for at in range(len(right_F)) if _differ(one.weights_F[at : at + 1], right_F[at : at + 1])]
    name, now, right = one.names[off[0]], float(one.weights_F[off[0]]), float(right_F[off[0]])
    swapped = bool(off) and not _differ(np.sort(one.weights_F), np.sort(right_F))
    lost = bool(off) and abs(now) <= OTHER * abs(right)
    twice = len(off) == 1 and abs(now - 2 * right) <= OTHER * abs(right)
    return finding(
        "error" if severity == "error" else "warning",
        (
            f"{name} is counted twice in the reward from step {one.step} on, with weight {now:.3g}"
            if twice
            else f"{name} has no part in the reward from step {one.step} on"
            if lost
            else f"{name} is summed into the reward with weight {now:.3g} from step {one.step} on"
        )
        + f": {whose.format(right)}",
        one.place,
        shown("weights solved for", _listed(one.names, one.weights_F), _listed(one.names, right_F)),
        shown("steps with these weights", len(every)),
        cause="the function stands in the sum twice: once by itself, and once more in another that adds it or in a "
        "list that was extended again"
        if twice
        else "the function is computed and logged, and left out where the rewards are summed up: what it judges is not "
        "paid for"
        if lost
        else "the weights stand in another order than the reward functions: each function has another's weight"
        if swapped
        else "the weights of the reward functions were changed, or stand in another order than the functions",
        steps=[each.step for each in every],
    )


def _listed(names: tuple[str, ...], weights_F: Array) -> str:
    return ", ".join(f"{name} {float(weight):.3g}" for name, weight in zip(names, weights_F, strict=True))


#: Steps beyond the number of functions whose mean reward is one sum of theirs; what rounding leaves beside it, and what
#: is no rounding.
FITTING, ROUNDED, FAR = 4, 2e-3, 0.02


@rule("D104", "rewards are not the sum of their functions", link="rewards", scope="signals",
      needs=("reward",), explains=("D01", "D02", "D03", "D04", "L01", "L08", "L19"),
      source="a verifier that fails and is scored 0, between steps that it answers")  # fmt: skip
def dropped_to_one(log: RunLog) -> Finding | None:
    """A reward that is one number in 2 steps and more in a row, while the means of its functions (2 and more) go on,
    where in all other steps (4 more than functions) it is one weighted sum of theirs: what those steps paid is lost. A
    warning, an error where the run ends so.
    """
    reward = given(log.get("reward"))
    parts = [one for one in log.all("reward_function") if len(one.points) == len(reward.points)]
    by_step = [{point.step: point.value for point in one.points} for one in parts]
    rows = [(point, [each.get(point.step, np.nan) for each in by_step]) for point in reward.points]
    rows = [(point, each) for point, each in rows if np.isfinite([point.value, *each]).all()]
    skip_if(len(parts) < 2 or not rows, "needs the means of two reward functions and more")
    rewards_S, parts_SF = np.array([point.value for point, _ in rows]), np.array([each for _, each in rows])
    same = _in_a_row(rewards_S)
    left_S = np.ones(len(rows), bool)
    left_S[same] = False
    count = parts_SF.shape[1]
    if len(same) < 2 or left_S.sum() < count + FITTING:
        return None
    weights_F = np.linalg.lstsq(parts_SF[left_S], rewards_S[left_S], rcond=None)[0]
    scale = max(float(np.abs(rewards_S[left_S]).max()), 1e-6)
    off_S = np.abs(parts_SF @ weights_F - rewards_S) / scale
    if float(off_S[left_S].max()) > ROUNDED or float(off_S[same].min()) < FAR:
        return None
    steps = [rows[at][0].step for at in same]
    number, until_the_end = float(rewards_S[same[0]]), same[-1] == len(rows) - 1
    return finding(
        "error" if until_the_end else "warning",
        f"the reward is exactly {number:g} in steps {listed(steps)}, while its functions pay as before"
        + (": it drops, and comes back" if not until_the_end else ""),
        rows[same[0]][0].where(reward.name),
        shown(f"{reward.name} in these steps", number, f"{float((parts_SF @ weights_F)[same].mean()):.3g}, the sum"),
        shown("steps whose reward is that sum", int(left_S.sum())),
        shown("weights solved for", _listed(tuple(one.name for one in parts), weights_F)),
        cause="what pays is lost on the way to the sum: the judge or verifier fails in these steps (an outage, a "
        "time-out, an exception that is caught) and one number is put in its place, which teaches nothing",
        next_step="look at the log of the reward service at these steps; drop batches it did not score",
        steps=steps,
    )


def _in_a_row(values_S: Array) -> list[int]:
    """The longest run of steps with one and the same number."""
    best: list[int] = []
    begin = 0
    for at in range(1, len(values_S) + 1):
        if at == len(values_S) or values_S[at] != values_S[begin]:
            best = max(best, list(range(begin, at)), key=len)
            begin = at
    return best
