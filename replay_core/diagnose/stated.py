"""What a run states of its own settings: the flags of the dump, and the configuration that the trainer noted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

#: A configuration is a few levels deep.
_DEEPEST = 8


def stated(facts: Mapping[str, Any], *names: str) -> Any:
    """The value of the first of these names, wherever in the settings it stands; None where none stands there, or where
    it stands twice with two values.
    """
    for name in names:
        found = list(_every(facts, name, _DEEPEST))
        if found and all(each == found[0] for each in found):
            return found[0]
    return None


def stated_number(facts: Mapping[str, Any], *names: str) -> float | None:
    """`stated`, where that is a number."""
    value = stated(facts, *names)
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _every(facts: Mapping[str, Any], name: str, deep: int) -> Iterator[Any]:
    for key, value in facts.items():
        if str(key).lower().rpartition(".")[2] == name and not isinstance(value, Mapping):
            yield value
        elif isinstance(value, Mapping) and deep:
            yield from _every(value, name, deep - 1)
