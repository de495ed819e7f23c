"""Reads the recorded micro-batch a plan names, from any dialect's records, by canonical names. numpy only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from replay_core import pages
from replay_core.errors import DumpError, RequestError
from replay_core.records import Record, RecordKey, Run, Selection, TensorRef, Unreadable
from replay_core.replay import ragged
from replay_core.replay.batch import Batch, padded_batch, unpacked_batch
from replay_core.replay.plan import ReplayPlan
from replay_core.samples import rows as samples
from replay_core.samples.layout import TokenLayout

#: Where several records of one micro-batch hold input_ids, the one nearest to the forward pass is taken.
_STAGES_BY_NEARNESS = (
    "batch_inputs", "forward_data", "is_loss_debug", "loss", "prepared_trajectories", "trajectory", "datums",
)  # fmt: skip
#: Roles from which an actor's forward is replayed, nearest first; others only where --role names them.
_ROLES_BY_NEARNESS = ("actor", "rollout", "ref")


@dataclass(frozen=True)
class RecordedBatch:
    """A batch, where it was read from, and the recorded batch whose `rows` it is."""

    batch: Batch
    key: RecordKey
    notes: list[str] = field(default_factory=list)
    whole: Batch | None = None
    rows: tuple[int, ...] | None = None

    @property
    def recorded(self) -> Batch:
        """The micro-batch as it was recorded: every row."""
        return self.batch if self.whole is None else self.whole

    def chosen(self, values_BS: Any) -> Any:
        """The replayed rows of something that has one per recorded row."""
        return values_BS if self.rows is None else values_BS[list(self.rows)]


def read_batch(run: Run, plan: ReplayPlan) -> RecordedBatch:
    """The micro-batch a plan names.

    Raises:
        SelectionError: no such step, rank, micro-batch or role.
        RequestError: no such row.
        DumpError: no record of it holds token ids whose padding is known, or they do not fit each other.
    """
    numbered = any(record.key.step is not None for record in run.records)
    step = Selection.parse(plan.step) if numbered else None
    role, said_of_role = _role(run, plan)
    chosen = run.select(step, Selection.parse(plan.rank), Selection.parse(plan.micro), role=role)
    holder = _holder(chosen, plan, run)
    key = holder.key
    siblings = [record for record in chosen if _same_micro(record.key, key) and record is not holder]
    notes = [said_of_role] if said_of_role else []
    whole, said = _batch([holder, *siblings], run)
    notes += [said] if said else []
    notes += _positions([holder, *siblings])
    if key.step is None:
        notes.append(f"the dump numbers no steps: {holder.path.name} is replayed")
    if key.micro is None:
        what = "the step's whole batch" if plan.whole_step else "the record numbers no micro-batches"
        notes.append(f"{what}: {key} is replayed whole ({whole.rows} rows)")
    rows = _rows(plan, whole)
    batch = whole
    if rows is not None:
        listed = ", ".join(map(str, rows[:8])) + (" ..." if len(rows) > 8 else "")
        notes.append(f"only {len(rows)} of {whole.rows} rows are replayed: {listed}; segments count them from 0")
        batch = whole.take(rows)
    if batch.response_BS is not None and not batch.response_BS.any():
        notes.append("the response mask marks no token at all: log-probabilities are compared on every token")
    if not batch.tokens:
        raise DumpError("the attention mask marks no token at all", file=str(holder.path), tensor="attention_mask")
    return RecordedBatch(batch, key, notes, whole, rows)


def _role(run: Run, plan: ReplayPlan) -> tuple[str | None, str | None]:
    """The role whose records are read: a critic or reference without any sees the actor's batch, and that is said."""
    if plan.role not in ("critic", "ref") or any(record.key.role == plan.role for record in run.records):
        return plan.role, None
    return None, f"the dump has no records of role {plan.role}: it is run on the actor's batch"


def _rows(plan: ReplayPlan, batch: Batch) -> tuple[int, ...] | None:
    """The rows to replay; None for all of them."""
    chosen = tuple(range(batch.rows))
    if plan.rows is not None:
        selection = Selection.parse(plan.rows)
        chosen = tuple(row for row in chosen if selection.has(row))
        if not chosen or (selection.numbers and max(selection.numbers) >= batch.rows):
            raise RequestError(
                "the micro-batch has no such row", expected=f"rows 0..{batch.rows - 1}", found=f"--rows {plan.rows}"
            )
    if plan.max_rows is not None:
        chosen = chosen[: plan.max_rows]
    return None if len(chosen) == batch.rows else chosen


def _same_micro(a: RecordKey, b: RecordKey) -> bool:
    return (a.step, a.micro, a.rank, a.role) == (b.step, b.micro, b.rank, b.role)


def _holder(records: Sequence[Record], plan: ReplayPlan, run: Run) -> Record:
    """The record whose tokens are replayed."""

    def nearness(record: Record) -> tuple[bool, bool, int, int]:
        stage, role = record.key.stage, record.key.role
        place = _STAGES_BY_NEARNESS.index(stage) if stage in _STAGES_BY_NEARNESS else len(_STAGES_BY_NEARNESS)
        nearest = _ROLES_BY_NEARNESS.index(role) if role in _ROLES_BY_NEARNESS else len(_ROLES_BY_NEARNESS)
        return (record.key.micro is None, record.key.rank is None, nearest, place)

    # A record without a micro number is the whole step: never passed off as one of its micro-batches.
    numbered = any(record.key.micro is not None for record in run.records if record.key.step == plan.step)
    fit = [record for record in records if record.key.micro is None or not plan.whole_step]
    fit = [record for record in fit if record.key.micro is not None or not numbered or plan.whole_step]
    for record in sorted(fit, key=nearness):
        if _has_tokens(record):
            return record
    first = min(fit or records, key=nearness)
    steps = [record for record in records if record.key.micro is None and _has_tokens(record)]
    raise DumpError(
        "no record of the micro-batch holds its input ids: it cannot be re-executed",
        file=str(first.path),
        tensor="input_ids",
        expected="a field input_ids (or sequences, tokens, prompt and response ids ...)",
        found=", ".join(ref.name for ref in first.tensors()) or "no field",
        hint=f"--micro all replays the step's whole batch ({steps[0].path.parent.name}/{steps[0].path.name})"
        if steps
        else _nothing_to_run(first, run),
    )


def _nothing_to_run(record: Record, run: Run) -> str:
    if any(ref.is_text and "text" in (ref.canonical or "") for ref in record.tensors()):
        return "it holds texts: tokenised again they might not come out the same, so texts are not replayed"
    return f"record the model's inputs; rldbg ls {run.path} lists what is there"


def _has_tokens(record: Record) -> bool:
    fields = ragged.usable(record)
    ids = ragged.find(fields, "input_ids")
    return ids is not None or ragged.tokens(fields) is not None


def _readable(ref: TensorRef | None) -> bool:
    return ref is not None and not isinstance(ref.source, Unreadable)


def _find(records: Sequence[Record], *names: str) -> TensorRef | None:
    for record in records:
        for name in names:
            ref = record.get(name)
            if ref is not None and _readable(ref) and not ref.is_text:
                return ref
    return None


def _batch(records: Sequence[Record], run: Run) -> tuple[Batch, str | None]:
    """The batch of a micro-batch's records, the one with its tokens first, and what to say about it."""
    ids_ref = _find(records, "input_ids")
    mask_ref = _find(records, "attention_mask")
    bounds_ref = _find(records, "cu_seqlens")
    response_ref = _find(records, "response_mask", "loss_mask")
    path = str(records[0].path)
    temperature = _temperature(_find(records, "temperature"), run)
    ragged_ids = ids_ref is None or ids_ref.rows is not None
    if not ragged_ids and ids_ref is not None and (mask_ref is not None or bounds_ref is not None):
        ids = np.asarray(pages.array(ids_ref))
        response = None if response_ref is None else _own_tokens(response_ref, ids)
        if mask_ref is not None:
            mask = np.asarray(pages.array(mask_ref))
            return padded_batch(ids, mask, response, temperature, file=path), None
        assert bounds_ref is not None
        return unpacked_batch(ids, np.asarray(pages.array(bounds_ref)), response, temperature, file=path), None
    batch = ragged.ragged_batch(records[0], temperature)
    if batch is not None:
        return batch, None
    assert ids_ref is not None
    ids = np.asarray(pages.array(ids_ref))
    if ids.ndim == 2:
        found = ragged.mask_by_trajectories(ids, run, records[0].key)
        if found is not None:
            response = None if response_ref is None else _own_tokens(response_ref, ids)
            return padded_batch(ids, found[0], response, temperature, file=path), found[1]
    raise DumpError(
        "the record holds no attention_mask: which slots are padding is not known",
        file=path,
        tensor="attention_mask",
        expected=f"attention_mask {list(ids.shape)}, cu_seqlens of a pack, or the samples' lengths",
        found=", ".join(ref.name for ref in records[0].tensors()),
        hint="record attention_mask beside input_ids; guessing it from the padding id would hide real bugs",
    )


def _positions(records: Sequence[Record]) -> list[str]:
    """What to say of recorded position_ids that are not what the replay gives: 0..L-1 in every sample."""
    ref = _find(records, "position_ids")
    counted = None if ref is None else _counted(ref, records)
    if counted is None:
        return []
    sample, position, found = counted
    wrong = np.flatnonzero(found != position)
    if not wrong.size:
        return []
    at = wrong[0]
    example = f"token {position[at]} of sample {sample[at]} has {found[at]:g}"
    return [
        f"the recorded position_ids do not count every sample's tokens from 0 ({example}): the replay does, so what "
        "was recorded was computed from other positions"
    ]


def _counted(ref: TensorRef, records: Sequence[Record]) -> tuple[Any, Any, Any] | None:
    """(sample, position in it, recorded position) of every token; None where the three do not fit each other."""
    ids, mask, bounds = (_find(records, name) for name in ("input_ids", "attention_mask", "cu_seqlens"))
    if ids is not None and ids.rows is None and (mask is not None or bounds is not None):
        if mask is not None:
            layout = TokenLayout.padded(pages.array(mask))
        else:
            assert bounds is not None
            layout = TokenLayout.packed(pages.array(bounds), ids.numel)
        if ref.numel != layout.sample_BS.size:
            return None
        sample, position = layout.sample_BS.reshape(-1), layout.position_BS.reshape(-1)
        held = sample >= 0
        return sample[held], position[held], pages.array(ref).reshape(-1)[held]
    rows = samples.per_token(ref, [field for record in records for field in ragged.usable(record)])
    if not rows:
        return None
    lengths = [row.size for row in rows]
    position = np.concatenate([np.arange(length) for length in lengths])
    return np.repeat(np.arange(len(rows)), lengths), position, np.concatenate(rows)


def _own_tokens(response: TensorRef, ids: Any) -> Any:
    """A response mask whose index t is about token t; one of next tokens is moved by one."""
    mask = np.asarray(pages.array(response))
    if response.alignment == "next" and mask.ndim == 2 and mask.shape == ids.shape:
        moved = np.zeros_like(mask)
        moved[:, 1:] = mask[:, :-1]
        return moved
    return mask


def _temperature(ref: TensorRef | None, run: Run) -> float | None:
    if ref is None:
        # What the whole run used, where its micro-batches do not say.
        said = (run.flags or {}).get("temperature")
        return float(said) if isinstance(said, (int, float)) and not isinstance(said, bool) else None
    values = np.unique(np.asarray(pages.array(ref), dtype=np.float64))
    return float(values[0]) if values.size == 1 else None
