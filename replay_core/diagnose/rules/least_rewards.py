"""A reward that is the least there is, line after line: hardly an answer earns anything, and the few that do teach."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import islice

from replay_core.diagnose import trends
from replay_core.diagnose.finding import Finding, share, shown, warning
from replay_core.diagnose.rule import given, rule, skip_if
from replay_core.diagnose.signals import Point, RunLog
from replay_core.regexes import regex

#: Lines before it is no beginning, and the share of them (and of the last third) that has the least.
LINES, MOST = 50, 0.8
#: What a line says in a word of why: 'outcome': 'no_answer_in_required_format'.
_WORD = regex(r"""['"](?P<of>\w{3,40})['"]:\s?['"](?P<word>[a-z][a-z0-9]*(?:[_ -][a-z0-9]+){0,8})['"]""")
#: Lines whose words are read, and the share of them with one word that makes it their reason.
_LOOKED, _ALIKE = 400, 0.8
_OF_FORM = regex(r"(?i)format|pars|extract|tag|answer_not|no_answer|missing")


@rule("L50", "nearly every answer gets the least reward", link="rewards", scope="signals", needs=("reward",),
      explains=("L40", "L01", "D01"), source="a judge's words printed with each answer; sparse rewards")  # fmt: skip
def least_rewards(log: RunLog) -> Finding | None:
    """The reward is the least it ever is in .8 of 50 lines and more, and of their last third, by no rising trend: a
    warning. What the lines say of why in a word (`'outcome': 'wrong_format'`), where most say the same, is told.
    """
    series = given(log.get("reward"))
    values = series.finite
    skip_if(len(values) < LINES, f"needs the reward of {LINES} lines")
    least, last = min(values), values[-(len(values) // 3) :]
    at_least = values.count(least)
    if (
        at_least == len(values)
        or at_least < MOST * len(values)
        or last.count(least) < MOST * len(last)
        or trends.rises(values)
    ):
        return None
    points = [point for point in series.points if point.value == least]
    word = _word_of(points)
    of_form = word is not None and _OF_FORM.search(word[1]) is not None
    return warning(
        f"nearly every answer gets the least reward: {series.name} is {least:.4g} in {at_least} of {len(values)} lines"
        + ("" if word is None else f", {word[0]!r} of which is {word[1]!r} in {word[2]}"),
        points[0].where(series.name),
        series.shown(least, f"> {least:.4g} for more of them"),
        shown("lines that get more", share(len(values) - at_least, len(values))),
        cause="the answers are not in the form that the judge looks for (a tag that is not closed, a box, a last "
        "line), so "
        "that right ones earn nothing either: the prompt does not ask for it, the token limit cuts it off, or the "
        "model "
        "is too small to keep it"
        if of_form
        else "the judge does not find what it pays for (a form of answer, a tag, another column), answers are cut "
        "off, or "
        "the task is too hard for this model: groups in which nobody earns anything teach nothing",
        next_step="read ten of these answers beside what the judge parses; a demonstration of the form in the "
        "prompt, a "
        "few steps of SFT on it, a higher token limit, or a part of the reward for the form alone",
        steps=[point.step for point in points],
    )


def _word_of(points: Sequence[Point]) -> tuple[str, str, int] | None:
    """The name and word that most of these lines say, and in how many; None where they say none or several."""
    wanted = {point.line for point in points[:_LOOKED] if point.line is not None}
    path = points[0].path
    if not wanted or path is None:
        return None
    said: Counter[tuple[str, str]] = Counter()
    try:
        with open(path, encoding="utf-8", errors="replace", newline="\n") as file:
            for number, line in enumerate(islice(file, max(wanted)), 1):
                if number in wanted:
                    said.update({(found["of"], found["word"]) for found in _WORD.finditer(line[:4000])})
    except OSError:
        return None
    (of, word), lines = next(iter(said.most_common(1)), (("", ""), 0))
    return (of, word, lines) if lines >= _ALIKE * len(wanted) else None
