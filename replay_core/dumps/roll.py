"""ROLL's rollout_mock batches ({train|val}/step_%06d.pkl, a DataProto) and the value files of its critic.

Everything is [B, T] over the whole sequence, logprobs [B, T-1] about the next token; rewards per token
are [B, R]. Rows are shifted left, so the padding is on the right. A critic's file is a dict
{backend, values [B, T-1], input_ids, masks}: values[:, t] is of the state before token t + 1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from replay_core.dumps.dataproto import ROLL, fields_of
from replay_core.dumps.dialect import Dialect, Index
from replay_core.dumps.fields import flatten
from replay_core.dumps.filling import repeated_rows
from replay_core.dumps.listing import Folder, is_file, listing
from replay_core.dumps.peeking import class_of, content_of, first_that, has, tree_of
from replay_core.dumps.words import named, settled_by_width, words
from replay_core.errors import DumpError
from replay_core.records import Fields, Problem, RecordKey, TensorRef
from replay_core.regexes import regex

_FILE = regex(r"step_(\d{1,18})\.pkl")
_CRITIC = regex(r"(.+_)?(deepspeed|megatron)\.pt")

WORDS = words(
    prompt="prompts=prompt_ids",
    response="responses=response_ids token_level_rewards=token_rewards",
    full="input_ids attention_mask position_ids prompt_mask response_mask final_response_mask",
    next=(
        "old_log_probs ref_log_probs infer_logprobs=rollout_logprobs log_probs=policy_logprobs advantages returns "
        "values"
    ),
    sample="response_level_rewards=reward scores=metrics.scores prompt_id=group_id id=sample_id",
)
PAD = {"prompt": "left", "full": "right", "next": "right", "response": "right"}
#: prompts and responses are concatenated as they are in a mock batch: left-padded, then right-padded.
MOCK_PAD = {**PAD, "full": "left+right"}


def detect(path: Path) -> bool:
    if is_file(path):
        tree = tree_of(path)
        return class_of(tree) == ROLL or _is_critic(tree)
    return any(True for _ in _folders(path))


def _is_critic(tree: Any) -> bool:
    return has(tree, ("backend", "values", "input_ids"))


def _folders(path: Path) -> Iterator[tuple[Folder, re.Pattern[str]]]:
    for folder in listing(path).folders:
        if "step_.pkl" in folder.shapes and _fits(folder, _FILE, lambda tree: class_of(tree) == ROLL):
            yield folder, _FILE
        if any(entry.endswith(("deepspeed.pt", "megatron.pt")) for entry in folder.shapes) and _fits(
            folder, _CRITIC, _is_critic
        ):
            yield folder, _CRITIC


def _fits(folder: Folder, pattern: re.Pattern[str], fits: Any) -> bool:
    return first_that((folder.file(entry) for entry in folder.names if pattern.fullmatch(entry)), fits)


def index(path: Path) -> Index:
    found = Index([])
    if is_file(path):
        found.files.append((_key(path, tree_of(path)), path))
        return found
    critics = 0
    for folder, pattern in _folders(path):
        for entry in folder.names:
            match = pattern.fullmatch(entry)
            if match is None:
                continue
            if pattern is _FILE:
                role = "eval" if folder.name == "val" else "rollout"
                key = RecordKey(int(match.group(1)), None, None, role, "batch_inputs")
            else:
                key = RecordKey(None, critics, None, "critic", "values")
                critics += 1
            found.files.append((key, folder.file(entry)))
    if critics:
        found.notes.append("the critic's files name no step: micro numbers them in the order of their names")
    return found


def _key(path: Path, tree: Any) -> RecordKey:
    match = _FILE.fullmatch(path.name)
    if _is_critic(tree):
        return RecordKey(None, None, None, "critic", "values")
    role = "eval" if path.parent.name == "val" else "rollout"
    return RecordKey(int(match.group(1)) if match else None, None, None, role, "batch_inputs")


def read(key: RecordKey, path: Path) -> list[TensorRef]:
    tree = content_of(path).tree
    if class_of(tree) == ROLL:
        known = settled_by_width(named(fields_of(tree, path), WORDS, MOCK_PAD))
        return Fields(known, (Problem(str(path), what) for what in repeated_rows(known)))
    if _is_critic(tree):
        return named(flatten(tree), WORDS, PAD)
    raise DumpError(
        "neither a DataProto of ROLL's nor a critic's values", file=str(path), found=class_of(tree) or "data"
    )


DIALECT = Dialect("roll", "content", detect, index, read)
