"""Relay the frames of gRPC streams to the engine process and back, without parsing.

This is on the path of every token, twice per step. So a message costs one queue operation, one system call and no
task: each stream has one task that reads and one that writes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from typing import Any

import grpc
import structlog
from google.rpc import status_pb2

from specdec.replica.bridge.engine_process import EngineProcess
from specdec.replica.bridge.frame_codec import NO_STREAM, FrameKind, report_unit
from specdec.telemetry import RelayMetrics
from specdec.v1 import common_pb2
from specdec.wire.abort import abort_with_status, write_to
from specdec.wire.errors import (
    InvalidRequest,
    NotReady,
    Overloaded,
    SpecdecError,
    Unavailable,
    from_rpc_error,
    to_status,
)

_MOST_CALL_BYTES = 64 * 1024
"""Bytes of a unary call's request, at most: the engine reads it between two steps."""
_log = structlog.get_logger(__name__)


class StreamRelay:
    """The handler of a bidirectional method of a replica; registered without (de)serializers."""

    def __init__(
        self,
        engine: Callable[[], EngineProcess],
        metrics: RelayMetrics,
        stream_buffer_bytes: int,
        not_ready: Callable[[], NotReady] = lambda: NotReady("the model is loading"),
        is_link: bool = False,
    ) -> None:
        """`engine` returns the engine of new streams, `not_ready` the error while it is not ready.

        `is_link`: the callers are drafts.
        """
        self._engine = engine
        self._not_ready = not_ready
        self._metrics = metrics
        self._stream_buffer_bytes = stream_buffer_bytes
        self._is_link = is_link
        self._streams: set[RelayedStream] = set()

    async def handle(self, _requests: Any, context: grpc.aio.ServicerContext) -> None:
        """Relay one stream until either side ends it. Raises NotReady before the engine is ready."""
        engine = self._engine()
        if not engine.is_ready:
            raise self._not_ready()
        stream = RelayedStream(engine, context, self._metrics, self._stream_buffer_bytes, is_link=self._is_link)
        self._streams.add(stream)
        num_open = self._metrics.num_open(is_link=self._is_link)
        num_open.inc()
        try:
            await stream.serve()
        finally:
            self._streams.discard(stream)
            num_open.dec()

    def end_streams(self, error: SpecdecError) -> None:
        """End all open streams with an error, after their queued responses."""
        for stream in self._streams:
            stream.on_abort(to_status(error))


class RelayedStream:
    """One stream, to a caller or to a service that we call: the running task writes, another one reads."""

    def __init__(
        self,
        engine: EngineProcess,
        context: Any,
        metrics: RelayMetrics,
        buffer_bytes: int,
        *,
        is_link: bool,
    ) -> None:
        """`context`: a ServicerContext of grpc.aio; None: `call` brings one.

        `is_link`: between a draft and a target.
        """
        self.is_link = is_link
        self._engine = engine
        self._context = context
        self._metrics = metrics
        self._buffer_bytes = buffer_bytes
        self._stream_id = NO_STREAM
        self._queue: deque[bytes] = deque()
        self._num_queued_bytes = 0
        self._wake: asyncio.Future[None] | None = None
        self._is_ending = False
        self._broken = ""
        """Why the peer ended the stream, for people; empty if it just ended."""
        self._status: status_pb2.Status | None = None

    async def serve(self) -> None:
        """Relay a caller's stream until the caller, the engine or an error ends it."""
        kind = FrameKind.LINK_OPENED if self.is_link else FrameKind.STREAM_OPENED
        self._stream_id = self._engine.open_stream(self, self._context.peer(), kind)
        await self._relay()
        if self._status is not None:
            await abort_with_status(self._context, self._status)

    def expect(self, stream_id: int) -> None:
        """Queue what the engine sends on a stream that it has opened, until `call`."""
        self._stream_id = stream_id
        self._engine.adopt(stream_id, self)

    async def call(self, call: Any) -> None:
        """Relay the expected stream to a service, until the service, the engine or an error ends it.

        `call`: one that streams in both directions.
        """
        self._context = call
        try:
            await self._relay()
        except (grpc.RpcError, asyncio.InvalidStateError, asyncio.CancelledError):
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
        finally:
            call.cancel()

    async def _relay(self) -> None:
        reader = asyncio.create_task(self._read())
        outcome = "cancelled"
        try:
            await self._write()
            outcome = "closed" if self._status is None else "aborted"
        except grpc.RpcError as error:
            self._note(error)
            raise
        finally:
            self._engine.close_stream(self._stream_id, self._broken)
            reader.cancel()
            self._metrics.stream_ends.labels(outcome).inc()
        with contextlib.suppress(asyncio.CancelledError):
            await reader

    def on_message(self, payload: bytes) -> None:
        """Queue a response; if the peer is too far behind, abort the stream instead.

        This is the last resort: the engine sends no more than the peer has room for.
        """
        if self._is_ending:
            return
        if self._num_queued_bytes > self._buffer_bytes:
            # The present write ends only when the peer reads or is gone; the engine must not wait for it.
            self._queue.clear()
            self._engine.close_stream(self._stream_id)
            self.on_abort(
                to_status(
                    Overloaded("the peer does not read its responses (stream_buffer_bytes)", reason="STREAM_NOT_READ")
                )
            )
            return
        self._num_queued_bytes += len(payload)
        self._queue.append(payload)
        self._wake_writer()

    def on_abort(self, status: status_pb2.Status) -> None:
        """End the stream with a status, after its queued responses."""
        if not self._is_ending:
            self._status = status
            self._end()

    def on_engine_gone(self, end: common_pb2.EngineEnd, reason: str) -> None:
        """End the stream; the peer may use another replica, or this one after its restart."""
        error = Unavailable(reason, reason=end.reason)
        error.attached.append(end)
        self.on_abort(to_status(error))

    def _end(self) -> None:
        self._is_ending = True
        self._wake_writer()

    def _wake_writer(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def _note(self, error: grpc.RpcError) -> None:
        if isinstance(error, grpc.aio.AioRpcError):
            self._broken = self._broken or from_rpc_error(error).message

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        queue = self._queue
        count = self._metrics.messages.labels("out")
        count_bytes = self._metrics.message_bytes.labels("out")
        unit_bytes = report_unit(self._buffer_bytes)
        num_taken_bytes = 0
        while True:
            while queue:
                payload = queue.popleft()
                await write_to(self._context, payload)
                self._num_queued_bytes -= len(payload)
                num_taken_bytes += len(payload)
                if num_taken_bytes >= unit_bytes:
                    self._engine.tell_taken(self._stream_id, num_taken_bytes)
                    num_taken_bytes = 0
                count.inc()
                count_bytes.inc(len(payload))
            if self._is_ending:
                return
            self._wake = loop.create_future()
            await self._wake
            self._wake = None

    async def _read(self) -> None:
        count = self._metrics.messages.labels("in")
        count_bytes = self._metrics.message_bytes.labels("in")
        try:
            while True:
                payload: Any = await self._context.read()
                if payload is grpc.aio.EOF:
                    break
                await self._engine.send_message(self._stream_id, payload)
                count.inc()
                count_bytes.inc(len(payload))
        except grpc.RpcError as error:
            self._note(error)
            _log.info("stream_broken", stream_id=self._stream_id, error=str(error))
        finally:
            self._end()


class RelayedCall:
    """A unary call that the engine answers, relayed without parsing; call `run` once."""

    def __init__(self, engine: EngineProcess) -> None:
        """Ask nothing yet."""
        self._engine = engine
        self._answer: asyncio.Future[bytes | status_pb2.Status] = asyncio.get_running_loop().create_future()

    async def run(self, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        """The engine's answer, or an abort with the engine's status.

        If the caller leaves, the engine is told. Raises InvalidRequest if the request is too long.
        """
        if len(request) > _MOST_CALL_BYTES:
            raise InvalidRequest("request", f"{len(request)} bytes exceed the limit of {_MOST_CALL_BYTES}")
        call_id = self._engine.open_call(self, request)
        try:
            answer = await self._answer
        finally:
            self._engine.close_stream(call_id)
        if isinstance(answer, bytes):
            return answer
        await abort_with_status(context, answer)

    def on_message(self, payload: bytes) -> None:
        """The engine answered; see `StreamSink`."""
        self._end(payload)

    def on_abort(self, status: status_pb2.Status) -> None:
        """The engine refused; see `StreamSink`."""
        self._end(status)

    def on_engine_gone(self, end: common_pb2.EngineEnd, reason: str) -> None:
        """The engine has ended; see `StreamSink`."""
        error = Unavailable(reason, reason=end.reason)
        error.attached.append(end)
        self._end(to_status(error))

    def _end(self, answer: bytes | status_pb2.Status) -> None:
        if not self._answer.done():
            self._answer.set_result(answer)
