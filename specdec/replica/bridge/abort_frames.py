"""Statuses with which an engine ends streams, cleaned for peers."""

from __future__ import annotations

import grpc
import structlog
from google.protobuf.message import DecodeError
from google.rpc import status_pb2

from specdec.wire.error_details import cut
from specdec.wire.errors import Internal, to_status

_NEVER = {grpc.StatusCode.OK.value[0], grpc.StatusCode.UNKNOWN.value[0]}
"""Codes that no sound engine sends: it ends a stream only with an error and a reason."""
_ERROR_CODES = {code.value[0] for code in grpc.StatusCode} - _NEVER
_MOST_BYTES = 4096
"""Bytes of a status, at most: gRPC drops larger trailers."""
_log = structlog.get_logger(__name__)


def abort_status(payload: bytes) -> status_pb2.Status:
    """The status in a STREAM_ABORT frame, cut to the size of trailers; Internal if it is no error. Never raises."""
    try:
        status = status_pb2.Status.FromString(payload)
    except DecodeError:
        status = status_pb2.Status()
    if status.code not in _ERROR_CODES:
        _log.warning("abort_without_status", code=status.code, num_bytes=len(payload))
        return to_status(Internal("the engine ended the stream without a reason", reason="MALFORMED_ANSWER"))
    if status.ByteSize() > _MOST_BYTES:
        status.message = cut(status.message)
        if status.ByteSize() > _MOST_BYTES:
            del status.details[:]
    return status
