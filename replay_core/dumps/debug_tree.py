"""transformers' `model_addition_debugger_context`: `{Model}_debug_tree_FULL_TENSORS.json`, a tree of calls, and with
`use_repr=False` a safetensors file per tensor beside it.

The tree's root is the model's own call, whose inputs are a record `batch_inputs`; what every module gave back, in the
order of the tree, is a record `modules`. Printed tensors keep four digits: their shapes are listed, not their values.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from replay_core import naming
from replay_core.budget import spend_values
from replay_core.dtypes import ITEMSIZE
from replay_core.dumps.containers import read_container
from replay_core.dumps.containers.json_lines import read_object
from replay_core.dumps.dialect import Dialect, Index, any_of
from replay_core.dumps.fields import flatten
from replay_core.dumps.file_places import place_below, told_apart
from replay_core.dumps.listing import listing
from replay_core.errors import DumpError, RldbgError
from replay_core.records import Fields, Problem, RecordKey, TensorRef, Unreadable

_TREE, _SUMMARY = "_debug_tree_FULL_TENSORS.json", "_debug_tree_SUMMARY.json"
_MAX_TREE = 1 << 28
_MAX_DEPTH = 64
_STAGES = ("batch_inputs", "modules")
_PRINTED = "printed to four digits; use_repr=False keeps the tensor"


def _files(path: Path) -> Iterator[Path]:
    for folder in listing(path).folders:
        yield from (folder.file(entry) for entry in folder.names if entry.endswith(_TREE))


def index(path: Path) -> Index:
    found = Index([])
    root = os.path.dirname(os.path.abspath(path))
    for file in _files(path):
        step, rank, micro = (place_below(root, file, part) for part in ("step", "rank", "micro"))
        found.files += [(RecordKey(step, micro, rank, None, stage), file) for stage in _STAGES]
        model = file.name.removesuffix(_TREE)
        beside = (file.parent / entry for entry in sorted(os.listdir(file.parent)) if entry.startswith(model))
        found.beside += [one for one in beside if one.suffix == ".safetensors" or one.name.endswith(_SUMMARY)]
    found.files = told_apart(found.files)
    return found


def read(key: RecordKey, path: Path) -> list[TensorRef]:
    tree = read_object(path, "the tree of calls", _MAX_TREE)
    root = tree.get("module_path")
    if not isinstance(root, str):
        raise DumpError("not a tree of calls", file=str(path), expected="module_path, inputs, children, outputs")
    problems: list[Problem] = []
    if key.stage == "batch_inputs":
        given = tree.get("inputs")
        said = {} if not isinstance(given, dict) else given.get("kwargs") or {"inputs": given.get("args")}
    else:
        said = dict(_outputs(tree, root, 0))
    fields = flatten(_tensors(said, path, problems, 0))
    return Fields([ref.with_(canonical=naming.canonical(ref.name)) for ref in fields], problems)


def _outputs(node: dict[str, Any], root: str, depth: int) -> Iterator[tuple[str, Any]]:
    """What every module gave back, by `layers.0.self_attn.output`: children before their parent, which ends last."""
    if depth > _MAX_DEPTH:
        raise DumpError(f"a tree of calls deeper than {_MAX_DEPTH}")
    children = node.get("children")
    for child in children if isinstance(children, list) else ():
        if isinstance(child, dict):
            yield from _outputs(child, root, depth + 1)
    if "outputs" in node:
        name = str(node.get("module_path")).removeprefix(root).removeprefix(".")
        yield f"{name}.output" if name else "forward.output", node["outputs"]


def _tensors(value: Any, path: Path, problems: list[Problem], depth: int) -> Any:
    """The tree with tensors in place of their descriptions, and numbers in place of their texts."""
    spend_values(1, "the tree of calls")
    if depth > _MAX_DEPTH:
        raise DumpError(f"a tree of calls deeper than {_MAX_DEPTH}", file=str(path))
    if isinstance(value, dict) and "dtype" in value and "shape" in value:
        return _tensor(value, path, problems)
    if isinstance(value, dict):
        return {name: _tensors(inner, path, problems, depth + 1) for name, inner in value.items()}
    if isinstance(value, list):
        return [_tensors(inner, path, problems, depth + 1) for inner in value]
    return {"None": None, "True": True, "False": False}.get(value, value) if isinstance(value, str) else value


def _tensor(said: dict[str, Any], path: Path, problems: list[Problem]) -> TensorRef:
    dtype = str(said["dtype"]).removeprefix("torch.")
    try:
        shape = tuple(ast.literal_eval(str(said["shape"]).removeprefix("torch.Size")))
        whole = TensorRef("", dtype if dtype in ITEMSIZE else "none", shape, Unreadable(_PRINTED))
        fits = all(type(length) is int and 0 <= length < 1 << 40 for length in shape)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        fits = False
    if not fits:
        return TensorRef("", "none", (), Unreadable(f"said to be of shape {str(said['shape'])[:80]}"))
    file = said.get("value")
    if not isinstance(file, str) or not file.endswith(".safetensors"):
        return whole
    name = file.removeprefix("./")
    if os.path.basename(name) != name:
        return whole.with_(source=Unreadable("the tree leads out of the folder"))
    try:
        held = flatten(read_container(path.parent / name).tree)
    except RldbgError as error:
        problems.append(Problem(str(path.parent / name), error.message))
        return whole.with_(source=Unreadable(error.message))
    if len(held) != 1 or held[0].shape != whole.shape or held[0].dtype != whole.dtype:
        return whole.with_(source=Unreadable(f"{name} does not hold what the tree says"))
    return held[0]


DIALECT = Dialect("transformers debugger", "names", any_of(_files), index, read)
