"""A reward model whose scores do not tell the better answers from the worse."""

from __future__ import annotations

import math
from statistics import median

from replay_core.diagnose import trends
from replay_core.diagnose.finding import Finding, error, shown, warning
from replay_core.diagnose.rule import rule, skip_if
from replay_core.diagnose.signals import RunLog, Series
from replay_core.regexes import regex

#: Lines before equal scores are no chance; pairs of the second half that a share is judged of; standard deviations over
#: a half that a share has to lie; what is left of a loss that has fallen.
FEWEST, PAIRS, SIGMAS, FALLEN = 8, 40, 2.0, 0.95
_BETTER = regex(r"(?i)chosen|pos|accepted|better")
_NEXT = (
    "score ten pairs by hand, the better and the worse text as the model gets them; look whether the head is trained"
)


@rule("L46", "a reward model does not tell answers apart", link="rewards", scope="signals", needs=("pair_score|loss",),
      explains=("D01", "L01", "L17", "L40", "L44"), source="Bradley-Terry: a loss of ln 2 is a coin")  # fmt: skip
def scored_pairs(log: RunLog) -> Finding | None:
    """The scores of better and worse answers one and the same number in every one of 8 lines and more: an error, the
    head gives one number to all; so is a loss of exactly ln 2 with no right pair in any of them. Else, of 40 lines in
    the run's second half and more, the better one scored higher in no more of them than a coin would give (two
    standard deviations), while the loss, where it is logged, has kept 95 % of what it was: a warning.
    """
    every = log.all("pair_score")
    better = next((one for one in every if _BETTER.search(one.name)), None)
    worse = next((one for one in every if not _BETTER.search(one.name)), None)
    if better is None and (one_score := _of_one_score(log)) is not None:
        return one_score
    skip_if(better is None or worse is None, "needs the scores of better and of worse answers")
    assert better is not None
    assert worse is not None
    told = {p.step: p.value for p in worse.points if math.isfinite(p.value)}
    pairs = [(p.value, told[p.step]) for p in better.points if p.step in told and math.isfinite(p.value)]
    skip_if(len(pairs) < FEWEST, f"needs scores of {FEWEST} lines")
    loss = log.get("loss")
    if all(a == b for a, b in pairs):
        same = len({a for a, _ in pairs}) == 1
        return error(
            f"the reward model gives better and worse answers the same score, "
            f"{f'{pairs[0][0]:.4g}' if same else 'whatever it is'}, in all {len(pairs)} lines: nothing is learnt",
            better.ended,
            better.shown(pairs[-1][0], "over the worse one's"),
            worse.shown(pairs[-1][1]),
            *([loss.shown(loss.last.value)] if loss is not None else ()),
            cause="the head's output does not depend on the text: it is not made of the hidden states (zeros, a "
            "mask, a "
            "wrong position), or its gradient does not reach it; or both texts of a pair are one",
            next_step=_NEXT,
        )
    late = pairs[len(pairs) // 2 :]
    if len(late) < PAIRS or (loss is not None and not _stands(loss)):
        return None
    right = sum(a > b for a, b in late)
    if right > len(late) / 2 + SIGMAS * math.sqrt(len(late)) / 2:
        return None
    return warning(
        f"the reward model does not tell better answers from worse: it scores the better one higher in {right} of the "
        f"last {len(late)} lines"
        + (
            f", and the loss stays at {median(loss.finite[-len(late) :]):.3g}"
            if loss is not None and loss.finite
            else ""
        ),
        better.ended,
        shown("lines with the better one higher", right, f"> {len(late) / 2 + SIGMAS * math.sqrt(len(late)) / 2:.0f}"),
        *(
            [loss.shown(median(loss.finite[-len(late) :]), "below ln 2 = 0.693")]
            if loss is not None and loss.finite
            else ()
        ),
        cause="pairs that hold nothing to tell (or are swapped in half of the data), a learning rate too small or far "
        "too high, a head that is not trained, or texts that are cut before they differ",
        next_step=_NEXT,
    )


#: What rounding leaves of ln 2.
_ROUNDED = 6e-4
_RIGHT = regex(r"(?i)(?:^|[/_. ])(?:acc|accuracy|accuracies)(?:_mean)?$")


def _of_one_score(log: RunLog) -> Finding | None:
    """A loss of exactly ln 2 in every line, and no pair of which the better answer is scored higher."""
    loss = log.get("loss")
    right = next((one for one in log.all("reward_function") if _RIGHT.search(one.name)), None)
    if loss is None or right is None or min(len(loss.finite), len(right.finite)) < FEWEST or log.has("pair_logps"):
        return None
    if any(right.finite) or max(abs(value - math.log(2)) for value in loss.finite) > _ROUNDED:
        return None
    return error(
        f"better and worse answers get the same score: the loss is ln 2 = 0.693 and {right.name} 0 in all "
        f"{len(loss.finite)} lines: nothing is learnt",
        loss.ended,
        loss.shown(loss.last.value, "below ln 2 = 0.693"),
        right.shown(0.0, "> 0.5"),
        cause="both texts of a pair are scored where they are the same (the prompt's last token, a padded place, texts "
        "that are cut before they differ), the head is fed zeros, or both texts are one",
        next_step=_NEXT,
    )


def _stands(loss: Series) -> bool:
    """Whether a loss has not come down, from its first third to its last."""
    values = loss.finite
    third = max(len(values) // 3, 1)
    return not values or trends.level(values, third) >= FALLEN * trends.level(values[:third], third)
