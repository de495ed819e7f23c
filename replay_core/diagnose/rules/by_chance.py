"""Pairs that are told apart no better than by a coin: a loss that stays at ln 2, a share of right pairs at a half."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from statistics import fmean, median

from replay_core.diagnose import trends
from replay_core.diagnose.finding import Finding, share, shown, warning
from replay_core.diagnose.rule import Skip, rule
from replay_core.diagnose.signals import RunLog, Series
from replay_core.regexes import regex

#: What a coin loses, how near to it a line is, in which share of the lines, and how far below the last third may be.
COIN, NEAR, MOST, BELOW = math.log(2), 0.01, 0.6, 0.03
#: Lines that are no beginning, and the steps that fewer of them (10) have to span.
LINES, FEW, STEPS = 20, 10, 100
#: Lines with a share of right pairs; the least and most that a coin has of many; and by how much of a standard error.
SHARES, LEAST, MORE, ERRORS = 24, 0.4, 0.56, 2.0
#: Of a margin, the share by which its last third may be above its first.
MARGIN = 1.5
RIGHT = regex(r"(?i)(?:^|[/_. ])(?:pairwise_|preference_|pref_|rm_|reward_)?(?:acc|accuracy|accuracies)(?:_mean)?$")
_CAUSE = (
    "chosen and rejected are told apart by nothing that the model sees (both cut to the prompt they share, labels that "
    "are noise or swapped in a part), the head or adapter gets no gradient, or the learning rate is far too low, or so "
    "high that the first steps broke it; a model too small for the pairs looks the same"
)
_NEXT = (
    "decode one pair as the model gets it; fit 100 pairs until they are right: what cannot is broken, no matter of "
    "rates"
)


_OF_A_POLICY = ("pg_loss", "kl", "entropy", "response_length", "advantage_mean", "clip_fraction", "truncated")


@rule("L47", "pairs are told apart by chance", link="trend", scope="signals", needs=("loss|reward_function",),
      explains=("L40", "L44", "L08"), source="Bradley-Terry and DPO: -log sigmoid(0) = ln 2")  # fmt: skip
def by_chance(log: RunLog) -> Iterator[Finding]:
    """A loss within .01 of ln 2 = .693 in three fifths of the lines (20, or 10 that span 100 steps), its median, too,
    and its last third no more than .03 below: a warning, it is what a coin gets. Or, of a log of pairs, a share of
    right ones between .4 and .56 over the second half of 24 lines and more, no more than two standard errors or .05
    over a half, by no rising trend, while the margin does not grow by a half either: a warning. Silent where the rate
    still warms up, and where more than .6 of the pairs are right. Or a loss of held-out pairs that is never below ln 2
    in 4 evaluations and more, of a loss that began there: a warning, whatever training's own pairs come to.
    """
    right = next((one for one in log.all("reward_function") if RIGHT.search(one.name)), None)
    loss = log.get("loss")
    is_of_pairs = log.has("pair_reward") or log.has("pair_logps") or (right is not None and not log.has("reward"))
    told = _of_right(log, right) if right is not None and is_of_pairs else None
    # TRL's reward trainer calls its mean score a reward; no policy logs a share of right ones beside such a loss alone.
    scores = is_of_pairs or not log.has("reward") or (right is not None and not any(map(log.has, _OF_A_POLICY)))
    stays = _at_ln_2(log, loss) if loss is not None and scores else None
    unseen = _unseen(log, loss) if loss is not None and is_of_pairs else None
    if unseen is not None and stays is None and told is None:
        yield unseen
        return
    if told is None and stays is None and (loss is None or len(loss.finite) < FEW):
        raise Skip(f"needs the loss of {FEW} lines, or a share of right pairs of {SHARES}")
    if right is not None and right.finite and trends.level(right.finite) > 0.6:
        return
    found = stays or told
    if found is not None:
        yield found


#: Evaluations that have a loss of held-out pairs, and how far from ln 2 a loss begins that is of a margin alone.
EVALUATIONS, BEGINS = 4, 0.02


def _unseen(log: RunLog, loss: Series) -> Finding | None:
    """A loss of held-out pairs that is never below a coin's, of a loss that began at it."""
    for held in log.all("held_out_loss"):
        values = held.finite
        if len(values) < EVALUATIONS or min(values) < COIN or abs(loss.values[0] - COIN) > BEGINS:
            continue
        now = trends.level(loss.finite)
        return warning(
            f"held-out pairs are told apart no better than by a coin: {held.name} is {min(values):.3g} and more in all "
            f"{len(values)} evaluations, ln 2 is 0.693"
            + (f", while {loss.name} falls to {now:.3g}: pairs are learnt by heart" if now < COIN - NEAR else ""),
            held.ended,
            held.shown(values[-1], "< 0.693"),
            loss.shown(now),
            cause="labels that are noise or swapped in a part of the pairs, pairs that hold nothing to tell, held-out "
            "pairs that are made otherwise (another order of chosen and rejected); or too few pairs for as many epochs",
            next_step="read ten pairs and say which is better; hold 50 of the training's own pairs out, and evaluate "
            "those",
        )
    return None


def _at_ln_2(log: RunLog, loss: Series) -> Finding | None:
    values = loss.finite
    first, last = loss.points[0].step, loss.points[-1].step
    spans = last - first if first is not None and last is not None and not log.is_counted else 0
    if len(values) < FEW or (len(values) < LINES and spans < STEPS) or _warms_up(log):
        return None
    near = sum(abs(value - COIN) < NEAR for value in values)
    ended = median(values[-(len(values) // 3) :])
    if near < MOST * len(values) or abs(median(values) - COIN) > NEAR or ended < COIN - BELOW or len(set(values)) == 1:
        return None
    return warning(
        f"nothing is learnt of the pairs: the loss stays at ln 2 = 0.693, what a coin gets, in {near} of {len(values)} "
        f"lines, and is {loss.last.value:.3g} in the last",
        loss.ended,
        loss.shown(median(values), f"< {COIN - BELOW:.2f}"),
        shown("lines within 0.01 of ln 2", share(near, len(values))),
        shown("median of the last third", ended),
        cause=_CAUSE,
        next_step=_NEXT,
    )


def _of_right(log: RunLog, right: Series) -> Finding | None:
    values = right.finite
    if len(values) < SHARES or min(values) < 0 or max(values) > 1:
        return None
    late = values[len(values) // 2 :]
    mean = fmean(late)
    spread = math.sqrt(fmean((value - mean) ** 2 for value in late) / len(late))
    if not LEAST < mean < MORE or mean - 0.5 > max(ERRORS * spread, 0.05) or trends.rises(values):
        return None
    margin = next((one for one in log.all("pair_reward") if "margin" in one.name), None)
    grown = [] if margin is None else _thirds(margin.finite)
    if margin is not None and trends.rises(margin.finite) and grown and grown[1] > MARGIN * max(grown[0], 0.0):
        return None
    return warning(
        f"chosen and rejected are not told apart: {right.name} is {mean:.2g} over the last {len(late)} of "
        f"{len(values)} lines, as a coin's"
        + ("" if not grown else f", and the margin stays at {grown[1]:.2g} ({grown[0]:.2g} at first)"),
        right.ended,
        right.shown(mean, f"> {MORE:g}, and rising"),
        shown("standard error of that mean", spread),
        *([] if margin is None or not grown else [margin.shown(grown[1], "> 0, and growing")]),
        cause=_CAUSE + "; a loss that falls beside it is that of its other terms (ORPO's and RPO's words)",
        next_step=_NEXT,
    )


def _thirds(values: list[float]) -> list[float]:
    """Means of the first and the last third; none of too few."""
    third = len(values) // 3
    return [fmean(values[:third]), fmean(values[-third:])] if third else []


def _warms_up(log: RunLog) -> bool:
    """Whether the learning rate has risen in every line so far."""
    rate = log.get("learning_rate")
    values = [] if rate is None else rate.finite
    return len(values) > 2 and all(b > a for a, b in pairwise(values))
