"""The user's own words for tensors: which name of b is which name of a. One rule a line, or a JSON object.

model.layers.*.attn.out = layers.*.self_attn.output
# a name of a (recorded or listed), then the name b has for it; every * stands for the same text on both sides, in order
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from replay_core.errors import DumpError, RequestError
from replay_core.file_spans import regular
from replay_core.records import Record, TensorRef

MAX_BYTES = 1 << 20
#: Rules with a *, each of which is tried on every name: maps of two engines' names have a few dozen.
MOST_STARRED = 512


class Renames(Struct):
    """Rules (a's name, b's name), each with as many * on one side as on the other."""

    rules: list[tuple[str, str]]
    source: str
    #: Rules that made a tensor of b one of a's, and of others the first name they gave.
    _met: set[int] = field(default_factory=set)
    _given: dict[int, str] = field(default_factory=dict)
    _exact: dict[str, int] = field(default_factory=dict)
    _wild: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._exact = {in_b: number for number, (_, in_b) in enumerate(self.rules) if "*" not in in_b}
        self._wild = [number for number, (_, in_b) in enumerate(self.rules) if "*" in in_b]

    @classmethod
    def read(cls, path: Path) -> Renames:
        """The rules of a file.

        Raises:
            RequestError: it cannot be read, holds no rule, or its rules contradict each other.
        """
        try:
            with regular(path) as file:
                stored = file.read(MAX_BYTES + 1)
            text = stored.decode()
        except (DumpError, UnicodeDecodeError) as error:
            why = error.message if isinstance(error, DumpError) else "it is not UTF-8"
            raise RequestError(f"the map of names cannot be read: {why}", file=str(path)) from None
        if len(stored) > MAX_BYTES:
            raise RequestError("the map of names is too large", file=str(path), expected=f"at most {MAX_BYTES:,} bytes")
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
        # A rule without * is looked up: a map may hold one for each of ten thousand tensors.
        told = min((self._exact[name] for name in names if name in self._exact), default=len(self.rules))
        for number in [*(one for one in self._wild if one < told), *([told] if told < len(self.rules) else [])]:
            in_a, in_b = self.rules[number]
            found = next((parts for name in names if (parts := _starred(in_b, name)) is not None), None)
            if found is None:
                continue
            given = "".join(text for pair in zip(in_a.split("*"), [*found, ""], strict=True) for text in pair)
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


def _starred(rule: str, name: str) -> list[str] | None:
    """What each * of a rule stands for in a name, the first as much as it can; None where the rule does not fit.

    From the right, as far right as each text can lie: an expression would try every way to share the name out.
    """
    head, *texts = rule.split("*")
    if not texts:
        return [] if name == rule else None
    last = texts.pop()
    if not name.startswith(head) or not name.endswith(last):
        return None
    found, end = list[str](), len(name) - len(last)
    for text in reversed(texts):
        at = name.rfind(text, len(head), max(end - 1, 0))
        if at < 0:
            return None
        found.append(name[at + len(text) : end])
        end = at
    return [name[len(head) : end], *reversed(found)] if end > len(head) else None


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
    starred = sum("*" in in_b for _, in_b in rules)
    if starred > MOST_STARRED:
        raise RequestError(
            "the map has too many rules with a *", file=str(path), expected=f"at most {MOST_STARRED}",
            found=f"{starred:,}", hint="rules without a * may be as many as there are tensors",
        )  # fmt: skip
    for in_a, in_b in rules:
        if in_a.count("*") != in_b.count("*"):
            raise RequestError(
                "a rule of the map has more * on one side",
                file=str(path),
                expected="as many on both",
                found=f"{in_a} = {in_b}",
            )
    return rules
