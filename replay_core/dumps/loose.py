"""Any single file that holds arrays: a state dict, a captured batch, a torch.save of a dict."""

from __future__ import annotations

from pathlib import Path

from replay_core import naming
from replay_core.dumps.containers import read_container
from replay_core.dumps.dialect import Index
from replay_core.dumps.fields import flatten
from replay_core.records import RecordKey, TensorRef

name = "file"


def detect(path: Path) -> bool:
    return path.is_file()


def index(path: Path) -> Index:
    # Reading now makes a file that is no container an error at opening, where the user looks.
    read_container(path)
    return Index(
        [(RecordKey(stage="tensors", role=None), path)], notes=["a single file: it names no step, rank or micro"]
    )


def read(key: RecordKey, path: Path) -> list[TensorRef]:
    return [ref.with_(canonical=naming.canonical(ref.name)) for ref in flatten(read_container(path).tree)]
