"""The hub of Hugging Face, as far as huggingface_hub asks it: a repository, its tree, ranges of its files.

The bytes are a "CDN's": `resolve` sends the reader to another host, which must not be given the token.
"""

from __future__ import annotations

import hashlib
import json
from email.utils import formatdate
from urllib.parse import parse_qs, unquote, urlsplit

from tests.replay_core.remote.objects import Handler

REPO = "lab/runs"
PAGE = 1000


class HubHandler(Handler):
    """`objects.held` is the repository's one commit; with `refuses` it is private, read by who has the token."""

    token = "hf_a_token_of_this_test"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        asked = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        found = [self._entry(path) for path in asked["paths"] if path in self.objects.held]
        self._json(found)

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        path = unquote(parts.path)
        if path.startswith("/cdn/"):
            self.objects.headers.append(dict(self.headers))
            self.send_object(path.removeprefix("/cdn/"), self.objects.held[path.removeprefix("/cdn/")])
        elif self.objects.refuses and self.headers.get("Authorization") != f"Bearer {self.token}":
            self._not_there(401, "RepoNotFound", "Repository Not Found")
        elif path in (f"/api/datasets/{REPO}", f"/api/datasets/{REPO}/revision/main"):
            facts = {"_id": "1", "id": REPO, "sha": self.commit, "lastModified": "2026-01-02T03:04:05.000Z",
                     "private": False, "tags": [], "downloads": 0, "likes": 0}  # fmt: skip
            self._json(facts)
        elif path.startswith(f"/api/datasets/{REPO}/tree/{self.commit}"):
            self._tree(path.partition(self.commit)[2].strip("/"), parse_qs(parts.query))
        elif path.startswith(f"/datasets/{REPO}/resolve/{self.commit}/"):
            key = path.partition(f"{self.commit}/")[2]
            if key not in self.objects.held:
                self._not_there(404, "EntryNotFound", "Entry not found")
                return
            there = f"http://localhost:{self.server.server_port}/cdn/{key}?X-Signature=of-the-cdn"  # type: ignore[attr-defined]
            self.answer(302, b"", Location=there, X_Repo_Commit=self.commit)
        elif path.startswith(f"/api/datasets/{REPO}/revision/"):
            self._not_there(404, "RevisionNotFound", "Invalid rev id")
        else:
            self._not_there(401, "RepoNotFound", "Repository Not Found")

    @property
    def commit(self) -> str:
        """What every file together is."""
        whole = json.dumps(sorted((key, hashlib.sha1(data).hexdigest()) for key, data in self.objects.held.items()))
        return hashlib.sha1(whole.encode()).hexdigest()

    def _tree(self, folder: str, query: dict[str, list[str]]) -> None:
        self.objects.lists += 1
        below = f"{folder}/" if folder else ""
        keys = sorted(key for key in self.objects.held if key.startswith(below))
        if not keys:
            self._not_there(404, "EntryNotFound", "Entry not found")
            return
        at = int(query.get("cursor", ["0"])[0])
        entries = [self._entry(key) for key in keys[at : at + PAGE]]
        folders = sorted({key.rpartition("/")[0] for key in keys} - {folder, ""})
        entries += [{"type": "directory", "oid": "0", "size": 0, "path": one} for one in folders if not at]
        following = {}
        if at + PAGE < len(keys):
            host = f"http://127.0.0.1:{self.server.server_port}"  # type: ignore[attr-defined]
            following["Link"] = f'<{host}{urlsplit(self.path).path}?recursive=True&cursor={at + PAGE}>; rel="next"'
        self._json(entries, **following)

    def _entry(self, key: str) -> dict[str, object]:
        data = self.objects.held[key]
        entry: dict[str, object] = {"type": "file", "path": key, "size": len(data)}
        entry["oid"] = hashlib.sha1(data).hexdigest()
        if len(data) > 100_000:
            entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
        return entry

    def _json(self, value: object, **headers: str) -> None:
        headers["Date"] = formatdate(usegmt=True)
        self.answer(200, json.dumps(value).encode(), Content_Type="application/json", **headers)

    def _not_there(self, code: int, kind: str, said: str) -> None:
        text = json.dumps({"error": said}).encode()
        self.answer(code, text, X_Error_Code=kind, X_Error_Message=said, Content_Type="application/json")
