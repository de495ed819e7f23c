"""What a URL names, and which names of objects may become names of files. No library is loaded here."""

from __future__ import annotations

import os
from urllib.parse import unquote, urlsplit

from msgspec import Struct

from replay_core.errors import RequestError
from replay_core.regexes import regex

SCHEMES = ("s3", "gs", "hf", "sftp", "ssh", "http", "https")
#: Of these a name before the host is whose account it is.
_WITH_ACCOUNT = ("sftp", "ssh")
#: What stands before a host, and everything behind a question mark: passwords, tokens, signatures.
_USER = regex(r"//[^/\s]+@")
_QUERY = regex(r"\?[^\s\"')]+")
_LONGEST_NAME = 255
#: Of these, what a library says is never shown.
_SECRET = (
    "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ACCESS_KEY_ID", "GOOGLE_SERVICE_ACCOUNT_KEY", "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
)  # fmt: skip


class Address(Struct, frozen=True):
    """`scheme://host/key`: the host of an object store is its bucket, of the hub a kind or an owner."""

    scheme: str
    host: str
    key: str

    def __str__(self) -> str:
        return f"{self.scheme}://{self.host}/{self.key}"


def redacted(text: str) -> str:
    """The text without what may be a secret: what stands before a host, a query, this process's credentials."""
    for name in _SECRET:
        if value := os.environ.get(name):
            text = text.replace(value, "…")
    return _QUERY.sub("?…", _USER.sub("//…@", text))


def address(url: str) -> Address:
    """What the URL names.

    Raises:
        RequestError: its scheme is not read, it names no host, or it carries a secret.
    """
    shown = redacted(url)
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise RequestError(f"the URL cannot be read: {error}", file=shown) from None
    if parts.scheme.lower() not in SCHEMES:
        raise RequestError(
            f"{parts.scheme}:// is not read",
            file=shown,
            expected=", ".join(f"{scheme}://" for scheme in SCHEMES),
            found=f"{parts.scheme}://",
            hint="copy the dump to this machine, or mount it, and name the folder",
        )
    scheme = parts.scheme.lower()
    if (parts.username and scheme not in _WITH_ACCOUNT) or parts.password or parts.query:
        raise RequestError(
            "a URL with a password, token or signature in it is not read: it would stand in the shell's history",
            file=shown,
            hint="credentials come from the environment (AWS_ACCESS_KEY_ID, HF_TOKEN, …) or from an agent of ssh",
        )
    if not parts.hostname:
        raise RequestError("the URL names no host or bucket", file=shown, hint="s3://BUCKET/FOLDER")
    key = unquote(parts.path) if scheme.startswith("http") or scheme in _WITH_ACCOUNT else parts.path
    return Address(scheme, parts.netloc, key.strip("/"))


def why_not_a_file(name: str) -> str | None:
    """Why an object of that name cannot lie in the cache under it: somebody else chose it."""
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts):
        return "its name leads out of the folder, or nowhere"
    if "\\" in name or not name.isprintable():
        return "its name holds a backslash or a control character"
    if any(len(os.fsencode(part)) > _LONGEST_NAME for part in parts):
        return f"a part of its name is longer than {_LONGEST_NAME} bytes"
    return None
