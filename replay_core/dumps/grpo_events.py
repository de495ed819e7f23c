"""Events captured around a GRPO trainer (docs/evidence.md#grpo-notes): a list of {"kind": "sample" | "judge", …}.

A sample's `tokens` are masked, its `completions` filled in; a judge's `tokens` are the completions it scored.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from replay_core.dumps.dialect import Dialect, Index, any_of
from replay_core.dumps.fields import flatten
from replay_core.dumps.listing import is_file, listing
from replay_core.dumps.peeking import content_of, first_that, has, tree_of
from replay_core.errors import DumpError
from replay_core.records import RecordKey, TensorRef

_MEANING = {"completions": "input_ids", "rewards": "reward"}
_SIDE = {"completions": "full", "tokens": "full", "rewards": "sample"}


def _is_events(tree: Any) -> bool:
    return isinstance(tree, list) and bool(tree) and all(has(event, ("kind", "tokens")) for event in tree[:4])


def _files(path: Path) -> list[Path]:
    if is_file(path):
        return [path] if _is_events(tree_of(path)) else []
    found = []
    for folder in listing(path).folders:
        files = [folder.file(entry) for entry in folder.names if entry.startswith("captured") and entry.endswith(".pt")]
        if files and first_that(files, _is_events):
            found += files
    return found


def index(path: Path) -> Index:
    found = Index([(RecordKey(None, n, None, "rollout", "trajectory"), file) for n, file in enumerate(_files(path))])
    if len(found.files) > 1:
        found.notes.append("captured files name no step: micro numbers them in the order of their names")
    return found


def read(key: RecordKey, path: Path) -> list[TensorRef]:
    """Events by kind and number: `sample.3.input_ids`."""
    tree = content_of(path).tree
    if not _is_events(tree):
        raise DumpError("not a list of captured events", file=str(path), expected="kind and tokens in each")
    counts: dict[str, int] = {}
    fields: list[TensorRef] = []
    for event in tree:
        kind = str(event.get("kind")) if isinstance(event, dict) else "value"
        number = counts[kind] = counts.get(kind, -1) + 1
        inner = (
            {field: value for field, value in event.items() if field != "kind"} if isinstance(event, dict) else event
        )
        for ref in flatten({f"{kind}.{number}": inner}):
            last = ref.name.rpartition(".")[2]
            meaning = "input_ids" if (kind, last) == ("judge", "tokens") else _MEANING.get(last, last)
            side = _SIDE.get(last) if ref.shape else None
            fields.append(ref.with_(canonical=f"{kind}.{number}.{meaning}", alignment=side, order=len(fields)))
    return fields


DIALECT = Dialect("grpo_notes", "content", any_of(_files), index, read)
