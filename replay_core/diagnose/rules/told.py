"""What a run says itself of what it trains on: weights, checkpoints, samples, rewards, and how it is run."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from replay_core.diagnose.failed_scores import count_of
from replay_core.diagnose.finding import SEVERITIES, Evidence, Finding, finding, shown
from replay_core.diagnose.log_steps import steps_of
from replay_core.diagnose.rule import rule
from replay_core.diagnose.signals import RunLog, Told
from replay_core.diagnose.told_texts import MEANINGS, MeaningOfLines
from replay_core.documents.diagnosis import Severity
from replay_core.dumps.log_events import KEPT
from replay_core.dumps.told_lines import key_of
from replay_core.regexes import regex

_SOURCE = (
    "the texts of verl, TRL, prime-rl, verifiers, OpenRLHF, slime, miles, AReaL, open-instruct, NeMo-RL, SkyRL, ROLL, "
    "Megatron-LM, ms-swift, vLLM, SGLang and transformers"
)
#: Steps that show it, and their share, before it holds throughout.
STEPS, HALF = 3, 0.5
#: Characters of a line that are shown, and other lines of one finding.
_LONGEST, _OTHERS = 200, 3


@rule("L70", "a line says that weights are not those that are meant", link="logprobs", scope="signals",
      needs=("event:told_weights",), lasts=True, explains=("D09", "D12", "D13", "D29"), source=_SOURCE)  # fmt: skip
def of_weights(log: RunLog) -> Iterator[Finding]:
    """Lines of trainers and engines that say that weights are missing, random, unused, skipped or not sent: a warning;
    nothing of what is well (a tied head alone, rotary frequencies and scales, heads that another task has). An update
    that is skipped, or weights that the engine does not know, in half of the steps and 3 and more are an error.
    """
    yield from _told("told_weights", log)


@rule("L71", "a line says that a checkpoint was not found", link="optimizer", scope="signals",
      needs=("event:told_resume",), source=_SOURCE)  # fmt: skip
def of_resume(log: RunLog) -> Iterator[Finding]:
    """Lines that say that a checkpoint was to be loaded and none was found: a warning where steps stand before it, or
    the line or the run's settings name a step to go on from, since the run begins anew. Else worth knowing: each first
    start says so that would go on where it can. So is one in a log whose first step is not its first (a checkpoint was
    found all the same).
    """
    begins = [one.points[0].step for one in log.signals() if one.points and one.points[0].step is not None]
    for one in _told("told_resume", log):
        later = (bool(begins) and not log.is_counted and min(begins) > _LATE) or not _goes_on_from(log)
        yield finding("info", one.claim, one.where, *one.evidence, link=one.link, cause=one.cause,
                      next_step=one.next_step, steps=one.steps) if later else one  # fmt: skip


#: A checkpoint of a step, and what settings call it.
_OF_A_STEP = regex(r"(?i)(?:step|iter|iteration|checkpoint|ckpt|epoch)[_-]?0*[1-9]")
_FROM = ("resume_from_path", "resume_from_checkpoint", "resume_path", "resume_from", "load_checkpoint_path", "load")
_FROM_STEP = ("resume_step", "ckpt_step", "load_step")


def _goes_on_from(log: RunLog) -> bool:
    """Whether something says that there was a checkpoint to go on from."""
    told = log.events("told_resume")
    named = log.algorithm.word(*_FROM)
    return (
        any(one.point.step is not None or _OF_A_STEP.search(one.text.splitlines()[0]) for one in told)
        or (log.algorithm.number(*_FROM_STEP) or 0) > 0
        or (named is not None and _OF_A_STEP.search(named) is not None)
    )


#: A first step from which on a run has gone on from somewhere.
_LATE = 100


@rule("L72", "a line says that samples are left out, cut or changed", link="tokens", scope="signals",
      needs=("event:told_samples",), source=_SOURCE)  # fmt: skip
def of_samples(log: RunLog) -> Iterator[Finding]:
    """Lines that say that samples are dropped, cancelled, cut, masked whole or tokenised anew: single ones are worth
    knowing, many are a warning (3 to 20 lines, by what they tell). A data set of which a filter leaves less than half
    is a warning, less than 9 of 10 worth knowing; so is a step of which less than a fifth is trainable, in 3 lines and
    more.
    """
    yield from _told("told_samples", log)
    yield from _filtered(log)


@rule("L73", "a line says that rewards are none", link="rewards", scope="signals",
      needs=("event:told_rewards",), explains=("L08",), source=_SOURCE)  # fmt: skip
def of_rewards(log: RunLog) -> Iterator[Finding]:
    """Lines that say that samples get no reward, or 0 because something failed: a warning from 2 or 3 lines on, an
    error where no function is known for the data in half of the steps and 3 and more.
    """
    yield from _told("told_rewards", log)


@rule("L74", "a line says that it runs otherwise than it could", link="time", scope="signals",
      needs=("event:told_running",), source=_SOURCE)  # fmt: skip
def of_running(log: RunLog) -> Iterator[Finding]:
    """Lines of what is slower or other than it could be: kernels that fall back to a slow way, and engines that are
    gone and not started again, are a warning; all others, which healthy runs print too, are worth knowing.
    """
    yield from _told("told_running", log)


def _told(kind: str, log: RunLog) -> Iterator[Finding]:
    """One finding for each link: the gravest row of the table, with what else is told there as evidence."""
    lines: dict[str, list[Told]] = {}
    for one in log.events(kind):
        if (key := key_of(one.text)) is not None and key in MEANINGS:
            lines.setdefault(key, []).append(one)
    found: dict[str, list[tuple[Severity, str]]] = {}
    for key, told in lines.items():
        known = MEANINGS[key]
        if all(_is_mild(known, one) for one in told):
            continue
        found.setdefault(known.link, []).append((_severity(known, key, told, log), key))
    for link, rows in found.items():
        (severity, key), *others = sorted(rows, key=lambda each: (SEVERITIES.index(each[0]), -len(lines[each[1]])))
        known, told = MEANINGS[key], lines[key]
        first = next((one for one in told if not _is_mild(known, one)), told[0])
        yield finding(
            severity,
            f"{_claim(known, told, log)}{_numbers(key, told)}{_how_often(told, log)}",
            first.point.where(),
            shown("line", _words(first), None, f"line {first.point.line}"),
            shown("lines that say so", len(told), "0", "log"),
            *_beside([each for _, each in others], lines),
            link=link,
            cause=known.cause,
            next_step=known.next_step,
            steps=steps_of(one.point for one in told),
        )


def _claim(known: MeaningOfLines, told: list[Told], log: RunLog) -> str:
    if key_of(told[0].text) == _CALLS and not _grow(told, log):
        return "some calls of tools cannot be read"
    if known.over is not None and _is_over(known.over, told[-1], log):
        return known.claim.partition(":")[0] + ", and was started again"
    return known.claim


def _words(one: Told) -> str:
    return one.text.splitlines()[0][:_LONGEST]


def _beside(keys: Sequence[str], lines: dict[str, list[Told]]) -> Iterator[Evidence]:
    for key in keys[:_OTHERS]:
        one = lines[key][0]
        yield shown("said beside it", f"{MEANINGS[key].claim}: {_words(one)}"[: 2 * _LONGEST], None,
                    f"line {one.point.line}")  # fmt: skip


def _is_mild(known: MeaningOfLines, one: Told) -> bool:
    return known.mild is not None and known.mild.search(one.text) is not None


def _severity(known: MeaningOfLines, key: str, told: list[Told], log: RunLog) -> Severity:
    bad = [one for one in told if not _is_mild(known, one)]
    if not bad or (known.over is not None and _is_over(known.over, bad[-1], log)):
        return "info"
    if key == _FEW and _trainable(told) >= _FIFTH:
        return "info"
    if known.throughout is not None and _holds(bad, log):
        return known.throughout
    if key == _RANDOM and _is_no_beginner(log):
        return "info"
    if key == _CALLS and not _grow(bad, log):
        # A policy that learns to call tools gets some of them wrong.
        return "info"
    if key == _NAN and bad[-1].point.step is None:
        # Engines are warmed up with weights that are none.
        return "info"
    if key in _WAITS and (bad[-1].point.line or 0) < log.last_lines().get(bad[-1].point.path, 0):
        return "info"
    return known.severity if len(bad) >= known.fewest and _are_many(known, key, bad, log) else "info"


_CALLS = "samples.tool_call"
#: What is over where steps follow.
_WAITS = ("running.mount", "running.stacks")
_RANDOM, _NAN = "weights.random", "weights.nan"
#: Nats; a model whose weights are random has about the logarithm of its vocabulary, 10 and more.
_KNOWS = 4.0


def _is_no_beginner(log: RunLog) -> bool:
    """Whether the entropy of the first step is that of a model which was trained."""
    entropy = log.get("entropy")
    return entropy is not None and bool(entropy.finite) and 0 <= entropy.finite[0] < _KNOWS


#: Lines before the first step, of the data set, before they are many; samples a step that lines count.
_OF_DATA, _EACH = 50, 8.0


def _are_many(known: MeaningOfLines, key: str, bad: list[Told], log: RunLog) -> bool:
    """Whether they are more than a small part of what steps have: most runs lose a few samples now and then."""
    # Ray says one of many alike, and how often the others were said.
    lines, each = float(sum(map(count_of, bad))), known.each
    if key in _COUNTS:
        lines, each = float(_counted(key, bad)), each or _EACH
    if not each:
        return True
    if bad[-1].point.step is None:
        return lines >= _OF_DATA
    return lines >= each * _steps(log)


#: How many times as many lines the last third of a log's steps has before they grow.
_MORE = 3


def _grow(told: Sequence[Told], log: RunLog) -> bool:
    """Whether the last third of the steps has many times the lines of the first."""
    steps, third = [one.point.step or 0 for one in told], _steps(log) / 3
    first = min((one.points[0].step or 0 for one in log.signals() if one.points), default=0)
    early = sum(step - first < third for step in steps)
    return sum(step - first >= 2 * third for step in steps) > _MORE * (early + 1)


def _are_cut(kind: str, log: RunLog) -> bool:
    """Whether a step has more such lines than are kept of it."""
    return max(Counter(one.point.step for one in log.events(kind)).values(), default=0) >= KEPT


def _is_over(words: re.Pattern[str], last: Told, log: RunLog) -> bool:
    """Whether the log says behind the last such line that it is over."""
    return any(
        (one.point.line or 0) > (last.point.line or 0) and words.search(one.text) is not None
        for one in log.events("engine_again", "notice", "error", "told_running")
    )


def _steps(log: RunLog) -> int:
    """Steps that the log tells of."""
    return max((len(one.points) for name in ("reward", "loss", "pg_loss") for one in log.all(name)), default=0)


def _holds(told: list[Told], log: RunLog) -> bool:
    steps = {one.point.step for one in told}
    return len(steps) >= STEPS and len(steps) >= HALF * _steps(log)


def _how_often(told: list[Told], log: RunLog) -> str:
    """In how many lines, and since when, in words."""
    first, last = told[0].point, told[-1].point
    since = "before the first step" if first.step is None else f"after {_step(first.step, log)}"
    if len(told) == 1:
        return f" (line {first.line}, {since})"
    till = "" if last.step in (None, first.step) else f", the last after {_step(last.step or 0, log)}"
    over = "over " if _are_cut(told[0].kind, log) else ""
    return f" ({over}{len(told)} lines, from line {first.line} on, {since}{till})"


def _step(step: int, log: RunLog) -> str:
    # Lines without a number are counted: that count is no step.
    return f"line {step + 1} of metrics" if log.is_counted else f"step {step}"


_FEW, _FIFTH = "samples.few_trainable", 0.2
_OF = regex(r"(?i)\bonly (\d+)/(\d+)")
#: What lines count of what they leave out, by their key.
_COUNTS = {
    "samples.cancelled": (regex(r"(?i)cancell?ed (\d+)"), "{} of them in all"),
    "samples.leftover": (regex(r"(?i)(\d+) samples are dropped|\(dropping (\d+)\)"), "{} samples in all"),
    "samples.gap_masked": (regex(r"(?i)masked (\d+) sequences"), "{} samples in all"),
    "samples.stale": (regex(r"(?i)(?:evicted|evicting|removing) (\d+) stale|dropping stale"), "{} of them in all"),
}


def _trainable(told: Sequence[Told]) -> float:
    """The share that is trainable, over all such lines."""
    pairs = [(int(m[1]), int(m[2])) for one in told if (m := _OF.search(one.text))]
    return sum(part for part, _ in pairs) / max(sum(of for _, of in pairs), 1)


def _numbers(key: str, told: Sequence[Told]) -> str:
    """What the lines count, in words; nothing of most."""
    if key in (_FEW, "samples.images"):
        return f", {_trainable(told):.2g} of all in these lines"
    if key in _COUNTS:
        return ", " + _COUNTS[key][1].format(_counted(key, told))
    return ""


def _counted(key: str, told: Sequence[Told]) -> int:
    """How many samples the lines speak of: what each counts, or itself."""
    found = (_COUNTS[key][0].search(one.text) for one in told)
    return sum(int(m[m.lastindex]) if m.lastindex else 1 for m in found if m is not None)


#: How many samples a data set has, before and behind a filter.
_NUMBER = regex(r"(?i)^\W*((?:\w+ ){0,2})dataset len(?:gth)?: ?(\d+)")
_BOTH = regex(r"(?i)origin length: ?(\d+), filtered dataset length: ?(\d+)")
#: What is left of a data set, below which it is worth knowing and a warning.
FEWER, FEW = 0.9, 0.5


def _filtered(log: RunLog) -> Iterator[Finding]:
    """A data set of which a filter leaves little."""
    worst: tuple[float, int, int, Told] | None = None
    before: list[int] = []
    for one in log.events("told_samples"):
        if key_of(one.text) != "samples.number":
            continue
        if (both := _BOTH.search(one.text)) is not None:
            all_, left = int(both[1]), int(both[2])
        elif (number := _NUMBER.search(one.text)) is None:
            continue
        elif "filter" not in number[1].lower():
            before.append(int(number[2]))
            continue
        elif len(before) != 1:
            # Two sets are read at once, and nothing tells which of them this is.
            continue
        else:
            all_, left = before.pop(), int(number[2])
        if 0 <= left < all_ and (worst is None or left / all_ < worst[0]):
            worst = left / all_, all_, left, one
    if worst is None or worst[0] >= FEWER:
        return
    share, all_, left, one = worst
    yield finding(
        "warning" if share < FEW else "info",
        f"a filter leaves {left:,} of the data set's {all_:,} samples ({share:.1%})",
        one.point.where(),
        shown("line", _words(one), None, f"line {one.point.line}"),
        shown("share that is left", share, f">= {FEW:g}", "log"),
        link="masks",
        cause="a limit of length that is too small for these prompts (counted with the chat template and images), a "
        "tokenizer that makes more tokens of them, or rows that fail as they are looked at: what is trained on is a "
        "small and other part of the data",
        next_step="raise max_prompt_length (max_length), or look at the lengths of some prompts: print what the filter "
        "counts",
        steps=(),
    )
