"""Losses of pairs beside DPO's: IPO's, KTO's, a reward model's, and a term of supervised learning that is added."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
from msgspec import Struct

from replay_core import pages
from replay_core.diagnose.algorithm import Algorithm
from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Finding, Where, error, finding, shown
from replay_core.diagnose.flat import Array
from replay_core.diagnose.rule import given, rule, skip_if
from replay_core.diagnose.rules.pair_rows import (
    LOSSES,
    REWARDS,
    Pairs,
    dpo_loss,
    micro_batches,
    numbers_of_pairs,
    steps_of_pairs,
)
from replay_core.errors import RldbgError
from replay_core.records import Record
from replay_core.regexes import regex

#: How nearly a loss is made again; and how many times the stated weight is another one.
EXACT, WEIGHED = 5e-5, 1.5
_SUPERVISED = regex(r"(?:^|[._/ ])(?:chosen_)?(?:nll|sft|ce)_loss$")
#: How runs state its weight.
_WEIGHTS = ("rpo_alpha", "sft_coef", "pref_ftx", "nll_loss_coef", "dpo_ftx", "sft_loss_weight", "sft_loss_coef")


class _Formula(Struct, frozen=True):
    """A way to make losses of pairs: the losses, and what is wrong with it, empty where nothing is."""

    made: list[float]
    what: str = ""
    cause: str = ""


def _numbers(record: Record, wanted: Callable[[str], bool]) -> list[tuple[str, Array]]:
    try:
        return [
            (ref.canonical or ref.name, np.asarray(pages.array(ref), dtype=np.float64).reshape(-1))
            for ref in record.tensors()
            if not ref.is_text and ref.is_readable and len(ref.shape) < 2 and wanted(ref.canonical or ref.name)
        ]
    except RldbgError:
        return []


@rule("D143", "the loss of IPO, KTO, a reward model or a supervised term is made otherwise", link="loss", scope="case",
      explains=("D72", "L08", "L46"), lasts=True,
      source="IPO (arXiv 2310.12036), KTO (2402.01306), Bradley-Terry; LlamaFactory#6722, trl#6533")  # fmt: skip
def further_losses(case: Case) -> Finding | None:
    """The recorded loss of pairs, made again of their recorded log-probabilities (or scores) in 3 records and more, to
    5e-5 of it; nothing is said where a right way makes it, or none that is known.

    IPO, where it is stated: (margin - 1 / (2 beta))^2, by answer or by token. An error where a target of 1 / beta or of
    beta, or the margin turned around or without its reference, makes all of them.

    KTO, where it is stated and its KL is recorded: an error where its two weights are swapped or left out, or the sign
    of both values is turned.

    SimPO's, where it is stated with its target: an error where the target is added or left out, sums stand for means
    over tokens, or the margin is turned around. CPO's and the hinge loss: where the margin is turned around, or the
    reference has no part in it. ORPO's, beside its supervised part: where the odds' part is subtracted or turned
    around, or probabilities stand for odds.

    A reward model's (scores of both sides and no log-probabilities): an error where the sign is turned, the mean margin
    alone stands in it, the logarithm is missing, or a recorded margin is added.

    A supervised term beside DPO's stated loss (`nll_loss`, `sft_loss`): its weight is solved for. An error where it is
    below 0, or another than stated (1.5 times and more, two thirds and less); a warning where it is none.
    """
    algorithm = case.algorithm
    every = numbers_of_pairs(case)
    pairs = [one for one in every if one.loss is not None and np.isfinite(one.loss)]
    beta = algorithm.number("beta", "dpo_beta", "kl_beta")
    kind = algorithm.word("loss_type", "dpo_loss_type", "pref_loss")
    if len(pairs) >= LOSSES and beta:
        if kind in _WITHOUT_REFERENCE:
            return _told(pairs, _WITHOUT_REFERENCE[kind](pairs, beta, algorithm), f"{_NAMES[kind]}'s loss")
        if not all(one.has_ref for one in pairs):
            return None
        if kind == "ipo":
            return _told(pairs, _ipo(pairs, beta), "IPO's loss")
        if kind in ("kto", "kto_pair"):
            return _told(pairs, _kto(pairs, beta, algorithm), "KTO's loss")
        if kind == "hinge":
            return _told(pairs, _hinge(pairs, beta), "the hinge loss")
        if kind in ("", "sigmoid", "dpo"):
            return _supervised(pairs, beta, algorithm)
        return None
    skip_if(bool(pairs), "the loss of these pairs, or its beta, is not stated")
    # Rewards beside log-probabilities are what those make (beta times the log ratio), and no model's scores.
    skip_if(bool(every), "no loss is recorded beside the log-probabilities of pairs")
    scored = [each for records in micro_batches(case) if (each := _scored(records)) is not None]
    skip_if(len(scored) < LOSSES, f"needs log-probabilities or scores of pairs and the loss of {LOSSES} records")
    skip_if(bool(algorithm.number("center_rewards_coefficient")), "a centring of the scores is in the loss")
    return _of_scores(scored, "the reward model's loss" if beta is None else "the loss of pairs")


def _makes(made: Iterable[float], losses: Iterable[float]) -> bool:
    return all(abs(a - b) <= EXACT * max(abs(b), 1e-9) for a, b in zip(made, losses, strict=True))


def _told(pairs: list[Pairs], ways: Iterator[_Formula], whose: str) -> Finding | None:
    losses = [float(one.loss or 0.0) for one in pairs]
    every = list(ways)
    if any(not way.what and _makes(way.made, losses) for way in every):
        return None
    return _made_otherwise([_holder(one) for one in pairs], losses, every[0].made, every, whose)


def _holder(one: Pairs) -> Record:
    """The record of a micro-batch's pairs that holds their loss."""
    return next((each for each in (one.record, *one.looks) if each.get("loss") is not None), one.record)


def _made_otherwise(
    records: list[Record], losses: list[float], right: list[float], ways: Iterable[_Formula], whose: str
) -> Finding | None:
    """The first of these mistakes that makes the losses of all records."""
    way = next((way for way in ways if way.what and _makes(way.made, losses)), None)
    if way is None:
        return None
    return error(
        f"{whose} is made {way.what}",
        Where.of(records[0], "loss"),
        shown("loss", losses[0], f"{right[0]:.6g}", records[0].path.name),
        shown("made this way", way.made[0]),
        shown("records that agree", len(losses)),
        cause=way.cause,
        next_step="rldbg diagnose --explain D143   # then make the loss of one record by hand",
        steps=list(dict.fromkeys(one.key.step for one in records)),
    )


def _ipo(pairs: list[Pairs], beta: float) -> Iterator[_Formula]:
    def made(margin: Callable[[Pairs], Array], target: float) -> list[float]:
        return [float(((margin(one) - target) ** 2).mean()) for one in pairs]

    levels: list[Callable[[Pairs], Array]] = [lambda one: one.margin()]
    if all(one.counts_tokens for one in pairs):
        levels.append(lambda one: one.margin(by_token=True))
    for margin in levels:
        yield _Formula(made(margin, 1 / (2 * beta)))
    for margin in levels:
        yield _Formula(made(margin, 1 / beta), f"with a target of 1 / beta ({1 / beta:g}), twice 1 / (2 beta)",
                   "the 2 is missing in the target: margins are drawn twice as far apart as beta says")  # fmt: skip
        yield _Formula(made(margin, beta), f"with a target of beta ({beta:g}), and not of 1 / (2 beta)",
                   "beta stands where its inverse is meant: margins are drawn to nearly nothing")  # fmt: skip
        yield _Formula(made(lambda one, m=margin: -m(one), 1 / (2 * beta)),  # type: ignore[misc]
                   "of the margin turned around: chosen and rejected are swapped",
                   "the two halves are split in the wrong order, or the margin is negated")  # fmt: skip
    yield _Formula(
        made(lambda one: one.margin(with_ref=False), 1 / (2 * beta)),
        "without the reference: its log-probabilities have no part in the margin",
        "the reference-free loss is switched on, or its log-probabilities are 0 where the loss is made",
    )


def _kto(pairs: list[Pairs], beta: float, algorithm: Algorithm) -> Iterator[_Formula]:
    named = [[value for name, value in one.numbers.items() if name.rpartition("/")[2] in ("kl", "kl_mean")]
             for one in pairs]  # fmt: skip
    skip_if(any(len(each) != 1 for each in named), "needs KTO's KL beside its loss")
    desired = algorithm.number("desirable_weight") or 1.0
    undesired = algorithm.number("undesirable_weight") or 1.0

    def made(of_chosen: float, of_rejected: float, sign: float = 1.0) -> list[float]:
        losses = []
        for one, (known,) in zip(pairs, named, strict=True):
            kl = max(known, 0.0)
            better, worse = (one.logps["policy", side] - one.logps["ref", side] for side in ("chosen", "rejected"))
            values = (
                of_chosen / (1 + np.exp(sign * beta * (better - kl))),
                of_rejected / (1 + np.exp(sign * beta * (kl - worse))),
            )
            losses.append(float(np.concatenate(values).mean()))
        return losses

    yield _Formula(made(desired, undesired))
    for first, second, sign, what, cause in (
        (undesired, desired, 1.0, f"with its two weights swapped ({undesired:g} for desirable answers)",
         "desirable_weight and undesirable_weight are handed over in the wrong order"),
        (1.0, 1.0, 1.0, f"without its weights: {desired:g} and {undesired:g} are stated",
         "the weights do not reach the loss: a default of 1 stands in their place"),
        (desired, undesired, -1.0, "with the sign of its values turned: good answers are made less likely",
         "labels are turned around, or a subtraction is"),
    ):  # fmt: skip
        if (first, second, sign) != (desired, undesired, 1.0):
            yield _Formula(made(first, second, sign), what, cause)


def _supervised(pairs: list[Pairs], beta: float, algorithm: Algorithm) -> Finding | None:
    """The weight of a supervised term in DPO's loss."""
    named = [_of_supervised(one) for one in pairs]
    if any(len(each) != 1 for each in named):
        return None
    name, term_R = named[0][0][0], np.array([each[0][1] for each in named])
    smoothing, left_out = algorithm.number("label_smoothing") or 0.0, False
    own_R = np.array([dpo_loss(beta * one.margin(), smoothing) for one in pairs])
    loss_R = np.array([float(one.loss or 0.0) for one in pairs])
    if not np.abs(term_R).max() > 0:
        return None
    weight = float((loss_R - own_R) @ term_R / (term_R @ term_R))
    if not _makes((own_R + weight * term_R).tolist(), loss_R.tolist()):
        return None
    stated = algorithm.number(*_WEIGHTS)
    if weight < -1e-6:
        what = f"{name} is subtracted from the loss of pairs: it has the wrong sign (coefficient {weight:.3g})"
        cause = "a log-likelihood stands where its negative is meant: chosen answers are made less likely by it"
    elif stated and not 1 / WEIGHED < weight / stated < WEIGHED:
        left_out = abs(weight) <= 1e-3 * stated
        what = (
            f"{name} is not in the loss of pairs, and the run states a coefficient of {stated:g}"
            if left_out
            else f"{name} weighs {weight:.3g} in the loss of pairs, and the run states {stated:g}"
        )
        cause = "the coefficient that is configured does not reach the loss" + left_out * (
            ", the term is switched off, or the loss that is recorded is the pairs' alone"
        )
    else:
        return None
    return finding(
        "warning" if left_out else "error",
        what,
        Where.of(_holder(pairs[0]), "loss"),
        shown("coefficient that makes the loss", weight, "> 0" if stated is None else f"{stated:g}"),
        shown("records that agree", len(pairs)),
        cause=cause,
        next_step="rldbg diagnose --explain D143   # then look at the line that adds the two up",
        steps=steps_of_pairs(pairs),
    )


def _of_supervised(one: Pairs) -> list[tuple[str, float]]:
    """The supervised terms that stand beside a loss of pairs, by name."""
    return [(name, value) for name, value in one.numbers.items() if _SUPERVISED.search(name) is not None]


_SWAPPED = "chosen and rejected are swapped where the batch is joined or split, or the difference is negated"


def _hinge(pairs: list[Pairs], beta: float) -> Iterator[_Formula]:
    def made(margins: Iterable[Array]) -> list[float]:
        return [float(np.maximum(0.0, 1 - beta * each).mean()) for each in margins]

    yield _Formula(made(one.margin() for one in pairs))
    yield _Formula(made(-one.margin() for one in pairs), "of the margin turned around", _SWAPPED)
    yield _Formula(
        made(one.margin(with_ref=False) for one in pairs),
        "without the reference: its log-probabilities have no part in the margin",
        "the reference-free loss is switched on, or its log-probabilities are 0 where the loss is made",
    )


def _sigmoid(z: Array, smoothing: float) -> float:
    return dpo_loss(z, smoothing)


def _with_terms(pairs: list[Pairs], made: list[float], weight: float | None) -> list[list[float]]:
    """Losses as they are, and with the supervised term that stands beside them at its weight."""
    named = [_of_supervised(one) for one in pairs]
    if weight == 0 or any(len(each) != 1 for each in named):
        return [made]
    with_term = [value + (1.0 if weight is None else weight) * each[0][1] for value, each in
                 zip(made, named, strict=True)]  # fmt: skip
    return [with_term] if weight else [made, with_term]


#: How sums over tokens go with their number over all answers, and what a token's log-probability comes to at least.
GOES_WITH, OF_A_TOKEN = 0.5, 0.05


def _are_means(pairs: list[Pairs]) -> bool:
    """Whether log-probabilities of answers are recorded as means over tokens (TRL's CPO and ORPO trainers keep only
    these): as numbers of the answers that are no larger where these are longer, or too small for sums.
    """
    if any(one.is_summed for one in pairs):
        return False
    sides = [(one.logps["policy", side], one.tokens[side]) for one in pairs for side in ("chosen", "rejected")]
    size, tokens = np.abs(np.concatenate([each for each, _ in sides])), np.concatenate([each for _, each in sides])
    if float(np.median(size / tokens)) < OF_A_TOKEN:
        return True
    if not np.ptp(size) > 0 or not np.ptp(tokens) > 0:
        return False
    return not float(np.corrcoef(size, tokens)[0, 1]) >= GOES_WITH


def _simpo(pairs: list[Pairs], beta: float, algorithm: Algorithm) -> Iterator[_Formula]:
    skip_if(not all(one.counts_tokens for one in pairs), "needs how many tokens of each answer count")
    target = algorithm.number("simpo_gamma", "gamma")
    ratio = algorithm.number("gamma_beta_ratio", "simpo_gamma_beta_ratio")
    target = ratio * beta if target is None and ratio is not None else target
    skip_if(target is None, "SimPO's target margin is not stated")
    assert target is not None
    smoothing, weight = algorithm.number("label_smoothing") or 0.0, algorithm.number("cpo_alpha", "sft_weight")

    def ways(z: Callable[[Pairs], Array]) -> list[list[float]]:
        return _with_terms(pairs, [_sigmoid(z(one), smoothing) for one in pairs], weight)

    are_means = _are_means(pairs)
    of = {id(one): beta * one.margin(by_token=not are_means, with_ref=False) for one in pairs}
    # Some state the target as it stands in the loss, others as a part of beta.
    for each in (target, target * beta):
        for made in ways(lambda one, each=each: of[id(one)] - each):  # type: ignore[misc]
            yield _Formula(made)
    wrong: list[tuple[Callable[[Pairs], Array], str, str]] = [
        (lambda one: of[id(one)] + target, f"with its target of {target:g} added to the margin, and not subtracted",
         "the sign of gamma is turned: pairs are let go before the better answer leads"),
        (lambda one: beta * one.margin(with_ref=False) - target,
         "of sums over tokens, where means are meant: log-probabilities are not divided by their answers' lengths",
         "the average log-probability is not taken: long answers outweigh short ones"),
        (lambda one: -of[id(one)] - target, "of the margin turned around", _SWAPPED),
        (lambda one: of[id(one)], f"without its target margin: {target:g} is stated",
         "gamma does not reach the loss: a default of 0 stands in its place"),
    ]  # fmt: skip
    for z, what, cause in wrong:
        if (are_means and "sums" in what) or ("target" in what and not target):
            continue
        for made in ways(z):
            yield _Formula(made, what, cause)


def _cpo(pairs: list[Pairs], beta: float, algorithm: Algorithm) -> Iterator[_Formula]:
    smoothing, weight = algorithm.number("label_smoothing") or 0.0, algorithm.number("cpo_alpha")

    def ways(sign: float) -> list[list[float]]:
        made = [_sigmoid(sign * beta * one.margin(with_ref=False), smoothing) for one in pairs]
        return _with_terms(pairs, made, weight)

    for made in ways(1.0):
        yield _Formula(made)
    for made in ways(-1.0):
        yield _Formula(made, "of the margin turned around", _SWAPPED)


def _orpo(pairs: list[Pairs], beta: float, algorithm: Algorithm) -> Iterator[_Formula]:
    skip_if(not all(one.counts_tokens for one in pairs), "needs how many tokens of each answer count")
    named = [_of_supervised(one) for one in pairs]
    skip_if(any(len(each) != 1 for each in named), "needs the supervised part beside ORPO's loss")
    nll = [each[0][1] for each in named]
    odds, plain = [], []
    are_means = _are_means(pairs)
    for one in pairs:
        each = {
            side: one.logps["policy", side] / (1.0 if are_means else one.tokens[side])
            for side in ("chosen", "rejected")
        }
        with np.errstate(divide="ignore", invalid="ignore"):
            logit = {side: value - np.log1p(-np.exp(value)) for side, value in each.items()}
        odds.append(logit["chosen"] - logit["rejected"])
        plain.append(each["chosen"] - each["rejected"])

    def made(of: list[Array], sign: float = 1.0, turned: float = 1.0) -> list[float]:
        return [a + sign * beta * dpo_loss(turned * z, 0.0) for a, z in zip(nll, of, strict=True)]

    yield _Formula(made(odds))
    yield _Formula(
        made(odds, -1.0), "with the odds' part subtracted: the better answer is to be made no likelier than the worse",
        "beta times the log-sigmoid is added, where it is to be subtracted",
    )  # fmt: skip
    yield _Formula(made(odds, turned=-1.0), "of the odds turned around", _SWAPPED)
    yield _Formula(
        made(plain), "of probabilities, where odds are meant: log(1 - p) is left out",
        "the ratio of probabilities stands for the ratio of odds",
    )  # fmt: skip


_WITHOUT_REFERENCE = {"simpo": _simpo, "cpo": _cpo, "orpo": _orpo}
_NAMES = {"simpo": "SimPO", "cpo": "CPO", "orpo": "ORPO"}


class _ScoredPair(Struct, frozen=True):
    """A reward model's record: the scores of both sides, a margin where one is recorded, and the loss."""

    record: Record
    apart: Array
    margin: Array | None
    loss: float


def _scored(records: list[Record]) -> _ScoredPair | None:
    sides: dict[str, Array] = {}
    margin, loss, record = None, None, records[0]
    for holder, name, values in ((each, *one) for each in records for one in _numbers(each, lambda name: True)):
        found = REWARDS.search(name)
        if found is not None and values.size > 1:
            sides[found["side"].lower()] = values
        elif name in ("margin", "margins") and values.size > 1:
            margin = values
        elif name == "loss" and values.size == 1 and np.isfinite(values).all():
            loss, record = float(values[0]), holder
    if loss is None or len(sides) < 2 or sides["chosen"].size != sides["rejected"].size:
        return None
    apart = sides["chosen"] - sides["rejected"]
    return _ScoredPair(record, apart, margin if margin is not None and margin.size == apart.size else None, loss)


def _of_scores(scored: list[_ScoredPair], whose: str) -> Finding | None:
    losses = [one.loss for one in scored]
    right = [float(np.logaddexp(0.0, -one.apart).mean()) for one in scored]
    less = [float(np.logaddexp(0.0, -(one.apart - (0 if one.margin is None else one.margin))).mean()) for one in scored]
    if _makes(right, losses) or _makes(less, losses):
        return None
    ways: tuple[_Formula, ...] = (
        _Formula([float(np.logaddexp(0.0, one.apart).mean()) for one in scored],
             "of the scores turned around: the worse answer is to be scored higher",
             "chosen and rejected are swapped where the batch is joined or split, or the difference is negated"),
        _Formula([float(np.logaddexp(0.0, -one.apart.mean())) for one in scored],
             "of the mean margin: pairs are averaged before the logarithm",
             "the mean is taken over the scores, and not over the losses of the pairs: pairs that are right by far "
             "make up for those that are wrong"),
        _Formula([float(-(1 / (1 + np.exp(-one.apart))).mean()) for one in scored],
             "without the logarithm: it is -sigmoid(margin)",
             "sigmoid stands for logsigmoid: pairs that are wrong by far have hardly a gradient"),
    )  # fmt: skip
    if all(one.margin is not None and (one.margin != 0).any() for one in scored):
        added = [float(np.logaddexp(0.0, -(one.apart + given(one.margin))).mean()) for one in scored]
        ways = (
            *ways,
            _Formula(added, "with the margin added to the scores' difference, and not subtracted",
                     "the sign of the margin is turned: pairs that are to be far apart are let go first"),
        )  # fmt: skip
    return _made_otherwise([one.record for one in scored], losses, right, ways, whose)
