"""`s3://`, `gs://` and `http(s)://` through obstore, each request of the state that was listed."""

from __future__ import annotations

import configparser
import os
from collections.abc import Iterator
from datetime import datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

from replay_core.errors import DumpError, RequestError, RldbgError, UnavailableError
from replay_core.regexes import regex
from replay_core.remote.addresses import Address, redacted
from replay_core.remote.objects import TRIES, AgainError, Listed, changed, gone, shown

_RETRY_S = 20
_NOT_ALLOWED = regex(r"\b(401 Unauthorized|403 Forbidden)")
_LONGEST_WORD = 300


class Store:
    """The objects of a bucket of S3 or Google below a prefix, or one file of a web server."""

    def __init__(self, address: Address) -> None:
        self._address = address

    @classmethod
    def of(cls, address: Address) -> Store:
        return cls(address)

    def objects(self) -> Iterator[tuple[str, Listed | str]]:
        """As `Source.objects`."""
        address, errors = self._address, library().exceptions
        try:
            found = False
            if not address.scheme.startswith("http"):
                skip = len(address.key) + 1 if address.key else 0
                for chunk in bucket_of(address).list(address.key or None, chunk_size=1000):
                    for one in chunk:
                        found = True
                        yield one["path"][skip:], _held(one)
            if not found:
                yield "", _held(bucket_of(address).head(address.key))
        except (errors.NotFoundError, FileNotFoundError):
            hint = None if not address.scheme.startswith("http") else "http has no listing: name a file of the dump"
            raise RequestError(
                "nothing is there", file=str(address), expected="an object, or objects below", hint=hint
            ) from None
        except (errors.BaseError, OSError, ValueError) as error:
            raise refused(address, error, errors) from None

    def span(self, name: str, held: Listed, start: int, end: int) -> bytes:
        """As `Source.span`."""
        key = "/".join(part for part in (self._address.key, name) if part)
        options: dict[str, Any] = {"if_match": held.etag} if held.etag else {}
        meta, data = ranged(bucket_of(self._address), key, start, end, shown(self._address, name),
                            credentials(self._address), **options)  # fmt: skip
        now = _held(meta)
        if (now.etag, now.nbytes) != (held.etag, held.nbytes):
            raise changed(shown(self._address, name))
        return data


def ranged(
    store: Any, key: str, start: int, end: int, file: str, credentials: str | None, **options: Any
) -> tuple[Any, bytes]:
    """What obstore says of an object, and a range of its bytes.

    Raises:
        DumpError: it is another one now, or gone, or not to be read.
        AgainError: they did not come.
    """
    errors = library().exceptions
    try:
        answer = store.get(key, options={"range": (start, end), **options})
        return answer.meta, bytes(answer.bytes())
    except errors.PreconditionError:
        raise changed(file) from None
    except (errors.NotFoundError, FileNotFoundError):
        raise gone(file) from None
    except (errors.PermissionDeniedError, errors.UnauthenticatedError, PermissionError) as error:
        raise DumpError("one may not read the object", file=file, found=said(error), hint=credentials) from None
    except (errors.BaseError, OSError, ValueError) as error:
        raise AgainError(said(error)) from None


def refused(address: Address, error: BaseException, errors: Any) -> RldbgError:
    """Why a listing failed. obstore says 403 of a listing as an error of no kind, and takes no hostile name."""
    words = said(error)
    not_allowed = (errors.PermissionDeniedError, errors.UnauthenticatedError, PermissionError)
    if isinstance(error, not_allowed) or _NOT_ALLOWED.search(words):
        wanted = "credentials that may list and read"
        return RequestError(
            "one may not look there", file=str(address), expected=wanted, found=words, hint=credentials(address)
        )
    if "NoSuchBucket" in words:
        expected = "the name of a bucket that is there"
        return RequestError("nothing is there", file=str(address), expected=expected, found=words)
    if "invalid path" in words:
        return RequestError(
            "an object there has a name that no file can have",
            file=str(address),
            expected="names without '..', '.', empty parts and control characters",
            found=words,
            hint="name a folder that does not hold it",
        )
    return UnavailableError(
        "the store does not answer as one", file=str(address), found=words, hint=credentials(address)
    )


def _held(meta: Any) -> Listed:
    modified = meta["last_modified"]
    return Listed(
        meta.get("e_tag") or "", int(meta["size"]), modified.timestamp() if isinstance(modified, datetime) else 0.0
    )


def said(error: BaseException) -> str:
    """The first line of what the library says, without secrets."""
    return redacted(" ".join(str(error).split("\n\n", 1)[0].split()))[:_LONGEST_WORD]


def credentials(address: Address) -> str | None:
    if address.scheme == "s3":
        return (
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or AWS_SKIP_SIGNATURE=true for a public bucket"
        )
    return "GOOGLE_APPLICATION_CREDENTIALS names a key file" if address.scheme == "gs" else None


def library() -> Any:
    """obstore.

    Raises:
        UnavailableError: it is not installed.
    """
    try:
        import obstore  # 33 ms, paid by who gives a URL
    except ImportError:
        raise UnavailableError(
            "reading a URL needs obstore", expected="the extra `remote`", hint="pip install 'rldbg[remote]'"
        ) from None
    return obstore


@lru_cache(maxsize=8)
def bucket_of(address: Address) -> Any:
    """obstore's store of an address."""
    from obstore import store  # 33 ms

    common = patient()
    if address.scheme == "s3":
        return store.S3Store(address.host, **_profile(), **common)
    if address.scheme == "gs":
        return store.GCSStore(address.host, **common)
    return store.HTTPStore(f"{address.scheme}://{address.host}", **common)


def patient() -> dict[str, Any]:
    """How long obstore waits, and how often it tries by itself."""
    return {
        "client_options": {
            "allow_http": True,
            "connect_timeout": timedelta(seconds=5),
            "timeout": timedelta(seconds=120),
        },
        "retry_config": {"max_retries": TRIES, "retry_timeout": timedelta(seconds=_RETRY_S)},
    }


def _profile() -> dict[str, str]:
    """Keys of the user's file of AWS credentials, where the environment has none: obstore looks only there."""
    if os.environ.get("AWS_ACCESS_KEY_ID") or os.environ.get("AWS_SKIP_SIGNATURE"):
        return {}
    file = os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or str(Path.home() / ".aws/credentials")
    parser = configparser.RawConfigParser()
    try:
        parser.read(file)
        section = parser[os.environ.get("AWS_PROFILE", "default")]
    except (configparser.Error, KeyError, OSError, UnicodeDecodeError):
        return {}
    names = {"aws_access_key_id": "access_key_id", "aws_secret_access_key": "secret_access_key",
             "aws_session_token": "session_token", "region": "region"}  # fmt: skip
    return {ours: section[theirs] for theirs, ours in names.items() if theirs in section}
