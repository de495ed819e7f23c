"""Tables of metrics: a head of names, then rows of numbers, between commas, semicolons or tabs.

step,beta,kl_divergence,reward                 whatever the columns are called, where the file is named itself
"Step","RUN - reward","RUN - reward__MIN"      wandb's export: of one run its name is left out, several are told apart
run,step,reward                                rows of several runs by turns: told apart by the column that names them
step,metric,value                              a metric per row
Wall time,Step,Value                           TensorBoard's: the metric is what the file is called
"""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from pathlib import Path
from typing import Any

from replay_core.budget import reading, spend_values
from replay_core.file_spans import regular
from replay_core.records import Problem
from replay_core.regexes import regex

SUFFIXES = (".csv", ".tsv")
#: Between a run's name and its metric's: wandb's own way, kept for what several runs of one table log.
OF_A_RUN = " - "
#: Of a table, what is read at most: a million steps of a hundred figures are no log.
_MOST_BYTES = 64 << 20
#: What tables call the step, the surest first: Lightning, wandb, RLlib, Stable-Baselines, and people.
_STEPS = (
    "step", "global_step", "train/global_step", "trainer/global_step", "_step", "training_step", "train_step", "steps",
    "global_steps", "iteration", "training_iteration", "time/iterations", "iter", "it", "update", "rollout",
    "batch", "batch_idx", "episode", "round", "epoch",
)  # fmt: skip
#: A column that only counts rows (pandas' index), or tells what another run's is: no metric.
_COUNTS = regex(r"^(?:Unnamed: \d+|index|#)?$")
_RUNS = regex(r"(?i)^(?:runs?(?:[_ ]?(?:name|id))?|experiment(?:[_ ]name)?|exp(?:_name)?|seed|algo(?:rithm)?|method"
              r"|model(?:[_ ]name)?|config|trial|variant|setting|arm)$")  # fmt: skip
_METRIC, _VALUE = regex(r"(?i)^(?:metric|tag|key|name|variable|series)$"), regex(r"(?i)^(?:value|val)$")
#: Texts of samples: such a table is a set of data, or of answers.
_TEXTS = regex(
    r"(?i)(?:^|[_ /.])(?:prompts?|completions?|questions?|answers?|texts?|responses?|messages?|instruction|query|chosen"
    r"|rejected|content|generations?)$"
)
#: Letters of a cell that is a text, and no figure or label; rows that are looked at.
_A_TEXT, _LOOKED = 120, 40
_OF_TRAINING = regex(r"(?i)(?:^|[_ /.])(?:loss|rewards?|kl|entropy|grad_?norm|return|advantages?)(?:$|[_ /.])")
_A_STEP = regex(r"(?:^|[_/.])(?:steps?|timesteps|iterations?|updates?)$")
_TAGGED = regex(r"(?:^|-)tag-(.+)$")


def metric_rows(file: Path, problems: list[Problem]) -> list[dict[str, Any]]:
    """Rows of a table of metrics; empty cells are metrics that a row does not say. What cannot be read is a problem."""
    with regular(file) as opened:
        stored = opened.read(_MOST_BYTES + 1)
    if len(stored) > _MOST_BYTES:
        problems.append(
            Problem(str(file), f"a table of metrics is read up to {_MOST_BYTES >> 20} MiB: what follows is not")
        )
    text = stored[:_MOST_BYTES].decode("utf-8-sig", "replace")
    with reading(file):
        raw, cells = _cells(file, text, problems)
    if not raw or not cells:
        return []
    names = _named(file, raw)
    if (long := _of_one_metric(names, cells)) is not None:
        return long
    step = _step_column(names, cells)
    run = _run_column(names, cells, step)
    rows = []
    for row in cells:
        before = f"{row[run].strip()}{OF_A_RUN}" if run is not None and run < len(row) else ""
        told: dict[str, Any] = {}
        for at, (name, cell) in enumerate(zip(names, row, strict=False)):
            if name and at != run and (value := number(cell)) is not None:
                told["step" if at == step else before + name] = value
        if told:
            rows.append(told)
    return rows if run is None else _by_step(rows)


def _by_step(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What several runs say of a step as one row: one run behind another would look like a restart."""
    merged: dict[Any, dict[str, Any]] = {}
    for row in rows:
        merged.setdefault(row.get("step"), {}).update(row)
    return [merged[step] for step in sorted(merged, key=lambda step: (step is None, step))]


def metric_names(file: Path, alone: bool) -> list[str]:
    """The names of a table's columns, a run's own left out; none where it is no table of metrics, as far as its first
    rows tell. `alone`: the file is named itself, and its columns may be called anything.
    """
    with regular(file) as opened:
        lines = b"".join(opened.readline(1 << 16) for _ in range(_LOOKED)).decode("utf-8-sig", "replace")
    raw, cells = _cells(file, lines, [])
    if len(raw) < 2 or any(number(name) is not None for name in raw):
        return []
    names = [name for name in _named(file, raw) if name]
    if not alone:
        return names if any(name.lower() in _STEPS for name in names) else []
    texts = (cell for row in cells for name, cell in zip(raw, row, strict=False) if _TEXTS.search(name))
    if not cells or any(cell.strip() and number(cell) is None for cell in texts):
        return []
    if any(len(cell) > _A_TEXT for row in cells for cell in row):
        return []
    told = [{name for name, cell in zip(raw, row, strict=False) if number(cell) is not None} for row in cells]
    if _step_column(_named(file, raw), cells) is None and _of_one_metric(_named(file, raw), cells) is None:
        # Rows that nothing counts may be of models, settings or samples: those have labels.
        has_labels = any(name and not any(name in row for row in told) for name in raw)
        if has_labels or not any(map(_OF_TRAINING.search, names)):
            return []
    # A figure stands in every other row at the least (a run of several is shorter than another): a label never does.
    return names if any(sum(name in row for row in told) * 4 >= len(cells) for name in raw) else []


def _cells(file: Path, text: str, problems: list[Problem]) -> tuple[list[str], list[list[str]]]:
    """The head's names as they stand, and the cells of every row behind it."""
    first = next((line for line in text.splitlines() if line.strip() and not line.startswith("#")), "")
    between = max(",;\t", key=first.count)
    lines = io.StringIO(text, newline="")
    reader = csv.reader(lines, delimiter=between, skipinitialspace=True)
    head: list[str] = []
    rows = []
    try:
        for cells in reader:
            spend_values(len(cells), "cells of a table")
            if not any(cell.strip() for cell in cells) or (not head and cells[0].startswith("#")):
                continue
            if not head:
                head = [cell.strip() for cell in cells]
            else:
                rows.append(cells)
    except csv.Error as error:
        problems.append(Problem(str(file), f"the table cannot be read from line {reader.line_num} on: {error}"))
    return (head, rows) if len(head) > 1 else ([], [])


def _named(file: Path, raw: list[str]) -> list[str]:
    """The names of the columns, "" of one that says nothing of its own: an index."""
    if [name.lower() for name in raw] == ["wall time", "step", "value"]:
        tag = _TAGGED.search(file.stem)
        return ["", "step", tag[1] if tag else file.stem]
    names = ["" if _COUNTS.match(name) else name for name in raw]
    said = [name.rpartition(OF_A_RUN) for name in names if OF_A_RUN in name]
    if said and len({run for run, _, _ in said}) == 1:
        return [name.rpartition(OF_A_RUN)[2] for name in names]
    return names


def _step_column(names: list[str], cells: list[list[str]]) -> int | None:
    """The column that numbers the rows: the surest of those whose numbers are whole. An epoch or episode that many rows
    share numbers none.
    """
    lower = [name.lower().replace(" ", "_") for name in names]
    for wanted in _STEPS:
        if wanted not in lower:
            continue
        at = lower.index(wanted)
        values = [number(row[at]) for row in cells if at < len(row)]
        steps = [value for value in values if value is not None]
        if not steps or any(value != value // 1 for value in steps if math.isfinite(value)):
            continue
        if wanted in ("epoch", "episode", "batch", "batch_idx", "round") and len(set(steps)) < 0.9 * len(steps):
            continue
        return at
    return next((at for at, name in enumerate(lower) if _A_STEP.search(name) and at not in _not_whole(cells)), None)


def _not_whole(cells: list[list[str]]) -> set[int]:
    """The columns that hold other than whole numbers."""
    return {
        at for row in cells for at, cell in enumerate(row)
        if cell.strip() and ((value := number(cell)) is None or not math.isfinite(value) or value != value // 1)
    }  # fmt: skip


def _run_column(names: list[str], cells: list[list[str]], step: int | None) -> int | None:
    """The column that says which run a row is of, where runs tell different things of one step."""
    if step is None:
        return None
    for at, name in enumerate(names):
        if not _RUNS.match(name):
            continue
        runs = {row[at].strip() for row in cells if at < len(row)}
        steps = Counter((row[step], row[at]) for row in cells if max(at, step) < len(row))
        alone = Counter(row[step] for row in cells if step < len(row))
        if 1 < len(runs) <= max(2, len(cells) // 3) and max(steps.values()) < max(alone.values()):
            return at
    return None


def _of_one_metric(names: list[str], cells: list[list[str]]) -> list[dict[str, Any]] | None:
    """The rows of a table that has a metric's name and value in each; None of any other."""
    metric = next((at for at, name in enumerate(names) if _METRIC.match(name)), None)
    value = next((at for at, name in enumerate(names) if _VALUE.match(name)), None)
    step = _step_column(names, cells)
    if metric is None or value is None or step is None:
        return None
    rows: dict[float, dict[str, Any]] = {}
    for row in cells:
        if max(metric, value, step) >= len(row):
            continue
        at, told = number(row[step]), number(row[value])
        if at is not None and told is not None and number(row[metric]) is None:
            rows.setdefault(at, {"step": at})[row[metric].strip()] = told
    return list(rows.values())


_SHARE = regex(r"^[-+]?\d[\d.]*\s?%$")
_THOUSANDS = regex(r"^[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?$")


def number(cell: str) -> float | None:
    """The number that a cell says: a share may be printed in hundredths, a large one with commas."""
    said = cell.strip()
    try:
        if _SHARE.match(said):
            return float(said[:-1]) / 100
        value = float(said.replace(",", "") if _THOUSANDS.match(said) else said)
    except ValueError:
        return None
    return int(value) if math.isfinite(value) and value == int(value) and "." not in said else value
