"""Metrics that trainers log as JSON: one record of scalars per step.

trainer_state.json   {"log_history": [{"loss": …, "step": 1}, …]}     transformers, TRL
log_history.json, metrics*.json                                       the list alone, or one flat mapping
logging.jsonl, metrics*.jsonl                                         a flat mapping per line
any other .jsonl      {"step": 1, "train/loss": …, …} per line: a step, and a loss, a rate or a norm of the gradient
progress.csv, metrics*.csv, wandb_export*.csv                         a head with a step, and rows of numbers
any .jsonl or .json   {"step": 1, "tag": "train/loss", "value": 0.1} one number a row (TensorBoard, MLflow)
EXPERIMENT.jsonl     {"step": 1, "data": {…}} per line                  verl's file logger
                     {"step": 1, "actor": {"pg_loss": …}, …} per line   EasyR1's: rooms in rooms, read as actor/pg_loss
A file that is named itself may be called anything: a table (`metric_tables.py`), rows that count, columns by name
history.json         {"step": [1, 2, …], "reward": [0.1, 0.2, …]}
run.json             {"total_steps": 266, "steps": [{"step": 1, "loss": …}, …]}, the one list of rows of a mapping
A .jsonl may begin with rows that tell of the run (`_heads`).
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from replay_core.dumps import metric_tables
from replay_core.dumps.containers import read_container
from replay_core.dumps.dialect import Dialect, Index, alone, any_of
from replay_core.dumps.fields import flatten
from replay_core.dumps.json_rows import Row, first_row, names_with, numbered, rows_by_place
from replay_core.dumps.listing import listing
from replay_core.dumps.metric_tables import OF_A_RUN, metric_names, metric_rows
from replay_core.dumps.words import metric_name
from replay_core.errors import DumpError, RldbgError
from replay_core.file_spans import kept_while_unchanged, regular
from replay_core.records import Fields, Problem, RecordKey, TensorRef
from replay_core.regexes import regex

_OF_TRAINING = frozenset(("loss", "grad_norm", "train/loss", "train/grad_norm", "actor/grad_norm", "actor/pg_loss"))
_WHOLE = regex(r"/(?:trainer_state|log_history|[^/]*metrics[^/]*)\.json$")
_LINES = regex(r"/(?:logging|[^/]*metrics[^/]*)\.jsonl$")
_TABLE = regex(r"/(?:progress|history|log|wandb_export[^/]*|[^/]*metrics[^/]*)\.csv$", re.IGNORECASE)
#: What TensorBoard's page gives of one of a run's curves: a file for each, run-grpo_1-tag-train_reward.csv.
_OF_A_CURVE = regex(r"/[^/]*\btag-[^/]+\.csv$")
#: What no row of samples holds: a file of such rows is one of metrics, whatever it is called.
_TRAINED = regex(r"(?:^|[/_.])(?:loss|grad_norm|learning_rate|lr)$")
#: And what one of a policy's metrics holds.
_OF_A_POLICY = regex(r"(?:^|[/_.])(?:rewards?|kl|entropy|score|return)(?:$|[/_.])")
#: Records of one step or rank each, which another dialect reads.
_OF_A_RECORD = regex(r"/(?:step|rank|index)_?[^/]*\d[^/]*\.jsonl$")
_STEP_IN_NAME = regex(r"step[_=-]?(\d+)")
#: ms-swift writes the step beside the last one: "9/547".
SWIFT_STEP = "global_step/max_steps"
#: What frameworks call the step of a row of metrics.
STEP_FIELDS = ("step", "global_step", "current_steps", "_step", "train_step", "global_steps", "rollout_id", "iter",
"it", "iteration", SWIFT_STEP)  # fmt: skip

NUMBERED = "rows that name no step are numbered in the order they stand in"


def _files(path: Path) -> Iterator[Path]:
    for folder in listing(path).folders:
        curves = {file.rpartition("tag-")[0] for file in names_with(folder, ".csv") if _OF_A_CURVE.search(f"/{file}")}
        for file in names_with(folder, ".json", ".jsonl", *metric_tables.SUFFIXES):
            text = f"{folder.path}/{file}"
            if file.endswith(metric_tables.SUFFIXES):
                # Curves of several runs beside each other are told apart by their names alone: none is read.
                is_curve = len(curves) == 1 and _OF_A_CURVE.search(text) is not None
                is_known = path.is_file() or is_curve or _TABLE.search(text)
                names = metric_names(folder.file(file), path.is_file()) if is_known else []
                if names and (path.is_file() or is_curve or any(map(_TRAINED.search, names))):
                    yield folder.file(file)
                continue
            if file.endswith(".jsonl"):
                first = _first(folder.file(file))
                row = None if first is None else _unwrapped(first)
                if first is None or row is None or not _is_flat(row):
                    continue
                rooms = row is not first and (first.keys() == {"step", "data"} or any(map(_TRAINED.search, row)))
                named = _LINES.search(text) or rooms or (path.is_file() and _count(folder.file(file)))
                if _is_of_one(first) and _tags_tell(folder.file(file)):
                    yield folder.file(file)
                    continue
                # Whatever a log of one's own is called (wandb.jsonl): one number per step of what only training has.
                own = any(map(_TRAINED.search, row)) and not _OF_A_RECORD.search(text)
                if named or (own and (path.is_file() or not row.keys().isdisjoint(STEP_FIELDS))):
                    yield folder.file(file)
            # A file that is named itself may be called anything: then its rows have to be a trainer's.
            elif (known := _WHOLE.search(text) is not None) or path.is_file():
                rows = _history(folder.file(file), None)
                if any(known or not _OF_TRAINING.isdisjoint(row) for row in rows) or (not known and _counts(rows)):
                    yield folder.file(file)


#: What rows count by, whatever they tell of it; rows that are looked at; letters of a label.
_COUNTERS = (*STEP_FIELDS, "episode", "epoch", "update", "batch", "round", "timestep", "timesteps")
_LOOKED, _A_LABEL = 40, 60
#: Of rows that count, the share that goes on from the one before: a run may begin anew.
_GO_ON = 0.75


def _count(file: Path) -> bool:
    """Whether the first lines of a file are rows that count."""
    with regular(file) as opened:
        lines = [opened.readline(1 << 16) for _ in range(_LOOKED)][_heads(file) :]
    rows = [_unwrapped(mapping) for line in lines if line.strip() and (mapping := _mapping(line)) is not None]
    return _counts(rows if all(map(_is_flat, rows)) else [])


def _counts(rows: list[dict[str, Any]]) -> bool:
    """Whether rows (3 and more) count something, on from each to the next in most, and tell other numbers of it and no
    texts: one row of many samples of a step does not.
    """
    rows = rows[:_LOOKED]
    for name in _COUNTERS:
        steps = [row[name] for row in rows if _is_number(row.get(name))]
        on = sum(b > a for a, b in pairwise(steps))
        if len(steps) < max(3, len(rows) - 1) or on < _GO_ON * (len(steps) - 1):
            continue
        labels = [value for row in rows for value in row.values() if isinstance(value, str)]
        others = {each for row in rows for each, value in row.items() if _is_number(value) and each not in _COUNTERS}
        return bool(others) and all(len(label) <= _A_LABEL for label in labels)
    return False


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


#: What a row says it is that tells of the run and not of a step; rows of it at a file's begin, and bytes of one.
_OF_THE_RUN = frozenset(("config", "meta", "metadata", "header", "args", "arguments", "hparams", "settings"))
_HEADS, _A_HEAD = 3, 1 << 16


@kept_while_unchanged(64)
def _heads(file: Path) -> int:
    """How many rows of a .jsonl stand before its first row of metrics: they name no step, hold more than numbers or
    say what they are, and what follows is flat and names one. 0 where it begins with metrics, or is none of them.
    """
    with regular(file) as opened:
        for at in range(_HEADS + 1):
            row = _mapping(opened.readline(_A_HEAD))
            if row is None:
                return 0
            if not row.keys().isdisjoint(STEP_FIELDS):
                return at if _is_flat(_unwrapped(row)) else 0
            said = {row.get(name) for name in ("event", "type", "kind") if isinstance(row.get(name), str)}
            if _is_flat(row) and _OF_THE_RUN.isdisjoint(said):
                return 0
    return 0


def _first(file: Path) -> dict[str, Any] | None:
    """The first row of metrics of a .jsonl, or its very first row."""
    heads = _heads(file)
    if not heads:
        return first_row(file)
    with regular(file) as opened:
        return [_mapping(opened.readline(_A_HEAD)) for _ in range(heads + 1)][heads]


#: What a row says that is of held-out prompts, and not of the training.
_HELD_OUT = ("eval", "evaluation", "val", "valid", "validation", "test", "heldout", "held_out")
_SAID_SO = tuple(f"{name}{mark}" for name in _HELD_OUT for mark in "/_")
_SAID_BY = ("split", "phase", "mode", "kind", "type", "event", "stage")


def _of_held_out(row: dict[str, Any]) -> dict[str, Any]:
    """A row of an evaluation, which says so beside its numbers, with names that say so, too."""
    flagged = any(row.get(name) is True for name in _HELD_OUT)
    if not flagged and not any(row.get(name) in _HELD_OUT for name in _SAID_BY if isinstance(row.get(name), str)):
        return row
    figures = {
        name for name, value in row.items()
        if _is_number(value) and name not in _COUNTERS and not name.startswith(_SAID_SO)
    }  # fmt: skip
    return {f"eval/{name}" if name in figures else name: value for name, value in row.items()}


#: What a row of one metric calls its name, and its number.
_TAG, _OF_TAG = ("tag", "metric", "key", "name", "metric_name", "variable", "series"), ("value", "val")


def _is_of_one(row: dict[str, Any]) -> bool:
    """Whether a row has a metric's name and its value beside a step, and no number of its own."""
    return (
        any(isinstance(row.get(name), str) for name in _TAG)
        and any(name in row for name in _OF_TAG)
        and not row.keys().isdisjoint(STEP_FIELDS)
        and len(row) <= _WIDEST
    )


#: Fields of a row of one metric: its clock, run and host beside it. Bytes that are looked at for names of training.
_WIDEST, _LOOKED_BYTES = 8, 1 << 18


def _tags_tell(file: Path) -> bool:
    """Whether rows of one metric each, at the beginning of a file, name one that trainers watch."""
    with regular(file) as opened:
        rows = [_mapping(line) for line in opened.read(_LOOKED_BYTES).splitlines()]
    names = [name for row in rows if row is not None and _is_of_one(row) for name in _unwrapped(row)]
    return any(_TRAINED.search(name) or _OF_A_POLICY.search(name) for name in names)


def _unwrapped(row: dict[str, Any]) -> dict[str, Any]:
    """A row's metrics: verl's file logger keeps them under `data`, beside the step; a row of one metric has its name in
    one field and its number in another.
    """
    if _is_of_one(row):
        step = {name: row[name] for name in STEP_FIELDS if name in row}
        name = next(row[name] for name in _TAG if isinstance(row.get(name), str))
        value = next(row[name] for name in _OF_TAG if name in row)
        return {**step, name: value} if _is_number(value) else step
    inner = row.get("data")
    if isinstance(inner, dict) and row.keys() == {"step", "data"}:
        return {"step": row["step"], **inner}
    if not any(isinstance(value, dict) for value in row.values()) or row.keys().isdisjoint(STEP_FIELDS):
        return row
    # Rooms in rooms: only of numbers, or it is a sample's record that has a mapping among other things.
    leaves = dict(_leaves(row, ""))
    known = any(_TRAINED.search(name) or _OF_A_POLICY.search(name) for name in leaves) and all(
        value is None or isinstance(value, (int, float)) for value in leaves.values()
    )
    return leaves if known else row


def _leaves(tree: dict[str, Any], room: str) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{room}{name}/")
        else:
            yield f"{room}{name}", value


def _is_flat(row: Any) -> bool:
    """Whether a mapping holds scalars, at least one of them a number."""
    return (
        isinstance(row, dict)
        and any(isinstance(value, (int, float)) and not isinstance(value, bool) for value in row.values())
        and not any(isinstance(value, (list, dict)) for value in row.values())
    )


def _history(file: Path, problems: list[Problem] | None) -> list[dict[str, Any]]:
    """The rows of a document of metrics; none where it is something else."""
    if file.suffix in metric_tables.SUFFIXES:
        return [row for row in metric_rows(file, [] if problems is None else problems) if _is_flat(row)]
    try:
        content = read_container(file)
    except RldbgError as error:
        if problems is not None:
            problems.append(Problem(str(file), error.message))
        return []
    tree = content.tree
    if isinstance(tree, dict) and isinstance(tree.get("log_history"), list):
        tree = tree["log_history"]
    elif (listed := _listed(tree)) is not None:
        tree = listed
    rows = _of_one_each(tree) if isinstance(tree, list) else _by_columns(tree) or [_summary(tree)]
    return [row for row in rows if _is_flat(row)] if content.container == "json" else []


def _of_one_each(rows: list[Any]) -> list[Any]:
    """Rows as they are; those of one metric each together by their step."""
    if not rows or not all(isinstance(row, dict) and _is_of_one(row) for row in rows):
        return rows
    merged: dict[Any, dict[str, Any]] = {}
    for row in map(_unwrapped, rows):
        merged.setdefault(_step(row), {}).update(row)
    return [merged[step] for step in sorted(merged, key=lambda step: (step is None, step or 0))]


def _listed(tree: Any) -> list[Any] | None:
    """The one list of a mapping's values that holds rows of numbers (3 and more), as a run's own account has it."""
    if not isinstance(tree, dict):
        return None
    lists = [
        value for value in tree.values()
        if isinstance(value, list) and len(value) >= _COLUMN and sum(map(_is_flat, value)) > len(value) / 2
    ]  # fmt: skip
    if len(lists) != 1:
        return None
    rows = [row for row in lists[0] if _is_flat(row)]
    trained = any(not _OF_TRAINING.isdisjoint(row) for row in rows)
    return lists[0] if trained or _counts(rows) else None  # tasks of an evaluation are no steps


def _by_columns(tree: Any) -> list[dict[str, Any]]:
    """The rows of a mapping of columns, of which one counts; none of any other."""
    if not isinstance(tree, dict):
        return []
    columns = {
        name: values for name, values in tree.items()
        if isinstance(values, list) and len(values) >= _COLUMN
        and all(each is None or _is_number(each) for each in values)
    }  # fmt: skip
    sizes = {len(values) for values in columns.values()}
    if len(columns) < 2 or len(sizes) != 1:
        return []
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return rows if _counts(rows) else []


#: Rows of a column that make it one.
_COLUMN = 3
#: What wandb adds to the summary of a run, beside its last metrics: files, tables and its own account are mappings.
_OF_WANDB = ("_wandb", "_runtime", "_timestamp")


def _summary(tree: Any) -> Any:
    """A mapping as it is; of a tracker's summary of a run its numbers alone."""
    if not isinstance(tree, dict) or not any(name in tree for name in _OF_WANDB):
        return tree
    return {name: value for name, value in tree.items() if not isinstance(value, (dict, list)) and name[0] != "_"}


def index(path: Path) -> Index:
    found = Index([])
    seen: dict[Path, tuple[Path, set[int | None]]] = {}
    files = sorted(_files(path), key=lambda file: (len(file.parts), file.name != "trainer_state.json", str(file)))
    for file in files:
        steps = _steps(file, found)
        # transformers keeps the same history in the run's folder, in every checkpoint, and TRL scripts beside it.
        root = next((known for known in seen if file.parent == known or known in file.parents), None)
        if root is not None and _is_history(file) and set(steps) <= seen[root][1]:
            found.notes.append(f"{file.name} repeats {seen[root][0].name}: {file} is left out")
            continue
        if _is_history(file):
            seen.setdefault(file.parent, (file, set(steps)))
        found.files += [(RecordKey(step, None, None, None, "training_metrics"), file) for step in steps]
        found.facts |= _settings(file) | _planned(file)
        found.notes += _runs_said(file)
    return found


def _runs_said(file: Path) -> list[str]:
    """That a table holds several runs, where it does."""
    if file.suffix not in metric_tables.SUFFIXES:
        return []
    runs = {name.partition(OF_A_RUN)[0] for row in _history(file, []) for name in row if OF_A_RUN in name}
    if len(runs) < 2:
        return []
    return [f"{file.name} holds {len(runs)} runs, each judged by itself: {', '.join(sorted(runs))}"]


#: What a row calls the step that the run is to end with.
_PLANNED = ("total_steps", "max_steps")


def _planned(file: Path) -> dict[str, Any]:
    """How many steps the run was to take, and its epochs, as the last row of lines or transformers' state says."""
    if file.suffix == ".jsonl":
        with regular(file) as opened:
            opened.seek(max(0, opened.seek(0, 2) - _LAST_BYTES))
            lines = opened.read(_LAST_BYTES).splitlines()
        row: Any = next((mapping for line in reversed(lines) if (mapping := _mapping(line)) is not None), {})
        _, _, last = str(row.get(SWIFT_STEP, "")).partition("/")
        said: Any = next((row[name] for name in _PLANNED if name in row), int(last) if last.isdecimal() else None)
        epochs: Any = row.get("epoch")
    elif file.name.endswith(".json"):
        try:
            tree = read_container(file).tree
        except RldbgError:
            return {}
        is_state = isinstance(tree, dict) and isinstance(tree.get("log_history"), list)
        said, epochs = (tree.get("max_steps"), tree.get("epoch")) if is_state else (None, None)
    else:
        return {}
    facts: tuple[tuple[str, Any], ...] = ((PLANNED, said), (EPOCHS, epochs))
    return {
        name: number for name, number in facts
        if isinstance(number, (int, float)) and not isinstance(number, bool) and math.isfinite(number) and number > 0
    }  # fmt: skip


#: The facts that hold it, and the epochs that the data was gone through; how much of a file's end is looked at.
PLANNED, EPOCHS, _LAST_BYTES = "planned_steps", "epochs_seen", 1 << 14


def _mapping(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _settings(file: Path) -> dict[str, Any]:
    """The configuration that a metrics file begins with; empty where its first row is one of metrics."""
    if file.suffix != ".jsonl":
        return {}
    with regular(file) as opened:
        line = opened.readline(1 << 16)
    try:
        row = json.loads(line)
    except ValueError:
        return {}
    if not isinstance(row, dict):
        return {}
    if "config" in (row.get("event"), row.get("type"), row.get("kind")):
        return row
    if _is_of_one(row):
        row = {"config": _text_of(row)}
    config = row.get("config")
    return config if isinstance(config, dict) else {}


def _text_of(row: dict[str, Any]) -> Any:
    """The settings that a row of one metric holds as a text of JSON, as TensorBoard's summaries do."""
    text = next(row[name] for name in _OF_TAG if name in row)
    try:
        return json.loads(text) if isinstance(text, str) and text[:1] == "{" else None
    except ValueError:
        return None


def _is_history(file: Path) -> bool:
    return file.name in ("trainer_state.json", "log_history.json")


def _steps(file: Path, found: Index) -> list[int | None]:
    try:
        if file.suffix == ".jsonl":
            rows = rows_by_place(file, STEP_FIELDS)
            found.problems += rows.problems
            places = [_known(row.places) for row in rows.rows[_heads(file) :]]
        else:
            places = [_step(row) for row in _history(file, found.problems)]
    except RldbgError as error:
        found.problems.append(Problem(str(file), error.message))
        return [None]
    if _is_tagged(file):
        return list(_together(places))
    return list(_numbered(places, file, found.notes))


def _numbered(places: list[int | None], file: Path, notes: list[str] | None) -> dict[int | None, list[int]]:
    """Step -> positions of its rows. Where no row names one, the order numbers them."""
    by_step: dict[int | None, list[int]] = defaultdict(list)
    places = _mended(places, file, notes)
    unnamed = all(place is None for place in places)
    in_name = _STEP_IN_NAME.search(file.name)
    runs = runs_in(places)
    if len(runs) > 1:
        first, last = next((run for run in reversed(runs) if run[1] - run[0] >= A_RUN), runs[-1])
        if notes is not None:
            notes.append(f"{file.name} holds {len(runs)} runs one after another: the last is read, rows {first + 1} on")
    else:
        first, last = 0, len(places)
    for position, place in enumerate(places[:last]):
        if position < first:
            continue
        if unnamed and len(places) == 1 and in_name:
            place = int(in_name.group(1))
        elif unnamed and len(places) > 1:
            place = position
            if notes is not None and NUMBERED not in notes:
                notes.append(NUMBERED)
        by_step[place].append(position)
    return by_step


def _is_tagged(file: Path) -> bool:
    """Whether lines are of one metric each."""
    return file.suffix == ".jsonl" and (first := _first(file)) is not None and _is_of_one(first)


def _together(places: list[int | None]) -> dict[int | None, list[int]]:
    """Step -> positions of its rows, of one metric each: a metric's steps may stand behind those of another."""
    by_step: dict[int | None, list[int]] = defaultdict(list)
    for position, place in enumerate(places):
        by_step[place].append(position)
    return dict(sorted(by_step.items(), key=lambda one: (one[0] is None, one[0] or 0)))


#: Of a file's rows, one in so many may have a wrong number; and from how many rows on it shows.
_ONE_IN, _SHOWS = 20, 20


def _mended(places: list[int | None], file: Path, notes: list[str] | None) -> list[int | None]:
    """Steps, a single wrong one between two of its neighbours put right: 205, 20699, 207 are 205, 206, 207. Who writes
    a log by hand, or whose writer breaks off in a number, has such; sorted by it a row lands at the run's other end.
    """
    found = {
        at: (before + after) // 2
        for at, (before, here, after) in enumerate(zip(places, places[1:], places[2:], strict=False), 1)
        if before is not None and here is not None and after is not None
        and after - before == 2 and not before < here < after
    }  # fmt: skip
    if len(places) < _SHOWS or not 0 < len(found) <= max(1, len(places) // _ONE_IN):
        return places
    if notes is not None:
        told = ", ".join(f"step {step} is written as {places[at]}" for at, step in list(found.items())[:4])
        notes.append(f"{file.name}: {told}; its neighbours say which it is")
    return [found.get(at, place) for at, place in enumerate(places)]


#: Steps that a run has come before another one of the same file begins, and rows that make one.
_COME, A_RUN = 2, 3


def runs_in(places: Sequence[int | None]) -> list[tuple[int, int]]:
    """Where the runs of a file lie, whose steps begin anew: rows that go back to the first step of all, and on from
    there. One alone of most files.
    """
    known = [place for place in places if place is not None]
    if len(known) < len(places) or not known:
        return [(0, len(places))]
    least = min(known)
    starts = [
        at for at in range(1, len(known))
        if known[at] == least and known[at - 1] > least + _COME and (known[at + 1 : at + 2] or [least])[0] <= least + 1
    ]  # fmt: skip
    if known[0] != least:
        return [(0, len(places))]
    return list(zip([0, *starts], [*starts, len(places)], strict=True))


def _known(places: tuple[int | None, ...]) -> int | None:
    return next((place for place in places if place is not None), None)


def _step(row: dict[str, Any]) -> int | None:
    numbers = [row.get(field) for field in STEP_FIELDS]
    beside, _, last = str(row.get(SWIFT_STEP, "")).partition("/")
    if beside.isdecimal() and last:
        numbers.append(int(beside))
    return next(
        (int(n) for n in numbers if isinstance(n, (int, float)) and not isinstance(n, bool) and n == n // 1), None
    )


def several(keys: Sequence[RecordKey], path: Path) -> Iterator[list[TensorRef] | DumpError]:
    """The metrics of some steps; what several rows of one step say of a metric is kept from the last.

    Raises:
        DumpError: the file cannot be opened, or has become shorter.
    """
    for key, (rows, problems) in zip(keys, _told(keys, path), strict=True):
        line, merged = rows[0] if len(rows) == 1 else (None, {})
        lines: dict[str, int | None] = {}
        if len(rows) > 1 or None in merged.values():
            merged = {}
            for line, row in rows:
                told = {field: value for field, value in row.items() if value is not None}
                merged |= told
                lines |= dict.fromkeys(told, line)
        if not merged:
            yield DumpError(f"the file holds no metrics of step {key.step}", file=str(path))
            continue
        fields = flatten(merged)
        for ref in fields:
            ref.canonical, ref.line = metric_name(ref.name, is_scalar=ref.shape == ()), lines.get(ref.name, line)
        yield Fields(fields, problems) if problems else fields


#: Rows of a step, each with its line where the file is one of lines, and what is wrong with some.
_Told = tuple[list[tuple[int | None, dict[str, Any]]], Sequence[Problem]]


def _told(keys: Sequence[RecordKey], path: Path) -> Iterator[_Told]:
    if path.suffix != ".jsonl":
        history = _steps_history(path)
        for key in keys:
            yield [(None, _of_held_out(row)) for row in history.get(key.step, ())], ()
        return
    of_step, damaged = _steps_rows(path)
    chosen = [of_step.get(key.step, []) for key in keys]
    values = numbered(path, [row for rows in chosen for row in rows])
    for rows in chosen:
        told: list[tuple[int | None, dict[str, Any]]] = []
        problems = damaged
        for line, value in islice(values, len(rows)):
            if isinstance(value, Problem):
                problems = (*problems, value)
            else:
                told.append((line, _of_held_out(_unwrapped(value))))
        yield told, problems


@kept_while_unchanged(8)
def _steps_rows(path: Path) -> tuple[dict[int | None, list[Row]], tuple[Problem, ...]]:
    """Step -> its lines, and what is wrong with any: a file may hold a step for every row."""
    found = rows_by_place(path, STEP_FIELDS)
    rows = found.rows[_heads(path) :]
    places = [_known(row.places) for row in rows]
    numbered = _together(places) if _is_tagged(path) else _numbered(places, path, None)
    return {step: [rows[i] for i in positions] for step, positions in numbered.items()}, found.problems


@kept_while_unchanged(4)
def _steps_history(path: Path) -> dict[int | None, list[dict[str, Any]]]:
    """Step -> its rows of one document."""
    history = _history(path, [])
    numbered = _numbered([_step(row) for row in history], path, None)
    return {step: [history[i] for i in positions] for step, positions in numbered.items()}


DIALECT = Dialect(
    "metrics", "names", any_of(_files), index, alone(several), several=several, grows=r"\.(?:jsonl?|csv|tsv)$"
)
