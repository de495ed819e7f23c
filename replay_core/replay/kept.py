"""What earlier replays of this process ran beside what was asked for: a flip of a flag costs that flip alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from replay_core.errors import RldbgError
from replay_core.records import Run
from replay_core.replay.plan import ReplayPlan
from replay_core.replay.references import edition_of, resolve

if TYPE_CHECKING:
    from replay_core.replay.matrix import CellResult

#: References, controls and their windows of a few models and settings; a result is figures and the way to its dump.
_MOST = 32


class Kept:
    """Results by all that they depend on: the plan but for where it answers to, the recorded files, the weights."""

    def __init__(self) -> None:
        self._results: dict[str, CellResult] = {}

    def find(self, identity: str | None) -> CellResult | None:
        """The result kept under an identity, while its dump is there."""
        known = self._results.get(identity or "")
        return known if known is not None and Path(known.cell["dump"]).exists() else None

    def keep(self, identity: str | None, result: CellResult) -> None:
        """Keep what ran; the oldest goes when there are too many."""
        if identity is None or result.run is None:
            return
        self._results[identity] = result
        while len(self._results) > _MOST:
            del self._results[next(iter(self._results))]


def identity_of(plan: ReplayPlan, run: Run) -> str | None:
    """What a cell's answer depends on, as text; None where that cannot be told, so that nothing is kept."""
    asked = {name: value for name, value in plan.to_mapping().items() if name != "out"}
    try:
        weights = edition_of(resolve(plan, run)[0], plan.forward_path)
        files = sorted({record.path for record in run.records if record.key.step in (plan.step, None)})
        recorded = [(str(file), file.stat().st_mtime_ns, file.stat().st_size) for file in files]
    except (RldbgError, OSError):
        return None
    return json.dumps([asked, weights, recorded], sort_keys=True)


#: Of this process: a replayer child answers one job after the other.
KEPT = Kept()
