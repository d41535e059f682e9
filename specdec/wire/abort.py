"""The server's side of a call that ends: writing to a peer that may be gone, and ending with an error's status."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NoReturn

import grpc
from google.rpc import status_pb2
from grpc_status import rpc_status

from specdec.wire.errors import Cancelled, Overloaded, Unavailable, to_status

# A negative delay: the client's gRPC must not retry (https://github.com/grpc/proposal/blob/master/A6-client-retries.md).
_NO_RETRY = ("grpc-retry-pushback-ms", "-1")
_MOST_SPREAD_S = 5.0
"""Seconds that the wait of a refused caller is prolonged, at most."""


def told_wait_s(wait_s: float, uniform: Callable[[float, float], float] | None = None) -> float:
    """The wait that a refused caller is told: by up to itself longer.

    Clients keep to it exactly, and a crowd that was refused together would come back together.
    """
    return wait_s + (uniform or random.uniform)(0.0, min(wait_s, _MOST_SPREAD_S))


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
        error.retry_after_s = told_wait_s(error.retry_after_s)
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
