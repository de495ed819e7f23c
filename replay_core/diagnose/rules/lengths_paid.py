"""What lengths tell beside other figures: a limit that changes, a reward that is a line of the length."""

from __future__ import annotations

from itertools import pairwise
from statistics import median

import numpy as np

from replay_core.diagnose import trends
from replay_core.diagnose.finding import Finding, finding, shown, warning
from replay_core.diagnose.function_weights import function_weights
from replay_core.diagnose.rule import given, rule, skip_if
from replay_core.diagnose.rules.figures import together
from replay_core.diagnose.signals import RunLog, Series
from replay_core.regexes import regex

#: Steps before and from the change on; the share of those after it in which some answer is cut.
BEFORE, AFTER, MOSTLY = 2, 8, 0.75


@rule("L56", "the limit of tokens falls within the run", link="tokens", scope="signals",
      needs=("response_length_max", "truncated"), lasts=True, explains=("L08", "L09", "D20", "D01"),
      source="a longest response that is one number is a limit; a resume with another max_tokens")  # fmt: skip
def lower_limit(log: RunLog) -> Finding | None:
    """From some step on the longest response of every step is one and the same number (8 steps and more), and some
    answers are cut in three of four of them, while in every step before (2 and more) it was longer and no more than a
    tenth were cut: a warning. Answers that get longer are cut at a limit that was there before.
    """
    longest, cut = given(log.get("response_length_max")), given(log.get("truncated"))
    rows = together(longest, cut)
    skip_if(len(rows) < BEFORE + AFTER, f"needs the longest response and the share cut of {BEFORE + AFTER} steps")
    limit = rows[-1][1][0]
    at = next((n for n in range(len(rows), 0, -1) if rows[n - 1][1][0] != limit), 0)
    before, after = [row for _, row in rows[:at]], [row for _, row in rows[at:]]
    if len(before) < BEFORE or len(after) < AFTER:
        return None
    begun, now = max(share for _, share in before), [share for _, share in after]
    if min(most for most, _ in before) <= limit or begun > 0.1 or median(now) <= begun:
        return None
    if sum(share > 0 for share in now) < MOSTLY * len(now):
        return None
    step = rows[at][0]
    return warning(
        f"from step {step} on no response is longer than {limit:g} tokens, and {median(now):.0%} are cut: before, they "
        f"had up to {max(most for most, _ in before):g}",
        longest.of(longest.points[at:]),
        shown(f"{longest.name} before", max(most for most, _ in before)),
        shown(f"{longest.name} from step {step} on", limit, "as before"),
        shown(f"median {cut.name}", median(now), f"<= {begun:.2g}", cut.source),
        cause="another limit of tokens holds from there on: a stage or a resume with another setting, a budget that is "
        "taken from the prompt's, an engine that was started anew. What is cut has no end and, mostly, no answer",
        next_step=f"compare max_tokens (max_completion_length, max_response_length) of the requests before and behind "
        f"step {step}",
    )


#: Steps; the correlation of a line; how far the length has to have gone for what is paid; steps before it is learnt.
LINE_STEPS, LINE, MOVED, FIRST = 12, 0.98, 1.15, 5


@rule("L57", "a reward function is the length", link="rewards", scope="signals",
      needs=("reward_function|source_reward", "response_length"), lasts=True,
      explains=("L08", "L09", "L10", "L32", "D15", "D20", "D25"),
      source="length penalties and bonuses that outweigh what is right")  # fmt: skip
def pays_length(log: RunLog) -> Finding | None:
    """The mean of a reward function is a line of the mean length over 12 steps and more (correlation past .98, and of
    its changes from step to step), or a sum of that and another function's mean (but for a fiftieth), and it is part of
    the reward. Worth knowing; a warning where its spread (its logged std times its weight) is larger, in the first
    5 steps, than that of every other function that is paid for, and the length has gone the way
    that is paid (by 1.15 times, and by no chance): it is what is learnt.

    A part of the reward that is one positive number times the mean length, in each of 12 steps and more, and more than
    half of the reward in most, while responses have come to 1.15 times: a warning, an error where right answers fall
    meanwhile, to half of what they were at first.
    """
    length = given(log.get("response_length"))
    if (most := _most_of_it(log, length)) is not None:
        return most
    paid = function_weights(log)
    spreads = {one.name.removesuffix("/std"): one for one in log.all("reward_function_std")}
    looked = False
    for series in log.all("reward_function"):
        rows = [row for _, row in together(length, series)]
        if len(rows) < LINE_STEPS or len({row[1] for row in rows}) < LINE_STEPS // 2:
            continue
        looked = True
        lengths, values = [row[0] for row in rows], [row[1] for row in rows]
        r, slope = trends.line(lengths, values)
        changes, _ = trends.line(*([b - a for a, b in pairwise(each)] for each in (lengths, values)))
        # A share of right or well-formed answers lies within 0 and 1, and goes with the length by what is written.
        is_share = min(values) >= 0 and max(values) <= 1
        beside = ""
        if is_share:
            continue
        if abs(r) < LINE or abs(changes) < LINE:
            found = _with_another(log, series, length)
            if found is None:
                continue
            slope, beside = found
        weight = 1.0 if paid is None else paid.get(series.name, 1.0)
        if abs(weight) < 0.01:
            continue
        every = {
            name: median(one.finite[:FIRST]) * abs(1.0 if paid is None else paid.get(f"{name}/mean", 1.0))
            for name, one in spreads.items()
            if one.finite
        }
        own = every.pop(series.name.removesuffix("/mean"), None)
        outweighs = own is not None and own > max(every.values(), default=0.0)
        begun, now = trends.level(lengths[:3]), trends.level(lengths, 5)
        way = now / begun if slope * weight > 0 else begun / now
        went = min(begun, now) > 0 and way > MOVED and abs(trends.drift(lengths)) > trends.DRIFT_Z
        return finding(
            "warning" if outweighs and went else "info",
            f"{series.name} is the length{beside}: {slope * weight:+.2g} for each token"
            + (f", and responses go from {begun:.3g} to {now:.3g} tokens" if went else ""),
            series,
            shown(f"correlation of {series.name} and {length.name}", r, f"< {LINE:g}"),
            shown("paid for each token", slope * weight),
            *([shown("its spread, and the largest of the others", f"{own:.3g}, {max(every.values(), default=0.0):.3g}")]
              if own is not None else []),
            cause=("it outweighs what else is paid for" if outweighs else "it is part of what is paid for")
            + f": {'long' if slope * weight > 0 else 'short'} answers are what the policy is taught by it, right or "
            "not",
            next_step="score a right long and a right short answer by hand; give the length a smaller weight, or none "
            "below a limit",
        )  # fmt: skip
    skip_if(not looked, f"needs a reward function and the mean length of {LINE_STEPS} steps")
    return None


#: How exactly a part is so many times the length; what right answers fall to.
TIMES, FELL = 2e-3, 0.5
_RIGHT = regex(r"(?i)verifi|(?<!in)correct|acc(?:uracy)?(?:/|_|$)|(?<!no.)(?<!un)answer")


def _most_of_it(log: RunLog, length: Series) -> Finding | None:
    """A part of the reward that is so much for each token, and most of the reward."""
    # The whole of it is the largest that is logged: a reward for right answers alone is a part, too.
    whole = max(log.all("reward"), key=lambda one: median(one.finite or [0.0]), default=None)
    if whole is None:
        return None
    parts = [one for one in (*log.all("source_reward"), *log.all("reward_function")) if one is not whole]
    for part in parts:
        rows = [row for _, row in together(length, part, whole)]
        if len(rows) < LINE_STEPS or len({row[0] for row in rows}) < LINE_STEPS // 2 or min(r[0] for r in rows) <= 0:
            continue
        each = median(paid / tokens for tokens, paid, _ in rows)
        if each <= 0 or any(abs(paid - each * tokens) > TIMES * each * tokens for tokens, paid, _ in rows):
            continue
        shares = [paid / total for _, paid, total in rows if total > 0]
        lengths = [row[0] for row in rows]
        begun, now = trends.level(lengths[:3]), trends.level(lengths, 5)
        if len(shares) < len(rows) or not HALF < median(shares) <= 1 or now < MOVED * begun:
            continue
        rights = (one for one in (*log.all("reward"), *parts) if one not in (whole, part) and _RIGHT.search(one.name))
        fell = next((one for one in rights if _least(one) <= FELL * median(one.finite[:3] or [0.0]) > 0), None)
        lost = "" if fell is None else f"; {fell.name} falls from {median(fell.finite[:3]):.3g} to {_least(fell):.2g}"
        return finding(
            "warning" if fell is None else "error",
            f"the reward pays for length: {part.name} is {each:.3g} for each token in all {len(rows)} steps, and "
            f"{median(shares):.0%} of {whole.name}, while responses go from {begun:.3g} to {now:.3g} tokens{lost}",
            part,
            shown(f"{part.name} / {length.name}", each, "0 or less", part.source),
            shown(f"its share of {whole.name}, median of steps", median(shares), f"< {HALF:g}"),
            whole.shown(trends.level(whole.finite, 3), f"was {trends.level(whole.finite[:3]):.3g}"),
            *([] if fell is None else [fell.shown(_least(fell), f"about {median(fell.finite[:3]):.3g}")]),
            cause="a length penalty whose sign is turned, or a bonus for length that outweighs what is right: the "
            "policy is taught to write long, and the score rises by that alone",
            next_step="look at the sign and weight of the length's term; compare the reward without it",
        )  # fmt: skip
    return None


def _least(series: Series) -> float:
    """The lowest median of three steps in a row."""
    values = series.finite
    return min((median(values[n : n + 3]) for n in range(len(values) - 2)), default=float("inf"))


#: What a sum of two figures may leave of a third (rms), and the share of it that is the length's.
EXACT, HALF = 0.02, 0.5


def _with_another(log: RunLog, series: Series, length: Series) -> tuple[float, str] | None:
    """(what a token is paid, which other function stands beside it) of a function that is a sum of both."""
    for other in log.all("reward_function"):
        rows = [row for _, row in together(series, length, other)]
        if other.name == series.name or len(rows) < LINE_STEPS:
            continue
        table = np.array(rows, dtype=np.float64)
        y, columns = table[:, 0] - table[:, 0].mean(), table[:, 1:] - table[:, 1:].mean(0)
        if np.linalg.matrix_rank(columns) < 2 or not y.std() > 0:
            continue
        parts = np.linalg.lstsq(columns, y, rcond=None)[0]
        left = float((y - columns @ parts).std())
        if left < EXACT * y.std() and abs(parts[0]) * columns[:, 0].std() > HALF * y.std():
            return float(parts[0]), f" and {parts[1]:.2g} times {other.name}"
    return None


#: The share of responses that may be aborted or empty by the end, what it is at most at first, and steps.
ABORTED, ABORTED_BAD, AT_FIRST, ABORTED_STEPS = 0.05, 0.25, 0.5, 8


@rule("L65", "responses come back aborted or empty", link="tokens", scope="signals", needs=("aborted",),
      lasts=True, explains=("L05", "L08", "L09", "D20", "D37"), source="verl: response/aborted_ratio")  # fmt: skip
def aborted(log: RunLog) -> Finding | None:
    """The share of responses without a token is over .05 in the last tenth of 8 steps and more (their median): a
    warning, over .25 an error. An engine aborts requests at a weight update, a time-out or a limit of the prompt.
    """
    series = given(log.get("aborted"))
    values = series.finite
    skip_if(len(values) < ABORTED_STEPS, f"needs {ABORTED_STEPS} steps")
    now = trends.level(values, max(5, len(values) // 10))
    if not ABORTED < now <= 1:
        return None
    begun = trends.level(values[: max(3, len(values) // 10)])
    rises = begun < AT_FIRST * now and trends.rises(values)
    bad = [point for point in series.points if point.value > ABORTED]
    length = log.get("response_length")
    return finding(
        "error" if now > ABORTED_BAD else "warning",
        f"{now:.0%} of the responses come back aborted or empty: {series.name} is {now:.3g}"
        + (f", and was {begun:.2g} at first" if rises else ""),
        series.of(bad),
        series.shown(now, f"< {ABORTED:g}"),
        *([] if length is None else [length.shown(trends.level(length.finite))]),
        cause="the engine aborts requests (at each update of its weights, by a time-out, as prompts leave no room), "
        "and what it gives back is taken for a response of no tokens instead of being generated again or gone on with: "
        "that part of the batch teaches nothing, and means over the others look well",
        next_step="look at the finish reasons of one step; resume aborted requests (partial rollouts) or generate them "
        "again; leave samples without a token out of the batch and of the group's mean",
    )
