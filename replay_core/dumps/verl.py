"""verl's tensors: DataProto files (`.dp`), RolloutSkip's caches, the TransferQueue's tq_batch.pt.

Prompts are padded on the left, responses on the right; what is said of a response token stands in a
[B, R] tensor whose index is the response token's own. A file says its step in its name, in the
directory of its cache, or in meta_info.global_steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from replay_core.dumps.columns import columns
from replay_core.dumps.dataproto import VERL, facts_of, fields_of, tensor_dict, tensor_fields
from replay_core.dumps.dialect import Dialect, Index, any_of
from replay_core.dumps.fields import flatten
from replay_core.dumps.filling import repeated_rows
from replay_core.dumps.listing import Folder, is_file, listing
from replay_core.dumps.peeking import class_of, content_of, has, tree_of
from replay_core.dumps.words import named, settled_by_width, words
from replay_core.errors import DumpError
from replay_core.records import Fields, Problem, RecordKey, TensorRef
from replay_core.regexes import regex

_STEP = regex(r"(?:^|[_=-])(?:global_)?steps?[_=]?(\d{1,18})(?:\D|$)")
_CACHE = ("gen_batch.dp", "tq_batch.pt")

WORDS = words(
    prompt="prompts=prompt_ids",
    response=(
        "responses=response_ids response_mask loss_mask rollout_log_probs old_log_probs ref_log_prob entropys values "
        "token_level_scores token_level_rewards advantages returns rm_scores=token_scores rollout_is_weights"
    ),
    full="input_ids attention_mask position_ids routed_experts",
    next="log_probs=policy_logprobs",
    sample="uid=group_id request_id=sample_id keys=sample_id",
    none="meta_info.temperature=temperature meta_info.global_steps=step global_steps=step",
)
PAD = {"prompt": "left", "response": "right", "full": "left+right"}


def _files(path: Path) -> Iterator[tuple[Folder, str]]:
    """DataProto files and caches, by what they hold; a directory's other files are not opened."""
    only = is_file(path)
    for folder in listing(path).folders:
        for entry in folder.names:
            if (only or entry.endswith(".dp") or entry in _CACHE) and _holds_batch(folder.file(entry), entry, only):
                yield folder, entry


def _holds_batch(file: Path, entry: str, only: bool) -> bool:
    tree = tree_of(file)
    if tree is None:
        # The suffix and the cache's own names are verl's: a damaged one is listed, and says so when it is read.
        return not only and (entry.endswith(".dp") or entry in _CACHE)
    return class_of(tree) == VERL or has(tree, ("tensordict", "global_steps"))


def index(path: Path) -> Index:
    found = Index([])
    for folder, entry in _files(path):
        file = folder.file(entry)
        cached = entry in _CACHE
        step, inferred = _step(folder, entry, file)
        if step is None:
            found.notes.append(f"{entry} names no step")
        elif inferred:
            found.notes.append(f"the step of {entry} is the one its meta_info names")
        micro = int(folder.name) if entry == "tq_batch.pt" and _inner(folder) is not None else None
        role = "rollout" if cached else "actor"
        found.files.append((RecordKey(step, micro, None, role, "batch_inputs"), file))
    found.notes = list(dict.fromkeys(found.notes))
    return found


def _step(folder: Folder, entry: str, file: Path) -> tuple[int | None, bool]:
    """The step, from names where they say it; and whether the file had to be asked."""
    if entry in _CACHE:
        step = _inner(folder) if entry == "tq_batch.pt" else None
        if step is not None:
            return step, False
        if _is_number(folder.name):
            return int(folder.name), False
    match = _STEP.search(entry)
    if match:
        return int(match.group(1)), False
    tree = tree_of(file)
    steps = tree.get("global_steps") if has(tree, ("tensordict",)) else facts_of(tree).get("global_steps")
    return (steps, True) if type(steps) is int else (None, True)


def _inner(folder: Folder) -> int | None:
    """The step of {step}/{inner}/tq_batch.pt; None where only one number stands above the file."""
    above = Path(folder.path).parent.name
    return int(above) if _is_number(above) and _is_number(folder.name) else None


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 19


def read(key: RecordKey, path: Path) -> list[TensorRef]:
    tree = content_of(path).tree
    if class_of(tree) == VERL:
        fields = fields_of(tree, path)
    elif has(tree, ("tensordict", "global_steps")):
        fields = tensor_fields(tensor_dict(tree["tensordict"], path)) + _beside(tree)
    else:
        raise DumpError("not a batch of verl's", file=str(path), expected="a DataProto", found=class_of(tree) or "data")
    known = _engine_side(settled_by_width(named(fields, WORDS, PAD)))
    return Fields(known, (Problem(str(path), what) for what in repeated_rows(known)))


def _engine_side(fields: list[TensorRef]) -> list[TensorRef]:
    """What the engine keeps without padding is as long as the sample: its mask, and what is said of the next token."""
    rows = {ref.name: ref.rows for ref in fields if ref.rows}
    whole = rows.get("input_ids")
    if whole is None or rows.get("responses") == whole:
        return fields
    return [
        ref.with_(alignment="full" if ref.name.endswith("_mask") else "next")
        if ref.alignment == "response" and ref.rows == whole
        else ref
        for ref in fields
    ]


def _beside(tree: dict[str, Any]) -> list[TensorRef]:
    fields: list[TensorRef] = []
    for field in ("keys", "tags"):
        value = tree.get(field)
        fields += columns({field: value}) if isinstance(value, list) else flatten({field: value})
    return fields + flatten({"global_steps": tree["global_steps"]})


DIALECT = Dialect("verl", "content", any_of(_files), index, read)
