"""Tolerances a person gives instead of the table's: `--atol`, `--rtol`, or a file of rules by name.

A file is TOML, a table per rule; the last rule that fits a tensor decides what it names, the table the rest:

    [[tolerance]]
    name = "layers.*.mlp.*"      # a glob over canonical names
    dtype = "bfloat16"           # optional: bfloat16, float16, float32, float64, float8
    column = "end-to-end"        # optional: local, end-to-end, gradient, param
    reason = "experts in fp8"    # shown beside the verdict
    rel_l2 = 0.2                 # DIFF from here on; also suspect, worst_row, outlier
    # atol = 1e-3, rtol = 1e-2   # instead of all these: every |d| <= atol + rtol |a|
    # max_abs = 0.5              # of log probabilities: nats; also mean_exp_abs, k3
    # exact = true               # no difference at all
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from replay_core.compare.judging.limits import (
    END_TO_END,
    GRADIENT,
    LOCAL,
    LOGPROB,
    LOGPROB_FP32,
    PARAM,
    LogprobTolerance,
    Tolerance,
)
from replay_core.dtypes import FAMILIES
from replay_core.errors import RequestError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]

__all__ = ["DEFAULT", "END_TO_END", "Limits", "Rule", "Tolerances", "load_tolerances"]

#: The table by column.
_COLUMNS = {"local": LOCAL, "end-to-end": END_TO_END, "gradient": GRADIENT, "param": PARAM}
COLUMNS = tuple(_COLUMNS)
#: Names of a rule's numbers, and which field of the tables each one sets.
_TABLE = {"rel_l2": "bug", "suspect": "suspect", "worst_row": "worst_row", "outlier": "outlier"}
_LOGPROB = ("max_abs", "mean_exp_abs", "k3")
_ELEMENTWISE = ("atol", "rtol")
_NUMBERS = (*_TABLE, *_LOGPROB, *_ELEMENTWISE)
_TEXTS = ("name", "dtype", "column", "reason")


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule of a tolerance file."""

    name: str
    reason: str
    dtype: str | None = None
    column: str | None = None
    exact: bool = False
    numbers: dict[str, float] = field(default_factory=dict)

    def fits(self, name: str, dtype: str, column: str) -> bool:
        return fnmatchcase(name, self.name) and self.dtype in (None, dtype) and self.column in (None, column)


@dataclass(frozen=True, slots=True)
class Limits:
    """What one tensor is held to. `elementwise`: (atol, rtol), instead of everything else."""

    table: Tolerance
    logprob: LogprobTolerance
    column: str
    elementwise: tuple[float, float] | None = None
    exact: bool = False
    #: The reason of the rule that changed the table's limits.
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Tolerances:
    """All that judges a comparison: the table, rules of a file over it, and one atol and rtol over both."""

    rules: tuple[Rule, ...] = ()
    elementwise: tuple[float, float] | None = None

    def with_overrides(self, atol: float | None = None, rtol: float | None = None) -> Tolerances:
        """The same with every |d| <= atol + rtol |a| in place of limits for floats. One alone leaves the other 0.

        Raises:
            RequestError: one is negative, infinite or not a number.
        """
        if atol is None and rtol is None:
            return self
        pair = (_checked("--atol", 0.0 if atol is None else atol), _checked("--rtol", 0.0 if rtol is None else rtol))
        return replace(self, elementwise=pair)

    def elementwise_of(self, name: str, dtype: str) -> tuple[float, float] | None:
        """The (atol, rtol) that a tensor will be held to in any column, to be counted while it is read."""
        if self.elementwise is not None:
            return self.elementwise
        for column in COLUMNS:
            asked = self.of(name, dtype, column).elementwise
            if asked is not None:
                return asked
        return None

    def unmet(self, names: Iterable[str]) -> list[str]:
        """A sentence for every rule of the file whose glob fits none of the names."""
        there = set(names)
        return [
            f"the tolerance rule for {rule.name} ({rule.reason}) fits the name of no tensor"
            for rule in self.rules
            if not any(fnmatchcase(name, rule.name) for name in there)
        ]

    def of(self, name: str, dtype: str, column: str, *, known_fp32: bool = False) -> Limits:
        """The limits of a tensor by canonical name, dtype family and column."""
        logprob = LOGPROB_FP32 if known_fp32 else LOGPROB
        limits = Limits(_COLUMNS[column][dtype], logprob, column, self.elementwise)
        for rule in self.rules:
            if rule.fits(name, dtype, column):
                limits = _changed(limits, rule, self.elementwise)
        return limits


def _changed(limits: Limits, rule: Rule, outer: tuple[float, float] | None) -> Limits:
    given = rule.numbers
    table = replace(limits.table, **{_TABLE[name]: value for name, value in given.items() if name in _TABLE})
    if table.suspect > table.bug:
        table = replace(table, suspect=table.bug)
    bounds = {}
    for name in _LOGPROB:
        if name in given:
            noise, suspect, _ = getattr(limits.logprob, name)
            bounds[name] = (min(noise, given[name]), min(suspect, given[name]), given[name])
    elementwise = limits.elementwise
    if any(name in given for name in _ELEMENTWISE):
        elementwise = (given.get("atol", 0.0), given.get("rtol", 0.0))
    elif any(name in given for name in _TABLE):
        elementwise = None
    return replace(
        limits, table=table, logprob=replace(limits.logprob, **bounds), reason=rule.reason,
        exact=rule.exact, elementwise=outer or elementwise,
    )  # fmt: skip


def load_tolerances(path: Path) -> Tolerances:
    """The rules of a tolerance file.

    Raises:
        RequestError: it cannot be read, or a rule is not one; names the rule and the key.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise RequestError("the tolerance file cannot be read", file=str(path), found=str(error)) from None
    rules = content.pop("tolerance", None)
    if content or not isinstance(rules, list) or not rules or not all(isinstance(rule, dict) for rule in rules):
        raise RequestError(
            "a tolerance file holds tables [[tolerance]] and nothing else",
            file=str(path),
            expected="[[tolerance]] with name, reason and limits",
            found=", ".join(content) or "no [[tolerance]]",
        )
    return Tolerances(tuple(_rule(path, number, rule) for number, rule in enumerate(rules, start=1)))


def _rule(path: Path, number: int, table: dict[str, Any]) -> Rule:
    where = f"rule {number} ({table.get('name', 'without name')})"

    def refuse(what: str, expected: str, found: object) -> RequestError:
        return RequestError(f"{where}: {what}", file=str(path), expected=expected, found=str(found))

    unknown = sorted(set(table) - {*_TEXTS, *_NUMBERS, "exact"})
    if unknown:
        raise refuse("unknown key", "one of " + ", ".join((*_TEXTS, *_NUMBERS, "exact")), ", ".join(unknown))
    for name in ("name", "reason"):
        if not isinstance(table.get(name), str) or not table[name].strip():
            raise refuse(f"{name} is missing", f"{name} = a text", table.get(name, "nothing"))
    for name, known in (("dtype", FAMILIES), ("column", COLUMNS)):
        if name in table and table[name] not in known:
            raise refuse(f"{name} is none", "one of " + ", ".join(known), table[name])
    if not isinstance(table.get("exact", False), bool):
        raise refuse("exact is a switch", "true or false", table["exact"])
    numbers = {name: table[name] for name in _NUMBERS if name in table}
    if not numbers and not table.get("exact"):
        raise refuse("it limits nothing", "one of " + ", ".join((*_NUMBERS, "exact")), ", ".join(table))
    if any(name in numbers for name in _ELEMENTWISE) and len(numbers.keys() - set(_ELEMENTWISE)):
        raise refuse("atol and rtol replace all other limits", "atol and rtol alone", ", ".join(numbers))
    checked = {name: _checked(f"{where}: {name}", value, path) for name, value in numbers.items()}
    return Rule(
        table["name"], table["reason"], table.get("dtype"), table.get("column"), bool(table.get("exact")), checked
    )


def _checked(what: str, value: Any, path: Path | None = None) -> float:
    # An int of 400 digits is no float either: Python's own is the judge of both.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= sys.float_info.max:
        raise RequestError(
            f"{what} is no tolerance",
            file=None if path is None else str(path),
            expected="a finite number from 0 upwards",
            found=str(value)[:40],
        )
    return float(value)


#: The table alone.
DEFAULT = Tolerances()
