"""Why do engine and trainer disagree? A replayer tries the candidates, and the answer of each step is kept."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from replay_core.jobs import Job
from tui_debugger.flows.errands import Errands

if TYPE_CHECKING:
    from replay_core.documents.mismatch import MismatchDocument


class Mismatching:
    """The mismatches of the run that is open, by step."""

    def __init__(self, errands: Errands) -> None:
        self._errands, self.state = errands, errands.state
        self._made: dict[tuple[Path | None, int | None, str | None], MismatchDocument] = {}

    def made(self, step: int | None) -> MismatchDocument | None:
        """The answer for a step of this run with the model that is chosen, where there is one."""
        return self._made.get((self.state.opened.a_path, step, self.state.replay.model))

    async def explain(self, step: int | None) -> MismatchDocument | None:
        """Ask; None where it failed, which is said."""
        opened, model = self.state.opened, self.state.replay.model
        params = {"path": str(opened.a_path), "more": [str(one) for one in opened.more], "step": step, "model": model}
        asked = self._errands.run(Job("mismatch", params), "mismatch", is_replay=True)
        document: MismatchDocument | None = await self._errands.guard(asked)
        if document is not None:
            self._made[(opened.a_path, step, model)] = document
            self._errands.log(document["headline"])
            for note in document["notes"]:
                self._errands.log(note)
        return document
