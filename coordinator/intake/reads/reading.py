"""From bytes to a request, at a bounded cost."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from specdec.wire.errors import DeadlineExceeded, InvalidRequest
from specdec.wire.parsing.parts import TooManyParts, check_parts, find_invalid_utf8

_MessageT = TypeVar("_MessageT", bound=Message)


async def receive_request(context: grpc.aio.ServicerContext[Any, Any], timeout_s: float) -> bytes:
    """The one message of a call, as bytes.

    Raises:
        DeadlineExceeded: the message did not arrive in time (REQUEST_NOT_SENT).
        InvalidRequest: the caller sent no message.
    """
    try:
        async with asyncio.timeout(timeout_s):
            data: Any = await context.read()
    except TimeoutError:
        message = f"the request was not complete after {timeout_s:g} s"
        raise DeadlineExceeded(message, reason="REQUEST_NOT_SENT") from None
    if data is grpc.aio.EOF:
        raise InvalidRequest("request", "is missing: the call ended without a message", reason="MALFORMED_MESSAGE")
    return bytes(data)


def read_request(request_type: type[_MessageT], data: bytes) -> _MessageT:
    """Parse a caller's request.

    gRPC itself would parse before a handler knows the caller, and would answer INTERNAL to malformed bytes.

    Raises:
        InvalidRequest: the request has too many parts, or is malformed (MALFORMED_MESSAGE); names the field.
    """
    try:
        check_parts(request_type.DESCRIPTOR, data)
        return request_type.FromString(data)
    except TooManyParts as error:
        raise InvalidRequest(error.field, str(error)) from None
    except DecodeError as error:
        field = find_invalid_utf8(request_type.DESCRIPTOR, data)
        cause = f"does not parse: {error}" if field is None else "is not UTF-8"
        raise InvalidRequest(field or "request", cause, reason="MALFORMED_MESSAGE") from None
