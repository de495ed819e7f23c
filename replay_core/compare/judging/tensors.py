"""Judges tensor pairs one by one, in order of computation: measures, asks the verdict, says where to look."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct

from replay_core import naming, pages
from replay_core.compare.judging import copies, digests, experts_turned, limits
from replay_core.compare.judging.judgement import judge, of_nans
from replay_core.compare.judging.kept_figures import KeptFigures, is_worth_keeping
from replay_core.compare.judging.locating import locate
from replay_core.compare.judging.measuring import LookAhead, Measured
from replay_core.compare.judging.rules import keep
from replay_core.compare.judging.tolerance import DEFAULT, Tolerances
from replay_core.compare.judging.verdict import Context, Decision, Judgement, Verdict
from replay_core.compare.pairing.align import MicroBatchPair, ShapesDifferError, TensorPair, lays_out
from replay_core.dtypes import FAMILIES, coarsest, family, finest, named
from replay_core.errors import DumpError
from replay_core.measure.figures import PairFigures, equal_figures
from replay_core.records import Record, RecordKey, Run, TensorRef

if TYPE_CHECKING:
    from replay_core.compare.judging.algebra import Ranked
    from replay_core.compare.judging.of_ranks import OfRanks

#: Projections that a block's norm feeds, in models that norm first.
_FED_BY_A_NORM = ("q_proj", "k_proj", "v_proj", "qkv_proj", "gate_proj", "up_proj", "gate_up_proj")
EQUAL = "bitwise equal"
#: Modules that look ids up.
_EMBEDDINGS = ("emb", "wte")


class TensorVerdict(Struct):
    """One row of a comparison: a pair, its verdict, and the element to look at.

    `raw_a` and `raw_b` index either tensor, `token` is the (sample, position) where the layout tells.
    """

    name: str
    verdict: Verdict
    reason: str
    suspect: bool = False
    #: The rule that decided; None where nothing had to be weighed.
    rule: Decision | None = None
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
    #: What the verdict rests on beside the figures; None where no tolerance could change it.
    context: Context | None = None
    #: Why the pair was not compared; the verdict is then meaningless and counted as skipped.
    skipped: str | None = None
    #: The file whose bytes could not be read when the pair was compared.
    damaged: str | None = None
    #: A side kept a digest and no values: what is said of the pair rests on that alone.
    by_digest: bool = False
    #: What the ranks of one side hold of it, where they face one process of the other.
    ranks: Ranked | None = None
    #: Where it stands among the rows of its step, where these do not come in order: the step's number, and a sort key.
    order: tuple[int, Any] | None = None

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


def say(row: TensorVerdict, found: Judgement) -> None:
    """Let a row be what was judged."""
    row.verdict, row.reason, row.suspect, row.rule = found.verdict, found.reason, found.suspect, found.rule


class Judge:
    """Judges the pairs of two runs. Pairs must come in order of computation: later ones lean on earlier verdicts."""

    def __init__(
        self,
        a: Run,
        b: Run,
        *,
        bitwise_only: bool = False,
        tolerances: Tolerances = DEFAULT,
        known: KeptFigures | None = None,
    ) -> None:
        """known: figures that another process measured; pairs that it may hold are not read ahead."""
        self._said = [dtype for dtype in (_computed_dtype(a), _computed_dtype(b)) if dtype]
        self._known_fp32 = self._said == ["float32", "float32"]
        self._bitwise_only = bitwise_only
        self._tolerances = tolerances
        self._known = known
        #: Another one, for pairs out of their turn: what comes in turn leans on none of these.
        self._beside = partial(Judge, a, b, tolerances=tolerances, known=known)
        self._look = LookAhead(
            tolerances,
            bitwise=bitwise_only,
            is_asked=None if known is None else lambda pair: not is_worth_keeping(pair),
        )
        #: Whether every recorded input of a module was bitwise equal so far.
        self._inputs_same: dict[tuple[Place, str], bool] = {}
        #: The half precision that module tensors of a micro-batch show, whatever the runs say of themselves.
        self._shown: dict[Place, str] = {}
        #: And the one that modules of any micro-batch of a step were computed in by both runs.
        self._of_both: dict[Place, str] = {}
        #: Whether what the last norm of a block returned was bitwise equal.
        self._norm_same: dict[tuple[Place, str], bool] = {}
        #: How far what was CLOSE in a micro-batch is off.
        self._noise: dict[Place, float] = defaultdict(float)
        self._mean_error: dict[Place, float] = defaultdict(float)
        #: Of a step, by name: of the log probabilities of each micro-batch the squared difference and the tokens.
        self._errors_of_step: dict[Place, dict[str, list[tuple[float, int]]]] = defaultdict(lambda: defaultdict(list))
        #: And the furthest in any micro-batch of a step, all of which its gradients are made of.
        self._noise_of_step: dict[Place, float] = defaultdict(float)
        #: Made where steps are spread over ranks: what it needs is a fifth of what a comparison imports.
        self._ranks: OfRanks | None = None
        #: Micro-batches whose log probabilities are CLOSE and off by more than fp32 leaves them.
        self._past_fp32: set[Place] = set()

    @property
    def notes(self) -> list[str]:
        """Causes among ranks that were not looked for to their end."""
        return self._ranks.notes if self._ranks is not None else []

    def finish(self) -> None:
        """Look for what only all tensors of the last step tell."""
        if self._ranks is not None:
            self._ranks.finish()

    def ahead(self, work: Sequence[tuple[TensorPair, MicroBatchPair]]) -> Iterator[tuple[TensorPair, MicroBatchPair]]:
        """The pairs of a list in its order, the next ones being read while one is judged."""
        return self._look.over(work)

    def forget(self) -> None:
        """Forget what later pairs of the same micro-batches would lean on: there are none."""
        for known in (
            self._inputs_same, self._shown, self._norm_same, self._noise, self._noise_of_step, self._mean_error,
            self._past_fp32, self._errors_of_step,
        ):  # fmt: skip
            known.clear()

    def judge(self, pair: TensorPair, micro_pair: MicroBatchPair) -> TensorVerdict:
        """The row of a pair that both sides have."""
        assert pair.a is not None
        assert pair.b is not None
        row = self._both(pair, micro_pair, pair.a[1], pair.b[1])
        if row.verdict is Verdict.DIFF and (said := self._in_another_order(row, pair, micro_pair)) is not None:
            row.skipped = said
        elif micro_pair.together is not None:
            if self._ranks is None:
                from replay_core.compare.judging.of_ranks import OfRanks

                self._ranks = OfRanks()
            self._ranks.look(row, pair, micro_pair, self._copy)
        if row.name.endswith("norm.output"):
            self._norm_same[row.place, _parent(naming.module_of(row.name))] = row.verdict is Verdict.SAME
        if naming.is_input(row.name) and naming.meaning(row.name).kind != "mask":
            self._note_input(row)
        return row

    def _in_another_order(self, row: TensorVerdict, pair: TensorPair, micro_pair: MicroBatchPair) -> str | None:
        """Why rows of experts are not compared one by one: they stand in another order, and what follows agrees."""
        if row.context is None or row.figures is None or self._bitwise_only:
            return None
        moved = experts_turned.moved_rows(pair, row.context)
        if moved is None:
            return None
        following, beside = experts_turned.what_follows(pair, micro_pair), self._beside()
        for one in following:
            next_row = beside._copy(one, micro_pair)
            if next_row.verdict.diverges or next_row.skipped is not None or next_row.figures is None:
                return None
            if experts_turned.is_passed_on(next_row.figures.total.rel_l2, row.figures.total.rel_l2):
                return None
        if not following:
            return None
        names = " and ".join(one.name for one in following[:2])
        return (
            f"its rows are the other run's in another order ({moved:,} elsewhere), each to rounding, and which token a "
            f"row is of was not recorded; what is made of them ({names}) agrees"
        )

    def _copy(self, pair: TensorPair, micro_pair: MicroBatchPair) -> TensorVerdict:
        """The row of what another rank holds."""
        assert pair.a is not None
        assert pair.b is not None
        return self._both(pair, micro_pair, pair.a[1], pair.b[1])

    def equal(self, pair: TensorPair, figures: PairFigures) -> TensorVerdict:
        """The row of a pair of numbers that are known to be the same, and that nothing is computed from."""
        reason = f"equal in all 1 elements compared{of_nans(figures)}" if figures.nan_a else EQUAL
        return TensorVerdict(pair.name, Verdict.SAME, reason, a=pair.a, b=pair.b, figures=figures)

    def _note_input(self, row: TensorVerdict) -> None:
        module, is_same = (row.place, naming.module_of(row.name)), row.verdict is Verdict.SAME
        # Of ids and positions a whole model is computed, layer by layer: an embedding alone has only its own error.
        is_lookup = any(word in module[1] for word in _EMBEDDINGS)
        if not is_same or is_lookup or naming.meaning(row.name).kind not in ("ids", "positions"):
            self._inputs_same[module] = self._inputs_same.get(module, True) and is_same

    def _both(self, pair: TensorPair, micro_pair: MicroBatchPair, a: TensorRef, b: TensorRef) -> TensorVerdict:
        row = TensorVerdict(pair.name, Verdict.SAME, "", a=pair.a, b=pair.b)
        by_digest = digests.are_comparable(a, b)
        for ref in (a, b):
            if not ref.is_readable and not by_digest:
                row.skipped = digests.why_not(a, b) or getattr(ref.source, "why", "cannot be read")
                return row
        if a.is_text or b.is_text:
            _judge_text(row, a, b)
            return row
        if by_digest and not micro_pair.in_order(a, b):
            row.skipped = digests.OTHER_ORDER
            return row
        try:
            if by_digest:
                digests.judge(row, a, b)
            elif not self._bitwise_only and lays_out(pair.name, micro_pair):
                row.verdict, row.reason, row.figures = _judge_layout(a, b, micro_pair)
            else:
                self._numbers(row, self._measured(pair, micro_pair), micro_pair)
            if row.verdict.diverges and not by_digest and (said := copies.explained(row.name, a, b)) is not None:
                row.reason = f"{row.reason}; {said}"
            if (parted := copies.parted(a, b)) is not None and not row.verdict.diverges:
                # No tolerance makes one value of two.
                row.verdict, row.reason, row.context = Verdict.DIFF, f"{parted}; the first: {row.reason}", None
                row.suspect = False
        except ShapesDifferError as error:
            row.verdict, row.reason = Verdict.SHAPE, str(error)
        except DumpError as error:
            row.skipped, row.damaged = error.message, error.file or str(row.a[0].path if row.a else "")
        return row

    def _measured(self, pair: TensorPair, micro_pair: MicroBatchPair) -> Measured:
        known = None if self._known is None else self._known.get(pair, micro_pair)
        return self._look.measured(pair, micro_pair) if known is None else known

    def _numbers(self, row: TensorVerdict, found: Measured, micro_pair: MicroBatchPair) -> None:
        assert row.a is not None
        assert row.b is not None
        a, b = row.a[1], row.b[1]
        self._note_precision(row, found.dtypes)
        if found.figures is None:
            row.figures = equal_figures(a.numel, found.nans)
            row.reason = EQUAL + of_nans(row.figures)
            return
        row.figures, row.unmasked = found.figures, found.unmasked
        shown = self._shown.get(row.place)
        if shown is None and row.place[1] is None and naming.meaning(row.name).kind == "gradient":
            shown = self._of_both.get(_step_of(row.place))  # of all micro-batches, which made it
        is_moved = shown is None and (row.key.step or 0) > 0 and naming.meaning(row.name).kind == "activation"
        if is_moved:
            # What weights put out as they are (an embedding), in a step whose gradients before it half precision made.
            shown = _half_of_both(micro_pair)
        if shown is None and row.name.endswith("entropy") and row.place in self._past_fp32:
            shown = "bfloat16"  # of the same logits as the log probabilities, which had the benefit of the doubt
        computed = self._said or ([shown] if shown else [])
        mixed = found.rounded is not None and not self._is_sum_of_halves(row, found.dtypes, micro_pair)
        # In half precision most tokens may be off by next to nothing as well, though by something, and none by far.
        is_half = any(coarsest(dtype) in ("bfloat16", "float16") for dtype in computed)
        is_noise = 2 * found.figures.mismatched > found.figures.total.count and (
            found.figures.max_abs <= limits.LOGPROB_STEP_OF_HALF
        )
        row.context = Context(
            naming.meaning(row.name),
            finest(*found.dtypes) if mixed else coarsest(*found.dtypes, *computed),
            exact=found.exact,
            local=self._is_local(row) or (is_moved and shown is not None),
            noise=self._noise_before(row),
            mean_error=self._mean_error_before(row),
            known_fp32=self._known_fp32 or mixed or (found.shows_fp32 and not (is_half and is_noise)),
            scalar=a.numel == 1,
            bitwise_only=self._bitwise_only,
            worst_sample=found.worst_sample,
            name=row.name,
            rounded=found.rounded if mixed else None,
            shift=found.shift,
        )
        judgement = judge(found.figures, found.unmasked, row.context, self._tolerances)
        say(row, judgement)
        # What a person accepts says nothing of noise: that is read off the table, and judging again reads the same.
        by_table = judgement if self._tolerances == DEFAULT else judge(found.figures, found.unmasked, row.context)
        if by_table.verdict is Verdict.CLOSE:
            self._note_noise(row, is_suspect=by_table.suspect)
        notes = [found.rows and found.rows.note, *found.notes]
        if a.dtype != b.dtype:
            notes.append(f"dtype {a.dtype} against {b.dtype}, compared in the wider")
        if shown and not self._said and coarsest(*found.dtypes) != coarsest(*found.dtypes, shown):
            where = "modules" if self._shown.get(row.place) else "log probabilities"
            notes.append(f"judged as {shown}: the {where} it was computed from show that precision")
        row.note = "; ".join(note for note in notes if note) or None
        if found.rows is None:
            if found.figures.first is not None:
                row.raw_a = row.raw_b = ()
                row.value_a, row.value_b = pages.number_of(a), pages.number_of(b)
            return
        locate(row, found.rows, judgement.row_limit)
        for figures in (found.figures, found.unmasked):
            if figures is not None:
                keep(figures, DEFAULT.of(row.context))

    def _note_noise(self, row: TensorVerdict, *, is_suspect: bool) -> None:
        """What was CLOSE on the way is noise that later tensors carry on.

        What is suspect is noise where it grew out of what was noise before it, and else may be the fault itself.
        """
        assert row.figures is not None
        kind = naming.meaning(row.name).kind
        if kind not in ("activation", "logprob") or not row.figures.total.count:
            return
        rms = row.figures.total.rms_d
        if kind == "logprob" and row.figures.max_abs > limits.LOGPROB_NOISE_FP32:
            self._past_fp32.add(row.place)
        noise, before = rms if kind == "logprob" else row.figures.total.rel_l2, self._noise[row.place]
        if is_suspect and noise > limits.NOISE_GROWTH * before:
            return
        if kind == "logprob":
            total = row.figures.total
            error = rms / math.sqrt(total.count)
            self._mean_error[row.place] = max(self._mean_error[row.place], error)
            self._errors_of_step[_step_of(row.place)][row.name].append((total.d2, total.count))
        self._noise[row.place] = max(before, noise)
        of_step = _step_of(row.place)
        self._noise_of_step[of_step] = max(self._noise_of_step[of_step], noise)

    def _noise_before(self, row: TensorVerdict) -> float:
        """How far what the tensor was computed from is off: in its micro-batch, or, of a gradient that belongs to none,
        in that micro-batch of its step in which it is furthest.
        """
        is_of_step = row.key.micro is None and naming.meaning(row.name).kind == "gradient"
        return self._noise_of_step[row.place] if is_of_step else self._noise[row.place]

    def _mean_error_before(self, row: TensorVerdict) -> float:
        """How far the noise of its log probabilities leaves a mean over them off: those of its micro-batch, or, of a
        loss of the whole step, those of all its micro-batches.
        """
        if row.key.micro is not None:
            return self._mean_error[row.place]
        of_step = self._errors_of_step.get(_step_of(row.place), {})
        summed = ((sum(d2 for d2, _ in of), sum(count for _, count in of)) for of in of_step.values())
        return max((math.sqrt(d2) / count for d2, count in summed if count), default=self._mean_error[row.place])

    def _note_precision(self, row: TensorVerdict, dtypes: tuple[str, str]) -> None:
        """What activations, parameters and gradients were computed in, the tensors that follow were computed from."""
        if naming.meaning(row.name).kind not in ("activation", "gradient", "param"):
            return
        halves = [dtype for dtype in dtypes if family(dtype) in ("bfloat16", "float16")]
        if halves:
            known = self._shown.get(row.place)
            self._shown[row.place] = coarsest(*halves, *([known] if known else []))
        if len(halves) == 2 and naming.is_module_tensor(row.name):
            self._of_both[_step_of(row.place)] = coarsest(*halves)

    def _is_sum_of_halves(self, row: TensorVerdict, dtypes: tuple[str, str], micro_pair: MicroBatchPair) -> bool:
        """Whether a weight's gradient has few digits where it is of one piece, and more where it is a sum of several:
        both runs compute in half precision (autocast), which hands on what is rounded, and a sum is not rounded again.
        """
        if naming.meaning(row.name).kind != "gradient":
            return False
        together = micro_pair.together
        whole, summed = dtypes[::-1] if together is not None and together.which == "a" else dtypes
        return family(summed) == "float32" and family(whole) == self._of_both.get(_step_of(row.place))

    def _is_local(self, row: TensorVerdict) -> bool:
        """Whether what the tensor was computed from is recorded and bitwise equal: then its own error is all there is.

        For a module's output that is the module's inputs; for a module's input, those of the module around it.
        """
        if not naming.is_module_tensor(row.name):
            return False
        module = naming.module_of(row.name)
        if naming.is_input(row.name):
            module = _parent(module)
        known = self._inputs_same.get((row.place, module))
        if known is not None or naming.is_input(row.name) or not module.endswith(_FED_BY_A_NORM):
            return bool(known)
        # A projection whose inputs were not recorded: the norm in front of it is what feeds it.
        return self._norm_same.get((row.place, _parent(_parent(module))), False)


def _half_of_both(micro_pair: MicroBatchPair) -> str | None:
    """The half precision that modules of a micro-batch put out in both runs; None where one of them has none."""
    theirs = micro_pair.b.tensors
    return next(
        (ref.dtype for place, (_, ref) in micro_pair.a.tensors.items()
         if place[1] == "modules" and family(ref.dtype) in ("bfloat16", "float16") and place in theirs
         and family(theirs[place][1].dtype) == family(ref.dtype)),
        None,
    )  # fmt: skip


def _step_of(place: Place) -> Place:
    step, _, rank, role = place
    return step, None, rank, role


def _parent(module: str) -> str:
    """The module around it: `layers.0` of `layers.0.mlp`."""
    return module.rpartition(".")[0]


def _computed_dtype(run: Run) -> str | None:
    """The dtype a run says it computed in: fp32 logprobs of a bf16 model are judged as bf16."""
    flags = run.flags or {}
    effective = flags.get("effective")
    said = (effective.get("dtype") if isinstance(effective, dict) else None) or flags.get("dtype")
    if not isinstance(said, str):
        return None
    known = [named(part) for part in said.split(",")]
    return coarsest(*known) if all(word in FAMILIES for word in known) else None


def _judge_layout(a: TensorRef, b: TensorRef, micro_pair: MicroBatchPair) -> tuple[Verdict, str, PairFigures]:
    """The mask or bounds of two layouts with the same samples: equal, or the same tokens under other padding."""
    assert micro_pair.a.layout is not None
    tokens = PairFigures(compared=int(micro_pair.a.layout.lengths.sum()))
    if a.shape == b.shape and np.array_equal(pages.array(a), pages.array(b)):
        return Verdict.SAME, f"equal in all {a.numel:,} elements compared", PairFigures(compared=a.numel)
    if _holds_the_same_rows(a, b):
        return Verdict.SAME, "equal row by row, in another order of the samples", PairFigures(compared=a.numel)
    reason = "the same samples, token for token, under other padding; tokens are compared one by one"
    return Verdict.PADDING, reason, tokens


def _holds_the_same_rows(a: TensorRef, b: TensorRef) -> bool:
    """Whether two masks of one shape are the same rows, whichever order the samples stand in."""
    if len(a.shape) < 2 or a.shape != b.shape or not a.numel:
        return False
    rows = [pages.array(ref).reshape(len(pages.array(ref)), -1) for ref in (a, b)]
    return all(np.array_equal(*column) for column in zip(*(one[np.lexsort(one.T)].T for one in rows), strict=True))


def _judge_text(row: TensorVerdict, a: TensorRef, b: TensorRef) -> None:
    row.value_a, row.value_b = getattr(a.source, "value", None), getattr(b.source, "value", None)
    differs = row.value_a != row.value_b
    row.figures = PairFigures(compared=1, mismatched=int(differs))
    row.verdict = Verdict.DIFF if differs else Verdict.SAME
    row.reason = f"{_short(row.value_a)} against {_short(row.value_b)}" if differs else "the same text"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
