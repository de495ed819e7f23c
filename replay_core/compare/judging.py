"""Judges tensor pairs one by one, in order of computation: measures, asks the verdict, says where to look."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np

from replay_core import naming, pages
from replay_core.compare import tolerance
from replay_core.compare.align import Facing, Rowwise, ShapesDifferError, TensorPair, lays_out
from replay_core.compare.verdict import EXACT_KINDS, Context, Judgement, Verdict, judge
from replay_core.errors import DumpError
from replay_core.measure.pair import PairFigures, figures
from replay_core.records import Inline, Record, RecordKey, Run, TensorRef


@dataclass(slots=True)
class TensorVerdict:
    """One row of a comparison: a pair, its verdict, and the element to look at.

    `raw_a` and `raw_b` index either tensor, `token` is the (sample, position) where the layout tells.
    """

    name: str
    verdict: Verdict
    reason: str
    suspect: bool = False
    a: tuple[Record, TensorRef] | None = None
    b: tuple[Record, TensorRef] | None = None
    figures: PairFigures | None = None
    #: Figures over every element, padding included; None where nothing was masked or the paddings do not face.
    unmasked: PairFigures | None = None
    raw_a: tuple[int, ...] | None = None
    raw_b: tuple[int, ...] | None = None
    value_a: Any = None
    value_b: Any = None
    token: tuple[int, int] | None = None
    #: What b calls the sample of `token`, where its samples stand in another order.
    sample_b: int | None = None
    worst_token: tuple[int, int, float] | None = None
    note: str | None = None
    #: Why the pair was not compared; the verdict is then meaningless and counted as skipped.
    skipped: str | None = None
    #: The file whose bytes could not be read when the pair was compared.
    damaged: str | None = None

    @property
    def key(self) -> RecordKey:
        present = self.a or self.b
        assert present is not None
        return present[0].key

    @property
    def place(self) -> Place:
        return place_of(self.key)


#: One micro-batch of one rank and role: (step, micro, rank, role).
Place = tuple[int | None, int | None, int | None, str | None]


def place_of(key: RecordKey) -> Place:
    return (key.step, key.micro, key.rank, key.role)


class Judge:
    """Judges the pairs of two runs. Pairs must come in order of computation: later ones lean on earlier verdicts."""

    def __init__(self, a: Run, b: Run, *, bitwise_only: bool = False) -> None:
        self._computed = [dtype for dtype in (_computed_dtype(a), _computed_dtype(b)) if dtype]
        self._known_fp32 = self._computed == ["float32", "float32"]
        self._bitwise_only = bitwise_only
        #: Whether every recorded input of a module was bitwise equal so far.
        self._inputs_same: dict[tuple[Place, str], bool] = {}
        self._compared: dict[Place, set[str]] = defaultdict(set)

    def judge(self, pair: TensorPair, facing: Facing) -> TensorVerdict | None:
        """The row of a pair; None when its one-sided twin was compared from another stage already."""
        if pair.a is None or pair.b is None:
            record, _ = pair.one
            if pair.name in self._compared[place_of(record.key)]:
                return None
            which = "a" if pair.b is None else "b"
            return TensorVerdict(pair.name, Verdict.MISSING, f"only {which} has it", a=pair.a, b=pair.b)
        row = self._both(pair, facing, pair.a[1], pair.b[1])
        if row.skipped is None:
            self._compared[row.place].add(row.name)
        if naming.is_input(row.name) and naming.meaning(row.name).kind != "mask":
            module = (row.place, naming.module_of(row.name))
            self._inputs_same[module] = self._inputs_same.get(module, True) and row.verdict is Verdict.SAME
        return row

    def _both(self, pair: TensorPair, facing: Facing, a: TensorRef, b: TensorRef) -> TensorVerdict:
        row = TensorVerdict(pair.name, Verdict.SAME, "", a=pair.a, b=pair.b)
        for ref in (a, b):
            if not ref.is_readable:
                row.skipped = getattr(ref.source, "why", "cannot be read")
                return row
        if a.is_text or b.is_text:
            _judge_text(row, a, b)
            return row
        try:
            if not self._bitwise_only and lays_out(pair.name, facing):
                row.verdict, row.reason, row.figures = _judge_layout(a, b, facing)
            elif facing.in_order(a, b) and pages.same_bytes(a, b):
                row.reason, row.figures = "bitwise equal", PairFigures(compared=a.numel)
            else:
                self._measure(row, Rowwise(a, b, facing), a, b)
        except ShapesDifferError as error:
            row.verdict, row.reason = Verdict.SHAPE, str(error)
        except DumpError as error:
            row.skipped, row.damaged = error.message, error.file or str(row.a[0].path if row.a else "")
        return row

    def _measure(self, row: TensorVerdict, rows: Rowwise, a: TensorRef, b: TensorRef) -> None:
        meaning = naming.meaning(row.name)
        positions = meaning.kind == "positions"
        exact = meaning.kind in EXACT_KINDS or (_is_integral(a) and _is_integral(b) and not positions)
        logprobs = meaning.kind == "logprob"
        how = {"exact": exact, "logprobs": logprobs, "bitwise": self._bitwise_only}
        counted = row.figures = figures(rows.counted(), **how)
        if rows.masked and rows.paddings_face:
            row.unmasked = figures(rows.whole(), **how)
        dtypes = _claimed(a), _claimed(b)
        mixed = _mixed_precision(a, b)
        context = Context(
            meaning,
            tolerance.finest(*dtypes) if mixed else tolerance.coarsest(*dtypes, *self._computed),
            exact=exact,
            local=self._is_local(row),
            known_fp32=self._known_fp32 or mixed,
            scalar=a.numel == 1,
            bitwise_only=self._bitwise_only,
            worst_sample=_worst_sample(rows, counted) if logprobs else None,
        )
        if positions and not self._bitwise_only:
            judgement = _judge_positions(rows, counted)
        else:
            judgement = judge(counted, row.unmasked, context)
        if mixed and not self._bitwise_only:
            judgement = _judge_mixed(judgement, a, b, rows)
        row.verdict, row.reason, row.suspect = judgement.verdict, judgement.reason, judgement.suspect
        drift = f"dtype {a.dtype} against {b.dtype}, compared in the wider" if a.dtype != b.dtype else None
        row.note = "; ".join(note for note in (rows.note, drift) if note) or None
        _locate(row, rows, judgement.row_limit)

    def _is_local(self, row: TensorVerdict) -> bool:
        """Whether what the tensor was computed from is recorded and bitwise equal: then its own error is all there is.

        For a module's output that is the module's inputs; for a module's input, those of the module around it.
        """
        if not naming.is_module_tensor(row.name):
            return False
        module = naming.module_of(row.name)
        if naming.is_input(row.name):
            module = module.rpartition(".")[0]
        return self._inputs_same.get((row.place, module), False)


def _computed_dtype(run: Run) -> str | None:
    """The dtype a run says it computed in: fp32 logprobs of a bf16 model are judged as bf16."""
    effective = (run.flags or {}).get("effective")
    dtype = effective.get("dtype") if isinstance(effective, dict) else None
    return str(dtype) if dtype else None


def _is_integral(ref: TensorRef) -> bool:
    return ref.dtype == "bool" or ref.dtype.startswith(("int", "uint"))


def _judge_layout(a: TensorRef, b: TensorRef, facing: Facing) -> tuple[Verdict, str, PairFigures]:
    """The mask or bounds of two layouts with the same samples: equal, or the same tokens under other padding."""
    assert facing.a.layout is not None
    tokens = PairFigures(compared=int(facing.a.layout.lengths.sum()))
    if a.shape == b.shape and np.array_equal(pages.array(a), pages.array(b)):
        return Verdict.SAME, f"equal in all {a.numel:,} elements compared", PairFigures(compared=a.numel)
    reason = "the same samples, token for token, under other padding; tokens are compared one by one"
    return Verdict.PADDING, reason, tokens


def _judge_text(row: TensorVerdict, a: TensorRef, b: TensorRef) -> None:
    row.value_a, row.value_b = getattr(a.source, "value", None), getattr(b.source, "value", None)
    differs = row.value_a != row.value_b
    row.figures = PairFigures(compared=1, mismatched=int(differs))
    row.verdict = Verdict.DIFF if differs else Verdict.SAME
    row.reason = f"{_short(row.value_a)} against {_short(row.value_b)}" if differs else "the same text"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _claimed(ref: TensorRef) -> str:
    """The precision a tensor claims. Python and JSON keep every number as a double, whatever computed it."""
    return "float32" if isinstance(ref.source, Inline) and ref.dtype == "float64" else ref.dtype


def _mixed_precision(a: TensorRef, b: TensorRef) -> bool:
    """Two floating dtypes of different resolution."""
    floating = all(ref.dtype.startswith(("float", "bfloat")) for ref in (a, b))
    return floating and tolerance.family(_claimed(a)) != tolerance.family(_claimed(b))


def _worst_sample(rows: Rowwise, counted: PairFigures) -> tuple[int, float] | None:
    """(sample, mean exp|d|) of the sample furthest off, among those with enough tokens to have a mean."""
    samples = rows.samples()
    if samples is None or samples.size != counted.row_exp.size or not samples.size:
        return None
    tokens = np.bincount(samples) * counted.row_width
    mean = np.bincount(samples, counted.row_exp) / np.maximum(tokens, 1)
    mean[tokens < tolerance.SAMPLE_TOKENS] = 0.0
    worst = int(mean.argmax())
    return worst, float(mean[worst])


def _judge_mixed(judgement: Judgement, a: TensorRef, b: TensorRef, rows: Rowwise) -> Judgement:
    """A cast is harmless: equal after rounding to the narrower dtype is CLOSE. More than a cast was computed in it."""
    if judgement.verdict is not Verdict.DIFF:
        return judgement
    name = next(ref.dtype for ref in (a, b) if tolerance.family(ref.dtype) == tolerance.coarsest(a.dtype, b.dtype))
    narrow = pages.numpy_dtype(name)
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = (
            (x.astype(narrow).astype(np.float64), y.astype(narrow).astype(np.float64)) for x, y in rows.counted()
        )
        unequal = sum(int(np.count_nonzero((x != y) & ~(np.isnan(x) & np.isnan(y)))) for x, y in rounded)
    if unequal == 0:
        return Judgement(Verdict.CLOSE, f"equal after rounding to {name}")
    reason = f"{judgement.reason}; more than a cast: {unequal:,} elements differ after rounding to {name} too"
    return Judgement(Verdict.DIFF, reason, row_limit=judgement.row_limit)


def _judge_positions(rows: Rowwise, counted: PairFigures) -> Judgement:
    """Positions compare per token; one constant shift per sample is named, anything else is DIFF (replay.md rule 4)."""
    if counted.mismatched == 0:
        return Judgement(Verdict.SAME, f"equal at all {counted.compared:,} tokens that count")
    shifts: dict[int, set[int]] = defaultdict(set)
    row = 0
    for chunk_a, chunk_b in rows.counted():
        for delta in (chunk_b.astype(np.int64) - chunk_a.astype(np.int64)).reshape(chunk_a.shape[0], -1):
            token = rows.token(row)
            shifts[token[0] if token else 0].update(int(value) for value in delta)
            row += 1
    if all(len(values) == 1 for values in shifts.values()):
        moved = [(sample, next(iter(values))) for sample, values in sorted(shifts.items()) if values != {0}]
        named = ", ".join(f"sample {sample} by {shift:+d}" for sample, shift in moved[:4])
        more = f" and {len(moved) - 4} more" if len(moved) > 4 else ""
        cost = "measured cost up to 2.1e-4 nats in fp32, .21 in bf16"
        return Judgement(Verdict.CLOSE, f"shifted by a constant: {named}{more} ({cost})", suspect=True)
    return Judgement(Verdict.DIFF, f"positions differ at {counted.mismatched:,} of {counted.compared:,} tokens")


def _locate(row: TensorVerdict, rows: Rowwise, row_limit: float | None) -> None:
    """Where to look: what is not finite, else the first mismatch of exact kinds, else the first token past its
    limit, else the largest difference."""
    counted = row.figures
    assert counted is not None
    at = counted.max_abs_at or counted.first_at
    if counted.nonfinite_at is not None:
        at = counted.nonfinite_at
    elif naming.meaning(row.name).kind in EXACT_KINDS | {"positions"} and counted.first_at is not None:
        at = counted.first_at
    elif row.verdict is Verdict.DIFF and row_limit is not None and rows.slots_a is not None:
        past = np.flatnonzero(counted.row_rel > row_limit)
        at = _largest_in_row(rows, int(past[0]), at) if past.size else at
    worst = counted.worst_row
    if worst is not None and (token := rows.token(worst[0])) is not None:
        row.worst_token = (*token, worst[1])
    if at is not None:
        row.raw_a, row.raw_b = rows.index(*at)
        row.token = rows.token(*at)
        row.value_a = pages.element(rows.a, row.raw_a)
        row.value_b = pages.element(rows.b, row.raw_b)


def _largest_in_row(rows: Rowwise, row: int, fallback: tuple[int, int] | None) -> tuple[int, int] | None:
    start = 0
    for chunk_a, chunk_b in rows.counted():
        if row < start + chunk_a.shape[0]:
            gap = np.abs(chunk_b[row - start].astype(np.float64) - chunk_a[row - start].astype(np.float64))
            return (row, int(np.nanargmax(gap))) if not np.isnan(gap).all() else fallback
        start += chunk_a.shape[0]
    return fallback
