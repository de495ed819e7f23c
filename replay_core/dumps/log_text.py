"""Text logs as a run of scalars: a GRPO trainer's log of its stages, and the metric lines of others.

One file may hold several forms, the lines of several processes, and much that is no metric at all. Every value keeps
the line it stands on. What a log tells beside numbers (`log_events.py`) are text fields named `event.<kind>.<n>`
of the step that was logged last.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import takewhile
from math import isfinite
from pathlib import Path

from msgspec import Struct, field
from msgspec.structs import replace

from replay_core.budget import reading, spend_values
from replay_core.dumps import step_log
from replay_core.dumps.boxed_tables import BEGINS, ROW, BoxedTables
from replay_core.dumps.bulleted_steps import HEAD as BULLETED
from replay_core.dumps.bulleted_steps import BulletedSteps
from replay_core.dumps.console_lines import BAR, OF_EPOCH, console_line, epoch_line, is_bar, source_line
from replay_core.dumps.dialect import Dialect, Index, alone, any_of
from replay_core.dumps.fields import flatten
from replay_core.dumps.joined_lines import joined
from replay_core.dumps.json_rows import names_with
from replay_core.dumps.listing import listing
from replay_core.dumps.log_events import DEATHS, HINT, KEPT, LAST_ERROR, PROGRESS, Event, Watch
from replay_core.dumps.log_lines import TrainerLine, is_text, lines_of
from replay_core.dumps.log_progress import BarredSteps, StepsSaid, is_other_bar
from replay_core.dumps.log_settings import LogSettings
from replay_core.dumps.log_stages import (
    RolloutUpdates,
    Runs,
    Split,
    ToldRow,
    begins_anew,
    epoch_begun,
    epoch_in,
    paid_stage,
    several_runs,
)
from replay_core.dumps.metric_lines import (
    NUMBERED,
    column_row,
    is_aside,
    is_of_an_environment,
    metric_line,
    step_columns,
    table_head,
    table_row,
)
from replay_core.dumps.metrics import EPOCHS
from replay_core.dumps.notebook_steps import NotebookSteps
from replay_core.dumps.panels import DRAWN, Panels
from replay_core.dumps.printed_samples import PrintedSamples
from replay_core.dumps.rank_times import RankTimes
from replay_core.dumps.unnumbered import Unnumbered
from replay_core.dumps.words import metric_name
from replay_core.errors import BudgetError, DumpError
from replay_core.file_spans import kept_while_unchanged, regular
from replay_core.records import Problem, RecordKey, TensorRef
from replay_core.regexes import regex

SUFFIXES = (".log", ".out", ".txt", ".err")
#: A log is known by its first lines; a trainer prints its configuration before them.
_HEAD = 1 << 20
#: A file that is named itself is looked into further, whatever it is called.
_FAR = 1 << 26
_LIKELY = regex(
    rb"\[Micro \d+\] \d|iter \d+: loss |step:\d+ - \S+:(?:np\.\w+\()?-?[\d.n]"
    rb"|[\"'][\w/.@()-]+[\"']: ?[\"']?(?:[\w.]{1,24}\()?-?[\d.ni]"
    rb"|(?i:loss|rewards?|kl|entropy|grad_norm|score)[\w/.]{0,30}[\"'`]?\s{0,8}[:=|\t, ]\s{0,60}[-+]?(?:\d|\.\d|nan"
    rb"|inf)"
    rb"|(?:(?<![\w.])[A-Za-z]\w{0,30}=[-+]?[\d.]{1,12}(?:[/%\w][\w./%-]{0,16})?[ ,|]{1,4}){3}"
    rb"|(?i:\b(?:step|epoch|iter)\w{0,6}\s{0,8}[,|\t ]\s{0,8}(?:training loss|loss|reward)\b)|(?i:\bloss\b\s{0,8}[,|])"
    rb"|(?m:^)\s{0,8}\|\s{0,8}(?i:step|iter(?:ation)?|epoch)s?\s{0,8}\|"
    rb"|(?m:^)it\s{1,4}\d{1,12} \|"
    rb"|" + BULLETED.encode() + rb"|\b(?i:step|iter|iteration|update|epoch|episode)[\s_]?\s{0,8}[:=#]?\s{0,8}[\[(]?\d"
    rb"|" + ROW.encode() + rb"|" + BAR.encode() + rb"|" + HINT.pattern.encode()
)
#: What a program that trains says before its first step: clocks, and what it is about to do.
_OF_A_PROGRAM = regex(rb"\b\d\d:\d\d:\d\d\b|(?i:total[ _]\w{0,12}[ _]?steps|\btraining\b|checkpoint shards)|\d%\|")
_MEAN = {"rewards": "rewards_mean"}
#: Files that are named themselves and are something else, however they read.
_OTHERS = (".json", ".jsonl", ".py", ".yaml", ".yml", ".csv")
#: How a file of lines begins that is none of what its name says: Python's mappings, rows of JSON with commas between
#: them, a table whose commas have blanks.
_MISNAMED = regex(rb"\A(?:\s*\{\s*'|\s*\{[^\n]{0,4000}\},[ \t]*\r?\n|[A-Za-z][\w /]*(?:, [A-Za-z][\w /]*)+\r?\n)")

COUNTED = "steps that the log does not number are counted"

#: Steps with the same metrics that are those of a trainer.
_ALIKE = 3

_Place = tuple[int | None, int | None]  # step, rank
_Metrics = tuple[int, int | None, dict[str, float], int | None]  # line, step, values, rank


class _Log(Struct):
    iterations: dict[int | None, list[step_log.Iteration]] = field(default_factory=dict)
    """By rank."""
    metrics: dict[_Place, dict[str, tuple[float, int]]] = field(default_factory=dict)
    events: dict[_Place, list[Event]] = field(default_factory=dict)
    by_step: dict[_Place, list[step_log.Iteration]] = field(default_factory=dict)
    """The same, by step: a log may be of as many steps as lines."""
    counted: bool = False
    ends_inside: int | None = None
    unnumbered: bool = False
    """No line has the form of a trainer's: names and numbers alone."""
    settings: LogSettings = field(default_factory=LogSettings)

    progress: Event | None = None
    """How far it says that its run came."""
    notes: list[str] = field(default_factory=list)
    """What is said of runs and stages that it holds beside the one that is read."""

    @property
    def is_empty(self) -> bool:
        return not (self.iterations or self.metrics or self.events)

    def last_told(self) -> tuple[int, int] | None:
        """The last step of those that have what most steps have, and its line: an answer that is printed numbers steps
        of its own. None where steps have too little in common.
        """
        kinds = Counter(frozenset(values) for values in self.metrics.values()).most_common(1)
        if self.iterations or not kinds or kinds[0][1] < _ALIKE:
            return None
        told = [
            (min(line for name, (_, line) in values.items() if name in kinds[0][0]), step)
            for (step, _), values in self.metrics.items() if step is not None and kinds[0][0] <= values.keys()
        ]  # fmt: skip
        line, step = max(told, default=(0, None))
        return None if step is None else (step, line)

    def number(self, steps: dict[int, int]) -> None:
        """Give counted steps the numbers that the log's bars have for them."""
        self.metrics = {(_numbered(at, steps), rank): values for (at, rank), values in self.metrics.items()}
        self.events = {(_numbered(at, steps), rank): events for (at, rank), events in self.events.items()}
        self.counted = False

    def leave_out_before(self, split: Split, first: int) -> None:
        """Part with what stands before a run or stage, but for what ended one before it. `first`: the number that its
        first step gets.
        """
        by = split.step - first
        kept: dict[_Place, dict[str, tuple[float, int]]] = {}
        for (step, rank), values in self.metrics.items():
            if (behind := {name: told for name, told in values.items() if told[1] >= split.line}) and step is not None:
                kept[step - by, rank] = behind
        events: dict[_Place, list[Event]] = {}
        for (step, rank), told in self.events.items():
            for event in told:
                if event.line >= split.line:
                    events.setdefault((None if step is None else max(step - by, first), rank), []).append(event)
                elif event.kind in DEATHS:
                    events.setdefault((None, rank), []).append(event)
        self.metrics, self.events = kept, events
        self.notes.append(split.note)

    def ended_in(self, gaps: Sequence[tuple[int, int]]) -> bool:
        """Whether a run was ended in any of these stretches of lines."""
        ends = [event.line for told in self.events.values() for event in told if event.kind in DEATHS]
        return any(first < line < last for first, last in gaps for line in ends)

    def number_on(self, told: Sequence[_Metrics], to: Callable[[int, int], int], *, over: bool) -> None:
        """Take anew what was told, of epochs that each number their steps from the first on."""
        self.metrics = {}
        for line, step, values, rank in told:
            self.add(None if step is None else to(line, step), values, rank, line, over=over)
        events: dict[_Place, list[Event]] = {}
        for (step, rank), some in self.events.items():
            for event in some:
                events.setdefault((None if step is None else to(event.line, step), rank), []).append(event)
        self.events = events

    def keep_not_finite(self, told: Sequence[_Metrics]) -> None:
        """Tell what was not finite, though another run has told a finite number of that step."""
        for line, step, values, rank in told:
            known = self.metrics.get((step, rank), {})
            for name, value in values.items():
                if not isfinite(value) and name in known and isfinite(known[name][0]):
                    known[name] = value, line

    def add(
        self, step: int | None, values: dict[str, float], rank: int | None, line: int, *, over: bool = True
    ) -> None:
        """The metrics of one line; those of a step and a rank belong together. `over`: the last of a name counts."""
        if values:
            known = self.metrics.setdefault((step, rank), {})
            for key, value in values.items():
                if over or key not in known:
                    known[key] = value, line


def _numbered(step: int | None, steps: dict[int, int]) -> int | None:
    return None if step is None else steps.get(step, step)


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        if (path.suffix not in _OTHERS or _is_misnamed(path)) and _is_log(
            path, _FAR if path.suffix in SUFFIXES else _HEAD, alone=True
        ):
            yield path
        return
    for folder in listing(path).folders:
        for file in names_with(folder, *SUFFIXES):
            if _is_log(folder.file(file), _HEAD):
                yield folder.file(file)


def _is_misnamed(file: Path) -> bool:
    try:
        with regular(file) as opened:
            return _MISNAMED.match(opened.read(8192)) is not None
    except DumpError:
        return False


def _is_log(file: Path, look: int, alone: bool = False) -> bool:
    """Whether the file's beginning has what looks like a line of metrics, and its lines bear it out. `alone`: it is
    named itself, and names and numbers are enough; among other files they may be anybody's notes.
    """
    try:
        with regular(file) as opened:
            head = opened.read(4096)
            if b"\0" in head and not is_text(head):
                return False
            begins = (head + opened.read(look)).translate(None, b"\0")
            if _LIKELY.search(begins) is None and not (alone and _OF_A_PROGRAM.search(begins)):
                return False
        log = _log(file)
        if alone and log.progress is not None:
            return True
        return not log.is_empty and (alone or not log.unnumbered)
    except BudgetError:
        # It may well be a log: to say that it holds no metric would be untrue.
        if alone:
            raise
        return False
    except DumpError:
        return False


@kept_while_unchanged(8)
def _log(path: Path) -> _Log:
    log = _Log()
    counted: dict[str, int] = {}
    unnumbered: set[str] = set()
    #: Streams that number each step below what they log of it without a number.
    told_of: set[str] = set()
    #: By stream, the steps that its own lines number.
    named: dict[str, set[int]] = {}
    #: The bar's step by counted step.
    barred = BarredSteps()
    grammar: dict[tuple[str, int | None], list[tuple[int, str]]] = {}
    heads: dict[str, list[str]] = {}
    notebook: NotebookSteps | None = NotebookSteps()
    columns: dict[str, list[int]] = {}
    boxes: dict[str, BoxedTables] = {}
    bulleted: dict[str, BulletedSteps] = {}
    panels: dict[str, Panels] = {}
    by_rank: dict[str, RankTimes] = {}
    watch = Watch()
    #: Lines of a trainer's own form, which a known form's metrics go before; those that number epochs.
    said: list[tuple[TrainerLine, int | None, dict[str, float]]] = []
    epochs: list[tuple[TrainerLine, int | None, dict[str, float]]] = []
    last: int | None = None
    evaluated = 0
    at_end: deque[TrainerLine] = deque(maxlen=_LAST_LINES)
    progress = StepsSaid()
    rows: list[ToldRow] = []
    told_rows: list[_Metrics] = []
    updates = RolloutUpdates()
    #: Lines that number an epoch, and no metric.
    marks: list[tuple[int, float]] = []
    samples = PrintedSamples(lambda: joined(lines_of(path)))
    for line in samples.without(joined(_paid_lines(path))):
        at_end.append(line)
        progress.take(line)
        if (times := by_rank.setdefault(line.stream, RankTimes()).take(line.text)) is not None:
            if times and last is not None:
                log.add(last, times, line.rank, line.number)
            continue
        step, values = metric_line(line.text)
        if not values:
            barred.hear(line)
        in_table = in_panel = False
        if not values and (names := table_head(line.text)):
            heads[line.stream] = names
        elif not values and line.stream in heads:
            step, values = table_row(line.text, heads[line.stream])
            in_table = step is not None and bool(values)
        if not values and line.text.lstrip()[:1] not in ("", "{", "|"):
            step, values = bulleted.setdefault(line.stream, BulletedSteps()).take(line.text)
        if not values and line.text.startswith(DRAWN):
            step, values = panels.setdefault(line.stream, Panels()).take(line.text)
            in_panel = bool(values) or panels[line.stream].is_open
        if not values and not in_panel and line.text.startswith(BEGINS):
            step, values = boxes.setdefault(line.stream, BoxedTables()).take(line.text)
        elif "Train step " in line.text:
            boxes.setdefault(line.stream, BoxedTables()).hear(line.text)
        if not values and (steps := step_columns(line.text)):
            columns[line.stream] = steps
        elif not values and line.stream in columns:
            name, told_at = column_row(line.text, columns[line.stream])
            for at, value in told_at:
                log.add(at, {name: value}, line.rank, line.number)
        if step is not None and line.stream in unnumbered and is_of_an_environment(line.text, values):
            values = {}  # an environment's own step, among those of a trainer that numbers none
        # What a panel of metrics holds is told at its end, and is none of the settings.
        if not values and last is None and not in_panel:
            log.settings.take(line.text)
        if not values and "poch" in line.text.lower() and (epoch := epoch_begun(line.text)) is not None:
            marks.append((line.number, epoch))
        if values:
            # LLaMA-Factory says on every step's line how long it has run.
            if "train_runtime" in values and values.keys().isdisjoint(("loss", "grad_norm")):
                log.events.setdefault((last, line.rank), []).append(
                    Event("finished", line.text.strip()[:200], line.number, line.rank)
                )
            if step is None:
                if line.stream not in told_of:
                    log.counted = True
                    unnumbered.add(line.stream)
                following = counted.get(line.stream, 0)
                step = max(following - 1, 0) if is_aside(values) else following
                if not is_aside(values):
                    barred.take(line, step)
            else:
                barred.give_up()
                updates.take(line.number, line.text, step)
                if line.stream in unnumbered and "step:" in line.text and NUMBERED.search(line.text):
                    # What SkyRL logs of an update without a number is of the step whose mapping follows.
                    unnumbered.discard(line.stream)
                    told_of.add(line.stream)
                    log.counted = bool(unnumbered)
                    if counted[line.stream] == 1 and step != 0 and (first := log.metrics.pop((0, line.rank), None)):
                        log.metrics[step, line.rank] = first
                named.setdefault(line.stream, set()).add(step)
            counted[line.stream] = step + 1
            if not is_aside(values):
                rows.append(ToldRow(line.number, step, values.get("epoch"), frozenset(values), line.stream))
            told_rows.append((line.number, step, values, line.rank))
            last = step
            if notebook is not None and not notebook.take(
                line.number, step, values, in_table, line.stream in unnumbered
            ):
                notebook = None
            log.add(step, values, line.rank, line.number)
        elif (held := _OF_PAIRS.search(line.text)) is not None:
            # DeepSpeed-Chat says of a reward model's evaluation, on a line above, of which epoch it is.
            epochs.append((line, evaluated, {"eval_accuracy": float(held[1])}))
        elif (evaluating := _EVALUATES.search(line.text)) is not None:
            evaluated = int(evaluating[1])
        elif OF_EPOCH.match(line.text) and (told := epoch_line(line.text))[1]:
            if not (said or log.metrics):
                epochs.append((line, *told))
        elif event := watch.event(line):
            log.events.setdefault((last, line.rank), []).append(event)
        elif step_log.may_tell(line.text):
            grammar.setdefault((line.stream, line.rank), []).append((line.number, line.text))
            if match := _ITER_STEP.search(line.text):
                last = int(match.group(1))
        elif last is not None and (alone := _AVERAGE.match(line.text)):
            # DeepSpeed-Chat says the reward of a step on a line of its own, below it.
            said.append((line, last, {"average_reward_score": float(alone[1])}))
        elif last is not None and (of_one := source_line(line.text)):
            said.append((line, last, of_one))
        elif not _OF_A_TURN.search(line.text) and (told := console_line(line.text))[1]:
            last = told[0]
            said.append((line, *told))
        elif not (said or log.metrics) and (told := epoch_line(line.text))[1]:
            epochs.append((line, *told))
    if samples.left_out:
        log.notes.append(
            f"{samples.left_out} rows of rewards beside a true answer are samples, no steps: they are left out"
        )
    if (refused := next((one for one in at_end if _REFUSED.search(one.text)), None)) is not None:
        log.events.setdefault((last, refused.rank), []).append(
            Event(LAST_ERROR, refused.text.strip()[:1000], refused.number, refused.rank)
        )
    # A bar that so much follows was none of steps, or its own lines are not known; one of weights or data is none.
    ends = at_end[-1].number if at_end else 0
    for place, events in list(log.events.items()):
        events[:] = [
            event
            for event in events
            if event.kind != "begins" or (event.line > ends - _FOLLOWED and not is_other_bar(event.text))
        ]
        if not events:
            del log.events[place]
    for event in watch.went_on:
        log.events.setdefault((last, event.rank), []).append(event)
    counts = max((line for values in log.metrics.values() for _, line in values.values()), default=0)
    for event in watch.untold(after=counts):
        log.events.setdefault((last, event.rank), []).append(event)
    for (_, rank), lines in grammar.items():
        iterations = list(step_log.parse(lines))
        # Every program prints warnings; alone they are no log of this trainer.
        if not any(iteration.micros or iteration.is_complete for iteration in iterations):
            continue
        log.iterations.setdefault(rank, []).extend(iterations)
        for iteration in iterations:
            log.by_step.setdefault((iteration.step, rank), []).append(iteration)
        if not iterations[-1].is_complete:
            log.ends_inside = iterations[-1].step
    notebook_told = False
    if notebook is not None and (placed := notebook.placed()):
        notebook_told = True
        log.metrics.clear()
        for at, values, number in placed:
            log.add(at, values, None, number, over=False)
        log.counted = False
        last = placed[-1][0]
    if (to_update := updates.numbered()) is not None and not (said or log.iterations or log.counted):
        # What is said of a rollout is of its first update, and stands beside that one's figures.
        log.number_on(told_rows, to_update, over=True)
        told_rows = [
            (at, None if step is None else to_update(at, step), values, rank) for at, step, values, rank in told_rows
        ]
        rows = [replace(row, step=to_update(row.line, row.step)) for row in rows]
        log.notes.append("rollouts are numbered as the first of their updates")
    # What a stream logs beside steps that it numbers goes on from the last of them.
    known = {step for steps in named.values() for step in steps}
    if unnumbered <= named.keys() and log.metrics and len({at for at, _ in log.metrics} - known) <= 1:
        log.counted = False
    if log.counted and not (said or log.iterations or notebook_told) and len(unnumbered) == 1:
        if (stage := paid_stage(rows, _not_finite(told_rows))) is not None:
            log.leave_out_before(stage, 0)
            barred.begin_at(stage.step)
            last = None if last is None else last - stage.step
            rows = [row for row in rows if row.line >= stage.line]
        if anew := begins_anew(rows):
            log.notes.append(anew)
    elif not (log.counted or said or log.iterations or notebook_told) and (runs := several_runs(rows)) is not None:
        begins = _told_apart(log, runs, told_rows, marks, path, over=True)
        if begins is None and last is not None:
            last = runs.numbered_on()(sys.maxsize, last)
        elif begins == 0:
            log.keep_not_finite(told_rows)
    if not (said or log.iterations) and (to := barred.told()):
        log.number(to)
        last = to.get(last, last) if last is not None else None
    if not (said or log.metrics or log.iterations) and _are_batches(epochs):
        # Every batch is printed with its epoch's number: they are counted.
        epochs = [(line, at, values) for at, (line, _, values) in enumerate(epochs)]
        log.counted = True
    not_finite: list[_Metrics] = []
    if said and not log.metrics and not log.iterations and (runs := _runs_said(said)) is not None:
        told_rows = [(one.number, step, values, one.rank) for one, step, values in said]
        begins = _told_apart(log, runs, told_rows, marks, path, over=False)
        if begins is None and last is not None:
            last = runs.numbered_on()(sys.maxsize, last)
        elif begins == 0:
            not_finite = told_rows
        said = [] if begins is None else [one for one in said if one[0].number >= begins]
    if log.metrics and len({step for line, step, _ in said if is_bar(line.text)}) < len(log.metrics):
        # A bar of the batches of an update has numbers of its own: what it is handed stands in the step's mapping, too.
        said = [one for one in said if not is_bar(one[0].text)]
    for line, step, values in said or (() if log.metrics or log.iterations else epochs):
        log.add(step, values, line.rank, line.number, over=False)
    log.keep_not_finite(not_finite)
    if not (log.metrics or log.iterations):
        for (_, rank), lines in grammar.items():
            for number, text in lines:
                log.add(*console_line(text), rank, number)
    if not (log.metrics or log.iterations):
        # What stands behind a death is none of the run's: settings, statistics of its end.
        ends = min((e.line for events in log.events.values() for e in events if e.kind in DEATHS), default=sys.maxsize)
        plain: dict[str, Unnumbered] = {}
        for line in takewhile(
            lambda one: one.number < ends, PrintedSamples(partial(lines_of, path)).without(_paid_lines(path))
        ):
            plain.setdefault(line.stream, Unnumbered()).take(line.number, line.text)
        for pairs in plain.values():
            pairs.close()
            for number, step, values in pairs.found:
                log.add(step, values, None, number)
        log.counted = log.unnumbered = bool(log.metrics)
    far = progress.told(*((None, counts) if log.counted else log.last_told() or (last, counts)))
    tells = {event.kind for events in log.events.values() for event in events}
    if far is None and not (log.iterations or log.metrics or tells - {"started"}):
        far = progress.ends()
    if far is not None:
        facts = (
            f"starts {far.starts}",
            f"rose {far.rose}",
            f"stood {far.stood}",
            f"silent {far.silence.seconds:.0f} {far.silence.begins} {far.silence.ends}",
            *([f"over {far.over}", far.over_text] if far.over else ()),
        )
        log.progress = Event(PROGRESS, f"{far.at}/{far.of}", far.line, None, facts)
    log.counted = log.counted or any(not iteration.numbered for some in log.iterations.values() for iteration in some)
    return log


def _runs_said(said: Sequence[tuple[TrainerLine, int | None, dict[str, float]]]) -> Runs | None:
    return several_runs(
        [
            ToldRow(line.number, step, epoch_in(line.text), frozenset(values), line.stream)
            for line, step, values in said
            if step is not None and len(values) > 1
        ]
    )


def _not_finite(told: Sequence[_Metrics]) -> list[int]:
    return [line for line, _, values, _ in told if not all(map(isfinite, values.values()))]


def _told_apart(
    log: _Log, runs: Runs, told: Sequence[_Metrics], marks: Sequence[tuple[int, float]], path: Path, *, over: bool
) -> int | None:
    """The line from which on is read, 0 where all runs are read as one; None of epochs, whose steps are numbered on."""
    if runs.are_epochs(marks):
        log.number_on(told, runs.numbered_on(), over=over)
        log.notes.append(f"{runs.in_words('epochs')} that number their steps anew: they are numbered on")
        return None
    if log.ended_in(runs.gaps()):
        return 0  # one run, which was begun again
    if (split := runs.last(_not_finite(told))) is None:
        log.notes.append(f"{runs.in_words('runs')}: they are read as one")
        return 0
    log.leave_out_before(split, split.step)
    lines = {line for line, *_ in told}
    later = [(gap, LogSettings()) for gap in runs.gaps()]
    for line in _paid_lines(path):
        for (first, end), settings in later:
            if first < line.number < end and line.number not in lines:
                settings.take(line.text)
    for _, settings in later:
        log.settings.then(settings)
    return split.line


#: Lines of a log's end in which a program, most often the script around it, says why it stops.
_LAST_LINES = 4
#: Lines of one epoch, in the mean, that are its batches and no summary told twice.
_BATCHES = 3


def _are_batches(epochs: Sequence[tuple[TrainerLine, int | None, dict[str, float]]]) -> bool:
    """Whether lines that number epochs are of their batches: many of one epoch, with the same names."""
    numbers = {step for _, step, _ in epochs}
    alike = Counter(frozenset(values) for _, _, values in epochs).most_common(1)
    return (
        bool(alike)
        and alike[0][1] >= _BATCHES * max(len(numbers), 1)
        and len({one.stream for one, _, _ in epochs}) == 1
    )


#: Lines behind a bar of steps at its beginning that are more than a wait.
_FOLLOWED = 300
_REFUSED = regex(r"^\W{0,6}(?:ERROR|Error|FATAL|Fatal|fatal|error): \S|^\W{0,4}\[(?:ERROR|FATAL)\] \S")


#: A log of short lines is asked a hundred expressions for each: on a busy machine that takes three times as long.
_PATIENCE = 3.0


def _paid_lines(path: Path) -> Iterator[TrainerLine]:
    with reading(path, patience=_PATIENCE):
        for line in lines_of(path):
            spend_values(1, "lines of a log")
            yield line


#: What an environment answers in one turn of an agent: its reward is the turn's, and no step's.
_OF_A_TURN = regex(r"(?i)\b(?:done|terminated|truncated)['\"]?\s?[=:]\s?(?:true|false)\b")
_AVERAGE = regex(
    r"^\W{0,4}[Aa]verage reward(?: score)?: ?([-+]?\d[\d.e+-]{0,24}|nan|inf)\s*(?:\| EMA reward score: .{0,40})?$"
)
_OF_PAIRS = regex(
    r"^chosen_last_scores \(higher is better\) : .{0,120}\bacc \(higher is better\) : (\d(?:\.\d{0,24})?)"
)
_EVALUATES = regex(r"\*{3} Evaluating reward, Epoch (\d{1,6})/\d")
_ITER_STEP = regex(r"\biter (\d{1,12}): loss ")


def index(path: Path) -> Index:
    found = Index([])
    for file in _files(path):
        try:
            log = _log(file)
        except DumpError as error:
            found.problems.append(Problem(str(file), error.message))
            continue
        keys = [
            RecordKey(iteration.step, micro.index, rank, "actor", "loss")
            for rank, iterations in log.iterations.items()
            for iteration in iterations
            for micro in iteration.micros
        ]
        keys += [
            RecordKey(iteration.step, None, rank, "actor", "optimizer")
            for rank, iterations in log.iterations.items()
            for iteration in iterations
            if iteration.is_complete or iteration.warnings
        ]
        repeated = len(keys) - len(set(keys))
        if repeated:
            found.problems.append(
                Problem(str(file), f"{repeated} records are logged twice (a restart?); the last counts")
            )
        places = sorted({*log.metrics, *_events(log)}, key=lambda place: tuple(-1 if n is None else n for n in place))
        keys += [RecordKey(step, None, rank, None, "training_metrics") for step, rank in places]
        found.files += [(key, file) for key in dict.fromkeys(keys)]
        found.facts |= log.settings.facts
        found.notes += [f"{file.name}: {note}" for note in log.notes]
        if (epochs := max((told["epoch"][0] for told in log.metrics.values() if "epoch" in told), default=0)) > 0:
            found.facts[EPOCHS] = epochs
        if log.ends_inside is not None:
            found.problems.append(Problem(str(file), f"the log ends inside step {log.ends_inside}"))
        if log.counted and COUNTED not in found.notes:
            found.notes.append(COUNTED)
    return found


def several(keys: Sequence[RecordKey], path: Path) -> Iterator[list[TensorRef] | DumpError]:
    """The scalars of some micro-batches and steps."""
    log = _log(path)
    for key in keys:
        try:
            yield _read(log, key)
        except KeyError:
            yield DumpError(f"the log tells nothing of {key}", file=str(path))


def _read(log: _Log, key: RecordKey) -> list[TensorRef]:
    """The fields of one record.

    Raises:
        KeyError: the log tells nothing of it.
    """
    if key.stage == "training_metrics":
        place = key.step, key.rank
        return [*_named(log.metrics.get(place, {})), *_told(_events(log).get(place, []))]
    for iteration in reversed(log.by_step.get((key.step, key.rank), [])):
        if key.stage == "optimizer":
            return _fields(_optimizer_values(iteration), iteration.warnings, iteration.warning_lines)
        for micro in iteration.micros:
            if micro.index == key.micro:
                return _fields(micro.placed(), [text for _, text in micro.warnings], micro.warning_lines)
    raise KeyError(key)


def _events(log: _Log) -> dict[_Place, list[Event]]:
    """The events by place, and how far the run came beside what was logged last."""
    if log.progress is None:
        return log.events
    at = next((place for known in (log.metrics, log.events) for place in reversed(known)), (None, None))
    return {**log.events, at: [*log.events.get(at, []), log.progress]}


def _optimizer_values(iteration: step_log.Iteration) -> dict[str, tuple[float, int]]:
    values = {key: (value, iteration.line) for key, value in iteration.loss.items()}
    if iteration.optimizer is not None:
        for key, value in iteration.optimizer.values.items():
            values[f"{key}.optimizer"] = value, iteration.optimizer.line
    return values


def _named(values: dict[str, tuple[float, int]]) -> list[TensorRef]:
    refs = flatten({key: value for key, (value, _) in values.items()})
    for ref, (_, line) in zip(refs, values.values(), strict=True):
        ref.canonical, ref.line = metric_name(ref.name, _WORDS), line
    return refs


def _told(events: list[Event]) -> list[TensorRef]:
    """Events as texts; what is over the limit of a kind is counted in `event.<kind>.more`."""
    tree: dict[str, str | int] = {}
    lines: dict[str, int] = {}
    counts: dict[str, int] = {}
    total = Counter(event.kind for event in events)
    for event in events:
        number = counts[event.kind] = counts.get(event.kind, 0) + 1
        # What ends a run stands at its end: of many the first and the last are kept.
        is_kept = number <= KEPT // 2 or number > total[event.kind] - KEPT // 2
        name = f"event.{event.kind}.{number - 1}" if is_kept else f"event.{event.kind}.more"
        tree[name] = "\n".join([event.text, *event.frames]) if is_kept else number - KEPT // 2
        lines.setdefault(name, event.line)
    return [ref.with_(canonical=f"metrics.{ref.name}", line=lines[ref.name]) for ref in flatten(tree)]


def _fields(values: dict[str, tuple[float, int]], warnings: list[str], lines: list[int]) -> list[TensorRef]:
    named = {_MEAN.get(key, key): value for key, value in values.items()}
    refs = _named(named)
    if warnings:
        (ref,) = flatten({"warnings": warnings})
        refs.append(ref.with_(canonical="warnings", line=lines[0] if lines else None, order=len(refs)))
    return refs


#: The log's words; `total` is the loss of one micro-batch, already divided by the accumulation.
_WORDS = (("kl", "kl_loss"), ("kl_penalty", "kl_loss"), ("total", "metrics.total"), ("loss", "loss"))


DIALECT = Dialect(
    "log",
    "names",
    any_of(_files),
    index,
    alone(several),
    several=several,
    grows=r"\.(?:log|out|txt|err)$",
    is_container=False,
)
