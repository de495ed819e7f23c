"""open-instruct's packed_sequences.pt: a pack per list entry, several samples end to end in each.

attention_masks hold segment ids 1..n, response_masks the number of the sample that a response token is of, position
ids start again at every sample, vllm_logprobs are NaN on the prompt (and 1.0 once masked). A pack is a row here;
packed_seq_lens say where its samples end.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from replay_core.dumps.columns import columns
from replay_core.dumps.dialect import Dialect, Index, any_of
from replay_core.dumps.fields import flatten
from replay_core.dumps.listing import is_file, listing
from replay_core.dumps.peeking import content_of, has, tree_of
from replay_core.dumps.words import named, words
from replay_core.errors import DumpError
from replay_core.records import Marks, RecordKey, TensorRef

_FILE = "packed_sequences.pt"
_KEYS = ("query_responses", "attention_masks", "response_masks")
WORDS = words(
    full=(
        "query_responses=input_ids attention_masks=segment_ids response_masks=response_mask position_ids "
        "vllm_logprobs=rollout_logprobs advantages dones"
    ),
    none="packed_seq_lens=sample_lengths num_actions original_responses=response_ids",
)
SENTINEL = {"vllm_logprobs": "NaN or 1.0"}


def _files(path: Path) -> list[Path]:
    if is_file(path):
        return [path] if has(tree_of(path), _KEYS) else []
    found = [folder.file(_FILE) for folder in listing(path).folders if _FILE in folder.names]
    return [file for file in found if (tree := tree_of(file)) is None or has(tree, _KEYS)]


def index(path: Path) -> Index:
    files = [(RecordKey(None, None, None, "actor", "batch_inputs"), file) for file in _files(path)]
    return Index(files, notes=["packed_sequences.pt names no step; each of its rows is a pack of several samples"])


def read(key: RecordKey, path: Path) -> list[TensorRef]:
    tree = content_of(path).tree
    if not has(tree, _KEYS):
        raise DumpError("not a file of packed sequences", file=str(path), expected=", ".join(_KEYS))
    fields: list[TensorRef] = []
    for field, value in tree.items():
        fields += _column(str(field), value)
    return [_marks(ref.with_(sentinel=SENTINEL.get(ref.name))) for ref in named(fields, WORDS)]


def _marks(ref: TensorRef) -> TensorRef:
    """Of the response mask, whether a token counts: the numbers of the samples begin at 1 in every file."""
    is_numbered = ref.canonical == "response_mask" and ref.is_readable and not ref.is_text
    return ref.with_(source=Marks(ref)) if is_numbered else ref


def _column(field: str, value: Any) -> list[TensorRef]:
    return columns({field: value}) if isinstance(value, list) else flatten({field: value})


DIALECT = Dialect("open_instruct", "content", any_of(_files), index, read)
