"""A vocabulary that is padded: columns of the head that stand for no token, which a softmax over all of them counts."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path

from msgspec import Struct

from replay_core.diagnose.batch import StepBatch
from replay_core.dumps.opening import open_run
from replay_core.errors import RldbgError
from replay_core.records import Record
from replay_core.regexes import regex

_TOKENS = ("vocab_size", "tokenizer_vocab_size", "orig_vocab_size", "original_vocab_size")
_PADDED = ("padded_vocab_size", "padded_vocabulary_size")
_RANKS = ("tensor_model_parallel_size", "tensor_parallel_size", "tp_size", "tp")
_HEAD = regex(r"(?:^|\.)(?:lm_head|output_layer|embed_tokens|word_embeddings|wte)\.weight$")
#: A file that is larger is no configuration.
_CONFIG_BYTES = 1 << 20


class Padded(Struct, frozen=True):
    """How many columns the head has, for how many tokens, and what says so; rows of the checkpoint's head, if known."""

    columns: int
    tokens: int
    source: str
    saved: int | None


def padded_vocabulary(batch: StepBatch) -> Padded | None:
    """What a run states or records of a head with more columns than tokens; None where nothing tells of one."""
    algorithm = batch.laid.algorithm
    place = _checkpoint(batch)
    tokens = algorithm.number(*_TOKENS) or _of_config(place)
    if not tokens:
        return None
    saved = _rows(_saved(place))
    recorded = _rows(batch.columns.records)
    every = algorithm.number("make_vocab_size_divisible_by")
    multiple = (every or 0) * (algorithm.number(*_RANKS) or 1)
    known = (
        (algorithm.number(*_PADDED), "padded_vocab_size, as stated"),
        (recorded, "rows of the recorded head"),
        (saved, "rows of the checkpoint's head"),
        (multiple * math.ceil(tokens / multiple) if multiple else None, "make_vocab_size_divisible_by, as stated"),
    )
    for columns, source in known:
        if columns is not None and columns > tokens:
            return Padded(int(columns), int(tokens), source, saved)
    return None


def _checkpoint(batch: StepBatch) -> Path | None:
    """The folder of the checkpoint that lies beside the records of the step, if one does."""
    run = batch.laid.run
    place = None if run is None else run.models.get(batch.step)
    if run is None or place is None or not Path(place).is_absolute() or not Path(place).is_dir():
        return None
    root = (run.path if run.path.is_dir() else run.path.parent).resolve()
    return Path(place) if Path(place).is_relative_to(root) else None


def _of_config(place: Path | None) -> float | None:
    file = None if place is None else place / "config.json"
    if file is None or not file.is_file() or file.stat().st_size > _CONFIG_BYTES:
        return None
    try:
        size = json.loads(file.read_bytes()).get("vocab_size")
    except (ValueError, AttributeError):
        return None
    return float(size) if isinstance(size, int) else None


def _saved(place: Path | None) -> Iterator[Record]:
    """The records of a checkpoint's weights: their names and shapes alone are read."""
    for file in () if place is None else sorted(place.glob("*.safetensors")):
        if file.is_file():
            yield from open_run(file).records


def _rows(records: Iterable[Record]) -> int | None:
    """Rows of the head (of the embedding, where they are one) among recorded weights."""
    try:
        found = [
            ref.shape[0] for record in records if record.key.stage not in ("forward_data", "trajectory", "loss")
            for ref in record.tensors() if len(ref.shape) == 2 and _HEAD.search(ref.name)
        ]  # fmt: skip
    except RldbgError:
        return None
    return max(found, default=None)
