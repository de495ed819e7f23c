"""Protocol buffers on the wire: a message's fields by number, without its schema. Standard library only.

Source: the encoding's own description, https://protobuf.dev/programming-guides/encoding/. Enough for the two
loggers that write messages: TensorBoard's event files and wandb's offline runs.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


class WireError(ValueError):
    """The bytes are no message."""


def fields(message: bytes) -> Iterator[tuple[int, int, int | bytes]]:
    """(field number, wire type, value) in order: an int of a varint, the bytes of everything else.

    Raises:
        WireError: a field reaches past the message's end, or is of a type that nobody writes.
    """
    at = 0
    while at < len(message):
        key, at = varint(message, at)
        kind = key & 7
        if kind == VARINT:
            number, at = varint(message, at)
            yield key >> 3, kind, number
            continue
        if kind == BYTES:
            size, at = varint(message, at)
        elif kind in (FIXED64, FIXED32):
            size = 8 if kind == FIXED64 else 4
        else:
            raise WireError(f"wire type {kind} at byte {at}")
        if size > len(message) - at:
            raise WireError(f"a field of {size} bytes at byte {at} of {len(message)}")
        yield key >> 3, kind, message[at : at + size]
        at += size


def varint(data: bytes, at: int) -> tuple[int, int]:
    """The unsigned number that begins at `at`, and where it ends."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise WireError(f"a number without an end at byte {at}")


def signed(value: int) -> int:
    """An int64 as it is meant: negative numbers are written as their two's complement."""
    return value - (1 << 64) if value >= 1 << 63 else value


def number(kind: int, value: int | bytes) -> float | None:
    """A float or double field; None for any other."""
    if kind == FIXED32 and isinstance(value, bytes):
        return float(struct.unpack("<f", value)[0])
    if kind == FIXED64 and isinstance(value, bytes):
        return float(struct.unpack("<d", value)[0])
    return None


def texts(message: bytes, wanted: int) -> Iterator[bytes]:
    """The bytes of every field of that number."""
    for field, kind, value in fields(message):
        if field == wanted and kind == BYTES and isinstance(value, bytes):
            yield value
