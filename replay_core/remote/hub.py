"""`hf://` through huggingface_hub's listing, the bytes through obstore: of one commit, which never changes.

hf://datasets/OWNER/NAME[@REVISION]/FOLDER      hf://OWNER/NAME[@REVISION]/FOLDER of a model
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from typing import Any
from urllib.parse import unquote, urlsplit

from msgspec import Struct

from replay_core.errors import RequestError, UnavailableError
from replay_core.remote.addresses import Address, redacted
from replay_core.remote.objects import MOST_OBJECTS, Listed, shown
from replay_core.remote.store import library, patient, ranged

_KINDS = {"datasets": "dataset", "spaces": "space", "models": "model"}
#: Folders count here as well.
_MOST = 2 * MOST_OBJECTS
_CREDENTIALS = "hf auth login, or HF_TOKEN, of an account that may read it"


class Hub(Struct, frozen=True):
    """A folder of a repository of the hub, at a revision."""

    address: Address
    repo: str
    kind: str
    revision: str | None
    folder: str

    @classmethod
    def of(cls, address: Address) -> Hub:
        """What an address names on the hub.

        Raises:
            RequestError: no repository.
        """
        first, *rest = [part for part in f"{address.host}/{address.key}".split("/") if part]
        parts = rest if first in _KINDS else [first, *rest]
        if len(parts) < 2:
            raise RequestError(
                "the URL names no repository of the hub", file=str(address), hint="hf://datasets/OWNER/NAME/FOLDER"
            )
        name, _, revision = parts[1].partition("@")
        folder = "/".join(parts[2:])
        return cls(address, f"{parts[0]}/{name}", _KINDS.get(first, "model"), unquote(revision) or None, folder)

    def objects(self) -> Iterator[tuple[str, Listed | str]]:
        """As `Source.objects`."""
        from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError
        from huggingface_hub.hf_api import RepoFile

        api: Any = _api()
        where: dict[str, Any] = {"repo_type": self.kind}
        try:
            known = api.repo_info(self.repo, revision=self.revision, **where)
            where["revision"] = known.sha
            changed_s = known.last_modified.timestamp() if known.last_modified is not None else 0.0
            try:
                tree = api.list_repo_tree(self.repo, self.folder or None, recursive=True, **where)
                found = list(islice(tree, _MOST))
                skip = len(self.folder) + 1 if self.folder else 0
            except EntryNotFoundError:
                found, skip = api.get_paths_info(self.repo, [self.folder], **where), len(self.folder)
        except HfHubHTTPError as error:
            raise self._refused(error) from None
        except HFValidationError as error:
            raise RequestError(f"the hub has no such name: {_said(error)}", file=str(self.address)) from None
        except Exception as error:
            # What carries its requests has changed from version to version (requests, httpx), and so have its errors.
            raise UnavailableError(
                "the hub does not answer", file=str(self.address), found=_said(error),
                hint="HF_ENDPOINT names another one; HF_HUB_OFFLINE=1 forbids it",
            ) from None  # fmt: skip
        files = [one for one in found if isinstance(one, RepoFile)]
        if not files:
            raise RequestError("nothing is there", file=str(self.address), expected="a file, or files below")
        for one in files:
            tag = one.lfs.sha256 if one.lfs is not None else one.blob_id
            yield one.path[skip:], Listed(str(tag), int(one.size), changed_s, str(known.sha))

    def _refused(self, error: Any) -> RequestError | UnavailableError:
        status = getattr(error.response, "status_code", 0)
        if status in (401, 403):
            # Of a private repository the hub says 401, and of one that is not there as well.
            return RequestError(
                "there is no such repository, or one may not look there", file=str(self.address), found=_said(error),
                hint=_CREDENTIALS,
            )  # fmt: skip
        if status == 404:
            return RequestError(
                "nothing is there", file=str(self.address), expected="a repository, a revision and a folder of it",
                found=_said(error), hint="hf://datasets/OWNER/NAME@REVISION/FOLDER; models have no word before OWNER",
            )  # fmt: skip
        return UnavailableError("the hub does not answer as one", file=str(self.address), found=_said(error))

    def span(self, name: str, held: Listed, start: int, end: int) -> bytes:
        """As `Source.span`."""
        from huggingface_hub import get_token

        endpoint = urlsplit(_api().endpoint)
        kind = "" if self.kind == "model" else f"{self.kind}s/"
        file = "/".join(part for part in (self.folder, name) if part)
        key = f"{endpoint.path.strip('/')}/{kind}{self.repo}/resolve/{held.edition}/{file}".lstrip("/")
        store = _store(f"{endpoint.scheme}://{endpoint.netloc}", get_token())
        return ranged(store, key, start, end, shown(self.address, name), _CREDENTIALS)[1]


def _api() -> Any:
    library()  # without it nothing that is listed can be read
    try:
        from huggingface_hub import HfApi
    except ImportError:
        raise UnavailableError(
            "reading hf:// needs huggingface_hub", expected="the extra `remote`", hint="pip install 'rldbg[remote]'"
        ) from None
    return HfApi(endpoint=os.environ.get("HF_ENDPOINT"))


@lru_cache(maxsize=2)
def _store(endpoint: str, token: str | None) -> Any:
    from obstore.store import HTTPStore

    options = patient()
    if token:
        # Another host, which the hub sends the reader to, is not given it.
        options["client_options"]["default_headers"] = {"authorization": f"Bearer {token}"}
    return HTTPStore(endpoint, **options)


def _said(error: BaseException) -> str:
    """The first line of what the library says, which is in the server's words, without secrets."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return redacted(lines[0] if lines else type(error).__name__)[:300]
