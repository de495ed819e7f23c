"""The search: rounds of replays on more and more sequences, each cause tried, and joined where one leaves something."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
from msgspec.structs import replace

from replay_core.errors import RldbgError
from replay_core.mismatch.candidate import PART, READINGS, ROUNDING, WHOLE, Candidate, Side
from replay_core.mismatch.figures import GapSize
from replay_core.mismatch.setting import NUMBERS, WIDTHS, Asked, Grid, Layout, Setting, around
from replay_core.mismatch.sides import Sides
from replay_core.mismatch.standing import FINER, NOISE, Standing, points

if TYPE_CHECKING:
    from replay_core.mismatch.explanation import Mismatch
    from replay_core.mismatch.trials import Trials

#: Sequences of the first round; each round takes twice as many, until two agree.
_FIRST = 8
#: Shares of two rounds that are no further apart are one answer.
_STABLE = 0.05
#: A candidate that explains less than this is not the first of several.
_SOME = 0.08
#: Less than this part of a gap is looked into no further.
_NOTHING = 0.001
#: Of the candidates that explain a part so many are joined with others, and each with so many that need a forward.
_PARTS, _JOINTS = 4, 3
#: What takes a part of a gap and leaves more floors than this is no cause that is known: a temperature flattens any
#: two distributions that differ towards each other, and takes 72 % of what other weights do (1.8e6 floors are left).
_FAR = 100
#: Causes at once.
_DEPTH = 3
#: Within the floor a cause must stand out by so many deviations, and leave at most this part of the gap's square.
_DEVIATIONS, _SQUARE = 5.0, 0.9
#: What a cause leaves of a gap that it predicts token by token, whatever the floor.
_LITTLE = 0.1
#: Older and newer checkpoints that are tried, of those the dump notes.
_CHECKPOINTS = 4

#: Engine's and trainer's settings.
Pair = tuple[Setting, Setting]


class Search:
    """Which settings of which side close the gap."""

    def __init__(self, answer: Mismatch, sides: Sides, trials: Trials, asked: Asked) -> None:
        self.answer, self.sides, self.trials, self.asked = answer, sides, trials, asked
        self.d = sides.d_M
        #: Why candidates could not be tried, by their names.
        self.unavailable: dict[str, str] = {}
        order = self._order()
        trials.choose(order[:_FIRST])
        self.standing = Standing(trials, asked.attention)
        self.base, self.floor, self.readings = self.standing.base, self.standing.floor, self.standing.sides_off
        answer.model = trials.load(self.standing.stated).reference
        answer.reproduced = self.standing.reproduced
        self._run(order)

    def _run(self, order: Sequence[int]) -> None:
        size = _FIRST
        before: dict[tuple[str, Side], float] | None = None
        singles = self._settings()
        while True:
            rows = order[:size]
            if before is not None:
                self.trials.choose(rows)
            self.d = self.sides.d_M[self.trials.chosen_M]
            tried = self._round(singles)
            now = {(one.name, one.side): one.share or 0.0 for one in tried if one.named}
            is_same = before is not None and set(now) == set(before)
            if len(rows) == len(order) or (
                is_same and all(abs(now[one] - (before or {})[one]) <= _STABLE for one in now)
            ):
                break
            before, size = now, 2 * size
            # What explains nothing of the first sequences, alone or joined, is not tried on more.
            promising = [each for one in tried if (one.share or 0) > 0 for each in (one.engine, one.trainer) if each]
            parts = [each.changed(self.base).items() for each in promising]
            kept = ("weights", "routing")
            singles = [
                one
                for one in singles
                if one.family(self.base) in kept or any(one.changed(self.base).items() <= part for part in parts)
            ]
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

    # ---- candidates

    def _settings(self) -> list[Setting]:
        """Every single change of the base that this run and model allow, but those of a number."""
        base, found = self.base, list[Setting]()
        for place, called in self._weights():
            found.append(replace(base, weights=place, called=called))
        found += [replace(base, dtype=one) for one in ("bfloat16", "float16")]
        found += [replace(base, dtype=one, head="float32") for one in ("bfloat16", "float16")]
        found += [replace(base, attention=one) for one in ("eager", "sdpa") if one != base.attention]
        found += [
            replace(base, layout=one)
            for one in get_args(Layout)
            if one != base.layout and (one != "packs that leak" or self.sides.between.leak is not None)
        ]
        found += [replace(base, grid=one) for one in get_args(Grid)]
        model = self.trials.load(replace(base, attention=self.asked.attention))
        if any(hasattr(module, "lora_B") for module in model.causal_lm.modules()):
            found += [replace(base, adapter=one) for one in (0.0, 0.5, 2.0, 4.0, 8.0)]
        if self.trials.has_routing:
            found.append(replace(base, routing="experts"))
            if self.trials.has_routing_weights:
                found.append(replace(base, routing="experts and weights"))
        return found

    def _weights(self) -> list[tuple[str, str]]:
        """(reference, what it is called) of the other weights: those named, those noted for steps nearby, and the first
        of the run, which an engine still has that no update ever reached."""
        run, step = self.sides.run, self.sides.step
        found = [(one, f"weights {one}") for one in self.asked.older]
        folder = run.path if run.path.is_dir() else run.path.parent
        noted = [(known, str(folder / place)) for known, place in run.models.items()
                 if isinstance(known, int) and (folder / place).is_dir()]  # fmt: skip
        here = step if step is not None else max((known for known, _ in noted), default=0)
        own = Path(self.answer.model or "")
        near = sorted((one for one in noted if Path(one[1]).resolve() != own), key=lambda one: abs(one[0] - here))
        first = [one for one in near[_CHECKPOINTS:] if one[0] == min(noted)[0]]
        for known, place in near[:_CHECKPOINTS] + first:
            found.append((place, f"weights of step {known} ({'older' if known < here else 'newer'})"))
        return found

    def _of(self, side: Side, one: Setting, beside: Candidate | None = None) -> Pair | None:
        """A change on one side, on top of a candidate's; None where that changes the same there."""
        engine, trainer = self._pair(beside)
        if side == "engine":
            joint = engine.joined(one, self.base)
            return None if joint is None else (joint, trainer)
        joint = trainer.joined(one, self.base)
        return None if joint is None else (engine, joint)

    def _pair(self, one: Candidate | None) -> Pair:
        base = self.base
        return (base, base) if one is None else (one.engine or base, one.trainer or base)

    def _weighed(self, pairs: Sequence[Pair | None]) -> list[Candidate]:
        """What each pair of settings leaves: d = trainer - rollout is theirs."""
        asked = [pair for pair in dict.fromkeys(pairs) if pair is not None and pair != (self.base, self.base)]
        values = self.trials.values(list({self.base: 0} | {one: 0 for pair in asked for one in pair}))
        found = []
        for engine, trainer in asked:
            wrong = [(one, values[one]) for one in (engine, trainer) if isinstance(values[one], RldbgError)]
            if wrong:
                self.unavailable[wrong[0][0].words(self.base)] = wrong[0][1].in_one_line  # type: ignore[union-attr]
                continue
            said = [one.words(self.base) for one in (engine, trainer) if one != self.base]
            kinds = {one.family(self.base) for one in (engine, trainer) if one != self.base}
            candidate = Candidate(
                said[0] if len(said) == 1 else f"engine: {said[0]}, trainer: {said[1]}",
                kinds.pop() if len(kinds) == 1 else "several",
                "both" if len(said) == 2 else "engine" if engine != self.base else "trainer",
                "replay",
                self.d - (values[trainer] - values[engine]),  # type: ignore[operator]
                engine=engine,
                trainer=trainer,
            )
            found.append(self._against_floor(candidate))
        return found

    def _against_floor(self, one: Candidate) -> Candidate:
        """Its floor, and what it explains above it: a dtype's against the floor of two sides that are alike."""
        engine, trainer = self._pair(one)
        dtypes = [
            side.dtype if side.dtype != self.base.dtype else known
            for side, known in ((trainer, self.floor.trainer), (engine, self.floor.engine))
        ]
        one.floor = self.floor.between(*dtypes)
        is_rounding = any(side.dtype != self.base.dtype for side in (engine, trainer))
        if is_rounding:
            self._as_noise(one)
        return one.weigh(self.d, self.standing.floor.value if is_rounding else self.floor.value)

    def _as_noise(self, one: Candidate) -> None:
        """Rounding is not predicted where the kernel is another: then the gap itself is what it leaves; and it must at
        least point where a replay in that dtype goes."""
        bare = [replace(side, dtype=self.base.dtype, head=self.base.head) for side in self._pair(one)]
        values = self.trials.values(bare)
        engine, trainer = (values[side] for side in bare)
        if isinstance(engine, RldbgError) or isinstance(trainer, RldbgError) or one.left_M is None:
            return
        unrounded = self.d - (trainer - engine)
        if not points(unrounded, unrounded - one.left_M):
            one.floor = self.standing.floor.value  # nothing says that it is this rounding
        elif np.nanmean(np.abs(unrounded)) < np.nanmean(np.abs(one.left_M)):
            one.left_M = unrounded

    def _numbers(self, beside: Candidate | None = None) -> list[Candidate]:
        """Of each number (temperature, top-k, top-p, min-p, shift) the value that leaves least, on each side."""
        found = []
        for name, values in NUMBERS.items():
            heats = [self.base.temperature * one for one in (0.9, 1.1)] if name == "temperature" else []
            for side in self.readings:
                changes: list[dict[str, Any]] = [{name: one} for one in (*values, *heats)]
                ones = [replace(self.base, **change) for change in changes]
                weighed = self._weighed([self._of(side, one, beside) for one in ones])
                if name == "shift":
                    found += weighed
                elif weighed:
                    best = min(weighed, key=_least)
                    before = float(np.abs(self.d).mean()) if beside is None else _least(beside)
                    found.append(self._refined(best) if _least(best) < (1 - _SOME) * before else best)
        return found

    def _refined(self, one: Candidate) -> Candidate:
        """Its numbers looked for more closely: each beside the others."""
        numbers = [(at, name) for at, side in enumerate(self._pair(one)) for name in side.changed(self.base)
                   if name in NUMBERS and name != "shift"]  # fmt: skip
        is_joint = sum(len(side.changed(self.base)) for side in self._pair(one)) > 1
        for at, name in numbers * min(2, len(numbers)):
            for width in (WIDTHS[0] ** 2, *WIDTHS) if name == "temperature" else ():
                one = self._best_of(one, at, around(self._pair(one)[at], width))
            if name != "temperature" and is_joint:
                own = self._pair(one)[at]
                one = self._best_of(one, at, [replace(own, **{name: value}) for value in NUMBERS[name]])
        return one

    def _best_of(self, one: Candidate, at: int, settings: Sequence[Setting]) -> Candidate:
        engine, trainer = self._pair(one)
        pairs = [(setting, trainer) if at == 0 else (engine, setting) for setting in settings]
        return min([one, *self._weighed(pairs)], key=_least)

    # ---- a round

    def _round(self, settings: Sequence[Setting]) -> list[Candidate]:
        singles = self._weighed([self._of(side, one) for one in settings for side in self.readings])
        singles += self._numbers()
        self._tell(None, singles)
        tried = [*singles, *self._mixed(singles)]
        best = next((one for one in _in_order(tried) if one.share is not None), None)
        if best is None:
            return tried
        observed = float(np.abs(self.d).mean())
        if observed <= NOISE * self.floor.value:
            told = [one for one in tried if one.family not in ROUNDING and self._is_systematic(one)]
            for one in sorted(told, key=_least)[:1]:
                one.named = True
                if observed <= self.floor.value:  # nothing is above the floor: of the gap itself
                    one.share = 1 - _least(one) / observed
            return _in_order(tried)
        self._tell(best, tried)
        frontier = self._parts(tried)
        for _ in range(1, _DEPTH):
            if _least(best) <= max(NOISE * best.floor, _NOTHING * observed):
                break
            made = [joint for one in frontier for joint in self._extended(one, singles)]
            made += self._mixed(made)
            tried += made
            joint = min(made, key=_above, default=None)
            # One more takes at least half of what the others leave above the floor.
            if joint is None or _above(joint) >= (1 - PART) * _above(best):
                break
            best = self._pruned(joint)
            tried.append(best)
            self._tell(best, tried)
            frontier = sorted(made, key=_above)[:2]
        share = best.share or 0
        best.named = share >= WHOLE or (share >= PART and _least(best) <= _FAR * best.floor)
        return _in_order(tried)

    def _tell(self, best: Candidate | None, tried: Sequence[Candidate]) -> None:
        """The engine's dtype, by the rounding that is left of its own numbers; and every share against that floor."""
        if self.floor.engine != self.standing.floor.engine:
            return
        rollout_M = self.sides.rollout_M[self.trials.chosen_M]
        told = self.standing.dtype_of(rollout_M, self._pair(best)[0], self.standing.floor)
        if told is not None and told != self.floor.engine and FINER[told] < FINER[self.floor.engine]:
            self.floor = replace(self.floor, engine=told)
            for one in tried:
                if all(side.dtype == self.base.dtype for side in self._pair(one)):
                    self._against_floor(one)

    def _is_systematic(self, one: Candidate) -> bool:
        """Whether a gap as large as rounding holds what a candidate predicts: <d, p> / <p, p> is 1 of a cause, and 0 of
        rounding, for p is of float32; its deviation is that over samples (jackknife)."""
        if one.left_M is None:
            return False
        known = np.isfinite(one.left_M)
        d, p = self.d[known], (self.d - one.left_M)[known]
        sample = np.unique(self.sides.sample_M[self.trials.chosen_M][known], return_inverse=True)[1]
        dp, pp = np.bincount(sample, d * p), np.bincount(sample, p * p)
        if len(pp) < 4 or not pp.sum() > 0:
            return False
        gain = dp.sum() / pp.sum()
        deviation = np.sqrt(((dp - gain * pp) ** 2).sum() * len(pp) / (len(pp) - 1)) / pp.sum()
        is_there = gain > _DEVIATIONS * deviation and abs(gain - 1) < 0.5
        return bool(is_there and ((d - p) ** 2).sum() < _SQUARE * (d * d).sum())

    def _parts(self, tried: Sequence[Candidate]) -> list[Candidate]:
        """The best of each family and side that explains a part; the best at least."""
        known = [one for one in _in_order(tried) if one.engine is not None and one.family not in ROUNDING]
        kept: dict[tuple[str, Side], Candidate] = {}
        for one in known:
            if (one.share or 0) > _SOME or not kept:
                kept.setdefault((one.family, one.side), one)
        return list(kept.values())[:_PARTS]

    def _extended(self, one: Candidate, singles: Sequence[Candidate]) -> list[Candidate]:
        """A candidate with one change more: every number, and of the others those that would leave least if what each
        predicts alone were added."""
        found = self._numbers(one)
        rest: list[tuple[float, Pair]] = []
        for other in singles:
            if one.left_M is None or other.left_M is None or other.family in (*ROUNDING, "shift", "temperature"):
                continue
            at = READINGS.index(other.side)
            pair = self._of(other.side, self._pair(other)[at], one)
            if pair is not None:
                rest.append((float(np.nanmean(np.abs(one.left_M - (self.d - other.left_M)))), pair))
        rest.sort(key=lambda each: each[0])
        return [*found, *(self._refined(each) for each in self._weighed([pair for _, pair in rest[:_JOINTS]]))]

    def _pruned(self, one: Candidate) -> Candidate:
        """Without the changes that take less than half of what the others leave."""
        for at, side in enumerate(self._pair(one)):
            for name in side.changed(self.base):
                engine, trainer = pair = self._pair(one)
                gone: dict[str, Any] = {name: getattr(self.base, name)}
                less = replace(pair[at], **gone)
                for without in self._weighed([(less, trainer) if at == 0 else (engine, less)]):
                    without = self._refined(without)
                    if _above(one) >= (1 - PART) * _above(without):
                        one = without
        return one

    def _mixed(self, tried: Sequence[Candidate]) -> list[Candidate]:
        """Each sequence's beginning from other weights and its end from these: a stale prefix, versions mixed. Every
        other checkpoint is tried, with the place in each sequence that leaves least."""
        found = []
        sample_M = self.sides.sample_M[self.trials.chosen_M]
        for one in tried:
            engine, trainer = self._pair(one)
            if engine.weights == self.base.weights or one.left_M is None or not (one.share or 0) < WHOLE:
                continue
            here = replace(engine, weights=self.base.weights)
            values = self.trials.values([here, trainer])
            new_M = self.d - (values[trainer] - values[here])  # type: ignore[operator]
            old, new = np.abs(np.nan_to_num(one.left_M)), np.abs(np.nan_to_num(new_M))
            left, spans, inside = new_M.copy(), {}, 0
            for sample in np.unique(sample_M):
                at = np.flatnonzero(sample_M == sample)
                costs = np.concatenate(([0.0], np.cumsum(old[at]))) + np.concatenate(
                    (np.cumsum(new[at][::-1])[::-1], [0.0])
                )
                cut = int(costs.argmin())
                inside += 0 < cut < at.size
                left[at[:cut]] = one.left_M[at[:cut]]
                each = [(engine.called, 0, cut), ("these weights", cut, int(at.size))]
                spans[int(sample)] = [span for span in each if span[2] > span[1]]
            mixed = Candidate(f"{one.name} up to a token of each sequence, these from there", "versions", one.side,
                              "replay", left, one.floor, spans=spans).weigh(self.d, self.floor.value)  # fmt: skip
            if (mixed.share or 0) > (one.share or 0) + 0.1 and inside:
                found.append(mixed)
        return found

    # ---- the end

    def _conclude(self, tried: list[Candidate], rows: Sequence[int]) -> None:
        answer = self.answer
        answer.tried_on, answer.tried = list(rows), GapSize.of(self.d)
        answer.rerouted, answer.notes = self.trials.rerouted, [*answer.notes, *self.trials.notes]
        stated, own = self.standing.stated.temperature, self.base.temperature
        if own != stated:
            answer.notes.append(f"the trainer's own numbers are those of temperature {own:.3g}")
        named = [one for one in tried if one.named]
        for one in named:
            self._turn(one)
            answer.spans = one.spans
        answer.floor = self.floor
        if self.trials.has_routing:
            coarse = max((self.floor.trainer, self.floor.engine), key=lambda dtype: -FINER[dtype])
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
            if not one.named and one.left is not None and one.left.mean < _LITTLE * answer.tried.mean
        ]
        if not named and exact and not answer.lacks:
            answer.notes.append(f"within the floor, and reproduced token by token by {exact[0].side}: {exact[0].name}")
        # What a replay predicts supersedes what the numbers alone hint at.
        for one in answer.candidates:
            one.named = False
        shown = _one_a_name(tried)
        told = [Candidate(name, "none", told_by="replay", why_not=why) for name, why in self.unavailable.items()]
        answer.candidates = [*shown, *answer.candidates, *told]

    def _turn(self, one: Candidate) -> None:
        """An engine at the stated temperature (else 1) beside a trainer that is not: the trainer differs."""
        engine, trainer = self._pair(one)
        if set(engine.changed(self.base)) != {"temperature"} or trainer != self.base:
            return
        stated, own = self.standing.stated.temperature, self.base.temperature
        if own != stated and abs(engine.temperature / stated - 1) < 0.01:
            one.side, one.name = "trainer", f"temperature {own:.3g} (against {stated:.3g})"

    def _is_stranger(self, named: Sequence[Candidate]) -> bool:
        """Whether the model is none of either side's: both are further from it than from each other."""
        if any((one.share or 0) >= WHOLE for one in named):
            return False
        far = max(5 * self.floor.bfloat16, 0.02)
        apart = float(np.abs(self.d).mean())
        # Two sides that agree to the last recorded digit agree, whatever the model.
        is_apart = apart > NOISE * self.floor.resolution
        return is_apart and all(one > max(far, 1.5 * apart) for one in self.standing.reproduced)


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
