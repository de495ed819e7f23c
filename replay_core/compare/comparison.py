"""Compares two runs: pairs, judges in order of computation, streams the first divergence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from replay_core import naming, pages
from replay_core.compare import tolerance
from replay_core.compare.align import Facing, Rowwise, TensorPair, face, is_layout_only, pair_tensors
from replay_core.compare.divergence import may_be_first, order_of, origin_of
from replay_core.compare.verdict import EXACT_KINDS, Context, Judgement, Verdict, judge
from replay_core.errors import DumpError, NothingComparableError
from replay_core.jobs import OnEvent, Partial, Progress, ignore
from replay_core.measure.pair import PairFigures, figures
from replay_core.records import Problem, Record, RecordKey, Run, TensorRef


@dataclass(slots=True)
class TensorVerdict:
    """One row of a comparison. Indices are (sample, position) where the layout tells, raw on either side always."""

    name: str
    verdict: Verdict
    reason: str
    suspect: bool = False
    a: tuple[Record, TensorRef] | None = None
    b: tuple[Record, TensorRef] | None = None
    figures: PairFigures | None = None
    unmasked: PairFigures | None = None
    #: Raw indices and both values at the element shown, and its (sample, position).
    raw_a: tuple[int, ...] | None = None
    raw_b: tuple[int, ...] | None = None
    value_a: Any = None
    value_b: Any = None
    token: tuple[int, int] | None = None
    worst_token: tuple[int, int, float] | None = None
    note: str | None = None

    @property
    def key(self) -> RecordKey:
        present = self.a or self.b
        assert present is not None
        return present[0].key

    @property
    def is_masked(self) -> bool:
        return self.unmasked is not None


@dataclass(slots=True)
class Comparison:
    """Everything two runs have to say of each other."""

    a: Run
    b: Run
    tensors: list[TensorVerdict] = field(default_factory=list)
    skipped: list[TensorVerdict] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    notes_not_compared: int = 0
    records_paired: int = 0
    records_a_only: int = 0
    records_b_only: int = 0
    records_unreadable: int = 0
    elements: int = 0

    @property
    def counts(self) -> dict[str, int]:
        """How many pairs got each verdict; `total` is their sum with the skipped ones."""
        counted = Counter(row.verdict for row in self.tensors)
        counts = {verdict.value: counted[verdict] for verdict in Verdict}
        return {"total": len(self.tensors) + len(self.skipped), **counts, "skipped": len(self.skipped)}

    @property
    def first(self) -> TensorVerdict | None:
        return next((row for row in self.tensors if may_be_first(row)), None)

    @property
    def first_difference(self) -> TensorVerdict | None:
        """The first pair that is not the same, noise included: where two runs stop being bitwise equal."""
        return next((row for row in self.tensors if row.figures is not None and row.figures.mismatched), None)

    @property
    def origin(self) -> str | None:
        """The module that first turned agreeing inputs into a diverging output, within the first one's micro-batch."""
        first = self.first
        if first is None:
            return None
        here = (first.key.step, first.key.micro, first.key.rank, first.key.role)
        same = [row for row in self.tensors if (row.key.step, row.key.micro, row.key.rank, row.key.role) == here]
        return origin_of(same)

    @property
    def agrees(self) -> bool:
        return self.first is None


def compare_runs(
    a: Run,
    b: Run,
    records_a: list[Record] | None = None,
    records_b: list[Record] | None = None,
    *,
    exact: bool = False,
    on_event: OnEvent = ignore,
) -> Comparison:
    """Compare the records of two runs (all of them, or those given).

    Raises:
        NothingComparableError: not one tensor of the two could be compared.
    """
    chosen_a, chosen_b = records_a or a.records, records_b or b.records
    result = Comparison(a, b, problems=[*a.problems, *b.problems])
    facings, problems = face(chosen_a, chosen_b)
    result.problems += problems
    known_fp32 = _computed_dtype(a) == _computed_dtype(b) == "float32"
    work = list(_work(facings, result))
    announced = False
    for done, (pair, facing) in enumerate(work):
        on_event(Progress(done, len(work), pair.name))
        row = _judge_pair(pair, facing, result, known_fp32=known_fp32, exact=exact)
        if row is None:
            continue
        (result.skipped if row.reason.startswith("skipped: ") else result.tensors).append(row)
        if not announced and may_be_first(row):
            announced = True
            on_event(Partial({"first_divergence": {"name": row.name, "verdict": row.verdict.value, "why": row.reason}}))
    on_event(Progress(len(work), len(work), "compared"))
    if not any(row.figures is not None or row.verdict is Verdict.SHAPE for row in result.tensors):
        raise NothingComparableError(
            "the two have no tensor in common that could be compared",
            file=f"{a.path} and {b.path}",
            expected="at least one tensor of the same name under the same step, rank and micro-batch",
            found=f"{_names(chosen_a)} against {_names(chosen_b)}",
            hint=f"rldbg ls {b.path}",
        )
    return result


def _names(records: list[Record]) -> str:
    keys = ", ".join(str(record.key) for record in records[:3])
    return f"{len(records)} records ({keys}{', ...' if len(records) > 3 else ''})"


def _work(facings: list[Facing], result: Comparison) -> Iterator[tuple[TensorPair, Facing]]:
    """Every pair with its facing, in order of computation across all facings."""
    entries = []
    for facing in facings:
        facing.a.load()
        facing.b.load()
        result.problems += facing.a.problems + facing.b.problems
        result.records_unreadable += facing.a.unreadable + facing.b.unreadable
        if facing.a.records and facing.b.records:
            result.records_paired += 1
        else:
            result.records_a_only += bool(facing.a.records)
            result.records_b_only += bool(facing.b.records)
        hidden = 0
        for pair in pair_tensors(facing):
            if (pair.a is None or pair.b is None) and is_layout_only(pair, facing):
                hidden += 1
                continue
            record, ref = pair.one
            entries.append((order_of(record.key, pair.name, ref.order), pair, facing))
        if hidden:
            result.notes.append(
                f"{facing.key}: {hidden} one-sided masks only lay the same {facing.a.layout.samples if facing.a.layout else 0} "
                "samples out differently; tokens are compared one by one"
            )
    entries.sort(key=lambda entry: entry[0])
    for _, pair, facing in entries:
        yield pair, facing


def _judge_pair(
    pair: TensorPair, facing: Facing, result: Comparison, *, known_fp32: bool, exact: bool
) -> TensorVerdict | None:
    meaning = naming.meaning(pair.name)
    if meaning.kind == "note":
        result.notes_not_compared += 1
        return None
    if pair.a is None or pair.b is None:
        if _twin_compared(pair, result):
            return None
        which = "a" if pair.b is None else "b"
        return TensorVerdict(pair.name, Verdict.MISSING, f"only {which} has it", a=pair.a, b=pair.b)
    ref_a, ref_b = pair.a[1], pair.b[1]
    row = TensorVerdict(pair.name, Verdict.SAME, "", a=pair.a, b=pair.b)
    unreadable = next((ref for ref in (ref_a, ref_b) if not ref.is_readable), None)
    if unreadable is not None:
        row.reason = f"skipped: {getattr(unreadable.source, 'why', 'cannot be read')}"
        return row
    if ref_a.is_text or ref_b.is_text:
        return _text(row, ref_a, ref_b)
    try:
        same = pages.same_bytes(ref_a, ref_b)
        if same:
            result.elements += ref_a.numel
            row.reason = "bitwise equal"
            row.figures = PairFigures(compared=ref_a.numel)
            return row
        return _measure(row, facing, result, meaning, known_fp32=known_fp32, exact=exact)
    except DumpError as error:
        if error.tensor is not None and not error.file:
            row.verdict, row.reason = Verdict.SHAPE, error.message
            return row
        row.reason = f"skipped: {error.message}"
        result.problems.append(Problem(f"{error.file or ''} {pair.name}", error.message))
        return row


def _twin_compared(pair: TensorPair, result: Comparison) -> bool:
    """The same name of the same computation was compared from another stage."""
    record, _ = pair.one
    here = (record.key.step, record.key.micro, record.key.rank, record.key.role)
    return any(
        row.name == pair.name
        and row.figures is not None
        and (row.key.step, row.key.micro, row.key.rank, row.key.role) == here
        for row in result.tensors
    )


def _text(row: TensorVerdict, a: TensorRef, b: TensorRef) -> TensorVerdict:
    value_a, value_b = getattr(a.source, "value", None), getattr(b.source, "value", None)
    row.figures = PairFigures(compared=1, mismatched=int(value_a != value_b))
    row.value_a, row.value_b = value_a, value_b
    if value_a != value_b:
        row.verdict, row.reason = Verdict.DIFF, f"{_short(value_a)} against {_short(value_b)}"
    else:
        row.reason = "the same text"
    return row


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _measure(
    row: TensorVerdict, facing: Facing, result: Comparison, meaning: naming.Meaning, *, known_fp32: bool, exact: bool
) -> TensorVerdict:
    assert row.a is not None
    assert row.b is not None
    ref_a, ref_b = row.a[1], row.b[1]
    rows = Rowwise(ref_a, ref_b, facing)
    is_exact = meaning.kind in EXACT_KINDS or (
        _is_integral(ref_a) and _is_integral(ref_b) and meaning.kind != "positions"
    )
    logprobs = meaning.kind == "logprob"
    counted = figures(rows.counted(), exact=is_exact, logprobs=logprobs)
    row.figures = counted
    result.elements += counted.compared
    if rows.masked and rows.paddings_face:
        row.unmasked = figures(rows.whole(), exact=is_exact, logprobs=logprobs)
    context = Context(
        meaning,
        _judged_dtype(ref_a, ref_b, result),
        exact=is_exact,
        local=_inputs_same(row.name, row.key, result),
        known_fp32=known_fp32,
        scalar=ref_a.numel == 1,
        bitwise_only=exact,
    )
    judgement = _positions(rows, counted) if meaning.kind == "positions" else judge(counted, row.unmasked, context)
    row.verdict, row.reason, row.suspect = judgement.verdict, judgement.reason, judgement.suspect
    row.note = rows.note
    if ref_a.dtype != ref_b.dtype:
        drift = f"dtype {ref_a.dtype} against {ref_b.dtype}, compared in the wider"
        row.note = f"{row.note}; {drift}" if row.note else drift
    _locate(row, rows, counted)
    return row


def _is_integral(ref: TensorRef) -> bool:
    return ref.dtype == "bool" or ref.dtype.startswith(("int", "uint"))


def _judged_dtype(a: TensorRef, b: TensorRef, result: Comparison) -> str:
    """The coarsest of both dtypes and of what the runs say they computed in: fp32 logprobs of a bf16 model are bf16."""
    known = [dtype for run in (result.a, result.b) if (dtype := _computed_dtype(run))]
    return tolerance.coarsest(a.dtype, b.dtype, *known)


def _computed_dtype(run: Run) -> str | None:
    effective = (run.flags or {}).get("effective")
    dtype = effective.get("dtype") if isinstance(effective, dict) else None
    return str(dtype) if dtype else None


def _inputs_same(name: str, key: RecordKey, result: Comparison) -> bool:
    """Whether what the tensor was computed from is recorded and bitwise equal: then its own error is all there is.

    For a module's output that is the module's inputs; for a module's input, those of the module around it.
    """
    if not naming.is_module_tensor(name):
        return False
    module = naming.module_of(name)
    if naming.is_input(name):
        module = module.rpartition(".")[0]
    if not module:
        return False
    given = [
        row
        for row in result.tensors
        if row.key.micro == key.micro
        and row.key.step == key.step
        and row.key.rank == key.rank
        and naming.is_input(row.name)
        and naming.module_of(row.name) == module
        and naming.meaning(row.name).kind != "mask"
    ]
    return bool(given) and all(row.verdict is Verdict.SAME for row in given)


def _positions(rows: Rowwise, counted: PairFigures) -> Judgement:
    """Positions compare per token; one constant shift per sample is named, anything else is DIFF (replay.md rule 4)."""
    if counted.mismatched == 0:
        return Judgement(Verdict.SAME, f"equal at all {counted.compared:,} tokens that count")
    shifts: dict[int, set[int]] = {}
    row = 0
    for chunk_a, chunk_b in rows.counted():
        for delta in (chunk_b.astype(np.int64) - chunk_a.astype(np.int64)).reshape(chunk_a.shape[0], -1):
            token = rows.token(row)
            shifts.setdefault(token[0] if token else 0, set()).update(int(value) for value in delta)
            row += 1
    if all(len(values) == 1 for values in shifts.values()):
        named = ", ".join(
            f"sample {sample} by {next(iter(values)):+d}" for sample, values in sorted(shifts.items())[:4]
        )
        return Judgement(
            Verdict.CLOSE,
            f"shifted by a constant: {named} (costs up to 2.1e-4 nats in fp32, .21 in bf16)",
            suspect=True,
        )
    return Judgement(Verdict.DIFF, f"positions differ at {counted.mismatched:,} of {counted.compared:,} tokens")


def _locate(row: TensorVerdict, rows: Rowwise, counted: PairFigures) -> None:
    """Where to look: the non-finite element, else the first mismatch of exact kinds, else the largest difference."""
    at = counted.nonfinite_at or counted.max_abs_at or counted.first_at
    worst = counted.worst_row
    if naming.meaning(row.name).kind in EXACT_KINDS and counted.first_at is not None:
        at = counted.first_at
    elif (
        row.verdict is Verdict.DIFF and rows.slots_a is not None and worst is not None and counted.nonfinite_at is None
    ):
        at = _largest_in_row(rows, worst[0], at)
    if worst is not None and (token := rows.token(worst[0])) is not None:
        row.worst_token = (*token, worst[1])
    if at is None:
        return
    row.raw_a, row.raw_b = rows.index(*at)
    row.token = rows.token(*at)
    row.value_a = pages.array(rows.a)[row.raw_a].item()
    row.value_b = pages.array(rows.b)[row.raw_b].item()


def _largest_in_row(rows: Rowwise, row: int, fallback: tuple[int, int] | None) -> tuple[int, int] | None:
    """The largest difference inside the worst token: a leak is worst there, not where activations are large."""
    if rows.rows_a is None or rows.rows_b is None:
        return fallback
    start = 0
    for chunk_a, chunk_b in rows.counted():
        if row < start + chunk_a.shape[0]:
            gap = np.abs(chunk_b[row - start].astype(np.float64) - chunk_a[row - start].astype(np.float64))
            return (row, int(np.nanargmax(gap))) if not np.isnan(gap).all() else fallback
        start += chunk_a.shape[0]
    return fallback
