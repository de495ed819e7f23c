"""What the trainer itself recorded of the micro-batch, laid beside a replay token by token. numpy only.

The recording is row 0 of a matrix: all replayed cells can agree with each other while the trainer's own
forward was wrong. Recorded log-probabilities come as [B, S], [B, S-1], a response suffix [B, A], a pack or
ragged rows; all are brought to one form, [B, S] with index t about token t + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replay_core import naming, pages
from replay_core.compare import compare_runs
from replay_core.compare.judging.verdict import Context, judge
from replay_core.dtypes import coarsest
from replay_core.dumps import open_run
from replay_core.errors import NothingComparableError, RldbgError
from replay_core.measure.pair import PairFigures, figures
from replay_core.records import Record, RecordKey, Run, TensorRef
from replay_core.replay import ragged
from replay_core.replay.batch import Batch, padded_batch
from replay_core.replay.plan import ReplayPlan
from replay_core.replay.reading import RecordedBatch
from replay_core.replay.segments import layout_of

Floats = NDArray[np.float64]

#: Recorded names that a forward of that role computes again, nearest first.
COMPARABLE = {
    "actor": ("policy_logprobs", "old_logprobs", "rollout_logprobs", "ref_logprobs"),
    "ref": ("ref_logprobs", "old_logprobs", "policy_logprobs"),
    "critic": ("values",),
}
#: Stages of a micro-batch that a backward replay computes again.
_TRAINED = ("forward_data", "loss")
#: What ranks weights by default: the tokens' own sampler.
AGAINST = "rollout_logprobs"


@dataclass(frozen=True)
class Recorded:
    """A recorded value per token: [B, S], index t about token t + 1; `known_BS` says where there is one."""

    name: str
    field: str
    key: RecordKey
    values_BS: Floats
    known_BS: NDArray[np.bool_]
    dtype: str


def read_recorded(run: Run, plan: ReplayPlan, replayed: RecordedBatch) -> tuple[list[Recorded], list[str]]:
    """The recorded log-probabilities of a micro-batch, and what could not be placed."""
    batch, key = replayed.recorded, replayed.key
    names = COMPARABLE.get(plan.role or key.role or "actor", COMPARABLE["actor"])
    found: list[Recorded] = []
    notes: list[str] = []
    for record in records_of(run, key):
        for ref in _tensors(record, notes):
            name = ref.canonical or naming.canonical(ref.name)
            if name not in names or any(known.name == name for known in found) or not ref.is_readable or ref.is_text:
                continue
            placed = placed_in(ref, record, batch)
            if placed is None:
                rows = f"rows of {list(ref.rows[:4])} ..." if ref.rows else str(list(ref.shape))
                notes.append(f"the recorded {ref.name} ({rows}) fits no token axis of the batch {batch.ids_BS.shape}")
                continue
            found.append(Recorded(name, ref.name, record.key, *placed, ref.dtype))
    found += _of_the_step(run, key, batch, [name for name in names if all(one.name != name for one in found)])
    found.sort(key=lambda one: names.index(one.name))
    if replayed.rows is not None:
        chosen = replayed.chosen
        found = [replace(one, values_BS=chosen(one.values_BS), known_BS=chosen(one.known_BS)) for one in found]
    return found, notes


def _of_the_step(run: Run, key: RecordKey, batch: Batch, names: Sequence[str]) -> list[Recorded]:
    """Values recorded of the step's whole batch, whose rows are found again by their tokens."""
    found: list[Recorded] = []
    if key.micro is None:
        return found
    for record in run.records:
        other = record.key
        if (other.step, other.micro) != (key.step, None) or other.rank not in (None, key.rank):
            continue
        refs = [ref for ref in _tensors(record, []) if (ref.canonical or ref.name) in names and ref.is_readable]
        refs = [ref for ref in refs if all(one.name != (ref.canonical or ref.name) for one in found)]
        ids, mask, response = (record.get(name) for name in ("input_ids", "attention_mask", "response_mask"))
        if not refs or ids is None or mask is None or ids.rows is not None:
            continue
        try:
            whole = padded_batch(
                pages.array(ids), pages.array(mask), None if response is None else pages.array(response)
            )
        except RldbgError:
            continue
        rows = _rows_of(whole, batch)
        for ref in refs:
            placed = None if rows is None else place(ref, whole)
            if rows is not None and placed is not None:
                picked = _picked(placed, whole, batch, rows)
                found.append(Recorded(ref.canonical or ref.name, ref.name, other, *picked, ref.dtype))
    return found


def _rows_of(whole: Batch, part: Batch) -> list[int] | None:
    """Row of `whole` that holds the tokens of each row of `part`; None where one is not there."""
    known: dict[bytes, int] = {}
    for row in range(whole.rows):
        known.setdefault(whole.ids_BS[row][whole.valid_BS[row]].tobytes(), row)
    rows = [known.get(part.ids_BS[row][part.valid_BS[row]].tobytes()) for row in range(part.rows)]
    return None if None in rows else [row for row in rows if row is not None]


def _picked(
    placed: tuple[Floats, NDArray[np.bool_]], whole: Batch, part: Batch, rows: Sequence[int]
) -> tuple[Floats, NDArray[np.bool_]]:
    values, known = np.zeros(part.ids_BS.shape), np.zeros(part.ids_BS.shape, dtype=bool)
    for row, other in enumerate(rows):
        values[row, part.valid_BS[row]] = placed[0][other, whole.valid_BS[other]]
        known[row, part.valid_BS[row]] = placed[1][other, whole.valid_BS[other]]
    return values, known


def records_of(run: Run, key: RecordKey) -> list[Record]:
    """Every record of that micro-batch, whatever its stage."""
    return [
        record
        for record in run.records
        if (record.key.step, record.key.micro, record.key.rank, record.key.role)
        == (key.step, key.micro, key.rank, key.role)
    ]


def _tensors(record: Record, notes: list[str]) -> tuple[TensorRef, ...]:
    try:
        return record.tensors()
    except RldbgError as error:
        notes.append(f"{record.path.name} cannot be read: {error.message}")
        return ()


def placed_in(ref: TensorRef, record: Record, batch: Batch) -> tuple[Floats, NDArray[np.bool_]] | None:
    """As `place`, of a record that may hold samples of its own: then rows are found by their tokens.

    A step's records without tokens of their own do not say which sample is which, so they are not placed.
    """
    own = ragged.usable(record)
    ids = ragged.find(own, "input_ids")
    if ids is None or ids.rows is not None or ragged.find(own, "attention_mask", "cu_seqlens") is None:
        values = ragged.values(ref, record, batch)
        if values is not None or (record.key.micro is None and ids is None):
            return values
    return place(ref, batch)


def place(ref: TensorRef, batch: Batch) -> tuple[Floats, NDArray[np.bool_]] | None:
    """(values, which are known), both [B, S] with index t about token t + 1; None where it fits no token axis."""
    rows, width = batch.ids_BS.shape
    values = np.zeros((rows, width))
    known = np.zeros((rows, width), dtype=bool)
    layout = batch.layout()
    if ref.rows is not None:
        return _ragged(ref, batch, values, known)
    array = np.asarray(pages.array(ref)).astype(np.float64)
    predicted = np.zeros((rows, width), dtype=bool)
    predicted.reshape(-1)[layout.slots("next", "response")] = True
    own = ref.alignment in ("full", "response")
    if array.shape == (rows, width) and not own:
        return array, predicted
    if array.shape == (rows, width):
        # Index t is about token t itself.
        values[:, :-1] = array[:, 1:]
        return values, predicted
    if array.ndim == 2 and array.shape[0] == rows and array.shape[1] < width:
        # [B, S-1] starts with token 1; a suffix of A ends with the last token. One rule holds for both.
        start = width - 1 - array.shape[1]
        values[:, start : width - 1] = array
        known[:, start : width - 1] = True
        return values, known & predicted
    flat = array.reshape(-1)
    if flat.size == batch.tokens:
        values[batch.valid_BS] = flat
        return values, predicted
    return None


def _ragged(
    ref: TensorRef, batch: Batch, values: Floats, known: NDArray[np.bool_]
) -> tuple[Floats, NDArray[np.bool_]] | None:
    assert ref.rows is not None
    if len(ref.rows) != batch.ids_BS.shape[0] or batch.response_BS is None:
        return None
    flat = np.asarray(pages.array(ref)).astype(np.float64).reshape(-1)
    ends = np.cumsum(ref.rows)
    for row, length in enumerate(ref.rows):
        places = np.flatnonzero(batch.response_BS[row])
        if places.size != length:
            return None
        own = flat[ends[row] - length : ends[row]]
        inside = places > 0
        values[row, places[inside] - 1] = own[inside]
        known[row, places[inside] - 1] = True
    return values, known


def replayed(run: Run, batch: Batch) -> Floats:
    """A replay's log_probs, or a critic's values, as [B, S] of the batch: index t about token t + 1, else 0."""
    layout, own = layout_of(run), batch.layout()
    record = run.select(stage="forward_data")[0]
    ref = record.get("log_probs") or record.get("values")
    assert ref is not None
    values = np.zeros(batch.ids_BS.size)
    values[own.slots("next")] = np.asarray(pages.array(ref)).reshape(-1)[layout.slots("next")].astype(np.float64)
    return values.reshape(batch.ids_BS.shape)


def against(recorded: Recorded, run: Run, batch: Batch, *, known_fp32: bool) -> dict[str, Any]:
    """How a replay stands to a recorded value: verdict, reason, and figures in nats over the tokens that count."""
    values_BS = replayed(run, batch)
    chosen = recorded.known_BS
    a, b = recorded.values_BS[chosen][:, None], values_BS[chosen][:, None]
    if not a.size:
        nothing = dict.fromkeys(("verdict", "max_abs", "mean_abs", "k3", "at"))
        return {"name": recorded.name, "field": recorded.field, **nothing, "reason": "no token counts", "tokens": 0}
    pair: PairFigures = figures([(a, b)], exact=False, logprobs=recorded.name != "values")
    context = Context(naming.meaning(recorded.name), coarsest("float32", recorded.dtype), exact=False,
                      known_fp32=known_fp32)  # fmt: skip
    found = judge(pair, None, context)
    distance = np.abs(b - a)
    worst = int(np.argmax(np.where(np.isnan(distance), np.inf, distance)))
    slot = int(np.flatnonzero(chosen.reshape(-1))[worst])
    sample, position = batch.layout().at(slot)
    return {
        "name": recorded.name,
        "field": recorded.field,
        "verdict": found.verdict.value,
        "reason": found.reason,
        "tokens": int(a.size),
        "max_abs": float(distance[worst, 0]),
        "mean_abs": float(distance.mean()),
        "k3": pair.k3,
        "at": {
            "sample": sample,
            "position": position + 1,
            "recorded": float(a[worst, 0]),
            "replayed": float(b[worst, 0]),
        },
    }


def against_training(run: Run, replay: Run, key: RecordKey, micros: tuple[int | None, ...]) -> dict[str, Any] | None:
    """How a backward replay stands to what the trainer recorded: log-probabilities, losses, gradients. None if nothing.

    A step's gradient is compared only when every one of its micro-batches was replayed.
    """
    place_ = (key.step, key.rank, key.role)
    mine = [one for one in run.records if (one.key.step, one.key.rank, one.key.role) == place_]
    every = {one.key.micro for one in mine if one.key.micro is not None and one.key.stage in _TRAINED}
    whole = every <= set(micros)
    chosen = [one for one in mine if one.key.stage in _TRAINED and one.key.micro in micros]
    if whole:
        chosen += [one for one in mine if one.key.stage == "gradient" and one.key.micro is None]
    theirs = [one for one in replay.records if one.key.stage in ("batch_inputs", *_TRAINED, "gradient")]
    if not whole:
        theirs = [one for one in theirs if one.key.stage != "gradient"]
    try:
        compared = compare_runs(run, replay, chosen, theirs)
    except NothingComparableError:
        return None
    rows = [row for row in compared.tensors if row.a is not None and row.b is not None]
    rows = [row for row in rows if naming.meaning(row.name).kind not in ("ids", "mask", "layout", "note")]
    parted = [row for row in rows if row.figures is None or row.figures.mismatched]
    gradients = [row for row in rows if row.name.startswith("grad.")]
    losses = [row for row in rows if naming.meaning(row.name).kind == "loss"]
    first = compared.first
    what = f"{len(rows)} tensors ({len(losses)} losses, {len(gradients)} gradients)"
    sentence = f"bitwise equal in all {what}" if not parted else f"{len(parted)} of {what} differ"
    if first is not None:
        sentence += f", first divergence {first.name}: {first.reason}"
    elif parted:
        sentence += f", all within tolerance; first {parted[0].name}: {parted[0].reason}"
    if not whole:
        sentence += "; the recorded gradient is of the whole step: --micro all replays it"
    return {
        "bitwise": bool(rows) and not parted,
        "agrees": first is None,
        "tensors": len(rows),
        "losses": len(losses),
        "gradients": len(gradients),
        "first": None if first is None else first.name,
        "sentence": sentence,
    }


def against_params(run: Run, replay: Run, key: RecordKey) -> dict[str, Any] | None:
    """How the weights after a replayed optimizer step stand to what was recorded: the step's own `param` records,
    else the checkpoint of the step after it. None where there is neither.
    """
    mine = [one for one in run.records if one.key.stage == "param" and one.key.step == key.step]
    where = str(run.path)
    if not mine:
        following = run.models.get((key.step or 0) + 1)
        folder = None if following is None else (run.path if run.path.is_dir() else run.path.parent) / following
        if folder is None or not folder.is_dir():
            return None
        where = str(folder)
        try:
            mine = [one for one in open_run(folder).records if one.key.stage == "param"]
        except RldbgError as error:
            return {"against": where, "bitwise": None, "tensors": 0, "first": None, "sentence": error.message}
    a, b = _params(mine), _params([one for one in replay.records if one.key.stage == "param"])
    # A tied head is one weight, which some files hold under one name and some under two.
    names = [name for name in b if name in a]
    if not names:
        return None
    first, parted, worst = None, 0, 0.0
    for name in names:
        recorded, stepped = pages.array(a[name]), pages.array(b[name])
        if recorded.shape == stepped.shape and np.array_equal(recorded, stepped):
            continue
        parted, first = parted + 1, first or name
        if recorded.shape == stepped.shape:
            worst = max(worst, float(np.abs(recorded.astype(np.float64) - stepped.astype(np.float64)).max()))
    said = f"bitwise equal in all {len(names)} weights"
    if parted:
        said = f"{parted} of {len(names)} weights differ, first {first}, by at most {worst:.3g}"
    missing = len(a) - len(names)
    return {
        "against": where, "bitwise": not parted, "tensors": len(names), "first": first,
        "sentence": said + (f"; {missing} recorded weights have no counterpart" if missing else ""),
    }  # fmt: skip


def _params(records: Sequence[Record]) -> dict[str, TensorRef]:
    """Canonical name -> weight."""
    refs = [ref for record in records for ref in record.tensors() if ref.is_readable and not ref.is_text]
    named = {ref.canonical or naming.canonical(ref.name): ref for ref in refs}
    return {name: ref for name, ref in named.items() if name.startswith("param.")}
