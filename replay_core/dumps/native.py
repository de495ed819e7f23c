"""rldbg's own dump (docs/dump-format.md): manifest, index per rank, one file per record."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from replay_core import naming
from replay_core.dumps.containers import read_container
from replay_core.dumps.dialect import Index
from replay_core.dumps.fields import flatten
from replay_core.errors import DumpError
from replay_core.records import STAGES, Problem, RecordKey, TensorRef

name = "native"

#: The newest layout this version reads.
FORMAT_VERSION = 1

_FILE = re.compile(r"step_(\d{6,})(?:_rank(\d+))?(?:_micro(\d+))?\.(pt|safetensors)$")
_KEY_FIELDS = ("step", "rank", "micro_idx", "epoch", "minibatch")


def detect(path: Path) -> bool:
    manifest = path / "manifest.json"
    if not manifest.is_file():
        return False
    with open(manifest, "rb") as file:
        return b'"rldbg-dump"' in file.read(4096)


def index(path: Path) -> Index:
    manifest = _manifest(path / "manifest.json")
    found = Index([], flags=manifest["flags"] or None)
    for step, reference in manifest["models"].items():
        if step != "*" and not step.isdecimal():
            found.problems.append(Problem(str(path / "manifest.json"), f"{step!r} is no step; its model is ignored"))
            continue
        found.models[None if step == "*" else int(step)] = _model_path(path, str(reference))
    keys, found.names = _indexed(path, found.problems)
    for file in sorted(path.rglob("step_*")):
        match = _FILE.fullmatch(file.name)
        inside = file.relative_to(path).parts
        if match is None or "checkpoints" in inside:
            continue
        found.files.append((keys.pop(file) if file in keys else _key_of(inside, match), file))
    for missing in keys:
        found.problems.append(Problem(str(missing), "the index lists a record whose file is gone"))
    return found


def _manifest(file: Path) -> dict[str, Any]:
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise DumpError(f"the manifest cannot be read: {error}", file=str(file)) from None
    if not isinstance(manifest, dict) or not all(
        isinstance(manifest.get(part, {}), dict) for part in ("models", "flags")
    ):
        raise DumpError("the manifest is none of rldbg's", file=str(file), expected="an object with models and flags")
    version = manifest.get("schema_version")
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise DumpError(
            "the dump was written by a newer rldbg",
            file=str(file),
            expected=f"schema_version <= {FORMAT_VERSION}",
            found=str(version),
            hint="pip install --upgrade rldbg",
        )
    return {"models": {}, "flags": {}, **manifest}


def _model_path(dump: Path, reference: str) -> str:
    """A relative reference is a directory inside the dump; a path that leads out of it stays a plain name."""
    inside = (dump / reference).resolve()
    if not Path(reference).is_absolute() and inside.is_relative_to(dump.resolve()) and inside.is_dir():
        return str(inside)
    return reference


def _indexed(path: Path, problems: list[Problem]) -> tuple[dict[Path, RecordKey], dict[Path, tuple[str, ...]]]:
    """Keys and field names as the index files give them. A line cut short by a crash is a problem, not an end."""
    keys: dict[Path, RecordKey] = {}
    names: dict[Path, tuple[str, ...]] = {}
    root = path.resolve()
    for index_file in sorted(path.glob("index_rank*.jsonl")):
        for number, line in enumerate(index_file.read_bytes().splitlines(), 1):
            try:
                entry = json.loads(line)
                key = RecordKey.from_mapping(entry["key"])
                file = path / entry["file"]
                fields = tuple(str(field["name"]) for field in entry["fields"])
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                problems.append(Problem(f"{index_file}:{number}", "unreadable index line; its file is read by name"))
                continue
            if not file.resolve().is_relative_to(root):
                problems.append(Problem(f"{index_file}:{number}", "points outside the dump; ignored"))
                continue
            keys[file] = key
            names[file] = fields
    return keys, names


def _key_of(inside: tuple[str, ...], match: re.Match[str]) -> RecordKey:
    """A record's key from its place alone: [<role>/]<stage>/step_..."""
    step, rank, micro, _ = match.groups()
    stage = inside[-2] if len(inside) > 1 else "tensors"
    role = inside[-3] if len(inside) > 2 else "actor"
    return RecordKey(
        step=int(step),
        micro=None if micro is None else int(micro),
        rank=None if rank is None else int(rank),
        role=role,
        stage=stage if stage in STAGES else "tensors",
    )


def read(key: RecordKey, path: Path) -> list[TensorRef]:
    tree = read_container(path).tree
    if not isinstance(tree, dict):
        raise DumpError("a record holds a dict of fields", file=str(path), expected="dict", found=type(tree).__name__)
    fields = flatten({field: value for field, value in tree.items() if field not in _KEY_FIELDS})
    return [ref.with_(canonical=naming.canonical(ref.name)) for ref in fields]
