"""Log-probabilities that are shifted by a token against the other side's."""

from __future__ import annotations

from collections.abc import Iterator

from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.compared import BOTH, figures_of
from replay_core.diagnose.finding import Finding, error, shown
from replay_core.diagnose.gap import gap
from replay_core.diagnose.rule import rule


@rule("D08", "log-probabilities are shifted by one token", link="rollout_logprobs", scope="batch", needs=BOTH,
      explains=("L10", "D09", "D12", "D14", "D15", "D24", "D29", "D35"), lasts=True,
      source="verl#3562, OpenRLHF#973; measured: lag 0 r 0.03, lag 1 r 1.000")  # fmt: skip
def shifted(batch: StepBatch) -> Iterator[Finding]:
    """Correlation of trainer and rollout at lags -1, 0, 1. An error where the best is not lag 0, is above 0.9 and above
    every other by 0.3: then one of the two is about the token before or after.
    """
    between = gap(batch)
    if not between.is_shifted:
        return
    lag = between.lag
    place = batch.laid.where("rollout_logprobs", sample=0)
    lags = [
        shown(f"correlation at lag {at:+d}", value, "the largest" if at == 0 else None)
        for at, value in lag.correlations.items()
    ]
    yield error(
        f"rollout log-probabilities are shifted by {lag.lag:+d} token against the trainer's",
        place,
        evidence=[*lags, *figures_of(between)],
        cause="one side is about the token at its index, the other about the next: a roll or a slice is off by one",
    )
