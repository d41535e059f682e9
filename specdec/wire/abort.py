"""The server's side of a call that ends: writing to a peer that may be gone, and ending with an error's status."""

from __future__ import annotations

import random
from typing import Any, NoReturn

import grpc
from google.rpc import status_pb2
from grpc_status import rpc_status

from specdec.wire.errors import Cancelled, Overloaded, Unavailable, to_status

# A negative delay: the client's gRPC must not retry (https://github.com/grpc/proposal/blob/master/A6-client-retries.md).
_NO_RETRY = ("grpc-retry-pushback-ms", "-1")
RETRY_SPREAD = (1.0, 2.0)
"""Bounds of the random factor of the wait that a refused caller is told: clients keep to it exactly, and a crowd that
was refused together would come back together."""


async def write_to(context: grpc.aio.ServicerContext, message: Any) -> None:
    """Write to the peer. Raises Cancelled if the peer is gone before the handler's task is cancelled."""
    try:
        await context.write(message)
    except grpc.aio.InternalError:
        raise Cancelled("the peer is gone") from None


async def abort_with(context: grpc.aio.ServicerContext, error: BaseException) -> NoReturn:
    """Ends the call with the error's status. Never returns: raises grpc.aio.AbortError.

    The client's gRPC must not retry after an error for which the service has waited, since each retry would wait
    again, and after a request was ended on purpose.
    """
    has_waited = isinstance(error, Unavailable) and error.has_waited
    may_retry = not has_waited and not isinstance(error, Cancelled)
    if isinstance(error, Overloaded):
        error.retry_after_s *= random.uniform(*RETRY_SPREAD)
    await abort_with_status(context, to_status(error), may_retry=may_retry)


async def abort_with_status(
    context: grpc.aio.ServicerContext, status: status_pb2.Status, *, may_retry: bool = True
) -> NoReturn:
    """Ends the call with a status, typed details included. Never returns: raises grpc.aio.AbortError.

    `may_retry`: whether a client whose gRPC retries calls may do so.
    """
    call_status = rpc_status.to_status(status)
    pushback = () if may_retry else (_NO_RETRY,)
    await context.abort(call_status.code, call_status.details, (*call_status.trailing_metadata, *pushback))
    raise AssertionError("context.abort returned")
