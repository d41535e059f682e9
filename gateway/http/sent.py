"""What is sent of an answer: added headers, the status, and streams that begin before their request is checked."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import orjson
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import Message, Send

from specdec.gateway.http.events import DONE, KEPT_ALIVE, PATIENCE_S, STREAM_HEADERS, framed, framed_by_name

ANTHROPIC_PATHS = "/v1/messages"
"""Beginning of the paths of Anthropic's API."""
_STREAM = "text/event-stream"


class Sent:
    """Sends messages, adds headers, and keeps the status."""

    def __init__(self, send: Send, headers: dict[str, str], path: str) -> None:
        """`headers`: of the answer besides its own. `path`: tells the form of errors in streams."""
        self.after_start = send
        """The plain send, for messages after the headers."""
        self.headers = headers
        self.status = 0
        self._path = path
        self._is_early = False
        self._error: bytearray | None = None
        """The error answer of a request whose stream has begun."""

    async def __call__(self, message: Message) -> None:
        """Send."""
        if self._is_early:
            await self._after_early_start(message)
            return
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(scope=message).update(self.headers)
        await self.after_start(message)

    @contextlib.asynccontextmanager
    async def kept_alive(self, every_s: float | None) -> AsyncGenerator[None, None]:
        """Begin a stream of events if the work inside takes a while, and send comments; None: never.

        An error that follows is the stream's last event.
        """
        if every_s is None or self._is_early:
            yield
            return
        pulse = asyncio.create_task(self._pulse(every_s))
        try:
            yield
        finally:
            pulse.cancel()
            await asyncio.gather(pulse, return_exceptions=True)

    async def _pulse(self, every_s: float) -> None:
        await asyncio.sleep(PATIENCE_S)
        headers = MutableHeaders({"content-type": f"{_STREAM}; charset=utf-8", **STREAM_HEADERS})
        await self({"type": "http.response.start", "status": 200, "headers": headers.raw})
        self._is_early = True
        while True:
            await self.after_start({"type": "http.response.body", "body": KEPT_ALIVE, "more_body": True})
            await asyncio.sleep(every_s)

    async def _after_early_start(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            is_stream = Headers(raw=message["headers"]).get("content-type", "").startswith(_STREAM)
            self._error = None if is_stream else bytearray()
        elif self._error is None:
            await self.after_start(message)
        else:
            self._error += message.get("body", b"")
            if not message.get("more_body", False):
                body = _event_of(orjson.loads(self._error), self._path)
                await self.after_start({"type": "http.response.body", "body": body, "more_body": False})


def _event_of(answer: dict[str, Any], path: str) -> bytes:
    """The end of a stream for the answer to an error, in the form of the API that the path belongs to."""
    if path == ANTHROPIC_PATHS:
        return framed_by_name(answer)
    if path == "/v1/responses":
        return framed_by_name({**answer["error"], "type": "error", "sequence_number": 0})
    return framed(answer) + DONE
