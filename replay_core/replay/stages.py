"""Which stage of torch.compile a cell fails in: the same cell with less of the compiler, until one runs. No torch.

Dynamo traces, AOTAutograd takes the trace apart into plain operators, inductor makes code of them: whatever still runs
clears the stages it has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

#: Backends of `compile`, most of the compiler first, and the stage that each has and the next lacks.
STAGES = {"inductor": "inductor", "aot_eager": "AOTAutograd", "dynamo": "Dynamo"}
#: Of the reasons of one backend's graph breaks.
_QUOTED = 2


def below(backend: str) -> tuple[str, ...]:
    """The backends with less of the compiler than this one; none where it is not compiled."""
    order = tuple(STAGES)
    return order[order.index(backend) + 1 :] if backend in order else ()


def trial(backend: str, cell: Mapping[str, Any]) -> dict[str, Any]:
    """What became of the cell with this backend."""
    compiled, error = cell.get("compile"), cell["error"]
    return {
        "compile": backend,
        "outcome": cell["outcome"],
        "message": error and error["message"],
        "graphs": compiled and compiled["graphs"],
        "graph_breaks": compiled["graph_break_reasons"] if compiled else [],
    }


def is_cleared(backend: str, trials: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the cell runs with this backend."""
    return any(one["compile"] == backend and one["outcome"] == "ran" for one in trials)


def sentence(failed: str, trials: Sequence[Mapping[str, Any]]) -> str:
    """Which stage it is, of the trials after `failed` failed, in their order."""
    last, ran = failed, None
    for one in trials:
        if one["outcome"] == "ran":
            ran = one
            break
        last = one["compile"]
    if ran is None:
        return f"{STAGES[last]} itself: it fails before any backend gets a graph"
    breaks = [str(reason) for reason in ran["graph_breaks"]]
    more = f", and {len(breaks) - _QUOTED} more" if len(breaks) > _QUOTED else ""
    said = f", with graph breaks: {'; '.join(breaks[:_QUOTED])}{more}" if breaks else ", without a graph break"
    return f"{STAGES[last]}: compile={last} fails, compile={ran['compile']} of the same cell runs{said}"
