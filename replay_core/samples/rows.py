"""A record's samples, whatever held them: each sample's tokens without padding, and values per token.

Padded left or right, packed end to end, ragged lists, prompt and response apart, response slices, shifted by
one: after this, sample i of two frameworks' dumps of one rollout is the same array.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replay_core import pages
from replay_core.records import TensorRef

Array = NDArray[Any]


def token_ids(fields: Sequence[TensorRef]) -> list[Array] | None:
    """The token ids of every sample, prompt and response; None where the record holds none."""
    ids = _find(fields, "input_ids")
    if ids is not None:
        return _valid_rows(ids, fields)
    prompts, responses = _find(fields, "prompt_ids"), _find(fields, "response_ids")
    if prompts is None or responses is None:
        return None
    pairs = zip(_part(prompts, "prompt_mask", fields), _part(responses, "response_mask", fields), strict=True)
    return [np.concatenate(pair) for pair in pairs]


def per_token(ref: TensorRef, fields: Sequence[TensorRef]) -> list[Array] | None:
    """A tensor's values by sample and token: element t is about token t, NaN where it says nothing of it.

    None where the tensor has no token axis, or does not fit the samples.
    """
    tokens = token_ids(fields)
    if tokens is None or ref.is_text or not ref.shape:
        return None
    lengths = [row.size for row in tokens]
    rows = _response_rows(ref, fields) if ref.alignment == "response" else _valid_rows(ref, fields)
    if len(rows) != len(lengths):
        return None
    placed = []
    for row, length in zip(rows, lengths, strict=True):
        if row.ndim != 1 or row.size > length:
            return None
        start = length - row.size if ref.alignment == "response" else 1 if ref.alignment == "next" else 0
        values = np.full(length, np.nan)
        count = min(row.size, length - start)
        values[start : start + count] = row[:count]
        placed.append(values)
    return placed


def _find(fields: Sequence[TensorRef], name: str) -> TensorRef | None:
    usable = (ref for ref in fields if not ref.is_text and ref.is_readable)
    return next((ref for ref in usable if (ref.canonical or ref.name) == name), None)


def split(ref: TensorRef) -> list[Array]:
    """The rows of a tensor: its ragged rows, or one per index of its first axis."""
    values = pages.array(ref)
    if ref.rows is not None:
        return list(np.split(values, np.cumsum(ref.rows)[:-1])) if ref.rows else []
    return list(values) if values.ndim > 1 else [values]


def _valid_rows(ref: TensorRef, fields: Sequence[TensorRef]) -> list[Array]:
    """Rows without padding, by the mask of the same shape, else by the samples' lengths."""
    rows = split(ref)
    if ref.rows is not None:
        return _unpacked(ref, fields) or rows
    mask = _find(fields, "attention_mask")
    if mask is not None and len(ref.shape) == 2 and len(mask.shape) == 2 and mask.shape[0] == ref.shape[0]:
        shorter = mask.shape[1] - ref.shape[1]
        if shorter in (0, 1):
            # A tensor one shorter says something of the next token: the last token has none.
            masks = pages.array(mask).astype(bool)
            valid = masks if shorter == 0 else masks[:, :-1] & masks[:, 1:]
            return [row[keep] for row, keep in zip(rows, valid, strict=True)]
    lengths = _find(fields, "sample_lengths")
    if lengths is not None and lengths.numel == len(rows):
        counts = pages.array(lengths).reshape(-1).tolist()
        cut = 1 if ref.alignment == "next" else 0
        return [row[: max(0, int(count) - cut)] for row, count in zip(rows, counts, strict=True)]
    return rows


def _unpacked(ref: TensorRef, fields: Sequence[TensorRef]) -> list[Array] | None:
    """The samples of packs laid end to end: more of them than packs, and their lengths add up."""
    lengths = _find(fields, "sample_lengths")
    if lengths is None or ref.rows is None or lengths.numel <= len(ref.rows):
        return None
    counts = pages.array(lengths).reshape(-1).astype(np.int64)
    if (counts < 0).any() or int(counts.sum()) != ref.shape[0]:
        return None
    return list(np.split(pages.array(ref), np.cumsum(counts)[:-1]))


def _part(ref: TensorRef, mask_name: str, fields: Sequence[TensorRef]) -> list[Array]:
    """Prompt or response ids without padding."""
    rows = split(ref)
    mask = _find(fields, mask_name)
    if ref.rows is not None or mask is None or mask.shape != ref.shape:
        return rows
    return [row[keep] for row, keep in zip(rows, pages.array(mask).astype(bool), strict=True)]


def _response_rows(ref: TensorRef, fields: Sequence[TensorRef]) -> list[Array]:
    """A response slice without padding: the last columns of the batch, or the response's own mask."""
    rows = split(ref)
    if ref.rows is not None or len(ref.shape) != 2:
        return rows
    mask = _find(fields, "attention_mask")
    width = ref.shape[1]
    if mask is not None and len(mask.shape) == 2 and mask.shape[0] == len(rows) and mask.shape[1] >= width:
        tail = pages.array(mask).astype(bool)[:, mask.shape[1] - width :]
        return [row[keep] for row, keep in zip(rows, tail, strict=True)]
    own = _find(fields, "response_mask")
    if own is not None and own.shape == ref.shape:
        return [row[keep] for row, keep in zip(rows, pages.array(own).astype(bool), strict=True)]
    return rows
