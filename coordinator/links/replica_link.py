"""A stream to one replica that is opened again whenever it breaks.

What is queued within one turn of the event loop leaves in one frame. What comes in is handled by the task
that reads it, with no queue between: a verdict is on its way to the client before the next frame is looked
at.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, ClassVar

import grpc
import structlog

from coordinator.links.link_events import LinkEvents, LinkSettings, LinkState
from coordinator.links.outbox import Outbox
from coordinator.links.stream_end import StreamEnd, describe
from coordinator.sessions.session import Session
from specdec.backoff import Backoff
from specdec.rpc.channel import ReplicaChannel
from specdec.rpc.errors import IncompatibleReplica, SpecdecError, Unavailable
from specdec.v1 import common_pb2 as pb

_EXPECTED_STATES = (LinkState.CONNECTING, LinkState.READY, LinkState.DRAINING)
_MOST_FIRST_WAITS_IN_NEED = 5
"""Sessions wait for this very replica: its link is tried often."""
_CLOSED = "the replica closed the stream"
_log = structlog.get_logger(__name__)


class ReplicaLink:
    """The part that is the same for targets and drafts. Run `run` as a task for as long as the link is
    wanted.

    Invariant: `sessions` holds exactly the sessions that this replica should hold, with their current epochs.
    """

    role: ClassVar[str]
    _stub: Any

    def __init__(self, address: str, channel: ReplicaChannel, settings: LinkSettings, events: LinkEvents) -> None:
        self.address = address
        self.channel = channel
        self.detail = ""
        self.is_retired = False
        self.identity: pb.ModelIdentity | None = None
        self.instance_id = ""
        """Of the replica's process, as it said last; empty when it says none."""
        self.load: pb.LoadReport | None = None
        self.sessions: dict[str, Session] = {}
        self.num_streams = 0
        self._connection = LinkState.CONNECTING
        self._standing = LinkState.READY
        self._shown: tuple[LinkState, str] | None = None
        self._settings = settings
        self._events = events
        self._outbox = Outbox()
        self._call: Any = None
        self._reset_reason = ""
        self._listed: list[tuple[Session, int]] = []
        """Sessions in the attach, each with the epoch it had then."""

    @property
    def state(self) -> LinkState:
        """A stream that is up counts as what the replica said of itself, else as how far it is trusted."""
        if not self.is_up:
            return self._connection
        return LinkState.DRAINING if self.is_draining else self._standing

    @property
    def is_up(self) -> bool:
        """Entries can be sent."""
        return self._connection is LinkState.READY

    @property
    def is_ready(self) -> bool:
        """New sessions may be opened without a second thought."""
        return self.state is LinkState.READY

    @property
    def is_draining(self) -> bool:
        """The replica shuts down, or is no longer listed: what it has may end there, nothing new begins."""
        return self.is_retired or (self.load is not None and self.load.draining)

    def set_retired(self, is_retired: bool) -> None:
        """Whether the replica is no longer listed where replicas are found."""
        self.is_retired = is_retired
        self._show_state()

    def set_standing(self, standing: LinkState) -> None:
        """Ready, ejected or on probation: how it is treated while its stream is up."""
        self._standing = standing
        self._show_state()

    def end(self) -> None:
        """Let the stream that is up end in order, after what is queued; then `run` returns."""
        self._outbox.end()

    async def run(self) -> None:
        """Open the stream, again and again, with growing and jittered waits between attempts that fail."""
        backoff = Backoff(self._settings.backoff_min_s, self._settings.backoff_max_s, spread=(0.75, 1.25))
        num_failures = 0
        while True:
            started_s = time.monotonic()
            error = await self._fault_of_stream()
            if error is None:
                return
            try:
                self._go_down(error)
            except Exception as fault:  # of those who are told; the replica is not given up for it
                self._log_fault(fault)
            has_lasted = time.monotonic() - started_s > backoff.longest_s
            num_failures = 1 if has_lasted else num_failures + 1
            in_need = _MOST_FIRST_WAITS_IN_NEED * backoff.first_s if self.sessions else None
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

    def _log_fault(self, fault: Exception) -> None:
        _log.error("link_fault", role=self.role, address=self.address, exc_info=fault)

    def reset(self, reason: str) -> None:
        """Break the stream; it will be opened again."""
        if self._call is not None:
            _log.warning("stream_reset", role=self.role, address=self.address, reason=reason)
            self._reset_reason = reason
            self._call.cancel()

    def _queue(self, entry: Any) -> None:
        """Send an entry with the next frame; dropped while the stream is down: attaching makes up for it."""
        if not self.is_up:
            return
        if not self._outbox.put(entry):
            self._outbox.clear()
            self.reset("the replica does not read")

    async def _run_stream(self) -> None:
        """Returns when the stream has ended as `end` asked; raises why it did otherwise."""
        await self.channel.renew()  # no call is under way
        self._stub = self._make_stub(self.channel.current)
        async with asyncio.timeout(self._settings.connect_timeout_s):
            await self._check_instance()
        call = self._call = self._open_call()
        end = StreamEnd(call)
        writer: asyncio.Task[None] | None = None
        try:
            async with asyncio.timeout(self._settings.connect_timeout_s):
                sessions = self._sessions_to_attach()
                self._listed = [(session, self._epoch(session)) for session in sessions]
                self._reset_reason = ""
                await call.write(self._attach_frame(sessions))
                first = await call.read()
            if first is grpc.aio.EOF:
                raise end.error(Unavailable(_CLOSED))
            if not first.HasField("attached"):
                raise Unavailable("the replica's first frame is no answer to attach")
            if first.HasField("load"):
                self.load = first.load  # one that drains is never taken for a ready one
            await self._become_ready(first.attached)
            writer = asyncio.create_task(self._write_frames(call))
            frame = first
            while frame is not grpc.aio.EOF:
                self._handle_frame(frame)
                frame = await call.read()
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

    async def _check_instance(self) -> None:
        """A second stream of the same owner would end the first one, so it must be known before."""
        try:
            info = await self._stub.GetReplicaInfo(pb.GetReplicaInfoRequest())
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                return
            raise
        self._events.check_instance(self, info.instance_id)

    async def _become_ready(self, attached: pb.Attached) -> None:
        identity = pb.ModelIdentity()
        identity.CopyFrom(attached.identity)
        self.identity = identity
        self._events.check_instance(self, attached.instance_id)  # of two that asked at once, one attached too late
        self.instance_id = attached.instance_id
        await self._events.check_identity(self, identity)
        self._outbox.clear()
        self.num_streams += 1
        self._set_state(LinkState.READY, "")
        unknown = set(attached.unknown_session_ids)
        held = {s.session_id for s, epoch in self._listed if epoch == self._epoch(s)} - unknown
        for session, epoch in self._listed:  # since the attach they may have ended, or gone elsewhere
            if session.session_id not in self.sessions:
                self._queue(self._close_entry(session.session_id, epoch))
        lost = [session for session_id, session in self.sessions.items() if session_id not in held]
        self._listed = []
        self._events.on_up(self, lost)

    async def _write_frames(self, call: Any) -> None:
        try:
            while entries := await self._outbox.take():
                await call.write(self._frame(entries))
            await call.done_writing()
        except (grpc.RpcError, asyncio.InvalidStateError):
            pass  # the stream has ended, and its reader learns how
        except Exception as error:
            self._log_fault(error)
            self.reset("writing failed")

    def _handle_frame(self, frame: Any) -> None:
        for result in frame.results:
            session = self.sessions.get(result.session_id)
            if session is None or result.epoch != self._epoch(session):
                continue
            try:
                self._handle_result(session, result)
            except Exception as error:
                self._events.on_fault(session, error)
        if frame.HasField("load"):
            self.load = frame.load
            self._show_state()
            self._events.on_load(self)

    def _go_down(self, error: Exception) -> None:
        was_up, was_draining = self.is_up, self.is_draining
        self.load = None
        if isinstance(error, IncompatibleReplica):
            self._set_state(LinkState.INCOMPATIBLE, error.message)
        else:
            self._set_state(LinkState.DOWN, describe(error))
        self._outbox.clear()
        if was_up:
            is_announced = was_draining or (isinstance(error, SpecdecError) and error.reason == "DRAINING")
            self._events.on_down(self, not is_announced)

    def _set_state(self, connection: LinkState, detail: str) -> None:
        self._connection, self.detail = connection, detail
        self._show_state()

    def _show_state(self) -> None:
        state, detail = shown = (self.state, self.detail)
        if shown == self._shown:
            return
        self._shown = shown
        log = _log.info if state in _EXPECTED_STATES else _log.warning
        log("replica_state", role=self.role, address=self.address, state=str(state), detail=detail)
        self._events.on_state(self)

    # What differs between roles.

    def close(self, session: Session, reason: str) -> None:
        """End a session on the replica."""
        raise NotImplementedError

    def _make_stub(self, channel: grpc.aio.Channel) -> Any:
        raise NotImplementedError

    def _open_call(self) -> Any:
        raise NotImplementedError

    def _close_entry(self, session_id: str, epoch: int) -> Any:
        raise NotImplementedError

    def _sessions_to_attach(self) -> list[Session]:
        raise NotImplementedError

    def _attach_frame(self, sessions: Sequence[Session]) -> Any:
        raise NotImplementedError

    def _frame(self, entries: Sequence[Any]) -> Any:
        raise NotImplementedError

    def _epoch(self, session: Session) -> int:
        raise NotImplementedError

    def _handle_result(self, session: Session, result: Any) -> None:
        raise NotImplementedError

    def _attach(self, sessions: Sequence[Session]) -> pb.Attach:
        return pb.Attach(
            owner_id=self._settings.owner_id,
            lease_generation=self._settings.lease_generation,
            sessions=[
                pb.AttachedSession(session_id=s.session_id, epoch=self._epoch(s), committed_length=s.position)
                for s in sessions
            ],
        )


def _is_task_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
