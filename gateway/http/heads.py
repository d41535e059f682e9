"""What the head of a request may be, and the last answers to those that are refused."""

from __future__ import annotations

import re
from collections.abc import Sequence

import orjson

from specdec.gateway.api.errors import ApiError

MOST_HEADER_BYTES = 64 * 1024
BYTES_PER_HEADER = 128
"""Bytes that a header costs besides its text."""
_HOST = re.compile(rb"[\w.~!$&'()*+,;=%:\[\]-]*")
_NO_PATH = re.compile(rb"\A(https?://[^/?]+)(?=\?|\Z)", re.IGNORECASE)
"""A target without a path, as proxies pass it on: the path is `/` (RFC 9110, 4.2.3)."""


def _refusal(status: str, message: str, code: str) -> bytes:
    """A last answer to what is no request that could be answered."""
    body = orjson.dumps(ApiError(400, message, code=code).body)
    headers = f"content-type: application/json\r\nconnection: close\r\ncontent-length: {len(body)}"
    return f"HTTP/1.1 {status}\r\n{headers}\r\n\r\n".encode() + body


TOO_LARGE = _refusal(
    "431 Request Header Fields Too Large",
    f"path and headers have more than {MOST_HEADER_BYTES} bytes, with {BYTES_PER_HEADER} more for each header",
    "headers_too_large",
)
NOT_HTTP = _refusal("400 Bad Request", "this is not valid HTTP", "invalid_http")
_UNKNOWN_CODING = _refusal(
    "501 Not Implemented",
    "transfer-encoding: only chunked is understood, and none in HTTP/1.0",
    "unsupported_transfer_encoding",
)
_NO_HOST = _refusal("400 Bad Request", "host: HTTP/1.1 needs this header once, with a host", "invalid_http")


def refusal_of(version: str, headers: Sequence[tuple[bytes, bytes]]) -> bytes | None:
    """The answer to a head that must not be answered otherwise, after RFC 9112; None: it is a request."""
    if sum(len(name) + len(value) + BYTES_PER_HEADER for name, value in headers) > MOST_HEADER_BYTES:
        return TOO_LARGE
    if version not in ("1.0", "1.1"):
        return NOT_HTTP
    codings = [value.lower() for name, value in headers if name == b"transfer-encoding"]
    if codings and (codings != [b"chunked"] or version == "1.0"):
        return _UNKNOWN_CODING
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1 or (not hosts and version == "1.1") or not all(map(_HOST.fullmatch, hosts)):
        return _NO_HOST
    return None


def with_path(target: bytes) -> bytes:
    """A request's target with the path that it leaves out."""
    return _NO_PATH.sub(rb"\1/", target)
