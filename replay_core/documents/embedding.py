"""A document inside a page: whole, inert, and read again by rldbg. Compressed, so that a page stays small."""

from __future__ import annotations

import base64
import binascii
import json
import re
import zlib
from typing import TYPE_CHECKING

from replay_core.budget import spend_bytes
from replay_core.errors import DumpError

if TYPE_CHECKING:
    from pathlib import Path

    from replay_core.documents.kinds import Document

#: A page begins so, within the bytes that tell a document from a dump.
BEGINNING = '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<meta name="generator" content="rldbg">\n'
#: Bytes of a page that rldbg reads, and of the document in one: a thousandfold of base64 is no document.
MAX_PAGE, MAX_DOCUMENT = 1 << 22, 1 << 27
_AT_ONCE = 1 << 20

_OPEN, _CLOSE = '<template id="rldbg-document" data-encoding="deflate base64">', "</template>"


def kind_mark(kind: str) -> str:
    """The line after `BEGINNING`: what the document is, without looking into it."""
    return f'<meta name="rldbg:kind" content="{kind}">\n'


def embedded(document: Document) -> str | None:
    """The document as an element that no browser shows or runs; None where it is too large for any page."""
    # Rows that are made as they are asked for are no list.
    data = json.dumps(document, separators=(",", ":"), allow_nan=False, default=list).encode()
    if len(data) > MAX_DOCUMENT:
        return None
    return f"{_OPEN}{base64.b64encode(zlib.compress(data, 9)).decode()}{_CLOSE}"


def is_page(head: bytes) -> bool:
    """Whether the first bytes are those of a page that rldbg wrote."""
    return head.startswith(BEGINNING.encode())


def extracted(page: bytes, path: Path) -> bytearray:
    """The JSON of the document in a page.

    Raises:
        BudgetError: it is larger than what a page of that size may hold.
        DumpError: the page holds none, or one that is damaged or too large.
    """
    if len(page) > MAX_PAGE:
        raise DumpError("the page is too large", file=str(path), expected=f"at most {MAX_PAGE:,} bytes")
    found = re.search(re.escape(_OPEN).encode() + b"([A-Za-z0-9+/=]*)" + _CLOSE.encode(), page)
    if found is None:
        raise DumpError(
            "the page holds no document", file=str(path), expected="a page with its document",
            found="one whose document was too large for it, or was cut off", hint="the JSON, which --output writes",
        )  # fmt: skip
    machine, data = zlib.decompressobj(), bytearray()
    try:
        packed = base64.b64decode(found[1], validate=True)
        while packed and not machine.eof and len(data) < MAX_DOCUMENT:
            some = machine.decompress(packed, _AT_ONCE)
            spend_bytes(len(some), "the document in the page")
            data += some
            packed = machine.unconsumed_tail
    except (zlib.error, binascii.Error) as error:
        raise DumpError(f"the document in the page is damaged: {error}", file=str(path)) from None
    if not machine.eof:
        raise DumpError(
            "the document in the page is cut off or too large", file=str(path),
            expected=f"at most {MAX_DOCUMENT:,} bytes, unpacked",
        )  # fmt: skip
    return data
