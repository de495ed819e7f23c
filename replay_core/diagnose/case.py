"""All a diagnosis looks at: the run, its batches step by step, and the series of its logs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from replay_core.budget import stored_bytes
from replay_core.diagnose.algorithm import Algorithm, settings_of, stated_by
from replay_core.diagnose.batch import StepBatch, batches_of
from replay_core.diagnose.said_in_records import SAID, said_in_records
from replay_core.diagnose.signals import RunLog
from replay_core.diagnose.states_of_files import states_in
from replay_core.records import Record, Run, Selection

#: Files that are less together are read once for all rules.
KEPT_BYTES = 4 << 20


class Case:
    """A run under diagnosis. `signals` are the series over its steps (`signals.Signals`), None where it has none."""

    def __init__(self, run: Run, signals: Any = None, step: Selection | None = None) -> None:
        self.run = run
        self.signals = signals
        self.step = step
        if SAID not in run.facts:
            run.facts[SAID] = said_in_records(run, settings_of(stated_by(run)))
        for log in () if signals is None else signals.logs:
            log.samples = self.batches
        #: Records that could not be read, found on the way.
        self.unreadable: list[str] = []
        #: Records whose samples another record already holds, and were counted once.
        self.repeated: list[str] = []
        #: The batches of every step, where the files are so small that they may stay; ten rules go through them.
        self._kept: dict[int | None, list[StepBatch]] = {}
        #: Weights and gradients in files that name no stage; None before they are asked for.
        self._states: list[Record] | None = None
        self._steps: list[tuple[int | None, list[Record]]] | None = None
        #: Steps that may hold samples, and their records beside those of what was logged.
        self._sampled: dict[int | None, list[Record]] | None = None
        self._may_keep = sum(map(stored_bytes, {record.path for record in run.records})) <= KEPT_BYTES

    def records(self) -> list[Record]:
        """The records of the chosen steps; all of them where nothing was chosen.

        Raises:
            SelectionError: there is no such step.
        """
        chosen = self.run.records if self.step is None else self.run.select(step=self.step)
        if self._states is None:
            self._states = states_in(chosen)
        return [*chosen, *self._states] if self._states else chosen

    @property
    def log(self) -> RunLog:
        """The series of the run, of the first where there are several; one that holds nothing where there are none."""
        return self.signals.logs[0] if self.signals is not None and self.signals.logs else RunLog()

    @property
    def algorithm(self) -> Algorithm:
        """What the run states of itself."""
        return Algorithm(stated_by(self.run))

    @property
    def begins(self) -> bool:
        """Whether the dump goes back to the first update, before which all weights are one; or names no step."""
        return min((record.key.step for record in self.run.records if record.key.step is not None), default=0) <= 1

    def steps(self) -> list[tuple[int | None, list[Record]]]:
        """The chosen records by step, in order. Nobody may change them: many rules go through them."""
        if self._steps is None:
            self._steps = self._by_step()
        return self._steps

    def _by_step(self) -> list[tuple[int | None, list[Record]]]:
        by_step: dict[int | None, list[Record]] = {}
        for record in self.records():
            by_step.setdefault(record.key.step, []).append(record)
        if len(by_step) == 2 and None in by_step:
            # A file that names no step, beside files of one step: that step is meant. What shares no samples with
            # them stays a batch of its own.
            (named,) = (step for step in by_step if step is not None)
            by_step = {named: by_step[named] + by_step[None]}
        return sorted(by_step.items(), key=lambda item: -1 if item[0] is None else item[0])

    def batches(self) -> Iterator[StepBatch]:
        """One batch after the other; of large files each is forgotten before the next is read."""
        if self._sampled is None:
            # What was logged holds no samples, and a log of ten thousand steps is not read for them.
            self._sampled = {
                step: [record for record in every if record.key.stage != "training_metrics"]
                for step, every in self.steps()
            }
        for step, records in [*self._sampled.items()]:
            if all(record.is_flat for record in records):
                self._sampled.pop(step, None)
                continue
            if step in self._kept:
                yield from self._kept[step]
                continue
            batches = batches_of(step, records, self.unreadable, self.run)
            if self._may_keep:
                self._kept[step] = batches
            for batch in batches:
                self.repeated += [what for what in batch.repeated if what not in self.repeated]
                yield batch
                if not self._may_keep:
                    batch.release()
            # Of small files the fields stay, too: twenty rules go through the records of all steps.
            for record in () if self._may_keep else records:
                record.release()
