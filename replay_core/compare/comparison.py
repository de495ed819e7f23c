"""Compares two runs: pairs, judges in order of computation, streams the first divergence."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from msgspec import Struct, field

from replay_core import naming
from replay_core.compare.apart import StepOpening
from replay_core.compare.context import (
    Around,
    are_places,
    around,
    faces,
    is_attentions_weights,
    is_tied,
    look_at_the_overlap,
    name_samples,
    note_correlation,
    texts_in_order,
    why_missing,
)
from replay_core.compare.divergence import NO_PLACES, Origin, Places, order_of, places_of
from replay_core.compare.judging import own_norm
from replay_core.compare.judging.algebra import Ranked
from replay_core.compare.judging.as_its_loss import is_as_its_loss
from replay_core.compare.judging.faults import Fault, whose
from replay_core.compare.judging.kept_figures import KeptFigures, is_worth_keeping, part_of
from replay_core.compare.judging.measuring import LookAhead, Measured, same_numbers
from replay_core.compare.judging.tensors import Judge, TensorVerdict
from replay_core.compare.judging.tolerance import DEFAULT, Tolerances
from replay_core.compare.judging.verdict import Verdict
from replay_core.compare.pairing.align import (
    MicroBatchPair,
    ShapesDifferError,
    Side,
    TensorPair,
    is_layout_only,
    lays_out,
    pair_micro_batches,
    pair_tensors,
)
from replay_core.compare.pairing.axes import lay_alike
from replay_core.compare.pairing.expert_rows import ExpertsOfRanks, Missent, missent
from replay_core.compare.pairing.micro_batch_pair import CUT_OTHERWISE
from replay_core.compare.pairing.own_clip import clipped_alone
from replay_core.compare.pairing.ranks import OF_ALL_SAMPLES, Together
from replay_core.compare.pairing.regrouping import Alone, by_samples, called_alike
from replay_core.compare.pairing.renaming import Renames
from replay_core.compare.pairing.routing import rerouted, said
from replay_core.compare.summary import Summary
from replay_core.compare.tally import Tally
from replay_core.compare.updates import Updates
from replay_core.dumps.completeness import without_repeats
from replay_core.errors import DumpError, NothingComparableError, SelectionError
from replay_core.jobs import OnEvent, Partial, Progress, ignore
from replay_core.records import Problem, Record, Run

if TYPE_CHECKING:
    from replay_core.compare.parallel import Parallel
    from replay_core.documents.comparison import VerdictCounts

#: Stages of what is logged: its names are no modules'.
_LOGGED = frozenset({"training_metrics", "loss", "optimizer"})

#: A pair of tensors, and the computation they belong to.
Entry = tuple[TensorPair, MicroBatchPair]


class Comparison(Struct):
    """Everything two runs have to say of each other.

    `tensors` and `skipped` are the rows that were to be kept, in order of computation; `tally` is of every row.
    """

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
    #: Samples that only one of two runs has, of records whose other samples are paired.
    samples_alone: int = 0
    #: Ranks and micro-batches that were said to be there and are in neither run; None where nobody said how many.
    numbers_absent: int | None = None
    #: The values beside the element of the first divergence that was found, and which element that was.
    around: tuple[Around | None, tuple[Any, ...]] | None = None
    #: The micro-batches of one run that are spread over ranks, which one process of the other faced.
    together: list[Together] = field(default_factory=list)
    #: What went wrong among ranks, as far as it was looked for beside the rows; and for which first divergence.
    among: tuple[Parallel | None, TensorVerdict | None] = (None, None)
    #: What was asked for where it was not everything, in the words of the command line.
    selection: dict[str, str] = field(default_factory=dict)
    #: What NexRL's script would report; None where nobody asked.
    summary: Summary | None = None
    tally: Tally = field(default_factory=Tally)

    def __post_init__(self) -> None:
        for row in [*self.tensors, *self.skipped]:
            self.tally.take(row)

    @property
    def counts(self) -> VerdictCounts:
        """How many pairs got each verdict; `total` is their sum with the skipped ones."""
        counts = {verdict.value: self.tally.verdicts[verdict] for verdict in Verdict}
        skipped = self.tally.skipped
        return cast("VerdictCounts", {"total": sum(counts.values()) + skipped, **counts, "skipped": skipped})

    @property
    def elements(self) -> int:
        """Elements compared, over the tokens that count."""
        return self.tally.elements

    @property
    def first(self) -> TensorVerdict | None:
        return self.tally.first

    @property
    def around_first(self) -> Around | None:
        """The values beside the first divergence; None where other tolerances made another one the first."""
        first = self.first
        if first is None or self.around is None or self.around[1] != _element(first):
            return None
        return self.around[0]

    @property
    def origin(self) -> Origin | None:
        """What produced the first divergence, within its micro-batch; None where that is no tensor of a module."""
        return self.tally.origin

    @property
    def agrees(self) -> bool | None:
        """Whether everything both sides hold agrees; None when part of it could not be looked at.

        What only one side holds is counted as MISSING: a cell that captures less than the reference can agree.
        """
        if self.first is not None or self.tally.diverges:
            return False
        return None if self.tally.skipped or self.records_unreadable else True


#: Of single numbers every so many say how far the comparison is: a log has tens of thousands.
_TOLD_EVERY = 64


def compare_runs(
    a: Run,
    b: Run,
    records_a: list[Record] | None = None,
    records_b: list[Record] | None = None,
    *,
    exact: bool = False,
    tolerances: Tolerances = DEFAULT,
    names: Sequence[str] = (),
    renames: Renames | None = None,
    summarised: bool = False,
    on_event: OnEvent = ignore,
    on_row: Callable[[TensorVerdict], None] = lambda row: None,
    are_kept: bool = True,
    known: KeptFigures | None = None,
    as_one: bool = False,
) -> Comparison:
    """Compare the records of two runs (all of them, or those given). `exact`: any bitwise difference is a DIFF.

    names: only tensors of these names (globs). renames: the user's own names of one run in the other's words.
    summarised: also what NexRL's script reports.
    Sends Progress per tensor and, as soon as it is known, a Partial with the first divergence; `on_row` hears of
    every tensor when it has been judged. Of a step nothing is read before the step in front of it was judged.
    are_kept: whether the comparison keeps its rows. Where not, all are tallied, what was compared is forgotten, and of
    many ranks that each face their own a few are compared at a time: their rows then come rank by rank, each with its
    `order`, and the first divergence is said when its step is done.
    known: figures of pairs that `measure_part` left; what it lacks is read.
    as_one: ranks that could face each other one by one are held together against what all of a's hold.

    Raises:
        NothingComparableError: not one tensor of the two could be compared.
        SelectionError: neither run has a tensor of the names asked for.
    """
    chosen_a = a.records if records_a is None else records_a
    chosen_b = b.records if records_b is None else records_b
    result = Comparison(a, b, problems=[*a.problems, *b.problems], summary=Summary() if summarised else None)
    judge = Judge(a, b, bitwise_only=exact, tolerances=tolerances, known=known)
    updates = Updates(a, b, tolerances, exact=exact)

    compared: set[str] = set()  # names, where a file of limits asks which there are

    def add(row: TensorVerdict) -> None:
        row.order = row.order if row.skipped in CUT_OTHERWISE else work.order
        result.tally.take(row)
        if tolerances.given and row.skipped is None:
            compared.add(row.name)
        if are_kept:
            (result.tensors if row.skipped is None else result.skipped).append(row)
        on_row(row)

    in_groups = not are_kept and not summarised and renames is None and not as_one
    work = _Work(result, chosen_a, chosen_b, names, renames, add, is_forgotten=not are_kept, in_groups=in_groups,
                 as_one=as_one)  # fmt: skip
    told: TensorVerdict | None = None

    def tell() -> None:
        """Say what is the first divergence, once no row can come that is before it."""
        nonlocal told
        first = result.tally.first
        if first is not None and told is None and work.is_behind(first):
            told = first
            on_event(
                Partial({"first_divergence": {"name": first.name, "verdict": first.verdict.value, "why": first.reason}})
            )

    repeated, done = 0, 0
    damaged: dict[str, str] = {}
    cut_otherwise = _CutOtherwise()

    def ahead(entries: list[Entry]) -> Iterator[Entry]:
        updates.coming(entries)
        return judge.ahead(entries)

    for pair, micro_pair in work.in_order(ahead, judge.forget):
        if not done % _TOLD_EVERY or pair.one[1].shape:
            on_event(Progress(done, work.total, pair.name))
        done += 1
        row = _judged(judge, pair, micro_pair)
        if row is None:
            repeated += 1
            continue
        untold = micro_pair.untold_of.get(row.name, micro_pair.untold)
        # What no rank of the other run has is missing there, however the ranks share the step.
        is_on_others = row.verdict is Verdict.MISSING and (micro_pair.in_both is None or row.name in micro_pair.in_both)
        is_of_rank = micro_pair.has_own_samples and pair.one[0].key.stage not in OF_ALL_SAMPLES
        if untold is not None and not is_of_rank and (row.verdict.diverges or is_on_others):
            # It faces what happens to be on the rank of its number, or is laid in a way that is none of its own.
            row = TensorVerdict(row.name, Verdict.SAME, untold, a=row.a, b=row.b, skipped=untold)
        restates = row.ranks.restates if row.ranks is not None else None
        if row.verdict.diverges and own_norm.is_of_others(pair, micro_pair):
            restates = own_norm.OF_OTHERS
        if restates is not None:
            result.notes_not_compared += 1
            result.notes.append(f"{row.name} of {micro_pair.where} is not compared: {restates}")
            continue
        updates.settle(row, pair, micro_pair)
        if row.skipped in CUT_OTHERWISE:
            row.order = work.order
            cut_otherwise.rows.append(row)
            continue
        cut_otherwise.take(row)
        add(row)
        if result.summary is not None:
            result.summary.add(row, micro_pair)
        if row.skipped is not None:
            if row.damaged is not None:
                damaged.setdefault(row.damaged, row.skipped)
            continue
        if result.tally.first is row:
            result.around = around(row, micro_pair), _element(row)
        tell()
    judge.finish()
    for row in cut_otherwise.left(work.contradicted):
        add(row)
    tell()
    on_event(Progress(done, done, "compared"))
    result.notes += cut_otherwise.notes
    result.records_unreadable += len(damaged) + _lost(a, records_a) + _lost(b, records_b)
    result.problems += [Problem(file, what) for file, what in damaged.items()]
    result.problems = without_repeats(result.problems)
    if (nans := result.tally.nans) is not None:
        result.notes.insert(0, nans)
    result.notes += judge.notes
    if not names:
        result.notes += tolerances.unmet(compared)
    result.notes += result.tally.gains.sentences(chosen_a, chosen_b)
    if repeated:
        result.notes.append(f"{repeated} tensors that one side holds in a second stage too were compared once")
    work.finish()
    if not result.tally.is_looked_at:
        raise _nothing(result, chosen_a, chosen_b, renames.unused() if renames is not None else [])
    return result


def _lost(run: Run, chosen: Sequence[Record] | None) -> int:
    """Of a part of a run, whoever chose it knows."""
    return len(run.lost()) if chosen is None else 0


def measure_part(
    a: Run,
    b: Run,
    records_a: list[Record],
    records_b: list[Record],
    part: tuple[int, int],
    *,
    exact: bool = False,
    tolerances: Tolerances = DEFAULT,
    names: Sequence[str] = (),
    renames: Renames | None = None,
    on_event: OnEvent = ignore,
) -> Iterator[tuple[TensorPair, MicroBatchPair, Measured]]:
    """The pairs that `compare_runs` of the same arguments would look at, and what one look at each finds: those worth
    keeping (`kept_figures`) whose names are of one `part` (from 0) of so many. Nothing is judged.

    What cannot be read, or cannot face its counterpart, is left out: whoever judges says why.
    """
    number, parts = part

    def is_mine(pair: TensorPair) -> bool:
        return part_of(pair.name, parts) == number and is_worth_keeping(pair)

    result = Comparison(a, b)
    work = _Work(result, records_a, records_b, names, renames, lambda row: None, is_forgotten=True,
                 in_groups=renames is None)  # fmt: skip
    look = LookAhead(tolerances, bitwise=exact, is_asked=is_mine)
    for done, (pair, micro_pair) in enumerate(work.in_order(look.over, lambda: None)):
        if not is_mine(pair):
            continue
        on_event(Progress(done, work.total, pair.name))
        with suppress(ShapesDifferError, DumpError):
            yield pair, micro_pair, look.measured(pair, micro_pair)


def _judged(judge: Judge, pair: TensorPair, micro_pair: MicroBatchPair) -> TensorVerdict | None:
    if pair.a is None or pair.b is None:
        why = why_missing(pair, micro_pair)
        return None if why is None else TensorVerdict(pair.name, Verdict.MISSING, why, a=pair.a, b=pair.b)
    if micro_pair.partial and not faces(pair.a[1], pair.b[1], micro_pair) and not lays_out(pair.name, micro_pair):
        if pair.a[0].key.stage in OF_ALL_SAMPLES and pair.a[0].key.rank == pair.b[0].key.rank:
            row = judge.judge(pair, micro_pair)  # of all ranks' samples, if it was summed over them
            if not row.verdict.diverges:
                return row
        why = CUT_OTHERWISE[0]
        return TensorVerdict(pair.name, Verdict.SAME, why, a=pair.a, b=pair.b, skipped=why)
    is_logged = pair.a[0].key.stage in _LOGGED and micro_pair.together is None
    if is_logged and (figures := same_numbers(pair.a[1], pair.b[1])) is not None:
        return judge.equal(pair, figures)  # nearly all of two logs: what follows takes twenty times as long
    if (sent := missent(pair, micro_pair)) is not None:
        return _of_missent(pair, micro_pair, sent)
    ordered = texts_in_order(pair, micro_pair)
    row = judge.judge(ordered, micro_pair)
    if row.skipped is not None:
        return row
    if ordered is not pair:  # texts in a's order; else what was judged may be of another rank
        row.a, row.b = pair.a, pair.b
    if row.verdict is Verdict.SHAPE:
        look_at_the_overlap(row, micro_pair)
    if is_as_its_loss(row, micro_pair):
        row.verdict, row.ranks, row.context = Verdict.CLOSE, None, None  # no tolerance is asked
        row.reason = f"b's times {micro_pair.averaged:.4g} for the ranks, as the loss that it is of"
    name_samples(row, ordered, micro_pair)
    note_correlation(row, micro_pair)
    return row


def _of_missent(pair: TensorPair, micro_pair: MicroBatchPair, sent: Missent) -> TensorVerdict:
    """The row of an expert that computed another number of tokens: rows that do not face each other one by one."""
    if sent.lost is None and not sent.is_told:
        # Noise may send a token elsewhere where two experts are next to alike; without the router nobody knows.
        why = f"{sent.sentence}, and the router that sent them was not recorded"
        return TensorVerdict(pair.name, Verdict.SAME, why, a=pair.a, b=pair.b, skipped=why)
    row = TensorVerdict(pair.name, Verdict.SHAPE, sent.sentence, a=pair.a, b=pair.b)
    together = micro_pair.together
    if together is not None and sent.ranks:
        fault = Fault(
            "other tokens" if sent.is_told else "tokens lost", sent.ranks, f"{sent.sentence} ({whose(sent.ranks)})"
        )
        row.ranks = Ranked(together.which, "one", sent.ranks, parted=sent.ranks, fault=fault)
    return row


class _CutOtherwise(Struct):
    """Rows of what a micro-batch alone says, which another cut of the batch has no counterpart for: notes where the
    gradients of their step, which follow from all of it, were compared; else they have no verdict.
    """

    rows: list[TensorVerdict] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _trained: set[Any] = field(default_factory=set)

    def take(self, row: TensorVerdict) -> None:
        is_of_a_weight = row.name.startswith("grad.") and row.key.stage == "gradient"
        if is_of_a_weight and row.skipped is None and (row.figures is not None or row.by_digest):
            self._trained.add((row.key.step, row.key.role))

    def left(self, contradicted: set[Any]) -> list[TensorVerdict]:
        """Those that stay without a verdict; the others are noted."""
        kept: list[TensorVerdict] = []
        said: Counter[tuple[str, str]] = Counter()
        for row in self.rows:
            at = row.key.step, row.key.role
            if at in self._trained and not (row.name == "loss" and at in contradicted):
                said[row.name, str(row.skipped)] += 1
            else:
                kept.append(row)
        self.notes += [
            f"{name} is not compared ({number} times): {why}; the gradients of these steps, which follow from it, are"
            for (name, why), number in said.items()
        ]
        return kept


class _Notes:
    """What is said of the pairs of a step, in the order in which it is said of all of them at once."""

    def __init__(self) -> None:
        self.first: list[tuple[MicroBatchPair, str]] = []
        self.laid_out: list[tuple[MicroBatchPair, str]] = []
        self.last: list[tuple[MicroBatchPair, str]] = []

    def in_order(self, micro_pairs: list[MicroBatchPair]) -> list[str]:
        """micro_pairs: those of the step in their order, where they were taken in another; else nothing."""
        places = {id(micro_pair): place for place, micro_pair in enumerate(micro_pairs)}
        parts = (self.first, self.laid_out, self.last)
        return [note for part in parts for _, note in sorted(part, key=lambda one: places.get(id(one[0]), 0))]


class _Work:
    """Every pair with its micro-batches, in order of computation; a step is opened when the one before it is done."""

    def __init__(
        self,
        result: Comparison,
        records_a: list[Record],
        records_b: list[Record],
        names: Sequence[str],
        renames: Renames | None,
        add: Callable[[TensorVerdict], None],
        *,
        is_forgotten: bool,
        in_groups: bool,
        as_one: bool = False,
    ) -> None:
        self._add, self._is_forgotten, self._in_groups, self._as_one = add, is_forgotten, in_groups, as_one
        #: Where the pair that was given last stands among those of its step, where they are not given in this order:
        #: the step's number, and what sorts its pairs.
        self.order: tuple[int, Any] | None = None
        self._step = 0
        self._is_done = False
        #: Steps and roles of whose losses one run's log-probabilities tell what they are of, and the other's do not.
        self.contradicted: set[Any] = set()
        self._result, self._names, self._renames = result, tuple(names), renames
        steps, said = called_alike(records_a, records_b)
        if said:
            result.notes.append(said)
        self._micro_pairs, self._ambiguous = pair_micro_batches(records_a, records_b, steps)
        #: Which run returned attention's weights alone -> how many tensors of them.
        self._weights_alone: Counter[str] = Counter()
        #: Ranks of a that face those of the same number in b.
        self._faced: set[int | None] = set()
        #: Where the step's experts are; which run has tensors of experts that are elsewhere in the other -> how many.
        self._experts = ExpertsOfRanks([])
        self._experts_elsewhere: Counter[str] = Counter()
        #: How many pairs there are; None until the last step is open.
        self.total: int | None = None
        self._named: set[str] = set()
        self._any_name = False

    def in_order(self, ahead: Callable[[list[Entry]], Iterator[Entry]], forget: Callable[[], None]) -> Iterator[Entry]:
        """Every pair; `ahead` gets the pairs of a step and gives them back, the next ones already being read.

        forget: called when no pair of a micro-batch that was given before comes any more.
        """
        steps: dict[int | None, list[MicroBatchPair]] = {}
        for micro_pair in self._micro_pairs:
            steps.setdefault(micro_pair.key.step, []).append(micro_pair)
        before = 0
        for number, micro_pairs in enumerate(steps.values()):
            groups = self._opened(micro_pairs)
            self._step, notes = number, _Notes()
            for place, group in enumerate(groups):
                keys, entries, is_worth_reading_ahead = self._of_group(group, notes, are_all=len(groups) == 1)
                before += len(entries)
                is_last = number == len(steps) - 1 and place == len(groups) - 1
                self.total = before if is_last else None
                if place == len(groups) - 1:
                    self._result.notes += notes.in_order(micro_pairs if len(groups) > 1 else [])
                coming = ahead(entries) if is_worth_reading_ahead else iter(entries)
                if len(groups) == 1:
                    yield from coming
                else:
                    for key, entry in zip(keys, coming, strict=True):
                        self.order = number, key
                        yield entry
                del keys, entries, coming
                if self._is_forgotten:
                    forget()
                    for micro_pair in group:
                        micro_pair.release()
            self.order = None
        self._is_done = True

    def is_behind(self, row: TensorVerdict) -> bool:
        """Whether every pair that comes is behind this row in the order of computation."""
        return self._is_done or row.order is None or self._step > row.order[0]

    def _opened(self, micro_pairs: list[MicroBatchPair]) -> list[list[MicroBatchPair]]:
        """The pairs of a step in the groups that are compared one after the other, whose sides were loaded once."""
        opening = StepOpening()
        for micro_pair in micro_pairs:
            if self._in_groups:
                opening.make_room()
            for side in (micro_pair.a, micro_pair.b):
                side.load()
                self._result.problems += side.problems
                self._result.records_unreadable += side.unreadable
            if self._in_groups:
                opening.take(micro_pair)
        return opening.groups() if self._in_groups else [micro_pairs]

    def _of_group(
        self, micro_pairs: list[MicroBatchPair], notes: _Notes, *, are_all: bool
    ) -> tuple[Sequence[Any], list[Entry], bool]:
        """Of a step (`are_all`) or some of its ranks: what sorts the pairs, where that is not all of them; the pairs;
        and whether any of them lies in a file.
        """
        result = self._result
        for micro_pair in micro_pairs:
            micro_pair.a.load()
            micro_pair.b.load()
        result.notes += lay_alike(micro_pairs)
        _call_alike(micro_pairs)
        of_steps: list[MicroBatchPair] = []
        if len(micro_pairs) > 1 or self._as_one:  # else nothing can be cut or shared otherwise: a tenth of the imports
            from replay_core.compare.pairing import step_losses, step_numbers
            from replay_core.compare.pairing.together import put_together

            of_steps, contradicted = step_losses.of_steps(micro_pairs)
            of_steps += step_numbers.of_steps(micro_pairs, contradicted)
            self.contradicted |= contradicted
            micro_pairs = put_together(micro_pairs, as_one=self._as_one)
        result.together += [one.together for one in of_steps if one.together is not None]
        result.together += [one.together for one in micro_pairs if one.together is not None]
        result.problems += [what for one in micro_pairs if one.together is not None for what in one.together.problems]
        if self._renames is None and all(map(_is_of_numbers, micro_pairs)):
            return (), self._of_numbers(micro_pairs), False
        for micro_pair in micro_pairs:
            if micro_pair.together is None and micro_pair.a.is_engine != micro_pair.b.is_engine:
                (micro_pair.a if micro_pair.a.is_engine else micro_pair.b).as_trainer()
        if self._renames is not None:
            of_a = [(name, ref) for micro_pair in micro_pairs for (name, _), (_, ref) in micro_pair.a.tensors.items()]
            names_of_a = {ref.name: name for name, ref in of_a} | {name: name for name, _ in of_a}
            for micro_pair in micro_pairs:
                micro_pair.b.tensors = self._renames.applied(micro_pair.b.tensors, names_of_a)
        untold = {(one.key.step, one.key.role): one.untold for one in micro_pairs if one.untold is not None}
        in_both = _names_of_both(micro_pairs) if untold else {}
        own_samples = bool(untold) and _have_own_samples(micro_pairs)
        again, alone = by_samples(micro_pairs)
        for micro_pair in again if untold else ():
            if micro_pair.together is None:
                of_step = micro_pair.key.step, micro_pair.key.role
                micro_pair.untold, micro_pair.in_both = untold.get(of_step), in_both.get(of_step)
                micro_pair.has_own_samples = own_samples and not alone
        averaged = {(one.key.step, one.key.role): one.averaged for one in of_steps if one.averaged != 1.0}
        for micro_pair in again:
            micro_pair.averaged = averaged.get((micro_pair.key.step, micro_pair.key.role), 1.0)
        self._count(again)
        again += of_steps
        entries: list[Entry] = []
        once: set[tuple[int, str]] = set()
        only_layout: Counter[str] = Counter()
        places = places_of(again)
        self._experts = ExpertsOfRanks(again)
        for micro_pair in again:
            micro_pair.shared_experts = self._experts.shared_layers(micro_pair)
        self._faced = {
            one.key.rank
            for one in again
            if one.b.records and one.key.rank == one.b.records[0].key.rank and one.a.records
        }
        for micro_pair in again:
            entries += self._of_micro_pair(micro_pair, once, only_layout, notes)
        in_order = partial(_order, places=places)
        entries.sort(key=in_order)
        for micro_pair in again:
            notes.last += [(micro_pair, note) for note in micro_pair.notes]
            micro_pair.notes = []
        wheres = {one.where: one for one in reversed(again)} if only_layout else {}
        alike = "tensors only lay the same samples out differently; tokens are compared one by one"
        notes.laid_out += [(wheres[where], f"{where}: {number} {alike}") for where, number in only_layout.items()]
        self._lone(alone)
        return [] if are_all else list(map(in_order, entries)), entries, True

    def _of_numbers(self, micro_pairs: list[MicroBatchPair]) -> list[Entry]:
        """The pairs of a step that both logged under the same names, or one alone: no sample, no module."""
        entries: list[Entry] = []
        for micro_pair in micro_pairs:
            self._result.records_paired += bool(micro_pair.a.records and micro_pair.b.records)
            self._result.records_a_only += not micro_pair.b.records
            self._result.records_b_only += not micro_pair.a.records
            of_a, of_b = micro_pair.a.tensors, micro_pair.b.tensors
            for key in of_a or of_b:
                pair = TensorPair(key[0], of_a.get(key), of_b.get(key))
                if self._names and not self._is_asked(pair):
                    continue
                if naming.meaning(key[0]).kind == "note":
                    self._result.notes_not_compared += 1
                else:
                    entries.append((pair, micro_pair))
        if len(entries) > 1:
            entries.sort(key=_order)
        return entries

    def _count(self, micro_pairs: list[MicroBatchPair]) -> None:
        """Records paired and one-sided, each once; a record that could face several and now does is no problem."""
        paired: dict[int, Side] = {}
        for micro_pair in micro_pairs:
            if micro_pair.a.records and micro_pair.b.records:
                paired |= {id(micro_pair.a): micro_pair.a, id(micro_pair.b): micro_pair.b}
                self._result.records_paired += 1
        sides = {
            id(side): (side, which) for f in micro_pairs for which, side in (("a", f.a), ("b", f.b)) if side.records
        }
        for key, (_, which) in sides.items():
            if key not in paired:
                self._result.records_a_only += which == "a"
                self._result.records_b_only += which == "b"
        if not self._ambiguous or not paired:
            return
        found = {str(record.path) for side in paired.values() for record in side.records}
        self._ambiguous = [problem for problem in self._ambiguous if problem.where not in found]

    def _of_micro_pair(
        self,
        micro_pair: MicroBatchPair,
        once: set[tuple[int, str]],
        only_layout: Counter[str],
        notes: _Notes,
    ) -> Iterator[Entry]:
        result = self._result
        pairs = list(pair_tensors(micro_pair))
        micro_pair.alone = {id(pair.one[1]) for pair in pairs if pair.a is None or pair.b is None}
        micro_pair.rerouted = rerouted(pairs, micro_pair)
        notes.first += [(micro_pair, note) for note in said(micro_pair.rerouted)]
        for pair in pairs:
            record, ref = pair.one
            if not self._is_asked(pair):
                continue
            if micro_pair.partial and self._faces_its_own(pair):
                continue
            if micro_pair.partial and (pair.a is None or pair.b is None or not faces(pair.a[1], pair.b[1], micro_pair)):
                # Its side stands in several pairs: said once.
                if (id(record), ref.name) in once:
                    continue
                once.add((id(record), ref.name))
            if naming.meaning(pair.name).kind == "note":
                result.notes_not_compared += 1
            elif (sent := missent(pair, micro_pair)) is not None and sent.noise is not None:
                if sent.noise not in (note for _, note in notes.first):
                    notes.first.append((micro_pair, sent.noise))
            elif sent is None and is_layout_only(pair, micro_pair):
                only_layout[micro_pair.where] += 1
            elif is_tied(pair, micro_pair):
                tied = f"{pair.name} is the embedding again, which the other side stores once (tied weights)"
                notes.first.append((micro_pair, tied))
            elif pair.name == "clipped_grad_norm" and (clip := clipped_alone(micro_pair)) is not None:
                by = f"{clip[0]}'s gradients are clipped as they are recorded, by {clip[1]:.4g} and its own function"
                notes.first.append((micro_pair, by))
            elif are_places(pair, micro_pair):
                which = "a" if pair.b is None else "b"
                as_none = f"{pair.name}, which {which} alone has, counts the places of tokens, as where none are given"
                notes.first.append((micro_pair, as_none))
            elif is_attentions_weights(pair, micro_pair):
                self._weights_alone["a" if pair.b is None else "b"] += 1
            elif self._experts.are_elsewhere(pair, micro_pair):
                self._experts_elsewhere["a" if pair.b is None else "b"] += 1
            else:
                yield pair, micro_pair

    def _faces_its_own(self, pair: TensorPair) -> bool:
        """Whether what is of all samples would face another rank's, and faces that of its own number besides."""
        if pair.a is None or pair.b is None or pair.a[0].key.stage not in OF_ALL_SAMPLES:
            return False
        return pair.a[0].key.rank != pair.b[0].key.rank and pair.a[0].key.rank in self._faced

    def _is_asked(self, pair: TensorPair) -> bool:
        if not self._names:
            return True
        called = {pair.name, *(side[1].name for side in (pair.a, pair.b) if side is not None)}
        matched = any(fnmatchcase(name, pattern) for name in called for pattern in self._names)
        self._any_name |= matched
        if len(self._named) < 200:
            self._named.add(pair.name)
        return matched

    def _lone(self, alone: list[Alone]) -> None:
        for one in alone:
            record = one.batch.held.record
            ref = one.batch.held.ids or record.tensors()[0]
            of = f"{len(one.samples)} of its {one.batch.count} samples are"
            numbers = ", ".join(map(str, one.samples[:8])) + (", ..." if len(one.samples) > 8 else "")
            name = ref.canonical or ref.name
            self._result.samples_alone += len(one.samples)
            side = (record, ref)
            a, b = (side, None) if one.which == "a" else (None, side)
            reason = f"{of} in no record of the other run: sample {numbers}"
            self._add(TensorVerdict(name, Verdict.MISSING, reason, a=a, b=b))

    def finish(self) -> None:
        """Say what could face several and faced none; refuse names that nothing has."""
        self._result.problems += self._ambiguous
        self._result.notes += [
            f"{number} tensors of attention weights, which {which} alone returned beside the output of their modules, "
            "are not compared"
            for which, number in self._weights_alone.items()
        ]
        self._result.notes += [
            f"{number} tensors of experts, which {which} has on several ranks and the other run on one each, are not "
            "compared: rows are of other ranks' tokens, weights and gradients are copies of those that are compared"
            for which, number in self._experts_elsewhere.items()
        ]
        self._result.notes = list(dict.fromkeys(self._result.notes))
        if self._names and not self._any_name:
            near = difflib.get_close_matches(self._names[0], self._named, 6, 0.3) or sorted(self._named)[:6]
            raise SelectionError(
                f"neither has a tensor of the name {', '.join(self._names)}",
                file=f"{self._result.a.path} and {self._result.b.path}",
                expected=", ".join(near),
                found=", ".join(self._names),
                hint=f"rldbg show {self._result.a.path}",
            )
        if self._renames is not None:
            self._result.notes += self._renames.unused()


def _call_alike(micro_pairs: list[MicroBatchPair]) -> None:
    """Call what an engine's ranks hold of a step what a trainer calls it, where the other run of the step is none.

    Before ranks are put together: which tensor faces which, and what is each rank's slice of it, is told by names.
    """
    numbered = [one for one in micro_pairs if not _is_of_numbers(one)]
    sides = [
        (which, (one.key.step, one.key.role), one.key.micro, side)
        for one in numbered for which, side in (("a", one.a), ("b", one.b)) if side.records
    ]  # fmt: skip
    marked = {(which, step, micro) for which, step, micro, side in sides if side.is_engine}
    engines = {(which, step) for which, step, _ in marked}
    told: set[int] = set()
    for which, step, micro, side in sides:
        faces_trainer = ("b" if which == "a" else "a", step) not in engines
        # A later stage of a pipeline may have none of the modules that tell an engine.
        if faces_trainer and (which, step, micro) in marked and id(side) not in told:
            told.add(id(side))
            side.as_trainer()


def _have_own_samples(micro_pairs: list[MicroBatchPair]) -> bool:
    """Whether no sample of either run is in two of its records: none is cut over ranks, each computes its own."""
    for mains in ([one.a.main for one in micro_pairs], [one.b.main for one in micro_pairs]):
        held = [digest for batch in mains if batch is not None for digest in batch.digests or ()]
        if not held or len(set(held)) < len(held):
            return False
    return True


def _names_of_both(micro_pairs: list[MicroBatchPair]) -> dict[tuple[int | None, str | None], frozenset[str]]:
    """By step and role, the names of the tensors that both runs have there, each on some rank."""
    of_both: dict[tuple[int | None, str | None], tuple[set[str], set[str]]] = {}
    for one in micro_pairs:
        for names, side in zip(
            of_both.setdefault((one.key.step, one.key.role), (set(), set())), (one.a, one.b), strict=True
        ):
            names |= {name for name, _ in side.tensors}
    return {of_step: frozenset(own & others) for of_step, (own, others) in of_both.items()}


def _is_of_numbers(micro_pair: MicroBatchPair) -> bool:
    """Whether both sides are one record of the same numbers by name, and nothing else; or one side is, and is alone."""
    a, b = micro_pair.a, micro_pair.b
    records = [*a.records, *b.records]
    if len(a.records) > 1 or len(b.records) > 1 or (len(records) == 2 and a.tensors.keys() != b.tensors.keys()):
        return False
    return all(one.key.stage in _LOGGED and bool(one.is_flat) for one in records)


def _order(entry: Entry, places: Places = NO_PLACES) -> tuple[Any, ...]:
    pair, micro_pair = entry
    record, ref = pair.one
    return order_of(micro_pair.key if pair.a is None else record.key, pair.name, ref.order, places)


def _element(row: TensorVerdict) -> tuple[Any, ...]:
    return row.name, row.key, row.raw_a, row.raw_b


def _nothing(
    result: Comparison, records_a: list[Record], records_b: list[Record], unused: list[str]
) -> NothingComparableError:
    if result.tally.compared:
        count = result.tally.compared
        them = "the tensor in common is" if count == 1 else f"all {count:,} tensors in common are"
        return NothingComparableError(
            f"{them} empty, or padding alone: not one value was compared",
            file=f"{result.a.path} and {result.b.path}",
            expected="at least one value",
            hint=f"rldbg ls {result.b.path}",
        )
    skipped = result.tally.first_skipped
    said = [*(problem.what for problem in result.problems[:1]), *([skipped] if skipped else []), *unused[:2]]
    return NothingComparableError(
        "the two have no tensor in common that could be compared",
        file=f"{result.a.path} and {result.b.path}",
        expected="at least one tensor of the same name under the same step, rank and micro-batch",
        found=f"{_names(records_a)} against {_names(records_b)}" + "".join(f"; {what}" for what in said),
        hint=f"rldbg ls {result.b.path}",
    )


def _names(records: list[Record]) -> str:
    keys = ", ".join(str(record.key) for record in records[:3])
    return f"{len(records)} records ({keys}{', ...' if len(records) > 3 else ''})"
