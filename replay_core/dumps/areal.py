"""AReaL's trajectory dumps: step_%06d[_dp_%d].pt, a list with one dict per prompt group (PR #1407).

Each dict holds [samples, longest of the group] tensors padded on the right, so groups are of different
widths. Here they are one column: the rows of all groups, each as wide as its group. The file names no
group; a row's group is its dict's place in the list.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from replay_core.dumps.columns import blocks_of_rows, columns
from replay_core.dumps.dialect import Dialect, Index
from replay_core.dumps.fields import join
from replay_core.dumps.listing import Folder, is_file, listing
from replay_core.dumps.peeking import REFERENCES, class_of, content_of, first_that, tree_of
from replay_core.dumps.words import named, words
from replay_core.errors import DumpError
from replay_core.records import Fields, Inline, Problem, RecordKey, TensorRef, Unreadable
from replay_core.regexes import regex

_FILE = regex(r"step_(\d+)(?:_dp_(\d+))?\.pt")
_SHAPES = frozenset({"step_.pt", "step__dp_.pt"})

WORDS = words(
    full="input_ids attention_mask loss_mask logprobs=rollout_logprobs versions=weight_version turn_ids",
    next=(
        "prox_logp=old_logprobs ref_logp=ref_logprobs teacher_logp=teacher_logprobs values=values "
        "advantages=advantages returns=returns tot_rewards=token_rewards kl_rewards=kl"
    ),
    sample="rewards=reward original_rewards group_id=group_id",
)
#: compute_advantages rolls these by one, in place.
_ROLLED = {"logprobs": ("rollout_logprobs", "next"), "loss_mask": ("loss_mask", "next")}

REFERENCE = "reference, not data: the tensor stayed with AReaL's workers (RTensor)"


def detect(path: Path) -> bool:
    if is_file(path):
        return _is_groups(tree_of(path))
    return any(_is_ours(folder) for folder in listing(path).folders)


def _is_ours(folder: Folder) -> bool:
    if _SHAPES.isdisjoint(folder.shapes):
        return False
    files = (folder.file(entry) for entry in folder.names if _FILE.fullmatch(entry))
    return first_that((file for file in files if tree_of(file) != []), _is_groups)


def _is_groups(tree: Any) -> bool:
    return (
        isinstance(tree, list)
        and bool(tree)
        and isinstance(tree[0], dict)
        and {"input_ids", "loss_mask"} <= set(tree[0])
    )


def index(path: Path) -> Index:
    found = Index([], notes=["group_id is a row's place in the file's list of prompt groups: the files name no group"])
    for folder, entry in _files(path):
        match = _FILE.fullmatch(entry)
        if match is not None:
            step, rank = match.groups()
            key = RecordKey(int(step), None, None if rank is None else int(rank), "rollout", "trajectory")
        elif path.is_file():
            key = RecordKey(None, None, None, "rollout", "trajectory")
        else:
            if entry.startswith("step_") and entry.endswith(".pt"):
                found.problems.append(Problem(f"{folder.path}/{entry}", "not a step file of AReaL's; ignored"))
                found.beside.append(folder.file(entry))
            continue
        found.files.append((key, folder.file(entry)))
    if found.files and _holds_references(tree_of(found.files[0][1])):
        found.problems.append(Problem(str(found.files[0][1]), REFERENCE))
    return found


def _files(path: Path) -> Iterator[tuple[Folder, str]]:
    for folder in listing(path).folders:
        if path.is_file() or _is_ours(folder):
            for entry in folder.names:
                yield folder, entry


def _holds_references(tree: Any) -> bool:
    return isinstance(tree, list) and any(
        class_of(value) in REFERENCES for group in tree if isinstance(group, dict) for value in group.values()
    )


def read(key: RecordKey, path: Path) -> list[TensorRef]:
    tree = content_of(path).tree
    if not isinstance(tree, list) or not all(isinstance(group, dict) for group in tree):
        raise DumpError("not a list of prompt groups", file=str(path), expected="list of dicts")
    keys = list(dict.fromkeys(str(field) for group in tree for field in group))
    fields: list[TensorRef] = []
    problems = [] if tree else [Problem(str(path), "the step holds no prompt group")]
    for field in keys:
        blocks = [group.get(field) for group in tree]
        fields += _column(field, blocks)
        if any(class_of(block) in REFERENCES for block in blocks):
            problems.append(Problem(str(path), f"{field}: {REFERENCE}"))
    fields += _groups(tree)
    rolled = "advantages" in keys or "prox_logp" in keys
    known = named(fields, {**WORDS, **_ROLLED} if rolled else WORDS)
    # A row is as wide as the longest of its group: padded, although rows differ in width.
    padded = [ref.with_(pad="right") if ref.alignment in ("full", "next") else ref for ref in known]
    return Fields(padded, problems)


def _column(field: str, blocks: list[Any]) -> list[TensorRef]:
    if any(class_of(block) in REFERENCES for block in blocks):
        return [TensorRef(field, "none", (), Unreadable(REFERENCE))]
    tensors = [block for block in blocks if isinstance(block, TensorRef)]
    if len(tensors) == len(blocks):
        if all(len(tensor.shape) >= 2 for tensor in tensors) and (joined := blocks_of_rows(field, tensors)):
            return [joined]
        if all(len(tensor.shape) == 1 for tensor in tensors) and (joined := join(field, tensors)):
            # [n] per group: one number per sample, not a row of tokens.
            return [joined.with_(shape=(joined.numel,), rows=None)]
    return columns({field: blocks})


def _groups(tree: list[dict[str, Any]]) -> list[TensorRef]:
    """Which group each row is of, as far as input_ids tells."""
    sizes = [
        ids.shape[0] if isinstance(ids := group.get("input_ids"), TensorRef) and ids.shape else 0 for group in tree
    ]
    if sum(sizes) > 1 << 24:
        return []
    rows = [number for number, size in enumerate(sizes) for _ in range(size)]
    return [TensorRef("group_id", "int64", (len(rows),), Inline(rows))] if rows else []


DIALECT = Dialect("areal", "content", detect, index, read)
