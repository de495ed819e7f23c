"""How rules state what they found: numbers with their source, and commands that exist."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from replay_core.diagnose.finding import Evidence, Finding, Where

if TYPE_CHECKING:
    from replay_core.documents.diagnosis import Severity


def shown(name: str, value: Any, expected: str | None = None, source: str | None = None) -> Evidence:
    """A piece of evidence; numpy scalars become Python's."""
    return Evidence(name, value.item() if hasattr(value, "item") else value, expected, source)


def finding(
    severity: Severity, claim: str, where: Where | None = None, *, evidence: Iterable[Evidence], cause: str,
    next_step: str | None = None, steps: Iterable[int] = (), id: str = "", link: str = "",
) -> Finding:  # fmt: skip
    """A finding of the rule that yields it, which gives it its id, link and source.

    Args:
        next_step: what to do; looking at `where` unless it says more.
        id: which of the rules that the function is registered for, if it is for several.
        link: where in the chain it is, if not at the rule's own link.
    """
    place = where or Where()
    return Finding(
        id, severity, claim, tuple(evidence), cause, next_step or look_at(place), link, "", place, tuple(steps)
    )


def listed(numbers: Iterable[Any], most: int = 6) -> str:
    """`0, 4, 8 and 3 more`."""
    every = [str(number) for number in numbers]
    return ", ".join(every[:most]) + (f" and {len(every) - most} more" if len(every) > most else "")


def share(count: int, total: int) -> str:
    """`3 of 16`."""
    return f"{count} of {total}"


def look_at(where: Where) -> str:
    """The command that shows the tensor of a place."""
    if where.path is None:
        return "rldbg ls RUN"
    path = shlex.quote(where.path)
    if where.tensor is None:
        return f"rldbg show {path}"
    # A file of no framework is one record; its numbers are its folder's, and alone it has none.
    numbers = () if where.stage == "tensors" else (("step", where.step), ("micro", where.micro))
    key = "".join(f" --{name} {value}" for name, value in numbers if value is not None)
    row = "" if where.sample is None else f" --slice {where.sample}:{where.sample + 1}"
    return f"rldbg show {path} {shlex.quote(where.tensor)}{key}{row}"
