"""A tensor as the screen looks at it: at once whatever its size, with where the pair differs, or token by token.

What `inspection` reads whole, is sampled here above a size, and the answer says so.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from replay_core import naming
from replay_core.counterpart import counterpart
from replay_core.decoding import Decoder, find_tokenizer
from replay_core.export import documents
from replay_core.export.numbers import clean
from replay_core.inspection import Named, find_tensor, starts, tensor_document, window
from replay_core.jobs import Document
from replay_core.measure.statistics import statistics
from replay_core.measure.strips import difference_strips
from replay_core.measure.window import parse_slices, sliced
from replay_core.records import Record, Run, TensorRef
from replay_core.samples.batch import Batch

#: Pieces of `pages.CHUNK` elements that statistics look at; a tensor of more (16 M elements) is sampled.
CHUNKS = 64
#: Tokens of one sample shown at once.
MAX_TOKENS = 512
#: Kinds of tensors that say something of a token, in the order they are read.
_TOKEN_KINDS = ("logprob", "value", "loss", "metric", "mask")


def glance(
    a: Named,
    b: Named | None = None,
    *,
    at: list[int] | None = None,
    count: int = 64,
    part: str | None = None,
    at_a: list[int] | None = None,
    at_b: list[int] | None = None,
    judge: bool = True,
    tokens: bool = False,
) -> Document:
    """A tensor document for the screen.

    Args:
        at: the window starts there; else at `at_a` and `at_b`, where the caller knows that the two differ.
        part: a slice such as `0:4,:8`, in place of the window.
        judge: compare the pair. The caller may know the verdict already.
        tokens: also the sample at `at` (its first number), token by token.

    Raises:
        RequestError: no such tensor, or `at` or `part` lies outside it.
    """
    ref_a, ref_b = find_tensor(a), find_tensor(b) if b else None
    whole = judge and b is not None
    document = tensor_document(a, b, at=at, count=0 if part else count) if whole else None
    if document is None:
        start = starts(ref_a, ref_b, None, at)
        if at is None and at_a is not None and _inside(at_a, ref_a):
            start = tuple(at_a), tuple(at_b) if at_b and ref_b and _inside(at_b, ref_b) else start[1]
        document = documents.document(
            "tensor",
            a=_side(a, ref_a),
            b=_side(b, ref_b) if b and ref_b else None,
            verdict=None,
            window=window(ref_a, ref_b, *start, 0 if part else count),
            histogram=None,
            part=None,
            detected=None,
            text=None,
            part_b=None,
            difference=None,
            tokens=None,
        )
    if part:
        document["part"] = clean(sliced(ref_a, parse_slices(part)))
        document["part_b"] = clean(sliced(ref_b, parse_slices(part))) if ref_b is not None else None
    for side, named, ref in (("a", a, ref_a), ("b", b, ref_b)):
        if named is not None and ref is not None and (own := document[side]["stats"]):
            index = document["window"]["index"]
            place = tuple(index[0]) if index else (0,) * len(ref.shape)
            document[side]["counterpart"] = clean(counterpart(named, ref, own, place, len(index), CHUNKS))
    document["difference"] = None if ref_b is None else clean(difference_strips(ref_a, ref_b))
    document["tokens"] = clean(_tokens(a, b, (at or at_a or [0])[0])) if tokens else None
    return document


def _inside(index: list[int], ref: TensorRef) -> bool:
    return len(index) == len(ref.shape) and all(0 <= i < n for i, n in zip(index, ref.shape, strict=True))


def _side(named: Named, ref: TensorRef) -> dict[str, Any]:
    run, record, _ = named
    looked = statistics(ref, CHUNKS) if ref.is_readable and not ref.is_text else None
    sampled = looked.numel if looked is not None and looked.numel < ref.numel else None
    side = {"path": str(run.path), "key": record.key.to_mapping(), **documents.field(ref, looked)}
    return {**side, "sampled": sampled}


def _tokens(a: Named, b: Named | None, sample: int) -> dict[str, Any] | None:
    """One sample token by token: ids, their text, and every value per token recorded of it, both sides."""
    run, record, name = a
    found = _batches(run, record)
    ids = next((batch.contents for batch in found if batch.contents is not None), None)
    if ids is None:
        return None
    sample = min(max(0, sample), len(ids) - 1)
    row = ids[sample][:MAX_TOKENS]
    columns = _columns(found, sample, "a", name)
    if b is not None:
        columns += _columns(_batches(b[0], b[1]), sample, "b", b[2])
    path = find_tokenizer(record.path, run.models.values())
    pieces = Decoder(path).pieces([int(token) for token in row]) if path is not None else None
    return {
        "sample": sample,
        "samples": len(ids),
        "ids": row,
        "left_out": int(ids[sample].size - row.size),
        "tokenizer": None if path is None else str(path),
        "pieces": pieces,
        "columns": [{**column, "values": column["values"][: row.size]} for column in columns],
    }


def _batches(run: Run, record: Record) -> list[Batch]:
    """The record and its neighbours of the same step, rank and micro-batch, whatever their dump point and role."""
    here = (record.key.step, record.key.rank, record.key.micro)
    near = [
        other for other in run.records if (other.key.step, other.key.rank, other.key.micro) == here and other != record
    ]
    batches: list[Batch] = []
    for one in [record, *near]:
        batch = Batch(one, one.tensors())
        if batches and not batch.has_tokens:
            # Ids and masks often stand in one dump point, log-probabilities in the next.
            batch = Batch(one, [*one.tensors(), *batches[0].fields()])
        batches.append(batch)
    return batches


def _columns(batches: list[Batch], sample: int, side: str, wanted: str) -> list[dict[str, Any]]:
    columns: list[tuple[int, dict[str, Any]]] = []
    seen = set()
    for batch in batches:
        if sample >= len(batch):
            continue
        here = slice(batch.starts[sample], batch.starts[sample] + batch.lengths[sample])
        for ref in batch.fields():
            name = ref.canonical or ref.name
            kind = naming.meaning(name).kind
            known = kind in _TOKEN_KINDS or (ref.name == wanted and kind != "ids")
            # One number per sample is no column of its tokens.
            if not known or name in seen or ref.is_text or batch.per_sample(ref) is not None:
                continue
            said = batch.values(ref)
            if said is None or not np.isfinite(values := said.values_N[here]).any():
                continue
            seen.add(name)
            place = 0 if ref.name == wanted or kind not in _TOKEN_KINDS else _TOKEN_KINDS.index(kind) + 1
            columns.append((place, {"side": side, "name": name, "stage": batch.record.key.stage, "values": values}))
    return [column for _, column in sorted(columns, key=lambda one: one[0])]
