"""Preference pairs (DPO and its kin): which of the two the policy comes to prefer, and at what price."""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import median

from replay_core.diagnose import trends
from replay_core.diagnose.finding import Finding, error, info, shown, warning
from replay_core.diagnose.rule import Skip, given, rule
from replay_core.diagnose.signals import RunLog, Series

#: Steps of a trend; of two figures that are one.
FEWEST, ALIKE = 12, 5
#: What the chosen responses may lose of their log ratio for each nat of margin, and how much before it is worth saying.
PRICE, LOST = 1.25, 2.0
#: The same where the margin is more than it costs, and all the same much is lost.
HALF, FAR = 0.5, 5.0
#: The last steps, their margin (of beta times log ratios) and their loss, where a pair is won beyond doubt.
TAIL, WON, LEFT = 3, 8.0, 5e-3
_LOOK = "decode one pair as the model gets it: prompt, chosen, rejected, and the mask of both"


def _of(log: RunLog, signal: str, word: str) -> Series | None:
    return next((one for one in log.all(signal) if word in one.name), None)


def _saturated(log: RunLog, likely: Series | None) -> Finding | None:
    """A margin so large that nothing of the loss, -log sigmoid(margin), is left."""
    margin, loss = _of(log, "pair_reward", "margins"), log.get("loss")
    if margin is None or loss is None or min(len(margin.finite), len(loss.finite)) < TAIL:
        return None
    now, left = median(margin.finite[-TAIL:]), median(loss.finite[-TAIL:])
    if now < WON or left > LEFT:
        return None
    fell = [] if likely is None else [likely.shown(min(likely.finite), f"was {likely.finite[0]:.4g}")]
    return warning(
        f"DPO is over-optimised: the margin of {now:.3g} leaves a loss of {left:.2g}, and the policy has gone far from "
        "its reference for it",
        margin.ended,
        margin.shown(now, f"< {WON:g}"),
        loss.shown(left),
        *fell,
        *(rate.shown(max(rate.finite)) for rate in log.all("learning_rate")[:1] if rate.finite),
        cause="a learning rate that is too high for DPO, a beta that is too low, too many epochs, or pairs that are "
        "told apart by something trivial (a length, a template): what is learnt beyond this point is forgetting",
        next_step="lower the learning rate or raise beta, stop earlier; look at generations and at the margin on "
        "held-out pairs",
        steps=[p.step for p in loss.points if p.value <= LEFT],
    )  # fmt: skip


#: The loss of a policy that is its reference, and how near; lines of it that are no beginning.
UNMOVED, NEAR, LINES = math.log(2), 5e-4, 3


#: Over ln 2, a loss that no noise of a few batches makes.
WORSE = 0.02


def _few(log: RunLog, likely: Series | None, unlikely: Series | None) -> Finding | None:
    """What few lines show: no token counted, a policy that stays its reference, both responses that fall."""
    if likely is not None and unlikely is not None and not any((*likely.finite, *unlikely.finite)) and likely.finite:
        return error(
            f"no token of the responses is counted: {likely.name} and {unlikely.name} are exactly 0",
            likely,
            likely.shown(0.0, "< 0: a log-probability summed over the response"),
            unlikely.shown(0.0, "< 0"),
            link="masks",
            cause="every label is masked (-100): prompt and response are cut to a limit that leaves no response, the "
            "template's marker of the answer is not found, or the mask is turned around; the loss is then ln 2 = "
            "0.6931 and has no gradient",
            next_step="print the labels of one row: those that are not -100 have to decode to the response",
        )
    loss, margin = log.get("loss"), _of(log, "pair_reward", "margins")
    grads, rate = log.get("grad_norm"), log.get("learning_rate")
    if loss is None or margin is None or not loss.finite:
        return None
    still = grads is not None and bool(grads.finite) and not any(grads.finite)
    if (
        all(abs(value - UNMOVED) < NEAR for value in loss.finite) and not any(margin.finite)
        and len(loss.finite) >= (2 if still else LINES) and not (rate is not None and not any(rate.finite))
    ):  # fmt: skip
        moved = [] if still else [
            one for one in (likely, unlikely)
            if one is not None and len(one.finite) >= FEWEST and abs(trends.drift(one.finite)) > trends.DRIFT_Z
        ]  # fmt: skip
        if moved:
            return warning(
                "the reference moves with the policy: the loss stays at ln 2 = 0.6931 and the margin at 0 in all "
                f"{len(loss.finite)} lines, while {moved[0].name} goes from {trends.level(moved[0].finite[:3]):.3g} to "
                f"{trends.level(moved[0].finite, 3):.3g}",
                loss,
                loss.shown(loss.last.value, "< 0.693"),
                margin.shown(0.0, "> 0"),
                *(one.shown(trends.level(one.finite, 3), f"was {trends.level(one.finite[:3]):.3g}") for one in moved),
                link="optimizer",
                cause="weights are trained, and the reference is the very same object as the policy (shared weights, "
                "an adapter that is not switched off for it): every implicit reward is 0. Pairs that are sorted (by "
                "their length) give log-probabilities such a course, too: then the policy may be frozen",
                next_step="look whether the reference has parameters of its own (id(p)), or whether the adapter is off "
                "where its log-probabilities are made",
            )
        return warning(
            f"nothing is learnt: the loss stays at ln 2 = 0.6931 and the margin at 0 in all {len(loss.finite)} lines",
            loss,
            loss.shown(loss.last.value, "< 0.693"),
            margin.shown(0.0, "> 0"),
            *([grads.shown(grads.last.value)] if grads is not None else []),
            link="optimizer",
            cause="policy and reference say the same of every response, as before the first update: no weight is "
            "trained (frozen, an adapter that is off, other parameters in the optimizer), the reference is the very "
            "same object as the policy, or no token is counted",
            next_step="print the names whose requires_grad is set, and one weight before and after a step",
        )
    first, second = _of(log, "pair_reward", "chosen"), _of(log, "pair_reward", "rejected")
    worse = len(margin.finite) == len(loss.finite) and 2 <= len(loss.finite) < FEWEST and margin.finite[-1] < 0
    if (
        worse
        and min(loss.finite) > UNMOVED + WORSE
        and first is not None
        and min(map(abs, first.finite), default=0) > 1
    ):
        return warning(
            f"the pairs are told apart worse than by a policy that is its reference: the loss is "
            f"{loss.finite[-1]:.3g}, "
            f"over ln 2 = 0.693 in all {len(loss.finite)} lines, and the margin comes to {margin.finite[-1]:.3g}",
            loss,
            loss.shown(loss.finite[-1], "< 0.693"),
            margin.shown(margin.finite[-1], "> 0"),
            first.shown(first.finite[0], "about 0 at first"),
            cause="implicit rewards are far from 0 from the first line on: the reference is not what the policy began "
            "as "
            "(another checkpoint, an adapter that is merged in one of them, dropout that is left on), or the learning "
            "rate is too high",
            next_step="log-probabilities of policy and reference before the first update must be equal (a loss of "
            "0.6931)",
        )
    if LINES <= len(margin.finite) < FEWEST and max(margin.finite) < 0:
        return info(
            f"the rejected responses are preferred so far: the margin is {median(margin.finite):.3g}, below 0 in every "
            "line",
            margin,
            margin.shown(margin.last.value, "> 0"),
            cause="few steps, which may be noise; or chosen and rejected are swapped, or the sign of the loss is "
            "turned",
            next_step=_LOOK,
        )
    fallen = [] if first is None or second is None else first.finite
    if LINES <= len(fallen) < FEWEST and fallen[-1] < -LOST and all(b < a for a, b in pairwise(fallen)):
        return info(
            f"the chosen responses get less likely from line to line: {given(first).name} comes to {fallen[-1]:.3g}",
            given(first).ended,
            given(first).shown(fallen[-1], f"> {-LOST:g}"),
            given(second).shown(given(second).last.value),
            cause="the loss sees the difference alone: both responses may lose (learning rate too high, beta too low, "
            "pairs that are nearly alike)",
            next_step="lower the learning rate or raise beta; add an SFT term on the chosen responses (rpo_alpha)",
        )
    return None


@rule("D72", "preference pairs teach the wrong thing", link="rewards", scope="signals",
      needs=("pair_reward|pair_logps",), explains=("D23", "D46", "L01", "L08"),
      source="arXiv 2305.18290; likelihood displacement: arXiv 2410.08847; trl#1236")  # fmt: skip
def pairs(log: RunLog) -> Finding | None:
    """Chosen and rejected responses with one log-probability in every one of 5 steps and more: an error, they are the
    same text. A margin that falls by more than chance explains and is below 0 at the end (12 steps and more): an error,
    the rejected ones are learnt. Chosen responses whose reward falls below -2 while each nat of margin costs them 1.25
    and more: a warning, both become unlikely; worth knowing below -5 at .5 and more. Log-probabilities of exactly 0 in
    every line: an error, no token is counted. A loss of ln 2 and a margin of 0 in every one of 3 lines (2 with a
    gradient norm of 0): a warning. Of 2 to 11 lines a loss over .713 in all, a margin below 0 in the last and chosen
    rewards beyond 1 from the first on: a warning. Of 3 to 11 lines a margin below 0 in all, or a chosen reward that
    falls in each, below -2: worth knowing. A loss below .005 at a margin of 8 and more, in the median of the last 3
    steps: a warning, there is nothing left to learn, and the policy has gone far for it.
    """
    likely, unlikely = _of(log, "pair_logps", "chosen"), _of(log, "pair_logps", "rejected")
    if likely is not None and unlikely is not None and len(likely.finite) >= ALIKE and likely.values == unlikely.values:
        return error(
            f"chosen and rejected responses are the same text: {likely.name} and {unlikely.name} are equal in all "
            f"{len(likely.values)} steps",
            likely,
            likely.shown(likely.last.value),
            unlikely.shown(unlikely.last.value, "another number"),
            cause="both columns are read from one field, or both are cut to the prompt they share (a limit that is "
            "too small)",
            next_step=_LOOK,
        )
    if (found := _few(log, likely, unlikely) or _saturated(log, likely)) is not None:
        return found
    chosen, rejected = _of(log, "pair_reward", "chosen"), _of(log, "pair_reward", "rejected")
    if chosen is None or rejected is None or len(chosen.finite) < FEWEST or len(rejected.finite) < FEWEST:
        raise Skip(f"needs the rewards of chosen and rejected responses of {FEWEST} steps")
    told = {p.step: p.value for p in rejected.points}
    margins = [p.value - told[p.step] for p in chosen.points if p.step in told]
    now = median(margins[-4:])
    if now < 0 and trends.drift(margins) < -trends.DRIFT_Z:
        return error(
            f"the wrong way round: the rejected responses are preferred, by a margin of {-now:.3g} that grows",
            rejected.ended,
            chosen.shown(chosen.last.value),
            rejected.shown(rejected.last.value, "below the chosen ones'"),
            cause="chosen and rejected are swapped in the data or where the loss is made, or its sign is turned",
            next_step=_LOOK,
        )
    fallen = given(chosen).finite[-4:]
    if median(fallen) < -LOST and trends.drift(chosen.finite) < -trends.DRIFT_Z and -median(fallen) > PRICE * now > 0:
        return warning(
            f"both fall: chosen responses get less likely too, {median(fallen):.3g} for a margin of {now:.3g}",
            chosen.ended,
            chosen.shown(median(fallen), f"> {-LOST:g}"), shown("margin", now),
            rejected.shown(rejected.last.value),
            cause="the loss sees the difference alone: the likelihood goes to responses that stand in no pair "
            "(learning rate too high, beta too low, pairs that are nearly alike)",
            next_step="lower the learning rate or raise beta; add an SFT term on the chosen responses (rpo_alpha)",
        )  # fmt: skip
    if median(fallen) < -FAR and trends.drift(chosen.finite) < -trends.DRIFT_Z and -median(fallen) > HALF * now > 0:
        return info(
            f"chosen responses get less likely as well: their reward falls to {median(fallen):.3g}, for a margin of "
            f"{now:.3g}",
            chosen.ended,
            chosen.shown(median(fallen), f"> {-FAR:g}"), shown("margin", now),
            rejected.shown(rejected.last.value),
            *([] if likely is None else [likely.shown(likely.last.value, f"was {likely.values[0]:.4g}")]),
            cause="the loss sees the difference alone: pairs are told apart by making both less likely, the rejected "
            "ones more",
            next_step="look at what the policy writes; lower the learning rate, fewer epochs, or an SFT term on the "
            "chosen responses (rpo_alpha)",
        )  # fmt: skip
    return None
