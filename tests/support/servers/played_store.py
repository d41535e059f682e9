"""An S3-compatible store on loopback that can break off, lie, change and refuse."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

BUCKET = "models"
_PAGE = 3
"""Objects of a page, so that a model has several."""


class PlayedStore:
    """The objects of one bucket; boto3 calls it by AWS_ENDPOINT_URL."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.etags: dict[str, str] = {}
        """ETags other than the MD5 of the object."""
        self.headers: dict[str, str] = {}
        """More headers of each answer about an object."""
        self.asked: list[str] = []
        """Names and ranges of all bytes that were asked for."""
        self.signed: set[str] = set()
        """Access keys of the requests; empty: an anonymous one."""
        self.num_cuts = 0
        """Answers that are still to be cut short after `cut_at` bytes."""
        self.cut_at = 0
        self.part_bytes: int | None = None
        """Size of parts that HEAD tells."""
        self.spoilt = False
        """Other bytes are sent than those that the ETag is of."""
        self.refuses: int | None = None
        """Status of every answer."""
        self.url = ""

    def etag(self, key: str) -> str:
        """An object's ETag."""
        return self.etags.get(key) or hashlib.md5(self.objects[key], usedforsecurity=False).hexdigest()

    def page(self, prefix: str, after: str) -> str:
        """An answer to ListObjectsV2."""
        keys = [key for key in sorted(self.objects) if key.startswith(prefix) and key > after]
        entries = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{len(self.objects[key])}</Size>"
            f"<ETag>&quot;{self.etag(key)}&quot;</ETag></Contents>"
            for key in keys[:_PAGE]
        )
        has_more = len(keys) > _PAGE
        token = f"<NextContinuationToken>{escape(keys[_PAGE - 1])}</NextContinuationToken>" if has_more else ""
        told = f"<IsTruncated>{str(has_more).lower()}</IsTruncated>{token}{entries}"
        return f'<?xml version="1.0"?><ListBucketResult><Name>{BUCKET}</Name>{told}</ListBucketResult>'


@contextmanager
def played_store() -> Iterator[PlayedStore]:
    """Serves an empty store."""
    store = PlayedStore()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            url = urlsplit(self.path)
            credential = self.headers.get("authorization", "").partition("Credential=")[2]
            store.signed.add(credential.partition("/")[0])
            key = unquote(url.path).removeprefix(f"/{BUCKET}").removeprefix("/")
            if store.refuses is not None:
                self._answer(store.refuses, b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>", {})
            elif not key:
                query = parse_qs(url.query)
                after = query.get("continuation-token", [""])[0]
                self._answer(200, store.page(query.get("prefix", [""])[0], after).encode(), {})
            elif key not in store.objects:
                self._answer(404, b"<Error><Code>NoSuchKey</Code><Message>no</Message></Error>", {})
            else:
                self._object(key)

        def do_HEAD(self) -> None:
            self.do_GET()

        def _object(self, key: str) -> None:
            body, etag, headers = store.objects[key], f'"{store.etag(key)}"', dict(store.headers)
            if self.headers.get("if-match", etag) != etag:
                return self._answer(412, b"<Error><Code>PreconditionFailed</Code><Message>no</Message></Error>", {})
            if self.command == "HEAD" and "partNumber" in self.path and store.part_bytes is not None:
                body = body[: store.part_bytes]
            if store.spoilt:
                body = b"?" * len(body)
            first = int(self.headers.get("range", "bytes=0-")[6:].partition("-")[0])
            if self.command == "GET":
                store.asked.append(f"{key}@{first}")
            if "range" in self.headers:
                headers["Content-Range"] = f"bytes {first}-{len(body) - 1}/{len(body)}"
            self._answer(206 if "range" in self.headers else 200, body[first:], {"ETag": etag, **headers})

        def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "HEAD":
                return
            if store.num_cuts and len(body) > store.cut_at and status == 206:
                store.num_cuts -= 1
                self.wfile.write(body[: store.cut_at])
                self.close_connection = True
                return
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    store.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield store
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
