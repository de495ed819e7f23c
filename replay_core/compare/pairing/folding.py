"""Fields of records held in little: those of many ranks are called, typed and shaped alike, and lie elsewhere."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

from replay_core.records import FileBytes, TensorRef

#: In the place of a kind: the field is held as it is.
_AS_IT_IS = -1


class FieldFolder:
    """Folds the fields of records, one after the other; what they have in common it holds once."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._kinds: list[tuple[Any, ...]] = []

    def fold(self, fields: Sequence[TensorRef]) -> Callable[[], tuple[TensorRef, ...]]:
        """What makes the same fields again: twelve bytes each, where they are stretches of one file."""
        path = next((ref.source.path for ref in fields if type(ref.source) is FileBytes), None)
        kinds, offsets = array("i"), array("q")
        others: list[TensorRef] = []
        for ref in fields:
            where = ref.source
            if type(where) is not FileBytes or where.path is not path or ref.digest is not None or ref.copies:
                kinds.append(_AS_IT_IS)
                offsets.append(len(others))
                others.append(ref)
                continue
            kind = (
                ref.name, ref.dtype, ref.shape, where.nbytes, where.strides, where.big_endian, ref.canonical,
                ref.alignment, ref.pad, ref.rows, ref.order, ref.sentinel, ref.line, ref.stated,
            )  # fmt: skip
            number = self._numbers.get(kind)
            if number is None:
                number = self._numbers[kind] = len(self._kinds)
                self._kinds.append(kind)
            kinds.append(number)
            offsets.append(where.offset)

        def unfolded() -> tuple[TensorRef, ...]:
            made = []
            for number, offset in zip(kinds, offsets, strict=True):
                if number == _AS_IT_IS:
                    made.append(others[offset])
                    continue
                name, dtype, shape, nbytes, strides, big, canonical, alignment, pad, rows, order, sentinel, *rest = (
                    self._kinds[number]
                )
                assert path is not None
                source = FileBytes(path, offset, nbytes, strides, big)
                made.append(TensorRef(name, dtype, shape, source, canonical, alignment, pad, rows, order, None,
                                      sentinel, rest[0], (), rest[1]))  # fmt: skip
            return tuple(made)

        return unfolded
