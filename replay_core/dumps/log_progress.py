"""How far a log says its run is, and what stands behind that: a bar at 202 of 5,100 and nothing more.

    progress = StepsSaid()
    for line in lines: progress.take(line)
    progress.told()     # "202/5100" and where, or None

A bar that is drawn, a counter that a trainer prints (`step 12/50`, `current_steps` of `total_steps`), or a total that
is said once and the step that was logged last. Of several bars it is the one that has run the longest: those of a
validation, of data and of weights that are loaded are short, and drawn again and again.
"""

from __future__ import annotations

from itertools import pairwise

from msgspec import Struct

from replay_core.dumps.log_lines import TrainerLine
from replay_core.regexes import regex

_BAR = regex(
    r"^(?P<label>[^|\d]{0,80}?)\W{0,4}\d{1,3}%\|[^|]{0,200}\| ?(?P<at>\d{1,12})/(?P<of>\d{1,12}) "
    r"\[(?P<took>[\d:]{4,12})<(?P<left>[\d:?]{1,16}), "
)
_DRAWN = regex(r"\d{1,3}%\|[^|]{0,200}\| ?(?P<at>\d{1,9})/(?P<of>\d{1,9})\b[^|]{0,80}$")
#: Bars of what is no training: weights, data, an engine's start, one batch of responses, a validation.
_NO_TRAINING = regex(
    r"(?i)load|map|filter|fetch|download|generat|tokeni|process|captur|adding|convert|sav|upload|eval|valid|test|pars|"
    r"extract|shard|split|pack|compil|warm|read|writ|creat|sampl|rollout|infer|predict|score|comput|reset|prompts"
)
#: A counter of a line: Step 3/100, step 3 of 100, iteration 3/ 100 |, [tag]  3/50 | loss=...
_COUNTER = regex(
    r"(?i)(?:\b(?:global[_ ])?(?:step|iter(?:ation)?|update)s?\s{0,4}[:=#]?\s{0,4}|^(?:\[[^\]]{1,60}\])?\s{0,8})[\[(]?"
    r"(?P<at>\d{1,9})\s?(?:/|of)\s{0,8}(?P<of>\d{1,9})(?=[\])\s|:,]|$)(?!\s+\d{1,2}:\d\d)"
)
#: What a counter of the training's own steps stands behind, where others count an epoch's or the data's.
_OF_TRAINING = ("Train ", "train ", "Train_", "train_", "Training ", "training ")
#: LLaMA-Factory's rows and ms-swift's.
_ROW = regex(
    r"""["']current_steps["']:\s?(?P<at>\d{1,9}), ["']total_steps["']:\s?(?P<of>\d{1,9})"""
    r"""|["']global_step/max_steps["']:\s?["'](?P<swift>\d{1,9})/(?P<max>\d{1,9})"""
)
#: What is said once: transformers, verl, and trainers of one's own.
_TOTAL = regex(
    r"(?i)\btotal[ _](?:number of )?(?:training |train |optimization |optimizer )?_?steps?['\"]?\s{0,4}[:=]\s{0,4}"
    r"(?P<of>\d[\d,]{0,11})\b"
)
_STARTS = regex(r"(?i)\b(?:start(?:ing|ed)?|begin(?:ning)?|launch(?:ing)?) (?:\w+ ){0,2}(?:re-?)?training\b|\*{3,} "
                r"Running training \*{3,}")  # fmt: skip
#: What stands behind a process that has ended: a tracker's farewell, a shell, a scheduler, `time`.
_OVER = regex(
    r"^wandb: (?:\W{0,4}(?:Run (?:history|summary):|View run|View project at|You can sync this run|Find logs at"
    r"|Synced \d|Waiting for W&B process))|^real\s+\d+m[\d.]+s$|^\[?\W{0,3}(?:exit(?:ed)?(?: with)? (?:status|code)"
    r"|return code)\b"
    r"|^(?:\([\w.-]{1,40}\) )?\[?\w[\w.-]{0,40}@[\w.-]{1,60}[: ]\S{0,120}[$#](?: |$)"
    r"|(?i:^\W{0,8}(?:job|run|script) (?:has )?(?:ended|exited|stopped|terminated)\b)"
)
_HINT = regex(
    r"/\s{0,8}\d|\bof \d|[Ss]teps|[Tt]raining|TRAINING|^wandb: |^real|[Ee]xit|@\S+[$#]|return code"
    r"|(?i:early|reached|val_only|ended|stopped)"
)
#: Seconds and lines for which other lines go on before a bar of steps is said to stand, and steps that would fit in.
_STANDS, _A_DAY, _STANDS_LINES, _MANY_STEPS, _FIRST, _FORM = 1800, 86400, 10, 20, 360, regex(r"[\d\W]+")
#: Lines with a clock that make a text a program's log.
_CLOCK, _CLOCKS = regex(r"\b\d\d:\d\d:\d\d\b"), 3
#: Lines that are looked at whole.
_LONGEST = 4000
#: What says that it was to end before its last step.
_MEANT = regex(
    r"(?i)early[ _-]?stop(?!ping_)|stopp?ing (?:training )?early|reached (?:the )?(?:max|target|best)|val_only"
)
#: Steps of a bar, and of a counter: five parts of a script are numbered, too; and how often a counter has to rise.
_FEWEST, _MANY, _RISES = 2, 10, 3


class _Count(Struct):
    at: int
    of: int
    line: int
    took: float = 0.0
    stride: int = 1
    """Steps from the last line but one that tells of it to the last."""
    rises: int = 0
    rose: int = 0
    before: int = 0
    """The lines on which it last rose, and rose before that."""


class Silence(Struct, frozen=True):
    """Seconds between two lines with a clock, one behind the other, and those lines."""

    seconds: float
    begins: int
    ends: int


class HowFar(Struct, frozen=True):
    """How far it came: step `at` of `of`, on a line; what is behind."""

    at: int
    of: int
    line: int
    starts: int
    """How often training was begun."""
    over: int | None
    """The line behind it that tells that the process has ended."""
    over_text: str
    rose: int
    """The last line but one on which it rose: what stands before did not end the run."""
    stood: int = 0
    """Seconds for which other lines go on behind it."""
    silence: Silence = Silence(0.0, 0, 0)
    """The longest one of the log."""


def step_of_bar(text: str) -> tuple[int, int] | None:
    """The step of a training's bar that a line begins with, and of how many; None of any other line."""
    bar = _BAR.match(text[:_LONGEST].lstrip()) if "|" in text else None
    return None if bar is None or _NO_TRAINING.search(bar["label"]) else (int(bar["at"]), int(bar["of"]))


class BarredSteps:
    """The steps that bars have for rows that number none: a bar on the row's own line, one that was drawn before it and
    wiped away, or the next one behind it.

    steps = BarredSteps()
    for line in lines: steps.hear(line), and steps.take(line, counted) of a row
    steps.told()        # {counted step: step}; empty where a row has none, or bars are of several totals, or fall
    """

    def __init__(self) -> None:
        self._steps: dict[int, tuple[int, int]] | None = {}
        #: The row that has no bar yet, and its stream; whether the rows are those of one stream.
        self._open: tuple[int, str] | None = None

    def take(self, line: TrainerLine, counted: int) -> None:
        """A row of metrics that numbers no step."""
        if self._steps is None:
            return
        if self._open is not None and self._open[0] != counted:
            self.give_up()
            return
        bar = step_of_bar(line.text) or step_of_bar(line.bar)
        if bar is None:
            self._open = (counted, line.stream) if counted not in self._steps else None
        elif self._steps.setdefault(counted, bar) != bar:
            self.give_up()

    def hear(self, line: TrainerLine) -> None:
        """Any other line."""
        if self._open is not None and line.stream == self._open[1] and (bar := step_of_bar(line.text)) is not None:
            if self._steps is not None:
                self._steps[self._open[0]] = bar
            self._open = None

    def give_up(self) -> None:
        """A row says its step itself, or has no bar."""
        self._steps, self._open = None, None

    def begin_at(self, counted: int) -> None:
        """Leave out the rows before."""
        if self._steps is not None:
            self._steps = {step - counted: bar for step, bar in self._steps.items() if step >= counted}

    def told(self) -> dict[int, int]:
        """The step by counted one."""
        steps = dict(sorted((self._steps or {}).items()))
        if self._open is not None and len(steps) > 1:
            # Behind the last row of a run that was ended no bar is drawn any more.
            (one, of), (other, _) = [*steps.values()][-2:]
            if other + other - one > of:
                return {}  # past the bar's end: its bars are drawn before the rows they are of
            steps[self._open[0]] = other + other - one, of
        numbers = [at for at, _ in steps.values()]
        rise = all(one < other for one, other in pairwise(numbers))
        one_bar = len({of for _, of in steps.values()}) == 1
        return {step: at for step, (at, _) in steps.items()} if rise and one_bar else {}


def is_other_bar(text: str) -> bool:
    """Whether a line begins with a bar of what is no training: weights that are loaded, data, an evaluation."""
    bar = _BAR.match(text[:_LONGEST].lstrip())
    return bar is not None and _NO_TRAINING.search(bar["label"]) is not None


class StepsSaid:
    """Takes every line in order."""

    def __init__(self) -> None:
        self._bars: dict[int, _Count] = {}
        self._counter: dict[int, _Count] = {}
        self._total: tuple[int, int] | None = None
        self._starts: list[int] = []
        self._over: tuple[int, str] | None = None
        self._is_meant = False
        #: By stream and form of a line, the last clock, the seconds since the first, and lines; behind the last rise.
        self._since: dict[tuple[str, str], list[float]] = {}
        self._clocked = 0
        #: The form, clock and line of the last line with a clock; the longest silence between two of one form.
        self._spoke: tuple[tuple[str, str], float, int] | None = None
        self._silence = Silence(0.0, 0, 0)
        self._last: tuple[int, str] = 0, ""
        #: The last line of a bar or of metrics.
        self._worked = 0
        #: The line of a bar that is no training's and has not come to its end.
        self._inside = 0

    def take(self, line: TrainerLine) -> None:
        """One line; lines of metrics, too."""
        text = line.text
        if len(text) > _LONGEST:
            text = text[:_LONGEST]
        if text:
            self._last = line.number, text
            before = "" if line.stamp else text
            if text.startswith("{'"):
                self._worked = line.number
            if (clock := _CLOCK.search(line.stamp or text[:80])) is not None:
                self._clocked += self._clocked < _CLOCKS
                self._go_on(line.stream, before[: clock.start()], clock[0], line.number)
        if "%|" in text and (drawn := _DRAWN.search(text)) is not None:
            self._inside = line.number if 0 < int(drawn["at"]) < int(drawn["of"]) else 0
        if _HINT.search(text) is None:
            return
        self._is_meant = self._is_meant or _MEANT.search(text) is not None
        if "|" in text and (bar := _BAR.match(text.lstrip())) is not None:
            self._worked = line.number
            self._since.clear()  # a validation, or a batch of responses, is work, too
            if not _NO_TRAINING.search(bar["label"]):
                self._count(self._bars, int(bar["at"]), int(bar["of"]), line.number, _seconds(bar["took"]))
            return
        if (row := _ROW.search(text)) is not None:
            self._count(self._counter, int(row["at"] or row["swift"]), int(row["of"] or row["max"]), line.number)
        elif _COUNTER.search(text) is not None:
            # A line may count the steps of an epoch, and behind them those of the run.
            counters = [*_COUNTER.finditer(text)]
            for counter in [one for one in counters if text[: one.start()].endswith(_OF_TRAINING)] or counters:
                self._count(self._counter, int(counter["at"]), int(counter["of"]), line.number)
        elif (total := _TOTAL.search(text)) is not None:
            self._total = int(total["of"].replace(",", "")), line.number
        if _STARTS.search(text) is not None:
            self._starts.append(line.number)
        if _OVER.search(text) is not None:
            self._over = line.number, text.strip()[:160]

    def _go_on(self, stream: str, before: str, clock: str, number: int) -> None:
        """A line with a clock behind the last rise: of one stream and form, as others are of other time zones."""
        now = _seconds(clock)
        key = stream, _FORM.sub("", before)[:24]
        if self._spoke is not None and self._spoke[0] == key:
            silent = (now - self._spoke[1]) % 86400
            # Of two processes one may write late: a clock that goes back a little is no day.
            # Lines of metrics and bars between them have no clock, and are no silence.
            if _A_DAY / 2 > silent >= self._silence.seconds and not self._spoke[2] < self._worked < number:
                self._silence = Silence(silent, self._spoke[2], number)
        self._spoke = key, now, number
        since = self._since.setdefault(key, [now, 0.0, 0.0])
        since[1] += (now - since[0]) % 86400
        since[0] = now
        since[2] += 1

    def _stood(self, count: _Count) -> int:
        """Seconds for which lines go on and no step is taken, many times what a step takes; 0 of any other run."""
        longest = max((took for _, took, lines in self._since.values() if lines >= _STANDS_LINES), default=0.0)
        # The first step compiles, loads and samples: what it takes nothing tells.
        a_step = count.took / count.at if count.at else _FIRST
        return int(longest) if _STANDS <= longest < _A_DAY and longest > _MANY_STEPS * a_step else 0

    def _count(self, known: dict[int, _Count], at: int, of: int, line: int, took: float = 0.0) -> None:
        if of < _FEWEST or at > of:
            return
        count = known.setdefault(of, _Count(at, of, line, took))
        # A summary counts something else of as many: `zero-reward steps: 9/50`. A restart counts from the beginning.
        if at >= count.at or at <= 1:
            if at > count.at:
                self._since.clear()
                count.stride = at - count.at
                count.rose, count.before, count.rises = line, count.rose, count.rises + 1
            count.at, count.line, count.took = at, line, max(took, count.took)

    def told(self, last_step: int | None = None, at_line: int = 0) -> HowFar | None:
        """How far the run came. `last_step`: the last step that a metric tells, where steps are numbered."""
        count = max(self._bars.values(), key=lambda one: (one.took, one.of), default=None)
        # A counter counts up: one that is told once, or that stands, is a share of something else. A bar that is back
        # at
        # its beginning, while a counter has risen, is one of each step's own.
        counts = (one for one in self._counter.values() if one.rises >= _RISES and one.of >= _MANY)
        # One that ends below the last step that is logged counts something else: the steps of an epoch.
        counts = (one for one in counts if last_step is None or last_step <= one.of)
        counted = max(counts, key=lambda one: (one.line, one.of), default=None)
        if count is None or (count.at == 0 and counted is not None):
            count = counted
        if count is None and self._total is not None:
            of, line = self._total
            at = last_step if last_step is not None and last_step <= of else 0
            count = _Count(at, of, max(line, at_line if last_step is not None else line))
        if count is None or count.of < _FEWEST:
            return None
        if count.at and count.of - count.at < count.stride:
            count.at = count.of  # told of every so many steps, the last of which it is
        over = self._over if self._over is not None and self._over[0] > count.line and not self._is_meant else None
        return HowFar(
            count.at, count.of, count.line, len(self._starts), None if over is None else over[0],
            "" if over is None else over[1], count.before, self._stood(count), self._silence,
        )  # fmt: skip

    def ends(self) -> HowFar | None:
        """Of a program's log that tells of no step and no failure, where it ends; None of any other text. Its lines
        have clocks, or training was begun and the last line is a bar that has not come to its end.
        """
        if self._clocked < _CLOCKS and not (self._starts and self._inside == self._last[0] > 0):
            return None
        number, text = self._last
        return HowFar(0, 0, number, len(self._starts), number, text.strip()[:160], 0)


def _seconds(clock: str) -> float:
    seconds = 0.0
    for part in clock.split(":"):
        seconds = 60 * seconds + (int(part) if part.isdigit() else 0)
    return seconds
