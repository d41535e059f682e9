"""Answers and statuses of peers that do not parse, or would take long to."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

import grpc
import structlog
from google.protobuf.message import DecodeError
from google.rpc import status_pb2

from specdec.wire.error_details import cut
from specdec.wire.errors import Internal, to_status
from specdec.wire.parsing.parts import MOST_PARTS, TooManyParts, check_parts

_T = TypeVar("_T")
_ChannelT = TypeVar("_ChannelT", grpc.Channel, grpc.aio.Channel)
_NEVER = {grpc.StatusCode.OK.value[0], grpc.StatusCode.UNKNOWN.value[0]}
"""Codes that no sound engine sends: it ends a stream only with an error and a reason."""
_ERROR_CODES = {code.value[0] for code in grpc.StatusCode} - _NEVER
_MOST_PARTS = {"specdec.v1.VerifyResponse": 2**20}
"""Parts of an answer by its type, others `MOST_PARTS`: log-probabilities of 4 MiB have as many."""
_MOST_BYTES = 4096
"""Bytes of a status, at most: gRPC drops larger trailers."""
_log = structlog.get_logger(__name__)


class Unparsable:
    """Stands in for an answer that does not parse."""

    def __init__(self, cause: str) -> None:
        self.cause = cause
        """For people."""


def parsing(channel: _ChannelT, *, counts_parts: bool = False) -> _ChannelT:
    """A channel for stubs whose answers are checked with `parsed`; close the original channel.

    `counts_parts`: answers that have too many parts are not parsed, for the peer must not hold up others.
    """
    return cast(_ChannelT, _ParsingChannel(channel, counts_parts=counts_parts))


def parsed(answer: _T) -> _T:
    """An answer as it came. Raises Internal where it did not parse."""
    if isinstance(answer, Unparsable):
        raise Internal(f"the answer does not parse: {answer.cause}", reason="MALFORMED_ANSWER")
    return answer


class _ParsingChannel:
    def __init__(self, channel: grpc.Channel | grpc.aio.Channel, *, counts_parts: bool) -> None:
        self._channel = channel
        self._counts_parts = counts_parts

    def __getattr__(self, arity: str) -> Callable[..., Any]:
        make = getattr(self._channel, arity)

        def multi_callable(path: str, *, response_deserializer: Callable[[bytes], Any], **options: Any) -> Any:
            kind = response_deserializer.__self__.DESCRIPTOR  # type: ignore[attr-defined]
            most = _MOST_PARTS.get(kind.full_name, MOST_PARTS) if self._counts_parts else sys.maxsize

            def deserialize(data: bytes) -> Any:
                try:
                    check_parts(kind, data, most)
                    return response_deserializer(data)
                except TooManyParts as error:
                    return Unparsable(f"{error.field}: {error}")
                except (DecodeError, TypeError) as error:  # there is no data where a call ended well without an answer
                    return Unparsable(str(error))

            return make(path, response_deserializer=deserialize, **options)

        return multi_callable


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
