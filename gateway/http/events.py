"""Streams of server-sent events, as OpenAI frames them, and work that is cancelled when the client leaves."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from specdec.gateway.api.errors import SERVER_ERROR, ApiError

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
KEPT_ALIVE = b": keep-alive\n\n"
"""A comment, which clients of events skip: it shows proxies that the stream lives."""
_LAST_WORDS_S = 0.5
PATIENCE_S = 1.0
"""Seconds that a stream's headers wait for its first events, so that an early error has a status of its own."""
STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
Event = Mapping[str, Any]


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. It is cancelled, and awaited, when the client leaves or this is cancelled.

    The request's body must have been read. Raises ClientDisconnect if the client leaves first.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def encoded(value: Any) -> bytes:
    """A value as JSON. Integers that a client or a model writes may have more than 64 bits."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        return json.dumps(value, separators=(",", ":")).encode()


def framed(event: Event) -> bytes:
    """One event as bytes. JSON has no line breaks."""
    return b"data: " + encoded(event) + b"\n\n"


def framed_by_name(event: Event) -> bytes:
    """One event that also has its type as its name, as in /v1/responses."""
    return b"event: " + str(event["type"]).encode() + b"\n" + framed(event)


@dataclass(frozen=True, slots=True)
class BegunStream:
    """A stream that runs. No generator wraps the rest: each wrapper costs time per token."""

    first: asyncio.Task[Sequence[Event]]
    """The first events, which may still be awaited."""
    rest: AsyncGenerator[Sequence[Event], None]

    async def close(self) -> None:
        """End it, and what it comes from."""
        self.first.cancel()
        await asyncio.gather(self.first, return_exceptions=True)
        await self.rest.aclose()


class EventStream(Response):
    """Sends a generator's events, each list in one piece, as fast as the client reads.

    The generator is asked for the next list when the last one was sent. It is closed however the stream ends: by
    itself, by its client, or by the process. Where nothing was sent for a while, a comment is.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        batches: BegunStream,
        *,
        on_error: Callable[[BaseException], ApiError],
        keep_alive_s: float | None = None,
        frame: Callable[[Event], bytes] = framed,
        frame_error: Callable[[ApiError], bytes] | None = None,
        last: bytes = DONE,
    ) -> None:
        """Send nothing yet.

        Args:
            batches: the events.
            on_error: converts an exception of `batches` to the error in the last event.
            keep_alive_s: seconds of silence before a comment is sent; None: never.
            frame: encodes an event.
            frame_error: encodes an error; None: as an event with `error`.
            last: bytes after the last event.
        """
        super().__init__(headers=STREAM_HEADERS)
        del self.headers["content-length"]
        self._batches = batches
        self._on_error = on_error
        self._keep_alive_s = keep_alive_s
        self._sent_s = 0.0
        """When something was sent last, by the event loop's clock."""
        self._frame = frame
        self._frame_error = frame_error or (lambda error: framed(error.body))
        self._last = last

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events; returns early when the client leaves."""
        try:
            await while_connected(receive, self._send_all(send, scope.get("state", {}).get("send", send)))
        except ClientDisconnect:
            scope["state"]["is_client_gone"] = True
        finally:
            await self._batches.close()

    async def _send_all(self, start: Send, send: Send) -> None:
        await start({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async with self._kept_alive(send), contextlib.aclosing(self._batches.rest) as rest:
                if first := await self._batches.first:
                    await self._send_events(send, first)
                async for events in rest:
                    await self._send_events(send, events)
        except Exception as error:
            await self._send_last(send, self._frame_error(self._on_error(error)))
        except asyncio.CancelledError:
            # The client is gone, and this sends nothing, or the process is about to end.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WORDS_S):
                    await self._send_last(send, self._frame_error(self._on_error(_cut_off())))
            raise
        else:
            await self._send_last(send, b"")

    @contextlib.asynccontextmanager
    async def _kept_alive(self, send: Send) -> AsyncGenerator[None, None]:
        """Send comments in silences. Cost: one timer for each stream, and none for each token."""
        if self._keep_alive_s is None:
            yield
            return
        pulse = asyncio.create_task(self._pulse(send, self._keep_alive_s))
        try:
            yield
        finally:
            pulse.cancel()
            await asyncio.gather(pulse, return_exceptions=True)

    async def _pulse(self, send: Send, every_s: float) -> None:
        now = asyncio.get_running_loop().time
        self._sent_s = now()
        while True:
            await asyncio.sleep(self._sent_s + every_s - now())
            if now() - self._sent_s >= every_s:
                await send({"type": "http.response.body", "body": KEPT_ALIVE, "more_body": True})
                self._sent_s = now()

    async def _send_events(self, send: Send, events: Sequence[Event]) -> None:
        self._sent_s = asyncio.get_running_loop().time()
        await send({"type": "http.response.body", "body": b"".join(map(self._frame, events)), "more_body": True})

    async def _send_last(self, send: Send, body: bytes) -> None:
        await send({"type": "http.response.body", "body": body + self._last, "more_body": False})


def _cut_off() -> ApiError:
    message = "the gateway is shutting down"
    return ApiError(503, message, type=SERVER_ERROR, code="service_unavailable", retry_after_s=0.0)


async def begun(batches: AsyncGenerator[Sequence[Event], None], patience_s: float = PATIENCE_S) -> BegunStream:
    """Wait a moment for the first batch: an error before it can still be an answer with a status.

    Raises the error of `batches` if it comes within `patience_s` and before the first batch, after closing it.
    """
    stream = BegunStream(asyncio.ensure_future(_first(batches)), batches)
    try:
        await asyncio.wait({stream.first}, timeout=patience_s)
        if stream.first.done():
            stream.first.result()
        return stream
    except BaseException:
        await stream.close()
        raise


async def _first(batches: AsyncGenerator[Sequence[Event], None]) -> Sequence[Event]:
    return await anext(batches, ())
