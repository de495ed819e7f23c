"""Where two cells part, from digests alone, and which modules to look at in full. Standard library only.

A capture that would take more room than it may is made twice: digests of everything first, then the tensors themselves
of the modules from the first differing one on, one window after the other, each no larger than the cap.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

#: Share of the room for a capture that a window of modules fills: the final hidden states come with each.
WINDOW = 0.75


class Hashed(Struct, frozen=True):
    """One captured tensor of which no values were kept.

    digest: over the tokens, whatever their layout. nbytes: of the tensor as it was, padding included.
    l2, low, high: of its values over the tokens; None where they are not finite.
    """

    name: str
    digest: str
    nbytes: int
    l2: float | None
    low: float | None
    high: float | None

    @property
    def module(self) -> str:
        return module_of(self.name)


def module_of(name: str) -> str:
    """The module that a captured tensor goes into or comes out of."""
    return re.sub(r"\[\d+\]$", "", re.split(r"\.(?:inputs|output)(?:\.|$)", name)[0])


class Parting(Struct, frozen=True):
    """How the digests of a cell stand to the baseline's.

    first: the first tensor, in the cell's call order, that differs. None: no tensor differs, or (`is_blind`) the cell
    has no digests.
    """

    order: Sequence[Hashed]
    equal: int
    differing: Sequence[str]
    first: tuple[Hashed, Hashed] | None
    is_blind: bool = False

    def to_mapping(self) -> dict[str, Any]:
        """The document's part: how many tensors are equal by digest, how many differ, and the first of those."""
        first = None
        if self.first is not None:
            baseline, cell = (
                {"l2": one.l2, "low": one.low, "high": one.high, "digest": one.digest} for one in self.first
            )
            first = {"name": self.first[1].name, "baseline": baseline, "cell": cell}
        return {
            "tensors": 0 if self.is_blind else len(self.order),
            "equal": self.equal,
            "differ": len(self.differing),
            "first": first,
            "windows": 0,
            "not_in_full": len(self.differing),
            "baseline_dump": None,
        }

    def seen_in_full(self, modules: Sequence[str]) -> dict[str, int]:
        """How much of what differs (or, without digests, of everything) was not captured with these modules."""
        names = {one.name for one in self.order} if self.is_blind else set(self.differing)
        return {"not_in_full": sum(1 for one in self.order if one.name in names and one.module not in modules)}

    @property
    def start(self) -> str | None:
        """Where to look in full: None where there is nothing to see."""
        if self.is_blind:
            return self.order[0].name if self.order else None
        return None if self.first is None else self.first[1].name


def part(baseline: Sequence[Hashed], cell: Sequence[Hashed] | None) -> Parting:
    """Where `cell` leaves `baseline`; without digests of its own (compiled cells) the look begins at the start."""
    if cell is None:
        return Parting(baseline, 0, (), None, is_blind=True)
    known = {one.name: one for one in baseline}
    both = [(known[one.name], one) for one in cell if one.name in known]
    differing = [pair for pair in both if pair[0].digest != pair[1].digest]
    names = [one.name for _, one in differing]
    return Parting(cell, len(both) - len(differing), names, differing[0] if differing else None)


def windows(order: Sequence[Hashed], start: str, room: int) -> Iterator[list[str]]:
    """Modules to capture in full, from the tensor `start` on: each window's tensors fit into `room` bytes.

    After the first one come the modules around it, innermost first: their inputs tell where the difference came from.
    A module that alone takes more than `room` has a window of its own.
    """
    place = next(number for number, one in enumerate(order) if one.name == start)
    first = order[place].module
    around = sorted({one.module for one in order if first.startswith(f"{one.module}.")}, key=len, reverse=True)
    chosen = list(dict.fromkeys([first, *around, *(one.module for one in order[place:])]))
    sizes: dict[str, dict[str, int]] = {}
    for one in order:
        # A tensor under several names is stored once.
        sizes.setdefault(one.module, {})[one.digest] = one.nbytes
    window: list[str] = []
    held: dict[str, int] = {}
    for module in chosen:
        grown = {**held, **sizes[module]}
        if window and sum(grown.values()) > room:
            yield window
            window, grown = [], dict(sizes[module])
        window.append(module)
        held = grown
    if window:
        yield window


def exactly(modules: Sequence[str]) -> str:
    """The capture pattern of these modules and no other."""
    return rf"^(?:{'|'.join(re.escape(module) for module in modules)})$"


def write(path: Path, hashes: Sequence[Hashed]) -> None:
    """The digests as JSON lines, for whoever wants to hold them against another machine's."""
    path.write_text("".join(json.dumps(asdict(one)) + "\n" for one in hashes), encoding="utf-8")


def from_mappings(entries: Sequence[dict[str, Any]] | None) -> list[Hashed] | None:
    return None if entries is None else [Hashed(**entry) for entry in entries]
