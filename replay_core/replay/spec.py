"""A spec: the settings of one thing as text, `adamw,lr=1e-6`, or as a mapping; `what` names the thing in a message."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from msgspec import Struct

from replay_core.errors import RequestError

T = TypeVar("T", bound=Struct)


def made(kind: type[T], settings: Mapping[str, Any], what: str) -> T:
    """The struct of JSON-able settings.

    Raises:
        RequestError: a setting that does not exist, or a value it cannot have.
    """
    known = sorted(kind.__struct_fields__)
    if unknown := sorted(set(settings) - set(known)):
        raise RequestError(f"{what} has no {', '.join(unknown)}", expected=", ".join(known))
    return kind(**settings)


def parsed(text: str, what: str, numbers: Mapping[str, Callable[[str], Any]], example: str) -> dict[str, Any]:
    """The settings that a text names, and only those; its first part may be a kind without a name.

    Raises:
        RequestError: one of `numbers` is none.
    """
    settings: dict[str, Any] = {}
    for number, part in enumerate(text.split(",")):
        name, equals, value = part.partition("=")
        if number == 0 and not equals:
            name, value = "kind", name
        try:
            settings[name] = numbers.get(name, str)(value)
        except ValueError:
            raise RequestError(f"{name} of {what} is a number", expected=example, found=part) from None
    return settings
