"""Where the two sides stand: the settings that reproduce the trainer's own numbers, each side's dtype, the floor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from replay_core.diagnose.softmax import stated_temperature
from replay_core.errors import JobCancelledError, RldbgError
from replay_core.mismatch.candidate import READINGS, Side
from replay_core.mismatch.figures import Array
from replay_core.mismatch.setting import NUMBERS, WIDTHS, Setting, around
from replay_core.replay.flags import settings_known

if TYPE_CHECKING:
    from replay_core.mismatch.trials import Trials

#: Up to so many floors a gap is rounding (referee B5), and nothing is named.
NOISE = 2.0
#: Bits of the significand below bfloat16's: the floor halves with each.
FINER = {"bfloat16": 0, "float16": 3, "float32": 16}


class RoundingFloor(Struct, frozen=True):
    """What rounding leaves, nats: of one forward in bfloat16, and of the two sides' dtypes together.

    resolution: how finely the recorded values themselves are told, nats: no floor is below it.
    """

    bfloat16: float
    runs: int
    trainer: str = "float32"
    engine: str = "float32"
    #: Whether it is a difference of two replays, in place of perturbed runs.
    is_rough: bool = False
    resolution: float = 0.0

    def between(self, trainer: str, engine: str) -> float:
        return float(np.hypot(self.of(trainer), self.of(engine)))

    def of(self, dtype: str) -> float:
        return float(np.hypot(self.bfloat16 * 2.0 ** -FINER[dtype], self.resolution))

    @property
    def value(self) -> float:
        return self.between(self.trainer, self.engine)


class Standing:
    """What is known of both sides before any cause is looked for.

    base: the trainer's own settings, of which a candidate is a change. stated: those that the dump states. reproduced:
    how far the base is from trainer and rollout, mean |d|, nats.
    """

    def __init__(self, trials: Trials, attention: str) -> None:
        self.trials, sides = trials, trials.sides
        self.trainer_M, self.rollout_M = sides.trainer_M[trials.chosen_M], sides.rollout_M[trials.chosen_M]
        self.stated = Setting(attention=attention, temperature=stated_temperature(sides.batch) or 1.0)
        first = trials.values([self.stated])[self.stated]
        if isinstance(first, RldbgError):
            raise first
        self.base, trainer_off = self._nearest()
        self.floor = self._floor()
        self.reproduced = trainer_off, self._off(self.rollout_M, trials.values([self.base])[self.base])

    @property
    def sides_off(self) -> tuple[Side, ...]:
        """The sides that a cause may be on: not the one whose numbers the model gives within its floor, where it does
        not give the other's."""
        trainer, rollout = (
            off <= NOISE * self.floor.of(dtype)
            for off, dtype in zip(self.reproduced, (self.floor.trainer, self.floor.engine), strict=True)
        )
        return READINGS if trainer == rollout else ("engine",) if trainer else ("trainer",)

    @staticmethod
    def _off(side_M: Array, values: Array | RldbgError) -> float:
        return float("inf") if isinstance(values, RldbgError) else float(np.nanmean(np.abs(side_M - values)))

    def _nearest(self) -> tuple[Setting, float]:
        """(the temperature that reproduces the trainer best, how far off it is then). In float32: what a cause does is
        told without rounding, and rounding is the floor's."""
        heats = [replace(self.stated, temperature=heat) for heat in (*NUMBERS["temperature"], self.stated.temperature)]
        near, off = self.stated, float("inf")
        for width in WIDTHS:
            tried = self.trials.values(heats)
            near, off = min(((one, self._off(self.trainer_M, tried[one])) for one in heats), key=lambda one: one[1])
            heats = around(near, width)
        stated = self._off(self.trainer_M, self.trials.values([self.stated])[self.stated])
        # Less than half is no luck.
        return (near, off) if off < 0.5 * stated else (self.stated, stated)

    def _floor(self) -> RoundingFloor:
        """Rounding's own, and the trainer's dtype: as the dump says, as it was reproduced, else as it is told."""
        measured, runs, rough = self._measured()
        said = settings_known(self.trials.sides.run.flags).get("dtype")
        told_in = max(_resolution(self.trainer_M), _resolution(self.rollout_M))
        floor = RoundingFloor(measured, runs, is_rough=rough, resolution=told_in)
        said = said or self.dtype_of(self.trainer_M, self.base, floor) or "float32"
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

    def dtype_of(self, side_M: Array, setting: Setting, floor: RoundingFloor) -> str | None:
        """The dtype whose rounding a side's distance from a float32 replay of a setting is: by size, and by how much of
        it is the rounding that a replay in that dtype has as well. None: of neither."""
        exact = replace(setting, dtype="float32")
        rough = {one: replace(setting, dtype=one) for one in ("bfloat16", "float16")}
        values = self.trials.values([exact, *rough.values()])
        if isinstance(values[exact], RldbgError):
            return None
        residual = side_M - values[exact]
        size = float(np.nanmean(np.abs(residual)))
        for dtype, one in rough.items():
            rounded = values[one]
            if isinstance(rounded, RldbgError) or not floor.of(dtype) / 3 <= size <= 3 * floor.of(dtype):
                continue
            if points(residual, rounded - values[exact]):
                return dtype
        return None


def _resolution(values_M: Array) -> float:
    """rms rounding of values as they are recorded, nats: their own digits tell which dtype they went through."""
    bits_M = np.abs(values_M).astype(np.float32).view(np.uint32)
    digits = next(digits for digits, low in ((8, 16), (11, 13), (24, 0)) if not (bits_M & ((1 << low) - 1)).any())
    # float32's own log-softmax rounds a few times: as two of its roundings.
    ulp_M = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(values_M), 2.0**-126))) - digits + 1 + (digits == 24))
    return float(np.sqrt((ulp_M**2).mean() / 12))


def points(residual: Array, toward: Array) -> bool:
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
