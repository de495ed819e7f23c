"""What happens when a user asks which of two dumps is wrong, or whether one is: the referee rules, with the weights
that they note."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from replay_core.jobs import Job
from tui_debugger.flows.errands import Errands
from tui_debugger.state import Part

if TYPE_CHECKING:
    from replay_core.documents.ruling import GraftingPart, RulingDocument


#: Modules that are named with the one that carries the difference, and how many of them come before it.
_GRAFTS, _BEFORE = 8, 3


def grafted(graft: GraftingPart) -> list[str]:
    """How much of the end difference each module brings that brings any, about the one that carries it: `mlp  98.0%`.

    Of a deep model in half precision many bring a little before it: rounding.
    """
    some = [one for one in graft["grafts"] if isinstance(one["comes"], float) and abs(one["comes"]) >= 0.01]
    told = [f"{one['tensor']}  {one['comes']:.1%}" for one in some]
    carries = [at for at, one in enumerate(some) if one["tensor"].partition(".output")[0] == graft["module"]]
    first = max(0, min(carries[0] - _BEFORE, len(told) - _GRAFTS)) if carries else 0
    left = len(told) - _GRAFTS
    return told[first : first + _GRAFTS] + ([f"and {left} more: e writes all"] if left > 0 else [])


class Refereeing:
    """The ruling of what is compared; of the dump that is open, where nothing is."""

    def __init__(self, errands: Errands) -> None:
        self._errands, self.state = errands, errands.state

    @property
    def made(self) -> RulingDocument | None:
        """The ruling, where there is one."""
        comparison = self.state.tensors.comparison
        ruling = (
            comparison["ruling"] if comparison is not None else self.state.opened.ruled.get(self.state.opened.scope)
        )
        return ruling if ruling is not None and ruling["ruling"] is not None else None

    @property
    def lacks_weights(self) -> bool:
        """Whether a dump of the two notes no weights, and the user named none. A replay's cells note their model."""
        opened = self.state.opened
        if opened.is_log:
            return False  # nothing in it was computed with them
        noted = [run["models"] for run in (opened.a, opened.b) if run is not None]
        return self.state.replay.model is None and self.state.cell is None and not (noted and all(noted))

    async def rule(self, *, graft: bool = False) -> RulingDocument | None:
        """Rule with the weights that each dump notes, else those of the flags pane; None where nothing is open or it
        failed, which is said. `graft`: also which module's output brings the difference, put into the other's forward.
        """
        state, opened, comparison = self.state, self.state.opened, self.state.tensors.comparison
        if opened.a is None:
            return None
        scope, (a, b) = opened.scope, (comparison["a"], comparison["b"]) if comparison else (opened.a, opened.b)
        params: dict[str, Any] = {**scope.params(), **({"graft": True} if graft else {})}
        for side, run, of in (("a", opened.a, a), ("b", opened.b, b)):
            if of is not None:
                params[side] = of["path"]
                noted = state.cell is not None or (run is not None and run["models"])
                params[f"weights_{side}"] = None if noted else state.replay.model
        ruling: RulingDocument | None = await self._errands.guard(
            self._errands.run(Job("referee", params), "ruling", is_replay=True)
        )
        if ruling is not None:
            if comparison is not None:
                comparison["ruling"] = ruling
            else:
                opened.ruled[scope] = ruling
            self._errands.log(f"{ruling['ruling'] or 'not ruled'}: {ruling['sentence']}")
            for line in ruling["differences"]:
                self._errands.log(f"differs: {line}")
            if ruling["graft"] is not None:
                self._errands.log(f"graft: {ruling['graft']['sentence']}")
                for line in grafted(ruling["graft"]):
                    self._errands.log(f"graft: {line}")
        self._errands.changed(Part.ANSWER)
        return ruling
