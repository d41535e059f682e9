"""A stream to one replica that is opened again whenever it breaks.

What is queued within one turn of the event loop leaves in one frame. What comes in is handled by the task that reads
it, with no queue between: a verdict is on its way to the client before the next frame is looked at.
"""

from __future__ import annotations

import asyncio
import time
from typing import Generic, Protocol, cast

import grpc
import structlog

from specdec.coordinator.links.link_events import LinkSettings
from specdec.coordinator.links.outbox import EntryTooLarge, Outbox
from specdec.coordinator.links.stream_end import NOT_HANDED_ON, StreamEnd, engine_end_in, error_of
from specdec.coordinator.links.wire import Call, EntryT, Frame, RequestT, ResultT, ResultT_contra, Wire
from specdec.v1 import common_pb2 as pb
from specdec.wire.backoff import Backoff
from specdec.wire.channel import ReplicaChannel
from specdec.wire.errors import SpecdecError, Unavailable
from specdec.wire.reading import parsed

_MOST_FIRST_WAITS_IN_NEED = 5
"""Sessions wait for this very replica: its stream is tried often."""
_SPREAD = (0.75, 1.25)
"""Coordinators that lost a replica at the same moment do not all come back at the same moment."""
_ASK_AGAIN_S = 1.0
"""Sessions wait for the answer, as what is done with them depends on it."""
_CLOSED = "the replica closed the stream"
_log = structlog.get_logger(__name__)


class StreamOwner(Protocol[ResultT_contra]):
    """Whose stream it is: says what is held there, and is told what comes. Called in the task that runs the stream."""

    @property
    def is_needed(self) -> bool:
        """Sessions wait for this very replica."""

    @property
    def message_bytes(self) -> int:
        """The largest message that the replica takes."""

    instance_id: str
    """Of the replica's process, as it said last."""

    def on_info(self, info: pb.GetReplicaInfoResponse) -> None:
        """The replica says which process it is, and what it takes; raises IncompatibleReplica to open no stream."""

    def attach(self) -> pb.Attach:
        """What the first frame says."""

    async def on_attached(self, attached: pb.Attached, load: pb.LoadReport | None) -> None:
        """The replica answered; raises IncompatibleReplica to break the stream."""

    def on_result(self, result: ResultT_contra) -> None:
        """A result came."""

    def on_load(self, load: pb.LoadReport) -> None:
        """A load report came."""

    def on_too_large(self, session_id: str, epoch: int, cause: str) -> None:
        """An entry of a session is larger than any message may be; called when whoever sent it has returned."""

    def on_ended(self, error: Exception) -> None:
        """The stream ended, or could not be opened. It will be opened again."""


class ReplicaStream(Generic[RequestT, EntryT, ResultT]):
    """Run `run` as a task for as long as the stream is wanted."""

    def __init__(
        self,
        wire: Wire[RequestT, EntryT],
        channel: ReplicaChannel,
        settings: LinkSettings,
        owner: StreamOwner[ResultT],
        **log_fields: str,
    ) -> None:
        """`log_fields` are what log lines about it carry."""
        self._wire = wire
        self._channel = channel
        self._settings = settings
        self._owner = owner
        self._log_fields = log_fields
        self._outbox: Outbox[EntryT] = Outbox()
        self._call: Call[RequestT] | None = None
        self._reset_reason = ""

    def send(self, entry: EntryT) -> None:
        """Send an entry with the next frame. Only while the stream is up: attaching makes up for what came between."""
        try:
            has_room = self._outbox.put(entry)
        except EntryTooLarge as error:
            loop = asyncio.get_running_loop()
            loop.call_soon(self._owner.on_too_large, entry.session_id, entry.epoch, str(error))
            return
        if not has_room:
            self._outbox.clear()
            self.reset("the replica does not read")

    def end(self) -> None:
        """Let the stream that is up end in order, after what is queued; then `run` returns."""
        self._outbox.end()

    def reset(self, reason: str) -> None:
        """Break the stream; it will be opened again."""
        if self._call is not None:
            _log.warning("stream_reset", **self._log_fields, reason=reason)
            self._reset_reason = reason
            self._call.cancel()

    async def run(self) -> None:
        """Open the stream, again and again, with growing and jittered waits between attempts that fail."""
        backoff = Backoff(self._settings.backoff_min_s, self._settings.backoff_max_s, spread=_SPREAD)
        num_failures = 0
        while True:
            started_s = time.monotonic()
            error = await self._fault_of_stream()
            if error is None:
                return
            if isinstance(error, SpecdecError) and error.reason == NOT_HANDED_ON:
                error = await self._told_afterwards(error)
            self._outbox.clear()
            try:
                self._owner.on_ended(error)
            except Exception as fault:  # of those who are told; the replica is not given up for it
                self._log_fault(fault)
            has_lasted = time.monotonic() - started_s > backoff.longest_s
            num_failures = 1 if has_lasted else num_failures + 1
            in_need = _MOST_FIRST_WAITS_IN_NEED * backoff.first_s if self._owner.is_needed else None
            await asyncio.sleep(backoff.wait_s(num_failures, longest_s=in_need))

    async def _fault_of_stream(self) -> Exception | None:
        """Open the stream; return why it ended, None when that was asked for."""
        try:
            await self._run_stream()
            return None
        except (SpecdecError, grpc.RpcError, TimeoutError) as error:
            return error
        except asyncio.CancelledError:
            if _is_task_cancelled():
                raise
            # Reading a call that was cancelled by `reset` raises this, too.
            return Unavailable(self._reset_reason or "the stream was reset")
        except Exception as error:
            self._log_fault(error)
            return error

    async def _told_afterwards(self, error: SpecdecError) -> SpecdecError:
        """How the stream ended as the replica tells when it is asked; `error` where it has nothing to tell."""
        try:
            async with asyncio.timeout(_ASK_AGAIN_S):
                end = parsed(await self._wire.info(self._channel.current)).last_end
        except grpc.aio.AioRpcError as refusal:
            end = engine_end_in(refusal.trailing_metadata()) or pb.EngineEnd()
        except (SpecdecError, TimeoutError):
            return error
        is_ours = end.instance_id and end.instance_id == self._owner.instance_id
        return error_of(end) if is_ours else error

    async def _run_stream(self) -> None:
        """Returns when the stream has ended as `end` asked; raises why it did otherwise."""
        await self._channel.renew()  # no call is under way
        channel = self._channel.current
        async with asyncio.timeout(self._settings.connect_timeout_s):
            await self._ask(channel)
        self._outbox.limit(self._owner.message_bytes)
        call = self._call = self._wire.open(channel)
        end = StreamEnd(call)
        writer: asyncio.Task[None] | None = None
        try:
            async with asyncio.timeout(self._settings.connect_timeout_s):
                attach = self._owner.attach()
                self._reset_reason = ""
                await call.write(self._wire.attach(attach))
                first = await self._read(call)
            if first is None:
                raise end.error(Unavailable(_CLOSED))
            if not first.HasField("attached"):
                raise Unavailable("the replica's first frame is no answer to attach")
            self._outbox.clear()
            await self._owner.on_attached(first.attached, first.load if first.HasField("load") else None)
            writer = asyncio.create_task(self._write_frames(call))
            frame: Frame[ResultT] | None = first
            while frame is not None:
                for result in frame.results:
                    self._owner.on_result(result)
                if frame.HasField("load"):
                    self._owner.on_load(frame.load)
                frame = await self._read(call)
            if self._outbox.has_ended:
                return
            raise end.error(Unavailable(_CLOSED))
        except (grpc.RpcError, asyncio.InvalidStateError) as error:
            raise end.error(error) from error
        finally:
            self._call = None
            call.cancel()
            if writer is not None:
                writer.cancel()

    async def _ask(self, channel: grpc.aio.Channel) -> None:
        """A second stream of the same owner would end the first one, so it must be known before."""
        try:
            info = await self._wire.info(channel)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                info = pb.GetReplicaInfoResponse()
            else:
                raise
        self._owner.on_info(parsed(info))

    async def _read(self, call: Call[RequestT]) -> Frame[ResultT] | None:
        frame = parsed(await call.read())
        return None if frame is grpc.aio.EOF else cast(Frame[ResultT], frame)

    async def _write_frames(self, call: Call[RequestT]) -> None:
        try:
            while entries := await self._outbox.take():
                await call.write(self._wire.frame(entries))
            await call.done_writing()
        except (grpc.RpcError, asyncio.InvalidStateError):
            pass  # the stream has ended, and its reader learns how
        except Exception as error:
            self._log_fault(error)
            self.reset("writing failed")

    def _log_fault(self, fault: Exception) -> None:
        _log.error("link_fault", **self._log_fields, exc_info=fault)


def _is_task_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
