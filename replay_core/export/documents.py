"""Builds the documents of docs/documents.md from the nouns they describe. Imports no numpy."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from msgspec.structs import asdict

import replay_core
from replay_core import pages
from replay_core.documents.version import SCHEMA_VERSION
from replay_core.errors import RequestError
from replay_core.export.numbers import clean
from replay_core.export.written import pieces
from replay_core.records import Inline, Problem, Record, Run, TensorRef, Unreadable

if TYPE_CHECKING:
    from replay_core.compare import Comparison, TensorVerdict
    from replay_core.compare.context import Around
    from replay_core.compare.divergence import Origin
    from replay_core.compare.judging.algebra import Ranked
    from replay_core.compare.judging.faults import Fault
    from replay_core.compare.judging.locating import FurthestElement
    from replay_core.documents.comparison import (
        AroundEntry,
        ComparisonDocument,
        CoverageEntry,
        DivergenceEntry,
        ElementEntry,
        IndexEntry,
        MetricsEntry,
        PairEntry,
        ParallelBlock,
        RankFault,
        RanksEntry,
        RecordPair,
        RunSide,
        ToleranceEntry,
    )
    from replay_core.documents.following import FollowingDocument
    from replay_core.documents.kinds import Document
    from replay_core.documents.parts import KeyEntry, ProblemEntry, Stamp
    from replay_core.documents.record import Alignment, FieldEntry, RecordDocument
    from replay_core.documents.run import RunDocument, SeveralRuns
    from replay_core.dumps.following import Pulse
    from replay_core.measure.figures import PairFigures
    from replay_core.measure.statistics import Statistics


def stamp() -> Stamp:
    """What every document begins with: who wrote it, and when."""
    return {
        "tool": f"rldbg {replay_core.__version__}",
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def run_document(
    run: Run, checked: Literal["names", "headers"], only: Collection[Record] | None = None, unreadable: int = 0
) -> RunDocument:
    """`checked`: how far opening looked. `only` these of its records are listed; the headers of `unreadable` are not
    to be read.
    """
    marked = marks(run)
    listed = None if only is None else {id(record) for record in only}
    several: SeveralRuns = {"inside": [str(one) for one in run.inside]} if run.inside else {}
    doc: RunDocument = {
        "schema_version": SCHEMA_VERSION,
        "kind": "run",
        **stamp(),
        **several,
        "path": str(run.path),
        "dialect": run.dialect,
        "steps": run.steps(),
        "records": [
            {
                "key": record.key.to_mapping(),
                "path": str(record.path),
                "fields": None if record.names is None else list(record.names),
                "problems": marked.get(place, []),
            }
            for place, record in enumerate(run.records)
            if listed is None or id(record) in listed
        ],
        "problems": _problems(run.problems),
        "checked": checked,
        "notes": run.notes,
        "flags": run.flags,
        "models": {"*" if step is None else str(step): reference for step, reference in run.models.items()},
        "unreadable": unreadable,
    }
    return clean(doc)


def following_document(run: Run, came: list[Record], pulse: Pulse, *, changed: bool, whole: bool) -> FollowingDocument:
    """What has come to a run that is followed: `run` lists the records of `came`, or all where they are `whole`."""
    doc: FollowingDocument = {
        "schema_version": SCHEMA_VERSION,
        "kind": "following",
        **stamp(),
        "path": str(run.path),
        "run": run_document(run, "names", None if whole else came) if changed else None,
        "whole": whole,
        "total": len(run.records),
        "last_step": pulse.last_step,
        "silent_s": pulse.silent_s,
        "pace_s": pulse.pace_s,
    }
    return doc


def marks(run: Run) -> dict[int, list[int]]:
    """Place in `records` -> places in `problems`, for every record that has one. A pass over each list."""
    by_path: dict[str, list[int]] = {}
    by_place: dict[tuple[str, int | None], list[int]] = {}
    for number, problem in enumerate(run.problems):
        by_path.setdefault(problem.where, []).append(number)
        line = problem.where.rpartition(":")
        if line[2].isdecimal():
            by_path.setdefault(line[0], []).append(number)
        if problem.key is not None:
            by_place.setdefault((problem.key.stage, problem.key.step), []).append(number)
    if not by_path:
        return {}
    found: dict[int, list[int]] = {}
    for place, record in enumerate(run.records):
        # A problem of a step is about records of that step and those of none; one of none may be about any.
        steps = {record.key.step, None} if record.key.step is not None else {step for _, step in by_place}
        near = (number for step in steps for number in by_place.get((record.key.stage, step), ()))
        here = [*by_path.get(str(record.path), []), *sorted(one for one in near if run.problems[one].is_about(record))]
        if here:
            found[place] = list(dict.fromkeys(here))
    return found


def record_document(record: Record, statistics: dict[str, Statistics] | None = None) -> RecordDocument:
    """One record's fields; `statistics` by field name where somebody looked."""
    looked = statistics or {}
    doc: RecordDocument = {
        "schema_version": SCHEMA_VERSION,
        "kind": "record",
        **stamp(),
        "key": record.key.to_mapping(),
        "path": str(record.path),
        "fields": [field(ref, looked.get(ref.name)) for ref in record.tensors()],
        "problems": _problems(record.problems),
    }
    return clean(doc)


def field(ref: TensorRef, statistics: Statistics | None = None) -> FieldEntry:
    """One field of a record: what it is, and its value where it is a scalar or a text."""
    value = ref.source.value if isinstance(ref.source, Inline) and (ref.shape == () or ref.is_text) else None
    if isinstance(value, bytes):  # a number kept as its raw bytes
        value = pages.element(ref, ())
    return {
        "name": ref.name,
        "canonical": ref.canonical,
        "dtype": ref.dtype,
        "shape": list(ref.shape),
        "alignment": cast("Alignment | None", ref.alignment),
        "pad": ref.pad,
        "rows": None if ref.rows is None else list(ref.rows),
        "stats": None if statistics is None else statistics.to_mapping(),
        "value": value,
        "problem": ref.source.why if isinstance(ref.source, Unreadable) else None,
        "sentinel": ref.sentinel,
    }


def tolerance_entry(
    file: Path | None, exact: bool, atol: float | None = None, rtol: float | None = None
) -> ToleranceEntry | None:
    """What a person had a comparison judged by; None where it was the table alone."""
    if file is None and atol is None and rtol is None and not exact:
        return None
    path = None if file is None else str(Path(file).absolute())
    return {"atol": atol, "rtol": rtol, "file": path, "exact": exact}


def comparison_document(
    comparison: Comparison, judged_by: ToleranceEntry | None = None, entries: Sequence[PairEntry] | None = None
) -> ComparisonDocument:
    """The comparison document, without the sample by sample of a replay.

    entries: its rows, where they were made as they were judged (`entries.Entries`).
    """
    first, difference, tally = comparison.first, comparison.tally.first_difference, comparison.tally
    coverage: CoverageEntry = {
        "records_paired": comparison.records_paired,
        "records_only_in_a": comparison.records_a_only,
        "records_only_in_b": comparison.records_b_only,
        "tensors_compared": tally.compared,
        "tensors_by_digest": tally.by_digest,
        "tensors_skipped": tally.skipped,
        "records_unreadable": comparison.records_unreadable,
        "elements_compared": comparison.elements,
        "bookkeeping_fields_not_compared": comparison.notes_not_compared,
        "samples_on_one_side": comparison.samples_alone,
    }
    if comparison.numbers_absent is not None:
        coverage["numbers_absent"] = comparison.numbers_absent
    by = stamp()
    doc: ComparisonDocument = {
        "schema_version": SCHEMA_VERSION,
        "kind": "comparison",
        "tool": by["tool"],
        "created": by["created"],
        "a": _side(comparison.a),
        "b": _side(comparison.b),
        "counts": comparison.counts,
        "first_divergence": None
        if first is None
        else first_divergence(first, comparison.origin, comparison.around_first),
        "first_difference": None if difference is None else first_divergence(difference, None),
        "tensors": [],
        "problems": _problems(comparison.problems),
        "notes": comparison.notes,
        "hints": tally.clues.hints((comparison.a.dialect, comparison.b.dialect)),
        "selection": comparison.selection,
        "tolerance": judged_by,
        "coverage": coverage,
        "summary": None if comparison.summary is None else comparison.summary.to_mapping(),
        "others": [],
        "segments": None,
        "ruling": None,
    }
    if (block := _parallel(comparison)) is not None:
        doc["parallel"] = block
    doc = clean(doc)
    if entries is None:
        held = RowsAlike()
        entries = [tensor_row(row, held) for row in [*comparison.tensors, *comparison.skipped]]
    doc["tensors"] = entries
    return doc


def _parallel(comparison: Comparison) -> ParallelBlock | None:
    from replay_core.compare.parallel import parallel, sentence

    # Under other limits than it was looked for with, another may be first.
    found = comparison.among[0] if comparison.first is comparison.among[1] else None
    found = found or parallel(comparison.tally.of_ranks, comparison.together)
    if found is None:
        return None
    return {
        "of": found.which,
        "ranks": list(found.ranks),
        "parted": [
            {"rank": rank, "name": row.name, "step": row.key.step, "origin": rank in found.origins}
            for rank, row in sorted(found.first.items())
        ],
        "sentence": sentence(found),
        "faults": [
            {**_fault(one.fault), "name": one.name, "step": one.step, "tensors": one.tensors} for one in found.faults
        ],
    }


def _fault(fault: Fault) -> RankFault:
    return {
        "kind": fault.kind,
        "ranks": list(fault.ranks),
        "factor": fault.factor,
        "sentence": fault.sentence,
    }


def _ranks(ranked: Ranked) -> RanksEntry:
    return {
        "of": ranked.which,
        "relation": ranked.relation,
        "ranks": list(ranked.ranks),
        "axis": ranked.axis,
        "parted": list(ranked.parted),
        "fault": None if ranked.fault is None else clean(_fault(ranked.fault)),
    }


def _side(run: Run) -> RunSide:
    return {"path": str(run.path), "dialect": run.dialect, "flags": run.flags}


def first_divergence(row: TensorVerdict, origin: Origin | None, around: Around | None = None) -> DivergenceEntry:
    """Where two runs first part: name, place, both values, those beside it, and the sentence why."""
    held = RowsAlike()
    keys, place = _keys(row, held.keys), _place(row, held)
    entry: DivergenceEntry = {
        "name": row.name,
        "a_key": keys["a_key"],
        "b_key": keys["b_key"],
        "verdict": row.verdict.value,
        "index": place["index"],
        "a": place["a"],
        "b": place["b"],
        "metrics": None if row.figures is None else metrics(row.figures, row, held),
        "origin": None if origin is None else origin.module,
        "why": row.reason,
        "note": row.note,
        "around": None if around is None else cast("AroundEntry", {**asdict(around), "texts": None}),
    }
    if origin is not None:
        entry["origin_why"] = origin.why
    return entry


class RowsAlike:
    """What rows of one document say alike and hold once: of a hundred thousand rows of 512 ranks two hundred are called
    differently, a few have a shape of their own, and nearly all are equal. Never of two documents: they may be changed.
    """

    def __init__(self) -> None:
        #: By the record's id: a rank has a thousand tensors under one key.
        self.keys: dict[int, KeyEntry] = {}
        self.texts: dict[Any, list[str | None]] = {}
        self.shapes: dict[Any, list[list[int] | None]] = {}
        self.equal: dict[Any, MetricsEntry] = {}
        self.nowhere: ElementEntry | None = None

    def both(self, a: str | None, b: str | None) -> list[str | None]:
        return self.texts.setdefault((a, b), [a, b])

    def shapes_of(self, a: tuple[int, ...] | None, b: tuple[int, ...] | None) -> list[list[int] | None]:
        known = self.shapes.get((a, b))
        if known is None:
            known = self.shapes[a, b] = [None if a is None else list(a), None if b is None else list(b)]
        return known


def tensor_row(row: TensorVerdict, held: RowsAlike | None = None) -> PairEntry:
    """One tensor pair of a comparison, its numbers as they enter a document."""
    held = held or RowsAlike()
    a, b = None if row.a is None else row.a[1], None if row.b is None else row.b[1]
    keys, place = _keys(row, held.keys), _place(row, held)
    entry: PairEntry = {
        "name": row.name,
        "a_key": keys["a_key"],
        "b_key": keys["b_key"],
        "names": held.both(None if a is None else a.name, None if b is None else b.name),
        "verdict": row.verdict._value_ if row.skipped is None else "skipped",  # `value` asks a descriptor
        "suspect": bool(row.suspect),
        "dtype": held.both(None if a is None else a.dtype, None if b is None else b.dtype),
        "shape": held.shapes_of(None if a is None else a.shape, None if b is None else b.shape),
        "metrics": None if row.figures is None else metrics(row.figures, row, held),
        "unmasked": None if row.unmasked is None else metrics(row.unmasked, None, held),
        "index": place["index"],
        "a": place["a"] if place["a"] is None else clean(place["a"]),
        "b": place["b"] if place["b"] is None else clean(place["b"]),
        "reason": row.reason if row.skipped is None else row.skipped,
        "rule": None if row.rule is None else clean(row.rule.to_mapping()),
        "note": row.note,
    }
    if row.ranks is not None:
        entry["ranks"] = _ranks(row.ranks)
    from replay_core.compare.judging.locating import furthest  # numpy, which whoever has a row has; the screen does not

    if (greatest := furthest(row)) is not None and not row.by_digest:
        entry["greatest"] = clean(_element(greatest))
    return entry


_NONE_SHOWN = (None,) * 6


def _nowhere() -> ElementEntry:
    """Of digests no element is known, of equal numbers none is shown."""
    nowhere: IndexEntry = {"sample": None, "position": None, "raw_a": None, "raw_b": None, "sample_b": None}
    return {"index": nowhere, "a": None, "b": None}


def _place(row: TensorVerdict, held: RowsAlike) -> ElementEntry:
    """The element shown: its index, by token where the layout tells and raw on either side, and both values."""
    shown: tuple[object, ...] = (row.raw_a, row.raw_b, row.token, row.sample_b, row.value_a, row.value_b)
    if row.by_digest or shown == _NONE_SHOWN:
        held.nowhere = held.nowhere or _nowhere()
        return held.nowhere
    return _element(row)


def _element(row: TensorVerdict | FurthestElement) -> ElementEntry:
    sample, position = row.token or (None, None)
    raw_a = None if row.raw_a is None else list(row.raw_a)
    raw_b = None if row.raw_b is None else list(row.raw_b)
    index: IndexEntry = {
        "sample": sample,
        "position": position,
        "raw_a": raw_a,
        "raw_b": raw_b,
        "sample_b": row.sample_b,
    }
    return {"index": index, "a": row.value_a, "b": row.value_b}


def _keys(row: TensorVerdict, known: dict[int, KeyEntry]) -> RecordPair:
    return {"a_key": _key(row.a, known), "b_key": _key(row.b, known)}


def _key(side: tuple[Record, TensorRef] | None, known: dict[int, KeyEntry]) -> KeyEntry | None:
    if side is None:
        return None
    record = side[0]
    entry = known.get(id(record))
    if entry is None:
        entry = known[id(record)] = record.key.to_mapping()
    return entry


def _equal(compared: int, nan_a: int, nan_b: int) -> MetricsEntry:
    """Bitwise equal, so nothing was added up."""
    return {
        "compared": compared, "mismatched": 0, "nan_a": nan_a, "nan_b": nan_b, "nonfinite_mismatched": 0,
        "max_abs": 0.0, "max_rel": 0.0, "rel_l2": 0.0, "one_minus_cosine": 0.0, "mean_signed": 0.0, "gain": 0.0,
        "worst_token": None,
    }  # fmt: skip


def metrics(pair: PairFigures, row: TensorVerdict | None = None, held: RowsAlike | None = None) -> MetricsEntry:
    """Tier 1 figures of a pair; all of them unitless but max_abs and mean_signed, which are in the tensor's unit."""
    worst = None if row is None else row.worst_token
    if not pair.mismatched and not pair.total.count and worst is None:
        of = pair.compared, pair.nan_a, pair.nan_b
        known = None if held is None else held.equal.get(of)
        if known is None:
            known = _equal(*of)
            if held is not None:
                held.equal[of] = known
        return known
    entry: MetricsEntry = {
        "compared": pair.compared,
        "mismatched": pair.mismatched,
        "nan_a": pair.nan_a,
        "nan_b": pair.nan_b,
        "nonfinite_mismatched": pair.nonfinite_mismatched,
        "max_abs": pair.max_abs,
        "max_rel": pair.max_rel,
        "rel_l2": pair.total.rel_l2,
        "one_minus_cosine": pair.total.one_minus_cosine,
        "mean_signed": pair.total.mean_signed,
        "gain": pair.total.gain,
        "worst_token": None if worst is None else {"sample": worst[0], "position": worst[1], "rel_l2": worst[2]},
    }
    return clean(entry)


def _problems(problems: Sequence[Problem]) -> list[ProblemEntry]:
    return [{"where": problem.where, "what": problem.what} for problem in problems]


def check_place(path: Path) -> None:
    """Refuse a place for a document before the work that the document takes.

    Raises:
        RequestError: a file is there already, or its folder is not.
    """
    try:
        if path.is_file():
            raise RequestError("the file is there already", file=str(path), hint="--force writes over it")
        if not path.parent.is_dir():
            import shlex

            hint = f"mkdir -p {shlex.quote(str(path.parent))}, or --force makes it"
            raise RequestError("the folder of the file is not there", file=str(path), hint=hint)
    except OSError as error:
        raise RequestError("the document cannot be written", file=str(path), found=error.strerror) from None


def write_document(doc: Document, path: Path) -> None:
    """Put a document under its name, as `write_text` does.

    Raises:
        RequestError: nothing can be written there.
    """
    write_text(chain(pieces(doc), "\n"), path)


def write_text(text: str | Iterable[str], path: Path) -> None:
    """Put a text under its name, whole or not at all, over what is there. A device or a pipe is written to, never
    replaced.

    text: all of it, or pieces that are made while they are written.

    Raises:
        RequestError: nothing can be written there.
    """
    data = (piece.encode() for piece in ([text] if isinstance(text, str) else text))
    try:
        target = path.resolve()
        if path.absolute().parts[1:2] in (("dev",), ("proc",)) or (target.exists() and not target.is_file()):
            with open(path, "wb") as stream:
                stream.writelines(data)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            # Here, not above: the recorder is much to import before the first paint.
            from replay_core.recorder.writer import replace_whole

            replace_whole(target, data)
    except OSError as error:
        raise RequestError("the document cannot be written", file=str(path), found=error.strerror) from None
