"""A stream to one replica that is opened again whenever it breaks.

Entries queued within one turn of the event loop leave in one frame. The task that reads a frame handles it, with no
queue between: a verdict is on its way to the client before the next frame is read.
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
from specdec.coordinator.links.wire import BidiCall, EntryT, LinkWire, RequestT, ResultFrame, ResultT, ResultT_contra
from specdec.v1 import common_pb2 as pb
from specdec.wire.backoff import Backoff
from specdec.wire.channel import ReplicaChannel
from specdec.wire.errors import IncompatibleReplica, SpecdecError, Unavailable
from specdec.wire.parsing.reading import parsed

_MOST_FIRST_WAITS_IN_NEED = 5
"""Longest wait between attempts, in first waits, while sessions wait for this replica."""
SPREAD = (0.75, 1.25)
"""Random factors of a wait: coordinators that lost a replica together must not all return together."""
_RESULTS_PER_TURN = 8
"""Results taken in one turn of the event loop. Each wakes a client's stream, and gRPC accepts one call in a turn,
behind what these streams write (docs/decisions/coordinator.md)."""
_ASK_AGAIN_S = 1.0
"""Seconds for the question how an engine ended, as its sessions wait for the answer."""
_CLOSED = "the replica closed the stream"
_log = structlog.get_logger(__name__)


class StreamOwner(Protocol[ResultT_contra]):
    """The stream's owner: gives the attach, and receives the frames. Called in the task that runs the stream."""

    @property
    def is_needed(self) -> bool:
        """Sessions wait for this replica."""

    @property
    def message_bytes(self) -> int:
        """The replica's message limit, in bytes."""

    instance_id: str
    """Id of the replica's process, as last reported."""

    def on_info(self, info: pb.GetReplicaInfoResponse) -> None:
        """The replica reported its process and message limit; raises IncompatibleReplica to open no stream."""

    def attach(self) -> pb.Attach:
        """The content of the first frame."""

    async def on_attached(self, attached: pb.Attached, load: pb.LoadReport | None) -> None:
        """The replica answered; raises IncompatibleReplica to break the stream."""

    def on_result(self, result: ResultT_contra) -> None:
        """A result came."""

    def on_load(self, load: pb.LoadReport) -> None:
        """A load report came."""

    def on_too_large(self, session_id: str, epoch: int, cause: str) -> None:
        """A session's entry exceeds the replica's message limit; called after its sender has returned."""

    def on_ended(self, error: Exception) -> None:
        """The stream ended, or could not be opened. It will be opened again."""


class ReplicaStream(Generic[RequestT, EntryT, ResultT]):
    """Run `run` as a task for as long as the stream is wanted."""

    def __init__(
        self,
        wire: LinkWire[RequestT, EntryT],
        channel: ReplicaChannel,
        settings: LinkSettings,
        owner: StreamOwner[ResultT],
        **log_fields: str,
    ) -> None:
        """`log_fields` are added to each log event."""
        self._wire = wire
        self._channel = channel
        self._settings = settings
        self._owner = owner
        self._log_fields = log_fields
        self._outbox: Outbox[EntryT] = Outbox()
        self._call: BidiCall[RequestT] | None = None
        self._reset_reason = ""

    def send(self, entry: EntryT) -> None:
        """Send an entry with the next frame. Call it only while the stream is up."""
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
        """End the stream after the queued entries; then `run` returns."""
        self._outbox.end()

    def reset(self, reason: str) -> None:
        """Break the stream; it will be opened again."""
        if self._call is not None:
            _log.warning("stream_reset", **self._log_fields, reason=reason)
            self._reset_reason = reason
            self._call.cancel()

    async def run(self) -> None:
        """Open the stream again and again, with growing, jittered waits between failed attempts."""
        backoff = Backoff(self._settings.backoff_min_s, self._settings.backoff_max_s, spread=SPREAD)
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
            except Exception as fault:  # the owner's fault is no reason to give up the replica
                self._log_fault(fault)
            has_lasted = time.monotonic() - started_s > backoff.longest_s
            num_failures = 1 if has_lasted else num_failures + 1
            in_need = _MOST_FIRST_WAITS_IN_NEED * backoff.first_s if self._owner.is_needed else None
            await asyncio.sleep(backoff.wait_s(num_failures, longest_s=in_need))

    async def _fault_of_stream(self) -> Exception | None:
        """Open the stream; returns its error, or None after `end`."""
        try:
            await self._run_stream()
            return None
        except (SpecdecError, grpc.RpcError, TimeoutError) as error:
            return error
        except asyncio.CancelledError:
            if _is_task_cancelled():
                raise
            # A read of a call that `reset` cancelled raises this, too.
            return Unavailable(self._reset_reason or "the stream was reset")
        except Exception as error:
            self._log_fault(error)
            return error

    async def _told_afterwards(self, error: SpecdecError) -> SpecdecError:
        """Ask the replica how the stream ended; returns `error` if it does not know."""
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
        """Run one stream. Returns after `end`; raises the cause of any other end."""
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
                raise Unavailable("the replica's first frame does not answer the attach")
            self._outbox.clear()
            await self._owner.on_attached(first.attached, first.load if first.HasField("load") else None)
            writer = asyncio.create_task(self._write_frames(call))
            frame: ResultFrame[ResultT] | None = first
            while frame is not None:
                for num_taken, result in enumerate(frame.results):
                    if num_taken and num_taken % _RESULTS_PER_TURN == 0:
                        await asyncio.sleep(0)
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
        """Check the replica's instance first: a second stream of one owner would end the first."""
        try:
            info = await self._wire.info(channel)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                raise
            await self._check_role(channel)
            info = pb.GetReplicaInfoResponse()
        self._owner.on_info(parsed(info))

    async def _check_role(self, channel: grpc.aio.Channel) -> None:
        """Tell swapped addresses from a replica that has no info. Raises IncompatibleReplica."""
        try:
            await self._wire.info_as_other(channel)
        except grpc.aio.AioRpcError:
            return
        raise IncompatibleReplica("it has the other role: check whether `targets` and `drafts` are swapped")

    async def _read(self, call: BidiCall[RequestT]) -> ResultFrame[ResultT] | None:
        frame = parsed(await call.read())
        return None if frame is grpc.aio.EOF else cast(ResultFrame[ResultT], frame)

    async def _write_frames(self, call: BidiCall[RequestT]) -> None:
        try:
            while entries := await self._outbox.take():
                await call.write(self._wire.frame(entries))
            await call.done_writing()
        except (grpc.RpcError, asyncio.InvalidStateError):
            pass  # the stream's reader reports its end
        except Exception as error:
            self._log_fault(error)
            self.reset("writing failed")

    def _log_fault(self, fault: Exception) -> None:
        _log.error("link_fault", **self._log_fields, exc_info=fault)


def _is_task_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
