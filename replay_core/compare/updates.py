"""Weights after an optimizer's step whose gradients agree: what rounding may leave of the step is no difference.

A run stores w' = round(w - s), where s is the step that its own gradient makes; both runs together are off by

    |w'_a - w'_b|  <=  |w_a - w_b| + |s_a - s_b| + 4 u max(|w|),        u: half the distance from 1 to the next number

(each run rounds twice: what it had, and what it stores; of a float32 master only the copy that is stored counts). SGD's
step is s = lr g, so |s_a - s_b| = lr |g_a - g_b|. Adam (Kingma & Ba 2015, algorithm 1) divides a gradient by its own
size. From zero moments u = g / (|g| + eps) learning rates, so, whatever eps is,

    |s_a - s_b|  <=  lr min(2, |g_a - g_b| / min(|g_a|, |g_b|))

Where the gradient is all noise (a key's bias, which softmax does not see) the step goes up in one run and down in the
other by the whole learning rate. After several steps m is off by no more than sqrt(sum |g_a - g_b|^2), for its weights
add up to 1, and sqrt(v) by the root of the mean of these squares (Minkowski), so with sums over steps

    |s_a - s_b|  <=  lr min(2, 2 sqrt(sum |g_a - g_b|^2 / sum min(|g_a|, |g_b|)^2))

where no step outweighs the others.

That is, where neither run stood still while the other moved. A first step of such elements tells more: the rate of
either run, and eps (`first_adam.py`). Of a bias whose gradient is nothing but noise `bias_noise.py` tells so, and what
it does to the outputs that follow.

Where both runs say which optimizer stepped, its rate is known. Else the step is read off what a run stored before and
after it: that each is its own gradient times one number says SGD; else the baseline's greatest step stands for the
rate. Of a first step nothing is known before: SGD's difference is that of the gradients times one number, Adam's is two
rates where the gradient's sign differs and none elsewhere. Such a bound hides a step that is scaled by less than its
rounding, so the steps are also added up: noise points nowhere, a rate that is twice as large, an update that was made
twice or not at all points along the step everywhere.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from replay_core import naming, pages
from replay_core.compare import factored
from replay_core.compare.bias_noise import moved_by_its_bias, noise_beside_its_weight, rounding_alone
from replay_core.compare.chance import ERRORS, FEW, SCALED, Directions, SumAlong, fewest
from replay_core.compare.facing import Copies, FacingTensors, of_rank
from replay_core.compare.first_adam import FirstAdam
from replay_core.compare.judging.judgement import judge
from replay_core.compare.judging.rules import BY_ID
from replay_core.compare.judging.tensors import TensorVerdict, say
from replay_core.compare.judging.tolerance import DEFAULT, Tolerances
from replay_core.compare.judging.verdict import Judgement, Verdict
from replay_core.compare.moved_weights import is_view, moved_by_its_weight
from replay_core.compare.noise_sizes import NoiseSizes
from replay_core.compare.pairing.align import MicroBatchPair, TensorPair
from replay_core.compare.unseen_steps import drift, moved_before
from replay_core.dtypes import EPS, coarsest, family
from replay_core.errors import RldbgError
from replay_core.records import Record, RecordKey, Run, TensorRef

#: Roundings of the weight itself, before and after the step, of both runs; and of one run's.
_ROUNDINGS, _OF_ONE = 4, 2
#: Steps whose gradients are kept; and what the step may be off from its size where nothing else is known, besides.
_STEPS, _SIZE = 8, 0.05
#: The step that may have been stored in the weight's digits where nobody knows it, in the weights' rms.
_MOST_STEP = 0.1
#: Fewer elements whose gradients' signs differ do not tell a rate.
_FEWEST = 2
#: So many elements move in one run and none in the other: it did not step. And the steps a weight may be made of.
_MOVED, _OF_STEPS = 8, 8.0
#: What arithmetic in few digits leaves of a step, in the step's unit, and what a fit of a number for each line does.
_OF_STEP, _OF_FIT = 1e-5, 1e-4
#: Fewer rows or columns do not tell such numbers; how far these may be off, in the relative noise of the gradient.
_FEWEST_LINES, _OF_NOISE = 4, 4.0
#: How far the numbers of all lines together may be off, of gradients that are the same.
_OF_SCALE = 1e-3
#: Elements looked at together.
_CHUNK = 1 << 20

F64 = NDArray[np.float64]


class _Known(Struct):
    """One judged row, and what either run has of it."""

    step: int | None
    row: TensorVerdict
    facing: FacingTensors
    #: Whether something beside its figures says why it is no difference.
    is_explained: bool = False

    @classmethod
    def of(cls, row: TensorVerdict, pair: TensorPair, micro_pair: MicroBatchPair) -> _Known:
        assert pair.a is not None
        assert pair.b is not None
        return cls(row.key.step, row, FacingTensors.of(pair.a[1], pair.b[1], micro_pair))

    @property
    def parts(self) -> bool:
        """Whether its figures say that it is another, and nothing else explains it."""
        return not self.is_explained and _parted_by_table(self.row)


class Updates:
    """Makes CLOSE of weights that are no further apart than their gradients, which agree, make them.

    Which optimizer stepped both runs say alike (flags: optimizer), or what they stored before and after the step.
    What a person's own limits say stands.
    """

    def __init__(self, a: Run, b: Run, tolerances: Tolerances, *, exact: bool = False) -> None:
        of_a, of_b = ((run.flags or {}).get("optimizer") for run in (a, b))
        is_said = isinstance(of_a, dict) and of_a == of_b and isinstance(of_a.get("lr"), (int, float))
        self._optimizer = of_a if is_said else None
        self._is_other = not is_said and of_a != of_b
        self._tolerances, self._exact, self._baseline = tolerances, exact, a
        #: By role and step, the rate of first steps that could be read off weights.
        self._fitted: dict[tuple[str | None, int | None], float] = {}
        #: By role: the first step that was recorded.
        self._began: dict[str | None, int] = {}
        self._sizes = NoiseSizes()
        #: Of the last micro-batch in which some were: outputs that are off by what their weights are.
        self._moved: list[_Known] = []
        #: The baseline's records of weights, once a rate is asked for.
        self._kept: dict[RecordKey, list[tuple[int, Record]]] = {}
        #: By rank, role and name: the gradients and weights of the step that comes, before they are judged.
        self._coming: dict[tuple[Any, ...], tuple[TensorPair, MicroBatchPair]] = {}
        #: By rank, role and name: the gradients of the last steps, and the weight of the last.
        self._gradients: dict[tuple[Any, ...], list[_Known]] = {}
        self._weights: dict[tuple[Any, ...], _Known] = {}

    def coming(self, entries: list[tuple[TensorPair, MicroBatchPair]]) -> None:
        """Hear of the pairs of a step, or of some ranks of it, before the first of them is judged."""
        self._coming = {
            (record.key.rank, record.key.role, pair.name): (pair, micro_pair) for pair, micro_pair in entries
            if pair.a is not None and pair.b is not None and pair.name.endswith((".weight", ".bias"))
            for record in [pair.a[0]]
        }  # fmt: skip

    def settle(self, row: TensorVerdict, pair: TensorPair, micro_pair: MicroBatchPair) -> None:
        """Take the next row in order of computation (gradients come before weights), and judge it again if need be."""
        if self._is_other or self._exact or row.skipped is not None or row.a is None or row.b is None:
            return
        if row.key.step is not None:
            self._began.setdefault(row.key.role, row.key.step)
        kind = naming.meaning(row.name).kind
        if kind not in ("gradient", "param"):
            self._settle_output(row, pair, micro_pair)
            return
        name = row.name.removeprefix("grad.").removeprefix("param.")
        place = (row.key.rank, row.key.role, name)
        known = _Known.of(row, pair, micro_pair)
        if kind == "gradient":
            self._gradients[place] = [*self._gradients.get(place, [])[1 - _STEPS :], known]
            if row.verdict is Verdict.DIFF and not row.by_digest:
                self._clear(known, _read_by(lambda: noise_beside_its_weight(
                    row.name, pair.one[0].key.stage, known.facing, micro_pair, _computed(row))))  # fmt: skip
            return
        before, self._weights[place] = self._weights.get(place), known
        gradients = self._gradients.get(place, [])
        if not gradients or gradients[-1].step != known.step or row.by_digest or row.verdict is Verdict.SHAPE:
            return
        if not _parted_by_table(row) or any(one.parts for one in gradients):
            return
        if before is not None and (before.row.verdict.diverges or not _follow(before.step, known.step)):
            before = None
        self._clear(known, _read_by(lambda: self._explained(known, gradients, before)))

    def _settle_output(self, row: TensorVerdict, pair: TensorPair, micro_pair: MicroBatchPair) -> None:
        """What a module put out whose bias went where noise took it in the steps before: that of the last weights
        recorded; or of those of its own step, which are recorded before their update or are the first.
        """
        if row.verdict is not Verdict.DIFF or not naming.is_module_tensor(row.name):
            return
        self._moved = [one for one in self._moved if one.row.place == row.place]
        if self._moved and naming.is_input(row.name):
            own = _Known.of(row, pair, micro_pair)
            self._clear(own, _read_by(lambda: self._seen_of(own, micro_pair)))
        if not row.name.endswith(".output"):
            return
        bias = self._weights.get((row.key.rank, row.key.role, f"{naming.module_of(row.name)}.bias"))
        if bias is not None and bias.is_explained and _follow(bias.step, row.key.step):
            known, context, of_bias = _Known.of(row, pair, micro_pair), row.context, bias.facing
            self._clear(known, _read_by(lambda: moved_by_its_bias(
                known.facing.copies(), of_bias.copies(), context, micro_pair)))  # fmt: skip
        if row.verdict is Verdict.DIFF and (bias is None or not bias.row.verdict.diverges):
            self._settle_after_unseen(row, pair, micro_pair)
        if row.verdict is Verdict.DIFF:
            own = _Known.of(row, pair, micro_pair)
            self._clear(own, _read_by(lambda: self._moved_by_weight(own, pair.one[0].key.stage, micro_pair)))
            self._moved += [own] if own.is_explained else []

    def _seen_of(self, own: _Known, micro_pair: MicroBatchPair) -> str | None:
        """What goes into a module is a view of what another put out, whose weights explain it."""
        for output in self._moved:
            facing = own.facing.copies().get(None), output.facing.copies().get(None)
            if facing[0] is not None and facing[1] is not None and is_view(facing[0], facing[1], micro_pair):
                return f"as {output.row.name}, of which it is a view: {output.row.reason}"
        return None

    def _moved_by_weight(self, own: _Known, stage: str, micro_pair: MicroBatchPair) -> str | None:
        """What a module put out of inputs that agree, whose weights the steps before left apart at some elements: the
        weights of its own step, recorded before their update, or those that the step before ended with.
        """
        row, module = own.row, naming.module_of(own.row.name)
        place = row.key.rank, row.key.role, f"{module}.weight"
        inputs = FacingTensors.named(f"{module}.inputs.0", stage, micro_pair)
        gradients = self._gradients.get(place, [])
        if inputs is None or not gradients or not _follow(gradients[-1].step, row.key.step):
            return None
        if any(one.parts for one in gradients):
            return None
        last, coming = self._weights.get(place), self._coming.get((*place[:2], f"param.{module}.weight"))
        candidates: list[tuple[_Known, bool]] = []
        if coming is not None and coming[0].a is not None and coming[0].b is not None:
            unjudged = TensorVerdict(coming[0].name, Verdict.DIFF, "", a=coming[0].a, b=coming[0].b)
            candidates.append((_Known.of(unjudged, *coming), False))
        if last is not None and _follow(last.step, row.key.step) and not last.row.verdict.diverges:
            candidates.append((last, True))
        outs, ins = own.facing.copies(), inputs.copies()
        for weight, is_judged in candidates:
            of_weight = weight.facing.copies()
            if any(len(one) != 1 or None not in one for one in (outs, ins, of_weight)):
                continue
            told = moved_by_its_weight(outs[None], ins[None], of_weight[None], row.context, micro_pair)
            if told is None:
                continue
            before = None if is_judged or last is None or last.row.verdict.diverges else last
            if is_judged or self._explained(weight, gradients, before) is not None:
                return told
        return None

    def _settle_after_unseen(self, row: TensorVerdict, pair: TensorPair, micro_pair: MicroBatchPair) -> None:
        """What a module put out whose bias went where noise took it in steps that nobody recorded."""
        if row.key.step is not None and row.key.step > 0:
            known = _Known.of(row, pair, micro_pair)
            self._clear(known, _read_by(lambda: self._moved_before(known, row.key.step or 0, micro_pair)))

    def _moved_before(self, known: _Known, step: int, micro_pair: MicroBatchPair) -> str | None:
        row, module = known.row, naming.module_of(known.row.name)
        names = (f"param.{module}.bias", f"grad.{module}.bias", f"grad.{module}.weight")
        found = [self._coming.get((row.key.rank, row.key.role, name)) for name in names]
        facing = [
            FacingTensors.of(one.a[1], one.b[1], its_own) for one, its_own in filter(None, found) if one.a and one.b
        ]
        after = found[0][0].a if found[0] is not None else None
        if after is None or len(facing) < len(names):
            return None
        sizes = facing[0].sections()
        copies = [known.facing.copies(), *(one.in_sections(sizes).copies() for one in facing)]
        if any(None not in one for one in copies) or len(copies[0]) > 1 or len(copies[1]) > 1:
            return None
        own, bias, gradient, weight = (one[None] for one in copies)
        if (is_noise := rounding_alone(gradient, weight)) is None:
            return None
        rate = float(self._optimizer["lr"]) if self._optimizer is not None else self._rate_of(after)
        is_least = self._optimizer is None and not self._is_next_to(after[0].key)
        told = moved_before(own, bias, is_noise, rate, step, row.context, micro_pair, is_least=is_least)
        if told is None:
            return None
        place = row.key.role, row.key.step
        self._fitted[place] = max(self._fitted.get(place, 0.0), told[1])
        return told[0]

    def _clear(self, known: _Known, why: str | None) -> None:
        if why is None:
            return
        row, known.is_explained = known.row, True
        if row.context is not None and row.figures is not None:
            row.context = replace(row.context, explained=why)
            say(row, judge(row.figures, row.unmasked, row.context, self._tolerances))
        elif self._tolerances == DEFAULT:
            row.verdict, row.reason, row.rule, row.suspect = Verdict.CLOSE, why, None, False
        if row.ranks is not None and not row.verdict.diverges:
            row.ranks.parted, row.ranks.fault = (), None

    def _explained(self, weight: _Known, gradients: list[_Known], before: _Known | None) -> str | None:
        """Why every rank's copy is no further off than rounding leaves it; None where one is."""
        said, made = None, [one.facing.copies() for one in gradients]
        earlier: Copies = before.facing.copies() if before is not None else {}
        rule = _by_table(weight.row).rule
        of_lines = rule is not None and BY_ID[rule.id].by_row
        for rank, own in weight.facing.copies().items():
            if rank is not None and not any(rank in one for one in made):
                return None  # replicas of one run that had the same gradients are bitwise equal, or something else is
            is_noise = self._is_noise(weight, gradients[-1], rank)
            steps = _WeightsAfter.read(
                own, [of_rank(one, rank) for one in made], of_rank(earlier, rank), lambda: self._rate_of(weight.row.a),
                max(0, weight.step or 0), is_noise if self._has_unseen(weight) else None,
            )  # fmt: skip
            if steps is None or (found := steps.explained(self._optimizer, of_lines=of_lines)) is None:
                return None
            if is_noise is not None and (sizes := steps.of_noise(is_noise)) is not None:
                of_model, of_bias = weight.row.key.role, (weight.row.key.rank, rank, weight.row.name)
                self._sizes.take(of_model, of_bias, *sizes)
                if not self._sizes.are_one(of_model, of_bias):
                    return None
            said, place = said or found[0], (weight.row.key.role, weight.step)
            if found[1].first is not None:
                self._fitted[place] = max(self._fitted.get(place, 0.0), found[1].most)
        return said

    def _has_unseen(self, weight: _Known) -> bool:
        """Whether steps that are not held here have made the optimizer's moments too."""
        began = self._began.get(weight.row.key.role)
        return began is None or weight.step is None or began > 0 or weight.step >= _STEPS

    def _is_noise(self, weight: _Known, gradient: _Known, rank: int | None) -> NDArray[np.bool_] | None:
        """Of each element of a bias whether its gradient is nothing but rounding; None where nobody knows, or of what
        is no bias.
        """
        module = weight.row.name.removeprefix("param.").removesuffix(".bias")
        place = (weight.row.key.rank, weight.row.key.role, f"{module}.weight")
        beside = self._gradients.get(place, [])
        if not weight.row.name.endswith(".bias") or not beside or beside[-1].step != weight.step:
            return None
        sizes = _sections_of(weight.facing)
        made = [of_rank(one.facing.in_sections(sizes).copies(), rank) for one in (gradient, beside[-1])]
        return (
            rounding_alone(made[0], made[1], _computed(gradient.row))
            if made[0] is not None and made[1] is not None
            else None
        )

    def _rate_of(self, of_a: tuple[Record, TensorRef] | None) -> float:
        """The greatest step that the baseline made between two records of its own next to this one, of the module's own
        weight where it is a bias; else the rate that another weight tells. 0 where neither is known. Of steps that lie
        between, each made its part.

        Raises:
            DumpError: the bytes of one cannot be read.
        """
        assert of_a is not None
        record, ref = of_a
        if record.key.step is None:
            return 0.0
        wanted = (f"{ref.name.removesuffix('.bias')}.weight", ref.name) if ref.name.endswith(".bias") else (ref.name,)
        found = [(step, {one.name: one for one in _tensors(other) if one.name in wanted})
                 for step, other in self._near(record.key)]  # fmt: skip
        for name in wanted:
            of_steps = [(step, one[name]) for step, one in found if name in one and one[name].is_readable]
            steps = [
                _greatest_step(one, other) / (after - before) for (before, one), (after, other) in pairwise(of_steps)
                if one.shape == other.shape
            ]  # fmt: skip
            if rate := max(steps, default=0.0):
                return rate
        return self._fitted.get((record.key.role, record.key.step), 0.0)

    def _near(self, key: RecordKey) -> list[tuple[int, Record]]:
        """The baseline's own record of these weights, and those before and after it."""
        if not self._kept:
            for one in self._baseline.records:
                if one.key.stage == key.stage and one.key.step is not None:
                    self._kept.setdefault(dataclasses.replace(one.key, step=None), []).append((one.key.step, one))
            for kept in self._kept.values():
                kept.sort(key=lambda held: held[0])
        own = self._kept.get(dataclasses.replace(key, step=None), [])
        at = bisect_left(own, key.step or 0, key=lambda held: held[0])
        return own[max(0, at - 1) : at + 2]

    def _is_next_to(self, key: RecordKey) -> bool:
        """Whether the baseline kept the weights of the step before or after this one too."""
        return any(key.step is not None and abs(step - key.step) == 1 for step, _ in self._near(key))


def _sections_of(facing: FacingTensors) -> tuple[int, ...]:
    """How long the several in one are that a judged tensor was found to be made of; nothing where it is one."""
    if facing.held is None or not facing.held.is_cut or len(first := facing.held.stretches[0]) < 2:
        return ()
    return tuple(long * len(set(facing.held.stretches)) for _, long in first)


def _tensors(record: Record) -> tuple[TensorRef, ...]:
    was_read, found = record.is_read, record.tensors()
    if not was_read:
        record.release()
    return found


def _greatest_step(one: TensorRef, other: TensorRef) -> float:
    before, after = (np.asarray(pages.array(ref).reshape(-1)[:_CHUNK], np.float64) for ref in (one, other))
    return float(np.abs(after - before).max(initial=0.0))


def _read_by(look: Callable[[], str | None]) -> str | None:
    try:
        return look()
    except RldbgError:
        return None  # said where it is compared


def _follow(before: int | None, step: int | None) -> bool:
    return before is not None and step is not None and before + 1 == step


def _computed(row: TensorVerdict) -> str:
    """The dtype that a row was judged by."""
    return "float64" if row.context is None else row.context.row


def _parted_by_table(row: TensorVerdict) -> bool:
    return _by_table(row).verdict.diverges


def _by_table(row: TensorVerdict) -> Judgement:
    if row.context is None or row.figures is None:
        return Judgement(row.verdict, row.reason, rule=row.rule)
    return judge(row.figures, row.unmasked, replace(row.context, explained=None))


class _Step(Struct, frozen=True):
    """What each run's gradient makes of its weight: rates [a, b] times gradient `number`; where 0, as an Adam does, up
    to `most`, or as its first step does.
    """

    number: int = -1
    rate_a: float = 0.0
    rate_b: float = 0.0
    most: float = 0.0
    first: FirstAdam | None = None
    #: What either run's gradient makes of its weight, where that is no function of each element alone.
    made: tuple[F64, F64] | None = None


_Why = tuple[str, _Step]


class _WeightsAfter:
    """The weights of two runs after a step, their gradients, and the weights before it where both have these.

    All flat, as stored: [N].
    """

    def __init__(
        self, after: list[Any], gradients: list[list[Any]], before: list[Any] | None, unit: float,
        shape: tuple[int, ...], rate_beside: Callable[[], float], unseen: int, is_noise: NDArray[np.bool_] | None,
    ) -> None:  # fmt: skip
        self._noise = is_noise
        self._rate_beside, self._unseen = rate_beside, unseen if before is None else 0
        self._after, self._gradients, self._before, self._unit = after, gradients, before, unit
        self._shape, self._count = shape, math.prod(shape)

    @classmethod
    def read(
        cls, after: tuple[TensorRef, TensorRef], gradients: list[tuple[TensorRef, TensorRef] | None],
        before: tuple[TensorRef, TensorRef] | None, rate_beside: Callable[[], float], unseen: int,
        is_noise: NDArray[np.bool_] | None,
    ) -> _WeightsAfter | None:  # fmt: skip
        """rate_beside: the greatest step that is known of the weights beside it, 0 where none is. unseen: how many
        steps there were before this one. is_noise: the elements whose gradient is nothing but rounding, [N], which
        earlier steps took as far as any whatever the gradients say that are known; None where none are known to be.

        None where a weight or its gradient cannot be read, or they are not of one shape."""
        dtype = coarsest(after[0].dtype, after[1].dtype)
        if family(dtype) not in EPS:
            return None
        both = [_read(after), *(_read(one) for one in gradients), _read(before)]
        is_alike = [one is not None and {value.size for value in one} == {after[0].numel} for one in both]
        if not is_alike[0] or not is_alike[len(gradients)]:
            return None
        made = [one for one, fits in zip(both[1:-1], is_alike[1:-1], strict=True) if fits and one is not None]
        assert both[0] is not None
        known = both[-1] if is_alike[-1] else None
        if known is not None and len(made) > 1 and _is_before_its_step(both[0], made, known):
            made = made[:-1]
        return cls(both[0], made, known, EPS[str(family(dtype))] / 2, after[0].shape, rate_beside, unseen, is_noise)

    def explained(self, optimizer: dict[str, Any] | None, *, of_lines: bool) -> _Why | None:
        """Why the weights are as far apart as they are; None where the gradients do not make them so.

        of_lines: a rule saw rows or columns that are off each by a factor or a constant.
        """
        found = self._bounded(optimizer)
        return found if found is not None and self._left(found[1]).are_chance(of_lines=of_lines) else None

    def _bounded(self, optimizer: dict[str, Any] | None) -> _Why | None:
        is_sgd = optimizer is not None and optimizer.get("kind") == "sgd"
        if self._before is None and len(self._gradients) == 1 and not is_sgd and (first := self._as_first_adam()):
            if not _is_one_rate(first):
                return None
            if (found := self._of_first_adam(first)) is not None:
                return found
        if optimizer is not None:
            return self._by_rate(float(optimizer["lr"]), "a step of", is_sgd=is_sgd)
        if self._before is None:
            known = self._by_difference()
            if known is None and len(self._gradients) == 1:
                known = self._by_signs() or self._as_first_factored()
            return known or self._by_rate_beside()
        sums, rate = SumAlong(), 0.0
        for part in self._chunks():
            steps = [one - other for one, other in zip(part.before, part.after, strict=True)]
            rate = max(rate, float(np.abs(steps[0]).max(initial=0.0)))
            told = self._turned(part) < 1
            sums.take((np.square(steps[1]) - np.square(steps[0]))[told] / 2)
            sums.size += float(np.square((steps[0] + steps[1]) / 2)[told].sum())
        if not sums.is_chance(self._count):
            return None
        if (found := self._as_sgd() or self._by_rate(rate, "a step of up to", is_sgd=False)) is not None:
            return found
        if (found := self._as_factored()) is not None:
            return found
        return self._by_rate_beside() if self._is_noise() else None

    def _is_noise(self) -> bool:
        """Whether of next to no element the gradient says which way it goes, nor its greatest step what the rate is."""
        told = sum(int(np.count_nonzero(self._turned(part) < 1)) for part in self._chunks())
        return told < fewest(self._count)

    def _by_rate_beside(self) -> _Why | None:
        """By the steps beside it, where its own are not known: those since both runs began, too, as far as few are."""
        rate = self._rate_beside() if self._unseen < _STEPS or self._noise is not None else 0.0
        return self._by_rate(rate, "a step of up to", is_sgd=False) if rate else None

    def _as_first_adam(self) -> FirstAdam | None:
        """Both runs' first step, where their gradients have elements that are noise: nothing else fits those. Else
        where one rate fits all.
        """
        some = next(self._chunks())
        (a, b), off = some.gradient, some.after[1] - some.after[0]
        rounding, is_noise = self._rounded(some), self._turned(some) >= 1
        of_noise = FirstAdam.of(off[is_noise], a[is_noise], b[is_noise], rounding[is_noise])
        return of_noise or FirstAdam.of(off, a, b, rounding, is_one=True)

    def _of_first_adam(self, first: FirstAdam) -> _Why | None:
        rate, sums = max(first.rate_a, first.rate_b), SumAlong()
        for part in self._chunks():
            steps = [first.step(one, rate) for one in part.gradient]
            left = part.after[1] - part.after[0] + (steps[1] - steps[0])
            if not bool((np.abs(left) <= self._rounded(part, rate) + 2 * _SIZE * np.max(np.abs(steps), axis=0)).all()):
                return None
            told = self._turned(part) < 1
            sums.take((left * (steps[0] + steps[1]) / 2)[told])
            sums.size += float(np.square((steps[0] + steps[1]) / 2)[told].sum())
        if not sums.is_chance(self._count):
            return None
        return (
            f"as far apart as an Adam's first step of {rate:.3g} (eps {first.eps:.2g}) makes of either run's own "
            f"gradient, which says nothing but what rounding left of it: {self._said()}",
            _Step(most=rate, first=first),
        )

    def _as_sgd(self) -> _Why | None:
        """Where each run's step is one number times its own gradient: of this step, or (weights that are recorded as
        the step begins) of the one before.
        """
        for number in range(-1, -1 - min(2, len(self._gradients)), -1):
            sums = [[0.0, 0.0], [0.0, 0.0]]
            for part in self._chunks(number):
                for run in (0, 1):
                    step, own = part.before[run] - part.after[run], part.gradient[run]
                    sums[run][0] += float((step * own).sum())
                    sums[run][1] += float(np.square(own).sum())
            if not all(size for _, size in sums):
                continue
            rates, errors, fits = [one / size for one, size in sums], [0.0, 0.0], True
            for part in self._chunks(number):
                for run in (0, 1):
                    own, after, before = part.gradient[run], part.after[run], part.before[run]
                    left = before - after - rates[run] * own
                    most = np.maximum(np.abs(after), np.abs(before)) + abs(rates[run]) * np.abs(own)
                    fits = fits and bool((np.abs(left) <= _OF_ONE * self._unit * most).all())
                    errors[run] += float(np.square(left * own).sum())
            allowed = sum(ERRORS * error**0.5 / size for error, (_, size) in zip(errors, sums, strict=True))
            if fits and rates[0] > 0 and abs(rates[1] - rates[0]) <= allowed + SCALED * rates[0]:
                return (
                    f"each run's weight is its own of the step before less {rates[0]:.3g} times its own gradient, to "
                    f"its rounding; the gradients agree: {self._said()}",
                    _Step(number, rates[0], rates[1]),
                )
        return None

    def _by_rate(self, rate: float, what: str, *, is_sgd: bool) -> _Why | None:
        """Whether no element is further off than a step of so much makes it, and the differences point nowhere."""
        unseen = 0 if is_sgd or (self._unseen >= _STEPS and self._noise is None) else self._unseen
        sums, moved = SumAlong(), [0, 0]
        for part in self._chunks():
            turned = np.abs(part.gradient[0] - part.gradient[1]) if is_sgd else self._turned(part)
            allowed = rate * turned + self._rounded(part, 0.0 if is_sgd else rate)
            if unseen:
                # An element whose gradient says something now may have been noise then, but not for ever.
                walked = 1.0 if unseen < _STEPS or self._noise is None else self._noise[part.here]
                allowed += drift(unseen) * rate * walked
            if part.before:
                # What steps that are not held here made of it they left in the moments too, and go on making.
                allowed += (1 if self._noise is None else 2) * np.abs(part.before[0] - part.before[1])
            off = part.after[1] - part.after[0]
            if not bool((np.abs(off) <= allowed).all()):
                return None
            mean = (part.gradient[0] + part.gradient[1]) / 2
            step = rate * (mean if is_sgd else np.sign(mean))
            # Of what is left beside the gradients' own difference.
            along = (off + (rate * (part.gradient[1] - part.gradient[0]) if is_sgd else 0.0)) * step
            # Where the gradient is noise it says not even how large the step is, next to an Adam's eps.
            told = slice(None) if is_sgd else turned < 1
            sums.take(along[told])
            sums.size += float(np.square(step)[told].sum())
            if part.before and not is_sgd:
                for number, (one, other) in enumerate(zip(part.before, part.after, strict=True)):
                    moved[number] += int(np.count_nonzero((one != other) & (turned >= 1)))
        if not sums.is_chance(self._count) or (min(moved) == 0 and max(moved) >= _MOVED):
            return None
        return (
            f"no further apart than {what} {rate:g} makes of what rounding leaves of the gradient, which agrees"
            f"{f', and {unseen} before it that are not recorded' if unseen else ''}: {self._said()}",
            _Step(-1, rate, rate) if is_sgd else _Step(most=rate),
        )

    def of_noise(self, is_noise: NDArray[np.bool_]) -> tuple[tuple[F64, F64], tuple[F64, F64], F64] | None:
        """The step and the gradient of either run where the gradient is noise, and 0 elsewhere, and the weight before
        it; None where that is not known.
        """
        if self._before is None or is_noise.size != self._count:
            return None
        steps, gradients = [], []
        for run in (0, 1):
            after, before, gradient = (
                np.asarray(one[run], np.float64) for one in (self._after, self._before, self._gradients[-1])
            )
            steps.append(np.where(is_noise, after - before, 0.0))
            gradients.append(np.where(is_noise, gradient, 0.0))
        weight = (np.asarray(self._before[0], np.float64) + np.asarray(self._before[1], np.float64)) / 2
        return (steps[0], steps[1]), (gradients[0], gradients[1]), weight

    def _left(self, step: _Step) -> Directions:
        """What is beside the step that the gradients make, and the weights before it, added up along what a fault is
        along.
        """
        sums = Directions(self._shape)
        for part in self._chunks(step.number):
            left = part.after[1] - part.after[0]
            if step.first is not None:
                made = [step.first.step(one, step.most) for one in part.gradient]
                left += made[1] - made[0]
            if step.made is not None:
                left += step.made[1][part.here] - step.made[0][part.here]
            left += step.rate_b * part.gradient[1] - step.rate_a * part.gradient[0]
            if part.before:
                left -= part.before[1] - part.before[0]
            weight = (part.after[0] + part.after[1]) / 2
            if step.most and step.first is None:
                # A weight that is made of such steps (it began at 0) lies along them.
                weight = np.where((self._turned(part) >= 1) & (np.abs(weight) <= _OF_STEPS * step.most), 0.0, weight)
            sums.take(part.here.start, left, weight)
        return sums

    def _turned(self, part: _Chunk) -> F64:
        """By how many rates Adam's step may be off, at most."""
        apart, least = np.zeros(part.after[0].size), np.zeros(part.after[0].size)
        for gradient in self._gradients:
            one, other = (np.asarray(values[part.here], np.float64) for values in gradient)
            apart += np.square(one - other)
            least += np.square(np.minimum(np.abs(one), np.abs(other)))
        times = 1.0 if len(self._gradients) == 1 else 2.0
        ratio = np.divide(np.sqrt(apart), np.sqrt(least), out=np.where(apart > 0, 2.0, 0.0), where=least > 0)
        if self._noise is not None:
            ratio = np.where(self._noise[part.here], 2.0, ratio)
        return np.minimum(2.0, times * ratio)

    def _by_signs(self) -> _Why | None:
        """Where nobody knows the step and it may be Adam's first: whether the weights are two rates apart where the
        gradient's sign differs, and not at all elsewhere.
        """
        turned = [
            np.abs(part.after[1] - part.after[0])[part.gradient[0] * part.gradient[1] < 0] for part in self._chunks()
        ]
        of_turned = np.concatenate(turned)
        if of_turned.size < _FEWEST:
            return None
        rate = float(np.median(of_turned)) / 2
        sums = SumAlong()
        for part in self._chunks():
            sign = [np.sign(one) for one in part.gradient]
            left = part.after[1] - part.after[0] + rate * (sign[1] - sign[0])
            if not bool((np.abs(left) <= self._rounded(part, rate) + 2 * _SIZE * rate * (sign[0] != sign[1])).all()):
                return None
            sums.take(left * (sign[0] + sign[1]))
        if not sums.is_chance(self._count):
            return None
        return (
            f"two steps of {rate:.3g} apart where rounding turned the sign of the gradient, which agrees (an Adam's "
            f"first step), and to the weight's rounding elsewhere: {self._said()}",
            _Step(),
        )

    def _as_first_factored(self) -> _Why | None:
        """Where nobody knows the step and it may be the first of an optimizer that keeps a gradient's squares by rows
        and columns: whether the weights differ as such steps of either run's own gradient do, times one rate.
        """
        if (gradients := self._matrices(self._gradients[-1])) is None:
            return None
        made = [factored.first_step(one).reshape(-1) for one in gradients]
        (part,), apart = self._chunks(), made[0] - made[1]
        off, size = part.after[1] - part.after[0], self._rounded(part)
        rate = float((off / size) @ (apart / size)) / (float(np.square(apart / size).sum()) or 1.0)
        if rate > _MOST_STEP * float(np.sqrt(np.square(part.after[0]).mean())):
            return None  # gradients that are hardly apart make anything, times enough
        left = off - rate * apart
        allowed = self._rounded(part, rate) + rate * (_SIZE * np.abs(apart) + _OF_STEP * np.abs(made[0]))
        sums = SumAlong()
        sums.take(left * (made[0] + made[1]) / 2)
        sums.size += float(np.square((made[0] + made[1]) / 2).sum())
        if rate <= 0 or not bool((np.abs(left) <= allowed).all()) or not sums.is_chance(self._count):
            return None
        return (
            f"as far apart as a first step of {rate:.3g} makes of either run's own gradient, which agrees, where its "
            f"squares are kept by rows and columns (Adafactor): {self._said()}",
            _Step(most=rate, made=(rate * made[0], rate * made[1])),
        )

    def _as_factored(self) -> _Why | None:
        """The same of a later step: whether each run's is its own gradient times a number of the row and one of the
        column, and these are the other run's as far as the gradients agree.
        """
        if (gradients := self._matrices(self._gradients[-1])) is None:
            return None
        (part,), made, times = self._chunks(), [], []
        for run in (0, 1):
            step = part.before[run] - part.after[run]
            times.append(factored.times(step.reshape(self._shape), gradients[run]))
            made.append((times[run] * gradients[run]).reshape(-1))
            most = np.maximum(np.abs(part.after[run]), np.abs(part.before[run]))
            if bool((np.abs(step - made[run]) > _OF_ONE * self._unit * most + _OF_FIT * np.abs(step)).any()):
                return None
        noise = float(np.linalg.norm(gradients[1] - gradients[0]) / np.linalg.norm(gradients[0]))
        sizes = np.square(gradients[0])
        # Of gradients that are hardly apart, and weights whose step is told in many digits, one rate is told from one
        # that is off by a hundredth.
        rounded = float(np.linalg.norm(self._unit * most) / (np.linalg.norm(step) or 1.0))
        least = min(SCALED, max(_OF_SCALE, rounded, noise / _OF_NOISE))
        for axis in (0, 1, None):
            one, other = ((of * sizes).sum(axis) for of in times)
            allowed = least if axis is None else max(least, _OF_NOISE * noise)
            if bool((np.abs(other - one) > allowed * np.abs(one)).any()):
                return None
        return (
            "each run's weight is its own of the step before less its own gradient times a number of the row and one "
            f"of the column (Adafactor); the gradients agree: {self._said()}",
            _Step(made=(made[0], made[1])),
        )

    def _matrices(self, both: list[Any]) -> list[F64] | None:
        """Two gradients as the matrix they are of; None where that is none, or too large or too small to be asked."""
        if len(self._shape) != 2 or min(self._shape) < _FEWEST_LINES or self._count > _CHUNK:
            return None
        made = [np.asarray(one, np.float64).reshape(self._shape) for one in both]
        return made if all(one.any() and np.isfinite(one).all() for one in made) else None

    def _by_difference(self) -> _Why | None:
        """Where nobody knows the step: whether the weights differ as their gradients do, times one number (SGD)."""
        if self._count <= FEW:
            return None
        of_both, of_own = 0.0, 0.0
        least = _SIZE * max(float(self._rounded(part).max(initial=0.0)) for part in self._chunks())
        for part in self._chunks():
            # What is rounded less says more.
            apart = (part.gradient[1] - part.gradient[0]) / (self._rounded(part) + least)
            of_both -= float(((part.after[1] - part.after[0]) / (self._rounded(part) + least) * apart).sum())
            of_own += float(np.square(apart).sum())
        rate = max(0.0, of_both / of_own) if of_own else 0.0
        squares = sum(float(np.square(part.after[0]).sum()) for part in self._chunks())
        step = _MOST_STEP * (squares / max(1, self._after[0].size)) ** 0.5
        sums, signs = SumAlong(), SumAlong()
        for part in self._chunks():
            left = part.after[1] - part.after[0] + rate * (part.gradient[1] - part.gradient[0])
            if not bool((np.abs(left) <= self._rounded(part, step)).all()):
                return None
            mean = (part.gradient[0] + part.gradient[1]) / 2
            sums.take(left * mean)
            signs.take(left * np.sign(mean))
        if not sums.is_chance(self._count) or not signs.is_chance(self._count):
            return None
        return (
            f"as far apart as {rate:.3g} times the gradients, which agree, to the weight's rounding, and along no "
            f"step: {self._said()}",
            _Step(-1, rate, rate),
        )

    def _rounded(self, part: _Chunk, rate: float = 0.0) -> F64:
        """What the weights' own rounding may leave; rate: of a step that is stored in few digits as well."""
        size: F64 = np.max(np.abs([*part.after, *part.before]), axis=0)
        return np.asarray(_ROUNDINGS * self._unit * (size + rate))

    def _said(self) -> str:
        moved, most = 0, 0.0
        for part in self._chunks():
            off = np.abs(part.after[0] - part.after[1])
            moved, most = moved + int(np.count_nonzero(off)), max(most, float(off.max(initial=0.0)))
        return f"greatest difference {most:.2g}, at {moved} of {self._after[0].size} elements"

    def _chunks(self, number: int = -1) -> Iterator[_Chunk]:
        """number: which gradient, of this step (-1) or of the one before."""
        for start in range(0, self._after[0].size, _CHUNK):
            here = slice(start, start + _CHUNK)
            yield _Chunk(here, *([np.asarray(one[here], np.float64) for one in both or ()]
                           for both in (self._after, self._gradients[number], self._before)))  # fmt: skip


class _Chunk(Struct):
    """Of some elements, what either run has (float64 [n] each); before: nothing, where it is not known."""

    here: slice
    after: list[F64]
    gradient: list[F64]
    before: list[F64]


def _is_before_its_step(after: list[Any], gradients: list[list[Any]], before: list[Any]) -> bool:
    """Whether weights are recorded as their step begins, so that its gradient is no part of what moved them yet: they
    went the way of the gradients before it, rather than of these and its own.
    """
    along = [0.0, 0.0]
    for run in (0, 1):
        step = np.asarray(before[run][:_CHUNK], np.float64) - np.asarray(after[run][:_CHUNK], np.float64)
        own = [np.asarray(one[run][:_CHUNK], np.float64) for one in gradients]
        for number, made in enumerate((own[:-1], own)):
            # The direction of an Adam of the usual betas (Kingma & Ba 2015), which is an SGD's too, roughly.
            mean = sum(0.9 ** (len(made) - at) * one for at, one in enumerate(made))
            size = np.sqrt(sum(np.square(one) for one in made))
            way = np.divide(mean, size, out=np.zeros_like(step), where=size > 0)
            along[number] += float(step @ way) / (float(np.linalg.norm(way)) or 1.0)
    return along[0] > along[1]


def _is_one_rate(first: FirstAdam) -> bool:
    greatest = max(abs(first.rate_a), abs(first.rate_b))
    return min(first.rate_a, first.rate_b) > 0 and abs(first.rate_a - first.rate_b) <= _SIZE * greatest


def _read(both: tuple[TensorRef, TensorRef] | None) -> list[Any] | None:
    if both is None or not all(ref.is_readable for ref in both) or both[0].shape != both[1].shape:
        return None
    try:
        return [pages.array(ref).reshape(-1) for ref in both]
    except RldbgError:
        return None
