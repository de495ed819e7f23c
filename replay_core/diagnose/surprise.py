"""Whether tokens were drawn from the distribution whose log-probabilities and entropies are recorded beside them.

Of tokens drawn from q the mean of -log q is the mean entropy of q. Of tokens drawn from p, which goes as q^s, it is
less by about (s - 1) times the variance of log q: log q is more of what is drawn the colder p is.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from replay_core.diagnose.flat import Array
from replay_core.diagnose.gap import Gap

#: Fewer tokens tell nothing, nor does a difference that would be less than that many standard errors.
FEWEST, ERRORS = 64, 5.0
#: Of the difference that another temperature makes, what noise makes of it at the most, and what counts as one; and how
#: many standard errors that one is.
NONE, SOME, SURE = 0.15, 0.25, 3.0


@dataclass(slots=True)
class Surprise:
    """-log q - entropy of a run's tokens, q the trainer's."""

    parts: list[Array] = field(default_factory=list)

    def take(self, between: Gap) -> None:
        entropy = between.batch.columns.of("entropy")
        if entropy is not None:
            known_N = between.both_N & entropy.said_N & np.isfinite(entropy.values_N)
            self.parts.append(-between.trainer.values_N[known_N] - entropy.values_N[known_N])

    @property
    def mean(self) -> float:
        return float(np.concatenate(self.parts).mean())

    def is_drawn(self, gain: float) -> bool | None:
        """Whether the trainer's distribution is the one that tokens were drawn from, where the other one is at `gain`
        times its temperature; False where the other one is as likely as not, None where neither is told.
        """
        left_K = np.concatenate(self.parts) if self.parts else np.zeros(0)
        if left_K.size < FEWEST:
            return None
        error = float(left_K.std()) / left_K.size**0.5
        expected = (1 - 1 / gain) * float(left_K.var())
        if abs(expected) < ERRORS * error:
            return None
        share = self.mean / expected
        if abs(share) < NONE:
            return True
        return False if share > SOME and abs(self.mean) > SURE * error else None
