"""A micro-batch from a record without a padded grid: ragged rows, packs, prompts and responses apart. numpy only.

The samples are found by `samples.py`, as every other reader finds them, and laid out right-padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replay_core.errors import DumpError, RldbgError
from replay_core.records import Record, RecordKey, Run, TensorRef
from replay_core.replay.batch import Batch
from replay_core.samples import rows as samples

Array = NDArray[Any]

#: What says which tokens were generated, best first.
_RESPONSE = ("response_mask", "loss_mask")
#: Stages that hold the samples of a step, whole and without padding.
_WHOLE = ("prepared_trajectories", "trajectory")


def usable(record: Record) -> list[TensorRef]:
    """The fields of a record that can be read as numbers."""
    return [ref for ref in record.tensors() if ref.is_readable and not ref.is_text]


def find(fields: Sequence[TensorRef], *names: str) -> TensorRef | None:
    """The first field of these canonical names."""
    for name in names:
        for ref in fields:
            if (ref.canonical or ref.name) == name:
                return ref
    return None


def tokens(fields: Sequence[TensorRef]) -> list[Array] | None:
    """The token ids of every sample; None where there are none, or where padding cannot be told from tokens."""
    ids = find(fields, "input_ids")
    if ids is not None:
        told = ids.rows is not None or find(fields, "sample_lengths") is not None
        return samples.token_ids(fields) if told else None
    prompts, responses = find(fields, "prompt_ids"), find(fields, "response_ids")
    if prompts is None or responses is None:
        return None
    apart = prompts.rows is not None and responses.rows is not None
    masked = find(fields, "prompt_mask") is not None and find(fields, "response_mask") is not None
    return samples.token_ids(fields) if apart or masked else None


def ragged_batch(record: Record, temperature: float | None) -> Batch | None:
    """The record's samples, right-padded; None where it does not hold them in such a form.

    Raises:
        DumpError: it holds no sample, or token ids that are no integers.
    """
    fields = usable(record)
    rows = tokens(fields)
    if rows is None:
        return None
    if not rows or not all(row.ndim == 1 and np.issubdtype(row.dtype, np.integer) for row in rows):
        raise DumpError(
            "input_ids is no batch of token ids", file=str(record.path), tensor="input_ids",
            expected="rows of integers", found=f"{len(rows)} rows of {sorted({str(row.dtype) for row in rows})}",
        )  # fmt: skip
    lengths = np.array([row.size for row in rows])
    valid_BS = np.arange(int(lengths.max(initial=0))) < lengths[:, None]
    ids_BS = np.zeros(valid_BS.shape, dtype=np.int64)
    ids_BS[valid_BS] = np.concatenate(rows)
    return Batch(ids_BS, valid_BS, _response(fields, lengths, valid_BS), temperature)


def _response(fields: Sequence[TensorRef], lengths: Array, valid_BS: Array) -> NDArray[np.bool_] | None:
    """[B, S]: which tokens were generated, by the recorded mask, else by the responses' own lengths."""
    for name in _RESPONSE:
        ref = find(fields, name)
        marks = None if ref is None else samples.per_token(ref, fields)
        if marks is not None:
            response_BS = np.zeros(valid_BS.shape, dtype=bool)
            response_BS[valid_BS] = np.nan_to_num(np.concatenate(marks)) > 0
            return response_BS
    responses = find(fields, "response_ids")
    if responses is None or responses.rows is None or len(responses.rows) != lengths.size:
        return None
    starts = lengths - np.asarray(responses.rows)
    marked: NDArray[np.bool_] = valid_BS & (np.arange(valid_BS.shape[1]) >= starts[:, None])
    return marked


def values(ref: TensorRef, record: Record, batch: Batch) -> tuple[Array, NDArray[np.bool_]] | None:
    """(values, which are known), both [B, S] with index t about token t + 1, of a record that holds its own samples.

    Its rows are found again by their tokens, so they may stand in another order, or be more. None where it holds no
    samples, or not these.
    """
    fields = usable(record)
    own = tokens(fields)
    said = None if own is None else samples.per_token(ref, fields)
    if own is None or said is None:
        return None
    place: dict[bytes, list[int]] = {}
    for number, sample in enumerate(own):
        place.setdefault(sample.astype(np.int64).tobytes(), []).append(number)
    values_BS, known_BS = np.zeros(batch.ids_BS.shape), np.zeros(batch.ids_BS.shape, dtype=bool)
    for row in range(batch.rows):
        slots = np.flatnonzero(batch.valid_BS[row])
        if not slots.size:
            continue
        found = place.get(batch.ids_BS[row][slots].tobytes())
        if not found:
            return None
        # Equal samples stand for each other in order.
        spoken = said[found.pop(0) if len(found) > 1 else found[0]]
        generated = np.ones(slots.size, dtype=bool) if batch.response_BS is None else batch.response_BS[row][slots]
        counts = ~np.isnan(spoken) & generated
        counts[0] = False
        values_BS[row, slots[np.flatnonzero(counts) - 1]] = spoken[counts]
        known_BS[row, slots[np.flatnonzero(counts) - 1]] = True
    return values_BS, known_BS


def mask_by_trajectories(ids_BS: Array, run: Run, key: RecordKey) -> tuple[NDArray[np.int64], str] | None:
    """The attention mask of rows that were recorded without one, from the step's own samples, and what to say of it.

    A row is its sample's tokens and, around them, one padding id. None unless every row is exactly one sample's.
    """
    whole = [one for one in run.records if one.key.stage in _WHOLE and one.key.step == key.step]
    whole.sort(key=lambda one: _WHOLE.index(one.key.stage))
    for record in whole:
        try:
            known = tokens(usable(record))
        except RldbgError:
            continue
        masks = None if known is None else [_row_mask(row, known) for row in np.asarray(ids_BS)]
        if masks and all(mask is not None for mask in masks):
            note = f"no attention_mask is recorded: padding is told from the tokens of {record.path.name}"
            return np.stack([mask for mask in masks if mask is not None]), note
    return None


def _row_mask(row: Array, known: Sequence[Array]) -> NDArray[np.int64] | None:
    masks = set()
    for sample in known:
        for start in {0, row.size - sample.size} if sample.size <= row.size else set():
            around = np.concatenate([row[:start], row[start + sample.size :]])
            if np.array_equal(row[start : start + sample.size], sample) and np.unique(around).size <= 1:
                masks.add((start, sample.size))
    if len(masks) != 1:
        return None
    ((start, size),) = masks
    mask = np.zeros(row.size, dtype=np.int64)
    mask[start : start + size] = 1
    return mask
