"""What a diagnosis says: findings, each with its evidence, and the rules that could not look. Plain data, no numpy.

return warning("the learning rate is 0", series, series.shown(0.0, "> 0"), cause="...")
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, get_args

from msgspec import Struct

from replay_core.documents.diagnosis import Link

if TYPE_CHECKING:
    from replay_core.documents.diagnosis import Severity
    from replay_core.records import Record

#: Worst first.
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")

#: A step's computation as a chain: a broken link makes every later one look broken too.
LINKS: tuple[str, ...] = get_args(Link)


class Where(Struct, frozen=True):
    """Where a screen jumps to: as much of a record's key, tensor and index as the evidence has."""

    step: int | None = None
    micro: int | None = None
    rank: int | None = None
    role: str | None = None
    stage: str | None = None
    tensor: str | None = None
    sample: int | None = None
    position: int | None = None
    line: int | None = None
    """Line of a text log, counted from 1."""
    path: str | None = None

    @classmethod
    def of(cls, record: Record, tensor: str | None, sample: int | None = None, position: int | None = None) -> Where:
        """The record that says something, and its name of it."""
        key, path = record.key, str(record.path)
        return cls(key.step, key.micro, key.rank, key.role, key.stage, tensor, sample, position, path=path)


class Evidence(Struct, frozen=True):
    """One number and where it comes from: `mean |rollout - trainer|` = 0.093, from rollout_logprobs and logprobs."""

    name: str
    value: float | int | str | bool | None
    expected: str | None = None
    source: str | None = None


class Finding(Struct, frozen=True):
    """One claim about a run.

    `claim` is one sentence of what is wrong, `cause` the likely reason in the trainer, `next_step` what to do:
    often a ready `rldbg` command. `source` is where the rule comes from.
    """

    id: str
    severity: Severity
    claim: str
    evidence: tuple[Evidence, ...]
    cause: str
    next_step: str
    link: str
    source: str
    where: Where = Where()
    steps: tuple[int, ...] = ()
    """The steps that show it."""
    downstream_of: str | None = None
    """Id of the finding of an earlier link that explains this one; then it is no longer counted."""
    looked: int = 0
    """Steps that the rule looked at, 0 where it looks at no single ones."""

    @property
    def share(self) -> float:
        """Share of the steps looked at that show it; 1 where the rule does not look step by step."""
        return min(1.0, len(self.steps) / self.looked) if self.looked and self.steps else 1.0


class Skipped(Struct, frozen=True):
    """A rule that could not look, and what it would have needed."""

    id: str
    why: str


class Diagnosis(Struct, frozen=True):
    """Findings worst first, and what stood behind them: rules that looked, rules that could not."""

    findings: tuple[Finding, ...]
    checked: tuple[str, ...]
    skipped: tuple[Skipped, ...]
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Diagnosis:
        """The diagnosis that a document holds."""
        findings = []
        for one in document["findings"]:
            said = {name: value for name, value in one.items() if name != "echo_of"}
            said["evidence"] = tuple(Evidence(**each) for each in one["evidence"])
            said |= {"where": Where(**one["where"]), "steps": tuple(one["steps"]), "downstream_of": one["echo_of"]}
            findings.append(Finding(**said))
        skipped = tuple(Skipped(one["id"], one["why"]) for one in document["skipped"])
        return cls(tuple(findings), tuple(document["checked"]), skipped, tuple(document["notes"]))


class Traced(Protocol):
    """What has a place of its own, and steps: a series of a log."""

    @property
    def place(self) -> Where: ...

    def steps(self) -> list[int]: ...


def shown(name: str, value: Any, expected: str | None = None, source: str | None = None) -> Evidence:
    """A piece of evidence; numpy scalars become Python's."""
    return Evidence(name, value.item() if hasattr(value, "item") else value, expected, source)


def finding(
    severity: Severity, claim: str, where: Where | Traced | None = None, *evidence: Evidence, cause: str,
    next_step: str | None = None, steps: Iterable[int | None] = (), id: str = "", link: str = "",
) -> Finding:  # fmt: skip
    """A finding of the rule that yields it, which gives it its id, link and source.

    Args:
        where: its place; of a series its first one, and its steps are those that show it.
        steps: those that show it; samples of no step are of none.
        next_step: what to do; looking at `where` unless it says more.
        id: which of the rules that the function is registered for, if it is for several.
        link: where in the chain it is, if not at the rule's own link.
    """
    place = where if isinstance(where, Where) else Where() if where is None else where.place
    shows = steps if where is None or isinstance(where, Where) else where.steps()
    named = tuple(step for step in shows if step is not None)
    return Finding(id, severity, claim, evidence, cause, next_step or look_at(place), link, "", place, named)


error, warning, info = partial(finding, "error"), partial(finding, "warning"), partial(finding, "info")


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
    is_loose = where.stage == "tensors" or where.tensor.startswith(("param.", "params.", "grad.", "grads."))
    numbers = () if is_loose else (("step", where.step), ("micro", where.micro))
    key = "".join(f" --{name} {value}" for name, value in numbers if value is not None)
    row = "" if where.sample is None else f" --slice {where.sample}:{where.sample + 1}"
    return f"rldbg show {path} {shlex.quote(where.tensor)}{key}{row}"
