"""A run that no longer does anything but wait: for a policy, a batch, a worker that does not come."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from replay_core.diagnose.finding import Finding, shown, warning
from replay_core.diagnose.rule import rule
from replay_core.diagnose.signals import RunLog, Told
from replay_core.regexes import regex

#: Lines that say the same before it is a habit; and seconds between the first and the last of them before it is a
#: stall.
LINES, LONG = 5, 900.0
#: Without a clock, so many lines in a row.
MANY = 20
_CLOCK = regex(r"\b(\d{1,2}):(\d{2}):(\d{2})\b")
_ELAPSED = regex(r"\[([\d:]+)(?:<|, )\?")
_FOR = regex(r"\b(\d{2,7}(?:\.\d+)?)\s?(s|sec|secs|seconds|min|mins|minutes|h|hours)\b")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}


@rule("L26", "the run waits and goes no further", link="time", scope="signals", needs=("event:waiting|event:stalled",),
      source="prime-rl#2912: an orchestrator that waits for a policy after the trainer has finished")  # fmt: skip
def waits(log: RunLog) -> Iterator[Finding]:
    """Lines that tell of waiting (the same words, 5 and more) after the last metric, over 15 minutes and more by their
    clock or by what they say, or 20 and more without one: a warning. So is a bar of data preparation (Map, Filter) that
    stands at 0 after 10 minutes and more.
    """
    last = log.last_lines()
    yield from _stands_at_0(log)
    after = [one for one in log.events("waiting") if (one.point.line or 0) > last.get(one.point.path, 0)]
    by_words: dict[str, list[Told]] = {}
    for one in after:
        words = re.sub(r"[\d.:]+", "#", one.text.splitlines()[0])
        by_words.setdefault(words, []).append(one)
    if not by_words:
        return
    same = max(by_words.values(), key=len)
    waited = _elapsed([one.text for one in same])
    if len(same) < LINES or (len(same) < MANY if waited is None else waited < LONG):
        return
    first = same[0]
    words = _CLOCK.sub("", first.text.splitlines()[0]).strip()[:120]
    how_long = "" if waited is None else f" for {waited / 3600:.2g} hours" if waited >= 5400 else (
        f" for {waited / 60:.2g} minutes")  # fmt: skip
    yield warning(
        f"the run only waits{how_long}: {len(same)} lines say so and no metric follows: {words!r}",
        first.point.where(),
        evidence=[shown("lines that say the same", len(same), f"< {LINES}", f"from line {first.point.line}"),
                  shown("seconds between the first and the last", waited, f"< {LONG:g}")],
        cause="a hang or a deadlock: what it waits for has ended or never comes (a trainer that has finished or died, "
        "a worker that is stuck, a message that was lost), and nothing times out",
        next_step="look at the other process: py-spy dump --pid PID on both sides shows where each stands",
    )  # fmt: skip


def _stands_at_0(log: RunLog) -> Iterator[Finding]:
    """A bar of the data at 0, and no metric behind it."""
    last = log.last_lines()
    bars = [one for one in log.events("stalled") if (one.point.line or 0) > last.get(one.point.path, 0)]
    if not bars:
        return
    bar, since = bars[-1], _ELAPSED.search(bars[-1].text)
    forked = any("just got forked" in one.text for one in log.events("notice"))
    yield warning(
        f"the data workers hang: {bar.text.split(':')[0].strip()} stands at 0 after {since[1] if since else 'minutes'}"
        + (", behind a fork of a tokenizer that had used its threads" if forked else ""),
        bar.point.where(),
        evidence=[shown("line", bar.text[:160], None, f"line {bar.point.line}")],
        cause=("a forked worker waits for a lock of the tokenizer's threads, which the fork did not take along (or for "
               "another lock that was held: a logger's, OpenMP's)" if forked else
               "a worker never began: a lock that was held when it was forked, a file or network that does not "
               "answer, or a function that takes as long for its first batch"),
        next_step="TOKENIZERS_PARALLELISM=false before the first import, num_proc=1 to see whether it is the fork; "
        "py-spy dump --pid PID of a worker shows where it stands",
    )  # fmt: skip


def _elapsed(texts: list[str]) -> float | None:
    """Seconds from the first line to the last, by the clock at their beginning, or the longest wait that they tell."""
    clocks = [int(m[1]) * 3600 + int(m[2]) * 60 + int(m[3]) for text in texts if (m := _CLOCK.search(text[:60]))]
    told = [float(m[1]) * _SECONDS[m[2][0]] for text in texts for m in _FOR.finditer(text)]
    spans = [sum((b - a) % 86400 for a, b in pairwise(clocks))] if len(clocks) > 1 else []
    return max([*map(float, spans), *told], default=None)
