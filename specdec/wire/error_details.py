"""Typed details of errors on the wire: bounded when sent, and read as far as they parse.

The report of an engine's end lists the sessions that it was working on by keys of fixed size.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Set
from typing import Any, NamedTuple

from google.protobuf import duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

STATUS_KEY = "grpc-status-details-bin"
"""The trailing metadata that carries a google.rpc.Status."""
MAX_TEXT_BYTES = 1500
"""Bytes of an error's text on the wire: gRPC's clients refuse trailers of more than 8 KiB in all, and the text is in
them up to three times."""
MAX_FIELD_BYTES = 200
_ESCAPED_BYTES = 3
"""Bytes in which gRPC writes one byte of a status message that is not printable ASCII."""
_MAX_RETRY_S = 1e9
_MAX_FACTS = 4
_REASON = re.compile(r"[A-Z][A-Z0-9_]{0,62}")
KEY_BYTES = 8


class ErrorDetails(NamedTuple):
    """The typed details of a status; details that are missing or do not parse are empty."""

    info: error_details_pb2.ErrorInfo
    request: error_details_pb2.BadRequest
    retry: error_details_pb2.RetryInfo


def details_of(status: status_pb2.Status) -> ErrorDetails:
    """The details of a status from any sender: malformed reasons are dropped, and metadata is bounded."""
    details = ErrorDetails(error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo())
    for detail in status.details:
        for target in details:
            try:
                detail.Unpack(target)
            except DecodeError:
                target.Clear()
    info = details.info
    if not _REASON.fullmatch(info.reason):
        info.reason = ""
    facts = sorted(info.metadata.items())[:_MAX_FACTS]
    info.metadata.clear()
    info.metadata.update({cut(key, MAX_FIELD_BYTES): cut(value, MAX_FIELD_BYTES) for key, value in facts})
    return details


def rich_status(trailing: Iterable[Any] | None) -> status_pb2.Status | None:
    """The status in trailing metadata; None where there is none, or none that parses."""
    for key, value in trailing or ():
        if key == STATUS_KEY:
            try:
                return status_pb2.Status.FromString(value)
            except DecodeError:
                return None
    return None


def cut(text: str, most_bytes: int = MAX_TEXT_BYTES) -> str:
    """The longest beginning of a text that takes at most `most_bytes` in a header of HTTP/2."""
    if len(text) * 4 * _ESCAPED_BYTES <= most_bytes:
        return text
    size = 0
    for index, character in enumerate(text):
        is_plain = " " <= character <= "~" and character != "%"
        size += 1 if is_plain else _ESCAPED_BYTES * len(character.encode("utf-8", "surrogatepass"))
        if size > most_bytes:
            return text[:index]
    return text


def retry_delay(seconds: float) -> duration_pb2.Duration:
    """A delay as RetryInfo has it; not a number and infinity become the longest one."""
    bounded = _MAX_RETRY_S if math.isnan(seconds) else min(max(seconds, 0.0), _MAX_RETRY_S)
    delay = duration_pb2.Duration()
    delay.FromMilliseconds(round(bounded * 1000))
    return delay


def retry_seconds(delay: duration_pb2.Duration) -> float:
    """A delay of RetryInfo in seconds, from 0 to thirty years."""
    return min(max(delay.seconds + delay.nanos / 1e9, 0.0), _MAX_RETRY_S)


def session_key(session_id: str) -> bytes:
    """The key of a session in `EngineEnd.session_keys`: among a thousand sessions two share one with chance 10^-13."""
    return hashlib.blake2b(session_id.encode("utf-8", "surrogatepass"), digest_size=KEY_BYTES).digest()


def split_keys(joined: bytes) -> Set[bytes]:
    """The keys in `EngineEnd.session_keys`, which joins them."""
    return {joined[start : start + KEY_BYTES] for start in range(0, len(joined), KEY_BYTES)}
