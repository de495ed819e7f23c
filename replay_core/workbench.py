"""The one façade: every command and every screen asks here, and gets a document.

The command line calls the functions; a child process does the same with the Job that came down its pipe (`desk`).
Imports of what a job does not need are left to the job: a reader child never pays for torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from msgspec.structs import replace

from replay_core.collecting import importing, seldom
from replay_core.dumps import open_run
from replay_core.errors import NothingComparableError, RequestError, RldbgError, SelectionError
from replay_core.export import documents
from replay_core.export.numbers import clean
from replay_core.jobs import IMPORTING, Job, OnEvent, Partial, Progress, Runner, ignore
from replay_core.records import Inline, Problem, Record, RecordKey, Run, Selection

if TYPE_CHECKING:
    from replay_core.compare import Comparison, TensorVerdict
    from replay_core.documents.comparison import ComparisonDocument, PairEntry
    from replay_core.documents.diagnosis import DiagnosisDocument
    from replay_core.documents.difference import DifferenceDocument
    from replay_core.documents.gathering import GatheringDocument
    from replay_core.documents.kinds import Document
    from replay_core.documents.mismatch import MismatchDocument
    from replay_core.documents.parity import ParityDocument
    from replay_core.documents.record import RecordDocument
    from replay_core.documents.replay import ReplayDocument
    from replay_core.documents.ruling import RulingDocument
    from replay_core.documents.run import RunDocument
    from replay_core.documents.samples import SampleOrder, SamplesDocument
    from replay_core.documents.tensor import PointedTensor, TensorDocument
    from replay_core.documents.weights import WeightsDocument
    from replay_core.inspection.subject import Subject
    from replay_core.measure.statistics import Statistics
    from replay_core.units.shard import Shard
    from replay_core.weight_sync.state import WeightState


@seldom()
def open_dump(
    path: Path,
    *more: Path,
    headers: bool = False,
    step: Selection | None = None,
    on_event: OnEvent = ignore,
) -> RunDocument:
    """A run document. `headers` also reads every record's header: field names, and which records are unreadable.

    Several paths are one run; `step` leaves only the records of those steps. Of a folder of runs no header is read:
    each is opened for itself, and there may be thousands.
    """
    run = open_run(path, *more, on_event=on_event)
    lost = run.lost(step=step)
    if step is not None:
        run.records = run.select(step=step)
    unreadable: list[Problem] = []
    found: list[Problem] = []
    headers = headers and not run.inside
    if headers:
        for done, record in enumerate(run.records):
            on_event(Progress(done, len(run.records), record.path.name))
            try:
                record.tensors()
                found += record.problems
                # Names are what a listing keeps: containers of text hold every value they have read.
                record.release()
            except RldbgError as error:
                unreadable.append(Problem(str(record.path), error.in_one_line))
    known = {problem.where for problem in unreadable}
    listed = [problem for problem in [*run.problems, *found] if problem.where not in known]
    run.problems = list(dict.fromkeys([*listed, *unreadable]))
    return documents.run_document(run, "headers" if headers else "names", unreadable=len(unreadable) + len(lost))


def show_record(
    path: Path, key: RecordKey | None, *more: Path, stats: bool = False, **selection: Any
) -> RecordDocument:
    """A record document: of the given key, or of the only record the selection leaves.

    Raises:
        SelectionError: no record matches, or several do (says which).
    """
    record = find_record(open_run(path, *more), key, **selection)
    return documents.record_document(record, _all_statistics(record) if stats else None)


def show_tensor(
    path: Path,
    name: str,
    *more: Path,
    at: list[int] | None = None,
    part: str | None = None,
    tokenizer: Path | None = None,
    **selection: Any,
) -> TensorDocument:
    """A tensor document of the only record the selection leaves, with histogram, the asked-for part and texts.

    Args:
        part: a slice such as `0:4,:8`.
        tokenizer: a tokenizer.json or its folder; else one is looked for beside the dump.
    """
    from replay_core.inspection.subject import Subject
    from replay_core.inspection.tensor import shown_tensor

    run = open_run(path, *more)
    one = Subject.find(run, find_record(run, None, holding=name, **selection), name)
    return shown_tensor(one, at=at, part=part, tokenizer=tokenizer)


def _all_statistics(record: Record) -> dict[str, Statistics]:
    from replay_core.measure.statistics import statistics

    # A scalar that stands in the file's structure is shown itself; one that is a tensor's bytes is looked at.
    return {
        ref.name: statistics(ref)
        for ref in record.tensors()
        if ref.is_readable and not ref.is_text and not (ref.shape == () and isinstance(ref.source, Inline))
    }


def holds_tensor(path: Path, name: str, *more: Path, **selection: Any) -> bool:
    """Whether a record that the selection leaves has a tensor of that name."""
    from replay_core.inspection.subject import holders

    try:
        return bool(holders(open_run(path, *more).select(**selection), name))
    except RldbgError:
        return False


def find_record(run: Run, key: RecordKey | None = None, *, holding: str | None = None, **selection: Any) -> Record:
    """The record of a key, or the only one a selection leaves; of several, the only one that holds a tensor."""
    if key is not None:
        matching = [record for record in run.records if record.key == key]
        if not matching:
            raise SelectionError(f"there is no record of {key}", file=str(run.path), hint=f"rldbg ls {run.path}")
        return matching[0]
    chosen = run.select(**selection)
    if holding is not None and len(chosen) > 1:
        from replay_core.inspection.subject import holders

        chosen = holders(chosen, holding) or chosen
    if len(chosen) > 1:
        keys = [str(record.key) for record in chosen]
        more = f" and {len(keys) - 6} more" if len(keys) > 6 else ""
        raise SelectionError(
            f"{len(chosen)} records match",
            file=str(run.path),
            expected="one record",
            found="; ".join(keys[:6]) + more,
            hint="narrow it with --step, --rank, --micro, --stage or --role",
        )
    return chosen[0]


@seldom()
def compare_dumps(
    a: Path,
    b: Path,
    *,
    exact: bool = False,
    digests: bool = False,
    digests_under: Path | None = None,
    name: Sequence[str] = (),
    map_file: Path | None = None,
    tolerance_file: Path | None = None,
    atol: float | None = None,
    rtol: float | None = None,
    summarised: bool | None = None,
    on_event: OnEvent = ignore,
    on_row: Callable[[PairEntry], None] | None = None,
    is_rejudged: bool = True,
    scope_b: dict[str, int | None] | None = None,
    more_a: Sequence[Path] = (),
    more_b: Sequence[Path] = (),
    promised: dict[str, int | None] | None = None,
    explain: str | None = None,
    measured: Sequence[Path] = (),
    **selection: Selection | str | None,
) -> ComparisonDocument:
    """A comparison document of two dumps, or of the part of each that the selection leaves.

    Args:
        digests: read only tensors whose digests differ (`compare/told.py`).
        digests_under: the folder that keeps digests of dumps that recorded none.
        name: only tensors of these names (globs).
        map_file: the user's own names, `name in a = name in b` a line.
        tolerance_file: the user's own limits by name (`compare/tolerance.py`).
        atol, rtol: every |d| <= atol + rtol |a| instead of any other limit for floats.
        explain: of tensors of this name, also every rule that was asked.
        summarised: also what NexRL's script reports; None: where either dump is NexRL's.
        on_row: hears of every tensor as soon as it is judged, as an entry of `tensors`.
        is_rejudged: whether `rejudge` may follow. Where not, rows are held in little (`export/entries.py`): `tensors`
            of the document is a sequence, but no list.
        scope_b: other records of B (step, rank, micro), set against those that the selection leaves of A.
        more_a, more_b: the other directories of either run.
        measured: files that `measure_dumps` wrote of the same two: what they hold is not read again.
        promised: how many ranks and micros there are to be ("rank", "micro"); those in neither run are stated.
        selection: step, rank, micro, stage, role.

    Raises:
        NothingComparableError: the two share no tensor.
        RequestError: the selection leaves nothing, the map contradicts itself, or a tolerance is no number.
    """
    from replay_core.compare import compare_runs
    from replay_core.compare.among_ranks import among_ranks
    from replay_core.compare.judging.judgement import asked
    from replay_core.compare.judging.kept_figures import KeptFigures
    from replay_core.compare.judging.tolerance import DEFAULT, load_tolerances
    from replay_core.compare.pairing.renaming import Renames
    from replay_core.compare.scope import records_of_scope, state_scope
    from replay_core.compare.told import by_digests
    from replay_core.export.entries import Entries

    tolerances = (DEFAULT if tolerance_file is None else load_tolerances(tolerance_file)).with_overrides(atol, rtol)
    renames = Renames.read(map_file) if map_file is not None else None
    run_a = open_run(a, *more_a, on_event=on_event)
    run_b = run_a if (a, *more_a) == (b, *more_b) else open_run(b, *more_b, on_event=on_event)
    chosen = {part: value for part, value in selection.items() if value is not None}
    records_a = _chosen(run_a, chosen)
    beside = {part: chosen.get(part) for part in scope_b or {}}
    records_b = _chosen(run_b, chosen) if scope_b is None else records_of_scope(run_b, scope_b, beside)
    notes: list[str] = []
    if digests:
        records_a, records_b, notes = by_digests(
            (run_a, run_b),
            records_a or run_a.records,
            records_b or run_b.records,
            keep=digests_under,
            on_event=on_event,
        )
    if summarised is None:
        summarised = any("nexrl" in run.dialect for run in (run_a, run_b))
    # A row is kept for whoever asks it again.
    entries = None if is_rejudged or explain is not None else Entries()

    def heard(row: TensorVerdict) -> None:
        if entries is not None:
            entries.take(row)
        if on_row is not None:
            on_row(documents.tensor_row(row))

    compared = compare_runs(
        run_a,
        run_b,
        records_a,
        records_b,
        exact=exact,
        tolerances=tolerances,
        names=name,
        renames=renames,
        summarised=summarised,
        on_event=on_event,
        on_row=heard,
        are_kept=entries is None,
        known=KeptFigures(measured, (run_a.path, run_b.path)) if measured else None,
    )
    compared.records_unreadable += len(run_a.lost(**chosen)) if records_a is not None else 0
    asked_b = chosen if scope_b is None else beside
    compared.records_unreadable += len(run_b.lost(**asked_b)) if records_b is not None else 0
    if not (name or digests):
        of_a, of_b = records_a or run_a.records, records_b or run_b.records
        found = among_ranks(compared, of_a, of_b, exact=exact, tolerances=tolerances, on_event=on_event)
        compared.among = found, compared.first
    compared.notes += notes
    compared.selection = {part: str(value) for part, value in chosen.items()} | (
        {"name": ", ".join(name)} if name else {}
    )
    if scope_b is None:
        state_scope(compared, promised or {}, records_a or run_a.records, records_b or run_b.records)
    if is_rejudged:
        _latest[:] = [compared]
    doc = _comparison_document(compared, tolerance_file, exact, entries=entries, atol=atol, rtol=rtol)
    for entry, row in zip(doc["tensors"], compared.tensors if explain else (), strict=False):
        if explain in (entry["name"], *entry["names"]) and row.figures is not None and row.context is not None:
            entry["rules"] = clean(asked(row.figures, row.context, tolerances))
    return doc


def compare_into(a: Path, b: Path, into: Path, judged: Mapping[str, Any], **asked: Any) -> tuple[int, str]:
    """Write the document of `compare_dumps` into a file, whole or not at all, row by row.

    judged: what `export.outcome.exit_code` is told. Returns the exit code that the answer means, and it in a line.

    Raises:
        RequestError: as `compare_dumps`; or the file cannot be written.
    """
    from replay_core.export.outcome import exit_code
    from replay_core.export.written import compact
    from replay_core.recorder.writer import replace_whole
    from replay_core.units.headline import headline

    doc = compare_dumps(a, b, is_rejudged=False, **asked)
    try:
        replace_whole(into, (piece.encode() for one in (compact(doc), "\n") for piece in one))
    except OSError as error:
        raise RequestError("the directory of units cannot be written", file=str(into), found=error.strerror,
                           hint="df -h; another --out DIR") from None  # fmt: skip
    return int(exit_code(doc, **judged)), headline(doc)


@seldom()
def measure_dumps(
    a: Path,
    b: Path,
    into: Path,
    part: tuple[int, int],
    *,
    exact: bool = False,
    digests: bool = False,
    name: Sequence[str] = (),
    map_file: Path | None = None,
    tolerance_file: Path | None = None,
    atol: float | None = None,
    rtol: float | None = None,
    on_event: OnEvent = ignore,
    **selection: Selection | str | None,
) -> int:
    """Write the figures of those pairs of `compare_dumps` whose names are of one `part`, from 0, of so many. How many.

    Args:
        into: the file, which is there whole or not at all; `compare_dumps(measured=)` takes it.

    Raises:
        RequestError: the selection leaves nothing, the map contradicts itself, a tolerance is no number, or the file
            cannot be written.
    """
    from replay_core.compare import measure_part
    from replay_core.compare.judging.kept_figures import line_of
    from replay_core.compare.judging.tolerance import DEFAULT, load_tolerances
    from replay_core.compare.pairing.renaming import Renames
    from replay_core.compare.told import by_digests
    from replay_core.recorder.writer import replace_whole

    tolerances = (DEFAULT if tolerance_file is None else load_tolerances(tolerance_file)).with_overrides(atol, rtol)
    renames = Renames.read(map_file) if map_file is not None else None
    run_a = open_run(a, on_event=on_event)
    run_b = run_a if a == b else open_run(b, on_event=on_event)
    chosen = {one: value for one, value in selection.items() if value is not None}
    records_a, records_b = (_chosen(run, chosen) or run.records for run in (run_a, run_b))
    if digests:
        records_a, records_b, _ = by_digests((run_a, run_b), records_a, records_b, on_event=on_event)
    written = 0

    def lines() -> Iterator[bytes]:
        nonlocal written
        for pair, micro_pair, found in measure_part(
            run_a, run_b, records_a, records_b, part, exact=exact, tolerances=tolerances, names=name,
            renames=renames, on_event=on_event,
        ):  # fmt: skip
            written += 1
            yield line_of(pair, micro_pair, found, (run_a.path, run_b.path))

    try:
        replace_whole(into, lines())
    except OSError as error:
        raise RequestError("the figures cannot be written", file=str(into), found=error.strerror,
                           hint="df -h; another --out DIR") from None  # fmt: skip
    return written


def _chosen(run: Run, chosen: dict[str, Any]) -> list[Record] | None:
    return run.select(**chosen) if chosen else None


def _comparison_document(
    compared: Comparison,
    file: Path | None,
    exact: bool,
    *,
    entries: Sequence[PairEntry] | None = None,
    atol: float | None = None,
    rtol: float | None = None,
) -> ComparisonDocument:
    """With the tokens beside the first divergence as text, where a tokenizer lies beside the dump."""
    doc = documents.comparison_document(compared, documents.tolerance_entry(file, exact, atol, rtol), entries)
    first = doc["first_divergence"]
    beside = None if first is None else first["around"]
    if beside is not None and beside["token_ids"]:
        from replay_core.decoding import texts_near

        beside["texts"] = texts_near(beside["token_ids"], compared.a.path, compared.a.models.values())
    return doc


def compare_three(self_hosted: Path, weaver: Path, remote: Path, **options: Any) -> ComparisonDocument:
    """The comparison of a self-hosted run with a Weaver trainer's; beside it, in `others`, the same run with the
    remote API's, and the remote API's with the Weaver trainer's where those two share anything.

    Raises:
        NothingComparableError: the self-hosted run shares no tensor with one of the two.
    """
    doc = compare_dumps(self_hosted, weaver, **options)
    doc["others"] = [compare_dumps(self_hosted, remote, **options)]
    try:
        doc["others"].append(compare_dumps(remote, weaver, **options))
    except NothingComparableError:
        doc["notes"].append(f"{remote} and {weaver} share no tensor: each is compared with {self_hosted} alone")
    return doc


#: The last comparison of this process, to be judged again: its figures, never its tensors.
_latest: list[Comparison] = []
#: What the last replay of this process compared to judge its cells, by the two dumps.
_replayed: dict[tuple[Path, Path], Comparison] = {}


def compared_by_replay(a: Path, b: Path) -> ComparisonDocument:
    """The comparison of two cells' dumps that the last replay of this process made: nothing is read.

    Raises:
        RequestError: it made none of these two.
    """
    if (known := _replayed.get((a, b))) is None:
        raise RequestError("no replay of this process compared these two", found=f"{a} and {b}", hint="compare them")
    _latest[:] = [known]
    return _comparison_document(known, None, False)


def rejudge(
    a: Path,
    b: Path,
    *,
    tolerance_file: Path | None = None,
    exact: bool = False,
    atol: float | None = None,
    rtol: float | None = None,
) -> ComparisonDocument:
    """The comparison of two dumps under other tolerances (`limits`: atol, rtol), or bitwise: nothing is read again.

    Without any tolerance given, the table's own judge again.

    Raises:
        RequestError: other dumps, or none, were compared last; or a tolerance is none.
    """
    from replay_core.compare import Tolerances, load_tolerances
    from replay_core.compare import rejudge as judged_again

    latest = next(iter(_latest), None)
    if latest is None or (latest.a.path, latest.b.path) != (Path(a), Path(b)):
        raise RequestError(
            "these two were not compared last",
            expected="none" if latest is None else f"{latest.a.path} and {latest.b.path}",
            found=f"{a} and {b}",
            hint="compare them, then judge again",
        )
    tolerances = Tolerances() if tolerance_file is None else load_tolerances(tolerance_file)
    again = judged_again(latest, tolerances.with_overrides(atol, rtol), exact=exact)
    return _comparison_document(again, tolerance_file, exact, atol=atol, rtol=rtol)


def is_document(path: Path) -> bool:
    """Whether a file looks like a document that a command wrote, so that `reopen` is to be tried."""
    from replay_core.documents.reopening import is_document as looks_like_one

    return looks_like_one(path)


def reopen(path: Path) -> Document:
    """A document that an earlier command wrote, as it was.

    Raises:
        DumpError: the file is no document of rldbg's, is damaged, or of a schema this version does not know.
    """
    from replay_core.documents.reopening import read_document

    return read_document(path)


@seldom()
def diagnose(
    path: Path,
    *more: Path,
    rules: Sequence[str] = (),
    step: Selection | None = None,
    known: Document | None = None,
    on_event: OnEvent = ignore,
) -> DiagnosisDocument:
    """A diagnosis document of a dump or a log. Several paths are one run; the runs of one folder are diagnosed apart.

    Args:
        rules: the ids to run; empty: all.
        known: a diagnosis of other steps of this run, whose findings join those of `step`.

    Raises:
        RequestError: there is no rule of such an id.
        SelectionError: there is no such step.
        NotADumpError: no metric and no sample was read of the one text that was given.
    """
    from replay_core.diagnose.case import Case
    from replay_core.diagnose.engine import chain, chosen_rules
    from replay_core.diagnose.engine import diagnose as judge
    from replay_core.diagnose.finding import Diagnosis
    from replay_core.diagnose.merging import together
    from replay_core.diagnose.series import series_block
    from replay_core.diagnose.signals import Signals
    from replay_core.diagnose.unread import refuse_unread
    from replay_core.export.diagnoses import diagnosis_document

    chosen_rules(rules)  # before anything is read
    run = open_run(path, *more, on_event=on_event)
    if run.inside:
        step = None if known else step  # several runs are told apart by what stands in a claim: they are made anew
        runs = [(str(one.relative_to(path)), open_run(one)) for one in run.inside]
        cases = [(name, Case(one, Signals.of(one, step), step)) for name, one in runs]
        return diagnosis_document(run, together([(name, judge(case, rules, on_event)) for name, case in cases]))
    case = Case(run, Signals.of(run, step), step)
    found = judge(case, rules, on_event)
    if not rules:
        refuse_unread(run, case, found)
    found = chain().updated(Diagnosis.of(known), found) if known else found
    return diagnosis_document(run, found, series_block(case.signals))


def samples(
    path: Path,
    *more: Path,
    step: Selection | None = None,
    by: SampleOrder = "order",
    search: str | None = None,
    shown: Sequence[int] = (),
    most: int = 50,
    tokenizer: Path | None = None,
) -> SamplesDocument:
    """A samples document: of the last step that holds any, or of the last that `step` leaves.

    Raises:
        DumpError: no record holds samples.
        SelectionError: there is no such step or sample.
        RequestError: nothing is recorded to put them in order by, or to search; or it is no tokenizer.
    """
    from replay_core.inspection.step_samples import StepSamples

    return StepSamples(open_run(path, *more), step, tokenizer).document(by=by, search=search, shown=shown, most=most)


def dialects() -> list[str]:
    """Who writes what can be opened."""
    from replay_core.dumps.opening import DIALECTS

    return list(dict.fromkeys(dialect.name for dialect in DIALECTS))


def explain_rule(id: str) -> str:
    """What a rule of the catalogue looks at, as text.

    Raises:
        RequestError: there is no such rule.
    """
    from replay_core.diagnose.catalogue import explained

    return explained(id)


def inspect(
    a: PointedTensor, b: PointedTensor | None = None, *, at: list[int] | None = None, count: int = 64, **more: Any
) -> TensorDocument:
    """A tensor document: statistics, values around an index, and the pair's verdict when there are two.

    `more` is what `inspection.tensor.tensor_document` takes.
    """
    from replay_core.inspection.tensor import tensor_document

    return tensor_document(subject(a), subject(b) if b else None, at=at, count=count, **more)


def difference(a: PointedTensor, b: PointedTensor, *, axis: str = "row", cells: int = 64) -> DifferenceDocument:
    """A difference document: how two tensors' differences are spread, and a strip of `cells` along rows or channels."""
    from replay_core.inspection.difference import difference_document

    return difference_document(subject(a), subject(b), axis=axis, cells=cells)


def subject(pointed: PointedTensor) -> Subject:
    """The tensor somebody points at.

    Raises:
        SelectionError, RequestError: there is no such record, or no such tensor in it.
    """
    from replay_core.inspection.subject import Subject

    run = open_run(Path(pointed["path"]), *map(Path, pointed.get("more") or ()))
    return Subject.find(run, find_record(run, RecordKey.from_mapping(pointed["key"])), str(pointed["name"]))


def replay(
    plan: dict[str, Any], out: Path, runner: Runner, on_event: OnEvent = ignore, *, is_held: bool = False, **asked: Any
) -> ReplayDocument:
    """A replay document: the reference, the padded batch and the asked-for cell, compared.

    Args:
        plan: a `ReplayPlan` as a mapping; of `step`, `rank` and `micro`, what is absent or None is the first there is;
            without a `forward_path` the user's own code is imported from the current directory.
        on_event: also hears of every cell as soon as it is judged: `{"cell": ...}`, as the document will hold it.
        is_held: what earlier replays of this process ran beside what they asked for need not run again.
        asked: the parts of `replay.request.ReplayRequest`: matrix, models, against, twice, is_warm.

    Raises:
        RldbgError: the request is wrong (record, model, flags), so that no cell can run.
    """
    from replay_core.export.replays import cell_entry, replay_document
    from replay_core.replay.cell_log import LOGS, REPLAY_JSON
    from replay_core.replay.kept import KEPT
    from replay_core.replay.plan import FACTORY, ReplayPlan
    from replay_core.replay.request import ReplayRequest, answer, micro_batch

    run = open_run(Path(plan["dump"]))
    whole = ReplayPlan.from_mapping({**plan, **micro_batch(run, plan), "out": str(out)})
    if whole.forward_path is None and (whole.forward is not None or whole.model.startswith(FACTORY)):
        whole = replace(whole, forward_path=str(Path.cwd()))
    replayed = answer(
        whole,
        ReplayRequest(**asked),
        run,
        runner,
        on_event,
        lambda result: on_event(Partial({"cell": clean(cell_entry(result))})),
        KEPT if is_held else None,
    )
    made = [result.comparison for result in replayed.results if result.comparison is not None]
    _replayed.clear()
    _replayed.update({(Path(one.a.path), Path(one.b.path)): one for one in made})
    doc = replay_document(whole, replayed)
    # Beside the cells' logs: what `capsule` is made from.
    documents.write_document(doc, out / LOGS / REPLAY_JSON)
    return doc


def capsule(
    doc: ReplayDocument, file: Path, out: Path, runner: Runner, on_event: OnEvent = ignore, *,
    cell: int | None = None, script: Path | None = None, allow_pickled_weights: bool = False,
) -> ReplayDocument:  # fmt: skip
    """Write one file that shows what a replay found by itself; the replay document of that file.

    Args:
        doc: the replay, which may be a stranger's: code that it names is not run, whatever it says was allowed there.
        cell: which of its cells, the first that disagrees where None.
        out: a directory for what is made on the way; script: where the standalone script goes, if anywhere.

    Raises:
        RequestError: no cell disagrees, or nothing that fits in a capsule shows it.
        RldbgError: the model cannot be run.
    """
    from replay_core.replay import capsule as capsules
    from replay_core.replay.plan import ReplayPlan, beyond_capsule

    wrong = [number for number, one in enumerate(doc["cells"]) if one["agreement"]["agrees"] is False and one["dump"]]
    number = cell if cell is not None else next((one for one in wrong if doc["cells"][one]["part"] != "reference"), -1)
    if number not in wrong or number == doc["baseline"]:
        raise RequestError(
            "a capsule shows a cell that disagrees with each row alone",
            expected=f"--cell {' | '.join(map(str, wrong))}" if wrong else "a replay with such a cell",
            found=f"cell {number}" if cell is not None else "a replay whose cells agree",
        )
    chosen, alone = doc["cells"][number], doc["cells"][doc["baseline"]]
    plan = ReplayPlan.from_mapping(
        {**doc["plan"], "flags": chosen["flags"], "out": str(out), "forward_path": None,
         "allow_pickled_weights": allow_pickled_weights}
    )  # fmt: skip
    if (beyond := beyond_capsule(plan.to_mapping())) is not None:
        raise RequestError("a capsule holds no code and no loss", expected="a forward replay of a model", found=beyond)
    cause = chosen["cause"]
    said = f"cell {number} is not what each row alone is" if cause is None else cause["sentence"]
    told: Any = runner.run(Job("replay_slice", {"plan": plan.to_mapping(), "reference": alone["flags"], "said": said}),
                      on_event)  # fmt: skip
    made = _replayed_capsule(out, chosen["flags"], runner, on_event)
    baseline, shown = made["cells"][made["baseline"]], made["cells"][-1]
    if shown["agreement"]["agrees"] is not False:
        raise RequestError(
            "what the replay found does not show in a capsule", expected="the same difference",
            found="a slice of the model that agrees: more of the model or its code is needed",
        )  # fmt: skip
    note = {"sentence": said, **told}
    flags = {"reference": baseline["flags"], "cell": shown["flags"]}
    outputs = capsules.outputs_of(_runs_of(made), str(shown["final_hidden"]))
    size = capsules.pack(out, {"flags": flags, "told": note}, outputs, file)
    if script is not None:
        documents.write_text((out / capsules.SCRIPT).read_text(encoding="utf-8"), script)
    entry: Any = {**note, "file": str(file), "bytes": size, "script": None if script is None else str(script),
                  "as_made": dict.fromkeys(capsules.SIDES, 0.0)}  # fmt: skip
    return {**made, "capsule": entry}


def replay_of(path: Path) -> tuple[ReplayDocument, int | None]:
    """(the document of a replay, the number of the cell that `path` is the dump of, if it is one).

    Args:
        path: a replay's directory, a dump of one of its cells, or its document.

    Raises:
        RequestError: it is no replay's.
    """
    from replay_core.replay.cell_log import LOGS, REPLAY_JSON

    file = path
    if path.is_dir():
        places = [folder / LOGS / REPLAY_JSON for folder in (path, path.resolve().parent)]
        file = next((one for one in places if one.is_file()), places[0])
        if not file.is_file():
            raise RequestError(
                "the directory is no replay's", file=str(path), expected=f"{LOGS}/{REPLAY_JSON} in it",
                hint=f"rldbg replay {path} --packing --out R, then rldbg capsule R bug.capsule",
            )  # fmt: skip
    doc = reopen(file)
    if doc["kind"] != "replay":
        raise RequestError("the document is no replay", file=str(file), expected="replay", found=doc["kind"])
    dumps = [None if one["dump"] is None else Path(one["dump"]).resolve() for one in doc["cells"]]
    here = path.resolve()
    return doc, dumps.index(here) if here in dumps else None


def is_capsule(path: Path) -> bool:
    """Whether a file begins as a capsule does."""
    from replay_core.replay import capsule as capsules

    return capsules.is_capsule(path)


def open_capsule(file: Path, out: Path, runner: Runner, on_event: OnEvent = ignore) -> ReplayDocument:
    """Run again what a capsule shows; the replay document, and how far it is from what was seen where it was made.

    Raises:
        DumpError: the file is no capsule, is damaged, or asks for code.
    """
    from replay_core.replay import capsule as capsules

    note, entry = capsules.unpack(file, out)
    made = _replayed_capsule(out, note["flags"]["cell"], runner, on_event)
    now = {}
    if made["cells"][-1]["final_hidden"] is not None:
        now = capsules.outputs_of(_runs_of(made), str(made["cells"][-1]["final_hidden"]))
    far: dict[str, Any] = {**capsules.apart_from(out, now)}
    return {**made, "capsule": {**entry, "as_made": far}}


def _replayed_capsule(out: Path, flags: Mapping[str, Any], runner: Runner, on_event: OnEvent) -> ReplayDocument:
    plan = {"dump": str(out / "run"), "model": "checkpoint", "flags": dict(flags), "step": 0, "rank": 0, "micro": 0}
    return replay(plan, out / "replay", runner, on_event)


def _runs_of(made: ReplayDocument) -> dict[str, Run]:
    ends = {"reference": made["cells"][made["baseline"]], "cell": made["cells"][-1]}
    return {side: open_run(Path(one["dump"])) for side, one in ends.items() if one["dump"]}


def parity(
    config_a: Path, config_b: Path, out: Path, runner: Runner, on_event: OnEvent = ignore, **asked: Any
) -> ParityDocument:
    """A parity document: two critics, each in a child of its own, on the same tokens.

    `asked` are the parts of `parity.pipeline.Request`: data, tokenizer, steps, seed, threshold, capture.

    Raises:
        RldbgError: the request is wrong, or a critic cannot run here.
    """
    from replay_core.export.parity import parity_document
    from replay_core.parity.pipeline import ParityRequest, run_parity

    return parity_document(run_parity(config_a, config_b, ParityRequest(**asked), out, runner, on_event))


def work_units(
    command: Literal["compare", "diagnose", "replay", "referee"],
    params: Mapping[str, Any],
    out: Path,
    shard: Shard | None,
    runner: Runner,
    on_event: OnEvent = ignore,
    *,
    select: Mapping[str, str] | None = None,
    judged: Mapping[str, Any] | None = None,
    ray: str | None = None,
    time_limit_s: float | None = None,
) -> GatheringDocument:
    """Do the units of a job that have no answer in `out` yet, those of a shard; a gathering document of them.

    Args:
        params: of the job `command`, without the part of the run.
        runner: what runs each; where it loses a process, that is one unit's outcome.
        ray: the address of the Ray cluster whose actors run them in its place; "": one on this machine.
        time_limit_s: how long a unit may take an actor.
        select: step, rank, micro as they are typed, and role; judged: what `export.outcome.exit_code` is told.

    Raises:
        RequestError: `out` holds the units of another request, or other files.
        RldbgError: a run cannot be opened.
    """
    from replay_core.units.folder import UnitFolder
    from replay_core.units.gathering import gathered
    from replay_core.units.plan import Request, planned
    from replay_core.units.working import work

    plan = planned(Request(command, params, select or {}, judged or {}), on_event)
    folder = UnitFolder(out)
    folder.keep_plan(plan)
    units = plan.units if shard is None else shard.of(plan.units)
    if ray is None:
        work(plan, folder, units, runner, on_event)
    else:
        from replay_core.units.on_ray import work_on_ray

        work_on_ray(plan, folder, units, ray, on_event, time_limit_s=time_limit_s)
    return gathered(folder, plan, shard)


def gather(path: Path) -> GatheringDocument:
    """What the units of a directory have come to, so far.

    Raises:
        RequestError: it holds no units.
        DumpError: its plan is damaged.
    """
    from replay_core.units.folder import UnitFolder
    from replay_core.units.gathering import gathered

    return gathered(UnitFolder(path))


def recorded_parity(a: Path, b: Path, *, threshold: float | None = None, on_event: OnEvent = ignore) -> ParityDocument:
    """A parity document of the values that two dumps hold (or one directory that holds two critics'); nothing runs."""
    from replay_core.export.parity import parity_document
    from replay_core.parity.pipeline import read_parity

    asked = {} if threshold is None else {"threshold": threshold}
    return parity_document(read_parity(a, b, on_event=on_event, **asked))


def compare_weights(
    sent: Path,
    received: Sequence[Path],
    *,
    before: Path | None = None,
    older: Sequence[Path] = (),
    step: int | None = None,
    parallel: int | None = None,
    name: Sequence[str] = (),
    allowed: Sequence[str] = (),
    on_event: OnEvent = ignore,
) -> WeightsDocument:
    """A weights document: what each parameter of an engine holds of what a trainer pushed.

    Args:
        sent: the trainer's weights: a checkpoint, a state dict, a dump with records of stage param (its other steps are
            tried as older ones).
        received: the engine's, values or digests; several paths are its ranks.
        before: what the engine held before the push, in either side's names.
        older: weights of other steps.
        step: of the dump `sent`; None is its last.
        parallel: over how many ranks the engine's parameters are cut; None: as their shapes say.
        name: only destinations of these names (globs).
        allowed: arrivals that fail nothing.

    Raises:
        DumpError: a path cannot be opened.
        NothingComparableError: a side holds no parameters, or no two meet.
    """
    from replay_core.export.weights import weights_document
    from replay_core.weight_sync.arrival import judge
    from replay_core.weight_sync.megatron import joined
    from replay_core.weight_sync.state import states_of, states_of_step
    from replay_core.weight_sync.suspects import Known

    mine, others = states_of_step(sent, step)
    sender = _only_one(joined(mine), sent)
    others += [one for path in older for one in joined(states_of(path, every_step=True))]
    earlier = None if before is None else _only_one(joined(states_of(before)), before)
    known = Known(sender, earlier, tuple(others))
    states = [state for path in received for state in states_of(path)]
    return weights_document(judge(known, states, parallel=parallel, names=name, on_event=on_event), allowed)


def _only_one(states: list[WeightState], path: Path) -> WeightState:
    if len(states) > 1:
        ranks = ", ".join(str(state.rank) for state in states)
        raise RequestError(
            "the weights are in several parts that nothing puts together",
            expected="one state of all parameters",
            found=f"{path}: ranks {ranks}",
            hint="give a checkpoint of whole parameters, or the FSDP checkpoint itself",
        )
    return states[0]


def mismatch(
    path: Path, *more: Path, step: int | None = None, on_event: OnEvent = ignore, **asked: Any
) -> MismatchDocument:
    """A mismatch document: why the rollout's log-probabilities of a step are not the trainer's, and what is left.

    Args:
        step: None is the last that has both sides.
        asked: the parts of `mismatch.setting.Asked`: model, base_model, older, tokenizer, attention, device, most.

    Raises:
        SelectionError: there is no such step.
        ModelError: the model that was named is not there, or fits no token.
    """
    from replay_core.export.mismatches import mismatch_document
    from replay_core.mismatch.explanation import explain
    from replay_core.mismatch.setting import Asked

    return mismatch_document(explain(open_run(path, *more), Asked(**asked), step, on_event))


def parity_examples() -> tuple[Path, Path]:
    """The two tiny critic configurations that come with rldbg: DeepSpeed's, Megatron's."""
    from replay_core.parity.config import SHIPPED

    return SHIPPED / "critic_deepspeed.yaml", SHIPPED / "critic_megatron.yaml"


def referee(
    a: Path,
    b: Path | None = None,
    *,
    weights_a: str | None = None,
    weights_b: str | None = None,
    graft: bool = False,
    on_event: OnEvent = ignore,
    **selection: Selection | str | None,
) -> RulingDocument:
    """A ruling document: each side's recorded tensors against fp64 of its own inputs; noise or bug, and which side.

    Args:
        weights_a, weights_b: the model of a side, as a replay's `model`; None takes what the dump notes.
        graft: also put each of B's module outputs into A's forward, and say which part of the end difference comes.
        selection: step, rank, micro, role: the first computation of them that holds module tensors is ruled.

    Raises:
        SelectionError: nothing matches.
        RequestError: `graft` of one side.
        UnavailableError: `graft`, and the sides were not given the same tokens, or record no log-probabilities.
    """
    if graft and b is None:
        raise RequestError("a graft is from one side into the other", expected="two dumps: rldbg referee A B --graft")
    from replay_core.export.rulings import ruling_document
    from replay_core.referee.recorded import ruled_first
    from replay_core.referee.ruled import lacking, not_ruled

    chosen: dict[str, Any] = {part: value for part, value in selection.items() if value is not None}
    sides: list[tuple[Run, Any, list[Record], str | None]] = []
    missing: list[tuple[Run, Any, str | None]] = []
    for path, weights in ((a, weights_a), (b, weights_b)):
        if path is None:
            continue
        run = open_run(path)
        like = sides[0][1] if sides else None
        place, records = ruled_first(run.select(**chosen) if chosen else run.records, like)
        sides.append((run, place, records, weights))
        missing.append((run, place, lacking(run, records, weights)))
    if any(why is not None for _, _, why in missing):
        return ruling_document(not_ruled(missing))
    on_event(IMPORTING)
    with importing():
        from replay_core.referee.ruling import rule  # torch and transformers: 3.4 s

    return ruling_document(rule(sides[0], sides[1] if len(sides) > 1 else None, on_event, graft=graft))
