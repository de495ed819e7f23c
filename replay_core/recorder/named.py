"""What a comparison named, recorded whole in a second run: of all else its figures and digests, as the level says.

Pass 1 records every tensor's digest and statistics and compares two such dumps; pass 2 runs again and keeps the values
of the tensors that parted, with the tokens of their micro-batches: they are paired by them, and replayed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from replay_core.errors import DumpError, RequestError
from replay_core.recorder.values import leaves

#: A document of a hundred thousand tensors has 60 MB.
_MOST_BYTES = 1 << 29
_PARTED = ("DIFF", "NAN", "SHAPE")
#: A record of these is whole where anything of its micro-batch is.
_OF_TOKENS = ("batch_inputs",)

#: step, rank, micro.
_Place = tuple[Any, Any, Any]


class Named:
    """Fields by the records that hold them."""

    def __init__(self, fields: Mapping[tuple[Any, ...], frozenset[str]], source: str = "") -> None:
        self._fields = dict(fields)
        self._places: set[_Place] = {key[:3] for key in fields}
        self.source = source

    @classmethod
    def of_comparison(cls, file: str | os.PathLike[str]) -> Named:
        """The tensors that differ in a document of `rldbg compare --json`, of either side's record and name.

        Raises:
            DumpError: the file cannot be read, or is no such document.
            RequestError: no tensor differs in it.
        """
        try:
            with open(file, "rb") as opened:
                document = json.loads(opened.read(_MOST_BYTES))
        except OSError as error:
            raise DumpError(f"the comparison cannot be read: {error.strerror}", file=str(file)) from None
        except (ValueError, RecursionError):
            document = None
        kind = document.get("kind") if isinstance(document, dict) else None
        if not isinstance(document, dict) or kind != "comparison":
            raise DumpError(
                "the file is no comparison", file=str(file), expected="what rldbg compare A B --output FILE writes",
                found=f"kind {kind}" if kind else "no document", hint="of units: DIR/documents/ID.json",
            )  # fmt: skip
        fields: dict[tuple[Any, ...], set[str]] = {}
        try:
            for row in document["tensors"]:
                if row["verdict"] in _PARTED:
                    for name, key in zip(row["names"], (row["a_key"], row["b_key"]), strict=True):
                        if name is not None and key is not None:
                            fields.setdefault(_of(key), set()).add(str(name))
        except (KeyError, TypeError, ValueError, AttributeError):
            raise DumpError(
                "the comparison is damaged", file=str(file), expected="tensors with names and keys"
            ) from None
        if not fields:
            raise RequestError(
                "the comparison names no tensor that differs: nothing would be recorded whole", file=str(file),
                hint="--level full records everything",
            )  # fmt: skip
        return cls({key: frozenset(names) for key, names in fields.items()}, os.path.abspath(file))

    def chosen(self, key: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of a record that are stored whole: what holds a named tensor, or its micro-batch's tokens."""
        if key["stage"] in _OF_TOKENS and _of(key)[:3] in self._places:
            return dict(fields)
        wanted = self._fields.get(_of(key))
        if not wanted:
            return {}
        return {
            name: value for name, value in fields.items() if any(leaf in wanted for leaf, _ in leaves({name: value}))
        }


def _of(key: Mapping[str, Any]) -> tuple[Any, ...]:
    return key["step"], key["rank"], key["micro"], key["role"], key["stage"]


def read(value: Any) -> Named | None:
    """A setting's value: the file of a comparison, or what was read of one."""
    if value is None or isinstance(value, Named):
        return value
    if isinstance(value, (str, Path, os.PathLike)):
        return Named.of_comparison(value)
    raise RequestError("wrong value in the recording settings: whole", expected="the file of a comparison",
                       found=f"whole: {value!r}")  # fmt: skip
