"""Which container a file is, from its first bytes.

Never from its suffix, and never from `zipfile.is_zipfile`: that looks at the end, where a raw pickle can
hold a nested zip. safetensors come first, because their length field can look like anything.
"""

from __future__ import annotations

from replay_core.dumps.containers.torch_legacy import MAGIC_OPCODES
from replay_core.errors import NotADumpError

#: Enough to tell a legacy torch stream from another pickle.
HEAD = 32

#: gzip, zstandard, bzip2, xz.
_COMPRESSED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"BZh", b"\xfd7zXZ")
#: msgpack has no magic: a list, or a mapping whose first key is a text.
_MSGPACK_LIST = frozenset((*range(0x91, 0xA0), 0xDC, 0xDD))
_MSGPACK_MAPPING = {**dict.fromkeys(range(0x81, 0x90), 1), 0xDE: 3, 0xDF: 5}


def kind_of(head: bytes, file: str) -> str:
    """ "safetensors", "torch_zip", "torch_legacy", "pickle", "npy", "parquet", "json" or "msgpack".

    Raises:
        NotADumpError: none of these; names the bytes.
    """
    if head[8:9] == b"{" and head[4:8] == b"\0\0\0\0":
        return "safetensors"
    if head[:4] == b"PK\x03\x04":
        return "torch_zip"
    if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        # From protocol 4 on, nine bytes of framing stand before the number.
        is_torch = head.startswith(MAGIC_OPCODES, 2) or (head[2:3] == b"\x95" and head.startswith(MAGIC_OPCODES, 11))
        return "torch_legacy" if is_torch else "pickle"
    if head[:6] == b"\x93NUMPY":
        return "npy"
    if head[:4] == b"PAR1":
        return "parquet"
    if head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] in (b"{", b"["):
        return "json"
    if _is_msgpack(head):
        return "msgpack"
    raise NotADumpError(
        "the file is no container of tensors that rldbg reads",
        file=file,
        expected="a torch zip or legacy stream, a pickle of protocol 2-5, safetensors, numpy, JSON, parquet or msgpack",
        found=f"the first bytes {head!r}",
        hint="it is compressed: unpack it first" if head.startswith(_COMPRESSED) else None,
    )


def _is_msgpack(head: bytes) -> bool:
    if not head or head.startswith(b"\x93NUMPY"):
        return False
    key = _MSGPACK_MAPPING.get(head[0])
    if key is None:
        return head[0] in _MSGPACK_LIST
    return any(0xA0 <= first <= 0xBF or first in (0xD9, 0xDA) for first in head[key : key + 1])
