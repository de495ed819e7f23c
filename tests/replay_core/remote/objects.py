"""A small server of objects: S3's listing and ranges over real sockets, and what goes wrong in between.

Not a mock of the reader: obstore talks to it as to any S3. moto's server
(49 MB beside 30 MB of boto) can drop no connection midway.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

BUCKET = "bucket"


class Objects:
    """What the server holds, what it was asked for, and what it does wrong."""

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}
        #: (key, first byte, end) of each range that was asked for.
        self.ranges: list[tuple[str, int, int]] = []
        self.lists = 0
        #: Keys that were put, in their order, and how many more are taken.
        self.puts: list[str] = []
        self.takes = 1 << 30
        #: Of each request for bytes, where a test looks at them.
        self.headers: list[dict[str, str]] = []
        #: Answers to ranges that end after half their bytes, from the next on.
        self.drops = 0
        self.refuses = False
        #: So many puts are taken; the next ones wait until the test lets them go on.
        self.waits_at = 1 << 30
        self.goes_on = threading.Event()
        #: Objects that come in parts and are not whole yet: upload -> number -> bytes; and how large a put was at most.
        self.parts: dict[str, dict[int, bytes]] = {}
        self.largest = 0
        self.url = ""
        self.modified = "2026-01-02T03:04:05.000Z"

    def put(self, folder: Path, prefix: str) -> str:
        """Upload a folder; the URL of it."""
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                self.held[f"{prefix}/{file.relative_to(folder).as_posix()}"] = file.read_bytes()
        return f"s3://{BUCKET}/{prefix}"

    @property
    def bytes_sent(self) -> int:
        return sum(end - start for _, start, end in self.ranges)


def _etag(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    objects: Objects

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, code: int, body: bytes, **headers: str) -> None:
        self.send_response(code)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        objects, parts = self.objects, urlsplit(self.path)
        key = unquote(parts.path).removeprefix(f"/{BUCKET}").lstrip("/")
        if objects.refuses:
            self.answer(403, b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>")
        elif "list-type" in parts.query and parts.path.strip("/") != BUCKET:
            self.answer(404, b"<Error><Code>NoSuchBucket</Code><Message>no</Message></Error>")
        elif "list-type" in parts.query:
            self._list(parse_qs(parts.query))
        elif key not in objects.held:
            self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        else:
            self.send_object(key, objects.held[key])

    def do_PUT(self) -> None:
        objects, key = self.objects, unquote(urlsplit(self.path).path).removeprefix(f"/{BUCKET}").lstrip("/")
        data = self.rfile.read(int(self.headers["Content-Length"]))
        if len(objects.puts) >= objects.waits_at:
            objects.goes_on.wait(60)
        objects.largest = max(objects.largest, len(data))
        if objects.refuses or len(objects.puts) >= objects.takes:
            self.answer(403, b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>")
            return
        objects.puts.append(key)
        query = parse_qs(urlsplit(self.path).query)
        if "uploadId" in query:
            objects.parts[query["uploadId"][0]][int(query["partNumber"][0])] = data
            self.answer(200, b"", ETag=_etag(data))
            return
        objects.held[key] = data
        self.answer(200, b"", ETag=_etag(data))

    def do_DELETE(self) -> None:
        parts = urlsplit(self.path)
        query = parse_qs(parts.query)
        if "uploadId" in query:
            self.objects.parts.pop(query["uploadId"][0], None)
        else:
            self.objects.held.pop(unquote(parts.path).removeprefix(f"/{BUCKET}").lstrip("/"), None)
        self.answer(204, b"")

    def do_POST(self) -> None:
        """Objects to delete, by a list of them; an object that comes in parts, begun or whole."""
        parts = urlsplit(self.path)
        query, key = parse_qs(parts.query, keep_blank_values=True), unquote(parts.path).removeprefix(f"/{BUCKET}/")
        if "uploads" in query:
            number = f"upload{len(self.objects.parts)}-{len(self.objects.puts)}"
            self.objects.parts[number] = {}
            self._in_parts("InitiateMultipartUpload", key, f"<UploadId>{number}</UploadId>")
            return
        if "uploadId" in query:
            self.rfile.read(int(self.headers["Content-Length"]))
            came = self.objects.parts.pop(query["uploadId"][0])
            data = self.objects.held[key] = b"".join(came[number] for number in sorted(came))
            self._in_parts("CompleteMultipartUpload", key, f"<ETag>{escape(_etag(data))}</ETag>")
            return
        listed = self.rfile.read(int(self.headers["Content-Length"])).decode()
        keys = re.findall("<Key>(.*?)</Key>", listed)
        for key in keys:
            self.objects.held.pop(unescape(key), None)
        said = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
        self.answer(200, f"<DeleteResult>{said}</DeleteResult>".encode(), Content_Type="application/xml")

    def _in_parts(self, what: str, key: str, said: str) -> None:
        text = f"<{what}Result><Bucket>{BUCKET}</Bucket><Key>{escape(key)}</Key>{said}</{what}Result>"
        self.answer(200, text.encode(), Content_Type="application/xml")

    def _list(self, query: dict[str, list[str]]) -> None:
        self.objects.lists += 1
        prefix, after = query.get("prefix", [""])[0], query.get("continuation-token", [""])[0]
        keys = sorted(key for key in list(self.objects.held) if key.startswith(prefix) and key > after)
        page, more = keys[:1000], len(keys) > 1000
        rows = "".join(
            f"<Contents><Key>{escape(quote(key) if 'url' in query.get('encoding-type', []) else key)}</Key>"
            f"<Size>{len(self.objects.held[key])}</Size><LastModified>{self.objects.modified}</LastModified>"
            f"<ETag>{escape(_etag(self.objects.held[key]))}</ETag></Contents>"
            for key in page
        )
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
        text = f"<ListBucketResult><IsTruncated>{str(more).lower()}</IsTruncated>{token}{rows}</ListBucketResult>"
        self.answer(200, text.encode(), Content_Type="application/xml")

    def send_object(self, key: str, data: bytes) -> None:
        tag = _etag(data)
        if self.headers.get("If-Match", tag) != tag:
            self.answer(412, b"")
            return
        facts = {"ETag": tag, "Last_Modified": formatdate(1_767_323_045, usegmt=True)}
        wanted = self.headers.get("Range")
        if wanted is None:
            self.answer(200, data, **facts)
            return
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        start, end = int(first), min(int(last) + 1, len(data))
        self.objects.ranges.append((key, start, end))
        if self.objects.drops:
            self.objects.drops -= 1
            self.send_response(206)
            for name, value in {**facts, "Content_Range": f"bytes {start}-{end - 1}/{len(data)}"}.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("Content-Length", str(end - start))
            self.end_headers()
            self.wfile.write(data[start : (start + end) // 2])
            self.close_connection = True
            return
        self.answer(206, data[start:end], Content_Range=f"bytes {start}-{end - 1}/{len(data)}", **facts)


@contextmanager
def served(answering: type[Handler] = Handler) -> Iterator[Objects]:
    """The server, on a port of its own, until the end of the `with`."""
    objects = Objects()
    handler = type("Handler", (answering,), {"objects": objects})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    objects.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield objects
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
