"""What a handful of lines shows by itself: figures of a short log that are 0, pinned or beyond all scale.

Rules over steps need 5 to 16 of them. Of fewer, what people paste into an issue, a level is said where it is odd on its
face: a table, one line per figure and state. Most is worth knowing (info), not judged.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from statistics import fmean, median, pvariance

from msgspec import Struct

from replay_core.diagnose import trends
from replay_core.diagnose.finding import Finding, finding, info, shown, warning
from replay_core.diagnose.late_falls import late_fall
from replay_core.diagnose.resting import LONG, PERHAPS, Rest, rests, rose, signs
from replay_core.diagnose.rule import Skip, rule
from replay_core.diagnose.rules.learning import tells_of_rate
from replay_core.diagnose.rules.states import MOST_NATS, FigureState, Test
from replay_core.diagnose.signals import RunLog, Series
from replay_core.regexes import regex

#: Lines of a log that is short: other rules judge longer ones.
SHORT = 15
#: Names that mean a sum over the response (TRL's PPO): their levels are no token's.
_SUMMED = regex(r"^objective/")


def _over(limit: float) -> Test:
    return lambda values: median(values) > limit


def _comes_over(limit: float) -> Test:
    return lambda values: max(values) > limit


def _between(low: float, high: float) -> Test:
    return lambda values: low < median(values) <= high


def _under(limit: float) -> Test:
    return lambda values: median(values) < limit


def _all_zero(values: list[float]) -> bool:
    return not any(values)


def _pinned(values: list[float]) -> bool:
    """One length in every line that a limit has: a multiple of 8, as none is by chance three times over."""
    return len(set(values)) == 1 and values[0] >= 16 and values[0] % 8 == 0


#: Of many lines the share whose mean length is one number that none is over.
PINNED = 0.95


def _pinned_in_most(log: RunLog) -> Iterator[Finding]:
    """A mean length that is one limit in nearly all of many lines, where no share that is cut is logged."""
    series = log.get("response_length")
    values = [] if series is None else series.finite
    if series is None or len(values) <= SHORT or log.has("truncated") or (len(set(values)) == 1 and not _wavers(log)):
        return
    most = max(values)
    at_it = [point for point in series.points if point.value == most]
    if not _pinned([most]) or len(at_it) < PINNED * len(values):
        return
    yield warning(
        f"all responses run to the limit: their mean length is {most:g} tokens in {len(at_it)} of {len(values)} lines, "
        "and more in none",
        series.of(at_it),
        series.shown(most, "another in every line"),
        link="tokens",
        cause="the limit is too small for the answers, or no end token is sampled or heeded: an answer that is cut off "
        "is judged wrong, and none is learnt to end",
        next_step="raise the limit of tokens, and read the end of a response",
    )


_RECORD = "rldbg record -- YOUR COMMAND, then rldbg diagnose rldbg-dump"
_TABLE: tuple[FigureState, ...] = (
    FigureState(
        "nan_iterations", _comes_over(0.0), 1, "error", "gradient",
        "iterations had a NaN: {name} comes to {most:g}, and their updates are left out", "0",
        "a loss or gradient that is not finite: an overflow, a 0/0, a mask without a token",
        "the first iteration that counts one; " + _RECORD, always=True,
    ),
    FigureState(
        "kl", _over(1e3), 1, "warning", "ref",
        "the KL to the reference is {now:.4g}, which no policy that was trained a few steps has", "< 1 per token",
        "policy and reference are not asked for the same: another model or adapter is loaded as the reference, logits "
        "of one of them are masked or scaled (a constrained or tempered generation), tokens are shifted; or the KL is "
        "a sum over the tokens", "at the first step, before any update, the KL is 0: compare the two models' "
        "log-probabilities of one text; " + _RECORD,
    ),
    FigureState(
        "kl", _over(5.0), 1, "info", "ref",
        "the KL to the reference is {now:.3g}: far for a mean per token", "< 1 per token",
        "the policy has left its reference (learning rate too high, no KL term), or the KL is a sum over the response",
        "look at the step where it rises; lower the learning rate",
    ),
    FigureState(
        "ratio_mean", _comes_over(1e3), 1, "error", "ratio",
        "the ratio of new to old policy comes to {most:.3g}: its mean is 1", "about 1",
        "old and new log-probabilities are not of the same tokens, model, temperature or dropout; or one update moves "
        "the policy that far (learning rate)", "compare old and new log-probabilities before the first update, where "
        "the ratio is 1; " + _RECORD,
    ),
    FigureState(
        "ratio_mean", _comes_over(10.0), 1, "warning", "ratio",
        "the ratio of new to old policy comes to {most:.3g}: its mean is 1", "about 1",
        "one update moves the policy that far (learning rate), or old and new log-probabilities are not of the same "
        "tokens or weights", "look at the ratio of the first mini-batch, which is 1; lower the learning rate",
    ),
    FigureState(
        "ratio_max", _comes_over(1e3), 1, "warning", "ratio",
        "single tokens' ratio of new to old policy comes to {most:.3g}", "< 10",
        "old and new log-probabilities of those tokens are not of the same weights or tokens", _RECORD,
    ),
    FigureState(
        "entropy", _all_zero, 1, "info", "trend",
        "the entropy is exactly 0 in every line: it is not computed, or the policy samples one answer alone", "> 0",
        "the entropy's switch is off (0 is then no figure), temperature 0, or a policy that has collapsed",
        "look whether two responses to one prompt differ",
    ),
    FigureState(
        "entropy", _between(8.0, MOST_NATS), 1, "warning", "logprobs",
        "the entropy is {now:.3g} nats per token: next to that of noise", "0.1 to 2",
        "weights that are broken or not loaded, a temperature far too high, or a policy that has fallen apart (ln of "
        "the vocabulary, 10 to 12, is a uniform one)", "read a response; compare the engine's weights with the "
        "checkpoint's: rldbg weights",
    ),
    FigureState(
        "response_length", _pinned, 3, "warning", "tokens",
        "every line has one mean length, {now:g} tokens: all responses run to the limit", "another in every line",
        "the limit is too small for the answers, or no end token is sampled or heeded: an answer that is cut off is "
        "judged wrong, and none is learnt to end", "raise the limit of tokens, and read the end of a response",
    ),
    FigureState(
        "response_length", _under(3.0), 1, "info", "tokens",
        "responses are {now:.3g} tokens long: next to nothing is written", "what the task asks for",
        "the end token comes first (the prompt's template ends the turn, or a reward for short answers), or the limit "
        "is that small", "read a prompt and its response as the model gets them",
    ),
    FigureState(
        "learning_rate", _all_zero, 2, "info", "optimizer",
        "the learning rate is 0 in all {n} lines: no weight has moved yet", "> 0",
        "a warm-up that begins at 0 (its first step alone), a scheduler that has run out, or a rate of 0",
        "print optimizer.param_groups[0]['lr'] after the first scheduler.step()",
    ),
    FigureState(
        "explained_variance", _under(-1.0), 1, "info", "advantages",
        "the critic is worse than a constant: {name} is {now:.3g}", "> 0",
        "values on another scale than the returns (a head that was not trained or loaded, rewards that are not "
        "normalised)", "compare the means of values and returns; let the critic warm up",
    ),
    FigureState(
        "eos_tokens", _all_zero, 1, "info", "tokens",
        "no response ends: {name} is 0", "> 0",
        "the limit of tokens is too small, or the end token is not the one the model writes (stop_token, "
        "stop_token_id)", "read the end of a response; a penalty for a missing end (missing_eos_penalty) teaches it",
    ),
    FigureState(
        "pair_kl", lambda values: values[-1] == 0 < max(values), 2, "info", "ref",
        "KTO's kl falls to 0, from {most:.3g}", "> 0",
        "its estimate, over mismatched prompts and answers, is negative there and cut off at 0: the policy makes such "
        "answers less likely than its reference does; with few pairs in a batch it is noise",
        "a larger batch per device; watch whether the rewards of both kinds fall", always=True,
    ),
    FigureState(
        "pair_logits", lambda values: median(map(abs, values)) > 1e5, 1, "info", "trend",
        "{name} is {now:.3g}: a sum over tokens and vocabulary, no mean", "between -100 and 100",
        "the trainer logs summed logits: no fault of the training, and no figure to read", "watch logps and rewards",
    ),
    FigureState(
        "kl", _all_zero, 3, "info", "ref",
        "the KL to the reference is exactly 0 in all {n} lines", "> 0 after the first update",
        "no weight has changed, the reference is the policy itself (one object, an adapter that is not switched off), "
        "or no KL is computed (its weight is 0)", "compare a weight before and after a step",
    ),
    FigureState(
        "reward", _all_zero, 1, "warning", "rewards",
        "the reward is exactly 0 in every line: no response earns anything, and no advantage differs from 0",
        "> 0 for some response",
        "the judge finds nothing to pay (a form of answer nobody writes, another column, an exception that is scored "
        "0), responses are cut off before their answer, or the task is far too hard",
        "score one right answer by hand; read ten responses",
    ),
    FigureState(
        "reward", lambda values: median(map(abs, values)) > 1e4, 1, "info", "rewards",
        "rewards are of the order of {now:.2g}", "about 1",
        "a reward that is not scaled, a length or a loss that stands for it: a critic and a KL weight are made for 1",
        "look at the rewards of one batch; scale them",
    ),
)  # fmt: skip
#: Signals that tell whether rewards differ: then D01 and L17 judge.
_SPREADS = ("reward_std", "frac_zero_std", "reward_max", "pair_reward")
_SPREAD = regex(r"(?:^|[/_])std$")
_RIGHT = regex(r"^(?:eval[_/])?(?:acc|accuracy|[Rr]ewards(?:_train)?/accuracies)$")
#: Steps of training after which a model that tells pairs apart does so in more than this share.
TRAINED, CHANCE = 1000, 0.6


@rule("L40", "a figure is odd at a glance", link="trend", scope="signals", explains=("L01",),
      needs=("|".join(dict.fromkeys((*(each.signal for each in _TABLE), "reward_function", "held_out"))),),
      source="the figures' definitions; few lines, as they are pasted into issues")  # fmt: skip
def glance(log: RunLog) -> Iterator[Finding]:
    """Of a log of at most 15 lines: a KL over 5 (info; over 1,000 a warning), a ratio over 10 (over 1,000 an error), an
    entropy of exactly 0 (info) or of 8 to 12.9 nats, one mean length in 3 lines and more that is a limit, responses
    under 3 tokens, a learning rate of 0 in every one of 2 and more, an explained variance under -1, no end token,
    summed logits, rewards over 10,000, a KL of 0 in 3 lines (all info). A reward of 0 in every line: a warning. A
    reward function (or an evaluation's) that is 0 in every one of 2 lines and more is worth knowing (a warning in 8 in
    which the whole reward does not rise either), as is one of
    another number but 1 in 3 while another function wavers; that in 4 and more is a warning. A share of right pairs
    under .6 after 1,000 steps: worth knowing. An iteration with a NaN that Megatron counts, in a log of any length:
    an error.

    Of 3 lines and more a figure that goes one way in each: a KL to 5 times its beginning (and over .5), an entropy to 3
    times (over 1.5) or a fifth (under .15), a gradient norm, loss or critic's loss to 10 times (over 10), a length to
    2.5 times or a third, a reward to a third, engine and trainer to 4 times, a step's seconds to 2.5 times: worth
    knowing. A KL below -.5 of an estimator that may be: a warning. A reward that is within a tenth of its beginning (or
    half the spread of lines) after 150 steps, does not rise by more than chance, is not centred at 0 and is no best of
    .8 and more of 1: worth knowing; a warning where it does not rise in 100 lines and more (by the rank test and the
    means of its thirds, the middle one, too; worth knowing where it may at 1.96 errors of them; one that rose and fell
    back is told as such), and a sign of why is logged: .15 of the steps without a spread or loss, .2 of the responses
    cut, a reward function that never pays, a KL below .003; so in 300 lines without one, and in 30 that span 250 steps.
    A mean that gains less than .03 of what single answers get, in 100 lines and more, and stays below the half of that:
    a warning. Worth knowing is one that
    wavers by less than a hundredth in 5 lines and more, and a share of right answers of .05 that does not rise in 5: a
    warning in 20. A reward of 6 to 11 lines that goes down (Kendall's tau -.6) to .8 of its first third is worth
    knowing, to .6 a warning.
    A mean length that is one multiple of 8 in .95 of the lines, and more in none, is a warning, too, where no share
    that is cut is logged. One (or a reward) whose last two of 10 values and more fall out of the range of all before
    by more than that range,
    to a tenth: a warning. A loss, where no reward is logged, that comes from under 5 to 8.5 nats and more: a warning.
    """
    lines = max((len(series.points) for series in log.signals()), default=0)
    said: set[str] = set()
    for each in _TABLE:
        if lines > SHORT and not each.always:
            continue
        for series in log.all(each.signal)[:1]:
            values = series.finite
            if len(values) < each.fewest or each.signal in said or _SUMMED.match(series.name) or not each.holds(values):
                continue
            if each.signal == "reward" and any(map(log.has, _SPREADS)):
                continue  # D01 says it of the spread
            if each.holds is _pinned and (log.has("truncated") or not _wavers(log)):
                continue  # D20 says it of the share that is cut; a log that repeats itself is L18's
            if each.signal == "learning_rate" and tells_of_rate(log, values):
                continue  # L07 says it
            said.add(each.signal)
            yield finding(
                each.severity,
                each.claim.format(name=series.name, now=median(values), most=max(values), n=len(values)),
                series,
                series.shown(max(values) if max(values) > 0 else median(values), each.expected),
                link=each.link,
                cause=each.cause,
                next_step=each.next_step,
            )
    if lines <= SHORT:
        yield from _of_one_number(log)
        yield from _run_away(log)
        yield from _negative(log)
        yield from _stands(log)
        yield from _to_noise(log)
        yield from _falls(log)
    over_many = [*_by_chance(log), *_pinned_in_most(log), *_flat(log), *_hardly_any(log), *_lost_at_last(log)]
    yield from over_many
    if not (said or over_many) and lines > SHORT:
        raise Skip(f"the log has more than {SHORT} lines: other rules judge them")


def _wavers(log: RunLog) -> bool:
    """Whether the reward or the loss is another from line to line, as those of batches are."""
    return any(series is not None and len(set(series.values)) > 1 for series in map(log.get, ("reward", "loss")))


def _of_one_number(log: RunLog) -> Iterator[Finding]:
    """Reward functions that say one number in every line."""
    held = {series.name.removeprefix("eval_"): series.finite for series in log.all("held_out")}
    nothing: list[Series] = []
    # Where all of them stand still the log repeats itself, or the reward is one number: L17's and L18's.
    others_waver = any(len(set(one.values)) > 1 for one in log.all("reward_function"))
    for series in (*log.all("reward_function"), *log.all("held_out")):
        own = series.finite
        values = own + (held.get(series.name, []) if series.signal == "reward_function" else [])
        if _SPREAD.search(series.name) or _RIGHT.search(series.name) or len(set(values)) != 1:
            continue
        if values[0] == 0 and (len(values) > 1 or series.signal == "held_out"):
            nothing.append(series)
        elif len(values) > 2 and others_waver and not math.isclose(values[0], 1) and series.signal == "reward_function":
            yield finding(
                "warning" if len(values) >= 4 else "info",
                f"a reward function gives one number: {series.name} is exactly {values[0]:.4g} in all {len(values)} "
                "lines",
                series,
                series.shown(values[0], "another mean in every line"),
                link="rewards",
                cause="it falls back to a default for every answer: the reference answer cannot be parsed, an "
                "exception in it is caught, or it reads another column; a constant adds nothing to any advantage",
                next_step="call it by hand on one right and one wrong answer, and print what it parses of each",
            )
    if nothing:
        names = [series.name for series in nothing]
        flat = _rests_too(log, nothing[0])
        yield finding(
            "warning" if flat is not None else "info",
            f"{'a reward is' if len(names) == 1 else 'rewards are'} never given: {', '.join(names[:5])} "
            f"{'is' if len(names) == 1 else 'are'} 0 in every line"
            + (
                ""
                if flat is None
                else f", and what is paid does not rise ({flat.reward.name} is {flat.begun:.3g} in the first third of "
                f"{flat.steps} lines and {flat.now:.3g} in the last)"
            ),
            nothing[0],
            nothing[0].shown(0.0, "> 0 for some response"),
            *([] if flat is None else [flat.reward.shown(flat.now, f"> {flat.wanted:.3g}")]),
            link="groups",
            cause="the model does not write what is looked for (a tag or form that the prompt does not ask for, too "
            "small a model, a limit that cuts it off), or the function never matches (a regular expression that does "
            "not cross lines, another column, an exception that is scored 0): what is never paid is not learnt",
            next_step="read ten responses; call the function by hand on one that should be paid",
        )


#: Lines over which a reward that one function never adds to is flat, and by how much of itself it may waver.
FLAT_LINES, FLAT_BY = 8, 0.1


def _rests_too(log: RunLog, never: Series) -> Rest | None:
    """The whole reward, where it stays where it was over as many lines as say that a function never pays."""
    reward = log.get("reward")
    if reward is None or min(len(reward.finite), len(never.finite)) < FLAT_LINES or trends.rises(reward.finite):
        return None
    third = len(reward.finite) // 3
    begun, now = (sum(part) / third for part in (reward.finite[:third], reward.finite[-third:]))
    wanted = (1 + FLAT_BY) * begun
    return Rest(reward, begun, now, wanted, len(reward.finite)) if begun > 0 and now <= wanted else None


class _RunsAway(Struct, frozen=True):
    """A figure that goes one way from line to line: how many times its beginning, and past what level, is odd."""

    signal: str
    times: float
    past: float
    link: str
    words: str
    cause: str


_RUNS: tuple[_RunsAway, ...] = (
    _RunsAway("reward", 1 / 3, math.inf, "rewards", "the reward falls",
         "the policy moves away from what is rewarded: a turned sign, a learning rate too high, a KL that outweighs "
         "it; or the prompts get harder"),
    _RunsAway("kl", 5.0, 0.5, "ref", "the KL to the reference grows",
         "the policy leaves its reference: a learning rate too high, no or too small a KL term, gradients that are not "
         "clipped"),
    _RunsAway("entropy", 3.0, 1.5, "trend", "the entropy grows",
         "the policy falls apart: a learning rate or an entropy bonus too high, samples of old weights, a ratio or its "
         "clipping that is made wrongly"),
    _RunsAway("entropy", 1 / 5, 0.15, "trend", "the entropy shrinks",
         "the policy gets sure of its answers, right or wrong: no entropy or KL term, a clip range that favours likely "
         "tokens"),
    _RunsAway("grad_norm", 10.0, 10.0, "gradient", "the gradient norm grows",
         "an update that diverges: a learning rate too high, ratios far off 1, a loss that is a sum"),
    _RunsAway("loss", 10.0, 10.0, "loss", "the loss grows",
         "an update that diverges: a learning rate too high, a KL or a critic that outweighs the rest"),
    _RunsAway("value_loss", 10.0, 10.0, "advantages", "the critic's loss grows",
         "a critic that diverges: its learning rate, or returns that are not normalised"),
    _RunsAway("response_length", 2.5, 64.0, "tokens", "responses get longer",
         "longer responses are paid for, or the policy no longer ends them"),
    _RunsAway("response_length", 1 / 3, 64.0, "tokens", "responses get shorter",
         "short responses are paid for (or long ones punished), or the policy ends at once"),
    _RunsAway("logprob_diff", 4.0, 0.05, "rollout_logprobs", "engine and trainer part",
         "the engine does not follow the trainer's weights, or computes with another precision as the policy moves"),
    _RunsAway("step_seconds", 2.5, 0.0, "time", "steps get slower",
         "responses get longer, something accumulates, or the machine is shared"),
)  # fmt: skip
#: Lines that go one way before it is a run.
RUN = 3


def _run_away(log: RunLog) -> Iterator[Finding]:
    """Figures that go one way in every line and come to many times their beginning (or a part of it)."""
    for run in _RUNS:
        series = log.get(run.signal)
        values = [] if series is None else series.finite
        if series is None or len(values) < RUN or len(values) < len(series.points) or min(values) <= 0:
            continue
        begun, now = values[0], values[-1]
        grows = run.times > 1
        one_way = all(b > a if grows else b < a for a, b in pairwise(values))
        odd = now >= run.times * begun and now > run.past if grows else now <= run.times * begun and now < run.past
        if one_way and odd:
            yield info(
                f"{run.words} from line to line: {series.name} goes from {begun:.3g} to {now:.3g} in {len(values)} "
                f"lines",
                series,
                series.shown(now, f"about {begun:.3g}"),
                cause=f"few lines, so that it may be the beginning of a run; or {run.cause}",
                next_step="look at the lines that follow; lower the learning rate if it goes on",
            )


def _negative(log: RunLog) -> Iterator[Finding]:
    """A KL to the reference below 0 by an estimator that may be (D29 has those that cannot)."""
    series = log.get("kl")
    if series is None or not series.finite or series.formula == "k3" or log.events("negative_kl"):
        return
    now = median(series.finite)
    if now < -0.5:
        yield warning(
            f"the KL to the reference is negative: {series.name} is {now:.3g}",
            series,
            series.shown(now, ">= 0 over many samples"),
            link="ref",
            cause="what is sampled is not what the policy's probabilities say: other generation settings (top-k, "
            "top-p, a minimum length, padding or end tokens), or rows that are masked wrongly; rewards then pay for "
            "leaving the reference",
            next_step="sample with temperature 1, top_k 0, top_p 1; " + _RECORD,
        )


#: Steps (or lines) over which a reward that is to rise does; and what of itself is no rise.
LASTS, STILL = 150, 0.1
#: Steps in which a reward that does not rise is told of without a reason.
SURELY = 300
#: Shares of the spread from line to line: by which it does not move, and of a reward that is centred at 0.
OF_SPREAD, CENTRED = 0.5, 0.2


def _flat(log: RunLog) -> Iterator[Finding]:
    """A reward that is where it was after 150 steps and more, and not near a best of 1; or that does not rise in 100
    lines and more, with what tells why.
    """
    why = signs(log) if (rest := rests(log)) is not None else []
    if rest is not None and (why or rest.steps >= SURELY or len(rest.reward.finite) < LONG):
        yield finding(
            "info" if rest.is_little else "warning",
            f"the reward {'rises by little, if at all,' if rest.is_little else 'does not rise'} in {rest.steps} steps: "
            f"{rest.reward.name} is {rest.begun:.3g} in the first "
            f"third "
            f"and {rest.now:.3g} in the last" + (f"; {why[0]}" if why else ""),
            rest.reward.ended,
            rest.reward.shown(rest.now, f"> {rest.wanted:.3g}"),
            *(shown(f"and {number}.", words) for number, words in enumerate(why, 1)),
            cause="nothing that is paid for is learnt: " + (
                "what teaches is too little (prompts too hard or too easy for the group's answers to differ, answers "
                "that "
                "are cut before they end, too few samples in a step for the noise of their rewards)" if why else
                "too few samples in a step for the noise of their rewards, prompts too hard or too easy, a reward "
                "that does "
                "not tell answers apart"
            ) + "; or the policy hardly moves (a learning rate too small or run out, a KL that holds it)",
            next_step="larger groups and batches, prompts that are solved now and then; raise the token limit where "
            "answers "
            "are cut; score ten responses by hand",
        )  # fmt: skip
        return
    if (hardly := _hardly_rises(log)) is not None:
        yield hardly
        return
    series = log.get("reward")
    values = [] if series is None else series.finite
    first, last = (None, None) if series is None else (series.points[0].step, series.points[-1].step)
    if series is None or len(values) < 4 or first is None or last is None or last - first < LASTS:
        return
    if late_fall(series) is not None:
        return
    part = max(2, len(values) // 3)
    begun, now = median(values[:part]), median(values[-part:])
    middle, sigma = trends.spread(values)
    solved = min(values) >= 0 and max(values) <= 1 and now >= 0.8
    if (fell := _rose_and_fell(series)) is not None:
        yield fell
        return
    if rose(values):
        return
    moved = abs(now - begun) > max(STILL * max(abs(begun), abs(now)), OF_SPREAD * sigma)
    if solved or moved or trends.rises(values) or len(set(values)) == 1 or abs(middle) < CENTRED * sigma:
        return
    little = fmean(values[-part:]) - fmean(values[:part]) > PERHAPS * math.sqrt(
        (pvariance(values[:part]) + pvariance(values[-part:])) / part
    )
    yield info(
        f"the reward {'rises by little' if little else 'does not rise'}: {series.name} is {begun:.3g} at first and "
        f"{now:.3g} after {last - first} steps",
        series.ended,
        series.shown(now, f"> {begun:.3g}"),
        cause="nothing that is paid for is learnt: a learning rate too small (or run out), a KL that holds the policy, "
        "a reward that does not tell answers apart, prompts too easy or too hard; or what can be earned is earned",
        next_step="look at the spread of rewards within groups, at KL and grad_norm; score ten responses by hand",
    )


#: Parts of a run, and standard errors of one by which the best of them is over the first third and the last part.
BINS, SURELY_OVER = 10, 4.0


def _rose_and_fell(series: Series) -> Finding | None:
    """A reward that came up and went down again to about where it began, by more than chance."""
    points = [point for point in series.points if math.isfinite(point.value)]
    width, third = len(points) // BINS, len(points) // 3
    if len(points) < LONG or max(point.value for point in points) == min(point.value for point in points):
        return None
    values = [point.value for point in points]
    means = [fmean(values[at : at + width]) for at in range(0, len(values) - width + 1, width)]
    best = max(range(len(means)), key=means.__getitem__)
    over = SURELY_OVER * math.sqrt(pvariance(values) / width)
    begun, now = fmean(values[:third]), fmean(values[-width:])
    if not third <= (best + 1) * width <= len(values) - third or means[best] - max(begun, now) <= over:
        return None
    return info(
        f"the reward rose and fell back: {series.name} is {begun:.3g} in the first third, {means[best]:.3g} about step "
        f"{points[best * width + width // 2].step}, and {now:.3g} at last",
        points[best * width].where(series.name),
        series.shown(now, f"> {means[best]:.3g}"),
        shown("mean at its best", means[best]),
        cause="what was learnt was lost again: a learning rate too high, prompts that got harder, a policy that has "
        "left its reference; of few prompts in a step it may be their turn",
        next_step="go back to the checkpoint of its best; look at KL, entropy and lengths from there on",
    )


#: Of what rewards span, the part that is next to no rise, and where it is when it is not near its best; steps.
HARDLY, HALF = 0.03, 0.5


def _hardly_rises(log: RunLog) -> Finding | None:
    """A reward that has come up by next to nothing of what single answers get, over 100 lines and more."""
    series, top, bottom = log.get("reward"), log.get("reward_max"), log.get("reward_min")
    values = [] if series is None else series.finite
    if series is None or top is None or bottom is None or len(values) < LONG or not top.finite or not bottom.finite:
        return None
    # A single answer of all may get what the others cannot: what they span is what they span in the middle step.
    high, low = median(top.finite), median(bottom.finite)
    third = len(values) // 3
    begun, now = sum(values[:third]) / third, sum(values[-third:]) / third
    if (
        len(set(values)) == 1
        or not high > low
        or now >= low + HALF * (high - low)
        or not 0 <= now - begun < HARDLY * (high - low)
    ):
        return None
    return warning(
        f"the reward hardly rises: {series.name} is {begun:.3g} in the first third of {len(values)} lines and "
        f"{now:.3g} in the last, while single answers get {low:.3g} to {high:.3g}",
        series.ended,
        series.shown(now, f"> {begun + HARDLY * (high - low):.3g}"),
        shown("share of that span that it has gained", (now - begun) / (high - low), f"> {HARDLY:g}"),
        link="rewards",
        cause="most answers get the least there is, and few of them teach: prompts too hard for this model, groups "
        "whose answers are all alike, a learning rate too small, too few samples in a step",
        next_step="larger groups, prompts that are solved now and then; look at the share of groups without a spread",
    )


#: Of six lines and more a reward's fall: Kendall's tau, what is left of the first third, and what makes it a warning.
SIX, TAU, LEFT, LITTLE = 6, -0.6, 0.8, 0.6


def _falls(log: RunLog) -> Iterator[Finding]:
    """A reward that goes down from line to line, of fewer than a trend needs."""
    series = log.get("reward")
    values = [] if series is None else series.finite
    if series is None or not SIX <= len(values) < 12 or len(values) < len(series.points) or min(values) < 0:
        return
    if all(b < a for a, b in pairwise(values)) and values[-1] <= values[0] / 3:
        return  # told as a run of lines
    pairs = [(a, b) for at, a in enumerate(values) for b in values[at + 1 :]]
    tau = sum((b > a) - (b < a) for a, b in pairs) / len(pairs)
    third = len(values) // 3
    begun, now = sum(values[:third]) / third, sum(values[-third:]) / third
    if tau > TAU or now > LEFT * begun:
        return
    yield finding(
        "warning" if now <= LITTLE * begun else "info",
        f"the reward falls: {series.name} goes from {begun:.3g} to {now:.3g} over {len(values)} lines",
        series.ended,
        series.shown(now, f">= {begun:.3g}"),
        shown("Kendall's tau over the lines", round(tau, 2), f"> {TAU:g}"),
        link="rewards",
        cause="the policy moves away from what is rewarded: a learning rate too high, a turned sign, a KL or another "
        "term that outweighs it; or the prompts get harder",
        next_step="look at the KL and the length of the responses beside it; lower the learning rate if it goes on",
    )


#: What a share of right answers is called, and below which next to none is; lines in which that is no chance.
_SHARE = regex(
    r"(?i)(?:^|[/_ ])(?:acc|accuracy|correct(?:ness)?|success(?:_rate)?|solved?(?:_rate)?|pass(?:_rate|@1)?)"
    r"(?:_reward|/mean)?$"
)
NEXT_TO_NONE, SURE = 0.05, 20


def _hardly_any(log: RunLog) -> Iterator[Finding]:
    """A share of right answers that stays next to nothing in 5 lines and more."""
    for series in log.all("reward_function"):
        values = series.finite
        few = len(values) < LINES or (not any(values) and len(values) <= SHORT)
        if few or not _SHARE.search(series.name) or min(values) < 0 or max(values) > 1 or trends.rises(values):
            continue
        share = sum(values) / len(values)
        if share <= NEXT_TO_NONE:
            yield finding(
                "warning" if len(values) >= SURE else "info",
                f"hardly any answer is right: {series.name} is {share:.3g} over {len(values)} lines, and does not rise",
                series,
                series.shown(share, f"> {NEXT_TO_NONE:g}"),
                link="rewards",
                cause="the task is far too hard for this model, answers are cut or not in the form that is judged; a "
                "group without one right answer has no advantage, and nothing is learnt of it",
                next_step="easier prompts, or demonstrations first; score one right answer by hand",
            )
            return


def _lost_at_last(log: RunLog) -> Iterator[Finding]:
    """A reward or share of right answers whose last two values fall out of all before, to a tenth of them."""
    rights = [one for one in log.all("reward_function") if _SHARE.search(one.name)]
    for series in (*log.all("reward")[:1], *rights):
        *before, late, last = series.finite if len(series.finite) >= 10 else [0.0, 0.0, 0.0]
        span = max(before) - min(before)
        if not (last < late < min(before) - span and last <= 0.1 * median(before) and min(before) > 0):
            continue
        yield warning(
            f"{series.name} is lost at the end: {median(before):.3g} before, then {late:.3g} and {last:.3g}",
            series.ended,
            series.shown(last, f">= {min(before):.3g}"),
            cause="an update broke the policy (a learning rate too high, a batch of odd rewards, no KL), and responses "
            "are no answers any more; or the judge or engine broke",
            next_step="read a response of the last step; go back to the checkpoint before the fall, with a smaller "
            "learning rate or a KL term",
        )
        return


#: Nats per token that a loss of words has at most when it is learnt a little, and at least when it is next to a guess.
LEARNT, GUESS = 5.0, 8.5


def _to_noise(log: RunLog) -> Iterator[Finding]:
    """A loss of demonstrations that leaps from what a model has to what a guess among all tokens has."""
    loss = log.get("loss")
    values = [] if loss is None else loss.finite
    if loss is None or len(values) < 2 or log.has("reward") or not log.has("learning_rate"):
        return
    if 0 < values[0] < LEARNT and GUESS < values[-1] < MOST_NATS:
        yield warning(
            f"{loss.name} leaps from {values[0]:.3g} to {values[-1]:.3g}: next to a guess among all tokens (the log of "
            "the vocabulary is 10 to 12)",
            loss,
            loss.shown(values[-1], f"about {values[0]:.3g}"),
            link="optimizer",
            cause="an update or a load broke the weights: an optimizer whose master weights are not the model's "
            "(a checkpoint resumed in part, bf16 against fp32 copies), a gradient that is not scaled back, or a "
            "learning rate far too high",
            next_step="compare a weight before and after the first step: with a small rate it hardly changes; load "
            "without the optimizer's state",
        )


#: Lines, and the share of itself by which no mean of a batch is that still.
LINES, WAVERS = 5, 0.01


def _stands(log: RunLog) -> Iterator[Finding]:
    """A reward that hardly wavers from line to line, as the mean of a batch's responses would."""
    series = log.get("reward")
    values = [] if series is None else series.finite
    if series is None or len(values) < LINES or len(set(values)) < 3:
        return  # of one or two numbers L17 tells
    low, high = min(values), max(values)
    if high - low > WAVERS * abs(median(values)) or (low >= 0.9 and high <= 1):
        return
    yield info(
        f"the reward hardly wavers: {series.name} is {low:.4g} to {high:.4g} in all {len(values)} lines",
        series,
        series.shown(median(values), "another from batch to batch"),
        link="rewards",
        cause="responses are all alike (a policy that has collapsed onto one answer), or the judge answers every one "
        "alike (its input is cut, padded or of another template); nothing tells a good one from a bad one",
        next_step="read ten responses of different prompts; score two that differ",
    )


def _by_chance(log: RunLog) -> Iterator[Finding]:
    """A share of right pairs that is hardly more than chance, after many steps."""
    for series in log.all("reward_function"):
        last = series.points[-1].step
        values = series.finite[-10:]
        if not _RIGHT.search(series.name) or len(values) < 3 or last is None or last < TRAINED or log.has("reward"):
            continue
        if 0.4 < median(values) < CHANCE:
            yield info(
                f"{series.name} is {median(values):.3g} at step {last}: hardly more than chance tells pairs apart",
                series.ended,
                series.shown(median(values), f"> {CHANCE:g}"),
                link="trend",
                cause="chosen and rejected are told apart by nothing the model sees (both cut to the prompt they "
                "share, labels that are noise or swapped for a part), a learning rate too low or too high, or a head "
                "that gets no gradient",
                next_step="decode one pair as the model gets it; fit 100 pairs until they are right",
            )
