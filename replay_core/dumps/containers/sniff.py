"""Which container a file is, from its first bytes.

Never from its suffix, and never from `zipfile.is_zipfile`: that looks at the end, where a raw pickle can
hold a nested zip. safetensors come first, because their length field can look like anything.
"""

from __future__ import annotations

from replay_core.dumps.containers.torch_legacy import MAGIC_OPCODES
from replay_core.errors import NotADumpError

#: Enough to tell a legacy torch stream from another pickle.
HEAD = 32


def kind_of(head: bytes, file: str) -> str:
    """ "safetensors", "torch_zip", "torch_legacy" or "pickle".

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
    raise NotADumpError(
        "the file is no container of tensors that rldbg reads",
        file=file,
        expected="a torch zip, a torch legacy stream, a pickle of protocol 2 to 5, or safetensors",
        found=f"the first bytes {head!r}",
    )
