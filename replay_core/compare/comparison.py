"""Compares two runs: pairs, judges in order of computation, streams the first divergence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from replay_core import naming
from replay_core.compare.align import Facing, TensorPair, face, is_layout_only, pair_tensors
from replay_core.compare.divergence import may_be_first, order_of, origin_of
from replay_core.compare.judging import Judge, TensorVerdict
from replay_core.compare.verdict import Verdict
from replay_core.errors import NothingComparableError
from replay_core.jobs import OnEvent, Partial, Progress, ignore
from replay_core.records import Problem, Record, Run


@dataclass(slots=True)
class Comparison:
    """Everything two runs have to say of each other. `tensors` stand in order of computation."""

    a: Run
    b: Run
    tensors: list[TensorVerdict] = field(default_factory=list)
    skipped: list[TensorVerdict] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    #: Bookkeeping fields (step, timestamp ...), seen and not compared.
    notes_not_compared: int = 0
    records_paired: int = 0
    records_a_only: int = 0
    records_b_only: int = 0
    records_unreadable: int = 0

    @property
    def counts(self) -> dict[str, int]:
        """How many pairs got each verdict; `total` is their sum with the skipped ones."""
        counted = Counter(row.verdict for row in self.tensors)
        counts = {verdict.value: counted[verdict] for verdict in Verdict}
        return {"total": len(self.tensors) + len(self.skipped), **counts, "skipped": len(self.skipped)}

    @property
    def elements(self) -> int:
        """Elements compared, over the tokens that count."""
        return sum(row.figures.compared for row in self.tensors if row.figures is not None)

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
        return origin_of([row for row in self.tensors if row.place == first.place])

    @property
    def agrees(self) -> bool | None:
        """Whether everything both sides hold agrees; None when part of it could not be looked at.

        What only one side holds is counted as MISSING: a cell that captures less than the reference can agree.
        """
        if self.first is not None or any(row.verdict.diverges for row in self.tensors):
            return False
        return None if self.skipped or self.records_unreadable else True


def compare_runs(
    a: Run,
    b: Run,
    records_a: list[Record] | None = None,
    records_b: list[Record] | None = None,
    *,
    exact: bool = False,
    on_event: OnEvent = ignore,
    on_row: Callable[[TensorVerdict], None] | None = None,
) -> Comparison:
    """Compare the records of two runs (all of them, or those given). `exact`: any bitwise difference is a DIFF.

    Sends Progress per tensor and, as soon as it is known, a Partial with the first divergence; `on_row` takes
    every verdict as it falls.

    Raises:
        NothingComparableError: not one tensor of the two could be compared.
    """
    chosen_a = a.records if records_a is None else records_a
    chosen_b = b.records if records_b is None else records_b
    result = Comparison(a, b, problems=[*a.problems, *b.problems])
    facings, problems = face(chosen_a, chosen_b)
    result.problems += problems
    work = _work(facings, result)
    judge = Judge(a, b, bitwise_only=exact)
    announced, repeated = False, 0
    damaged: dict[str, str] = {}
    for done, (pair, facing) in enumerate(work):
        on_event(Progress(done, len(work), pair.name))
        row = judge.judge(pair, facing)
        if row is None:
            repeated += 1
            continue
        if row.skipped is not None:
            result.skipped.append(row)
            if row.damaged is not None:
                damaged.setdefault(row.damaged, row.skipped)
            continue
        result.tensors.append(row)
        if on_row is not None:
            on_row(row)
        if not announced and may_be_first(row):
            announced = True
            on_event(Partial({"first_divergence": {"name": row.name, "verdict": row.verdict.value, "why": row.reason}}))
    on_event(Progress(len(work), len(work), "compared"))
    result.records_unreadable += len(damaged)
    result.problems += [Problem(file, what) for file, what in damaged.items()]
    if repeated:
        result.notes.append(f"{repeated} tensors that one side holds in a second stage too were compared once")
    if not any(_looked_at(row) for row in result.tensors):
        raise _nothing(result, chosen_a, chosen_b)
    return result


def _work(facings: list[Facing], result: Comparison) -> list[tuple[TensorPair, Facing]]:
    """Every pair with its facing, in order of computation across all facings."""
    entries = []
    for facing in facings:
        for side in (facing.a, facing.b):
            side.load()
            result.problems += side.problems
            result.records_unreadable += side.unreadable
        result.records_paired += bool(facing.a.records and facing.b.records)
        result.records_a_only += not facing.b.records
        result.records_b_only += not facing.a.records
        only_layout = 0
        for pair in pair_tensors(facing):
            record, ref = pair.one
            if naming.meaning(pair.name).kind == "note":
                result.notes_not_compared += 1
            elif is_layout_only(pair, facing):
                only_layout += 1
            else:
                entries.append((order_of(record.key, pair.name, ref.order), pair, facing))
        if only_layout:
            result.notes.append(
                f"{facing.key}: {only_layout} one-sided masks only lay the same samples out differently; "
                "tokens are compared one by one"
            )
    entries.sort(key=lambda entry: entry[0])
    return [(pair, facing) for _, pair, facing in entries]


def _looked_at(row: TensorVerdict) -> bool:
    """Whether a value of the pair was looked at: two empty tensors, or two of padding alone, prove nothing."""
    elements = sum(figures.compared for figures in (row.figures, row.unmasked) if figures is not None)
    return elements > 0 or row.verdict is Verdict.SHAPE


def _nothing(result: Comparison, records_a: list[Record], records_b: list[Record]) -> NothingComparableError:
    problem = result.problems[0] if result.problems else None
    return NothingComparableError(
        "the two have no tensor in common that could be compared",
        file=f"{result.a.path} and {result.b.path}",
        expected="at least one tensor of the same name under the same step, rank and micro-batch",
        found=f"{_names(records_a)} against {_names(records_b)}" + (f"; {problem.what}" if problem else ""),
        hint=f"rldbg ls {result.b.path}",
    )


def _names(records: list[Record]) -> str:
    keys = ", ".join(str(record.key) for record in records[:3])
    return f"{len(records)} records ({keys}{', ...' if len(records) > 3 else ''})"
