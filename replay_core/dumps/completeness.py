"""What a dump lacks: holes in its grid of ranks and micro-batches, files that are still being written."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

from replay_core.dumps.listing import few
from replay_core.dumps.peeking import look
from replay_core.errors import RldbgError, UnsafeFileError
from replay_core.records import Problem, RecordKey

#: A file touched less than this ago may not be whole yet.
FRESH_S = 10.0
#: Files of the last step that are looked at; a trainer writes forward.
_LOOKED_AT = 32
#: Written where a mini-batch closes: not every micro-batch has one, but every rank has the same ones.
_CLOSING = frozenset({"gradient", "param", "optimizer", "training_metrics"})
#: How many times as many numbers as records a count may span.
_SPARSE = 8
#: Problems of one kind that are spelled out.
_SPELLED = 8


def holes(keys: Iterable[RecordKey], where: str) -> list[Problem]:
    """Ranks and micro-batches that other steps, or other ranks of the step, have; eight of them are spelled out."""
    problems = every_hole(keys, where)
    if len(problems) > _SPELLED:
        problems[_SPELLED:] = [Problem(where, f"{len(problems) - _SPELLED} {MORE}")]
    return problems


#: How the line ends that counts what is not spelled out.
MORE = "more holes in ranks and micro-batches"


def every_hole(keys: Iterable[RecordKey], where: str) -> list[Problem]:
    """Ranks and micro-batches that other steps, or other ranks of the step, have."""
    grid: dict[str, dict[int, dict[int | None, set[int | None]]]] = defaultdict(lambda: defaultdict(dict))
    roles: dict[str, set[str | None]] = defaultdict(set)
    # Where forwards are counted across roles, a number that a critic's took is none that the actor's lost.
    taken: dict[tuple[int, int | None], dict[str | None, set[int | None]]] = defaultdict(lambda: defaultdict(set))
    for key in keys:
        if key.step is None or (key.rank is None and key.micro is None):
            continue
        grid[key.stage][key.step].setdefault(key.rank, set()).add(key.micro)
        roles[key.stage].add(key.role)
        taken[key.step, key.rank][key.role].add(key.micro)
    problems: list[Problem] = []
    for stage, steps in grid.items():
        strides = {_stride(micros) for by_rank in steps.values() for micros in by_rank.values()}
        evenly = len(steps) > 1 and len(strides) == 1 and None not in strides
        ranks = sorted({rank for by_rank in steps.values() for rank in by_rank if rank is not None})
        never = _gaps(ranks)
        if never:
            problems.append(Problem(where, f"{stage}: rank {few(never)} wrote nothing in any step"))
        for step, by_rank in sorted(steps.items()):
            # A record that names no rank may be all ranks'.
            missing = [] if None in by_rank else [rank for rank in ranks if rank not in by_rank]
            if missing:
                problems.append(_hole(where, f"step {step} {stage}: nothing of rank {few(missing)}", stage, step))
            numbers = {micro for micros in by_rank.values() for micro in micros if micro is not None}
            # Some trainers count on across steps, so a step begins where its first micro-batch is.
            # Numbers with far more gaps than records are no count: a part of them begins at 1000, say.
            whole = bool(numbers) and max(numbers) - min(numbers) < _SPARSE * len(numbers) and stage not in _CLOSING
            # What is there once for several micro-batches (an optimizer's step) has every second number, in all steps.
            whole = whole and not evenly
            expected = set(range(min(numbers), max(numbers) + 1)) if whole else numbers
            for rank, micros in by_rank.items():
                by_role = taken[step, rank]
                others = {micro for role, own in by_role.items() if role not in roles[stage] for micro in own}
                numbered = [own - {None} for own in by_role.values()]
                if sum(map(len, numbered)) > len(set().union(*numbered)):
                    others = set()  # a number that two roles use: each has a count of its own
                counted = {micro for micro in (*micros, *others) if micro is not None}
                lost = sorted(expected - counted) if None not in micros else []
                if lost:
                    of = "" if rank is None else f" of rank {rank}"
                    what = f"step {step} {stage}: micro {few(lost)}{of} is missing"
                    problems.append(_hole(where, what, stage, step, rank))
    return problems


def _stride(micros: set[int | None]) -> int | None:
    """By how many numbers micro-batches lie apart, the same for all; None where they do not, or follow each other."""
    numbers = sorted(micro for micro in micros if micro is not None)
    apart = {after - before for before, after in pairwise(numbers)}
    return apart.pop() if len(apart) == 1 and apart != {1} else None


def _hole(where: str, what: str, stage: str, step: int | None, rank: int | None = None) -> Problem:
    """A problem that a listing marks at the records around the hole."""
    return Problem(where, what, RecordKey(step, None, rank, None, stage))


def _gaps(ranks: Sequence[int]) -> list[int]:
    """Ranks between those that wrote, none where they are evenly spread: every second rank may be a pipeline's last."""
    steps = {after - before for before, after in pairwise(ranks)}
    if len(steps) < 2 or ranks[-1] - ranks[0] > 1 << 16:
        return []
    there = set(ranks)
    return [rank for rank in range(ranks[0], ranks[-1]) if rank not in there]


def being_written(files: Sequence[Path]) -> list[Problem]:
    """Files of the last step that were touched a moment ago and cannot be read: their writer is at work.

    A fresh file that can be read is whole: every container ends with what its beginning promises.
    """
    problems = []
    now = time.time()
    for file in dict.fromkeys(files[-_LOOKED_AT:]):
        if file.suffix == ".csv":
            continue  # a table grows by rows: each that has come is whole
        try:
            age = now - os.stat(file).st_mtime
        except OSError:
            continue
        if not -FRESH_S < age < FRESH_S:
            continue
        try:
            look(file)
        except UnsafeFileError:
            continue  # a whole file that asks for something else: its record says so
        except RldbgError as error:
            age = max(age, 0)
            what = f"touched {age:.0f} s ago and not readable: still being written? ({error.message})"
            problems.append(Problem(str(file), what))
    return problems


def without_repeats(problems: Sequence[Problem]) -> list[Problem]:
    """The problems, without those that another of the same file says with more beside it: a file that was touched a
    moment ago and cannot be read is one, not two."""
    said: dict[str, list[str]] = {}
    for problem in problems:
        said.setdefault(problem.where, []).append(problem.what)
    return [
        one
        for one in dict.fromkeys(problems)
        if not any(f"({one.what})" in other for other in said[one.where] if other != one.what)
    ]
