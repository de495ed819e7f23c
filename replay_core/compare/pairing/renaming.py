"""The user's own words for tensors: which name of b is which name of a. One rule a line, or a JSON object.

model.layers.*.attn.out = layers.*.self_attn.output
# a name of a (recorded or listed), then the name b has for it; every * stands for the same text on both sides, in order
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from replay_core.errors import RequestError
from replay_core.records import Record, TensorRef

MAX_BYTES = 1 << 20


@dataclass(slots=True)
class Renames:
    """Rules (a's name, b's name), each with as many * on one side as on the other."""

    rules: list[tuple[str, str]]
    source: str
    #: Rules that made a tensor of b one of a's, and of others the first name they gave.
    _met: set[int] = field(default_factory=set)
    _given: dict[int, str] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Renames:
        """The rules of a file.

        Raises:
            RequestError: it cannot be read, holds no rule, or its rules contradict each other.
        """
        try:
            if path.stat().st_size > MAX_BYTES:
                raise RequestError(
                    "the map of names is too large", file=str(path), found=f"{path.stat().st_size:,} bytes"
                )
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise RequestError(f"the map of names cannot be read: {why}", file=str(path)) from None
        rules = _json_rules(text, path) if text.lstrip().startswith("{") else _line_rules(text, path)
        if not rules:
            raise RequestError("the map of names has no rule", file=str(path), expected="name in a = name in b")
        return cls(_consistent(rules, path), str(path))

    def applied(
        self, tensors: dict[tuple[str, str], tuple[Record, TensorRef]], names_of_a: Mapping[str, str]
    ) -> dict[tuple[str, str], tuple[Record, TensorRef]]:
        """A side of b's tensors under a's names. `names_of_a`: what a's tensors are called, by every name they have.

        Raises:
            RequestError: two tensors of b would have one name of a.
        """
        renamed: dict[tuple[str, str], tuple[Record, TensorRef]] = {}
        origin: dict[tuple[str, str], str] = {}
        for (name, stage), held in tensors.items():
            key = (self._name((name, held[1].name), names_of_a), stage)
            if key in renamed:
                raise RequestError(
                    f"the map gives two tensors of b one name, {key[0]}",
                    file=self.source,
                    expected="one name each",
                    found=f"{origin[key]} and {name} (stage {stage})",
                )
            renamed[key] = held
            origin[key] = name
        return renamed

    def _name(self, names: tuple[str, ...], names_of_a: Mapping[str, str]) -> str:
        for number, (in_a, in_b) in enumerate(self.rules):
            pattern = re.compile("(.+)".join(re.escape(part) for part in in_b.split("*")))
            for name in names:
                found = pattern.fullmatch(name)
                if found:
                    parts = iter(found.groups())
                    given = "".join(next(parts) if part == "*" else part for part in re.split(r"(\*)", in_a))
                    if given in names_of_a:
                        self._met.add(number)
                    else:
                        self._given.setdefault(number, given)
                    return names_of_a.get(given, given)
        return names[0]

    def unused(self) -> list[str]:
        """A sentence for every rule that made no tensor of b one of a's."""
        return [
            f"the rule {in_a} = {in_b} "
            + (f"gives {self._given[number]}, which a has not" if number in self._given else "met no tensor of b")
            for number, (in_a, in_b) in enumerate(self.rules)
            if number not in self._met
        ]


def _json_rules(text: str, path: Path) -> list[tuple[str, str]]:
    def pairs(found: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
        return found  # as written: json's own dict would drop the first of two contradicting rules

    try:
        rules = json.loads(text, object_pairs_hook=pairs)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the map of names is not JSON: {error}", file=str(path)) from None
    if not all(isinstance(value, str) and name.strip() and value.strip() for name, value in rules):
        raise RequestError(
            "the map of names is not flat, or a name is empty", file=str(path), expected='{"name in a": "name in b"}'
        )
    return list(rules)


def _line_rules(text: str, path: Path) -> list[tuple[str, str]]:
    rules = []
    for number, line in enumerate(text.splitlines(), 1):
        said = line.split("#", 1)[0].strip()
        if not said:
            continue
        in_a, equals, in_b = (part.strip().strip("\"'") for part in said.partition("="))
        if not equals or not in_a or not in_b or "=" in in_b:
            raise RequestError(
                f"line {number} of the map of names is no rule",
                file=str(path),
                expected='name in a = name in b; names that hold a = go into a JSON object, {"name in a": "name in b"}'
                if "=" in in_b
                else "name in a = name in b",
                found=said,
            )
        rules.append((in_a, in_b))
    return rules


def _consistent(rules: list[tuple[str, str]], path: Path) -> list[tuple[str, str]]:
    rules = list(dict.fromkeys(rules))
    for side, which, other in ((0, "a", "b"), (1, "b", "a")):
        seen: dict[str, str] = {}
        for rule in rules:
            name, meant = rule[side], rule[1 - side]
            if seen.setdefault(name, meant) != meant:
                raise RequestError(
                    f"the map of names contradicts itself: {name} of {which} is two names of {other}",
                    file=str(path),
                    expected="one name each",
                    found=f"{seen[name]} and {meant}",
                )
    for in_a, in_b in rules:
        if in_a.count("*") != in_b.count("*"):
            raise RequestError(
                "a rule of the map has more * on one side",
                file=str(path),
                expected="as many on both",
                found=f"{in_a} = {in_b}",
            )
    return rules
