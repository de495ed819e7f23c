"""The digest of bytes: a kind, a colon, and 32 hex digits of their hash.

Taken is `xxh3`, 128 bits of XXH3, at the memory's pace: nobody forges a run of their own. Dumps recorded before, and
those of a trainer without that library, hold `sha256`, the first half of it, a tenth as fast. Of a large tensor
that lay on a device, and was recorded by its digest alone, the device may have taken `fold`: XXH3 of what it made of
the bytes (fold.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

_DIGITS = 32


@cache
def taken() -> str:
    """The kind of what is recorded here."""
    try:
        import xxhash  # noqa: F401 - not at the top: a trainer may have none, and who takes no digest pays nothing
    except ImportError:
        return "sha256"
    return "xxh3"


def kind_of(digest: object) -> str | None:
    """The kind of a digest that can be taken here; None of anything else."""
    if not isinstance(digest, str):
        return None
    kind, colon, digits = digest.partition(":")
    return kind if colon and kind in ("xxh3", "sha256", "fold") and len(digits) == _DIGITS else None


def digest_of(pieces: Iterable[Any], kind: str | None = None) -> str:
    """The digest of bytes, of buffers that follow each other; of the kind `taken` where none is asked for."""
    kind = kind or taken()
    hashed = _new(kind)
    for piece in pieces:
        hashed.update(piece)
    return f"{kind}:{hashed.hexdigest()[:_DIGITS]}"


def _new(kind: str) -> Any:
    # Each is imported where it is used: OpenSSL's takes 2 ms, of a command's 200.
    if kind == "xxh3":
        import xxhash

        return xxhash.xxh3_128()
    if kind == "fold":
        from replay_core.fold import Folding

        return Folding()
    import hashlib

    return hashlib.sha256()
