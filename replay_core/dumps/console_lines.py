"""Lines that a home-made trainer prints: a step's number, then names and numbers in whatever order and punctuation.

[iter 00003] rew=0.41 kl=0.002 loss=-0.1        step 3 | loss 0.5 | reward 0.1
GRPO:  3%|█  | 3/100 [00:41<22:10, 13.7s/it, loss=0.5, reward=0.1]     what a progress bar has behind its rate
[step 3/100] rewards=[0.1, 0.5] loss=0.5         what each answer earned: its mean is the step's
Step 3/100 - loss: 0.5 - reward: 0.1            2026-01-01 10:00:03 INFO trainer: step=3, loss = 0.5 (1.3s)
    ╰─ i3-math | Ratio 29.2% | Reward 0.25      below a step: what one environment of several has of it

A line counts only if one of its names is one that trainers watch: prose has numbers, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from statistics import fmean

from replay_core.regexes import regex

_NUMBER = r"[-+]?(?:\d[\d,]*(?:\.\d*)?(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|nan|inf(?:inity)?)"
_STEP = regex(
    r"(?<![A-Za-z0-9])(step|iter(?:ation)?|update|(?:^|(?<=[|\]]\s)|(?<=\beval\s)|(?<=\btrain\s)|(?<=\bval\s))it)[\s_]?\s{0,8}[:=#]?\s{0,8}(\d{1,12})(?![\d.]*\.\d|\w)(?:\s?/\s?\d{1,12})?",
    re.IGNORECASE,
)
#: Only where a log numbers nothing else: many print a summary of the epoch between their steps.
_EPOCH = regex(r"(?<![A-Za-z0-9])(epoch|episode)\s{0,8}[:=#]?\s{0,8}(\d{1,12})(?![\d.]*\.\d|\w)(?:\s?/\s?\d{1,12})?",
               re.IGNORECASE)  # fmt: skip
#: Between two metrics; a comma inside a number is none.
_BETWEEN = regex(r"\s[-–]{1,3}\s|[|;()\[\]{}]|,(?!\d)|,\s")
#: What a number is counted in, behind it: `37.5 GiB`, `24.1G`, `1128 tokens/s`, `8.3s`.
_UNIT = r"(?:[GM]i?B?|ms|s|it/s|tok(?:en)?s?/s(?:ec)?|TFLOPS?|samples/s)"
_ALONE = regex(
    rf"^\s{{0,40}}([A-Za-z][\w./@%-]{{0,60}}(?:\s[A-Za-z][\w./@%-]{{0,30}}){{0,3}}?)(?:\s{{0,8}}[:=]\s{{0,8}}|\s{{1,8}})({_NUMBER}\s?%|{_NUMBER})\s?({_UNIT})?\s{{0,40}}$",
    re.IGNORECASE,
)
#: What a figure of held-out samples has before its name, and what a line of them before its step: `val loss 0.7`,
#: `[eval] step 20 | acc 0.6`.
_HELD_OUT = r"val|valid|validation|eval|evaluation|test|dev|held[-_ ]?out"
_OF_HELD_OUT = regex(rf"(?i)^\s{{0,4}}(?:{_HELD_OUT})[/_ .-]")
_OF_AN_EVALUATION = regex(rf"(?i)(?:^|[\s\[(|])(?:{_HELD_OUT})(?: (?:at|after|of))?[\]):|]?[\s|\[(-]{{1,4}}$")
#: How far a number may be off, behind it: `0.41±0.03`.
_OFF = regex(rf"({_NUMBER})\s?(?:±|\+/-|\+-)\s?{_NUMBER}", re.IGNORECASE)
#: A mean with the most beside it: `len=12.2/18`. Whole numbers are a share, of which only the parts are told.
_OF_MOST = regex(r"(\d\.\d{1,12})/\d{1,9}(?:\.\d{1,12})?(?=[\s,;|)]|$)")
_PAIR = regex(
    rf"(?<![\w.])((?:(?:{_HELD_OUT})\s(?=[A-Za-z]))?[A-Za-z][\w./@-]{{0,60}})(?:\s{{0,8}}[:=]\s{{0,8}}|\s{{1,8}})({_NUMBER}%|{_NUMBER})({_UNIT})?(?=[\s,]|$)",
    re.IGNORECASE,
)
_WATCHED = regex(
    r"(?:^|[\s_./-])(?:loss|losses|rewards?|rew|return|returns|score|acc|accuracy|kl|entropy|grad[\s_]?norm|gnorm|pg|r)"
    r"(?:$|[\s_./@-](?:mean|avg|std|max|min|total|train|ema|ref|old)$)",
    re.IGNORECASE,
)
#: A progress bar that is handed metrics: its count stands for the step. One bar is printed many times over.
BAR = r"\|\s{0,4}(\d{1,12})/\d{1,12} \[[\d:?]{1,12}<[\d:?]{1,12}, (?:[^,\]=]{1,24}, )?([^\]]{0,2000}=[^\]]{0,2000})\]"
_BAR = regex(BAR)
#: What a list of settings has beside its numbers.
_SETTING = regex(r"(?:coef|coefficient|beta|target|type|weight|scale|max|init)", re.IGNORECASE)


def console_line(line: str) -> tuple[int | None, dict[str, float]]:
    """The step and the metrics of a line of a home-made trainer; no metrics for any other line."""
    if "<" in line and (bar := _BAR.search(line)):
        values = dict(pairs_in(bar[2]))
        return (int(bar[1]), values) if any(map(_WATCHED.search, values)) else (None, {})
    return _numbered(line, _STEP)


def is_bar(line: str) -> bool:
    """Whether a line's metrics are those that a progress bar was handed."""
    return "<" in line and _BAR.search(line) is not None


_OF_A_SOURCE = regex(r"^\s{1,40}[╰├└]─{1,2} ?([A-Za-z][\w./@-]{0,60}?)\s{1,40}\|(.{1,1000})$")


def source_line(line: str) -> dict[str, float]:
    """What one environment of a step's several has of its metrics, each under its name; none of any other line."""
    if "─" not in line or (found := _OF_A_SOURCE.match(line)) is None:
        return {}
    values = {f"{found[1]}/{name}": value for name, value in pairs_in(found[2])}
    return values if any(is_watched(name.rpartition("/")[2]) for name in values) else {}


#: The batches of an epoch counted beside it: `Epoch:[1/2](20/400) loss:0.1`, `Epoch [1/2] Step [20/400], loss: 0.1`.
OF_EPOCH = regex(
    r"epoch\s{0,4}:?\s{0,4}[\[(](\d{1,9})/\d{1,9}[\])],?\s{0,4}(?:(?:step|iter|batch)\s{0,4}:?\s{0,4})?[\[(](\d{1,9})/(\d{1,9})[\])]",
    re.IGNORECASE,
)


def epoch_line(line: str) -> tuple[int | None, dict[str, float]]:
    """The same of a line that numbers an epoch or an episode, or the batches of one."""
    if (found := OF_EPOCH.search(line)) is not None:
        values = dict(pairs_in(line[found.end() :]))
        watched = any(map(is_watched, values))
        return (max(int(found[1]) - 1, 0) * int(found[3]) + int(found[2]), values) if watched else (None, {})
    return _numbered(line, _EPOCH)


def _numbered(line: str, number: re.Pattern[str]) -> tuple[int | None, dict[str, float]]:
    found = number.search(line)
    if found is None:
        return None, {}
    for part in (line[found.end() :], line[: found.start()]):
        values = dict(pairs_in(part.replace(" with loss ", " loss ")))
        if any(map(is_watched, values)):
            if _OF_AN_EVALUATION.search(line[: found.start()]):
                values = {name if _OF_HELD_OUT.match(name) else f"eval/{name}": it for name, it in values.items()}
            return int(found[2]), values
    return None, {}


#: What stands in brackets behind a metric is of it: `reward 0.62 (std 0.1)`, `len: 310 [min 12, max 900]`.
_STATISTIC = rf"(?:std|min|max|mean|median)\s{{0,4}}[:=]?\s{{0,4}}{_NUMBER}"
_OF_IT = regex(
    rf"(?<![\w./@-])([A-Za-z][\w./@-]{{0,60}})\s{{0,8}}[:=]?\s{{0,8}}{_NUMBER}\s?[(\[]\s?({_STATISTIC}(?:[\s,;/|]{{1,3}}{_STATISTIC}){{0,4}})\s?[)\]]",
    re.IGNORECASE,
)
_HAS_STATISTIC = regex(r"(?i)[(\[]\s?(?:std|min|max|mean|median)")
_ITS = regex(rf"(std|min|max|mean|median)\s{{0,4}}[:=]?\s{{0,4}}({_NUMBER})", re.IGNORECASE)


#: What each answer of a step's group or batch earned, listed: of it the mean is the step's.
_LISTED = regex(
    r"(?<![\w.])((?:\w{0,20}_)?[Rr]ewards)\s?[=:]\s?\[((?:\s?['\"]?-?\d{1,9}(?:\.\d{0,18})?['\"]?,?){2,256})\]"
)
_IN_A_LIST = regex(r"-?\d{1,9}(?:\.\d{0,18})?")


#: A count of a count, with its share behind it: `Trainable 340/512 (66.4%)`.
_COUNTED = regex(r"(?<![\w.])([A-Za-z][\w.-]{0,40})\s{1,4}(\d{1,9})/(\d{1,9}) \((\d{1,3}(?:\.\d{1,6})?)%\)")
#: Hundredths that a printed share may be off.
_ROUNDED = 0.51


def is_watched(name: str) -> bool:
    """Whether it is one that trainers watch, and no setting of it."""
    return _WATCHED.search(name) is not None and _SETTING.search(name) is None


def pairs_in(text: str) -> Iterator[tuple[str, float]]:
    """Names and numbers of a text, in whatever punctuation."""
    if "[" in text and (listed := _LISTED.search(text)):
        numbers = [float(each) for each in _IN_A_LIST.findall(listed[2])]
        yield listed[1], fmean(numbers)
        text = text[: listed.start()] + text[listed.end() :]
    if ("(" in text or "[" in text) and _HAS_STATISTIC.search(text):
        for of in _OF_IT.finditer(text):
            yield from ((f"{of[1]}_{name.lower()}", float(said.replace(",", ""))) for name, said in _ITS.findall(of[2]))
        text = _OF_IT.sub(lambda of: of[0][: of.start(2) - of.start() - 1].rstrip("([ "), text)
    if "%)" in text:
        for name, part, of, said in _COUNTED.findall(text):
            if int(of) and abs(100 * int(part) / int(of) - float(said)) <= _ROUNDED:
                yield name, int(part) / int(of)
    if "/" in text:
        text = _OF_MOST.sub(r"\1", text)
    if "±" in text or "+/-" in text or "+-" in text:
        text = _OFF.sub(r"\1", text)
    for piece in _BETWEEN.split(text):
        whole = _ALONE.match(piece)
        for name, said, unit in [whole.groups()] if whole else _PAIR.findall(piece):
            yield name, _number(name, said.replace(",", ""), unit or "")


#: A name that says itself what it is counted in.
_IN_HUNDREDTHS = regex(r"(?i)%|perc|pct")


#: What is counted in bytes: memory that is printed in MiB is told in GiB, as most print it.
_OF_MEMORY = regex(r"(?i)mem|vram")


def _number(name: str, said: str, unit: str) -> float:
    """A number as it is printed; a share that is printed in hundredths, `Truncation 8.3%`, is a share, and memory of so
    many MiB is GiB.
    """
    if unit[:1] == "M" and _OF_MEMORY.search(name):
        return float(said) / 1024
    if not said.endswith("%"):
        return float(said)
    return float(said[:-1]) / (1 if _IN_HUNDREDTHS.search(name) else 100)
