"""grpc.aio's server, as far as the product uses it, over the simulated network."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import grpc

from specdec.service.error_interceptor import ErrorInterceptor
from tests.protocol.simulation.network import Network
from tests.protocol.simulation.pipes import REFUSED, Call, End, Message
from tests.protocol.simulation.virtual_loop import Process

_OK = End(grpc.StatusCode.OK)
_GONE = End(grpc.StatusCode.CANCELLED)
_SHUTDOWN = End(grpc.StatusCode.UNAVAILABLE, "Server shutdown")


@dataclass(frozen=True, slots=True)
class _Details:
    method: str
    invocation_metadata: tuple[tuple[str, str], ...] = field(default=())


class Server:
    """A server with the product's interceptor. Services register as with grpc.aio."""

    def __init__(self, network: Network, process: Process, address: str) -> None:
        self.process = process
        self.is_listening = False
        self._network = network
        self._address = address
        self._handlers: list[Any] = []
        self._interceptor = ErrorInterceptor()
        self._tasks: dict[asyncio.Task[None], None] = {}

    def add_generic_rpc_handlers(self, handlers: tuple[Any, ...]) -> None:
        """As grpc.aio.Server."""
        self._handlers += handlers

    def start(self) -> None:
        """Take calls."""
        self.is_listening = True
        self._network.servers[self._address] = self

    async def stop(self) -> None:
        """Take no more calls, and end those under way."""
        self.is_listening = False
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks))

    def accept(self, call: Call) -> None:
        """A call arrives."""
        task = self.process.start(self._serve(call), f"serve {call.method}")
        self._tasks = {task: None for task in (*self._tasks, task) if not task.done()}
        call.on_server_end = lambda _: _cancel(task)

    async def _serve(self, call: Call) -> None:
        end = _GONE
        context = _Context(call, self._network)
        try:
            handler = await self._handler(call.method)
            context.serialize, context.deserialize = handler.response_serializer, handler.request_deserializer
            await self._run(handler, context)
            end = _OK
        except grpc.aio.AbortError:
            end = context.aborted_with
        except asyncio.CancelledError:
            end = _GONE if self.is_listening else _SHUTDOWN
        finally:
            context.end()
            call.responses.put(end)
            call.is_server_done = True
            self._network.forget(call)

    async def _handler(self, method: str) -> Any:
        details = _Details(method)

        async def find(_: Any) -> Any:
            return next(found for each in self._handlers if (found := each.service(details)) is not None)

        return await self._interceptor.intercept_service(find, details)  # type: ignore[arg-type]

    async def _run(self, handler: Any, context: _Context) -> None:
        streams = bool(handler.request_streaming), bool(handler.response_streaming)
        request = None if handler.request_streaming else await context.read()
        behavior = {
            (False, False): handler.unary_unary,
            (False, True): handler.unary_stream,
            (True, True): handler.stream_stream,
        }[streams]
        result = behavior(request, context)
        if inspect.isasyncgen(result):
            async for response in result:
                await context.write(response)
        else:
            response = await result
            if not handler.response_streaming:
                await context.write(response)


class _Context:
    """A ServicerContext."""

    def __init__(self, call: Call, network: Network) -> None:
        self.serialize: Any = None
        self.deserialize: Any = None
        self.aborted_with = REFUSED
        self._callbacks: list[Callable[[_Context], object]] = []
        self._call = call
        self._network = network

    async def read(self) -> Any:
        """The next request; EOF when no more come."""
        item = await self._call.requests.take()
        if not isinstance(item, Message):
            return grpc.aio.EOF
        return item.payload if self.deserialize is None else self.deserialize(item.payload)

    async def write(self, response: Any) -> None:
        """Send a response, once there is room for it."""
        payload = response if self.serialize is None else self.serialize(response)
        await self._call.responses.wait_room()
        self._call.responses.put(Message(payload))

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> NoReturn:
        """End the call with a status."""
        self.aborted_with = End(code, details, tuple((key, value) for key, value in trailing_metadata))
        raise grpc.aio.AbortError

    def add_done_callback(self, callback: Callable[[_Context], object]) -> None:
        """Call back with this context when the call has ended."""
        self._callbacks.append(callback)

    def end(self) -> None:
        """The call has ended."""
        for callback in self._callbacks:
            callback(self)

    def peer(self) -> str:
        """Who calls."""
        return f"sim:{self._call.client.name}"

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """What came with the call."""
        return self._call.metadata

    def time_remaining(self) -> float | None:
        """Until its deadline."""
        deadline_s = self._call.deadline_s
        return None if deadline_s is None else deadline_s - self._network.loop.time()


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
