"""Why engine and trainer disagree: the candidates tried, the ones named, and what is left against the floor."""

from __future__ import annotations

import numpy as np
from msgspec import Struct, field

from replay_core.collecting import importing, settled
from replay_core.errors import ModelError
from replay_core.jobs import IMPORTING, OnEvent
from replay_core.mismatch.candidate import Candidate
from replay_core.mismatch.figures import Array, GapSize
from replay_core.mismatch.search import Search
from replay_core.mismatch.setting import Asked
from replay_core.mismatch.sides import Sides, Unanswered, sides_of
from replay_core.mismatch.signatures import outliers, signatures
from replay_core.mismatch.standing import RoundingFloor
from replay_core.mismatch.tokens import TokenFault, token_faults, values_that_are_none
from replay_core.records import Run
from replay_core.replay.plan import ReplayPlan
from replay_core.replay.references import CHECKPOINT, resolve


class SequenceGap(Struct, frozen=True):
    """A sample: its compared tokens, mean |d|, share of the sum of |d|, and which weights explain which of its
    response's tokens (name, begin, end)."""

    sample: int
    tokens: int
    mean: float
    share: float
    is_outlier: bool
    spans: list[tuple[str, int, int]]


class Mismatch(Struct):
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
            with importing():
                from replay_core.mismatch.trials import Trials  # torch and transformers: 3.4 s

            with settled():
                Search(answer, found, Trials(found, asked, on_event), asked)
        except ModelError:
            if asked.model is not None:
                raise
            answer.notes.append("the weights that the dump notes are not there: --model DIRECTORY names them")
    return answer
