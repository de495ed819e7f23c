"""Where a file stands in its run, as far as its name, the folders above it and its neighbours tell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from replay_core.dumps.dialect import Entry
from replay_core.records import RecordKey
from replay_core.regexes import regex

_PARTS = {
    "step": regex(r"(?:global_step|step|rollout|iter)[_=-]?(\d{1,18})"),
    "rank": regex(r"(?<![a-z])rank[_=-]?(\d{1,9})"),
    "micro": regex(r"(?<![a-z])(?:micro(?:_?(?:batch|step|idx))?|call)[_=-]?(\d{1,18})"),
}


def _place_in_name(file: str, part: str) -> int | None:
    """The step, rank or micro that a file's name says."""
    match = _PARTS[part].search(file)
    return int(match.group(1)) if match else None


def place_below(root: str, file: Path, part: str) -> int | None:
    """The step, rank or micro that a file says, else the nearest folder between it and `root`, an absolute path."""
    inside = str(file)[len(root) + 1 :]
    return next(
        (number for name in reversed(inside.split("/")) if (number := _place_in_name(name, part)) is not None), None
    )


#: A name that ends in a number, and words for what is numbered within a step, or is a part of one file.
_NUMBERED = regex(r"(.*?)[_.-]?(\d{1,9})")
_WITHIN_A_STEP = regex(
    r"(?i)(?<![a-z])(?:rank|dp|tp|pp|cp|ep|worker|micro\w*|mini\w*|mb|call|shard|part|chunk|split|of|layer|model|expert|"
    r"node|gpu|device|proc|process|replica|engine|env|sample|row|group|prompt|epoch|seed|run|v)[_.-]?\d*$"
)
#: So many files are a row of them.
_A_ROW = 3


def numbers_of_names(files: Iterable[Path]) -> dict[Path, int]:
    """The numbers that end the names of one folder's files, where these differ in nothing else: `distill-000.npz`,
    `distill-001.npz`. Nothing where a word before the number says that it counts something within a step.
    """
    files = list(files)
    found = {file: match for file in files if (match := _NUMBERED.fullmatch(file.stem)) is not None}
    stems = {(file.parent, match.group(1), file.suffix) for file, match in found.items()}
    numbers = {file: int(match.group(2)) for file, match in found.items()}
    if len(files) < _A_ROW or len(found) < len(files) or len(stems) > 1 or len(set(numbers.values())) < len(files):
        return {}
    stem = next(iter(stems))[1]
    return numbers if stem and not _WITHIN_A_STEP.search(stem) else {}


#: What trainers call the number of a step that stands beside a batch's own fields. Beside a name that says whose step
#: it is, `step` is another's (an environment's).
STEP_FIELDS = ("global_step", "training_step", "train_step", "step", "rollout_id", "iteration")


def step_within(tree: Any) -> int | None:
    """The step that a file's or a row's own fields say."""
    if not isinstance(tree, dict):
        return None
    said = [tree[name] for name in STEP_FIELDS if name in tree]
    return next((step for step in said if isinstance(step, int) and not isinstance(step, bool) and step >= 0), None)


def told_apart(entries: Iterable[Entry], *, alone: bool = False) -> list[Entry]:
    """The entries, those that share a key and say no micro-batch numbered in their order; with `alone` all of those."""
    entries = list(entries)
    shared = Counter(key for key, _ in entries)
    numbers: Counter[RecordKey] = Counter()
    answer = []
    for key, file in entries:
        if key.micro is None and (alone or shared[key] > 1):
            numbers[key] += 1
            key = replace(key, micro=numbers[key] - 1)
        answer.append((key, file))
    return answer
