"""What a recorded loss adds up: the policy's part and the KL's, micro-batch by micro-batch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
from msgspec.structs import replace

from replay_core import pages
from replay_core.diagnose.algorithm import (
    KL_IN_REWARDS,
    KL_WEIGHTS,
    entropy_bonus,
    of_loss,
    stated_number,
)
from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Evidence, Finding, Where, error, finding, info, shown
from replay_core.diagnose.rule import Skip, given, rule
from replay_core.diagnose.rules.loss import is_share_of_update
from replay_core.diagnose.rules.summed import logged_kl
from replay_core.diagnose.surrogates import FLOOR, logged_of
from replay_core.diagnose.whole_losses import solve
from replay_core.objectives import kl
from replay_core.records import Record, TensorRef

#: A weight of the entropy below it is what rounding leaves between loss and pg_loss: recipes have .0001 and more.
LEAST_BONUS = 1e-5
#: Micro-batches that tell; a KL loss below this is nothing to weigh; and what one coefficient may leave.
FEWEST, LEAST, LEFT = 4, 1e-6, 0.02
#: Steps of one micro-batch that tell a weight, and how far it may lie apart in them: means that go up and down by a
#: tenth make no number by chance.
STEPS, ALIKE = 3, 2e-3
#: How far a coefficient may lie from the stated one before it is another: token weights differ by micro-batch.
WEIGHED = 1.5
#: loss, pg_loss and another term of one micro-batch, and where they are recorded.
_Row = tuple[float, float, float, Record]
_LOOK_AT_SUM = "rldbg diagnose --explain D49   # then look at the line that adds up the loss"
_LOOK_AT_SCALE = "rldbg diagnose --explain D49   # then look at the line that scales the loss"


@rule("D49", "a term of the loss has the wrong sign or weight", link="loss", scope="case",
      explains=("L10", "L08", "D15"), lasts=True,
      source="loss = pg_loss + beta KL: the KL holds the policy near its reference")  # fmt: skip
def added_up(case: Case) -> Iterator[Finding]:
    """Solves loss - pg_loss = beta KL over micro-batches that record all three (4 and more, KL over 1e-6), and must
    leave less than a fiftieth of it: a negative beta is an error; so is none at all where the run states one, and one
    1.5 times the stated or below two thirds of it. None at all is said where the stated one would change the losses by
    more than rounding (1e-6) in 4 micro-batches. Losses may be divided by the micro-batches of an update, or by what
    the run states. The KL loss may be recorded with its coefficient or without:
    of a beta of 1, policy and reference tell which.

    Where the loss is recorded alone, its terms are made of the tokens (the policy's as it is stated, the KL by every
    estimator, the entropy; over tokens, samples or the update) and one set of weights is solved for that makes every
    loss of 8 micro-batches and more: it is judged as above.

    Where no KL is recorded, loss - pg_loss is held against the entropy of the tokens (any reduction, to 2e-4): an error
    where it is added, which presses the entropy down, and where its weight is off the stated one by as much. And
    against pg_loss itself: one factor of 1.5 and more in all micro-batches that are no count of ranks is an error (a
    world size, an accumulation that is not divided), a warning where it is the count of micro-batches, which Megatron's
    schedule divides by afterwards; an error where it is one over that count, and pg_loss a share of the update already.
    One negative factor in all of them is an error; one below two thirds that neither the micro-batches of an update nor
    what is stated makes is worth knowing.

    Where the critic's loss is logged beside the two (one trunk with a value head) its coefficient is solved for
    likewise: an error where it is negative, and where it is another one than stated (3 times and more, a third and
    less; a weight of 1 may be of a loss that holds its coefficient, and none that of a critic of its own).
    """
    rows = [
        (loss, pg, kl or 0.0, record)
        for record in case.records() if record.key.stage not in ("training_metrics", "param", "gradient")
        for loss, pg, kl in [(*_numbers(record, "loss", "pg_loss"), _numbers(record, "kl_loss")[0])]
        if loss is not None and pg is not None
    ]  # fmt: skip
    if len(rows) < FEWEST:
        yield from _of_tokens(case)
        return
    scales = scales_of(case, [record for *_, record in rows])
    weighed = [row for row in rows if abs(row[2]) > LEAST]
    found: list[Finding | None] = []
    if len(weighed) >= FEWEST:
        found = [_kl(case, weighed, scales)]
    elif not any(kl for _, _, kl, _ in rows):
        scalars = [
            (loss, pg, entropy, record)
            for loss, pg, _, record in rows
            if (entropy := _numbers(record, "entropy_loss")[0]) is not None
        ]
        found = [_factor(case, [(loss, pg, record) for loss, pg, _, record in rows])]
        if (weight := _weight_of(scalars, scales, _bonus(case))) is not None:
            place = Where.of(max(scalars, key=lambda row: abs(row[2]))[3], "entropy_loss")
            steps = sorted({record.key.step for *_, record in scalars if record.key.step is not None})
            told = shown("micro-batches that tell", len(scalars))
            found.append(_judged_entropy(case, weight, place, steps, told))
        else:
            found.append(_entropy(case, scales))
    if not any(found):
        found.append(_value(case, scales))
    yield from (one for one in found if one is not None)


def _of_tokens(case: Case) -> Iterator[Finding]:
    """The weights of terms in a loss that is recorded alone, by what its tokens make of each term."""
    beta, bonus = _coefficient_of_loss(case), _bonus(case)
    solved = solve(case, beta, bonus)
    if solved is None:
        raise Skip(
            f"needs loss and pg_loss of {FEWEST} micro-batches, and kl_loss for the weight of the KL; the recorded "
            "tokens make no loss"
        )
    place = solved.batch.laid.where_record(solved.batch.columns.scalars("loss")[0].record, "loss")
    told = shown("micro-batches that tell", solved.micros)
    weight = solved.kl or 0.0
    if weight < -1e-9:
        claim = f"the KL term is subtracted from the loss: it has the wrong sign (coefficient {weight:.3g})"
        cause = "the sign of the term is turned where the loss is summed up: distance from the reference is rewarded"
    elif beta and solved.kl is None:
        claim = "the KL term is not in the loss: the policy's part alone makes it, and the run states a coefficient of "
        claim += f"{beta:g}"
        cause = "the KL is left out where the loss is summed up"
    elif beta and not 1 / WEIGHED < weight / beta < WEIGHED:
        claim = f"the KL term weighs {weight:.3g} in the loss, and the run states a coefficient of {beta:g}"
        cause = "the coefficient that is configured does not reach the loss, or is scaled on its way"
    else:
        found = None if solved.entropy is None else _judged_entropy(case, solved.entropy, place, solved.steps, told)
        yield from [] if found is None else [found]
        return
    yield error(
        claim, place, shown("coefficient of the KL that makes the losses of their tokens", weight, "> 0"), told,
        *([] if not solved.estimator else [shown("estimator that does", solved.estimator)]),
        *([] if beta is None else [shown("coefficient that is stated", beta)]),
        cause=cause, next_step=_LOOK_AT_SUM, steps=solved.steps,
    )  # fmt: skip


#: How runs state the weight of a value head's loss, and how records name that loss.
_VALUE_WEIGHTS = ("vf_coef", "value_loss_coef", "value_coef", "vf_loss_coef", "value_loss_weight", "critic_coef",
                  "c1")  # fmt: skip
_VALUE_LOSSES = ("vf_loss", "value_loss", "critic_loss", "v_loss")


def _value(case: Case, scales: list[float]) -> Finding | None:
    """The coefficient of a value head's loss, where it alone is added to the policy's."""
    for name in _VALUE_LOSSES:
        rows = [
            (loss, pg, value, record)
            for record in case.records() if record.key.stage not in ("training_metrics", "param", "gradient")
            for loss, pg, value in [_numbers(record, "loss", "pg_loss", name)]
            if loss is not None and pg is not None and value is not None and value > LEAST
        ]  # fmt: skip
        if len(rows) < FEWEST:
            continue
        stated = stated_number(case.run.flags or {}, *_VALUE_WEIGHTS) or stated_number(case.run.facts, *_VALUE_WEIGHTS)
        solved = _solved(rows, scales, stated)
        if solved is None:
            return None
        weight, divisor = solved
        if weight < -1e-9:
            claim = f"the critic's loss is subtracted: it has the wrong sign in the loss (coefficient {weight:.3g})"
            cause = "the sign of the term is turned where the loss is summed up: the value head unlearns its returns"
        elif stated and weight > 1e-9 and not _is_as_stated(weight, stated):
            claim = f"the critic's loss weighs {weight:.3g} in the loss, and the run states a coefficient of "
            claim += f"{stated:g}: {weight / stated:.3g} times as much"
            cause = (
                "the coefficient that is configured does not reach the loss, or is scaled on its way: one trunk is "
                + ("moved by the values' errors, and the policy drifts with it" if weight > stated
                   else "hardly moved by the values' errors, and the advantages are of an untrained critic")
            )  # fmt: skip
        else:
            return None
        record = max(rows, key=lambda row: abs(row[2]))[3]
        return replace(
            error(
                claim,
                Where.of(record, name),
                shown("coefficient that solves loss = pg_loss + c x the critic's", weight, "> 0", record.path.name),
                shown("micro-batches", len(rows)),
                *([] if stated is None else [shown("coefficient that is stated", stated)]),
                *([] if divisor == 1 else [shown("each loss is divided by", divisor)]),
                cause=cause,
                next_step=_LOOK_AT_SUM,
            ),
            steps=tuple(sorted({one.key.step for *_, one in rows if one.key.step is not None})),
        )
    return None


def _is_as_stated(weight: float, stated: float) -> bool:
    """Whether a value loss weighs what is stated: as it is, with its coefficient already in it, or as half a square on
    one of the two sides.
    """
    return abs(weight - 1) <= LEFT or any(1 / WEIGHED < weight / stated * half < WEIGHED for half in (1.0, 2.0, 0.5))


def scales_of(case: Case, records: list[Record]) -> list[float]:
    """What a micro-batch's loss may be divided by before its backward: nothing, what is stated, how many there are."""
    stated = case.algorithm.number("divisor", "gradient_accumulation_steps")
    return list(dict.fromkeys([*([1 / stated] if stated else []), 1.0, 1 / micros_of_update(records)]))


def micros_of_update(records: list[Record]) -> int:
    """How many micro-batches an update of one rank has, at most."""
    return max(Counter((one.key.step, one.key.rank, one.key.epoch, one.key.minibatch) for one in records).values())


def _coefficient_of_loss(case: Case) -> float | None:
    """The coefficient that the run states for the KL in its loss: one of the KL in the rewards is none."""
    algorithm = case.algorithm
    if algorithm.is_on("use_kl_loss") is False:
        return None
    in_reward = algorithm.is_on("use_kl_loss") is None and any(map(algorithm.is_on, KL_IN_REWARDS))
    names = KL_WEIGHTS[:1] if in_reward else KL_WEIGHTS
    return stated_number(case.run.flags or {}, *names) or stated_number(case.run.facts, *names) or _of_loss(case, "kl")


def _of_loss(case: Case, name: str) -> float | None:
    value = of_loss(case.run.flags or {}, name)
    return None if value is None else stated_number({name: value}, name)


def _solved(rows: list[_Row], scales: list[float], stated: float | None) -> tuple[float, float] | None:
    """(coefficient, what each loss is divided by) of loss = pg + coefficient x term, in every micro-batch. Where the
    policy's part is next to nothing more than one divisor makes it: then the one that makes what is stated.
    """
    loss, pg, term = (np.array([row[column] for row in rows]) for column in range(3))
    scale = float(np.abs(term).max())
    found = []
    for share in scales:
        rest = loss / share - pg
        weight = float(rest @ term / (term @ term)) if np.abs(rest).max() > 1e-7 else 0.0
        if np.abs(rest - weight * term).max() <= LEFT * max(abs(weight), 1e-6) * scale + 1e-7:
            found.append((weight, 1 / share))
    stands = (one for one in found if stated and 1 / WEIGHED < abs(one[0]) / stated < WEIGHED)
    return next(stands, found[0] if found else None)


def _kl(case: Case, rows: list[_Row], scales: list[float]) -> Finding | None:
    stated = _coefficient_of_loss(case)
    solved = _solved(rows, scales, stated)
    if solved is None:
        return None
    beta, divisor = solved
    record = max(rows, key=lambda row: abs(row[2]))[3]
    if beta < -1e-9:
        claim = f"the KL term is subtracted from the loss: it has the wrong sign (coefficient {beta:.3g})"
        cause = "the sign of the term is turned where the loss is summed up: distance from the reference is rewarded"
    elif (
        stated and beta > 1e-9 and not 1 / WEIGHED < beta / stated < WEIGHED
        # A term of weight 1 may hold its coefficient already.
        and (abs(beta - 1) > LEFT or _holds_no_coefficient(case, stated))
    ):  # fmt: skip
        claim = f"the KL term weighs {beta:.3g} in the loss, and the run states a coefficient of {stated:g}"
        cause = (
            "the coefficient that is configured does not reach the loss, is scaled on its way (a percentage, a world "
            "size), or is overwritten by a controller"
        )
    elif stated and abs(beta) <= 1e-3 * stated and _shows(rows, scales, stated):
        claim = f"the KL term is not in the loss: loss is pg_loss alone, and the run states a coefficient of {stated:g}"
        cause = "the KL loss is computed, logged, and left out where the loss is summed up"
    else:
        return None
    return error(
        claim,
        Where.of(record, "kl_loss"),
        shown("beta that solves it", beta, "> 0", record.path.name),
        shown("micro-batches", len(rows)),
        *([] if stated is None else [shown("beta that is stated", stated)]),
        *([] if divisor == 1 else [shown("each loss is divided by", divisor)]),
        cause=cause,
        next_step=_LOOK_AT_SUM,
    )


#: How many of its last places in single precision, and at least how much, a term changes a loss before it is missed.
_PLACES, _SEEN = 16.0, 1e-6


def _shows(rows: list[_Row], scales: list[float], stated: float) -> bool:
    """Whether a term of the stated weight would change these losses by more than the numbers they are made of round
    off, in several micro-batches: a KL next to 0, of a policy that has hardly moved, leaves loss and pg_loss equal.
    """
    seen = [
        min(scales) * stated * abs(term) > max(_SEEN, _PLACES * 2.0**-23 * max(abs(loss), abs(pg)))
        for loss, pg, term, _ in rows
    ]
    return sum(seen) >= FEWEST


def _holds_no_coefficient(case: Case, stated: float) -> bool:
    """Whether the recorded KL losses are the KL of policy and reference itself, and not that times what is stated; in
    two steps and more that tell.
    """
    times: list[float] = []
    for batch in case.batches():
        parts = logged_kl(batch)
        if parts is None:
            continue
        logged, p_N, r_N, _ = parts
        factors = (logged.factor(estimate(p_N, r_N)) for estimate in kl.ESTIMATORS.values())
        times += [factor for factor in [next((one for one in factors if one), None)] if factor]
    return len(times) > 1 and all(abs(math.log(one)) < abs(math.log(one / stated)) for one in times)


def _factor(case: Case, rows: list[tuple[float, float, Record]]) -> Finding | None:
    """A loss that is its only term times one factor, in every micro-batch: too much, or a share of the update (whose
    micro-batches' sum is the update's mean) divided by them once more.
    """
    rows = [row for row in rows if abs(row[1]) > LEAST]
    if len(rows) < FEWEST:
        return None
    found = [loss / pg for loss, pg, _ in rows]
    factor = sorted(found)[len(found) // 2]
    ranks = len({record.key.rank for _, _, record in rows})
    if not factor or max(abs(one - factor) for one in found) > 1e-3 * abs(factor) or round(factor, 2) == ranks:
        return None
    micros = micros_of_update([record for *_, record in rows])
    record = max(rows, key=lambda row: abs(row[1]))[2]
    told = [shown("micro-batches that agree", len(rows)), shown("micro-batches of an update", micros)]
    if factor < 0:
        return error(
            f"the loss has the wrong sign: it is {factor:.4g} times pg_loss, which is all that is recorded of it",
            Where.of(record, "loss"),
            shown("loss / pg_loss", factor, "> 0", record.path.name),
            *told,
            cause="the sum is negated where the terms are added up, or an objective is taken for a loss: each update "
            "climbs where it should descend",
            next_step=_LOOK_AT_SUM,
        )
    if factor < 1 / WEIGHED:
        stated = case.algorithm.number("divisor", "gradient_accumulation_steps")
        if micros == 1 == ranks and stated is not None and abs(factor * stated - 1) > 1e-3:
            return info(
                f"the loss is {factor:.4g} times its terms: pg_loss is all that is recorded of it, and an update has "
                "one micro-batch",
                Where.of(record, "loss"),
                shown("loss / pg_loss", factor, "1", record.path.name),
                *told,
                shown("gradient accumulation that is stated", stated),
                cause="right where other ranks or micro-batches that are not recorded hold the rest of the update; "
                "else it is divided by a count (ranks, accumulation) that is not there: updates are that much smaller",
                next_step=_LOOK_AT_SCALE,
            )
        if micros < 2 or abs(factor * micros - 1) > 1e-3 or not any(map(is_share_of_update, case.batches())):
            return None
        return error(
            f"the loss is divided by the {micros} micro-batches of an update twice: it is 1/{micros} of pg_loss, which "
            "is a sum over the tokens of the whole update already",
            Where.of(record, "loss"),
            shown("loss / pg_loss", factor, "1", record.path.name),
            *told,
            cause="gradient accumulation is divided out once more: each micro-batch's loss is its share of the update, "
            "and the sum of them is what the update should be",
            next_step=_LOOK_AT_SCALE,
        )
    if factor < WEIGHED:
        return None
    accumulated = micros > 1 and round(factor, 2) == micros
    # One rank of several may be recorded: gradients are averaged over all of them afterwards (verl).
    unseen = ranks == 1 and abs(factor - round(factor)) < 1e-3 * factor
    return finding(
        "warning" if accumulated or unseen else "error",
        f"the loss is {factor:.4g} times its terms: pg_loss is all that is recorded of it",
        Where.of(record, "loss"),
        shown("loss / pg_loss", factor, "1, or the ranks", record.path.name),
        *told,
        cause="it is multiplied by the micro-batches of an update, and its gradient is summed over them: accumulation "
        "is not divided (right where the schedule divides afterwards, as Megatron's does)"
        if accumulated
        else "a factor that should cancel does not: a world size where gradients are summed or one rank runs, gradient "
        "accumulation that is not divided, a loss scale; or a term that is not recorded",
        next_step=_LOOK_AT_SCALE,
    )


def _weight_of(rows: list[_Row], scales: list[float], stated: float | None) -> float | None:
    """The weight of a recorded entropy in the loss, entropy as a positive number; None where it makes no difference."""
    rows = [row for row in rows if abs(row[2]) > LEAST]
    solved = _solved(rows, scales, stated) if len(rows) >= FEWEST else None
    if solved is None or not solved[0]:
        return None
    return solved[0] if rows[0][2] > 0 else -solved[0]


def _entropy(case: Case, scales: list[float]) -> Finding | None:
    """The entropy term, where it alone is added to the policy's loss."""
    weights: list[float] = []
    steps: list[int | None] = []
    place: Where | None = None
    for batch in case.batches():
        loss, pg = (logged_of(batch, name, fewest=2) for name in ("loss", "pg_loss"))
        entropy = batch.columns.of("entropy")
        if loss is None or pg is None or entropy is None or loss.values_M.shape != pg.values_M.shape:
            continue
        values_N = np.where(entropy.said_N, np.nan_to_num(entropy.values_N), 0.0)
        told = []
        for share in scales:
            rest = replace(loss, values_M=loss.values_M / share - pg.values_M)
            if np.abs(rest.values_M).max() < 10 * FLOOR:
                continue
            added, subtracted = rest.factor(values_N), replace(rest, values_M=-rest.values_M).factor(values_N)
            if added is not None or subtracted is not None:
                told.append(added if added is not None else -given(subtracted))
        if not told:
            continue
        stated = _bonus(case)
        weights.append(next((one for one in told if stated and 1 / WEIGHED < abs(one) / stated < WEIGHED), told[0]))
        steps.append(batch.step)
        place = place or batch.laid.where("entropy", sample=0)
    if not weights:
        return _entropy_over_steps(case, scales)
    weight = float(np.median(weights))
    # Micro-batches of equal tokens fit another reduction, too, by another factor.
    alike = sum(abs(one - weight) <= LEFT * abs(weight) for one in weights)
    if place is None or alike < 2 or 2 * alike < len(weights):
        return None
    return _judged_entropy(case, weight, place, steps, shown("steps that tell", len(weights)))


def _entropy_over_steps(case: Case, scales: list[float]) -> Finding | None:
    """The same of steps with a single micro-batch: one weight of a mean of the tokens' entropies, in 3 of them and
    more, makes all of what loss and pg_loss are apart.
    """
    rest: list[float] = []
    means: list[list[float]] = []
    steps: list[int | None] = []
    place: Where | None = None
    for batch in case.batches():
        loss, pg = (logged_of(batch, name, fewest=1) for name in ("loss", "pg_loss"))
        entropy, trained_N = batch.columns.of("entropy"), batch.trained_N
        if loss is None or pg is None or entropy is None or trained_N is None or len(loss.values_M) != 1:
            continue
        if len(pg.values_M) != 1 or not (entropy.said_N | ~trained_N).all():
            continue
        values_N = np.where(trained_N, np.nan_to_num(entropy.values_N), 0.0)
        sums_B, counts_B = batch.flat.sum(values_N), batch.flat.count(trained_N)
        heard_B = counts_B > 0
        means.append([float(sums_B.sum() / counts_B.sum()), float((sums_B[heard_B] / counts_B[heard_B]).mean())])
        rest.append(float(loss.values_M[0] / scales[0] - pg.values_M[0]))
        steps.append(batch.step)
        place = place or batch.laid.where("entropy", sample=0)
    if place is None or len(rest) < STEPS or min(map(abs, rest)) < 10 * FLOOR:
        return None
    for kind in range(2):
        weights = [apart / mean[kind] for apart, mean in zip(rest, means, strict=True) if mean[kind] > 0]
        weight = float(np.median(weights)) if weights else 0.0
        if len(weights) == len(rest) and all(abs(one - weight) <= ALIKE * abs(weight) for one in weights):
            return _judged_entropy(case, weight, place, steps, shown("steps that tell", len(weights)))
    return None


def _bonus(case: Case) -> float | None:
    return entropy_bonus(case.algorithm) or _of_loss(case, "entropy")


def _judged_entropy(
    case: Case, weight: float, place: Where, steps: Sequence[int | None], told: Evidence
) -> Finding | None:
    stated = _bonus(case)
    if abs(weight) < LEAST_BONUS:
        return None
    if weight > 0:
        claim = "the entropy term has the wrong sign: added to the loss, it presses the entropy down (coefficient "
        claim += f"{weight:.3g})"
        cause = "the sign of the term is turned where the loss is summed up: a bonus is subtracted from the loss"
    elif stated and not 1 / WEIGHED < -weight / stated < WEIGHED:
        claim = f"the entropy term weighs {-weight:.3g} in the loss, and the run states a coefficient of {stated:g}"
        cause = "the coefficient that is configured does not reach the loss, or is scaled on its way"
    else:
        return None
    return error(
        claim,
        place,
        shown("coefficient of the entropy in the loss", weight, "< 0"),
        told,
        *([] if stated is None else [shown("coefficient that is stated", stated)]),
        cause=cause,
        next_step=_LOOK_AT_SUM,
        steps=steps,
    )


def _numbers(record: Record, *names: str) -> list[float | None]:
    """What the record says of each name, where that is one finite number; None of all where one name is missing."""
    found: dict[str, TensorRef] = {}
    for ref in record.tensors():
        found.setdefault(ref.canonical or ref.name, ref)
    if not found.keys() >= set(names):
        return [None] * len(names)
    return [_number(found[name]) for name in names]


def _number(ref: TensorRef) -> float | None:
    if ref.is_text or ref.numel != 1 or not ref.is_readable:
        return None
    value = float(np.asarray(pages.array(ref)).reshape(-1)[0])
    return value if math.isfinite(value) else None
