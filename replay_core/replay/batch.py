"""Batch: the tokens, masks and temperature of the recorded micro-batch a plan names. numpy only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from replay_core import pages
from replay_core.errors import DumpError, RequestError
from replay_core.layout import Bools, Ints, TokenLayout
from replay_core.records import Record, RecordKey, Run, Selection, TensorRef, Unreadable
from replay_core.replay.plan import ReplayPlan

#: Where several records of one micro-batch hold input_ids, the one nearest to the forward pass is taken.
_STAGES_BY_NEARNESS = ("batch_inputs", "forward_data", "is_loss_debug", "loss", "datums")


@dataclass(frozen=True)
class Batch:
    """A padded micro-batch: token ids and which slots hold tokens; `response_BS` says which were generated."""

    ids_BS: Ints
    valid_BS: Bools
    response_BS: Bools | None = None
    temperature: float | None = None

    @property
    def rows(self) -> int:
        return int(self.ids_BS.shape[0])

    @property
    def tokens(self) -> int:
        return int(self.valid_BS.sum())

    @property
    def largest_id(self) -> int:
        """The largest id any slot holds, padding included: the padded forward embeds those as well."""
        return int(self.ids_BS.max(initial=0))

    def layout(self) -> TokenLayout:
        return TokenLayout.padded(self.valid_BS, self.response_BS)

    def first_rows(self, rows: int) -> Batch:
        response = None if self.response_BS is None else self.response_BS[:rows]
        return Batch(self.ids_BS[:rows], self.valid_BS[:rows], response, self.temperature)


@dataclass(frozen=True)
class RecordedBatch:
    """A batch and where it was read from."""

    batch: Batch
    key: RecordKey
    notes: list[str] = field(default_factory=list)


def read_batch(run: Run, plan: ReplayPlan) -> RecordedBatch:
    """The micro-batch a plan names.

    Raises:
        SelectionError: no such step, rank, micro-batch or role.
        DumpError: no record of it holds input ids and an attention mask, or they do not fit each other.
    """
    chosen = run.select(
        Selection.parse(plan.step), Selection.parse(plan.rank), Selection.parse(plan.micro), role=plan.role
    )
    holder = _holder(chosen, plan, run)
    key = holder.key
    siblings = [record for record in chosen if _same_micro(record.key, key) and record is not holder]
    batch = _batch([holder, *siblings])
    notes = []
    if key.micro is None:
        notes.append(f"the record numbers no micro-batches: {key} is replayed whole")
    if plan.max_rows is not None and plan.max_rows < batch.rows:
        notes.append(f"only the first {plan.max_rows} of {batch.rows} rows are replayed")
        batch = batch.first_rows(plan.max_rows)
    if batch.response_BS is not None and not batch.response_BS.any():
        notes.append("the response mask marks no token at all: log-probabilities are compared on every token")
    if not batch.tokens:
        raise DumpError("the attention mask marks no token at all", file=str(holder.path), tensor="attention_mask")
    return RecordedBatch(batch, key, notes)


def _same_micro(a: RecordKey, b: RecordKey) -> bool:
    return (a.step, a.micro, a.rank, a.role) == (b.step, b.micro, b.rank, b.role)


def _holder(records: Sequence[Record], plan: ReplayPlan, run: Run) -> Record:
    """The record whose input_ids are replayed."""

    def nearness(record: Record) -> tuple[bool, bool, bool, int]:
        stage = record.key.stage
        place = _STAGES_BY_NEARNESS.index(stage) if stage in _STAGES_BY_NEARNESS else len(_STAGES_BY_NEARNESS)
        return (record.key.micro is None, record.key.rank is None, record.key.role != "actor", place)

    # A record without a micro number is the whole step: never passed off as one of its micro-batches.
    numbered = any(record.key.micro is not None for record in run.records if record.key.step == plan.step)
    for record in sorted(records, key=nearness):
        if record.key.micro is None and numbered:
            continue
        if _readable(record.get("input_ids")):
            return record
    first = min(records, key=nearness)
    raise DumpError(
        "no record of the micro-batch holds its input ids: it cannot be re-executed",
        file=str(first.path),
        tensor="input_ids",
        expected="a field input_ids (or sequences, tokens …)",
        found=", ".join(ref.name for ref in first.tensors()) or "no field",
        hint=f"record the model's inputs; rldbg ls {run.path} lists what is there",
    )


def _readable(ref: TensorRef | None) -> bool:
    return ref is not None and not isinstance(ref.source, Unreadable)


def _find(records: Sequence[Record], *names: str) -> TensorRef | None:
    for record in records:
        for name in names:
            ref = record.get(name)
            if ref is not None and _readable(ref) and not ref.is_text:
                return ref
    return None


def _batch(records: Sequence[Record]) -> Batch:
    ids_ref = _find(records, "input_ids")
    mask_ref = _find(records, "attention_mask")
    bounds_ref = _find(records, "cu_seqlens")
    response_ref = _find(records, "response_mask", "loss_mask")
    path = str(records[0].path)
    assert ids_ref is not None
    ids = np.asarray(pages.array(ids_ref))
    response = None if response_ref is None else np.asarray(pages.array(response_ref))
    temperature = _temperature(_find(records, "temperature"))
    if mask_ref is not None:
        return padded_batch(ids, np.asarray(pages.array(mask_ref)), response, temperature, file=path)
    if bounds_ref is not None:
        return unpacked_batch(ids, np.asarray(pages.array(bounds_ref)), response, temperature, file=path)
    raise DumpError(
        "the record holds no attention_mask: which slots are padding is not known",
        file=path,
        tensor="attention_mask",
        expected=f"attention_mask {list(ids.shape)}, or cu_seqlens of a pack",
        found=", ".join(ref.name for ref in records[0].tensors()),
        hint="record attention_mask beside input_ids; guessing it from the padding id would hide real bugs",
    )


def _temperature(ref: TensorRef | None) -> float | None:
    if ref is None:
        return None
    values = np.unique(np.asarray(pages.array(ref), dtype=np.float64))
    return float(values[0]) if values.size == 1 else None


def padded_batch(
    ids: Any, mask: Any, response: Any = None, temperature: float | None = None, *, file: str | None = None
) -> Batch:
    """A batch from [B, S] ids and mask; `response` may be [B, S] or the suffix [B, A] (action j is token S-A+j).

    Raises:
        DumpError: the shapes do not fit each other.
    """
    ids_BS = np.asarray(ids)
    mask_BS = np.asarray(mask)
    if ids_BS.ndim != 2 or not np.issubdtype(ids_BS.dtype, np.number):
        raise DumpError(
            "input_ids is no batch of token ids", file=file, tensor="input_ids",
            expected="[B, S] integers", found=f"{ids_BS.dtype} {list(ids_BS.shape)}",
        )  # fmt: skip
    if mask_BS.shape != ids_BS.shape:
        raise DumpError(
            "the attention mask does not fit the input ids", file=file, tensor="attention_mask",
            expected=str(list(ids_BS.shape)), found=str(list(mask_BS.shape)),
        )  # fmt: skip
    try:
        layout = TokenLayout.padded(mask_BS, response)
    except ValueError as error:
        raise DumpError(str(error), file=file, tensor="response_mask") from None
    return Batch(ids_BS.astype(np.int64), mask_BS.astype(bool), layout.response_BS, temperature)


def unpacked_batch(
    ids: Any, cu_seqlens: Any, response: Any = None, temperature: float | None = None, *, file: str | None = None
) -> Batch:
    """A right-padded batch from a pack [1, T] and its cu_seqlens.

    Raises:
        DumpError: the boundaries do not fit the pack.
    """
    ids_T = np.asarray(ids).reshape(-1).astype(np.int64)
    response_T = None if response is None else np.asarray(response).reshape(-1).astype(bool)
    try:
        lengths = TokenLayout.packed(cu_seqlens, ids_T.size).lengths
    except ValueError as error:
        raise DumpError(str(error), file=file, tensor="cu_seqlens") from None
    if response_T is not None and response_T.shape != ids_T.shape:
        raise DumpError(
            "the response mask does not fit the pack", file=file, tensor="response_mask",
            expected=str(list(ids_T.shape)), found=str(list(response_T.shape)),
        )  # fmt: skip
    valid_BS = np.arange(int(lengths.max(initial=0))) < lengths[:, None]
    ids_BS = np.zeros(valid_BS.shape, dtype=np.int64)
    ids_BS[valid_BS] = ids_T[: int(lengths.sum())]
    response_BS = None
    if response_T is not None:
        response_BS = np.zeros(valid_BS.shape, dtype=bool)
        response_BS[valid_BS] = response_T[: int(lengths.sum())]
    return Batch(ids_BS, valid_BS, response_BS, temperature)


def resolve_temperature(asked: float | None, recorded: float | None) -> tuple[float, str | None]:
    """The temperature to divide logits by, and what to say about it.

    Raises:
        RequestError: the recorded temperature is not above 0.
    """
    if asked is not None:
        differs = recorded not in (None, asked)
        return asked, f"temperature {asked:g} as asked; the record says {recorded:g}" if differs else None
    if recorded is None:
        return 1.0, "the record names no temperature: 1.0 is assumed"
    if not recorded > 0:
        raise RequestError("the recorded temperature is not above 0", found=str(recorded), hint="--temperature 1.0")
    return recorded, None
