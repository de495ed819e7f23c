"""Text logs as a run of scalars: the GRPO log of seed 002, and the metric lines of other trainers.

{'loss': 0.01, 'grad_norm': 0.8, 'epoch': 0.1}        transformers, TRL, ms-swift
step:3 - actor/pg_loss:0.01 - actor/grad_norm:0.8     verl
step 3: {'train/loss': 0.01, 'train/grad_norm': 0.8}  slime, miles
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from replay_core import naming
from replay_core.dumps import step_log
from replay_core.dumps.dialect import Index
from replay_core.dumps.fields import flatten
from replay_core.dumps.json_rows import names_with
from replay_core.dumps.listing import listing
from replay_core.errors import DumpError
from replay_core.records import Fields, Problem, RecordKey, TensorRef

name = "log"

SUFFIXES = (".log", ".out", ".txt")
#: A log is known by its first lines; a trainer prints its configuration before them.
_HEAD = 1 << 20
_LIKELY = re.compile(rb"\[Micro \d+\] \d|iter \d+: loss |step:\d+ - \S+:-?[\d.]|\{'[\w/.@-]+': '?-?[\d.]")

_VERL = re.compile(r"\bstep:(\d{1,12})((?: - [^\s:]+:[^\s]+)+)")
_VERL_PAIR = re.compile(r" - ([^\s:]{1,200}):(?:np\.float\d+\()?([-+]?[\w.+-]+)\)?")
_SLIME = re.compile(r"\b(?:step|rollout|perf|eval) (\d{1,12}): \{(.*)\}")
_HUGGINGFACE = re.compile(r"\{('[\w/.@-]+': .*)\}")
_DICT_PAIR = re.compile(r"'([^']{1,200})': '?([-+]?(?:[\d.]+(?:[eE][-+]?\d+)?|nan|inf))'?(?=[,}]|$)")
_MEAN = {"rewards": "rewards_mean"}

COUNTED = "steps that the log does not number are counted"


@dataclass(slots=True)
class _Log:
    iterations: list[step_log.Iteration] = field(default_factory=list)
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    counted: bool = False
    ends_inside: int | None = None


def detect(path: Path) -> bool:
    return next(_files(path), None) is not None


def _files(path: Path) -> Iterator[Path]:
    for folder in listing(path).folders:
        for file in names_with(folder, *SUFFIXES):
            if _is_log(folder.file(file)):
                yield folder.file(file)


def _is_log(file: Path) -> bool:
    try:
        with open(file, "rb") as opened:
            head = opened.read(_HEAD)
    except OSError:
        return False
    return b"\0" not in head[:4096] and _LIKELY.search(head) is not None


def _log(path: Path) -> _Log:
    try:
        status = os.stat(path)
        return _parsed(path, status.st_size, status.st_mtime_ns)
    except OSError as error:
        raise DumpError(f"cannot read the log: {error.strerror}", file=str(path)) from None


@lru_cache(maxsize=8)
def _parsed(path: Path, _size: int, _mtime_ns: int) -> _Log:
    log = _Log()
    metrics_counted = 0

    def lines() -> Iterator[str]:
        nonlocal metrics_counted
        with open(path, "rb") as file:
            for raw in iter(lambda: file.readline(step_log.MAX_LINE), b""):
                line = raw.decode(errors="replace")
                step, values = metric_line(line)
                if values:
                    log.counted = log.counted or step is None
                    step = metrics_counted if step is None else step
                    metrics_counted = step + 1
                    log.metrics.setdefault(step, {}).update(values)
                else:
                    yield line

    log.iterations = list(step_log.parse(lines()))
    log.counted = log.counted or any(not iteration.numbered for iteration in log.iterations)
    if log.iterations and not log.iterations[-1].is_complete:
        log.ends_inside = log.iterations[-1].step
    return log


def metric_line(line: str) -> tuple[int | None, dict[str, float]]:
    """The step (None: the line names none) and metrics of a line of metrics; no metrics for any other line."""
    if match := _VERL.search(line):
        return int(match.group(1)), _numbers(_VERL_PAIR.findall(match.group(2)))
    if match := _SLIME.search(line):
        return int(match.group(1)), _numbers(_DICT_PAIR.findall(match.group(2)))
    if match := _HUGGINGFACE.search(line):
        values = _numbers(_DICT_PAIR.findall(match.group(1)))
        step = values.pop("step", None)
        return None if step is None else int(step), values
    return None, {}


def _numbers(pairs: list[tuple[str, str]]) -> dict[str, float]:
    found = {}
    for key, text in pairs:
        try:
            found[key] = float(text)
        except ValueError:
            continue
    return found


def index(path: Path) -> Index:
    found = Index([])
    for file in _files(path):
        try:
            log = _log(file)
        except DumpError as error:
            found.problems.append(Problem(str(file), error.message))
            continue
        keys = [
            RecordKey(iteration.step, micro.index, None, "actor", "loss")
            for iteration in log.iterations
            for micro in iteration.micros
        ]
        keys += [
            RecordKey(iteration.step, None, None, "actor", "optimizer")
            for iteration in log.iterations
            if iteration.is_complete or iteration.warnings
        ]
        keys += [RecordKey(step, None, None, None, "training_metrics") for step in log.metrics]
        repeated = len(keys) - len(set(keys))
        if repeated:
            found.problems.append(
                Problem(str(file), f"{repeated} records are logged twice (a restart?); the last counts")
            )
        found.files += [(key, file) for key in dict.fromkeys(keys)]
        if log.ends_inside is not None:
            found.problems.append(Problem(str(file), f"the log ends inside step {log.ends_inside}"))
        if log.counted and COUNTED not in found.notes:
            found.notes.append(COUNTED)
    return found


def read(key: RecordKey, path: Path) -> list[TensorRef]:
    """The scalars of one micro-batch or step.

    Raises:
        DumpError: the log tells nothing of it.
    """
    log = _log(path)
    if key.stage == "training_metrics":
        return [ref.with_(canonical=_canonical(ref.name)) for ref in flatten(log.metrics.get(key.step or 0, {}))]
    for iteration in reversed(log.iterations):
        if iteration.step != key.step:
            continue
        if key.stage == "optimizer":
            return _fields(_optimizer_values(iteration), iteration.warnings)
        for micro in iteration.micros:
            if micro.index == key.micro:
                return _fields(micro.values(), [text for _, text in micro.warnings])
    raise DumpError(f"the log tells nothing of {key}", file=str(path))


def _optimizer_values(iteration: step_log.Iteration) -> dict[str, float]:
    stage = {} if iteration.optimizer is None else iteration.optimizer.values
    return {**iteration.loss, **{f"{key}.optimizer": value for key, value in stage.items()}}


def _fields(values: dict[str, float], warnings: list[str]) -> Fields:
    named = {_MEAN.get(key, key): value for key, value in values.items()}
    tree = {**named, **({"warnings": warnings} if warnings else {})}
    return Fields(ref.with_(canonical=_canonical(ref.name)) for ref in flatten(tree))


#: The log's words; `total` is the loss of one micro-batch, already divided by the accumulation.
_WORDS = {"kl": "kl_loss", "kl_penalty": "kl_loss", "total": "metrics.total", "loss": "loss", "warnings": "warnings"}


def _canonical(field: str) -> str:
    known = naming.canonical(field, _WORDS)
    return known if known in naming.MEANINGS or field in _WORDS else f"metrics.{field}"
