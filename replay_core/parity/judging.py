"""From two sets of values to an answer: evidence, causes and figures per batch, then the one that explains the run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct, field
from msgspec.structs import replace

from replay_core import naming
from replay_core.compare import Comparison, TensorVerdict, compare_runs
from replay_core.compare.divergence import Origin, may_be_first, origin_of, standing
from replay_core.errors import NothingComparableError, RldbgError
from replay_core.jobs import OnEvent, ignore
from replay_core.parity import cause as causes
from replay_core.parity import expectations, figures, randomness
from replay_core.parity.cause import Cause, rows_of
from replay_core.parity.elimination import from_values
from replay_core.parity.evidence import ValueEvidence, faced, gather, rms
from replay_core.parity.pairing import PairedValues
from replay_core.parity.sides import CriticSide, TrainedStep
from replay_core.parity.values import Values
from replay_core.records import Record, RecordKey, Run

if TYPE_CHECKING:
    from replay_core.documents.parity import (
        BandEntry,
        RandomSource,
        ScatterEntry,
        ValueHistogram,
        ValueSources,
        WorstValue,
    )

#: Records of these stages go through the comparison: what was computed before training.
_STAGES = ("values", "modules")


class Step(Struct):
    """Values after one training step, and how far each critic has moved from its untrained self (rms, value units)."""

    step: int
    evidence: ValueEvidence
    drift_a: float
    drift_b: float
    loss_a: float | None
    loss_b: float | None
    rows: list[int] | None


class BatchResult(Struct):
    """One batch: its evidence, causes (first explains most), steps, and what a screen draws of it."""

    name: str
    kind: str
    shape: tuple[int, ...]
    evidence: ValueEvidence
    causes: list[Cause]
    steps: list[Step]
    scatter: ScatterEntry
    histogram: ValueHistogram | None
    worst: list[WorstValue]
    expectations: list[BandEntry]
    sources: ValueSources
    first: TensorVerdict | None = None
    origin: Origin | None = None
    notes: list[str] = field(default_factory=list)


class Parity(Struct):
    """The answer. `about` is the batch whose cause is the run's."""

    a: CriticSide
    b: CriticSide
    batches: list[BatchResult]
    about: BatchResult
    threshold: float
    comparison: Comparison | None
    randomness: list[RandomSource]
    notes: list[str]

    @property
    def cause(self) -> Cause:
        return self.about.causes[0]

    @property
    def agrees(self) -> bool:
        return self.cause.kind in causes.HARMLESS


def judge(
    run_a: Run, run_b: Run, a: CriticSide, b: CriticSide, pairs: list[PairedValues], *,
    threshold: float, kinds: dict[str, str] | None = None, tokenizers: dict[str, Path | None] | None = None,
    on_event: OnEvent = ignore,
) -> Parity:  # fmt: skip
    """Judge paired values.

    Args:
        threshold: below it two values count as nearly identical, in the values' unit.
        kinds: batch -> random | padded | stale | text | recorded, where it is known.

    Raises:
        NothingComparableError: no token of any batch counts.
    """
    notes: list[str] = []
    comparison = _compared(run_a, run_b, pairs, notes, on_event)
    results = [
        _batch(
            pair, number, a, b, comparison, threshold, (kinds or {}).get(pair.batch), (tokenizers or {}).get(pair.batch)
        )
        for number, pair in enumerate(pairs)
    ]
    told = [one for one in results if one.evidence.masked.n or one.evidence.masked.nonfinite]
    if not told:
        raise NothingComparableError(
            "no token counts: every row of every batch is masked",
            file=f"{a.dump} and {b.dump}", tensor="response_mask",
            expected="a response token in at least one row", found=", ".join(one.name for one in results),
        )  # fmt: skip
    notes += [f"{one.name}: every row is masked; it says nothing" for one in results if one not in told]
    about = min(told, key=lambda one: _rank(one.causes[0]))
    return Parity(a, b, results, about, threshold, comparison, randomness.report(a, b), notes)


def _rank(found: Cause) -> int:
    return -1 if found.kind is None else causes.CAUSES.index(found.kind)


def _batch(
    pair: PairedValues, number: int, a: CriticSide, b: CriticSide, comparison: Comparison | None, threshold: float,
    kind: str | None, tokenizer: Path | None,
) -> BatchResult:  # fmt: skip
    first_a = pair.a[0]
    first_b, order, shift = faced(first_a, pair.b[0])
    evidence = gather(first_a, first_b, threshold=threshold)
    evidence.order, evidence.shift = order, shift
    rows = [row for row in rows_of(comparison, number) if naming.is_module_tensor(row.name)]
    found = causes.causes_of(evidence, a, b, rows)
    found = sorted([*found, *_beyond_heads(first_a, first_b, a, b, evidence, found)], key=_rank)
    steps = _steps(pair, a, b, threshold)
    parted = next(((step.step, step.evidence) for step in steps if step.evidence.differs), None)
    trained = causes.of_training(a, b, parted, found[0])
    # What training finds replaces the statement that there was nothing to find before it.
    found = sorted([*trained, *(one for one in found if not trained or one.kind not in ("equal", "noise"))], key=_rank)
    last = steps[-1].evidence if steps else None
    first = next((row for row in rows if may_be_first(row)), None)
    notes = []
    padded = evidence.padding_tokens > 0
    if kind is None:
        kind = "recorded"
    if evidence.counted != "response":
        notes.append(f"{pair.batch}: no response mask was recorded; {evidence.counted} tokens count")
    return BatchResult(
        name=pair.batch,
        kind=kind,
        shape=first_a.shape,
        evidence=evidence,
        causes=found,
        steps=steps,
        scatter=figures.scatter(first_a, first_b, evidence),
        histogram=figures.histogram(first_a, first_b, evidence),
        worst=figures.worst(first_a, first_b, evidence, tokenizer),
        sources={"a": pair.a[0].source, "b": pair.b[0].source},
        expectations=expectations.against(
            "random" if kind == "random" or (kind == "recorded" and not padded) else kind,
            evidence.masked, evidence.unmasked,
            None if last is None else last.masked, None if last is None else last.unmasked,
        ),
        first=first,
        origin=origin_of(map(standing, rows)),
        notes=notes,
    )  # fmt: skip


def _beyond_heads(
    first_a: Values, first_b: Values, a: CriticSide, b: CriticSide, evidence: ValueEvidence, found: list[Cause]
) -> list[Cause]:
    """What the values show beside what their heads explain: two heads that differ are not all there is to it."""
    named = {one.kind for one in found} - {"padding"}
    line = causes.head_line(a, b)
    if line is None or not evidence.differs or evidence.shift or not named or not named <= {"scale", "offset"}:
        return []
    scale, offset = line
    predicted = replace(first_a, values_BT=scale * first_a.values_BT + offset)
    rest = gather(predicted, first_b, threshold=evidence.floor)
    if not rest.differs or rms((first_b.values_BT - predicted.values_BT)[rest.mask_BT]) <= 10 * rest.floor:
        return []
    return [
        Cause(kind, f"beside what the heads explain: {why}", numbers)
        for kind, why, numbers in from_values(rest)
        if kind not in named or kind in ("scale", "offset")
    ]


def _steps(pair: PairedValues, a: CriticSide, b: CriticSide, threshold: float) -> list[Step]:
    """Every later step of the batch, each judged like the first."""
    steps = []
    before_a, before_b = pair.a[0], pair.b[0]
    for one_a, one_b in zip(pair.a[1:], pair.b[1:], strict=True):
        turned, _, _ = faced(one_a, one_b)
        evidence = gather(one_a, turned, threshold=threshold)
        said_a, said_b = (_said(side, one_a.step) for side in (a, b))
        steps.append(
            Step(
                step=one_a.step or 0,
                evidence=evidence,
                drift_a=_moved(before_a, one_a, evidence),
                drift_b=_moved(before_b, one_b, evidence),
                loss_a=None if said_a is None else said_a["loss"],
                loss_b=None if said_b is None else said_b["loss"],
                rows=None if said_a is None else said_a["rows"],
            )
        )
    return steps


def _said(side: CriticSide, step: int | None) -> TrainedStep | None:
    return next((one for one in side.steps if one["step"] == step), None)


def _moved(before: Values, now: Values, evidence: ValueEvidence) -> float:
    return rms((now.values_BT - before.values_BT)[evidence.mask_BT])


def _compared(
    run_a: Run, run_b: Run, pairs: list[PairedValues], notes: list[str], on_event: OnEvent
) -> Comparison | None:
    """The first step's records of both sides through the one comparison, facing each other batch by batch."""
    records_a = [record for number, pair in enumerate(pairs) for record in _keyed(pair.a[0], number)]
    records_b = [record for number, pair in enumerate(pairs) for record in _keyed(pair.b[0], number)]
    try:
        return compare_runs(run_a, run_b, records_a, records_b, on_event=on_event)
    except RldbgError as error:
        notes.append(f"tensors were not compared one by one: {error.message}")
        return None


def _keyed(values: Values, number: int) -> list[Record]:
    made = []
    for record in values.records:
        if record.key.stage in _STAGES or len(values.records) == 1:
            stage = record.key.stage
            made.append(Record(RecordKey(0, number, None, "critic", stage), record.path, record.tensors))
    return made
