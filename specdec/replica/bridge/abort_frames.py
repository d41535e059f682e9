"""The statuses with which an engine ends streams, as peers may see them."""

from __future__ import annotations

import grpc
import structlog
from google.protobuf.message import DecodeError
from google.rpc import status_pb2

from specdec.wire.error_details import cut
from specdec.wire.errors import Internal, to_status

_NEVER = {grpc.StatusCode.OK.value[0], grpc.StatusCode.UNKNOWN.value[0]}
"""No engine ends a stream well, nor without a reason."""
_ERROR_CODES = {code.value[0] for code in grpc.StatusCode} - _NEVER
_MOST_BYTES = 4096
"""A peer that is sent more in its trailers sees none of it."""
_log = structlog.get_logger(__name__)


def abort_status(payload: bytes) -> status_pb2.Status:
    """The status in a STREAM_ABORT frame, cut to what trailers hold; Internal where it is no error's. Never raises."""
    try:
        status = status_pb2.Status.FromString(payload)
    except DecodeError:
        status = status_pb2.Status()
    if status.code not in _ERROR_CODES:
        _log.warning("abort_without_status", code=status.code, num_bytes=len(payload))
        return to_status(Internal("the engine ended the stream, and did not say why", reason="MALFORMED_ANSWER"))
    if status.ByteSize() > _MOST_BYTES:
        status.message = cut(status.message)
        if status.ByteSize() > _MOST_BYTES:
            del status.details[:]
    return status
