"""Signals: what a run logged, as one series over its steps per signal, under the frameworks' own names.

signals = Signals.of(run)                     from a log, a metrics file, or a dump's recorded metrics
for log in signals.logs:                      one per run that the path holds: two logs side by side are two
    log.get("grad_norm").points               a value per step: step, value, line, file
    log.micros("pg_loss")                     the values of the micro-batches
    log.events("oom")                         what the log tells beside numbers
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import fmean, median
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from replay_core.diagnose import signal_names, trends
from replay_core.diagnose.algorithm import Algorithm, stated_by
from replay_core.diagnose.finding import Evidence, Where
from replay_core.diagnose.printed import FINE_ALONE, decimals, decimals_of_zero, is_rounding_of, is_zero_rounded, untold
from replay_core.dumps.log_text import COUNTED
from replay_core.dumps.metric_tables import OF_A_RUN
from replay_core.dumps.metric_tables import SUFFIXES as TABLES
from replay_core.dumps.metrics import NUMBERED
from replay_core.errors import RldbgError
from replay_core.records import Inline, Record, Run, Selection, TensorRef
from replay_core.regexes import regex

#: Records that hold scalars of a step. The others hold tensors, and are the batch rules' to read.
STAGES = frozenset({"training_metrics", "loss", "optimizer"})
#: A recorded gradient's own norm stands beside the gradient: told where the run logs none.
_NORMS = "gradient"
#: Who trains: a rollout's or a reference's own numbers are none of the update's.
_TRAINED = ("actor", "critic", None)
#: What a critic's own numbers are called: beside those of the policy they are no numbers of the policy.
_OF_CRITIC = {
    "grad_norm": "critic/grad_norm", "clipped_grad_norm": "critic/grad_norm_clipped", "lr": "critic/lr",
    "learning_rate": "critic/lr", "loss": "critic/vf_loss", "clip_fraction": "critic/vf_clipfrac",
    "clipfrac": "critic/vf_clipfrac",
}  # fmt: skip
#: Of how many first or last values, and of what parts of all, rules take medians.
_LAST, _PARTS = (3, 5, 10), (1, 2, 3, 4)
#: Of a run of ten thousand files a few stand for all: every point has its own path.
_SHOWN_PATHS = 4
#: Figures of nothing known that are kept, and known ones of a log that needs no others.
_OTHERS, _FEW = 12, 4
#: What wandb's export has beside a figure: the least and largest of the points that one of its rows stands for.
_EXTREMES = ("__MIN", "__MAX")
#: What runs call the pass over their data, or how much of it is behind them.
_EPOCH = regex(r"^(?:metrics\.)?(?:train(?:ing|er)?/)?epoch$")
#: Points of what is only known by a word.
_TOLD = 4
#: The notes of runs whose steps were counted, not read.
_COUNTED = frozenset({COUNTED, NUMBERED})


class Point(Struct, frozen=True):
    """One value and where it was said."""

    step: int | None
    value: float
    micro: int | None = None
    rank: int | None = None
    line: int | None = None
    path: str | None = None

    @property
    def place(self) -> tuple[int | None, int | None, int | None]:
        """Which micro-batch it is of: what other signals say of it has the same place."""
        return self.step, self.micro, self.rank

    def where(self, name: str | None = None) -> Where:
        return Where(step=self.step, micro=self.micro, rank=self.rank, tensor=name, line=self.line, path=self.path)


class Series(Struct, frozen=True):
    """One signal over the steps, as one framework's name has it. One point per step, in order of the steps."""

    signal: str
    name: str
    framework: str | None
    formula: str
    points: tuple[Point, ...]

    @property
    def values(self) -> list[float]:
        return [point.value for point in self.points]

    @property
    def finite(self) -> list[float]:
        return [value for value in self.values if math.isfinite(value)]

    @property
    def last(self) -> Point:
        return self.points[-1]

    @property
    def place(self) -> Where:
        """Where it begins."""
        return self.points[0].where(self.name)

    def of(self, points: Iterable[Point]) -> Series:
        """The series of these points alone."""
        return replace(self, points=tuple(points))

    @property
    def source(self) -> str:
        """How a finding cites it: the framework's own name, and its formula."""
        named = f"{self.name} ({self.framework})" if self.framework else self.name
        return f"{named} = {self.formula}" if self.formula else named

    def shown(self, value: float, expected: str | None = None) -> Evidence:
        """What the series has come to, as evidence: cited by its source, and by the line that says this very number, or
        as what it is of several.
        """
        return Evidence(
            self.name, value, expected, ", ".join(each for each in (self.source, self._said(value)) if each)
        )

    def _said(self, value: float) -> str:
        """Where a number of the series stands: its last line where that says it, else the steps it is the median of,
        else another line that says it, else the steps it was made of.
        """
        points = [point for point in self.points if math.isfinite(point.value)]
        if self.last.value == value or not points:
            return f"line {self.last.line}" if self.last.line else ""
        for count in sorted({n for n in (*_LAST, *(len(points) // n for n in _PARTS)) if 1 < n <= len(points)}):
            for part in (points[-count:], points[:count]):
                values = [point.value for point in part]
                if value in (median(values), fmean(values)):
                    return f"{'median' if value == median(values) else 'mean'} of {_spanned(part)}"
        told = next((point for point in reversed(points) if point.value == value), None)
        if told is None:
            return f"of {_spanned(points)}" if len(points) > 1 else ""
        return f"line {told.line}" if told.line else f"step {told.step}" if told.step is not None else ""

    def shown_at(self, point: Point, expected: str | None = None, name: str | None = None) -> Evidence:
        """One of its points as evidence, cited by its line in the log."""
        return Evidence(name or self.name, point.value, expected, f"line {point.line}" if point.line else self.source)

    def between(self, over: float = -math.inf, under: float = math.inf) -> Series:
        """The series of the points whose value lies between."""
        return self.of(point for point in self.points if over < point.value < under)

    def steps(self, over: float = -math.inf, under: float = math.inf) -> list[int]:
        """The steps whose value lies between."""
        return [point.step for point in self.between(over, under).points if point.step is not None]

    def first(self, over: float = -math.inf, under: float = math.inf) -> Where:
        """Where a value first lies between."""
        return self.between(over, under).place

    @property
    def ended(self) -> Ended:
        """The series, placed at its last point."""
        return Ended(self)


def _spanned(points: Sequence[Point]) -> str:
    """`steps 491-500`, or how many values where no steps are known."""
    first, last = points[0].step, points[-1].step
    return f"{len(points)} values" if first is None or last is None else f"steps {first}-{last}"


class Ended(Struct, frozen=True):
    """A series whose place is its end: what it has come to, over all of its steps."""

    series: Series

    @property
    def place(self) -> Where:
        return self.series.last.where(self.series.name)

    def steps(self) -> list[int]:
        return self.series.steps()


class Told(Struct, frozen=True):
    """A text of the log: an event of a kind, or a warning of the trainer."""

    kind: str
    text: str
    point: Point


class RunLog(Struct):
    """The signals of one run, and what its log tells beside numbers."""

    paths: list[str] = field(default_factory=list)
    is_counted: bool = False
    """Steps are counted, not read: the first logged step need not be the first step."""
    told: list[Told] = field(default_factory=list)
    algorithm: Algorithm = field(default_factory=lambda: Algorithm({}))
    rounded: str = ""
    """What of it was rounded away for printing, in words; nothing in most."""
    run: str = ""
    """Which of several runs of one table it is."""
    epochs: dict[int | None, float] = field(default_factory=dict)
    """By step, how many passes over the data the run says that it has begun or made."""
    samples: Callable[[], Iterator[Any]] = lambda: iter(())
    """The samples (`StepBatch`) that the run recorded beside what it logged; none of a log alone."""
    _points: dict[tuple[str, str], dict[tuple[Any, Any, Any], Point]] = field(default_factory=dict)
    _names: dict[tuple[str, str], signal_names.Name] = field(default_factory=dict)
    _series: dict[str, list[Series]] | None = None
    _others: dict[str, dict[tuple[Any, Any, Any], Point]] = field(default_factory=dict)
    """Figures of nothing known, by name."""

    def has(self, signal: str) -> bool:
        """Whether it has the signal; `event:KIND` asks for what a log tells beside numbers."""
        if signal.startswith("event:"):
            return bool(self.events(signal.removeprefix("event:")))
        return any(known == signal for known, _ in self._points)

    def all(self, signal: str) -> list[Series]:
        """Every series of the signal, the preferred name first."""
        if self._series is None:
            self._series = {}
            for known, raw in sorted(self._points, key=self._order):
                name = self._names[known, raw]
                steps = _by_step(self._points[known, raw].values())
                self._series.setdefault(known, []).append(
                    Series(known, raw, name.framework, name.formula, tuple(steps))
                )
        return self._series.get(signal, [])

    def _order(self, key: tuple[str, str]) -> tuple[str, bool, int, int, str]:
        """What is logged in less than half as many steps as another of its signal comes last, as an evaluation of
        every tenth step is; then the preferred names, and what is logged in more steps.
        """
        most = max(len(points) for (signal, _), points in self._points.items() if signal == key[0])
        count = len(self._points[key])
        return key[0], 2 * count < most, self._names[key].rank, -count, key[1]

    def get(self, signal: str) -> Series | None:
        """The signal under its preferred name, or None."""
        return next(iter(self.all(signal)), None)

    def level(self, signal: str) -> Iterator[tuple[Series, float]]:
        """The signal, and what it has come to (`trends.level`), where it has a finite value at all."""
        series = self.get(signal)
        if series is not None and series.finite:
            yield series, trends.level(series.finite)

    def at(self, signal: str, step: int | None) -> Point | None:
        """The signal's value of a step."""
        series = self.get(signal)
        return None if series is None else next((point for point in series.points if point.step == step), None)

    def micros(self, signal: str) -> list[Point]:
        """The signal's values of micro-batches, in order."""
        found = [
            point
            for (known, _), points in self._points.items()
            if known == signal
            for point in points.values()
            if point.micro is not None
        ]
        return sorted(found, key=lambda p: (_first(p.step), _first(p.micro), _first(p.rank)))

    def of_ranks(self, signal: str) -> dict[str, dict[int, list[Point]]]:
        """What ranks that log for themselves tell of the signal, by name and rank."""
        found: dict[str, dict[int, list[Point]]] = {}
        for (known, raw), points in self._points.items():
            for point in points.values() if known == signal else ():
                if point.rank is not None and point.micro is None:
                    found.setdefault(raw, {}).setdefault(point.rank, []).append(point)
        return found

    def signals(self) -> Iterator[Series]:
        """Every series, in the order in which a step computes them, the machine's last."""
        order = {signal: number for number, signal in enumerate((*signal_names.ORDER, *signal_names.SIGNALS))}
        for signal in sorted({known for known, _ in self._points}, key=lambda known: order.get(known, len(order))):
            yield from self.all(signal)

    def last_lines(self) -> dict[str | None, int]:
        """By file, the last line that logs a value."""
        found: dict[str | None, int] = {}
        for points in self._points.values():
            for point in points.values():
                found[point.path] = max(found.get(point.path, 0), point.line or 0)
        return found

    def events(self, *kinds: str) -> list[Told]:
        return [told for told in self.told if told.kind in kinds]

    def warnings(self, *words: str) -> list[Told]:
        """The trainer's own warnings that hold any of these words."""
        return [told for told in self.events("warning") if any(word in told.text for word in words)]

    def add(self, ref_name: str, point: Point, trl: bool = False) -> None:
        """A value of the run. Figures of nothing known are kept apart."""
        if ref_name.endswith(_EXTREMES):
            return
        if _EPOCH.match(ref_name):
            self.epochs[point.step] = point.value
        name = signal_names.named(ref_name.rpartition(OF_A_RUN)[2] if self.run else ref_name, trl)
        if name is None:
            other = ref_name.removeprefix("metrics.")
            if (other in self._others or len(self._others) < _OTHERS) and not signal_names.NO_FIGURE.match(other):
                self._others.setdefault(other, {})[point.step, point.micro, point.rank] = point
        else:
            if name.formula == signal_names.COMPLEMENT:
                point = replace(point, value=1 - point.value)
            key = name.signal, ref_name.removeprefix("metrics.")
            self._names[key] = name
            self._points.setdefault(key, {})[point.step, point.micro, point.rank] = point
            self._series = None

    def take_others(self) -> None:
        """Take figures of nothing known into a log that has few others. A mean, least and most that name nothing are
        the reward's, where they are all there is.
        """
        others, self._others = self._others, {}
        beside = {*others, *(name for signal, name in self._points if signal.startswith("held_out"))}
        for name in sorted(others):
            if signal_names.OF_A_SET.match(name) and any(name + part in beside for part in signal_names.BESIDE_A_SET):
                self._names["held_out", name] = signal_names.Name("held_out", "slime")
                self._points["held_out", name] = others.pop(name)
                self._series = None
        for key in [key for key, name in self._names.items() if name.rank == signal_names.BY_A_WORD]:
            # A configuration that is printed has such names, too.
            if len(self._points[key]) < _TOLD:
                others[key[1]] = self._points.pop(key)
        self._take_the_one_role()
        known = {signal for signal, _ in self._points} - signal_names.MACHINE
        bare = {name: signal_names.UNNAMED[name] for name in others if name in signal_names.UNNAMED}
        is_bare = not known and "reward" in bare.values() and all(
            name in bare or name in ("std", "median", "count", "n") for name in others
        )  # fmt: skip
        if len(known) >= _FEW:
            return
        for name, points in others.items():
            signal = bare[name] if is_bare and name in bare else signal_names.OTHER
            self._names[signal, name] = signal_names.Name(signal)
            self._points[signal, name] = points
        self._series = None

    def _take_the_one_role(self) -> None:
        """Take the reward of the one role (or environment) there is for the run's, where the run tells no other."""
        own = [name for signal, name in self._points if signal == "source_reward"]
        role = signal_names.OF_A_ROLE.match(own[0]) if len(own) == 1 else None
        # A part of a reward (a format, a penalty) has such a name, too; of a role rllm counts the groups beside it.
        counts = () if role is None else (f"batch/{role[1]}/", "batch/solve_")
        known = any(name.startswith(counts) for _, name in self._points) if counts else False
        if known and all(signal != "reward" for signal, _ in self._points):
            key = "reward", own[0]
            self._names[key] = signal_names.Name("reward", "rllm")
            self._points[key] = self._points.pop(("source_reward", own[0]))
            self._series = None

    def leave_out_untold(self) -> None:
        """Part with series that lie below the last decimal they are printed with: their zeros are none. Of a quantity
        that is printed twice the more exact numbers are kept.
        """
        self._leave_out_below()
        self._leave_out_roundings()
        self._leave_out_widths()
        self._leave_out_gaps_to_the_reference()
        self._read_percent()

    def _read_percent(self) -> None:
        """Take what was logged in percent as the share that it is, where the share of what is not was made of it; part
        with one that was made of a count.
        """
        for key, points in list(self._points.items()):
            if self._names[key].formula != signal_names.COMPLEMENT:
                continue
            logged = [1 - point.value for point in points.values() if math.isfinite(point.value)]
            if len(logged) < _SAME or max(logged) <= 1 or min(logged) < 0:
                continue
            self._series = None
            if max(logged) > 100 or (max(logged) < 100 and all(value == int(value) for value in logged)):
                del self._points[key]
            else:
                self._points[key] = {at: replace(p, value=1 - (1 - p.value) / 100) for at, p in points.items()}

    def _leave_out_gaps_to_the_reference(self) -> None:
        """Part with OpenRLHF's `logprobs_diff` where it is the KL to the reference in every step that has both, or
        stands beside `vllm_kl`: its gap is that to the reference, and the other is the engine's.
        """
        references = [points for key, points in self._points.items() if key[0] == "kl"]
        is_told = any(key[1].rpartition("/")[2] == "vllm_kl" for key in self._points)
        for key in [key for key in self._points if key[0] == "logprob_diff" and key[1].endswith("logprobs_diff")]:
            points = self._points[key]
            for reference in references:
                both = [(point.value, reference[at].value) for at, point in points.items() if at in reference]
                told = [pair for pair in both if any(pair)]
                if is_told or (len(told) >= _SAME and 2 * len(both) >= len(points) and all(a == b for a, b in told)):
                    del self._points[key]
                    self._series = None
                    break

    def _leave_out_widths(self) -> None:
        """Part with lengths that are the width of a padded batch: one number in nearly every step, above what another
        series of the same steps tells of the responses, whose lengths move.
        """
        lengths = {
            key: [point.value for point in points.values() if math.isfinite(point.value)]
            for key, points in self._points.items()
            if key[0] in ("response_length", "response_length_max", "response_length_min")
        }
        own = [key for key in lengths if key[0] == "response_length"]
        for key in own:
            values = lengths[key]
            if len(values) < _TOLD or not is_width(values):
                continue
            others = [each for other, each in lengths.items() if other != key and len(each) >= len(values) / 2]
            if any(max(each) < median(values) and len(set(each)) > 1 for each in others):
                del self._points[key], lengths[key]
                self._series = None

    def _leave_out_below(self) -> None:
        found = untold({key: [point.value for point in points.values()] for key, points in self._points.items()})
        if found is None:
            return
        shown, below = found
        zeros = (point for key in below for point in self._points[key].values() if not point.value)
        zero = next(zeros, None)
        if zero is None or not is_zero_rounded(zero.path, zero.line, shown):
            return
        for key in below:
            del self._points[key]
        self._series = None
        names = ", ".join(sorted(name for _, name in below))
        self.rounded = f"numbers are printed with {shown} decimals: {names} lie below that and are not judged"

    def _leave_out_roundings(self) -> None:
        """Part with what rounds another series of its signal, and with zeros of two decimals and more of what may lie
        below those while all is well.
        """
        values = {key: {at: point.value for at, point in points.items()} for key, points in self._points.items()}
        zeros = []
        for key in list(self._points):
            others = [other for other in self._points if other[0] == key[0] and other[1] != key[1]]
            still = not any(values[key].values())
            if not others and not (still and key[0] in FINE_ALONE):
                continue
            places = decimals(values[key].values())
            if places is None and still:
                first = next(iter(self._points[key].values()))
                places = decimals_of_zero(key[1], first.path, first.line)
            is_told_twice = any(is_rounding_of(values[key], values[other], places) for other in others)
            if is_told_twice or (still and places is not None and key[0] in FINE_ALONE):
                if not others:
                    zeros.append(key[1])
                del self._points[key]
                self._series = None
        if zeros and not self.rounded:
            self.rounded = f"zeros of few decimals are any small number: {', '.join(sorted(zeros))} are not judged"

    def contradicts(self, other: RunLog) -> bool:
        """Whether both tell different values of one thing: then they are two runs, not two files of one."""
        if self.run != other.run:
            return True
        for key in self._points.keys() & other._points.keys():
            mine, theirs = self._points[key], other._points[key]
            for place in mine.keys() & theirs.keys():
                a, b = mine[place].value, theirs[place].value
                # One of the two may be rounded for printing, to four decimals.
                if math.isfinite(a) and math.isfinite(b) and abs(a - b) > 1e-3 * max(abs(a), abs(b)) + 5.1e-5:
                    return True
        return False

    def join(self, other: RunLog) -> None:
        self.paths += other.paths[: _SHOWN_PATHS - len(self.paths)]
        self.is_counted = self.is_counted or other.is_counted
        self.rounded = self.rounded or other.rounded
        self.told += other.told
        for key, points in other._points.items():
            self._names[key] = other._names[key]
            self._points.setdefault(key, {}).update(points)
        self._series = None


#: Steps in which two figures are one number, and not 0, before they are one figure.
_SAME = 2
#: Of the values of a padded width, the share that is one number.
_PADDED = 0.95


def is_width(values: Sequence[float]) -> bool:
    """Whether nearly all values are one number."""
    middle = median(values)
    return sum(value == middle for value in values) >= _PADDED * len(values)


def _first(number: int | None) -> int:
    return -1 if number is None else number


def _by_step(points: Iterable[Point]) -> list[Point]:
    """One point per step: what was logged for the step itself, else the mean over its micro-batches and ranks."""
    steps: dict[int | None, list[Point]] = {}
    for point in points:
        steps.setdefault(point.step, []).append(point)
    found = []
    for step in sorted(steps, key=_first):
        own = [point for point in steps[step] if point.micro is None] or steps[step]
        if len(own) == 1:
            found.append(own[0])
        else:
            mean = sum(point.value for point in own) / len(own)
            found.append(Point(step, mean, None, None, own[0].line, own[0].path))
    return found


class Signals:
    """The signals of everything under one path."""

    def __init__(self, logs: list[RunLog]) -> None:
        self.logs = logs

    @classmethod
    def of(cls, run: Run, step: Selection | None = None) -> Signals | None:
        """The signals a run holds, of the chosen steps; None where it logged none.

        Files that contradict each other are different runs; those that do not are one.

        Raises:
            SelectionError: there is no such step.
        """
        by_file: dict[str, RunLog] = {}
        for record in run.records if step is None else run.select(step=step):
            is_norm = record.key.stage == _NORMS and record.key.role in _TRAINED
            if record.key.stage in STAGES or is_norm:
                file = _NORMS if is_norm else str(record.path)
                log = by_file.setdefault(
                    file,
                    RunLog([str(record.path)], not _COUNTED.isdisjoint(run.notes), algorithm=Algorithm(stated_by(run))),
                )
                _take(log, record, by_file)
                record.release()  # a log of a million values is kept as numbers, not as fields
        norms = by_file.pop(_NORMS, None)
        logs: list[RunLog] = []
        for log in by_file.values():
            log.leave_out_untold()
            log.take_others()
            if not log._points and not log.told:
                continue
            home = next((known for known in logs if not known.contradicts(log)), None)
            if home is None:
                logs.append(log)
            else:
                home.join(log)
        if norms is not None and len(logs) <= 1:
            _beside(logs, norms)
        return cls(logs) if logs else None


def _beside(logs: list[RunLog], norms: RunLog) -> None:
    """Give a run the signals of its gradients that it does not log itself: a rank's own norm, or that of another
    moment of the step, would contradict those.
    """
    norms._points = {key: points for key, points in norms._points.items() if not any(log.has(key[0]) for log in logs)}
    if not norms._points:
        return
    if logs:
        logs[0].join(norms)
    else:
        logs.append(norms)


def _of_the_run(log: RunLog, name: str, every: dict[str, RunLog]) -> RunLog:
    """The log of the run that a figure's name begins with, where a table holds several; else the file's own."""
    run = name.removeprefix("metrics.").rpartition(OF_A_RUN)[0]
    if not run or not log.paths[0].endswith(TABLES):
        return log
    own = RunLog([log.paths[0]], log.is_counted, algorithm=log.algorithm, run=run)
    return every.setdefault(f"{log.paths[0]}\0{run}", own)


def _take(log: RunLog, record: Record, every: dict[str, RunLog]) -> None:
    try:
        refs = record.tensors()
    except RldbgError:
        return  # the run's own reading counts it as unreadable
    trl = signal_names.is_trl(ref.name for ref in refs)
    pairs = signal_names.is_of_pairs(ref.name for ref in refs)
    held_out = signal_names.is_held_out(ref.name for ref in refs)
    for ref in refs:
        if ref.dtype == "text":
            _tell(log, record, ref)
        elif ref.shape == () and ref.dtype != "bool":
            value = _number(ref)
            if value is not None:
                # Of preference pairs it is another figure: KTO's estimate over a batch, cut off at 0.
                is_kto = pairs and ref.name.removeprefix("metrics.") == "kl"
                name = _OF_CRITIC.get(ref.name, ref.name) if record.key.role == "critic" else ref.name
                if held_out and name.removeprefix("metrics.") == "accuracy":
                    name = "eval/accuracy"
                own = _of_the_run(log, name, every)
                own.add("pair_kl" if is_kto else name, _point(record, ref, value), trl)


def _point(record: Record, ref: TensorRef, value: float) -> Point:
    key = record.key
    return Point(key.step, value, key.micro, key.rank, ref.line, str(record.path))


def _tell(log: RunLog, record: Record, ref: TensorRef) -> None:
    if not isinstance(ref.source, Inline):
        return
    if ref.name == "warnings":
        texts = ref.source.value if isinstance(ref.source.value, list) else [ref.source.value]
        log.told += [Told("warning", str(text), _point(record, ref, math.nan)) for text in texts]
    elif ref.name.startswith("event."):
        kind = ref.name.split(".")[1]
        log.told.append(Told(kind, str(ref.source.value), _point(record, ref, math.nan)))


def _number(ref: TensorRef) -> float | None:
    if isinstance(ref.source, Inline):
        value = ref.source.value
        return float(value) if isinstance(value, (int, float)) else None
    try:
        from replay_core.pages import array  # numpy: 60 ms that a log does not cost

        return float(array(ref).reshape(-1)[0])
    except (RldbgError, ValueError, TypeError, IndexError):
        return None
