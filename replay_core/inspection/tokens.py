"""One sample token by token: ids, their text, and every value per token that was recorded of it; token ids as text."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from replay_core import naming
from replay_core.decoding import Decoder, find_tokenizer
from replay_core.errors import RequestError
from replay_core.inspection.subject import Subject
from replay_core.measure.lag import detect_lag
from replay_core.records import TensorRef
from replay_core.samples.batch import Batch, by_sample, rows_of
from replay_core.samples.layout import positions_of, samples_of

if TYPE_CHECKING:
    from replay_core.documents.tensor import DecodedText, DetectedAlignment, TokenColumn, TokensEntry

#: Tokens of one sample shown at once.
MAX_TOKENS = 512
#: Samples shown as text, and tokens of each.
MAX_TEXTS = 4
MAX_TEXT_TOKENS = 2048
#: Alignments that say which token a value is about.
ALIGNED = ("full", "next", "response")
#: Kinds of tensors that say something of a token, in the order they are read.
_TOKEN_KINDS = ("logprob", "value", "loss", "metric", "mask")


def tokens_of(a: Subject, b: Subject | None, place: Sequence[int] | None = None) -> TokensEntry | None:
    """The sample that a place of the tensor is of, token by token, both sides, that token among those shown; the first
    sample where it is of none. None where no ids are recorded beside the tensor."""
    found = _batches(a)
    ids = next((batch.contents for batch in found if batch.contents is not None), None)
    if ids is None:
        return None
    token = None if place is None else next((t for one in found if (t := _token_at(one, a.ref, place))), None)
    # Where nothing lays it out, the first number of an index is most often the sample's.
    sample = token[0] if token is not None else place[0] if place else 0
    sample = min(max(0, sample), len(ids) - 1)
    position = None if token is None else token[1]
    first = max(0, min((position or 0) - MAX_TOKENS // 4, len(ids[sample]) - MAX_TOKENS))
    row = ids[sample][first : first + MAX_TOKENS]
    columns = _columns(found, sample, "a", a.ref.name)
    if b is not None:
        columns += _columns(_batches(b), sample, "b", b.ref.name)
    path = find_tokenizer(a.record.path, a.run.models.values())
    pieces = None
    if path is not None:
        with suppress(RequestError):  # nobody asked for the one that lies there
            pieces = Decoder(path).pieces([int(token) for token in row])
    return {
        "sample": sample,
        "samples": len(ids),
        "ids": row.tolist(),
        "left_out": int(ids[sample].size - row.size),
        "tokenizer": None if path is None else str(path),
        "pieces": pieces,
        "columns": [{**column, "values": column["values"][first : first + row.size]} for column in columns],
        "first": first,
        "position": position,
    }


def _token_at(batch: Batch, ref: TensorRef, index: Sequence[int]) -> tuple[int, int] | None:
    """The sample and position of an element, of which `index_of` gives the index; None where it has none."""
    placed = batch.place(ref, by_shape=True)
    if placed is None or len(index) != len(ref.shape) or not placed.by_token:
        return None
    row = int(np.ravel_multi_index(tuple(index[: placed.axes]), ref.shape[: placed.axes]))
    there = placed.tokens[np.flatnonzero(placed.rows == row)[:1]]
    return (int(samples_of(there)[0]), int(positions_of(there)[0])) if there.size else None


def _batches(subject: Subject) -> list[Batch]:
    """The record and the others of its micro-batch, whatever their dump point and role."""
    batches: list[Batch] = []
    others = [one for one in subject.micro_batch(of_any_role=True) if one is not subject.record]
    for one in [subject.record, *others]:
        batch = Batch(one, one.tensors())
        if batches and not batch.has_tokens:
            # Ids and masks often stand in one dump point, log-probabilities in the next.
            batch = Batch(one, [*one.tensors(), *batches[0].held.fields()])
        batches.append(batch)
    return batches


def _columns(batches: list[Batch], sample: int, side: Literal["a", "b"], wanted: str) -> list[TokenColumn]:
    columns: list[tuple[int, TokenColumn]] = []
    seen = set()
    for batch in batches:
        if sample >= len(batch):
            continue
        here = slice(batch.starts[sample], batch.starts[sample] + batch.lengths[sample])
        for ref in batch.held.fields():
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
            stage = batch.held.record.key.stage
            columns.append((place, {"side": side, "name": name, "stage": stage, "values": values.tolist()}))
    return [column for _, column in sorted(columns, key=lambda one: one[0])]


def detected_alignment(subject: Subject) -> DetectedAlignment | None:
    """The alignment the data show, where no name settles it: against log-probabilities whose alignment is known."""
    ref = subject.ref
    if ref.alignment in ALIGNED or naming.meaning(subject.name).kind not in ("logprob", "value"):
        return None
    batch = Batch(subject.record, subject.record.tensors())
    rows = by_sample(batch, ref.with_(alignment="full"))
    for other in batch.held.fields():
        known = other.alignment in ALIGNED and naming.meaning(other.canonical or other.name).kind == "logprob"
        against = by_sample(batch, other) if known and rows is not None else None
        if rows is None or against is None:
            continue
        # Zeros fill what has no log-probability, and would agree at every lag.
        lag = detect_lag([np.where(row == 0, np.nan, row) for row in against], rows)
        # At lag -1 the value of token t stands at index t - 1.
        alignment = {0: "full", -1: "next"}.get(lag.lag) if lag.settled else None
        return {"alignment": alignment, "against": other.name, "why": lag.sentence}
    return None


def decoded(subject: Subject, shown: list[int], tokenizer: Path | None) -> DecodedText | None:
    """Token ids as text: the values shown, and the first samples. None for other tensors, or without tokenizer."""
    if naming.meaning(subject.name).kind != "ids":
        return None
    path = tokenizer or find_tokenizer(subject.record.path, subject.run.models.values())
    if path is None:
        return None
    samples = [row.reshape(-1)[:MAX_TEXT_TOKENS].tolist() for row in rows_of(subject.ref)[:MAX_TEXTS]]
    try:
        decoder = Decoder(path)
        return {
            "tokenizer": str(decoder.path),
            "pieces": decoder.pieces([int(value) for value in shown]),
            "samples": [decoder.text([int(value) for value in row]) for row in samples],
        }
    except RequestError:
        if tokenizer is not None:
            raise
        return None  # nobody asked for the one that lies there
