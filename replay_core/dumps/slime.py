"""slime's and miles' debug data: rollout_data/{id}.pt, train_data/{id}[_{rank}].pt, miles' policy_loss_debug.

Nothing is padded: a sample's tokens are prompt + response, and what is said of the response is as long as
the response. Samples are rows; a column's rows lie end to end. Two layouts of training data exist: v2 holds
the whole batch as `samples`, v1 a rank's share as columns of lists (`rollout_data`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from replay_core.dumps.columns import table
from replay_core.dumps.dialect import Dialect, Index
from replay_core.dumps.fields import flatten
from replay_core.dumps.listing import Folder, is_file, listing
from replay_core.dumps.peeking import content_of, first_that, has, tree_of
from replay_core.dumps.slime_columns import TOGETHER, is_context_parallel, loss_columns, train_columns, with_masks
from replay_core.dumps.words import named, words
from replay_core.errors import DumpError
from replay_core.records import Fields, Problem, RecordKey, TensorRef
from replay_core.regexes import regex

#: The trainer recomputes `log_probs` before the update: they are the old ones.
WORDS = words(
    full="tokens=input_ids",
    response=(
        "loss_mask=response_mask loss_masks=response_mask log_probs=old_logprobs rollout_log_probs ref_log_probs "
        "teacher_log_probs values advantages returns kl entropy opd_reverse_kl"
    ),
    next="rollout_routed_experts=routed_experts",
    sample=(
        "reward=reward rewards=normalised_reward raw_reward=reward index=sample_id sample_index=sample_id "
        "sample_indices=sample_id group_index=group_id response_length=response_length "
        "response_lengths=response_length total_lengths=total_length status prompt=prompt_text response=response_text "
        "truncated"
    ),
    none="weight_versions=weight_version",
)


class _Kind(NamedTuple):
    """One kind of file: names, the stage they hold, and what must be in them."""

    pattern: re.Pattern[str]
    shapes: frozenset[str]
    stage: str
    keys: tuple[tuple[str, ...], ...]


_KINDS = (
    _Kind(regex(r"(?P<eval>eval_)?(?P<step>\d{1,18})(?:_(?P<rank>\d{1,9}))?\.pt"),
          frozenset({".pt", "_.pt", "eval_.pt"}), "trajectory",
          (("rollout_id", "samples"), ("rollout_id", "rollout_data"))),
    _Kind(regex(r"rank_(?P<rank>\d{1,9})_call_(?P<micro>\d{1,18})\.pt"), frozenset({"rank__call_.pt"}), "loss",
          (("rank", "call", "samples"),)),
    _Kind(regex(r"r(?P<step>\d{1,18})_s(?P<minibatch>\d{1,18})_m(?P<micro>\d{1,18})_rank(?P<rank>\d{1,9})\.pt"),
          frozenset({"r_s_m_rank.pt"}), "loss", (("rank", "call", "samples"),)),
)  # fmt: skip


UNPLACED = "policy_loss_debug/rank_R_call_N names no rollout: micro is the number of the call on its rank"
_ROLES = {"trajectory": "rollout"}


def _kind_of(tree: Any) -> str | None:
    """The stage a file's content is of."""
    if has(tree, ("rank", "call", "samples")):
        return "loss"
    if has(tree, ("rollout_id", "rollout_data")) or has(tree, ("rollout_id", "samples", "format_version")):
        return "batch_inputs"
    return "trajectory" if has(tree, ("rollout_id", "samples")) else None


def detect(path: Path) -> bool:
    if is_file(path):
        return _kind_of(tree_of(path)) is not None
    return next(_folders(path), None) is not None


def _folders(path: Path) -> Iterator[tuple[Folder, _Kind, str]]:
    """Folders of one kind of file, and the stage that the first readable file shows them to hold."""
    for folder in listing(path).folders:
        for kind in _KINDS:
            if kind.shapes.isdisjoint(folder.shapes):
                continue
            stages: list[str] = []
            files = (folder.file(entry) for entry in folder.names if kind.pattern.fullmatch(entry))
            if first_that(files, lambda tree, known=stages: known.append(_kind_of(tree)) or known[-1] is not None):
                yield folder, kind, stages[-1]


def index(path: Path) -> Index:
    found = Index([])
    if is_file(path):
        tree = tree_of(path)
        found.files.append((_key_of_content(tree, path), path))
        return found
    for folder, kind, stage in _folders(path):
        first = next(folder.file(entry) for entry in folder.names if kind.pattern.fullmatch(entry))
        if stage == "batch_inputs" and is_context_parallel(tree_of(first)):
            found.notes.append(TOGETHER)
        for entry in folder.names:
            match = kind.pattern.fullmatch(entry)
            if match is None:
                continue
            parts = {part: _number(value) for part, value in match.groupdict().items() if part != "eval"}
            role = "eval" if match.groupdict().get("eval") else _ROLES.get(stage, "actor")
            key = RecordKey(
                parts.get("step"), parts.get("micro"), parts.get("rank"), role, stage, None, parts.get("minibatch")
            )
            found.files.append((key, folder.file(entry)))
            if stage == "trajectory":
                found.beside += _copies(folder, f"{'eval_' if role == 'eval' else ''}{parts.get('step')}")
        if stage == "trajectory" and any(copy.is_file() for copy in found.beside):
            found.notes.append(BESIDE)
        if stage == "loss" and kind is _KINDS[1]:
            found.notes.append(UNPLACED)
    return found


#: Of miles' own files of texts and columns.
BESIDE = "conversations lie in trajectory/, copies of columns in dashboard_columns/: open those folders to read them"


def _copies(folder: Folder, step: str) -> list[Path]:
    """miles writes parts of the same rollout twice more, as texts and as the columns of its dashboard."""
    root = Path(folder.path).parent
    return [root / f"trajectory/{step}.jsonl", root / f"dashboard_columns/rollout_{step}.parquet"]


def _number(text: str | None) -> int | None:
    return None if text is None else int(text)


def _key_of_content(tree: Any, path: Path) -> RecordKey:
    stage = _kind_of(tree) or "trajectory"

    def part(field: str) -> int | None:
        value = tree.get(field) if isinstance(tree, dict) else None
        return value if type(value) is int else None

    role = "eval" if path.name.startswith("eval_") else _ROLES.get(stage, "actor")
    rank = part("rank") if not has(tree, ("format_version",)) else None
    return RecordKey(part("rollout_id"), part("call"), rank, role, stage)


def read(key: RecordKey, path: Path) -> list[TensorRef]:
    tree = content_of(path).tree
    stage = _kind_of(tree)
    if stage is None:
        raise DumpError("not a file of slime's", file=str(path), expected="rollout_id and samples or rollout_data")
    problems: list[Problem] = []
    words = WORDS
    if isinstance(tree.get("rollout_data"), dict):
        fields, said = train_columns(tree, path)
        problems += said
        rest = ("rollout_data",)
        # Every rank's file has the rewards of the whole batch, in the order of the rollout.
        words = {**WORDS, "raw_reward": ("raw_reward", None)}
    else:
        samples = tree.get("samples")
        if not isinstance(samples, list) or not all(isinstance(sample, dict) for sample in samples):
            raise DumpError("samples that are not a list of dicts", file=str(path))
        fields = table(samples)
        if stage == "trajectory":
            fields = with_masks(fields, samples)
        rest = ("samples",)
        problems += _lost_samples(tree, len(samples), path)
    taken = {ref.name for ref in fields}
    for field, value in tree.items():
        if field not in rest:
            fields += _beside(f"file.{field}" if field in taken else str(field), value)
    if stage == "loss":
        return Fields(loss_columns(fields), problems)
    return Fields(named(fields, words), problems)


def _beside(field: str, value: Any) -> list[TensorRef]:
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return table(value, f"{field}.")
    return flatten({field: value})


def _lost_samples(tree: dict[str, Any], count: int, path: Path) -> list[Problem]:
    """v2 names the samples of every rank: those that are not in the file were lost when it was written."""
    shards = tree.get("dp_shards")
    if not isinstance(shards, list):
        return []
    expected: set[int] = set()
    for shard in shards:
        members = shard.get("sample_indices") if isinstance(shard, dict) else None
        expected |= {member for member in members if type(member) is int} if isinstance(members, list) else set()
    if len(expected) > count:
        return [Problem(str(path), f"dp_shards name {len(expected)} samples, the file holds {count}")]
    return []


DIALECT = Dialect(
    "slime", "content", detect, index, read,
    before={"miles": "miles writes parts of a rollout twice more, which the rollout's own file stands for"},
)  # fmt: skip
