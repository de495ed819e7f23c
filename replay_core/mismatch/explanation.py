"""Why engine and trainer disagree: the candidates tried, the ones named, and what is left against the floor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import numpy as np

from replay_core.collecting import settled
from replay_core.diagnose.rules.mismatch import stated_temperature
from replay_core.errors import JobCancelledError, ModelError, RldbgError
from replay_core.jobs import IMPORTING, OnEvent
from replay_core.mismatch.candidate import LITTLE, PART, WHOLE, Candidate, Side
from replay_core.mismatch.figures import Array, GapSize
from replay_core.mismatch.setting import Asked, Grid, Layout, Setting
from replay_core.mismatch.sides import Sides, Unanswered, sides_of
from replay_core.mismatch.signatures import outliers, signatures
from replay_core.mismatch.tokens import TokenFault, token_faults, values_that_are_none
from replay_core.records import Run
from replay_core.replay.flags import settings_known
from replay_core.replay.plan import ReplayPlan
from replay_core.replay.references import CHECKPOINT, resolve

if TYPE_CHECKING:
    from replay_core.mismatch.trials import Trials

#: Sequences of the first round; each round takes twice as many, until two agree.
_FIRST = 8
#: Shares of two rounds that are no further apart are one answer.
_STABLE = 0.05
#: Up to so many floors a gap is rounding (referee B5), and nothing is named.
NOISE = 2.0
#: A candidate that explains less than this is not joined with another.
_SOME = 0.08
#: Less than this part of a gap is looked into no further.
_NOTHING = 0.005
#: Of the candidates that explain a part so many are joined with one another.
_PARTS = 5
#: Causes that are rounding themselves: within the floor they are nothing to name.
_ROUNDING = ("precision", "attention")
_TEMPERATURES = tuple(float(one) for one in np.geomspace(0.3, 3.0, 21))
#: Around the best of them, closer and closer: a step of the former to either side in nine.
_WIDTHS = tuple((_TEMPERATURES[1] / _TEMPERATURES[0]) ** 0.25**power for power in range(4))
_TOP_K = (2, 3, 5, 8, 10, 15, 20, 30, 40, 50, 64, 80, 100, 128, 200)
_TOP_P = (*(round(0.05 * step, 2) for step in range(6, 20)), 0.97, 0.98, 0.99)
_MIN_P = (0.01, 0.02, 0.05, 0.1, 0.2)
#: Bits of the significand below bfloat16's: the floor halves with each.
_FINER = {"bfloat16": 0, "float16": 3, "float32": 16}
#: Older and newer checkpoints that are tried, of those the dump notes.
_CHECKPOINTS = 4


@dataclass(frozen=True, slots=True)
class RoundingFloor:
    """What rounding leaves, nats: of one forward in bfloat16, and of the two sides' dtypes together."""

    bfloat16: float
    runs: int
    trainer: str = "float32"
    engine: str = "float32"
    #: Whether it is a difference of two replays, in place of perturbed runs.
    is_rough: bool = False

    def between(self, trainer: str, engine: str) -> float:
        return float(np.hypot(self.of(trainer), self.of(engine)))

    def of(self, dtype: str) -> float:
        return self.bfloat16 * 2.0 ** -_FINER[dtype]

    @property
    def value(self) -> float:
        return self.between(self.trainer, self.engine)


@dataclass(frozen=True, slots=True)
class SequenceGap:
    """A sample: its compared tokens, mean |d|, share of the sum of |d|, and which weights explain which of its
    response's tokens (name, begin, end)."""

    sample: int
    tokens: int
    mean: float
    share: float
    is_outlier: bool
    spans: list[tuple[str, int, int]]


@dataclass
class Mismatch:
    """The answer. `sides` None: there was nothing to compare, `lacks` says what."""

    run: Run
    step: int | None
    sides: Sides | None = None
    faults: list[TokenFault] = field(default_factory=list)
    candidates: list[Candidate] = field(default_factory=list)
    lacks: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    model: str | None = None
    tried_on: list[int] = field(default_factory=list)
    #: The gap of the samples that were tried, and how far the model's own numbers are from either side there.
    tried: GapSize | None = None
    reproduced: tuple[float, float] | None = None
    floor: RoundingFloor | None = None
    rerouted: tuple[float, int] | None = None
    #: Share of the live router's choices that rounding in the sides' dtype turns; None without a router.
    turned: float | None = None
    spans: dict[int, list[tuple[str, int, int]]] = field(default_factory=dict)
    outliers_B: Array | None = None

    @property
    def gap(self) -> GapSize | None:
        return None if self.sides is None else GapSize.of(self.sides.d_M)

    @property
    def sequences(self) -> list[SequenceGap]:
        """The samples that have compared tokens, those furthest off first."""
        if self.sides is None or self.outliers_B is None:
            return []
        each_B = np.nan_to_num(self.sides.between.by_sample_B)
        counts_B = np.bincount(self.sides.sample_M, minlength=each_B.size)
        total = float((each_B * counts_B).sum()) or 1.0
        return [
            SequenceGap(
                int(row), int(counts_B[row]), float(each_B[row]), float(each_B[row] * counts_B[row]) / total,
                bool(self.outliers_B[row]), self.spans.get(int(row), []),
            )
            for row in np.argsort(-each_B)
            if counts_B[row]
        ]  # fmt: skip

    @property
    def named(self) -> list[Candidate]:
        return [one for one in self.candidates if one.named]

    @property
    def explained(self) -> float | None:
        """What the named causes explain together: they were replayed together, or are one."""
        return max((one.share for one in self.named if one.share is not None), default=None)

    @property
    def left(self) -> float | None:
        """mean |d| of the tried samples after the named causes."""
        sizes = [one.left.mean for one in self.named if one.left is not None]
        return min(sizes) if sizes else None if self.tried is None else self.tried.mean


def explain(run: Run, asked: Asked, step: int | None, on_event: OnEvent) -> Mismatch:
    """The mismatch of a step (None: the last that has both sides).

    Raises:
        SelectionError, RequestError, ModelError: what was asked for is not there.
    """
    found = sides_of(run, step)
    tokenizer = () if asked.tokenizer is None else (asked.tokenizer,)
    if isinstance(found, Unanswered):
        answer = Mismatch(run, found.step, lacks=list(found.lacks))
        if found.batch is not None:
            answer.faults, notes = token_faults(run, found.batch, tokenizer)
            answer.notes += notes
        return answer
    answer = Mismatch(run, found.step, found)
    answer.faults, notes = token_faults(run, found.batch, tokenizer)
    answer.faults += values_that_are_none(found.batch)
    answer.notes += notes
    answer.candidates = signatures(found)
    answer.outliers_B = outliers(found)
    if asked.model is None and not run.models:
        answer.notes.append("no model: told from the recorded numbers alone; --model DIRECTORY replays the candidates")
    elif found.batch.tokens_N is None:
        answer.notes.append("the dump holds no token ids: no candidate can be replayed")
    else:
        try:
            plan = ReplayPlan(
                str(run.path), found.step or 0, 0, 0, asked.model or CHECKPOINT, "", base=asked.base_model
            )
            resolve(plan, run)  # weights that are not there: said before anything is imported
            on_event(IMPORTING)
            from replay_core.mismatch.trials import Trials  # torch and transformers: 3.4 s

            with settled():
                _Explaining(answer, found, Trials(found, asked, on_event), asked).run()
        except ModelError:
            if asked.model is not None:
                raise
            answer.notes.append("the weights that the dump notes are not there: --model DIRECTORY names them")
    return answer


#: A change is the engine's, or the trainer's: the gap it makes is the one, or minus the one.
_READINGS: tuple[tuple[Side, float], ...] = (("engine", 1.0), ("trainer", -1.0))


class _Explaining:
    """Rounds of replays, on more and more sequences, until the answer stays."""

    def __init__(self, answer: Mismatch, sides: Sides, trials: Trials, asked: Asked) -> None:
        self.answer, self.sides, self.trials, self.asked = answer, sides, trials, asked
        self.base = self.started = Setting()
        self.floor = RoundingFloor(0.0, 0)
        self.d = sides.d_M
        #: Why candidates could not be tried, by their names.
        self.unavailable: dict[str, str] = {}

    def run(self) -> None:
        """Fill in the answer."""
        order, size = self._order(), _FIRST
        before: dict[tuple[str, Side], float] | None = None
        singles: list[Setting] = []
        while True:
            rows = order[:size]
            self.trials.choose(rows)
            self.d = self.sides.d_M[self.trials.chosen_M]
            if before is None:
                self._begin()
                singles = self._settings()
            tried = self._round(singles)
            now = {(one.name, one.side): one.share or 0.0 for one in tried if one.named}
            is_same = before is not None and set(now) == set(before)
            if len(rows) == len(order) or (
                is_same and all(abs(now[one] - (before or {})[one]) <= _STABLE for one in now)
            ):
                break
            before, size = now, 2 * size
            # What explains nothing at all of the first sequences is not tried on more.
            promising = {one.setting for one in tried if (one.share or 0) > 0 and one.setting is not None}
            kept = ("weights", "routing")
            singles = [one for one in singles if one in promising or one.family(self.base) in kept]
        self._conclude(tried, rows)

    def _order(self) -> list[int]:
        """The samples in the order in which they are taken: the one that is furthest off, then by chance; all of the
        step's where packs leak, for their neighbours."""
        each_B = self.sides.between.by_sample_B
        known = np.flatnonzero(np.isfinite(each_B))
        if self.sides.between.leak is not None:
            return [int(one) for one in range(len(self.sides.batch))][: self.asked.most]
        worst = int(known[np.argmax(each_B[known])])
        rest = np.random.default_rng(0).permutation(known[known != worst])
        return [worst, *(int(one) for one in rest)][: self.asked.most]

    # ---- where the trainer stands

    def _begin(self) -> None:
        """The settings of the trainer's own forward: what reproduces it best is what a candidate is a change of."""
        stated = stated_temperature(self.sides.batch)
        start = Setting(attention=self.asked.attention, temperature=stated or 1.0)
        first = self.trials.values([start])[start]
        if isinstance(first, RldbgError):
            raise first
        self.answer.model = self.trials.load(start).reference
        trainer = self.sides.trainer_M[self.trials.chosen_M]

        def off(values: Array | RldbgError) -> float:
            return float("inf") if isinstance(values, RldbgError) else float(np.nanmean(np.abs(trainer - values)))

        best, least = start, off(first)

        def nearer(settings: Sequence[Setting]) -> None:
            nonlocal best, least
            tried = self.trials.values(settings)
            setting, distance = min(((one, off(values)) for one, values in tried.items()), key=lambda one: one[1])
            # Less than half is no luck.
            if distance < 0.5 * least:
                best, least = setting, distance

        heats = [replace(start, temperature=heat) for heat in (*_TEMPERATURES, 1.0)]
        for width in _WIDTHS:
            tried = self.trials.values(heats)
            near = min(tried, key=lambda one: off(tried[one]))
            heats = _around(near, width)
        nearer(heats)
        nearer([replace(best, dtype=dtype, attention=kernel)
                for dtype in ("bfloat16", "float16") for kernel in ("sdpa", "eager")])  # fmt: skip
        self.base, self.started = best, start
        if best.temperature != start.temperature:
            self.answer.notes.append(f"the trainer's own numbers are those of temperature {best.temperature:.3g}")
        self.floor = self._floor()
        rollout = self.sides.rollout_M[self.trials.chosen_M]
        values = self.trials.values([best])[best]
        assert not isinstance(values, RldbgError)
        self.answer.reproduced = least, float(np.nanmean(np.abs(rollout - values)))

    def _floor(self) -> RoundingFloor:
        """Rounding's own, and the trainer's dtype: as the dump says, as it was reproduced, else by its size and by how
        much of it is the rounding that a replay in that dtype has as well."""
        measured, runs, rough = self._measured()
        said = settings_known(self.sides.run.flags).get("dtype")
        floor = RoundingFloor(measured, runs, is_rough=rough)
        if self.base.dtype != "float32":
            said = self.base.dtype
        if said is None:
            said = self._told(self.sides.trainer_M[self.trials.chosen_M], self.base, floor) or "float32"
        return replace(floor, trainer=said, engine=said)

    def _measured(self) -> tuple[float, int, bool]:
        from replay_core.referee.floor import rounding_floor
        from replay_core.referee.limits import FLOOR_RUNS
        from replay_core.replay.held import HOLDER

        batch = self.trials.batch()
        some = batch.take(range(min(batch.rows, 4)))
        try:
            model = self.trials.load(Setting(dtype="bfloat16", attention="eager"))
            about_BS = self.trials.compared_BS()[: some.rows]
            noise_N = rounding_floor(model.causal_lm, "bfloat16", some.ids_BS, some.valid_BS, about_BS,
                                     self.base.temperature)  # fmt: skip
            HOLDER.drop()
            return float(noise_N.mean()), FLOOR_RUNS, False
        except JobCancelledError:
            raise
        except (RldbgError, RuntimeError, NotImplementedError, StopIteration, ValueError):
            a, b = replace(self.base, dtype="float32"), replace(self.base, dtype="bfloat16")
            values = self.trials.values([a, b])
            if isinstance(values[a], RldbgError) or isinstance(values[b], RldbgError):
                return 0.0, 0, True
            return float(np.sqrt(np.nanmean((values[a] - values[b]) ** 2))), 1, True  # type: ignore[operator]

    def _told(self, side: Array, setting: Setting, floor: RoundingFloor) -> str | None:
        """The dtype whose rounding a side's distance from the float32 replay is: by size and by direction."""
        exact = replace(setting, dtype="float32")
        rough = {one: replace(setting, dtype=one) for one in ("bfloat16", "float16")}
        values = self.trials.values([exact, *rough.values()])
        if isinstance(values[exact], RldbgError):
            return None
        residual = side - values[exact]
        size = float(np.nanmean(np.abs(residual)))
        for dtype, one in rough.items():
            rounded = values[one]
            if isinstance(rounded, RldbgError) or not floor.of(dtype) / 3 <= size <= 3 * floor.of(dtype):
                continue
            if _points(residual, rounded - values[exact]):
                return dtype
        return None

    # ---- candidates

    def _settings(self) -> list[Setting]:
        """Every single change of the base that this run and model allow, but those of a number (`_grids`)."""
        base, found = self.base, list[Setting]()
        for place, called in self._weights():
            found.append(replace(base, weights=place, called=called))
        found += [replace(base, dtype=one) for one in ("float32", "bfloat16", "float16") if one != base.dtype]
        found += [replace(base, dtype=one, head="float32") for one in ("bfloat16", "float16")]
        found += [replace(base, attention=one) for one in ("eager", "sdpa") if one != base.attention]
        found += [
            replace(base, layout=one)
            for one in get_args(Layout)
            if one != base.layout and (one != "packs that leak" or self.sides.between.leak is not None)
        ]
        found += [replace(base, grid=one) for one in get_args(Grid)]
        if self._has_adapter():
            found += [replace(base, adapter=one) for one in (0.0, 0.5, 2.0, 4.0, 8.0)]
        if self.trials.has_routing:
            found.append(replace(base, routing="experts"))
            if self.trials.has_routing_weights:
                found.append(replace(base, routing="experts and weights"))
        return [*found, replace(base, shift=1), replace(base, shift=-1)]

    def _has_adapter(self) -> bool:
        model = self.trials.load(replace(self.base, attention=self.asked.attention))
        return any(hasattr(module, "lora_B") for module in model.causal_lm.modules())

    def _weights(self) -> list[tuple[str, str]]:
        """(reference, what it is called) of the other weights: those named, and those noted for steps nearby."""
        run, step = self.sides.run, self.sides.step
        found = [(one, f"weights {one}") for one in self.asked.older]
        folder = run.path if run.path.is_dir() else run.path.parent
        noted = [(known, str(folder / place)) for known, place in run.models.items()
                 if isinstance(known, int) and (folder / place).is_dir()]  # fmt: skip
        here = step if step is not None else max((known for known, _ in noted), default=0)
        own = Path(self.answer.model or "")
        near = sorted((one for one in noted if Path(one[1]).resolve() != own), key=lambda one: abs(one[0] - here))
        for known, place in near[:_CHECKPOINTS]:
            found.append((place, f"weights of step {known} ({'older' if known < here else 'newer'})"))
        return found

    def _grids(self, base: Setting) -> list[Setting]:
        """Changes by a number, of which the best is kept: every readout of one forward."""
        return [
            *(replace(base, temperature=one) for one in _TEMPERATURES),
            *(replace(base, temperature=base.temperature / one) for one in (0.9, 1.1)),
            replace(base, temperature=1.0),
            *(replace(base, top_k=one) for one in _TOP_K),
            *(replace(base, top_p=one) for one in _TOP_P),
            *(replace(base, min_p=one) for one in _MIN_P),
        ]

    def _weighed(self, settings: Sequence[Setting]) -> list[Candidate]:
        """Both readings of every setting: the engine has it, or the trainer has."""
        values = self.trials.values([self.base, *settings])
        base = values[self.base]
        assert not isinstance(base, RldbgError)
        found = []
        for one in settings:
            if one == self.base:
                continue
            here, family = values[one], one.family(self.base)
            if isinstance(here, RldbgError):
                self.unavailable[one.words(self.base)] = here.in_one_line
                continue
            predicted = base - here
            for side, sign in _READINGS:
                left = self.d - sign * predicted
                candidate = Candidate(
                    one.words(self.base),
                    family,
                    side,
                    "replay",
                    left,
                    self._floor_under(one),
                    setting=one,
                )
                if one.dtype != self.base.dtype:
                    self._as_noise(candidate, one, sign, predicted)
                found.append(candidate.weigh(self.d, self.floor.value))
        return found

    def _floor_under(self, setting: Setting) -> float:
        dtype = self.floor.engine if setting.dtype == self.base.dtype else setting.dtype
        return self.floor.between(self.floor.trainer, dtype)

    def _as_noise(self, candidate: Candidate, setting: Setting, sign: float, predicted: Array) -> None:
        """Rounding is not predicted where the kernel is another: then the gap itself is what it leaves; and it must at
        least point where a replay in that dtype goes."""
        rest = replace(setting, dtype=self.base.dtype, head=None)
        other = self.trials.values([self.base, rest])
        base, without = other[self.base], other[rest]
        assert not isinstance(base, RldbgError)
        if isinstance(without, RldbgError):
            return
        unrounded = self.d - sign * (base - without)
        rounding = predicted - (base - without)
        if not _points(unrounded, sign * rounding):
            candidate.floor = self.floor.value  # nothing says that it is this rounding
        elif np.nanmean(np.abs(unrounded)) < np.nanmean(np.abs(candidate.left_M)):  # type: ignore[arg-type]
            candidate.left_M = unrounded

    # ---- a round

    def _round(self, singles: Sequence[Setting]) -> list[Candidate]:
        tried = [*self._weighed(singles), *self._best_numbers(self.base)]
        tried += self._mixed(tried)
        observed = float(np.abs(self.d).mean())
        best = next((one for one in _in_order(tried) if one.share is not None), None)
        if best is None:
            return tried
        if observed <= NOISE * self.floor.value:
            # Rounding may be as large; but what is predicted token by token is no rounding.
            told = [one for one in tried if one.family not in _ROUNDING and _least(one) < (1 - PART) * observed]
            for one in sorted(told, key=_least)[:1]:
                one.named = True
            return _in_order(tried)
        if _least(best) > max(NOISE * best.floor, _NOTHING * observed):
            pairs = self._pairs(_in_order(tried))
            tried += pairs
            joint = min(pairs, key=_above, default=None)
            # The second takes at least half of what the first leaves above the floor.
            if joint is not None and _above(joint) < (1 - PART) * _above(best):
                best = joint
        best.named = (best.share or 0) >= PART
        return _in_order(tried)

    def _best_numbers(self, base: Setting) -> list[Candidate]:
        """Of each number (temperature, top-k, top-p, min-p) the value that leaves least, found in two steps."""
        found: list[Candidate] = []
        weighed = self._weighed([one for one in self._grids(base) if one != base])
        for name in ("temperature", "top_k", "top_p", "min_p"):
            own = [one for one in weighed if name in one.setting.changed(base)]
            if not own:
                continue
            best = min(own, key=_least)
            if name == "temperature" and (best.share or 0) > _SOME:
                for width in _WIDTHS:
                    best = min([best, *self._weighed(_around(best.setting, width))], key=_least)
            found.append(best)
        return found

    def _pairs(self, ordered: Sequence[Candidate]) -> list[Candidate]:
        """Two at once, where each explains a part."""
        known = [one for one in ordered if one.setting is not None]
        kept: dict[str, Candidate] = {}
        for one in (one for one in known if (one.share or 0) > _SOME):
            kept.setdefault(f"{one.family} {one.side}", one)
        several = list(kept.values())[:_PARTS]
        couples = [(a, b) for number, a in enumerate(several) for b in several[number + 1 :]]
        # The one that explains most may hide another that is small beside it.
        couples += [(known[0], one) for one in known[1:] if one not in several and one.family != known[0].family]
        found = []
        for a, b in couples:
            if a.side == b.side:
                joint = a.setting.joined(b.setting, self.base)
                if joint is None:
                    continue
                both = [joint]
                if "top_p" in joint.changed(self.base):
                    both += [replace(joint, top_p=one) for one in _TOP_P]
                pair = self._best_of(both, a.side)
                if pair is not None and "temperature" in joint.changed(self.base):
                    for width in (1.25, *_WIDTHS[1:]):
                        pair = self._best_of([pair.setting, *_around(pair.setting, width)], a.side) or pair
                found += [] if pair is None else [pair]
        return found

    def _best_of(self, settings: Sequence[Setting], side: Side) -> Candidate | None:
        return min((one for one in self._weighed(settings) if one.side == side), key=_least, default=None)

    def _mixed(self, tried: Sequence[Candidate]) -> list[Candidate]:
        """Each sequence's beginning from other weights and its end from these: a stale prefix, versions mixed. Every
        other checkpoint is tried, with the place in each sequence that leaves least."""
        found = []
        sample_M = self.sides.sample_M[self.trials.chosen_M]
        for one in tried:
            if one.family != "weights" or one.side != "engine" or one.left_M is None or not (one.share or 0) < WHOLE:
                continue
            old, new = np.abs(np.nan_to_num(one.left_M)), np.abs(self.d)
            left, spans = self.d.copy(), {}
            for sample in np.unique(sample_M):
                at = np.flatnonzero(sample_M == sample)
                costs = np.concatenate(([0.0], np.cumsum(old[at]))) + np.concatenate(
                    (np.cumsum(new[at][::-1])[::-1], [0.0])
                )
                cut = int(costs.argmin())
                left[at[:cut]] = one.left_M[at[:cut]]
                spans[int(sample)] = [(one.name, 0, cut), ("these weights", cut, int(at.size))]
            mixed = Candidate(f"{one.name} up to a token of each sequence, these from there", "versions", "engine",
                              "replay", left, one.floor).weigh(self.d, self.floor.value)  # fmt: skip
            inside = sum(0 < each[0][2] < each[1][2] for each in spans.values())
            if (mixed.share or 0) > (one.share or 0) + 0.1 and inside:
                found.append(mixed)
                self.answer.spans = {
                    sample: [span for span in each if span[2] > span[1]] for sample, each in spans.items()
                }
        return found

    # ---- the end

    def _conclude(self, tried: list[Candidate], rows: list[int]) -> None:
        answer = self.answer
        answer.tried_on, answer.tried = list(rows), GapSize.of(self.d)
        answer.rerouted, answer.notes = self.trials.rerouted, [*answer.notes, *self.trials.notes]
        named = [one for one in tried if one.named]
        for one in named:
            self._turn(one)
        engine = next((one.setting.dtype for one in named if one.setting is not None and one.side == "engine" and
                       one.setting.dtype != self.base.dtype), self.floor.engine)  # fmt: skip
        answer.floor = replace(self.floor, engine=engine)
        if self.trials.has_routing:
            coarse = max((self.floor.trainer, engine), key=lambda dtype: -_FINER[dtype])
            plain = replace(self.base, dtype="float32", routing="live")
            answer.turned = self.trials.turned(plain, replace(plain, dtype=coarse))
        if self.floor.is_rough:
            answer.notes.append("the floor is the difference of two replays: this model's code does not run perturbed")
        if self._is_stranger(named):
            trainer, rollout = answer.reproduced or (0.0, 0.0)
            for one in tried:
                one.named = False
            answer.lacks.append(
                f"the model of this step: {answer.model} is {trainer:.3g} nats off the trainer's numbers and "
                f"{rollout:.3g} off the rollout's, and they are {answer.tried.mean:.3g} apart"
            )
        exact = [
            one
            for one in tried
            if not one.named and one.left is not None and one.left.mean < LITTLE * answer.tried.mean
        ]
        if not named and exact and not answer.lacks:
            answer.notes.append(f"within the floor, and reproduced token by token by {exact[0].side}: {exact[0].name}")
        # What a replay predicts supersedes what the numbers alone hint at.
        for one in answer.candidates:
            one.named = False
        shown = _one_a_name(tried)
        told = [Candidate(name, "none", told_by="replay", why_not=why) for name, why in self.unavailable.items()]
        answer.candidates = [*shown, *answer.candidates, *told]
        if not any(one.family == "versions" and one.named for one in tried):
            answer.spans = {}

    def _turn(self, one: Candidate) -> None:
        """An engine at the stated temperature (else 1) beside a trainer that is not: the trainer differs."""
        if one.setting is None or set(one.setting.changed(self.base)) != {"temperature"} or one.side != "engine":
            return
        stated, own = self.started.temperature, self.base.temperature
        if own != stated and abs(one.setting.temperature / stated - 1) < 0.01:
            one.side, one.name = "trainer", f"temperature {own:.3g} (against {stated:.3g})"

    def _is_stranger(self, named: Sequence[Candidate]) -> bool:
        """Whether the model is none of either side's: both are further from it than from each other."""
        if self.answer.reproduced is None or any((one.share or 0) >= WHOLE for one in named):
            return False
        far = max(5 * self.floor.bfloat16, 0.02)
        apart = float(np.abs(self.d).mean())
        return all(one > max(far, 1.5 * apart) for one in self.answer.reproduced)


def _around(one: Setting, width: float) -> list[Setting]:
    """Temperatures around a setting's, up to a factor of `width` to either side, and the round numbers there: people
    set those."""
    heats = [one.temperature * float(heat) for heat in np.geomspace(1 / width, width, 9)]
    plain = {round(heat, digits) for heat in heats for digits in (1, 2)}
    heats += [heat for heat in plain if heat > 0 and 1 / width <= heat / one.temperature <= width]
    return [replace(one, temperature=heat) for heat in heats]


def _points(residual: Array, toward: Array) -> bool:
    """Whether one goes where the other does, by more than chance: their correlation past .1 and four deviations."""
    known = np.isfinite(residual) & np.isfinite(toward)
    if known.sum() < 8 or not residual[known].std() or not toward[known].std():
        return False
    # By rank of sizes bounded: a single outlier is no direction.
    bound_a, bound_b = (4 * float(np.median(np.abs(one[known]))) + 1e-12 for one in (residual, toward))
    a, b = np.clip(residual[known], -bound_a, bound_a), np.clip(toward[known], -bound_b, bound_b)
    if not a.std() or not b.std():
        return False
    return float(np.corrcoef(a, b)[0, 1]) > max(0.1, 4 / float(np.sqrt(known.sum())))


def _least(one: Candidate) -> float:
    size = one.left
    return float("inf") if size is None or not np.isfinite(size.mean) else size.mean


def _above(one: Candidate) -> float:
    """What it leaves above its floor, nats."""
    return max(0.0, _least(one) - one.floor)


def _in_order(tried: Sequence[Candidate]) -> list[Candidate]:
    """The named first, then by what they explain; of equals the one that leaves least."""

    def worth(one: Candidate) -> tuple[bool, float, float]:
        share = -9.0 if one.share is None else one.share
        return not one.named, -round(share, 2), _least(one)

    return sorted(tried, key=worth)


def _one_a_name(tried: Sequence[Candidate]) -> list[Candidate]:
    """Of the two readings of a setting the one that leaves less."""
    kept: dict[str, Candidate] = {}
    for one in _in_order(tried):
        kept.setdefault(one.name, one)
    return list(kept.values())
