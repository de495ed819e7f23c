"""The text log of a GRPO trainer (docs/evidence.md#grpo-notes): its grammar, as data, read and written.

      [Micro 0] 1. Iteration start: mem=0MB, time=0.000s, masks_in_X=20/48 (41.7%)
      [Micro 0] 3. Samples scored: mem=0MB, time=0.192s, rewards=0.5164±0.0005
      WARNING: All sequence_log_probs are near zero! num_masked=0.0
      [Micro 0] 4. Loss computed: mem=0MB, time=0.436s, pg_loss=-0.000000, kl=0.000000, total=0.000000
      5. Optimizer step finished: mem=0MB, time=3.204s total
    iter 0: loss 0.0264 (main 0.0264, critic 0.0000), time 3203.87ms, mfu -100.00%

Later commits number the steps differently, put losses on lines of their own and log more of them; steps
are therefore known by their titles and values by their keys. Every line may stand behind a logger's prefix.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from msgspec import Struct, field

from replay_core.regexes import regex

#: A log is read line by line; past this a line is no line of a log.
MAX_LINE = 1 << 16

_ANSI = regex(r"\x1b\[[0-9;]*[A-Za-z]")
_MICRO = regex(r"\[Micro (\d{1,9})\] (\d{1,3}[a-z]?)\. ([^:]{1,80})(?::\s*(.*))?$")
_OPTIMIZER = regex(r"(?:^|\s)(\d{1,3})\. (Optimizer step finished): (.*)$")
_ITER = regex(
    r"\biter (\d{1,12}): loss (\S+?)(?: \(main (\S+?), critic (\S+?)\))?, time (\S+?)ms"
    r"(?:, mfu (\S+?)%)?(?:, mem (.*))?$"
)
_WARNING = regex(r"WARNING: (.*)$")
_LOSSES = regex(r"^\s*(?:pg_loss|kl_penalty|total|avg_seq_log_prob|avg_advantage|avg_kl)=")
_NUMBER = r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?|[-+]?(?:nan|inf)"
_PAIR = regex(rf"(?<![\w.])(\w+)=({_NUMBER})(?:±({_NUMBER})|/(\d+) \(({_NUMBER})%\)|\s?(MB|GB|s)\b)?", re.IGNORECASE)


class StepStage(Struct):
    """One numbered line: what was done, and its values by key (`rewards` and `rewards_std` of `rewards=a±b`)."""

    number: str
    title: str
    values: dict[str, float] = field(default_factory=dict)
    time_is_total: bool = False
    """The time counts from the beginning of the micro-batch."""
    line: int = 0
    """Where the log says it, counted from 1."""
    later_lines: dict[str, int] = field(default_factory=dict)
    """Where it says the values that stand on lines of their own."""

    def line_of(self, key: str) -> int:
        return self.later_lines.get(key, self.line)


class Micro(Struct):
    """One micro-batch: its stages in order, and what the trainer warned of meanwhile."""

    index: int
    stages: list[StepStage] = field(default_factory=list)
    warnings: list[tuple[int, str]] = field(default_factory=list)
    """(how many stages came before, the warning)."""
    warning_lines: list[int] = field(default_factory=list)

    def values(self) -> dict[str, float]:
        """Every value of the micro-batch; times and memory by the stage's title."""
        return {key: value for key, (value, _) in self.placed().items()}

    def placed(self) -> dict[str, tuple[float, int]]:
        """The values, each with the line it stands on."""
        found: dict[str, tuple[float, int]] = {}
        for stage in self.stages:
            for key, value in stage.values.items():
                name = key
                if key in ("time", "mem"):
                    so_far = "_so_far" if key == "time" and stage.time_is_total else ""
                    name = f"{key}{so_far}.{_slug(stage.title)}"
                found[name] = value, stage.line_of(key)
        for (_, text), line in zip(self.warnings, [*self.warning_lines, *[0] * len(self.warnings)], strict=False):
            for match in _PAIR.finditer(text):
                found[match.group(1)] = float(match.group(2)), line
        return found


class Iteration(Struct):
    """One optimizer step."""

    step: int
    micros: list[Micro] = field(default_factory=list)
    optimizer: StepStage | None = None
    loss: dict[str, float] = field(default_factory=dict)
    """loss, main, critic, time_ms and, where logged, mfu."""
    memory: str | None = None
    numbered: bool = False
    """The log itself numbers it; else it was counted."""
    warnings: list[str] = field(default_factory=list)
    """What was warned of outside every micro-batch."""
    warning_lines: list[int] = field(default_factory=list)
    line: int = 0
    """Where its `iter` line stands."""

    @property
    def is_complete(self) -> bool:
        return bool(self.loss) or self.optimizer is not None

    @property
    def is_empty(self) -> bool:
        return not (self.micros or self.optimizer or self.loss or self.warnings)


def may_tell(line: str) -> bool:
    """Whether the line can be one of the grammar: a cheap look, for logs of which most lines are not."""
    return (
        "[Micro " in line or "iter " in line or "Optimizer step" in line or "WARNING: " in line
        or _LOSSES.match(line) is not None
    )  # fmt: skip


def parse(lines: Iterable[str | tuple[int, str]]) -> Iterator[Iteration]:
    """The iterations a log tells of, in order. Lines that are none of the grammar are passed over.

    A line is given alone, and then counted, or with its number in the file.
    """
    here = Iteration(0)
    for counted, given in enumerate(lines, 1):
        number, raw = (counted, given) if isinstance(given, str) else given
        line = _ANSI.sub("", raw[:MAX_LINE]).rstrip()
        if match := _ITER.search(line):
            _close(here, match)
            here.line = number
            yield here
            here = Iteration(here.step + 1)
        elif match := _MICRO.search(line):
            micro = int(match.group(1))
            if here.optimizer is not None or (here.micros and micro < here.micros[-1].index):
                # The trainer prints `iter` every n-th step only.
                yield here
                here = Iteration(here.step + 1)
            if not here.micros or here.micros[-1].index != micro:
                here.micros.append(Micro(micro))
            here.micros[-1].stages.append(_stage(match.group(2), match.group(3), match.group(4) or "", number))
        elif match := _OPTIMIZER.search(line):
            here.optimizer = _stage(match.group(1), match.group(2), match.group(3), number)
        elif match := _WARNING.search(line):
            if here.micros:
                here.micros[-1].warnings.append((len(here.micros[-1].stages), match.group(1)))
                here.micros[-1].warning_lines.append(number)
            else:
                here.warnings.append(match.group(1))
                here.warning_lines.append(number)
        elif _LOSSES.match(line) and here.micros and here.micros[-1].stages:
            stage, values = here.micros[-1].stages[-1], _values(line)
            stage.values.update(values)
            stage.later_lines.update(dict.fromkeys(values, number))
    if not here.is_empty:
        yield here


def _close(here: Iteration, match: re.Match[str]) -> None:
    here.step, here.numbered = int(match.group(1)), True
    names = ("loss", "main", "critic", "time_ms", "mfu")
    numbers = {name: _number(text) for name, text in zip(names, match.groups()[1:6], strict=True) if text is not None}
    here.loss = {name: number for name, number in numbers.items() if number is not None}
    here.memory = match.group(7)


def _stage(number: str, title: str, values: str, line: int) -> StepStage:
    return StepStage(number, title.strip(), _values(values), "(total so far)" in values, line)


def _values(text: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for key, value, spread, whole, percent, _unit in _PAIR.findall(text):
        found[key] = float(value)
        if spread:
            found[f"{key}_std"] = float(spread)
        if whole:
            found[f"{key}_of"] = float(whole)
        if percent:
            found[f"{key}_percent"] = float(percent)
    return found


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _slug(title: str) -> str:
    return re.sub(r"\W+", "_", title.strip().lower())


def lines_of(iteration: Iteration) -> Iterator[str]:
    """The iteration as its trainer would have logged it."""
    yield from (f"  WARNING: {text}" for text in iteration.warnings)
    for micro in iteration.micros:
        for done, stage in enumerate(micro.stages):
            yield from (f"  WARNING: {text}" for before, text in micro.warnings if before == done)
            yield f"  [Micro {micro.index}] {_stage_text(stage)}"
        yield from (f"  WARNING: {text}" for before, text in micro.warnings if before >= len(micro.stages))
    if iteration.optimizer is not None:
        yield f"  {_stage_text(iteration.optimizer)} total"
    if iteration.loss:
        yield _iter_text(iteration)


def _stage_text(stage: StepStage) -> str:
    parts = []
    for key, value in stage.values.items():
        if key.endswith(("_std", "_of", "_percent")) and key.rpartition("_")[0] in stage.values:
            continue
        if key == "mem":
            parts.append(f"mem={value:.0f}MB")
        elif key == "time":
            parts.append(f"time={value:.3f}s" + (" (total so far)" if stage.time_is_total else ""))
        elif f"{key}_std" in stage.values:
            parts.append(f"{key}={value:.4f}±{stage.values[key + '_std']:.4f}")
        elif f"{key}_of" in stage.values:
            share = stage.values.get(f"{key}_percent", 0.0)
            parts.append(f"{key}={value:.0f}/{stage.values[key + '_of']:.0f} ({share:.1f}%)")
        else:
            parts.append(f"{key}={value:.6f}")
    return f"{stage.number}. {stage.title}: {', '.join(parts)}"


def _iter_text(iteration: Iteration) -> str:
    loss = {"loss": 0.0, "time_ms": 0.0, **iteration.loss}
    parts = f" (main {loss['main']:.4f}, critic {loss.get('critic', 0.0):.4f})" if "main" in loss else ""
    text = f"iter {iteration.step}: loss {loss['loss']:.4f}{parts}, time {loss['time_ms']:.2f}ms"
    if "mfu" in iteration.loss:
        text += f", mfu {iteration.loss['mfu']:.2f}%"
    return text + (f", mem {iteration.memory}" if iteration.memory else "")
