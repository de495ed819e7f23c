"""The digest the recorder keeps of a tensor: of its bytes, little-endian, in C order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replay_core import hashes, pages
from replay_core.records import TensorRef


def is_digest(digest: str | None) -> bool:
    """Whether a text is a digest of a tensor that can be held against one taken here."""
    return hashes.kind_of(digest) is not None


def digest_of(pieces: Iterable[NDArray[Any]], kind: str | None = None) -> str:
    """The digest of a tensor whose elements these are, one piece after the other."""
    return hashes.digest_of(map(_bytes, pieces), kind)


def digest(ref: TensorRef, kind: str | None = None) -> str:
    """The digest of a tensor: the recorded one where its values were not kept, else one of that kind.

    Raises:
        DumpError: the bytes cannot be read.
    """
    return (
        (ref.digest or "") if not ref.is_readable else digest_of((chunk for _, chunk in pages.flat_chunks(ref)), kind)
    )


def shared_kind(a: TensorRef, b: TensorRef) -> str | None:
    """The kind of digest that both sides have or can take; None where two were recorded that differ in kind."""
    recorded = {hashes.kind_of(ref.digest) for ref in (a, b) if not ref.is_readable}
    return None if len(recorded) > 1 else next(iter(recorded), hashes.taken())


def _bytes(piece: NDArray[Any]) -> NDArray[np.uint8]:
    ordered = np.ascontiguousarray(piece.astype(piece.dtype.newbyteorder("<"), copy=False))
    return ordered.reshape(-1).view(np.uint8)
