"""Terms of the loss beside the policy's, the KL's, the entropy's and the critic's: what each weighs in the sum."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from replay_core import pages
from replay_core.diagnose.algorithm import of_loss, settings_of, stated_by
from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Finding, Where, error, shown, warning
from replay_core.diagnose.flat import Array
from replay_core.diagnose.rule import rule, skip_if
from replay_core.diagnose.rules.added import LEFT, WEIGHED, micros_of_update, scales_of
from replay_core.diagnose.rules.zero_terms import is_off, weight_of, words_of
from replay_core.errors import RldbgError
from replay_core.records import Record

#: Micro-batches more than terms that tell their weights; the least that a term comes to, and changes a loss by.
SPARE, LEAST, SEEN = 4, 1e-6, 2e-6
#: Words of losses that are no term of their own, and of those that a router adds to the gradient without the loss.
_NONE = frozenset({"pg", "policy", "total", "actor", "train", "token", "elementwise", "val", "eval", "test", "micro"})
_OF_ROUTERS = frozenset({"aux", "auxiliary", "balance", "balancing", "load", "router", "z", "moe", "mtp"})
#: What the loss of a micro-batch is made of first: a policy's own, else that of its words.
_BASES = ("pg_loss", "lm_loss", "ce_loss", "cross_entropy_loss", "language_model_loss", "sft_loss", "nll_loss")
#: Words whose loss may be a gain, which is subtracted.
_GAINS = frozenset({"entropy", "entropys", "reward", "bonus", "exploration"})
#: What an unweighted loss of an even load is, at least, and a weight that is none of it.
EVEN, SMALL = 0.9, 0.1


def _numbers(record: Record) -> dict[str, float]:
    """Single finite numbers of a record whose name speaks of a loss, by that name."""
    found: dict[str, float] = {}
    try:
        for ref in record.tensors():
            name = ref.canonical or ref.name
            if ref.numel == 1 and not ref.is_text and ref.is_readable and "loss" in name.lower():
                found.setdefault(name, float(np.asarray(pages.array(ref)).reshape(-1)[0]))
    except RldbgError:
        return {}
    return found if all(map(math.isfinite, found.values())) else {}


@rule("D140", "a further term of the loss has the wrong sign or weight", link="loss", scope="case",
      explains=("L10", "L08"), lasts=True,
      source="xtuner#1101, trl#2201, Automodel#1408: an auxiliary loss that is not divided by the accumulation, or "
      "weighed by a default")  # fmt: skip
def further_terms(case: Case) -> Finding | None:
    """Solves loss - pg_loss (of a policy's; else lm_loss, ce_loss, cross_entropy_loss, language_model_loss, sft_loss or
    nll_loss) = sum of c x term over micro-batches that record both and one further loss and more
    (auxiliary, z, SFT, NLL, distillation; KL, entropy and the critic's stand beside them, with a weight of their own):
    4 micro-batches more than terms, all of them met to a fiftieth. Losses may be divided by the micro-batches of an
    update, or by what the run states. An error where c is below 0 and no gain is meant; where the run states another c
    (1.5 times and more, two thirds and less; 1 where the term may hold its coefficient, which a load-balancing loss of
    about 1 and more does not at a coefficient below .1); and a warning where the term is not in the loss at all,
    though a stated weight would show. (Routers' losses may be added to the gradient alone.)
    """
    rows = [
        (_numbers(record), record)
        for record in case.records()
        if record.key.stage not in ("training_metrics", "param", "gradient") and record.key.role not in ("eval",)
    ]
    base = next((name for name in _BASES if any({"loss", name} <= row.keys() for row, _ in rows)), "pg_loss")
    rows = [row for row in rows if {"loss", base} <= row[0].keys()]
    skip_if(not rows, "needs loss and pg_loss of micro-batches")
    names = sorted(set.intersection(*(set(each) for each, _ in rows)) - {"loss", base})
    names = [name for name in names if max(abs(each[name]) for each, _ in rows) > LEAST]
    own = [name for name in names if name not in ("kl_loss", "entropy_loss") and not words_of(name) & _NONE]
    own = [name for name in own if not {"vf", "value", "critic", "v", "kl"} & words_of(name)]
    skip_if(not own, "no further term of the loss is recorded")
    skip_if(len(rows) < len(names) + SPARE, f"needs {SPARE} micro-batches more than terms")
    records = [record for _, record in rows]
    rest_M = np.array([[each["loss"], each[base]] for each, _ in rows])
    terms_MT = np.array([[each[name] for name in names] for each, _ in rows])
    settings = settings_of(stated_by(case.run))
    stated: dict[str, float] = {}
    for name in own:
        words = words_of(name) - {"loss", "losses", "mean"}
        found = None if not words or is_off(words, settings) else weight_of(words, settings)
        if found is None and isinstance(value := of_loss(case.run.flags or {}, name), (int, float)):
            found = name, float(value)
        if found is not None:
            stated[name] = found[1]
    solved = _solved(rest_M, terms_MT, scales_of(case, records), names, stated)
    skip_if(solved is None, "no weights of these terms make all logged losses")
    assert solved is not None
    weights_T, divisor = solved
    micros = micros_of_update(records)
    for name in own:
        weight, each_M = float(weights_T[names.index(name)]), terms_MT[:, names.index(name)]
        told = _judged(name, weight, each_M, rest_M[:, 0], stated.get(name), divisor, micros)
        if told is None:
            continue
        claim, cause, is_sure = told
        record = records[int(np.abs(each_M).argmax())]
        return (error if is_sure else warning)(
            claim,
            Where.of(record, name),
            shown(f"coefficient of {name} that solves the loss", weight, "> 0", record.path.name),
            shown("micro-batches", len(rows)),
            *([] if name not in stated else [shown("coefficient that is stated", stated[name])]),
            *([] if divisor == 1 else [shown("each loss is divided by", divisor)]),
            cause=cause,
            next_step="rldbg diagnose --explain D140   # then look at the line that adds up the loss",
            steps=sorted({one.key.step for one in records if one.key.step is not None}),
        )
    return None


def _solved(
    rest_M: Array, terms_MT: Array, scales: Sequence[float], names: list[str], stated: dict[str, float]
) -> tuple[Array, float] | None:
    """(a weight for each term, what each loss is divided by), of those that make all losses the ones nearest to what is
    stated; None where none do, or another set of weights would as well.
    """
    found: list[tuple[float, Array, float]] = []
    scale_T = np.abs(terms_MT).max(0)
    for share in scales:
        left_M = rest_M[:, 0] / share - rest_M[:, 1]
        weights_T, _, rank, singular = np.linalg.lstsq(terms_MT / scale_T, left_M, rcond=None)
        if rank < len(names) or singular[-1] < 1e-3 * singular[0]:
            continue
        if np.abs(terms_MT / scale_T @ weights_T - left_M).max() > LEFT * float(np.abs(left_M).max()) + 1e-7:
            continue
        # A fiftieth of a large term hides a small one: what is left has to be small beside each that is in it.
        error_M = terms_MT / scale_T @ weights_T - left_M
        if any(np.abs(error_M).max() > 0.2 * abs(weight) for weight in weights_T if abs(weight) > SEEN):
            continue
        weights_T = weights_T / scale_T
        off = sum(abs(math.log(max(abs(float(weights_T[names.index(name)])), 1e-12) / c)) for name, c in stated.items())
        found.append((off, weights_T, 1 / share))
    if not found:
        return None
    _, weights_T, divisor = min(found, key=lambda one: one[0])
    return weights_T, divisor


def _judged(
    name: str, weight: float, each_M: Array, loss_M: Array, stated: float | None, divisor: float, micros: int
) -> tuple[str, str, bool] | None:
    """(claim, cause, whether it is sure) of a term's weight; None where it may be meant."""
    words = words_of(name)
    size = float(np.median(np.abs(each_M)))
    if weight * size < -SEEN and not words & _GAINS and (each_M >= 0).all() and (stated is None or stated > 0):
        return (
            f"{name} is subtracted from the loss: it has the wrong sign (coefficient {weight:.3g})",
            "the sign of the term is turned where the loss is summed up: what it is to bring down is pushed up",
            True,
        )
    if stated is None or not stated:
        return None
    if abs(weight) <= 1e-3 * stated:
        shows = stated * size > 16 * 2.0**-23 * float(np.abs(loss_M).max()) + SEEN
        if not shows or words & _OF_ROUTERS:
            return None
        return (
            f"{name} is not in the loss, and the run states a coefficient of {stated:g} for it",
            "the term is computed, logged, and left out where the loss is summed up (or its gradient is added by "
            "itself)",
            False,
        )
    times = weight / stated
    is_bare = abs(weight - 1) <= LEFT
    # Of a loss that is a share of its update, the term may be one micro-batch's part.
    if micros > 1 and divisor == 1 and abs(times * micros - 1) <= LEFT:
        return None
    is_even = bool(words & (_OF_ROUTERS - {"z", "mtp"})) and size >= EVEN and stated <= SMALL
    if 1 / WEIGHED < times < WEIGHED or (is_bare and not is_even):
        return None
    by = f": {times:.3g} times as much"
    accumulated = divisor > 1 and abs(times - divisor) <= LEFT * divisor
    return (
        f"{name} weighs {weight:.3g} in the loss, and the run states a coefficient of {stated:g}{by}",
        "the term is not divided by the accumulation: each of the micro-batches of an update adds all of it"
        if accumulated
        else "the coefficient switches the term on and does not weigh it"
        if is_bare
        else "the coefficient that is configured does not reach the loss (a model's or a trainer's default stands in "
        "its place), or is scaled on its way (an accumulation, a world size)",
        True,
    )
