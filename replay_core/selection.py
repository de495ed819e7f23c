"""What is picked on the command line: `--step`, `--rank`, `--micro`. Standard library only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from replay_core.errors import SelectionError


@dataclass(frozen=True, slots=True)
class Selection:
    """Numbers picked on the command line: `3`, `0,2`, `0:4` (end excluded), `all`, `none` (what has no number)."""

    text: str
    numbers: frozenset[int] | None = None
    span: tuple[int, int] | None = None

    @classmethod
    def parse(cls, text: str | int) -> Selection:
        """Read a selector.

        Raises:
            SelectionError: the text is not one of the five forms.
        """
        text = str(text).strip()
        try:
            if text in ("all", "none"):
                return cls(text)
            if ":" in text:
                start, end = text.split(":")
                return cls(text, span=(int(start or 0), int(end) if end else 2**63))
            return cls(text, numbers=frozenset(int(part) for part in text.split(",")))
        except ValueError:
            raise SelectionError(
                f"cannot read the selection {text!r}", expected="3, 0,2, 0:4, all or none", found=text
            ) from None

    def has(self, number: int | None) -> bool:
        if self.text == "all":
            return True
        if number is None or self.text == "none":
            return number is None and self.text == "none"
        if self.span is not None:
            return self.span[0] <= number < self.span[1]
        return number in (self.numbers or ())

    def is_met(self, numbers: Iterable[int | None]) -> bool:
        """Whether every number asked for is among these, or one of the span; where nothing has a number, it is."""
        known = {number for number in numbers if number is not None}
        if not known or self.text == "none":
            return True
        return self.numbers <= known if self.numbers is not None else any(map(self.has, known))

    def missing(self, numbers: Iterable[int | None]) -> Selection:
        """What of it is not among these: of several numbers those that are not, else itself."""
        left = (self.numbers or frozenset()) - set(numbers)
        return Selection.parse(",".join(map(str, sorted(left)))) if left else self

    def __str__(self) -> str:
        return self.text
