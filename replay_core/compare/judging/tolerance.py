"""Tolerances a person gives instead of the table's: `--atol`, `--rtol`, or a file of rules by name.

A file is TOML. The last table that fits a tensor and names a rule decides on that rule, `rules.py` on the rest:

    [[tolerance]]
    name = "layers.*.mlp.*"      # a glob over canonical names
    dtype = "bfloat16"           # optional: bfloat16, float16, float32, float64, float8
    column = "end-to-end"        # optional: local, end-to-end, gradient, param
    reason = "experts in fp8"    # printed where this decided: it made a divergence, or accepted one
    rel_l2 = 0.2                 # a limit, by the id of any rule: DIFF past it
    suspect = 0.1                # of rel_l2: suspect past it
    off = ["worst_row"]          # rules that are not asked
    # atol = 1e-3, rtol = 1e-2   # instead of all limits: every |d| <= atol + rtol |a|
    # exact = true               # no difference at all

Who sets `rel_l2` (of log probabilities `max_abs`) looser than the table says how far a tensor may be off, in whatever
shape: rules of shape (`gain`, `bias`, `row_gain`, `standing_row`, ...) are then not asked, unless a table names them.
The other rules of size (`worst_row`, `outlier`, ...) keep their limits. `mean_exp_abs` sets `sample_mean_exp_abs`, too.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from replay_core.budget import reading
from replay_core.compare.judging.rules import BY_ID, HEADS, Bound
from replay_core.compare.judging.verdict import Context
from replay_core.dtypes import FAMILIES
from replay_core.errors import DumpError, RequestError
from replay_core.file_spans import regular

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]

#: Longer than any file of rules somebody wrote.
MAX_BYTES = 1 << 18
MOST_PARTS = 64
COLUMNS = ("local", "end-to-end", "gradient", "param")
_ELEMENTWISE = ("atol", "rtol")
#: Rules of which a file sets no number: `exact` is a switch, `elementwise` has two.
_SETTABLE = tuple(id for id in BY_ID if id not in ("exact", "elementwise"))
_NUMBERS = (*_SETTABLE, "suspect", *_ELEMENTWISE)
_TEXTS = ("name", "dtype", "column", "reason")


class Exemption(Struct, frozen=True):
    """One table of a tolerance file. `numbers`: limits by rule id, `suspect`, `atol` and `rtol`."""

    name: str
    reason: str
    dtype: str | None = None
    column: str | None = None
    exact: bool = False
    off: tuple[str, ...] = ()
    numbers: dict[str, float] = field(default_factory=dict)

    def fits(self, name: str, dtype: str, column: str) -> bool:
        return fnmatchcase(name, self.name) and self.dtype in (None, dtype) and self.column in (None, column)

    def names(self, id: str) -> bool:
        return id in self.numbers or id in self.off


class Limits(Struct):
    """What one tensor is held to: the table, under the exemptions that fit it. Not frozen: a comparison makes many."""

    context: Context
    given: tuple[Exemption, ...] = ()
    #: (atol, rtol), instead of all other limits for numbers.
    elementwise: tuple[float, float] | None = None

    @property
    def column(self) -> str:
        """The row and column of the tables, in words."""
        return f"{self.context.row} {self.context.column}"

    @property
    def is_exact(self) -> bool:
        return self.context.exact or self.context.bitwise_only or bool(self.given and self.given[-1].exact)

    def limit(self, rule: Bound) -> float | None:
        """The limit of a rule; None where it is switched off."""
        by = self._decides(rule) if self.given else None
        if by is None:
            return rule.limit(self.context)
        return by.numbers.get(rule.id)

    def of(self, id: str) -> float:
        """The limit of a rule by its id; infinite where it is switched off."""
        limit = self.limit(BY_ID[id])
        return float("inf") if limit is None else limit

    def suspect(self, rule: Bound) -> float:
        """From which value on CLOSE is suspect: never past the limit."""
        if rule.suspect is None:
            return float("inf")
        said = next((one.numbers["suspect"] for one in reversed(self.given) if "suspect" in one.numbers), None)
        if rule.id != "rel_l2" or said is None:
            said = rule.suspect(self.context)
        return min(said, self.of(rule.id))

    def reason_of(self, id: str) -> str | None:
        """Why a person changed a rule; None where nobody did."""
        if id == "exact":
            return self.given[-1].reason if self.given[-1].exact and not self.context.exact else None
        if id == "elementwise":
            said = [one.reason for one in self.given if set(_ELEMENTWISE) & one.numbers.keys()]
            return said[-1] if said else None
        by = self._decides(BY_ID[id])
        if by is None and self.elementwise is not None:
            return self.reason_of("elementwise")
        return None if by is None else by.reason

    def _decides(self, rule: Bound) -> Exemption | None:
        """Who set a rule, switched it off, or said how far a tensor may be off in whatever shape."""
        if self.context.bitwise_only:
            return None
        by = next((one for one in reversed(self.given) if one.names(rule.id)), None)
        if by is not None or not rule.shape:
            return by
        head = BY_ID[HEADS[self.context.form]]
        size = next((one for one in reversed(self.given) if head.id in one.numbers), None)
        return size if size is not None and size.numbers[head.id] > head.limit(self.context) else None


class Tolerances(Struct, frozen=True):
    """All that judges a comparison: the table, exemptions of a file from it, and one atol and rtol over both."""

    given: tuple[Exemption, ...] = ()
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
        if not self.given:
            return self.elementwise
        of_columns = (self._elementwise(self._fitting(name, dtype, column)) for column in COLUMNS)
        return next((pair for pair in of_columns if pair is not None), None)

    def unmet(self, names: Iterable[str]) -> list[str]:
        """A sentence for every table of the file whose glob fits none of the names."""
        there = set(names)
        return [
            f"the tolerance rule for {one.name} ({one.reason}) fits the name of no tensor"
            for one in self.given
            if not any(fnmatchcase(name, one.name) for name in there)
        ]

    def of(self, context: Context) -> Limits:
        """The limits of a tensor."""
        if not self.given:
            return Limits(context, (), self.elementwise)
        fitting = self._fitting(context.name, context.row, context.column)
        return Limits(context, fitting, self._elementwise(fitting))

    def _fitting(self, name: str, dtype: str, column: str) -> tuple[Exemption, ...]:
        return tuple(one for one in self.given if one.fits(name, dtype, column))

    def _elementwise(self, fitting: tuple[Exemption, ...]) -> tuple[float, float] | None:
        """The options' pair, else that of the last table that sets limits at all."""
        if self.elementwise is not None:
            return self.elementwise
        last = next((one.numbers for one in reversed(fitting) if one.numbers), {})
        return (last.get("atol", 0.0), last.get("rtol", 0.0)) if set(_ELEMENTWISE) & last.keys() else None


def load_tolerances(path: Path) -> Tolerances:
    """The tables of a tolerance file.

    Raises:
        RequestError: it cannot be read, or a table is not one; names the table and the key.
    """
    try:
        with reading(path), regular(path) as file:
            text = file.read(MAX_BYTES + 1)
        if len(text) > MAX_BYTES:
            raise RequestError(
                "the tolerance file is too large", file=str(path), expected=f"at most {MAX_BYTES:,} bytes"
            )
        if any(line.partition(b"=")[0].count(b".") > MOST_PARTS for line in text.splitlines()):
            # The parser keeps every beginning of a key: 40 KB of dots took 4 s and 1.5 GB.
            raise ValueError(f"a key of more than {MOST_PARTS} parts")
        content = tomllib.loads(text.decode())
    except (DumpError, ValueError, RecursionError) as error:
        raise RequestError("the tolerance file cannot be read", file=str(path), found=str(error)[:400]) from None
    rules = content.pop("tolerance", None)
    if content or not isinstance(rules, list) or not rules or not all(isinstance(rule, dict) for rule in rules):
        raise RequestError(
            "a tolerance file holds tables [[tolerance]] and nothing else",
            file=str(path),
            expected="[[tolerance]] with name, reason and limits",
            found=", ".join(content) or "no [[tolerance]]",
        )
    return Tolerances(tuple(_exemption(path, number, rule) for number, rule in enumerate(rules, start=1)))


def _exemption(path: Path, number: int, table: dict[str, Any]) -> Exemption:
    where = f"rule {number} ({_shown(table.get('name', 'without name'))})"

    def refuse(what: str, expected: str, found: object) -> RequestError:
        return RequestError(f"{where}: {what}", file=str(path), expected=expected, found=_shown(found))

    known_keys = (*_TEXTS, "off", "exact", *_NUMBERS)
    unknown = sorted(set(table) - set(known_keys))
    if unknown:
        raise refuse("unknown key, or rule", "one of " + ", ".join(known_keys), ", ".join(unknown))
    for name in ("name", "reason"):
        if not isinstance(table.get(name), str) or not table[name].strip():
            raise refuse(f"{name} is missing", f"{name} = a text", table.get(name, "nothing"))
    for name, known in (("dtype", FAMILIES), ("column", COLUMNS)):
        if name in table and table[name] not in known:
            raise refuse(f"there is no such {name}", "one of " + ", ".join(known), table[name])
    if not isinstance(table.get("exact", False), bool):
        raise refuse("exact is a switch", "true or false", table["exact"])
    off = table.get("off", [])
    if not isinstance(off, list) or any(
        not isinstance(one, str) or one not in BY_ID or one == "elementwise" for one in off
    ):
        strange = [one for one in off if one not in _SETTABLE] if isinstance(off, list) else [off]
        raise refuse("off lists rules", "of " + ", ".join((*_SETTABLE, "exact")), ", ".join(map(_shown, strange)))
    numbers = {name: table[name] for name in _NUMBERS if name in table}
    if not numbers and not table.get("exact") and not off:
        raise refuse("it limits nothing", "one of " + ", ".join(known_keys[len(_TEXTS) :]), ", ".join(table))
    if twice := sorted(set(off) & set(numbers)):
        raise refuse("a rule is set and switched off", "one of both", ", ".join(twice))
    if any(name in numbers for name in _ELEMENTWISE) and len(numbers.keys() - set(_ELEMENTWISE)):
        raise refuse("atol and rtol replace all other limits", "atol and rtol alone", ", ".join(numbers))
    checked = {name: _checked(f"{where}: {name}", value, path) for name, value in numbers.items()}
    if "mean_exp_abs" in checked:
        checked.setdefault("sample_mean_exp_abs", checked["mean_exp_abs"])
    return Exemption(
        table["name"], table["reason"], table.get("dtype"), table.get("column"), bool(table.get("exact")), tuple(off),
        checked,
    )  # fmt: skip


def _shown(value: object) -> str:
    """What a file says, short: a hexadecimal number of any length is read, and cannot be written in decimals."""
    try:
        return str(value)[:80]
    except ValueError:
        return "a number of very many digits"


def _checked(what: str, value: Any, path: Path | None = None) -> float:
    # An int of 400 digits is no float either: Python's own is the judge of both.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= sys.float_info.max:
        raise RequestError(
            f"{what} is no tolerance",
            file=None if path is None else str(path),
            expected="a finite number from 0 upwards",
            found=_shown(value),
        )
    return float(value)


#: The table alone.
DEFAULT = Tolerances()
