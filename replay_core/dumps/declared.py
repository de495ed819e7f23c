"""What the fields of a record declare, held against what is stored: a field that asks for more is there, unread."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from replay_core.budget import BYTES_PER_BYTE, FLOOR_BYTES, OPTION, factor, is_walkable, stored_bytes
from replay_core.dumps.containers.torch_rebuild import overlapping
from replay_core.records import FileBytes, Inline, Marks, Parts, Reduced, TensorRef, Unreadable

#: A file of at most so many bytes counts whole, its holes too.
MOST_HOLES = 5 << 30


def payable(fields: Sequence[TensorRef]) -> Sequence[TensorRef]:
    """The fields as they are; those that walk more than their files hold are unreadable.

    A thousand names for one tensor, a column that lays it end to end a thousand times, rows without an element: a few
    bytes each, and whoever looks at all of them would look for ever.
    """
    declared = 0
    for ref in fields:
        source = ref.source
        if type(source) is FileBytes and source.nbytes:
            declared += source.nbytes if source.strides is None else _looked_at(ref)
        elif ref.shape:
            break
    else:
        if declared <= FLOOR_BYTES:
            return fields
    walked: dict[Path, int] = {}
    here: Path | None = None
    nbytes, odd = 0, []
    for number, ref in enumerate(fields):
        source = ref.source
        if type(source) is FileBytes and source.nbytes:
            if source.path is not here:
                if here is not None:
                    walked[here] = walked.get(here, 0) + nbytes
                here, nbytes = source.path, 0
            nbytes += source.nbytes if source.strides is None else _looked_at(ref)
        else:
            odd.append(number)
    if here is not None:
        walked[here] = walked.get(here, 0) + nbytes
    refused = {number: why for number in odd if (why := _unpayable(fields[number], walked)) is not None}
    over = {path for path, asked in walked.items() if asked > FLOOR_BYTES and asked > _limit(path)}
    if not refused and not over:
        return fields
    answer = list(fields)
    too_much = (
        f"the record's fields declare more than {_limit(next(iter(over))):,} bytes of what {_hint()}" if over else ""
    )
    for number, ref in enumerate(fields):
        why = refused.get(number)
        if why is None and over and over & _paths(ref):
            why = too_much
        if why is not None:
            answer[number] = ref.with_(source=Unreadable(why))
    return answer


def _looked_at(ref: TensorRef) -> int:
    """Bytes of a tensor with strides: of one whose elements overlap at least one for each, for each is looked at."""
    return max(ref.source.nbytes, ref.numel) if isinstance(ref.source, FileBytes) else 0


def _hint() -> str:
    return f"is stored ({OPTION}=8 raises every limit)"


def _limit(path: Path) -> int:
    # The holes of a sparse file are zeros that somebody may want to see, as far as looking at them takes seconds.
    size = os.path.getsize(path)
    counted = size if size <= MOST_HOLES else stored_bytes(path)
    return int((FLOOR_BYTES + BYTES_PER_BYTE * counted) * factor())


def _unpayable(ref: TensorRef, walked: dict[Path, int]) -> str | None:
    """Why a field is not to be walked; what it walks otherwise is added to its files."""
    source = ref.source
    if isinstance(source, (Parts, Reduced, Marks)):
        parts = (source.of,) if isinstance(source, Marks) else source.parts
        for part in parts:
            if isinstance(part.source, FileBytes):
                walked[part.source.path] = walked.get(part.source.path, 0) + part.source.nbytes
            elif isinstance(part.source, (Parts, Reduced)):
                _unpayable(part, walked)
    if isinstance(source, (FileBytes, Inline, Parts)) and 0 in ref.shape and not is_walkable(ref.shape, 0, 0):
        return overlapping(ref.shape, 0)
    return None


def _paths(ref: TensorRef) -> set[Path]:
    source = ref.source
    if isinstance(source, FileBytes):
        return {source.path}
    if isinstance(source, Marks):
        return _paths(source.of)
    return {path for part in source.parts for path in _paths(part)} if isinstance(source, (Parts, Reduced)) else set()
