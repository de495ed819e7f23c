"""The signals of a diagnosis as lines of the trends view: which come first, what each one says. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from tui_debugger import format as fmt

#: What a glance looks at first; every series is in the document.
SHOWN = (
    "loss", "pg_loss", "reward", "kl", "entropy", "clip_fraction", "grad_norm", "response_length", "logprob_diff",
    "step_seconds", "iter_ms", "memory_gb",
)  # fmt: skip


def numbers(values: Sequence[Any]) -> list[float]:
    """A document's numbers; `nan` and `inf` stand there as texts, null is nan."""
    return [math.nan if value is None else float(value) for value in values]


class Trend(Struct, frozen=True):
    """One signal over the steps of one run."""

    name: str
    signal: str
    run: str
    steps: list[Any]
    values: list[float]
    marks: frozenset[int]
    entry: Mapping[str, Any]
    found: tuple[str, ...] = ()
    """Ids of warnings and errors that rest on it."""

    @property
    def off(self) -> list[Mapping[str, Any]]:
        """Expectations that do not hold."""
        return [row for row in self.entry["expected"] if row["holds"] is False]

    @property
    def stands_out(self) -> bool:
        return bool(self.marks or self.off or self.found)

    @property
    def moves(self) -> bool:
        finite = [value for value in self.values if math.isfinite(value)]
        return len(finite) < len(self.values) or (bool(finite) and min(finite) < max(finite))

    @property
    def first_to_last(self) -> str:
        return f"{_word(self.values[0])} → {_word(self.values[-1])}"

    @property
    def said(self) -> str:
        """Why it stands out, in words."""
        parts = [f"see {', '.join(self.found)}"] if self.found else []
        if self.marks:
            at = [str(self.steps[position]) for position in sorted(self.marks)]
            more = f" and {len(at) - 3} more" if len(at) > 3 else ""
            parts.append(f"stands out at step {', '.join(at[:3])}{more}")
        parts += [expected(row) for row in self.off]
        return " · ".join(parts)

    def about(self) -> list[str]:
        """What is known of it beside its values: whose name it is, its formula, what was expected."""
        names = [self.signal.replace("_", " ")] if self.signal != self.name else []
        names += [str(self.entry[part]) for part in ("framework", "formula") if self.entry.get(part)]
        lines = [" · ".join(names)] if names else []
        lines += [
            f"{expected(row)} ({row['source']})" for row in self.entry["expected"] if row["expected"] != [None, None]
        ]
        lines += [f"{row['what']}: {row['correction']}" for row in self.entry["expected"] if row["correction"]]
        return lines


def trends(series: Sequence[Mapping[str, Any]], findings: Sequence[Mapping[str, Any]] = ()) -> list[Trend]:
    """The series with anything to draw: what stands out first, then what a glance looks at, what never moves last."""
    wrong = [one for one in findings if one["severity"] != "info"]
    found = [
        Trend(
            str(one["name"]), str(one["signal"]), str(one["run"]), list(one["steps"]), numbers(one["values"]),
            frozenset(one["marks"]), one, _resting(wrong, one),
        )
        for one in series
        if one["values"]
    ]  # fmt: skip
    return [one for _, one in sorted(enumerate(found), key=lambda item: (*_rank(item[1]), item[0]))]


def _resting(findings: Sequence[Mapping[str, Any]], series: Mapping[str, Any]) -> tuple[str, ...]:
    """Ids of the findings that point to this signal, or expected something else of it."""
    names = {series["name"], series["signal"]}
    return tuple(
        dict.fromkeys(
            str(one["id"])
            for one in findings
            if one["where"].get("tensor") in names
            or any(piece["name"] in names and piece["expected"] for piece in one["evidence"])
        )
    )


def _rank(one: Trend) -> tuple[int, int]:
    known = SHOWN.index(one.signal) if one.signal in SHOWN else len(SHOWN)
    if one.stands_out:
        return (0 if one.found else 1), known
    return (4 if not one.moves else 2 if one.signal in SHOWN else 3), known


def expected(row: Mapping[str, Any]) -> str:
    """`iteration: expected 8,000 to 16,000 ms, seen 2,495`."""
    low, high = row["expected"]
    if low is None and high is None:
        wanted = "nothing certain"
    elif low is None:
        wanted = f"at most {fmt.number(high)}"
    elif high is None:
        wanted = f"at least {fmt.number(low)}"
    else:
        wanted = f"{fmt.number(low)} to {fmt.number(high)}"
    seen = fmt.number(row["seen"]["median"])
    return f"{row['what']}: expected {wanted} {row['unit']}".rstrip() + f", seen {seen}"


def _word(value: float) -> str:
    return fmt.number(value, 4) if math.isfinite(value) else str(value)
