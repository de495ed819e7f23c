"""The axes of a matrix: `attention=eager,fa2 compile=off,inductor packing=off,on` and the cells they span.

Standard library only. The first value of every axis is its baseline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from msgspec import Struct

from replay_core.errors import RequestError
from replay_core.replay.flags import MATRIX, Flags

#: More cells than this are a mistake, or a night's work that ought to be asked for in parts.
MOST_CELLS = 128

Toggles = dict[str, Any]


class Axes(Struct, frozen=True):
    """Flag names and the values each goes through, the baseline's first."""

    values: dict[str, tuple[Any, ...]]

    @classmethod
    def parse(cls, text: str) -> Axes:
        """Axes from `name=value,value name=value,value`; the default three where the text is empty.

        Raises:
            RequestError: no `=`, an unknown flag or value, a value twice, one value only everywhere, or too many cells.
        """
        values: dict[str, tuple[Any, ...]] = {}
        for axis in (text or MATRIX).split():
            name, equals, listed = axis.partition("=")
            name = name.strip().replace("-", "_")
            if not equals or not listed:
                raise RequestError("an axis is written name=value,value", expected=MATRIX, found=axis)
            parsed = [getattr(Flags.parse(f"{name}={value}"), name) for value in listed.split(",")]
            if len(set(parsed)) != len(parsed) or name in values:
                raise RequestError(f"the axis {name} names a value twice, or stands there twice", found=axis)
            values[name] = tuple(parsed)
        axes = cls(values)
        if axes.size > MOST_CELLS:
            raise RequestError(
                f"the axes span {axes.size} cells", expected=f"at most {MOST_CELLS}", hint="run it in parts"
            )
        if axes.size < 2:
            raise RequestError("a matrix needs an axis of two values", expected=MATRIX, found=text)
        return axes

    @property
    def size(self) -> int:
        size = 1
        for values in self.values.values():
            size *= len(values)
        return size

    def cells(self, base: Flags) -> list[Flags]:
        """Every combination on top of `base`: first those with the fewest toggles."""
        combinations = [dict(zip(self.values, values, strict=True)) for values in product(*self.values.values())]
        combinations.sort(key=lambda chosen: len(self.toggled(chosen)))
        return [Flags.from_mapping({**base.to_mapping(), **chosen}) for chosen in combinations]

    def baseline(self, base: Flags, recorded: Mapping[str, Any] | None = None) -> Flags:
        """Each row alone under the first value of every axis; else as it was recorded."""
        first = {name: values[0] for name, values in self.values.items()}
        return Flags.from_mapping({**base.to_mapping(), **first}).reference({**(recorded or {}), **first})

    def toggled(self, flags: Mapping[str, Any]) -> Toggles:
        """The axes on which a cell leaves the baseline, and what it has there."""
        return {name: flags[name] for name, values in self.values.items() if flags[name] != values[0]}


def smallest(sets: Sequence[Toggles]) -> list[Toggles]:
    """Of sets of toggles, those that hold no other: the fewest that do it. An empty one is what the baseline does."""
    unique = [one for number, one in enumerate(sets) if one not in sets[:number]]
    return [one for one in unique if not any(other != one and other.items() <= one.items() for other in unique)]
