"""One tensor under the glass, or two side by side: statistics, a window of values, where they differ most."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np

from replay_core import naming, pages
from replay_core.compare import TensorVerdict, compare_runs
from replay_core.compare.differences import difference
from replay_core.decoding import Decoder, find_tokenizer
from replay_core.errors import RequestError, RldbgError
from replay_core.export import documents
from replay_core.export.numbers import clean
from replay_core.jobs import Document
from replay_core.measure.histogram import log2_histogram
from replay_core.measure.lag import detect_lag
from replay_core.measure.statistics import statistics
from replay_core.measure.window import parse_slices, sliced
from replay_core.records import Record, RecordKey, Run, TensorRef
from replay_core.samples.batch import Batch, rows_of

Named = tuple[Run, Record, str]

#: Alignments that say which token a value is about.
ALIGNED = ("full", "next", "response")
#: Samples shown as text, and tokens of each.
MAX_TEXTS = 4
MAX_TEXT_TOKENS = 2048


def tensor_document(a: Named, b: Named | None = None, *, at: list[int] | None = None, count: int = 64) -> Document:
    """A tensor document. The window starts at `at`, else where the two differ most, else at the first element.

    Raises:
        RequestError: no such tensor in the record, or `at` lies outside it.
    """
    ref_a = find_tensor(a)
    ref_b = find_tensor(b) if b else None
    row = _verdict(a, b, ref_a, ref_b) if b and ref_b else None
    start_a, start_b = starts(ref_a, ref_b, row, at)
    return documents.document(
        "tensor",
        a=side(a, ref_a),
        b=side(b, ref_b) if b and ref_b else None,
        verdict=None if row is None else documents.tensor_row(row),
        window=window(ref_a, ref_b, start_a, start_b, count),
        # What only `shown_tensor` looks for.
        histogram=None,
        part=None,
        detected=None,
        text=None,
        # What only `glance` looks for.
        part_b=None,
        difference=None,
        tokens=None,
    )


def shown_tensor(
    named: Named, *, at: list[int] | None = None, part: str | None = None, tokenizer: Path | None = None
) -> Document:
    """A tensor document with what a person looking at one tensor wants besides: histogram, a part, its text.

    Raises:
        RequestError: no such tensor, place or slice; or the named tokenizer cannot be read.
    """
    run, record, _ = named
    ref = find_tensor(named)
    document = tensor_document(named, at=at, count=0 if part else 64)
    numbers = ref.is_readable and not ref.is_text
    document["histogram"] = log2_histogram(ref) if numbers and ref.numel else None
    document["part"] = clean(sliced(ref, parse_slices(part))) if part else None
    document["detected"] = _detected(record, ref) if numbers else None
    document["text"] = _decoded(run, record, ref, document, tokenizer) if numbers else None
    return document


def difference_document(a: Named, b: Named, *, axis: str = "row", cells: int = 64) -> Document:
    """How two tensors' differences are spread (ULP, log2 |d|, quantiles, Pearson), and a strip along an axis.

    Args:
        axis: `row` (token, where the layout tells) or `channel`.
        cells: how many cells the strip has at most.

    Raises:
        RequestError: no such tensor or axis, texts, or two tensors whose elements cannot face each other.
    """
    ref_a, ref_b = find_tensor(a), find_tensor(b)
    for ref in (ref_a, ref_b):
        if ref.is_text or not ref.is_readable:
            raise RequestError("there are no numbers to take a difference of", tensor=ref.name, found=ref.dtype)
    neighbours = _neighbours(*a[:2]), _neighbours(*b[:2])
    return documents.document(
        "difference",
        a={"path": str(a[0].path), "key": a[1].key.to_mapping(), "name": ref_a.name},
        b={"path": str(b[0].path), "key": b[1].key.to_mapping(), "name": ref_b.name},
        **difference(*neighbours, ref_a, ref_b, axis=axis, cells=cells),
    )


def _detected(record: Record, ref: TensorRef) -> dict[str, Any] | None:
    """The alignment the data show, where no name settles it: against log-probabilities whose alignment is known."""
    if ref.alignment in ALIGNED or naming.meaning(ref.canonical or ref.name).kind not in ("logprob", "value"):
        return None
    batch = Batch(record, record.tensors())
    rows = batch.by_sample(ref.with_(alignment="full"))
    for other in batch.fields():
        known = other.alignment in ALIGNED and naming.meaning(other.canonical or other.name).kind == "logprob"
        against = batch.by_sample(other) if known and rows is not None else None
        if rows is None or against is None:
            continue
        # Zeros fill what has no log-probability, and would agree at every lag.
        lag = detect_lag([np.where(row == 0, np.nan, row) for row in against], rows)
        # At lag -1 the value of token t stands at index t - 1.
        alignment = {0: "full", -1: "next"}.get(lag.lag) if lag.settled else None
        return {"alignment": alignment, "against": other.name, "why": lag.sentence}
    return None


def _decoded(
    run: Run, record: Record, ref: TensorRef, document: Document, tokenizer: Path | None
) -> dict[str, Any] | None:
    """Token ids as text: the values shown, and the first samples. None for other tensors, or without tokenizer."""
    if naming.meaning(ref.canonical or ref.name).kind != "ids":
        return None
    path = tokenizer or find_tokenizer(record.path, run.models.values())
    if path is None:
        return None
    decoder = Decoder(path)
    shown = document["part"]["values"] if document["part"] else document["window"]["a"]
    samples = [row.reshape(-1)[:MAX_TEXT_TOKENS].tolist() for row in rows_of(ref)[:MAX_TEXTS]]
    return {
        "tokenizer": str(decoder.path),
        "pieces": decoder.pieces([int(value) for value in shown]),
        "samples": [decoder.text([int(value) for value in row]) for row in samples],
    }


def holders(records: list[Record], name: str) -> list[Record]:
    """The records that hold a tensor of that name; one that cannot be read holds none."""
    holding = []
    for record in records:
        with contextlib.suppress(RldbgError):
            if record.get(name) is not None:
                holding.append(record)
    return holding


def find_tensor(named: Named) -> TensorRef:
    _, record, name = named
    ref = record.get(name)
    if ref is None:
        known = [tensor.name for tensor in record.tensors()]
        raise RequestError(
            f"the record has no tensor {name!r}",
            file=str(record.path),
            expected="one of " + ", ".join(known[:12]) + (f" and {len(known) - 12} more" if len(known) > 12 else ""),
            found=name,
        )
    return ref


def side(named: Named, ref: TensorRef) -> dict[str, Any]:
    run, record, _ = named
    looked = statistics(ref) if ref.is_readable and not ref.is_text else None
    return {"path": str(run.path), "key": record.key.to_mapping(), **documents.field(ref, looked), "sampled": None}


def _verdict(a: Named, b: Named, ref_a: TensorRef, ref_b: TensorRef) -> TensorVerdict | None:
    """The pair's verdict, in the context of its whole micro-batch (layouts and inputs come from there).

    None where comparing the two micro-batches pairs either with another tensor: that verdict is not of these two.
    """
    run_a, record_a, _ = a
    run_b, record_b, _ = b
    try:
        compared = compare_runs(run_a, run_b, _neighbours(run_a, record_a), _neighbours(run_b, record_b))
    except RldbgError:
        return None
    ends = ((record_a.key, ref_a.name), (record_b.key, ref_b.name))
    return next((row for row in compared.tensors if _ends(row) == ends), None)


def _ends(row: TensorVerdict) -> tuple[tuple[RecordKey, str], ...]:
    return tuple((side[0].key, side[1].name) for side in (row.a, row.b) if side is not None)


def _neighbours(run: Run, record: Record) -> list[Record]:
    here = (record.key.step, record.key.micro, record.key.rank, record.key.role)
    return [other for other in run.records if (other.key.step, other.key.micro, other.key.rank, other.key.role) == here]


def starts(
    a: TensorRef, b: TensorRef | None, row: TensorVerdict | None, at: list[int] | None
) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Where the window begins on either side; None where which element of b belongs beside a's is not known."""
    # Another shape is another layout: the same raw index there is another token.
    same = b is not None and b.shape == a.shape
    if at is not None:
        if len(at) != len(a.shape) or any(not 0 <= i < n for i, n in zip(at, a.shape, strict=False)):
            raise RequestError(
                "the index lies outside the tensor",
                tensor=a.name,
                expected=f"an index into {list(a.shape)}",
                found=str(at),
            )
        return tuple(at), tuple(at) if same else None
    if row is not None and row.raw_a is not None and row.raw_b is not None:
        return row.raw_a, row.raw_b
    origin = (0,) * len(a.shape)
    return origin, origin if same else None


def window(
    a: TensorRef, b: TensorRef | None, start_a: tuple[int, ...], start_b: tuple[int, ...] | None, count: int
) -> dict[str, Any]:
    """Up to `count` values of the last axis around the start, both sides, and their difference b - a.

    Only a's where its place in b is not known. Only the place itself where the last axis is laid out otherwise in b:
    the elements after it need not be the same tokens.
    """
    if start_b is not None and b is not None and not _share_last_axis(a, b):
        count = min(count, 1)
    if a.is_text or not a.is_readable:
        return {"index": [], "a": [], "b": None, "d": None}
    first_a, values_a = _row(a, start_a, count)
    prefix = list(start_a[:-1])
    index = [[*prefix, first_a + i] for i in range(len(values_a))] if a.shape else [[]]
    if b is None or start_b is None or b.is_text or not b.is_readable:
        return {"index": index, "a": values_a, "b": None, "d": None}
    _, values_b = _row(b, start_b, count, first_a if b.shape and a.shape and b.shape[-1] == a.shape[-1] else None)
    size = min(len(values_a), len(values_b))
    with np.errstate(invalid="ignore", over="ignore"):
        kind = np.complex128 if any(ref.dtype.startswith("complex") for ref in (a, b)) else np.float64
        d = np.asarray(values_b[:size], dtype=kind) - np.asarray(values_a[:size], dtype=kind)
    return {"index": index, "a": values_a, "b": values_b, "d": d}


def _share_last_axis(a: TensorRef, b: TensorRef) -> bool:
    """Whether the last axis means the same on both sides: it is the channels', or the shapes are equal altogether."""
    return a.shape == b.shape or (min(len(a.shape), len(b.shape)) > 2 and a.shape[-1] == b.shape[-1])


def _row(ref: TensorRef, start: tuple[int, ...], count: int, first: int | None = None) -> tuple[int, list[Any]]:
    if not ref.shape:
        return 0, [pages.array(ref).item()]
    width = ref.shape[-1]
    if first is None:
        # A quarter of the window before the place, so that it is seen among its neighbours.
        first = max(0, min(start[-1] - count // 4, width - count))
    if not ref.numel:
        return first, []
    spans = [*((place, place + 1) for place in start[:-1]), (first, max(first, min(first + count, width)))]
    return first, pages.part(ref, spans).reshape(-1).tolist()
