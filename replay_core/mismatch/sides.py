"""The two sides of a mismatch: what engine and trainer say of the tokens of one step, and what a dump lacks of it."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from msgspec import Struct

from replay_core.diagnose.batch import StepBatch, batches_of
from replay_core.diagnose.case import Case
from replay_core.diagnose.columns import Column
from replay_core.diagnose.gap import Gap, gap
from replay_core.diagnose.rule import Skip
from replay_core.errors import SelectionError
from replay_core.mismatch.figures import Array
from replay_core.records import Run, Selection


class Sides(Struct, dict=True):
    """Rollout and trainer over the tokens of a step [N] that both speak of and that count [M].

    between: the gap as a diagnosis sees it; its d = trainer - rollout, nats.
    """

    run: Run
    batch: StepBatch
    between: Gap

    @property
    def step(self) -> int | None:
        return self.batch.step

    @property
    def d_M(self) -> Array:
        return self.between.d

    @cached_property
    def at_M(self) -> Array:
        """Where the compared tokens stand among all [N]."""
        return np.flatnonzero(self.between.both_N)

    @cached_property
    def sample_M(self) -> Array:
        """The sample of every compared token."""
        sample_M: Array = self.batch.flat.sample_N[self.at_M]
        return sample_M

    @property
    def rollout_M(self) -> Array:
        values_M: Array = self.between.rollout.values_N[self.at_M]
        return values_M

    @property
    def trainer_M(self) -> Array:
        values_M: Array = self.between.trainer.values_N[self.at_M]
        return values_M

    @cached_property
    def prompts_B(self) -> Array:
        """Tokens before each sample's response; 0 where nothing says."""
        response_N = self.batch.response_N
        return np.zeros(len(self.batch), np.int64) if response_N is None else self.batch.flat.first(response_N)


class Unanswered(Struct, frozen=True):
    """Why a step gives no answer: each what follows "the dump lacks". batch: its samples, where it has any."""

    step: int | None
    lacks: tuple[str, ...]
    batch: StepBatch | None = None


def sides_of(run: Run, step: int | None = None) -> Sides | Unanswered:
    """Both sides of a step (the last that has both, where none is named).

    Raises:
        SelectionError: there is no such step.
    """
    case = Case(run, None, None if step is None else Selection.parse(step))
    missing: Unanswered | None = None
    for number, every in reversed(case.steps()):
        records = [record for record in every if record.key.stage != "training_metrics"]
        if not records or all(record.is_flat for record in records):
            continue
        unreadable: list[str] = []
        for batch in batches_of(number, records, unreadable, run):
            found = _of(run, batch, unreadable)
            if isinstance(found, Sides):
                return found
            if missing is None or len(found.lacks) < len(missing.lacks):
                missing = found
    if missing is not None:
        return missing
    if not run.records:
        raise SelectionError("there is no record", file=str(run.path), hint=f"rldbg ls {run.path}")
    return Unanswered(step, ("samples: log-probabilities of tokens are needed, of rollout and trainer",))


def _of(run: Run, batch: StepBatch, unreadable: list[str]) -> Sides | Unanswered:
    lacks = [f"values that can be read: {what}" for what in unreadable]
    rollout, trainer = batch.columns.of("rollout_logprobs"), batch.trainer
    if rollout is None:
        lacks.append(f"the rollout's log-probabilities{_instead(batch, 'rollout_logprobs')}")
    if trainer is None:
        lacks.append(f"the trainer's log-probabilities{_instead(batch, 'old_logprobs', 'policy_logprobs')}")
    if rollout is not None and trainer is not None:
        lacks += _said(batch, rollout, trainer)
        if not lacks or len(lacks) == len(unreadable):
            try:
                return Sides(run, batch, gap(batch))
            except Skip as skipped:
                lacks.append(f"sides that can be compared: {skipped}")
    return Unanswered(batch.step, tuple(lacks), batch)


def _instead(batch: StepBatch, *names: str) -> str:
    """What there is in their place: a tensor that fits no sample here, one of other samples, or nothing."""
    unfit = next((ref for name in names if (ref := batch.columns.ref(name)) is not None), None)
    if unfit is not None:
        return (
            f" of these samples: {unfit.name} {list(unfit.shape)} fits neither the tokens nor the responses of "
            f"{len(batch)} samples with {int(batch.flat.lengths_B.sum())} tokens"
        )
    said = ": record them as " + ", or ".join(names)
    for other in batch.strangers:
        if any(other.refs(name) for name in names):
            return said + (
                f"; {other.parts[0].held.record.path.name} holds some, of {len(other)} samples of which none has the "
                "tokens of one here"
            )
    return said


def _said(batch: StepBatch, rollout: Column, trainer: Column) -> list[str]:
    """What makes of two columns no two sides."""
    if batch.trained_N is not None and not batch.trained_N.any():
        return ["tokens that count: the loss mask is 0 everywhere"]
    lacks = []
    for who, column in (("rollout", rollout), ("trainer", trainer)):
        counted_N = column.said_N if batch.trained_N is None else column.said_N & batch.trained_N
        values_M = column.values_N[counted_N & np.isfinite(column.values_N)]
        if values_M.size > 1 and not np.ptp(values_M) > 0:
            lacks.append(f"log-probabilities of the {who} that differ: all {values_M.size} are {values_M[0]:g}")
        elif not values_M.size:
            lacks.append(f"finite log-probabilities of the {who}: of {int(counted_N.sum())} none is")
    return lacks
