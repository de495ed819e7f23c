"""What a run is for: answers to prompts it does not train on, and rewards that mean what they meant."""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import fmean, median

from replay_core.diagnose import trends
from replay_core.diagnose.finding import Finding, error, info, shown, warning
from replay_core.diagnose.rule import Skip, given, rule, skip_if
from replay_core.diagnose.signals import RunLog, Series
from replay_core.dumps.metrics import EPOCHS, PLANNED
from replay_core.regexes import regex

#: Share of its first level by which a held-out result falls before it is worth a warning.
LOST = 0.15


@rule("L20", "held-out results fall while training's rise", link="trend", scope="signals",
      needs=("held_out|held_out_loss", "reward|loss"), explains=("D01", "D03", "D74", "L01", "L09", "L31"),
      source="arXiv 2210.10760 (over-optimisation of a reward)")  # fmt: skip
def overfits(log: RunLog) -> Finding | None:
    """A validation's accuracy, score or reward falls over 8 evaluations and more, by more than chance explains and by
    .15 of its first level (medians of 3), while the reward of training rises: a warning. One of .2 and more that falls
    in every evaluation after its best (4 of 5 and more) to a tenth of it is an error, and so is one of which a quarter
    and less is left in all of 5 and more behind it. So it is where it is lost: a
    result of .3 and more at first that falls step by step to a quarter of it, and never comes back, over 4 evaluations
    and more. Of demonstrations: a validation's loss that is .15 and more above its least in each of the last 2 of 5
    evaluations and more, while the loss of training has come to .7 and less of what it was at that least: a warning; of
    3 and 4 evaluations where each is as high as the one before, and half is left of training's. A share of right
    held-out pairs below .65 that does not rise over 3 evaluations and more behind the first, while the loss falls by a
    fifth: worth knowing. Six evaluations, each below the one before, are as good as eight. A share of .5 and more that
    is below .8 of its first in every evaluation (6 and more) behind the third, and never was above that, is a warning
    whatever the reward does. A share of .2 and more at first that is below .6 of it in every one of 6 evaluations and
    more behind the first, while the reward of training rises to .9 and more: an error, what is learnt is learnt by
    heart.
    """
    if (learnt := _by_heart(log)) is not None or not log.has("reward") or not log.has("held_out"):
        return learnt
    reward = given(log.get("reward"))
    if (lost := _lost(log, reward)) is not None:
        return lost
    if (gone := _gone(log, reward)) is not None:
        return gone
    if (memorised := _memorised(log, reward)) is not None:
        return memorised
    broken = _broken(log)
    known = [
        series for series in log.all("held_out")
        if len(series.finite) >= trends.MIN_STEPS or _falls_each_time(series.finite)
    ]  # fmt: skip
    if not known and broken is None:
        raise Skip(f"needs {trends.MIN_STEPS} evaluations")
    if not trends.rises(reward.finite):
        return broken
    for series in known:
        begun, now = median(series.finite[:3]), median(series.finite[-3:])
        falls = trends.drift(series.finite) < -trends.DRIFT_Z or _falls_each_time(series.finite)
        if falls and now < begun - LOST * abs(begun):
            return warning(
                f"{series.name} falls from {begun:.3g} to {now:.3g} while {reward.name} rises{_longer(log)}: what is "
                "learnt does not hold on held-out prompts",
                series.ended,
                series.shown(now, f">= {begun:.3g}"),
                reward.shown(trends.level(reward.finite, 3), f"was {trends.level(reward.finite[:3]):.3g}"),
                cause="the policy overfits its training prompts, or the reward is hacked: it pays for something that "
                "the validation does not",
                next_step="score ten training responses by hand; go back to the checkpoint with the best validation",
            )
    return broken


#: What is left, in every evaluation behind the first, of a result where training's answers are learnt by heart.
KEPT = 0.6


def _memorised(log: RunLog, reward: Series) -> Finding | None:
    """A share of right held-out answers that falls at once and stays down, while nearly all of training's are right."""
    paid = reward.finite
    if min(paid, default=-1.0) < 0 or max(paid) > 1 or trends.level(paid) < SOLVED or not trends.rises(paid):
        return None
    for series in log.all("held_out"):
        values = series.finite
        if len(values) <= STAYED or min(values) < 0 or not HAD <= values[0] <= 1 or max(values[1:]) >= KEPT * values[0]:
            continue
        easy = log.get("solve_all")
        return error(
            f"{series.name} falls from {values[0]:.3g} to {values[1]:.3g} and stays below {KEPT * values[0]:.2g} in "
            f"all {len(values) - 1} evaluations since, while {reward.name} rises from {trends.level(paid[:3]):.3g} to "
            f"{trends.level(paid):.3g}: the training prompts are learnt by heart",
            series.of(series.points[1:]),
            series.shown_at(series.points[0], None),
            series.shown(max(values[1:]), f">= {KEPT * values[0]:.3g}"),
            reward.shown(trends.level(paid), f"was {trends.level(paid[:3]):.3g}"),
            *([easy.shown(trends.level(easy.finite))] if easy is not None and easy.finite else []),
            cause="the policy overfits its training prompts (few of them, many epochs, a high learning rate), or the "
            "reward pays for something that the validation does not; steps whose groups are all right have no gradient",
            next_step="count the training prompts and their epochs; go back to the checkpoint with the best "
            "validation; more prompts, a lower learning rate",
        )
    return None


#: Evaluations each of which is below the one before: one order of 720 is that by chance.
EACH_TIME = 6


def _falls_each_time(values: list[float]) -> bool:
    return len(values) >= EACH_TIME and all(after < before for before, after in pairwise(values))


#: Evaluations after the first few, of a result of so much at first, of which each is below that share of it.
STAYED, HAD_AT_FIRST, BROKE = 6, 0.5, 0.8


def _broken(log: RunLog) -> Finding | None:
    """A share of right held-out answers that falls at the run's beginning and never comes back, whatever is paid."""
    for series in log.all("held_out"):
        values = series.finite
        if len(values) < STAYED + 3 or min(values) < 0 or max(values) > 1 or values[0] < HAD_AT_FIRST:
            continue
        if values[0] < max(values) or max(values[3:]) >= BROKE * values[0]:
            continue
        below = next(point for point in series.points if point.value < BROKE * values[0])
        return warning(
            f"held-out results are lost within the first steps: {series.name} falls from {values[0]:.3g} to "
            f"{values[3]:.3g} and is {median(values[3:]):.3g} in the {len(values) - 3} evaluations since",
            below.where(series.name),
            series.shown_at(series.points[0], None),
            series.shown(max(values[3:]), f">= {BROKE * values[0]:.3g}"),
            cause="the first updates broke what the policy could do: a learning rate too high for it, a reward or sign "
            "that pays one answer whatever is asked (a refusal, a constant), no KL that holds it",
            next_step="count which answers it gives now; lower the learning rate; go back to the checkpoint before",
        )
    return None


#: Evaluations that make a loss, the result that is lost, and what is left of it in the last two.
EVALUATIONS, ONCE, GONE = 5, 0.2, 0.1
#: What is left of it in every evaluation behind the best, where it is lost from one to the next and wavers at nothing.
AT_ONCE = 0.25


def _gone(log: RunLog, reward: Series) -> Finding | None:
    """A result that falls from its best on in every evaluation, to nothing, while the reward has come to more."""
    if len(reward.finite) < trends.MIN_STEPS:
        return None
    begun, now = median(reward.finite[:3]), trends.level(reward.finite)
    if now <= begun + LOST * abs(begun):
        return None
    for series in log.all("held_out"):
        values = series.finite
        most = max(values, default=0.0)
        after = values[values.index(most) :] if values else []
        if len(values) < EVALUATIONS or most < ONCE or len(after) < 4 or max(after[-2:]) > GONE * most:
            continue
        at_once = len(after) > EVALUATIONS and max(after[1:]) <= AT_ONCE * most
        if any(b > a for a, b in pairwise(after)) and not at_once:
            continue
        return error(
            f"{series.name} falls from {most:.3g} to {after[-1]:.3g} while {reward.name} rises{_longer(log)}: the "
            "reward is hacked, what it pays for is no right answer",
            series.ended,
            series.shown(after[-1], f">= {most:.3g}"),
            reward.shown(trends.level(reward.finite, 3), f"was {trends.level(reward.finite[:3]):.3g}"),
            cause="the training reward pays for something that the validation does not (a form, a phrase, length): the "
            "policy earns all of it and answers nothing",
            next_step="score ten training responses by hand; go back to the checkpoint with the best validation",
        )
    return None


#: Of rewards between 0 and 1: what training's has to come to, by how much it rises, what part of that held-out results
#: rise by, and how far they lie below it, over so many evaluations.
SOLVED, GAINED, FOLLOWS, BELOW, SEEN = 0.9, 0.2, 0.25, 0.2, 6


def _falls(log: RunLog) -> bool:
    """Whether a held-out result falls: that may be a reward that is hacked, and L20 tells of it."""
    try:
        return overfits(log) is not None
    except Skip:
        return False


#: Of a held-out result that stays while the reward rises without coming to its most: how far the reward has to rise,
#: how far where it begins elsewhere; how near to where that began it begins, in shares of the rise; how its spread
#: compares with the rise, at the most.
ROSE, FAR, BEGINS_NEAR, STANDS = 0.25, 0.4, 0.5, 0.5
#: What the weights that are evaluated may be, where the result stays where it was before training.
_NOT_THESE = (
    "the weights that are evaluated are not those that are trained: the initial ones, an old checkpoint, an engine of "
    "its own that no update reaches (answers of two evaluations are then those of one policy, and differ by sampling "
    "alone); or the reward pays for something else than the task (a form, a leak of the answer, another judge)"
)


@rule("L60", "what is learnt in training does not show on held-out prompts", link="trend", scope="signals",
      needs=("held_out", "reward"), explains=("D25",),
      source="the gap of training and validation; RLVR on one prompt lifts both (arXiv 2504.20571)")  # fmt: skip
def learns_by_heart(log: RunLog) -> Finding | None:
    """The reward of training (0 to 1) rises by .2 and more to .9 and more, while no held-out result rises with it: the
    last third of 6 evaluations and more is less than a quarter of that rise above the first third, and .2 and more
    below the reward: a warning. Even one prompt, trained on alone, lifts the validation where answers generalise. A
    result that never changes is D116's, one that falls L20's. A reward (or a share of right answers that it is made of)
    that rises by .25 and more, to wherever, is enough where every held-out result that is no best of several answers
    stands: none is above the first one by .15 of the rise in its median, it drifts by no more than chance explains,
    its spread is half of the rise at the most, and it begins within half of the rise of where the reward began (or, of
    a rise of .4, lies between .1 and .9): what is evaluated is another policy, or the reward is not the task's. Of
    rewards over 1 these are shares of the largest.
    """
    known = [series for series in log.all("held_out") if len(series.finite) >= SEEN]
    skip_if(not known, f"needs {SEEN} evaluations")
    if (found := _learnt_by_heart(log, given(log.get("reward")), known)) is not None:
        return found
    right = (one for one in log.all("reward_function") if _OF_RIGHT.search(one.name))
    for reward in (given(log.get("reward")), *right):
        if (found := _stays(log, reward, known)) is not None:
            return found
    return None


_OF_RIGHT, _OF_SEVERAL = (
    regex(r"(?i)accura|correct|exact|solve"),
    regex(r"(?i)(?:best|maj|pass)\w*[@_]?(?!1\b)\d+|/(?:best|maj)"),
)


def _stays(log: RunLog, reward: Series, known: list[Series]) -> Finding | None:
    """A held-out result that begins where the reward does, and stays there while that rises far."""
    values = reward.finite
    if len(values) < 2 * trends.MIN_STEPS or min(values) < 0 or not trends.rises(values):
        return None
    # A right answer may be paid 10: then so is one of the validation.
    scale = max(1.0, *values)
    few = max(3, len(values) // 10)
    begun, now = fmean(values[:few]), fmean(values[-2 * few :])
    rise = now - begun
    single = [one for one in known if not _OF_SEVERAL.search(one.name)] or known
    fits = [one for one in single if min(one.finite) >= 0 and max(one.finite) <= scale]
    single = [one for one in fits if scale == 1 or max(one.finite) > 1]
    if not single or rise < ROSE * scale or _falls(log):
        return None
    for series in single:
        own = series.finite
        part = max(2, len(own) // 3)
        near = abs(own[0] - begun) <= BEGINS_NEAR * rise
        # Other prompts, of which some are solved and some are not, are better solved by a policy that has learnt
        # so much.
        could = rise >= FAR * scale and 0.1 * scale <= median(own) <= 0.9 * scale
        if len(set(own)) == 1 or not (near or could):
            return None
        if max(own) - min(own) > STANDS * rise or abs(fmean(own[-part:]) - fmean(own[:part])) > 0.15 * rise:
            return None
        if abs(trends.drift(own)) > trends.DRIFT_Z or now - fmean(own[-part:]) < STANDS * rise:
            return None
    series = single[0]
    entropy = log.get("entropy")
    fell = entropy is not None and trends.drift(entropy.finite) < -trends.DRIFT_Z
    above = next(p for p in reward.points if p.value >= begun + rise / 2)
    return warning(
        f"the evaluation does not see what training does: {series.name} stays at {median(series.finite):.3g} in all "
        f"{len(series.finite)} evaluations ({series.finite[0]:.3g} in the first), while {reward.name} rises from "
        f"{begun:.3g} to {now:.3g}",
        reward.of(p for p in reward.points if (p.step or 0) >= (above.step or 0)),
        series.shown(series.last.value, f"to rise with it, to {series.finite[0] + rise:.2g} or so"),
        shown(f"{series.name}, least and most", f"{min(series.finite):.3g} to {max(series.finite):.3g}"),
        reward.shown(trends.level(values), f"was {begun:.3g}"),
        *([given(entropy).shown(trends.level(given(entropy).finite))] if fell else []),
        cause=_NOT_THESE,
        next_step="evaluate the newest checkpoint by itself on the same prompts, beside the initial model; compare "
        "answers of two evaluations; score ten training responses by the evaluation's judge",
    )


def _learnt_by_heart(log: RunLog, reward: Series, known: list[Series]) -> Finding | None:
    values = reward.finite
    if len(values) < trends.MIN_STEPS or min(values) < 0 or max(values) > 1 or not trends.rises(values):
        return None
    begun, now = median(values[:3]), trends.level(values)
    if now < SOLVED or now - begun < GAINED:
        return None
    told = []
    for series in known:
        part = len(series.finite) // 3
        first, last = fmean(series.finite[:part]), fmean(series.finite[-part:])
        if min(series.finite) < 0 or max(series.finite) > 1 or len(set(series.finite)) == 1:
            return None
        if last - first >= FOLLOWS * (now - begun) or last > now - BELOW:
            return None
        told.append((last, first, series))
    if _falls(log):
        return None
    last, first, series = min(told, key=lambda each: each[0])
    above = next(p for p in reward.points if p.value >= begun + (1 - FOLLOWS) * (now - begun))
    return warning(
        f"the policy learns its training prompts by heart: {reward.name} rises from {begun:.3g} to {now:.3g}, and "
        f"{series.name} stays at {last:.3g} ({first:.3g} at first)",
        reward.of(p for p in reward.points if (p.step or 0) >= (above.step or 0)),
        reward.shown(now, f"about {last:.3g}, as {series.name}"),
        series.shown(series.last.value, f"to rise with it, to {first + (now - begun):.2g} or so"),
        shown("evaluations", len(series.finite)),
        cause="overfitting: the same prompts again and again (a sampler that is seeded anew in every step, a data set "
        "of a few prompts, a loader that does not advance), or prompts that are far easier than the validation's; or "
        "what is evaluated is another policy (the initial weights, an engine that no update reaches)",
        next_step="print the ids of the prompts of ten steps; look whether the loader is shuffled and goes on after a "
        "restart; rldbg record -- YOUR COMMAND, then rldbg diagnose rldbg-dump --rule D43",
    )


#: Evaluations that say one number before it is no chance, of a result that is no bound.
STOOD = 6
#: Robust sigmas of the training's reward within which a result that stands still is what that stands at, too.
AS_TRAINED = 2.0


@rule("D116", "validation never changes", link="trend", scope="signals", needs=("held_out", "reward"), lasts=True,
      explains=("L25",),
      source="an evaluation that is given the initial weights, or an engine that no update reaches")  # fmt: skip
def stands_still(log: RunLog) -> Finding | None:
    """A validation's result that is one number to the last digit in all of 6 evaluations and more, neither 0 nor 1,
    while the reward of training rises, or the policy's entropy drifts, beyond chance: a warning. Two sets
    of weights answer a validation set alike where it has next to no prompts, or where neither knows an answer: silent
    where the reward stands still as well, within two robust sigmas of the validation's.
    """
    reward = given(log.get("reward"))
    stood = [series for series in log.all("held_out") if len(series.finite) >= STOOD and len(set(series.finite)) == 1]
    skip_if(not any(len(series.finite) >= STOOD for series in log.all("held_out")), f"needs {STOOD} evaluations")
    stood = [series for series in stood if series.finite[0] not in (0.0, 1.0)]
    others = [series for series in log.all("held_out") if len(set(series.finite)) > 1]
    if not stood or others:
        return None
    entropy = log.get("entropy")
    drifts = entropy is not None and abs(trends.drift(entropy.finite)) > trends.DRIFT_Z
    moved = reward if trends.rises(reward.finite) or not drifts else given(entropy)
    if moved is reward and not trends.rises(reward.finite):
        return None
    series, value = stood[0], stood[0].finite[0]
    middle, sigma = trends.spread(reward.finite)
    if moved is not reward and abs(middle - value) <= AS_TRAINED * sigma:
        return None
    return warning(
        f"validation does not change: {series.name} is {value:g} in all {len(series.finite)} evaluations, while "
        f"{moved.name} goes from {trends.level(moved.finite[:3]):.3g} to {trends.level(moved.finite):.3g}",
        series,
        series.shown(value, "another number as the policy learns"),
        shown("evaluations", len(series.finite)),
        moved.shown(trends.level(moved.finite), f"was {trends.level(moved.finite[:3]):.3g}"),
        cause="the weights that are validated are not those that are trained: the initial ones, a checkpoint that is "
        "never replaced, an engine of its own that no update reaches; or the result is cached",
        next_step="validate the same prompts with the newest checkpoint, and compare answers of two evaluations",
    )


#: How a harness calls one task scored by form and by answer; what the first loses, and by what the second may waver.
_STRICT, _FLEXIBLE = (
    regex(r"(?i)strict(?:[-_ ](?:match|extract))?"),
    regex(
        r"(?i)flex(?:ible)?(?:[-_ ](?:match"
        r"|extract))?"
    ),
)
FORM_LOST, HOLDS = 0.15, 0.05


#: How much longer, or shorter, answers get before a reward that rises with them is said to pay for it.
LONGER, SHORTER = 1.5, 0.6


def _longer(log: RunLog) -> str:
    """What becomes of the length of answers meanwhile, in words; empty where it stays."""
    length = log.get("response_length")
    if length is None or len(length.finite) < trends.MIN_STEPS:
        return ""
    begun, now = median(length.finite[:3]), median(length.finite[-3:])
    if not begun > 0 or SHORTER * begun < now < LONGER * begun:
        return ""
    cut = log.get("truncated")
    share = (
        f", {median(cut.finite[-3:]):.0%} of them cut at the limit"
        if cut is not None and median(cut.finite[-3:] or [0]) >= 0.25
        else ""
    )
    return f" with the {'length' if now > begun else 'brevity'} of the answers ({begun:.3g} to {now:.3g} tokens{share})"


#: Of a share of answers that can be read: lines, what it has to begin with, what is left of it, and Kendall's tau of
#: few.
_READ_LINES, _BEGAN, _READ_LEFT, _READ_TAU, _FEW_LINES = 5, 0.5, 0.8, -0.6, 12
#: A reward for the form by its name, and none of what falls as the form gets better, nor of a spread.
_OF_FORM = regex(
    r"(?i)^(?!.*(?:penal|std|err|fail|violat|wrong|bad|invalid|incorrect|missing|malform))(?:.*[/_. ])?(?:fmt|format)"
)


def _unread(log: RunLog) -> Finding | None:
    """That ever fewer answers can be read, of the one that loses most."""
    found = []
    for series in (*log.all("well_formed"), *(one for one in log.all("reward_function") if _OF_FORM.search(one.name))):
        values = series.finite
        if len(values) < _READ_LINES or min(values) < 0 or max(values) > 1:
            continue
        part = max(2, len(values) // 3)
        begun, now = fmean(values[:part]), fmean(values[-part:])
        if begun < _BEGAN or now > _READ_LEFT * begun:
            continue
        pairs = [(a, b) for at, a in enumerate(values) for b in values[at + 1 :]] if len(values) < _FEW_LINES else []
        tau = sum((b > a) - (b < a) for a, b in pairs) / len(pairs) if pairs else 0.0
        if tau > _READ_TAU if pairs else trends.drift(values) > -trends.DRIFT_Z:
            continue
        found.append((now / begun, series, begun, now))
    if not found:
        return None
    _, series, begun, now = min(found, key=lambda each: each[0])
    return warning(
        f"the form of the answers breaks down: {series.name} falls from {begun:.2g} to {now:.2g}, ever fewer of "
        "them can "
        "be read",
        series.ended,
        series.shown(series.last.value, f"about {begun:.2g}"),
        shown("mean of its last third", now, f"> {_READ_LEFT:g} x {begun:.2g}"),
        cause="the policy gives up the form that answers are read by: it is not paid for any more, answers get "
        "longer and "
        "are cut before their end, several players or tools confuse it, or updates (a learning rate too high, no "
        "KL) pull "
        "it apart; an answer that cannot be read earns nothing, whatever it says",
        next_step="read ten answers that cannot be read; look at lengths and cut answers beside it; pay for the "
        "form, add a "
        "KL, or take the checkpoint before the fall",
        steps=series.steps(under=(begun + now) / 2),
    )


@rule("L41", "the form of answers is lost", link="trend", scope="signals",
      needs=("held_out|well_formed|reward_function",),
      source="lm-evaluation-harness: strict-match and flexible-extract of gsm8k")  # fmt: skip
def form_lost(log: RunLog) -> Finding | None:
    """One task that a harness scores by its form (strict) falls by .15 of itself over 4 evaluations and more, and by
    its answer (flexible) by less than .05: a warning. So is a share of answers that can be read (parse_success, a
    format
    reward between 0 and 1) that was .5 and more and falls to .8 of its first third and less, over 5 lines and more, by
    no chance (Kendall's tau under -.6 of fewer than 12).
    """
    if (unread := _unread(log)) is not None:
        return unread
    every = {series.name: series for series in (*log.all("held_out"), *log.all("reward_function"))}
    flexible = {_FLEXIBLE.sub("*", name): series for name, series in every.items() if _FLEXIBLE.search(name)}
    found = []
    for name, strict in every.items():
        by_answer = flexible.get(_STRICT.sub("*", name)) if _STRICT.search(name) else None
        if by_answer is None or min(len(strict.finite), len(by_answer.finite)) < 4:
            continue
        begun, now = median(strict.finite[:2]), median(strict.finite[-2:])
        first, last = median(by_answer.finite[:2]), median(by_answer.finite[-2:])
        if begun > 0 and now < (1 - FORM_LOST) * begun and last > (1 - HOLDS) * first > 0:
            found.append((now / begun, strict, by_answer, begun, now, last))
    skip_if(
        not every or not flexible, "needs one task scored strictly and flexibly, or a share of answers that can be read"
    )
    if not found:
        return None
    _, strict, by_answer, begun, now, last = min(found, key=lambda each: each[0])
    return warning(
        f"the form is lost and the answers are not: {strict.name} falls from {begun:.3g} to {now:.3g} while "
        f"{by_answer.name} stays at {last:.3g}",
        strict.ended,
        strict.shown(now, f">= {(1 - FORM_LOST) * begun:.3g}"),
        by_answer.shown(last),
        cause="training pays for another form of answer than the evaluation reads: prompt, template or marker of the "
        "answer differ between them, or the reward takes any form",
        next_step="read ten held-out answers before and after the fall; give training the evaluation's prompt, or pay "
        "for "
        "its form",
    )


#: How much of itself a held-out loss rises, and what is left of training's, before it is what was learnt by heart; of
#: three or four evaluations, by how much one may lie below the one before.
RISEN, LEARNT, LEARNT_FEW, FEW, WAVERS = 0.15, 0.7, 0.5, 3, 0.01
#: Epochs, and the loss per token, at and below which demonstrations are known by heart; and the share of the first.
OVER_AND_OVER, BY_HEART, OF_FIRST = 5, 0.1, 0.05


def _by_heart(log: RunLog) -> Finding | None:
    """A held-out loss that rises from its least on while the loss of training falls on."""
    train = log.get("loss")
    for series in log.all("held_out_loss"):
        values = series.finite
        if (
            train is None
            or log.has("reward")
            or len(values) < FEW
            or len(values) < len(series.points)
            or min(values) <= 0
        ):
            continue
        least = min(range(len(values)), key=values.__getitem__)
        if least > len(values) - 3 or min(values[-2:]) < (1 + RISEN) * values[least]:
            continue
        # Of three or four one may stand out: each has to be as high as the one before.
        few = len(values) < EVALUATIONS
        if few and any(b < (1 - WAVERS) * a for a, b in pairwise(values[least:])):
            continue
        at = series.points[least].step
        before = [p.value for p in train.points if p.step is not None and at is not None and p.step <= at]
        then, now = trends.level(before, 5) if before else 0.0, trends.level(train.finite, 5)
        if now < 0 or now > (LEARNT_FEW if few else LEARNT) * then:  # 0 is what rounding leaves of it
            continue
        # Lines without a number are counted: that count is no step.
        where = f"line {(at or 0) + 1} of metrics" if log.is_counted else f"step {at}"
        return warning(
            f"the run overfits: {series.name} rises from {values[least]:.3g} at {where} to {values[-1]:.3g} while "
            f"{train.name} falls from {then:.3g} to {now:.3g}",
            series.ended,
            series.shown(values[-1], f"about {values[least]:.3g}"),
            train.shown(now, f"was {then:.3g}"),
            cause="the demonstrations are learnt by heart: too many epochs for as little data, a learning rate too "
            "high, too large an adapter",
            next_step=f"take the checkpoint near {where} (load_best_model_at_end); fewer epochs, or more data",
        )
    return None if train is None else _learns_no_more(log, train)


@rule("L43", "demonstrations are learnt by heart", link="trend", scope="signals", needs=("loss",), explains=("L08",),
      source="rldbg; transformers' trainer_state.json (epoch, max_steps)")  # fmt: skip
def over_and_over(log: RunLog) -> Finding | None:
    """A loss of demonstrations (nothing is paid, no pairs) that comes to .1 and less, and to a twentieth of its first
    three values, over 5 epochs and more, where no evaluation is logged: a warning. With one, L20 judges. Worth knowing
    is a loss that rests within each of 2 epochs and more (within a tenth) and falls by half and more at each of their
    borders: what is seen again is known by heart, and within an epoch nothing is learnt that helps with the next text.
    """
    train = given(log.get("loss"))
    epochs, values = log.algorithm.number(EPOCHS), train.finite
    skip_if(any(map(log.has, ("held_out_loss", "held_out", *PAID))), "it is no run of demonstrations alone")
    if epochs is not None and (borders := _stairs(values, epochs)) is not None:
        levels = ", ".join(f"{level:.3g}" for level in borders)
        return info(
            f"{train.name} falls in stairs, at the borders of epochs alone: {levels}",
            train.ended,
            train.shown(borders[-1], f"was {borders[0]:.3g}"),
            shown("epochs", epochs, "1 to 2"),
            cause="what is seen a second time is known by heart by then; within an epoch nothing is learnt that helps "
            "with the next text",
            next_step="hold out a part of the data (eval_strategy='steps') and look whether its loss falls too; fewer "
            "epochs, a smaller learning rate, more data",
        )
    if epochs is None or epochs < OVER_AND_OVER or len(values) < trends.MIN_STEPS:
        raise Skip(f"needs the loss of {trends.MIN_STEPS} steps, and {OVER_AND_OVER} epochs")
    begun, now = trends.level(values[:3]), trends.level(values, 5)
    if not 0 <= now <= min(BY_HEART, OF_FIRST * begun):
        return None
    planned, last = log.algorithm.number(PLANNED), train.last.step
    early = planned is not None and last is not None and last < 0.5 * planned and not log.is_counted
    return warning(
        f"the demonstrations are learnt by heart: {train.name} falls from {begun:.3g} to {now:.3g} in {epochs:.3g} "
        "epochs, and nothing is held out to tell whether more is learnt"
        + (f" (and that is step {last:,} of {planned:,.0f})" if early else ""),
        train.ended,
        train.shown(now, f"> {BY_HEART:g}"),
        shown("epochs", epochs, f"< {OVER_AND_OVER}"),
        cause="too many epochs over as little data: what the model writes is what it has seen, and it forgets what it "
        "could do before",
        next_step="1 to 3 epochs; hold out a part of the data (eval_strategy='steps') and take the checkpoint of its "
        "least loss",
    )


#: Lines of an epoch before it has a level; how far they may lie from it; what of it is left in the next epoch.
OF_EPOCH, RESTS, HALVED = 4, 0.1, 0.5


def _stairs(values: list[float], epochs: float) -> list[float] | None:
    """The level of each epoch, where the loss rests in each and falls by half at their borders."""
    whole = int(epochs + 1e-6)
    size = len(values) / epochs
    if whole < 2 or size < OF_EPOCH:
        return None
    levels = []
    for number in range(whole):
        # The line at a border may be of either side.
        part = values[round(number * size) + 1 : round((number + 1) * size) - 1]
        if len(part) < OF_EPOCH - 2:
            return None
        level = trends.level(part, len(part))
        if level <= 0 or max(abs(value - level) for value in part) > RESTS * level:
            return None
        levels.append(level)
    return levels if all(b <= HALVED * a for a, b in pairwise(levels)) else None


#: What is logged where something else than demonstrations teaches.
PAID = ("reward", "reward_function", "pair_reward", "pair_logps", "kl", "pg_loss", "entropy", "advantage_max")


#: A share of right pairs that a model which tells them apart is above; how little more is no gain.
TELLS, GAIN = 0.65, 0.02


def _learns_no_more(log: RunLog, train: Series) -> Finding | None:
    """A share of right held-out pairs that stays low while the loss of training falls, where nothing is paid."""
    for series in log.all("held_out"):
        after = series.finite[1:]
        if not series.name.endswith(("acc", "accuracy", "accuracies")) or len(after) < 3 or log.has("reward"):
            continue
        losses = train.finite
        if (
            max(after) >= TELLS
            or after[-1] > after[0] + GAIN
            or min(after) < 0.4
            or not 0 < losses[-1] <= 0.8 * losses[0]
        ):
            continue
        return info(
            f"{series.name} stays low, {after[0]:.3g} and then {after[-1]:.3g}, while {train.name} falls from "
            f"{losses[0]:.3g} to {losses[-1]:.3g}: what is learnt does not hold on held-out pairs",
            series.ended,
            series.shown(after[-1], f"> {TELLS:g}"),
            train.shown(losses[-1], f"was {losses[0]:.3g}"),
            cause="the pairs are learnt by heart, or their labels are noise: half of them are right by chance",
            next_step="read ten held-out pairs, and say which is better; fewer epochs, a smaller learning rate, or "
            "more pairs",
        )
    return None


#: What a result was at least, and what is left of it where it is lost.
HAD, LEFT = 0.3, 0.25


def _lost(log: RunLog, reward: Series) -> Finding | None:
    """A held-out result that is lost within 4 evaluations and more, in more than one step, each no higher than the one
    before until it is, while the reward of training comes to more than it was.
    """
    paid = reward.finite
    if len(paid) < trends.MIN_STEPS or median(paid[-4:]) < paid[0] + 0.2 * abs(paid[0]) or not trends.rises(paid):
        return None
    for series in log.all("held_out"):
        values = series.finite
        if len(values) < 4 or values[0] < HAD:
            continue
        # How it wavers where nothing is left says nothing; lost at once, it may be the validation that broke.
        down = values if values[1] <= LEFT * values[0] else values[:3]
        if any(b > a for a, b in pairwise(down)) or max(values[2:]) > LEFT * values[0]:
            continue
        return error(
            f"{series.name} falls from {values[0]:.3g} to {values[-1]:.3g} while {reward.name} rises from "
            f"{paid[0]:.3g} to {median(paid[-4:]):.3g}{(longer := _longer(log))}: the reward pays for "
            f"{'it, and not for' if longer else 'the opposite of'} what the validation asks",
            series.ended,
            series.shown(values[-1], f">= {values[0]:.3g}"),
            reward.shown(paid[-1], f"was {paid[0]:.3g}"),
            cause="the reward is hacked: what the judge pays for is met by longer or shorter answers that are not right"
            if longer
            else "the judge is inverted (wrong answers earn 1), or it pays for something else than a right answer, "
            "which the policy has found; a validation that broke would not fall with it step by step",
            next_step="score one right and one wrong response by hand with the judge of the training",
        )
    return None


#: How many times all before, and below which no reward of training prompts is what it was.
LEAPT = 5.0
#: How near a factor of ten what batches differ by leaves it.
ABOUT = 0.3


@rule("L19", "the scale of rewards leaps", link="rewards", scope="signals",
      needs=("reward",), explains=("L02", "L08", "L10", "D25"),
      source="a reward model or a weighting of functions that was changed within a run")  # fmt: skip
def scale_leaps(log: RunLog) -> Finding | None:
    """From one step to the next the largest reward of a batch (else the spread within its groups) is over 5 times all
    it ever was, and stays there in 3 steps and more, and so does the mean: a warning. The mean alone, where neither is
    logged. So is a spread that was steady and leaps to over twice all it ever was, with 8 steps on both sides, while
    the mean does not: noise is added. A judge's best answer has the
    same reward in every step; a policy that learns comes nearer to it.
    """
    mean = given(log.get("reward"))
    scale = log.get("reward_max") or log.get("reward_std") or mean
    at = _leap(scale)
    if (spread := log.get("reward_std")) is not None and (wide := _widens(spread, mean)) is not None:
        begun, now = median(spread.values[:wide]), median(spread.values[wide:])
        return warning(
            f"the spread of rewards leaps {now / begun:.3g} times at step {spread.points[wide].step}, and their mean "
            f"does not: {spread.name} goes from {begun:.3g} to {now:.3g} (medians)",
            spread.of(spread.points[wide:]),
            spread.shown_at(spread.points[wide], f"<= {max(spread.values[:wide]):.3g}, the largest before"),
            mean.shown_at(mean.points[min(wide, len(mean.points) - 1)]),
            shown("times what it was", now / begun, f"< {WIDER:g}"),
            cause="noise is added to the rewards, or a part of them on another scale that pays as often as it takes: "
            "the judge was changed or wavers from that step on",
            next_step="score one response several times with the judge of both sides of that step",
        )
    if at is None or _leap(mean) != at:
        return None
    before, after = (median(map(abs, each)) for each in (scale.values[:at], scale.values[at:]))
    # Rewards that are 0 in most steps have no median to be held against.
    before = before or max(map(abs, scale.values[:at]))
    times = after / before
    # Rewards differ from batch to batch: a factor of ten is told from what they make of it.
    ten = 10.0 ** round(math.log10(times))
    near = ten >= 10 and abs(times / ten - 1) <= ABOUT
    return warning(
        f"the scale of rewards leaps about {ten if near else times:.3g} times at step {scale.points[at].step}: "
        f"{scale.name} goes from {before:.3g} to {after:.3g} (medians)",
        scale.of(scale.points[at :]),
        scale.shown_at(scale.points[at], f"<= {before:.3g}"), mean.shown_at(mean.points[at]),
        shown("times what it was", times, f"< {LEAPT:g}"),
        cause="the judge was changed, or its weights: another scale of rewards, a normalisation that was lost, a "
        "checkpoint that resumed with other settings",
        next_step="score one response with the judge of both sides of that step",
    )  # fmt: skip


#: A spread that is so many times all it was before, for so many steps on both sides, and that was steady before.
WIDER, SIDES, STEADY = 2.0, 8, 2.0


def _widens(series: Series, mean: Series) -> int | None:
    """The place from which on a spread that was steady is over `WIDER` times every one before, and the mean is not
    larger with it, as on another scale, or where a policy learns.
    """
    sizes = series.values
    if not all(math.isfinite(size) and size >= 0 for size in sizes):
        return None
    most, least = trends.so_far(sizes, max), trends.from_here(sizes, min)
    at = next((at for at in range(SIDES, len(sizes) - SIDES + 1) if least[at] > WIDER * most[at - 1] > 0), None)
    if at is None or most[at - 1] > STEADY * median(sizes[:at]):
        return None
    before, after = (median(map(abs, each)) for each in (mean.values[:at], mean.values[at:] or mean.values[-1:]))
    return at if after <= before * math.sqrt(median(sizes[at:]) / median(sizes[:at])) else None


def _leap(series: Series) -> int | None:
    """The place from which on every size is over `LEAPT` times every one before."""
    sizes = [abs(value) for value in series.finite]
    if len(sizes) < len(series.points):
        return None
    most, least = trends.so_far(sizes, max), trends.from_here(sizes, min)
    return next((at for at in range(4, len(sizes) - 2) if least[at] > LEAPT * most[at - 1] > 0), None)
