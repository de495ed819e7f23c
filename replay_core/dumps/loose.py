"""Anything that holds arrays and has no dialect of its own: a state dict, a captured batch, a .npz, a folder of these.

A single file is one record. In a directory every file of tensors that no dialect has claimed is one; its name, or a
folder's above it, may say step, rank and micro-batch; where no name says a step, a number that each file holds does,
or the number that ends its name (`distill-000`) where all hold the same fields and what an update has one of. Else
micro numbers the files in the order of their names.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from replay_core import naming
from replay_core.dumps.dialect import Dialect, Entry, Index
from replay_core.dumps.fields import flatten, settled
from replay_core.dumps.file_places import numbers_of_names, place_below, step_within, told_apart
from replay_core.dumps.listing import contents, is_file, listing
from replay_core.dumps.log_lines import is_text
from replay_core.dumps.log_text import SUFFIXES as LOGS
from replay_core.dumps.peeking import content_of, look, tree_of
from replay_core.dumps.shards import whole
from replay_core.errors import DumpError, NotADumpError
from replay_core.file_spans import regular
from replay_core.records import STAGES, RecordKey, TensorRef

#: In a directory a suffix says which files are worth a look; what they are, their bytes say.
SUFFIXES = frozenset({".pt", ".pth", ".pkl", ".npz", ".npy", ".safetensors", ".dp"})
#: What an update has one of: files that hold it are a step each, and no parts of one.
_OF_AN_UPDATE = frozenset(("loss", "grad_norm", "learning_rate", "lr", "policy_loss", "pg_loss", "actor_loss"))
#: Files that are asked for their step.
_ASKED = 512
#: What is said of response tokens, where a [B, R] mask stands beside [B, T] ids.
_SAID_OF_TOKENS = frozenset(
    field for field, meaning in naming.MEANINGS.items() if meaning.alignment == "next" or field.endswith("_mask")
)


def detect(path: Path) -> bool:
    return is_file(path) or next(_files(path), None) is not None


def _files(path: Path) -> Iterator[Path]:
    for folder in listing(path).folders:
        if not folder.suffixes.isdisjoint(SUFFIXES):
            for entry in folder.names:
                if entry[entry.rfind(".") :] in SUFFIXES:
                    yield folder.file(entry)


def index(path: Path) -> Index:
    if is_file(path):
        # Reading now makes a file that is no container an error at opening, where the user looks.
        try:
            look(path)
        except DumpError as error:
            # A log may begin with a bracket, as JSON does.
            is_log = isinstance(error, NotADumpError) or path.suffix in LOGS
            raise _no_metric(path) if is_log and _is_text(path) else error from None
        key = RecordKey(stage="tensors", role=None)
        return Index([(key, path)], notes=["a single file: it names no step, rank or micro"])
    found = Index([])
    root = os.path.abspath(path)
    for file in _files(path):
        step, rank, micro = (place_below(root, file, part) for part in ("step", "rank", "micro"))
        found.files.append((RecordKey(step, micro, rank, None, _stage(root, file)), file))
    said = _steps_within(found.files) or _steps_by_number(found.files)
    found.files = [(replace(key, step=said.get(file, key.step)), file) for key, file in found.files]
    found.notes.append(
        "files of no known dialect: the step is what they hold or the number of their names, rank and micro are what "
        "their names and folders say, else their order"
        if said
        else "files of no known dialect: step, rank and micro are what their names and folders say, else their order"
    )
    return found


def _stage(root: str, file: Path) -> str:
    """What the folder of a file that names its step is called, where that is a stage of a training step."""
    named = file.parent.name if str(file.parent) != root else ""
    return named if named in STAGES and place_below(root, file, "step") is not None else "tensors"


def _steps_within(entries: list[Entry]) -> dict[Path, int]:
    """The steps of files whose names say none, by what they hold; nothing where a file holds none."""
    if len(entries) > _ASKED or any(key.step is not None for key, _ in entries):
        return {}
    said: dict[Path, int] = {}
    for _, file in entries:
        step = step_within(tree_of(file))
        if step is None:
            return {}
        said[file] = step
    return said


def _steps_by_number(entries: list[Entry]) -> dict[Path, int]:
    """The steps of files that are numbered, and say of themselves no step, rank or micro-batch: each holds the same
    fields, among them what there is once in an update.
    """
    if len(entries) > _ASKED or any((key.step, key.rank, key.micro) != (None, None, None) for key, _ in entries):
        return {}
    numbers = numbers_of_names(file for _, file in entries)
    fields: set[frozenset[str]] = set()
    for file in numbers:
        tree = tree_of(file)
        fields.add(frozenset(map(str, tree)) if isinstance(tree, dict) else frozenset())
        if len(fields) > 1:
            return {}
    return numbers if fields and not next(iter(fields)).isdisjoint(_OF_AN_UPDATE) else {}


def _is_text(path: Path) -> bool:
    with regular(path) as file:
        return is_text(file.read(4096))


def _no_metric(path: Path) -> NotADumpError:
    """A text that is no container is a log without a metric, and that is what is said of it."""
    return NotADumpError(
        "there is no metric in this text",
        file=str(path),
        expected="lines of a trainer: {'loss': 0.1, ...}, step:3 - actor/pg_loss:0.1, step 3 | loss 0.1, "
        "[Micro 0] 4. Loss computed: ..., or a traceback of one that ran out of memory",
        found=contents(path),
        hint="name the log that your trainer writes its loss to; rldbg record -- COMMAND records a run",
    )


def numbered(entries: list[Entry]) -> list[Entry]:
    """Files no other dialect has claimed: those that say no micro-batch are numbered within their step and rank."""
    return told_apart(entries, alone=True)


def read(key: RecordKey, path: Path) -> list[TensorRef]:
    fields = flatten(whole({0: content_of(path).tree}))
    inside = _heads(fields)
    for ref in fields:
        head, _, rest = ref.name.partition(".")
        ref.canonical = naming.canonical(rest if head in inside else ref.name)
    return _aligned(settled(fields))


#: What a batch's columns that are no tensors lie in beside it (verl's DataProto as a plain dict).
_BESIDE = frozenset({"non_tensor_batch"})


def _heads(fields: list[TensorRef]) -> frozenset[str]:
    """Under which one name a dict holds its whole batch, and what stands beside that: what lies there is the record's
    own. None where tokens stand outside, or under several names.
    """
    ids = ("input_ids", "prompt_ids", "response_ids")
    held = {ref.name.partition(".")[0] for ref in fields if naming.canonical(ref.name).rpartition(".")[2] in ids}
    outside = any(naming.canonical(ref.name) in ids for ref in fields)
    if outside or len(held) != 1 or any(naming.is_module_tensor(ref.name) for ref in fields):
        return frozenset()
    return frozenset(held) | _BESIDE


def _aligned(fields: list[TensorRef]) -> list[TensorRef]:
    """Alignment that shapes settle: with ids [B, T] and a mask [B, R], what is [B, R] is said of the response."""
    ids = next((ref for ref in fields if ref.canonical == "input_ids" and len(ref.shape) == 2), None)
    if ids is None:
        return fields
    batch, width = ids.shape
    answer = []
    for ref in fields:
        side = None
        if ref.canonical in naming.MEANINGS and len(ref.shape) == 2 and ref.shape[0] == batch:
            if ref.canonical in ("input_ids", "attention_mask", "position_ids"):
                side = "full"
            elif ref.canonical in _SAID_OF_TOKENS and ref.shape[1] < width:
                side = "next" if ref.shape[1] == width - 1 else "response"
        answer.append(ref.with_(alignment=side) if side else ref)
    return answer


DIALECT = Dialect("file", "rest", detect, index, read, numbered=numbered)
