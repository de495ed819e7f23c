"""What happens when a user asks which of two dumps is wrong: the referee rules, with the weights that they note."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from replay_core.jobs import Job
from tui_debugger.flows.errands import Errands
from tui_debugger.state import Part

if TYPE_CHECKING:
    from replay_core.documents.ruling import RulingDocument


class Refereeing:
    """The ruling of the comparison that is shown."""

    def __init__(self, errands: Errands) -> None:
        self._errands, self.state = errands, errands.state

    @property
    def made(self) -> RulingDocument | None:
        """The ruling of what is compared, where there is one."""
        comparison = self.state.tensors.comparison
        ruling = comparison["ruling"] if comparison is not None else None
        return ruling if ruling is not None and ruling["ruling"] is not None else None

    @property
    def lacks_weights(self) -> bool:
        """Whether a dump of the two notes no weights, and the user named none. A replay's cells note their model."""
        opened = self.state.opened
        noted = [run["models"] for run in (opened.a, opened.b) if run is not None]
        return self.state.replay.model is None and self.state.cell is None and not (noted and all(noted))

    async def rule(self) -> RulingDocument | None:
        """Rule what is compared, with the weights that each dump notes, else those of the flags pane; None where
        nothing is compared or it failed, which is said."""
        state, comparison = self.state, self.state.tensors.comparison
        if comparison is None:
            return None
        params: dict[str, Any] = {**state.opened.scope.params()}
        sides = (("a", state.opened.a, comparison["a"]["path"]), ("b", state.opened.b, comparison["b"]["path"]))
        for side, run, path in sides:
            params[side] = path
            noted = state.cell is not None or (run is not None and run["models"])
            params[f"weights_{side}"] = None if noted else state.replay.model
        ruling: RulingDocument | None = await self._errands.guard(
            self._errands.run(Job("referee", params), "ruling", is_replay=True)
        )
        if ruling is not None:
            comparison["ruling"] = ruling
            self._errands.log(f"{ruling['ruling'] or 'not ruled'}: {ruling['sentence']}")
            for line in ruling["differences"]:
                self._errands.log(f"differs: {line}")
        self._errands.changed(Part.ANSWER)
        return ruling
