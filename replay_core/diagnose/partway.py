"""Whether what engine and trainer disagree by ends at one place of every response: weights that changed while it was
sampled.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.flat import Array
from replay_core.diagnose.gap import DISAGREE, UNSURE, Gap

#: Tokens of a place over the run before it tells, places on either side, and how much further apart each place before
#: is than each behind.
TOKENS, PLACES, TIMES = 24, 2, 3.0
#: Places of a response that are looked at.
WIDTH = 8192


@dataclass(slots=True)
class Partway:
    """Sums of |d| of tokens that are not sure, by place in the response, and how many they are of."""

    sums: Array = field(default_factory=lambda: np.zeros(0))
    counts: Array = field(default_factory=lambda: np.zeros(0))

    def take(self, batch: StepBatch, between: Gap) -> None:
        inside_N = batch.response_N if batch.response_N is not None else between.both_N
        place_N = batch.flat.position_N - np.repeat(batch.flat.first(inside_N), batch.flat.lengths_B)
        place, size = place_N[between.both_N], np.abs(between.d)
        # A token that either policy is sure of agrees under all weights.
        known = (place >= 0) & (place < WIDTH) & (between.trainer.values_N[between.both_N] < UNSURE)
        width = max(len(self.sums), int(place[known].max(initial=-1)) + 1)
        self.sums = np.pad(self.sums, (0, width - len(self.sums)))
        self.counts = np.pad(self.counts, (0, width - len(self.counts)))
        np.add.at(self.sums, place[known], size[known])
        np.add.at(self.counts, place[known], 1)

    def told(self) -> tuple[int, float, float] | None:
        """(place from which on they agree, mean |d| before it, mean |d| from it on); None where there is no such."""
        known = int(np.argmax(np.append(self.counts, 0) < TOKENS))
        means = self.sums[:known] / self.counts[:known]
        for at in range(PLACES, known - PLACES + 1):
            if means[:at].min() > max(DISAGREE, TIMES * float(means[at:].max())):
                return at, float(means[:at].mean()), float(means[at:].mean())
        return None
