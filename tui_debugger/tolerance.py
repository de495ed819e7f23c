"""The tolerance a comparison on the screen is judged by: the table's own, or one that a person gives."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from replay_core.errors import RequestError

_EXPECTED = "1e-3 (atol), 1e-3 1e-2 (atol rtol), rtol=1e-2, exact, or a file of rules (.toml)"


class Tolerance(NamedTuple):
    """At most one of: a pair of limits, a file of rules by name, bitwise. None of them: the table."""

    atol: float | None = None
    rtol: float | None = None
    file: str | None = None
    exact: bool = False

    @classmethod
    def parse(cls, text: str) -> Tolerance:
        """What somebody typed; nothing, or `table`, is the table.

        Raises:
            RequestError: it is none.
        """
        words = text.replace(",", " ").replace("--", "").split()
        if not words or words == ["table"]:
            return cls()
        if words == ["exact"]:
            return cls(exact=True)
        if text.strip().endswith(".toml"):
            path = Path(text.strip()).expanduser()
            if not path.is_file():
                raise RequestError("there is no such tolerance file", file=str(path), expected=_EXPECTED)
            return cls(file=str(path.absolute()))
        given: dict[str, float] = {}
        names = iter(("atol", "rtol"))
        pending: str | None = None
        for word in " ".join(words).replace("=", " ").split():
            if word in ("atol", "rtol") and pending is None:
                pending = word
                continue
            name = pending or next((one for one in names if one not in given), None)
            pending = None
            value = _number(word)
            if name is None or name in given or value is None:
                raise RequestError("that is no tolerance", expected=_EXPECTED, found=text)
            given[name] = value
        if pending is not None:
            raise RequestError("that is no tolerance", expected=_EXPECTED, found=text)
        return cls(given.get("atol"), given.get("rtol"))

    @classmethod
    def restored(cls, kept: object) -> Tolerance:
        """From what the last session kept; the table where that is not whole, or its file is gone."""
        if not isinstance(kept, Mapping):
            return cls()
        limits = {name: _number(kept.get(name)) for name in ("atol", "rtol")}
        file = kept.get("file")
        if isinstance(file, str) and Path(file).is_file():
            return cls(file=file)
        return cls(limits["atol"], limits["rtol"], None, kept.get("exact") is True)

    @classmethod
    def of_document(cls, document: Mapping[str, Any]) -> Tolerance:
        """What a written comparison was judged by, though its file be gone."""
        kept = document.get("tolerance")
        if not isinstance(kept, Mapping):
            return cls()
        atol, rtol, file = _number(kept.get("atol")), _number(kept.get("rtol")), kept.get("file")
        return cls(atol, rtol, str(file) if file else None, kept.get("exact") is True)

    @property
    def is_table(self) -> bool:
        return self == Tolerance()

    def params(self) -> dict[str, Any]:
        """As parameters of the job that judges again."""
        return {"atol": self.atol, "rtol": self.rtol, "tolerance": self.file, "exact": self.exact}

    def compare_params(self) -> dict[str, Any]:
        """As parameters of a comparison. Bitwise is judged afterwards: the figures then answer any other limit too."""
        return {"atol": self.atol, "rtol": self.rtol, "tolerance": self.file}

    def scaled(self, factor: float) -> Tolerance | None:
        """Looser or tighter by a factor; None where there are no numbers to scale."""
        if not self.atol and not self.rtol:
            return None
        atol, rtol = (None if value is None else float(f"{value * factor:.6g}") for value in (self.atol, self.rtol))
        return Tolerance(atol, rtol)

    @property
    def typed(self) -> str:
        """As it is typed."""
        if self.is_table:
            return ""
        return "exact" if self.exact else self.file or str(self)

    def __str__(self) -> str:
        if self.exact:
            return "bitwise equality"
        given = [f"{name} {value:g}" for name in ("atol", "rtol") if (value := getattr(self, name)) is not None]
        if self.file is not None:
            return " ".join([*given, f"{Path(self.file).name} over the table"])
        return " ".join(given) or "the table"


def _number(value: object) -> float | None:
    try:
        found = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    return found if isfinite(found) and found >= 0 and not isinstance(value, bool) else None
