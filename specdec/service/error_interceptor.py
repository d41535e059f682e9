"""Turn handlers' exceptions into typed statuses: no client sees a traceback or a bare UNKNOWN."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from specdec.wire.abort import abort_with

_METHODS_OF_GRPC = "/grpc."
"""Health and reflection, whose handlers are gRPC's own."""


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Ends a call whose handler raised: a SpecdecError with its status, any other as Internal, logged with an id.

    Methods of gRPC's own services are not wrapped. No cost per message.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The method's handler, wrapped."""
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(_METHODS_OF_GRPC):
            return handler
        kind = f"{_arity(handler.request_streaming)}_{_arity(handler.response_streaming)}"
        make_handler: Any = getattr(grpc, f"{kind}_rpc_method_handler")
        return make_handler(
            _guarded(getattr(handler, kind)),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )


def _arity(is_streaming: bool) -> str:
    return "stream" if is_streaming else "unary"


def _guarded(behavior: Callable[..., Any]) -> Callable[..., Any]:
    if inspect.isasyncgenfunction(behavior):

        @functools.wraps(behavior)
        async def generate(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            try:
                async with contextlib.aclosing(behavior(request, context)) as responses:
                    async for response in responses:
                        yield response
            except grpc.aio.AbortError:
                raise
            except Exception as error:
                await abort_with(context, error)

        return generate

    @functools.wraps(behavior)
    async def call(request: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            return await behavior(request, context)
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            await abort_with(context, error)

    return call
