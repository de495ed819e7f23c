"""One loaded model under several settings, and how far two of them are from each other."""

from __future__ import annotations

import torch
from msgspec import Struct, field

from replay_core.errors import CellError
from replay_core.jobs import ignore
from replay_core.records import Run
from replay_core.replay.asking import Asking
from replay_core.replay.batch import MicroBatch
from replay_core.replay.cell import BatchReplay
from replay_core.replay.flags import Flags
from replay_core.replay.interventions import Observer, relative
from replay_core.replay.model import LoadedModel, prepare
from replay_core.replay.plan import ReplayPlan

#: Relative difference of a token's final hidden state, in float64, up to which two settings compute the same: norms,
#: softmax and rotations take float32 inside.
SAME = 2e-5


class ReplayBench(Struct):
    """One loaded model under several settings."""

    plan: ReplayPlan
    model: LoadedModel
    temperature: float
    run: Run | None = None
    recorded: MicroBatch | None = None
    asking: Asking = field(default_factory=Asking)
    #: Relative difference up to which two settings are one; what rounding leaves where a kernel knows no float64.
    same: float = SAME

    def observer(self, flags: Flags, batch: MicroBatch) -> Observer:
        prepare(self.model, flags)
        return Observer(BatchReplay(self.plan, flags, batch, self.model, self.temperature, ignore), self.asking)

    def hidden(self, flags: Flags, batch: MicroBatch) -> torch.Tensor:
        return self.observer(flags, batch).hidden()

    def apart(self, flags: Flags, other: Flags, batch: MicroBatch) -> float:
        """Relative difference of the worst token."""
        return worst(relative(self.hidden(other, batch), self.hidden(flags, batch)))

    def differs(self, flags: Flags, reference: Flags, batch: MicroBatch) -> bool:
        """Whether a part of a batch shows the difference; one that a model cannot run shows none."""
        try:
            return self.apart(flags, reference, batch) > self.same
        except CellError:
            return False


def worst(distance_N: torch.Tensor) -> float:
    return float(distance_N.max()) if distance_N.numel() else 0.0
