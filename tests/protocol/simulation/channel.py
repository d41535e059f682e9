"""grpc.aio's channels and calls, as far as the product uses them, over the simulated network."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator
from typing import Any

import grpc

from tests.protocol.simulation.network import Network
from tests.protocol.simulation.pipes import CANCELLED, Call, End, HalfClose, Message
from tests.protocol.simulation.virtual_loop import current_process

_DEADLINE = End(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")


class SimulatedChannel:
    """A channel of the process that opens it. Stubs that protoc generates take it for one of grpc.aio."""

    def __init__(self, network: Network, address: Callable[[], str]) -> None:
        """`address` says where the next call goes."""
        process = current_process()
        assert process is not None
        self._network = network
        self._process = process
        self._address = address
        self._calls: dict[ClientCall, None] = {}

    def unary_unary(self, method: str, **codec: Any) -> Callable[..., ClientCall]:
        """One request, one response: await the call."""
        return self._maker(method, codec)

    def unary_stream(self, method: str, **codec: Any) -> Callable[..., ClientCall]:
        """One request, many responses: iterate over the call, or read from it."""
        return self._maker(method, codec)

    def stream_stream(self, method: str, **codec: Any) -> Callable[..., ClientCall]:
        """Many of both."""

        def make() -> ClientCall:
            return self._open(method, codec, None, ())

        return make

    async def close(self) -> None:
        """Calls under way are cancelled."""
        for call in list(self._calls):
            call.cancel()

    def _maker(self, method: str, codec: dict[str, Any]) -> Callable[..., ClientCall]:
        def make(request: Any, timeout: float | None = None, metadata: Any = ()) -> ClientCall:
            call = self._open(method, codec, timeout, tuple(metadata or ()))
            call.send(request)
            return call

        return make

    def _open(
        self, method: str, codec: dict[str, Any], timeout_s: float | None, metadata: tuple[tuple[str, str], ...]
    ) -> ClientCall:
        loop = self._network.loop
        deadline_s = None if timeout_s is None else loop.time() + timeout_s
        call = self._network.open(self._process, self._address(), method, metadata, deadline_s)
        serialize, deserialize = codec.get("request_serializer", bytes), codec.get("response_deserializer", bytes)
        made = ClientCall(self._network, call, serialize, deserialize)
        if timeout_s is not None:
            loop.call_later(timeout_s, made.end, _DEADLINE)
        self._calls[made] = None
        made.add_done_callback(lambda ended: self._calls.pop(ended, None))
        return made


class SimulatedReplicaChannel:
    """Stands in for `specdec.wire.channel.ReplicaChannel`."""

    def __init__(self, network: Network, address: str) -> None:
        self.current = SimulatedChannel(network, lambda: address)

    async def renew(self) -> bool:
        """There are no certificates that could change."""
        return False

    async def close(self) -> None:
        """Calls under way are cancelled."""
        await self.current.close()


class ClientCall:
    """A call as its client has it."""

    def __init__(
        self, network: Network, call: Call, serialize: Callable[[Any], bytes], deserialize: Callable[[bytes], Any]
    ) -> None:
        self._network = network
        self._call = call
        self._serialize = serialize
        self._deserialize = deserialize
        self._status: End | None = None
        self._is_half_closed = False
        self._callbacks: list[Callable[[ClientCall], object]] = []

    def send(self, request: Any) -> None:
        """The one request of a call that has no more."""
        self._call.requests.put(Message(self._serialize(request)))

    async def write(self, request: Any) -> None:
        """Send a request, once there is room for it."""
        if self._status is not None or self._is_half_closed:
            raise asyncio.InvalidStateError("the RPC is finished, or half closed")
        payload = self._serialize(request)
        await self._unless_cancelled(self._call.requests.wait_room())
        self._call.requests.put(Message(payload))

    async def read(self) -> Any:
        """The next response; EOF at a good end. Raises AioRpcError at any other."""
        if self._status is None:
            item = await self._unless_cancelled(self._call.responses.take())
            if isinstance(item, Message):
                return self._deserialize(item.payload)
            if isinstance(item, End):
                self._finish(item)
        return self._at_end()

    async def done_writing(self) -> None:
        """No request follows."""
        self._is_half_closed = True
        self._call.requests.put(HalfClose())

    def cancel(self) -> bool:
        """Break it off; False if it had ended."""
        return self.end(CANCELLED)

    def end(self, status: End) -> bool:
        """End it from this side; the server learns that its client has gone."""
        if self._status is not None:
            return False
        self._finish(status)
        self._call.responses.close()
        self._call.requests.put(End(grpc.StatusCode.CANCELLED))
        return True

    def done(self) -> bool:
        """It has a status."""
        return self._status is not None

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Call back with this call when it has a status."""
        self._callbacks.append(callback)

    async def code(self) -> grpc.StatusCode:
        """Of its status."""
        return self._ended.code

    async def details(self) -> str:
        """Of its status."""
        return self._ended.details

    async def trailing_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        """Of its status."""
        return self._ended.trailing

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._responses()

    def __await__(self) -> Generator[Any, None, Any]:
        return self._response().__await__()

    @property
    def _ended(self) -> End:
        assert self._status is not None, "asked for its status too early"
        return self._status

    async def _responses(self) -> AsyncIterator[Any]:
        while (response := await self.read()) is not grpc.aio.EOF:
            yield response

    async def _response(self) -> Any:
        response = await self.read()
        if await self.read() is not grpc.aio.EOF:
            raise AssertionError("a second response")
        return response

    async def _unless_cancelled(self, waiting: Any) -> Any:
        try:
            return await waiting
        except asyncio.CancelledError:
            self.cancel()
            raise

    def _finish(self, status: End) -> None:
        self._status = status
        self._call.is_client_done = True
        self._network.forget(self._call)
        for callback in self._callbacks:
            callback(self)

    def _at_end(self) -> Any:
        status = self._ended
        if status is CANCELLED:
            raise asyncio.CancelledError
        if status.code is grpc.StatusCode.OK:
            return grpc.aio.EOF
        metadata = grpc.aio.Metadata(*status.trailing)
        raise grpc.aio.AioRpcError(status.code, grpc.aio.Metadata(), metadata, status.details)
