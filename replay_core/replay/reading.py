"""Reads the recorded micro-batch a plan names, from any dialect's records, by canonical names. numpy only."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from msgspec import Struct, field

from replay_core import pages
from replay_core.errors import DumpError, RequestError, RldbgError
from replay_core.records import Record, RecordKey, Run, Selection, TensorRef
from replay_core.replay.batch import MicroBatch, recorded_positions
from replay_core.replay.plan import ReplayPlan
from replay_core.samples.batch import Batch
from replay_core.samples.padding import among

#: Where several records of one micro-batch hold input_ids, the one nearest to the forward pass is taken.
_STAGES_BY_NEARNESS = (
    "batch_inputs", "forward_data", "is_loss_debug", "loss", "prepared_trajectories", "trajectory", "datums",
)  # fmt: skip
#: Roles from which an actor's forward is replayed, nearest first; others only where --role names them.
_ROLES_BY_NEARNESS = ("actor", "rollout", "ref")


#: Stages that hold the samples of a step, whole and without padding.
_WHOLE = ("prepared_trajectories", "trajectory")


class RecordedBatch(Struct, frozen=True):
    """A batch, where it was read from, the recorded samples, and the recorded batch whose `rows` it is."""

    batch: MicroBatch
    key: RecordKey
    samples: Batch
    notes: list[str] = field(default_factory=list)
    whole: MicroBatch | None = None
    rows: tuple[int, ...] | None = None

    @property
    def recorded(self) -> MicroBatch:
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
    samples, said = _samples([holder, *siblings], run)
    whole = MicroBatch.of(samples, _temperature(samples.held.find("temperature"), run))
    notes += [said] if said else []
    notes += [] if plan.flags.positions == "recorded" else _positions(samples)
    if key.step is None:
        notes.append(f"the dump numbers no steps: {holder.path.name} is replayed")
    if key.micro is None:
        what = "the step's whole batch" if plan.whole_step else "the record numbers no micro-batches"
        notes.append(f"{what}: {key} is replayed whole ({whole.rows} rows)")
    rows = _rows(plan, whole)
    batch = whole
    if rows is not None:
        listed = ", ".join(map(str, rows[:8])) + (" ..." if len(rows) > 8 else "")
        notes.append(f"only {len(rows)} of {whole.rows} rows are replayed: {listed}; samples are counted from 0")
        batch = whole.take(rows)
    if batch.response_BS is not None and not batch.response_BS.any():
        notes.append("the response mask marks no token at all: log-probabilities are compared on every token")
    if not batch.tokens:
        raise DumpError("the attention mask marks no token at all", file=str(holder.path), tensor="attention_mask")
    return RecordedBatch(batch, key, samples, notes, whole, rows)


def _role(run: Run, plan: ReplayPlan) -> tuple[str | None, str | None]:
    """The role whose records are read: a critic or reference without any sees the actor's batch, and that is said."""
    if plan.role not in ("critic", "ref") or any(record.key.role == plan.role for record in run.records):
        return plan.role, None
    return None, f"the dump has no records of role {plan.role}: it is run on the actor's batch"


def _rows(plan: ReplayPlan, batch: MicroBatch) -> tuple[int, ...] | None:
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
    """Whether it holds token ids: joined, or prompts and responses whose padding is known."""
    samples = Batch(record, record.tensors())
    return samples.held.ids is not None or (samples.padding_known and samples.has_tokens)


def _samples(records: Sequence[Record], run: Run) -> tuple[Batch, str | None]:
    """The samples of a micro-batch's records, the one with its tokens first, and what to say of their padding."""
    samples = Batch(records[0], [ref for record in records for ref in record.tensors()])
    if samples.padding_known:
        return samples, None
    for record in _wholes(run, records[0].key):
        with suppress(RldbgError):
            known = Batch(record, record.tensors())
            told = among(samples, known.contents or ()) if known.padding_known else None
            if told is not None:
                return told, f"no attention_mask is recorded: padding is told from the tokens of {record.path.name}"
    shape = [] if samples.held.ids is None else list(samples.held.ids.shape)
    raise DumpError(
        "the record holds no attention_mask: which slots are padding is not known",
        file=str(records[0].path),
        tensor="attention_mask",
        expected=f"attention_mask {shape}, cu_seqlens of a pack, or the samples' lengths",
        found=", ".join(ref.name for ref in records[0].tensors()),
        hint="record attention_mask beside input_ids; guessing it from the padding id would hide real bugs",
    )


def _wholes(run: Run, key: RecordKey) -> list[Record]:
    """The records that hold the samples of a step whole and without padding, the surest first."""
    whole = [one for one in run.records if one.key.stage in _WHOLE and one.key.step == key.step]
    return sorted(whole, key=lambda one: _WHOLE.index(one.key.stage))


def _positions(samples: Batch) -> list[str]:
    """What to say of recorded position_ids that are not what the replay gives: 0..L-1 in every sample."""
    positions_N = recorded_positions(samples)
    if positions_N is None or not (wrong_N := positions_N != samples.position_N).any():
        return []
    at = int(np.flatnonzero(wrong_N)[0])
    sample, position = int(np.searchsorted(samples.starts, at, side="right")) - 1, samples.position_N[at]
    example = f"token {position} of sample {sample} has {positions_N[at]}"
    return [
        f"the recorded position_ids do not count every sample's tokens from 0 ({example}): the replay does, so what "
        "was recorded was computed from other positions; positions=recorded gives them as they are"
    ]


def _temperature(ref: TensorRef | None, run: Run) -> float | None:
    if ref is None:
        # What the whole run used, where its micro-batches do not say.
        said = (run.flags or {}).get("temperature")
        return float(said) if isinstance(said, (int, float)) and not isinstance(said, bool) else None
    values = np.unique(np.asarray(pages.array(ref), dtype=np.float64))
    return float(values[0]) if values.size == 1 else None
