"""The digest the recorder keeps of a tensor: `sha256:`, the first digits of the hash of its bytes.

The bytes are little-endian, in C order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replay_core import pages
from replay_core.records import TensorRef

_PREFIX, _DIGITS = "sha256:", 32


def is_digest(digest: str | None) -> bool:
    """Whether a text is a digest of a tensor that can be held against one taken here."""
    return digest is not None and digest.startswith(_PREFIX) and len(digest) == len(_PREFIX) + _DIGITS


def digest_of(pieces: Iterable[NDArray[Any]]) -> str:
    """The digest of a tensor whose elements these are, one piece after the other."""
    found = hashlib.sha256()
    for piece in pieces:
        found.update(np.ascontiguousarray(piece.astype(piece.dtype.newbyteorder("<"), copy=False)).tobytes())
    return _PREFIX + found.hexdigest()[:_DIGITS]


def digest(ref: TensorRef) -> str:
    """The digest of a tensor: the recorded one where its values were not kept.

    Raises:
        DumpError: the bytes cannot be read.
    """
    return (ref.digest or "") if not ref.is_readable else digest_of(chunk for _, chunk in pages.flat_chunks(ref))
