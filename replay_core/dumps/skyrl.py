"""SkyRL's dumped batches: dumped_data/global_step_{N}_training_input.pkl, a pickled TrainingInputBatch.

Everything is padded on the left, also the [B, R] tensors about the response. Rewards and group ids are
taken out before the dump is written.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from replay_core.dumps.columns import columns
from replay_core.dumps.containers import read_nested
from replay_core.dumps.dataproto import cast
from replay_core.dumps.dialect import Dialect, Index
from replay_core.dumps.fields import flatten
from replay_core.dumps.listing import Folder, is_file, listing
from replay_core.dumps.peeking import class_of, content_of, tree_of
from replay_core.dumps.words import named, words
from replay_core.errors import DumpError, RldbgError
from replay_core.records import Fields, Problem, RecordKey, TensorRef, Unreadable
from replay_core.regexes import regex

_FILE = regex(r"global_step_(\d{1,18})_training_input\.pkl")
_CLASS = "TrainingInputBatch"

WORDS = words(
    full="sequences=input_ids attention_mask rollout_expert_indices=routed_experts router_padding_mask",
    response=(
        "response_mask action_log_probs base_action_log_probs values advantages returns kl loss_mask=loss_mask "
        "rollout_logprobs rewards=token_rewards"
    ),
    sample="metadata.uids=group_id",
)


def detect(path: Path) -> bool:
    if is_file(path):
        return _is_batch(tree_of(path))
    return next(_files(path), None) is not None


def _is_batch(tree: Any) -> bool:
    return class_of(tree).rpartition(".")[2] == _CLASS


def _files(path: Path) -> Iterator[tuple[Folder, str, int]]:
    for folder in listing(path).folders:
        if "global_step__training_input.pkl" in folder.shapes:
            for entry in folder.names:
                match = _FILE.fullmatch(entry)
                if match:
                    yield folder, entry, int(match.group(1))


def index(path: Path) -> Index:
    found = Index([], notes=["rewards and group ids are not in the dump: SkyRL takes them out before it writes"])
    for folder, entry, step in _files(path):
        found.files.append((RecordKey(step, None, None, "actor", "batch_inputs"), folder.file(entry)))
    if not found.files:
        step_of = _state(tree_of(path)).get("metadata")
        step_named = step_of.get("global_step") if isinstance(step_of, dict) else None
        key = RecordKey(step_named if type(step_named) is int else None, None, None, "actor", "batch_inputs")
        found.files.append((key, path))
    return found


def _state(tree: Any) -> dict[str, Any]:
    state = tree.get("state") if isinstance(tree, dict) else None
    return state if isinstance(state, dict) else {}


def read(key: RecordKey, path: Path) -> list[TensorRef]:
    tree = content_of(path).tree
    batch = _state(tree).get("batch_dict")
    if not _is_batch(tree) or not isinstance(batch, dict):
        raise DumpError("not a TrainingInputBatch", file=str(path), found=class_of(tree) or type(tree).__name__)
    fields: list[TensorRef] = []
    for field, value in batch.items():
        fields += [ref.with_(alignment="sample") if len(ref.shape) == 1 and ref.rows is None else ref
                   for ref in _fields(str(field), value)]  # fmt: skip
    problems = []
    metadata = _state(tree).get("metadata")
    if isinstance(metadata, dict):
        fields += flatten({"metadata": metadata})
        copies = metadata.get("pad_size")
        if type(copies) is int and copies > 0:
            problems.append(Problem(str(path), f"the last {copies} rows are copies that fill the world size"))
    return Fields(named(fields, WORDS, "left"), problems)


def _fields(field: str, value: Any) -> list[TensorRef]:
    if not isinstance(value, dict):
        return flatten({field: value})
    form = value.get("format")
    if form == "numpy" or (form is None and {"data", "shape", "dtype"} <= value.keys()):  # before the key was written
        return [cast(value.get("data"), value.get("dtype"), value.get("shape")).with_(name=field)]
    if form == "torch":
        return [_nested(value.get("data")).with_(name=field)]
    if form == "tensor_list" and isinstance(value.get("items"), list):
        return columns({field: [_item(item) for item in value["items"]]})
    return [TensorRef(field, "none", (), Unreadable(f"SkyRL's format {form!r:.40} is not known"))]


def _item(item: Any) -> Any:
    if isinstance(item, TensorRef) or item is None:
        return item
    found = _fields("", item)
    return found[0] if len(found) == 1 else item


def _nested(data: Any) -> TensorRef:
    """A tensor that torch.save wrote into the pickle's bytes (dtypes numpy lacks)."""
    if not isinstance(data, TensorRef):
        return TensorRef("", "none", (), Unreadable("a torch tensor that is not bytes"))
    try:
        inner = read_nested(data).tree
    except RldbgError as error:
        return TensorRef("", "none", (), Unreadable(f"the torch file inside cannot be read: {error.message}"))
    return inner if isinstance(inner, TensorRef) else TensorRef("", "none", (), Unreadable("no tensor inside"))


DIALECT = Dialect("skyrl", "content", detect, index, read)
