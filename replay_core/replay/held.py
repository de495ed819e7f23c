"""The model a warm child keeps between replays, so that flipping a flag costs a forward and no load.

One model at a time: the next replay of another model, dtype, device or seed replaces it.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

from replay_core.records import Run
from replay_core.replay import adapters, architectures, fit
from replay_core.replay.batch import MicroBatch
from replay_core.replay.flags import FLAGS
from replay_core.replay.model import LoadedModel, load
from replay_core.replay.plan import ReplayPlan
from replay_core.replay.references import RANDOM, edition_of, resolve


class Holder:
    """Loads models and keeps the last one."""

    def __init__(self) -> None:
        self._key: tuple[Any, ...] | None = None
        self._model: LoadedModel | None = None

    def model(self, plan: ReplayPlan, run: Run, batch: MicroBatch) -> tuple[LoadedModel, bool]:
        """The plan's model, and whether it was held already. Its notes are those of this plan.

        Raises:
            ModelError, UnavailableError, CellError: as `model.load`.
        """
        reference, notes = resolve(plan, run)
        key = _key(plan, reference, batch)
        if self._model is not None and key == self._key:
            fit.need_vocabulary(self._model.config.vocab_size, batch, reference)
            return self._model, True
        self.drop()
        loaded = load(plan, reference, notes, batch)
        self._key, self._model = key, loaded
        return loaded, False

    def drop(self) -> None:
        """Let go of the model and its memory."""
        self._key = self._model = None
        gc.collect()


def _key(plan: ReplayPlan, reference: str, batch: MicroBatch) -> tuple[Any, ...]:
    loaded = [getattr(plan.flags, name) for name, flag in FLAGS.items() if flag.reloads]
    common = (reference, *loaded, plan.step, plan.is_critic, plan.base, plan.unlike)
    if reference.startswith(RANDOM):
        # Its vocabulary is sized to the batch.
        kind, sizes = architectures.settings(
            reference.removeprefix(RANDOM), batch.largest_id, int(batch.ids_BS.shape[1])
        )
        return (*common, plan.seed, kind, sizes["vocab_size"], sizes["max_position_embeddings"])
    # An adapter's base may be a random one, too.
    sized = batch.largest_id if adapters.is_adapter(Path(reference)) else None
    return (*common, sized, edition_of(reference, plan.forward_path))


#: The holder of this process: a replayer child answers one job after the other.
HOLDER = Holder()
