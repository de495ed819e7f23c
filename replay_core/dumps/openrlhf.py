"""Recorded inputs of OpenRLHF's Actor.forward: input_dumps/actor_inputs_rank{r}_{timestamp}.pkl, plain pickles.

The files name no step, no micro-batch and no role. They are inferred from rank, timestamp order and
`return_output` (False in the actor's and the reference's logprob forwards, True in training), and the
run says so: a new step begins where a forward follows a training batch, and the second identical half
of a step's forwards is the reference model's (docs/evidence.md#actor-inputs).
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from pathlib import Path
from typing import Any

from replay_core import naming
from replay_core.dumps.containers import read_container
from replay_core.dumps.dialect import Dialect, Index
from replay_core.dumps.fields import flatten
from replay_core.dumps.listing import is_file
from replay_core.dumps.peeking import content_of
from replay_core.errors import RldbgError
from replay_core.file_spans import regular
from replay_core.records import FileBytes, Inline, Problem, RecordKey, TensorRef
from replay_core.regexes import regex

_FILE = regex(r"actor_inputs_rank(\d+)_(\d{8}_\d{6}_\d{6})\.pkl$")
_LIKELY = regex(r"actor_inputs_.*\.pkl$")
_FOLDER = "input_dumps"

INFERRED = (
    "step, micro and role are inferred from rank, timestamp order and return_output: "
    "the files themselves name none of them"
)


def detect(path: Path) -> bool:
    if is_file(path):
        return _LIKELY.fullmatch(path.name) is not None
    return path.is_dir() and any(_LIKELY.fullmatch(file.name) for file in _folder(path).iterdir())


def _folder(path: Path) -> Path:
    return path / _FOLDER if (path / _FOLDER).is_dir() else path


def index(path: Path) -> Index:
    found = Index([], notes=[INFERRED])
    if is_file(path):
        match = _FILE.fullmatch(path.name)
        rank = int(match.group(1)) if match else None
        found.files.append((RecordKey(0, 0, rank, "actor", "batch_inputs"), path))
        return found
    streams: dict[int, list[tuple[str, Path]]] = defaultdict(list)
    odd: list[Path] = []
    for file in sorted(_folder(path).iterdir()):
        match = _FILE.fullmatch(file.name)
        if match:
            streams[int(match.group(1))].append((match.group(2), file))
        elif _LIKELY.fullmatch(file.name):
            odd.append(file)
    for rank, stream in sorted(streams.items()):
        found.files += _infer(rank, [file for _, file in sorted(stream)], found.problems)
    for position, file in enumerate(odd):
        # Kept apart under no step: it cannot be placed in any rank's order.
        found.problems.append(Problem(str(file), "the name has no place in the rank's order; listed without a step"))
        found.files.append((RecordKey(None, position, None, "actor", "batch_inputs"), file))
    return found


def _infer(rank: int, files: list[Path], problems: list[Problem]) -> list[tuple[RecordKey, Path]]:
    """Keys of one rank's files, in order of time."""
    steps: list[list[tuple[Path, bool, int]]] = []
    trained = True
    for file in files:
        training, print_of = False, 0
        try:
            tree = read_container(file).tree
            training = bool(_plain(tree, "return_output"))
            print_of = _print(_plain(tree, "sequences"))
        except RldbgError as error:
            problems.append(Problem(str(file), error.message))
        if trained and not training:
            steps.append([])
        if not steps:
            steps.append([])
        steps[-1].append((file, training, print_of))
        trained = training
    keyed = []
    for step, members in enumerate(steps):
        prints = [print_of for _, training, print_of in members if not training]
        half = len(prints) // 2
        # The reference model gets what the actor got, after it; other inputs are the actor's own.
        twice = half > 0 and 0 not in prints and prints[:half] == prints[half:]
        for micro, (file, training, _) in enumerate(members):
            role = "ref" if twice and not training and half <= micro < len(prints) else "actor"
            keyed.append((RecordKey(step, micro, rank, role, "batch_inputs"), file))
    return keyed


def _print(ref: Any) -> int:
    """A checksum of the token ids: the same inputs have the same one."""
    if not isinstance(ref, TensorRef) or not isinstance(ref.source, FileBytes):
        return 0
    with regular(ref.source.path) as file:
        file.seek(ref.source.offset)
        return zlib.crc32(repr(ref.shape).encode(), zlib.crc32(file.read(min(ref.source.nbytes, 1 << 22))))


def _plain(tree: Any, key: str) -> Any:
    return tree.get(key) if isinstance(tree, dict) else None


def read(key: RecordKey, path: Path) -> list[TensorRef]:
    fields = flatten(content_of(path).tree)
    return [
        ref.with_(
            canonical=naming.canonical(ref.name),
            alignment={"sequences": "full", "attention_mask": "full", "action_mask": "response"}.get(ref.name),
            pad="left+right" if not isinstance(ref.source, Inline) else None,
        )
        for ref in fields
    ]


DIALECT = Dialect("openrlhf", "names", detect, index, read)
