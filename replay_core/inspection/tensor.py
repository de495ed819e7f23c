"""The tensor document: statistics, values around a place, how a pair stands, and what somebody asked for besides."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

from replay_core.compare import TensorVerdict, compare_runs
from replay_core.documents.version import SCHEMA_VERSION
from replay_core.errors import RldbgError
from replay_core.export import documents
from replay_core.export.numbers import clean
from replay_core.inspection.counterpart import counterpart
from replay_core.inspection.subject import Subject
from replay_core.inspection.tokens import decoded, detected_alignment, tokens_of
from replay_core.inspection.window import Place, inside, starts, window
from replay_core.measure.histogram import log2_histogram
from replay_core.measure.statistics import statistics
from replay_core.measure.strips import difference_strips
from replay_core.measure.window import parse_slices, sliced
from replay_core.records import RecordKey

if TYPE_CHECKING:
    from replay_core.documents.tensor import TensorDocument, TensorSide

#: Pieces of `pages.CHUNK` elements that a look at once takes of a tensor; one of more (16 M elements) is sampled.
CHUNKS = 64


def tensor_document(
    a: Subject,
    b: Subject | None = None,
    *,
    at: list[int] | None = None,
    count: int = 64,
    part: str | None = None,
    at_a: list[int] | None = None,
    at_b: list[int] | None = None,
    judge: bool = True,
    tokens: bool = False,
) -> TensorDocument:
    """A tensor document at once, whatever the tensor's size: of a large one the statistics sample, and say so.

    The window starts at `at`, else where the caller knows that the two differ, else where they differ most, else at
    the first element.

    Args:
        at_a, at_b: where the caller knows that the two differ.
        part: a slice such as `0:4,:8`, in place of the window.
        judge: compare the pair. The caller may know the verdict already.
        tokens: also the sample at `at`, or else where the two differ, token by token.

    Raises:
        RequestError: `at` or `part` lies outside the tensor.
    """
    row = _verdict(a, b) if judge and b is not None else None
    known: tuple[Place, Place | None] | None = None
    if at_a is not None and inside(at_a, a.ref):
        known = tuple(at_a), tuple(at_b) if at_b and b and inside(at_b, b.ref) else None
    elif row is not None and row.raw_a is not None and row.raw_b is not None:
        known = row.raw_a, row.raw_b
    doc = _document(a, b, row, starts(a.ref, None if b is None else b.ref, at, known), 0 if part else count, CHUNKS)
    if part:
        doc["part"] = sliced(a.ref, parse_slices(part))
        doc["part_b"] = sliced(b.ref, parse_slices(part)) if b is not None else None
    index = doc["window"]["index"]
    for subject, side in ((a, doc["a"]), (b, doc["b"])):
        if subject is not None and side is not None and (own := side["stats"]):
            place = tuple(index[0]) if index else (0,) * len(subject.ref.shape)
            side["counterpart"] = counterpart(subject, own, place, len(index), CHUNKS)
    doc["difference"] = difference_strips(a.ref, b.ref) if b is not None else None
    doc["tokens"] = tokens_of(a, b, at or at_a) if tokens else None
    return clean(doc)


def shown_tensor(
    subject: Subject, *, at: list[int] | None = None, part: str | None = None, tokenizer: Path | None = None
) -> TensorDocument:
    """A tensor document over every element, with histogram, a part, the alignment its values show, and its text.

    Raises:
        RequestError: no such place or slice; or the named tokenizer cannot be read.
    """
    ref = subject.ref
    doc = _document(subject, None, None, starts(ref, None, at), 0 if part else 64, None)
    doc["part"] = sliced(ref, parse_slices(part)) if part else None
    if subject.has_numbers:
        doc["histogram"] = log2_histogram(ref) if ref.numel else None
        doc["detected"] = detected_alignment(subject)
        shown = doc["part"]["values"] if doc["part"] else doc["window"]["a"]
        doc["text"] = decoded(subject, cast(list[int], shown or []), tokenizer)
    return clean(doc)


def _document(
    a: Subject,
    b: Subject | None,
    row: TensorVerdict | None,
    start: tuple[Place, Place | None],
    count: int,
    chunks: int | None,
) -> TensorDocument:
    doc: TensorDocument = {
        "schema_version": SCHEMA_VERSION,
        "kind": "tensor",
        **documents.stamp(),
        "a": _side(a, chunks),
        "b": None if b is None else _side(b, chunks),
        "verdict": None if row is None else documents.tensor_row(row),
        "window": window(a.ref, None if b is None else b.ref, *start, count),
        "histogram": None,
        "part": None,
        "detected": None,
        "text": None,
        "part_b": None,
        "difference": None,
        "tokens": None,
    }
    return doc


def _side(subject: Subject, chunks: int | None) -> TensorSide:
    looked = statistics(subject.ref, chunks) if subject.has_numbers else None
    sampled = looked.numel if looked is not None and looked.numel < subject.ref.numel else None
    place = {"path": str(subject.run.path), "key": subject.record.key.to_mapping(), "sampled": sampled}
    return cast("TensorSide", {**documents.field(subject.ref, looked), **place})


def _verdict(a: Subject, b: Subject) -> TensorVerdict | None:
    """The pair's verdict, in the context of its whole micro-batch (layouts and inputs come from there).

    None where comparing the two micro-batches pairs either with another tensor: that verdict is not of these two.
    """
    try:
        compared = compare_runs(a.run, b.run, a.micro_batch(), b.micro_batch())
    except RldbgError:
        return None
    ends = tuple((one.record.key, one.ref.name) for one in (a, b))
    return next((row for row in compared.tensors if _ends(row) == ends), None)


def _ends(row: TensorVerdict) -> tuple[tuple[RecordKey, str], ...]:
    return tuple((side[0].key, side[1].name) for side in (row.a, row.b) if side is not None)
