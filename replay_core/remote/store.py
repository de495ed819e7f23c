"""The objects behind an address: what is there, and a range of one, each request of the state that was listed."""

from __future__ import annotations

import configparser
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

from replay_core.errors import DumpError, RequestError, RldbgError, TruncatedError, UnavailableError
from replay_core.regexes import regex
from replay_core.remote.addresses import Address, redacted

#: Tries of a range whose connection ended midway; what was refused or is not there is not asked for twice.
_TRIES = 4
_FIRST_PAUSE_S = 0.2
_RETRY_S = 20
_NOT_ALLOWED = regex(r"\b(401 Unauthorized|403 Forbidden)")
_LONGEST_WORD = 300


@dataclass(frozen=True)
class Listed:
    """One object as it was when it was listed. `etag` is "" where the server gives none."""

    etag: str
    nbytes: int
    modified_s: float


def objects(address: Address) -> Iterator[tuple[str, Listed]]:
    """Every object under the address, its name relative to it; of an address that is one object, "" and that.

    Raises:
        RequestError: nothing is there, or one may not look.
        UnavailableError: obstore is not installed, or nobody answers.
    """
    errors = _library().exceptions
    try:
        found = False
        if not address.scheme.startswith("http"):
            prefix = address.key or None
            skip = len(address.key) + 1 if address.key else 0
            for chunk in _store(address).list(prefix, chunk_size=1000):
                for one in chunk:
                    found = True
                    yield one["path"][skip:], _held(one)
        if not found:
            yield "", _held(_store(address).head(address.key))
    except (errors.NotFoundError, FileNotFoundError):
        hint = None if not address.scheme.startswith("http") else "http has no listing: name a file of the dump"
        raise RequestError(
            "nothing is there", file=str(address), expected="an object, or objects below", hint=hint
        ) from None
    except (errors.BaseError, OSError, ValueError) as error:
        raise _refused(address, error, errors) from None


def _refused(address: Address, error: BaseException, errors: Any) -> RldbgError:
    """Why a listing failed. obstore says 403 of a listing as an error of no kind, and takes no hostile name."""
    said = _said(error)
    not_allowed = (errors.PermissionDeniedError, errors.UnauthenticatedError, PermissionError)
    if isinstance(error, not_allowed) or _NOT_ALLOWED.search(said):
        wanted = "credentials that may list and read"
        return RequestError(
            "one may not look there", file=str(address), expected=wanted, found=said, hint=_credentials(address)
        )
    if "invalid path" in said:
        return RequestError(
            "an object there has a name that no file can have",
            file=str(address),
            expected="names without '..', '.', empty parts and control characters",
            found=said,
            hint="name a folder that does not hold it",
        )
    return UnavailableError(
        "the store does not answer as one", file=str(address), found=said, hint=_credentials(address)
    )


def fetch(address: Address, name: str, held: Listed, start: int, end: int) -> bytes:
    """The bytes `start:end` of the object, which is still the one that was listed.

    Raises:
        DumpError: it is another one now, or gone; or the connection ended at each try.
    """
    errors = _library().exceptions
    key = "/".join(part for part in (address.key, name) if part)
    shown = f"{address}/{name}" if name else str(address)
    options: dict[str, Any] = {"range": (start, end)}
    if held.etag:
        options["if_match"] = held.etag
    why = ""
    for attempt in range(_TRIES):
        if attempt:
            time.sleep(_FIRST_PAUSE_S * 2 ** (attempt - 1))
        try:
            answer = _store(address).get(key, options=options)
            now = _held(answer.meta)
            if (now.etag, now.nbytes) != (held.etag, held.nbytes):
                raise _changed(shown)
            data = bytes(answer.bytes())
        except errors.PreconditionError:
            raise _changed(shown) from None
        except (errors.NotFoundError, FileNotFoundError):
            raise DumpError(
                "the object is gone since it was listed", file=shown, hint="run the command again"
            ) from None
        except (errors.PermissionDeniedError, errors.UnauthenticatedError, PermissionError) as error:
            raise DumpError(
                "one may not read the object", file=shown, found=_said(error), hint=_credentials(address)
            ) from None
        except (errors.BaseError, OSError, ValueError) as error:
            why = _said(error)
            continue
        if len(data) == end - start:
            return data
        why = f"{len(data):,} bytes"
    raise TruncatedError(
        f"the connection ended at each of {_TRIES} tries",
        file=shown,
        expected=f"{end - start:,} bytes at offset {start:,}",
        found=why,
        hint="run the command again: what came is kept",
    )


def _changed(shown: str) -> DumpError:
    return DumpError(
        "the object was written anew since it was listed",
        file=shown,
        expected="the same object at each read",
        found="another one",
        hint="run the command again, when its upload has ended",
    )


def _held(meta: Any) -> Listed:
    modified = meta["last_modified"]
    return Listed(
        meta.get("e_tag") or "", int(meta["size"]), modified.timestamp() if isinstance(modified, datetime) else 0.0
    )


def _said(error: BaseException) -> str:
    """The first line of what the library says, without secrets."""
    return redacted(" ".join(str(error).split("\n\n", 1)[0].split()))[:_LONGEST_WORD]


def _credentials(address: Address) -> str | None:
    if address.scheme == "s3":
        return (
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or AWS_SKIP_SIGNATURE=true for a public bucket"
        )
    return "GOOGLE_APPLICATION_CREDENTIALS names a key file" if address.scheme == "gs" else None


def _library() -> Any:
    try:
        import obstore  # 33 ms, paid by who gives a URL
    except ImportError:
        raise UnavailableError(
            "reading a URL needs obstore", expected="the extra `remote`", hint="pip install 'rldbg[remote]'"
        ) from None
    return obstore


@lru_cache(maxsize=8)
def _store(address: Address) -> Any:
    from obstore import store  # 33 ms

    common: dict[str, Any] = {
        "client_options": {
            "allow_http": True,
            "connect_timeout": timedelta(seconds=5),
            "timeout": timedelta(seconds=120),
        },
        "retry_config": {"max_retries": _TRIES, "retry_timeout": timedelta(seconds=_RETRY_S)},
    }
    if address.scheme == "s3":
        return store.S3Store(address.host, **_profile(), **common)
    if address.scheme == "gs":
        return store.GCSStore(address.host, **common)
    return store.HTTPStore(f"{address.scheme}://{address.host}", **common)


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
