"""What happens when a user asks which of two dumps is wrong: the referee rules, with the weights that they note."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replay_core.jobs import Job
from tui_debugger.flows.errands import Errands
from tui_debugger.state import Part

if TYPE_CHECKING:
    from replay_core.documents.ruling import RulingDocument


class Refereeing:
    """The ruling of the comparison that is shown."""

    def __init__(self, errands: Errands) -> None:
        self._errands, self.state = errands, errands.state

    async def rule(self) -> RulingDocument | None:
        """The ruling of what is compared, made once; None where nothing is compared or it failed, which is said."""
        comparison = self.state.tensors.comparison
        if comparison is None:
            return None
        if comparison["ruling"] is None:
            pair = {side: comparison[side]["path"] for side in ("a", "b")}
            job = Job("referee", {**pair, **self.state.opened.scope.params()})
            comparison["ruling"] = await self._errands.guard(self._errands.run(job, "ruling", is_replay=True))
        ruling = comparison["ruling"]
        if ruling is not None:
            self._errands.log(f"{ruling['ruling'] or 'not ruled'}: {ruling['sentence']}")
            for line in ruling["differences"]:
                self._errands.log(f"differs: {line}")
        self._errands.changed(Part.ANSWER)
        return ruling
