"""The streams of coordinators at an engine: attaches, the entries of their sessions, and who must read first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Generic

import structlog
from google.rpc import code_pb2

from specdec.replica.bridge.frames import EnginePort
from specdec.replica.worker.errors import SessionFailure
from specdec.replica.worker.host import SessionHost
from specdec.replica.worker.links import DraftEnd, LinkEnd, TargetEnd
from specdec.replica.worker.role import Role, Wire
from specdec.replica.worker.sessions import Owner, SessionT, StaleLease, may_replace
from specdec.replica.worker.trace import SessionTrace
from specdec.v1 import common_pb2 as pb
from specdec.wire.error_details import session_key
from specdec.wire.parsing.parts import MalformedFrame, read_frame

_MAX_PENDING_BYTES = 32 * 2**20
"""Bytes of a stream that the socket has not taken above which the stream is aborted."""
_MAX_WAITING_BYTES = 256 * 2**20
"""Bytes queued for a full servicer; enough for everything that a reattaching coordinator is sent again."""
_MOST_ID_CHARS = 512
"""Characters of a session's id, which every result repeats; our ids have some fifty."""


class OwnerStreams(Generic[SessionT]):
    """Handles what coordinators send, and closes sessions."""

    def __init__(
        self,
        port: EnginePort,
        wire: Wire,
        info: pb.GetReplicaInfoResponse,
        host: SessionHost[SessionT],
        role: Role[SessionT],
        clock: Callable[[], float],
        *,
        traces: bool,
    ) -> None:
        """See `EngineWorker`."""
        self._port = port
        self._wire = wire
        self._info = info
        self._host = host
        self._sessions = host.sessions
        self._responses = host.responses
        self._steps = host.steps
        self._role = role
        self._clock = clock
        self.traces = traces
        """Whether traced sessions are reported to the servicer."""
        self._full: set[int] = set()
        """Streams whose sessions are paused until their coordinators read."""
        self.links: LinkEnd[SessionT]
        """The direct links between drafts and targets."""
        if wire.joins_links:
            most = info.identity.max_model_len
            self.links = DraftEnd(port, host, role, self.fail, clock, max_model_len=most)
        else:
            self.links = TargetEnd(port, host, role, self.fail, clock)
        self._log = structlog.get_logger("specdec.replica.worker")

    def message(self, stream_id: int, payload: bytes) -> Iterator[None]:
        """Handle a message of a stream, entry by entry."""
        try:
            request = read_frame(self._wire.request, payload)
        except MalformedFrame as error:
            self._responses.abort(stream_id, code_pb2.INVALID_ARGUMENT, "MALFORMED_MESSAGE", str(error))
            return
        owner = self._sessions.owner_of(stream_id)
        if request.HasField("attach") == (owner is not None):
            reason = "NOT_ATTACHED" if owner is None else "ALREADY_ATTACHED"
            message = "the first message, and only that, must be an attach"
            self._responses.abort(stream_id, code_pb2.FAILED_PRECONDITION, reason, message)
            return
        if owner is None and (owner := self._attach(stream_id, request.attach)) is None:
            return
        for entry in request.entries:
            if owner.stream_id != stream_id:  # the stream was aborted meanwhile
                return
            self._handle_entry(owner, stream_id, entry)
            yield
        try:  # after the entries: it concerns the sessions that they opened, too
            self._role.owner_message(owner, request)
        except Exception as error:  # it only advises, for speed
            self._host.faults.note(error)
        self._steps.work()
        is_pending = self._port.pending_bytes(stream_id) > _MAX_PENDING_BYTES
        if is_pending or self._responses.waiting_bytes(stream_id) > _MAX_WAITING_BYTES:
            self.abort_not_read(stream_id)

    def _handle_entry(self, owner: Owner, stream_id: int, entry: Any) -> None:
        session_id = entry.session_id
        if len(session_id) > _MOST_ID_CHARS:
            self._refuse_id(stream_id, "session_id", session_id)
            self.detach(stream_id)
            return
        kind = entry.WhichOneof("entry")
        session = self._sessions.get(session_id)
        if kind == "open":
            self._steps.work_on([session_key(session_id)])
            self._open(owner, stream_id, entry, session)
            return
        if kind is None or session is None or session.owner is not owner or session.epoch != entry.epoch:
            return
        self._steps.work_on([session.key])
        if kind == "close":
            self.end(session, entry.close.reason)
            return
        try:
            if kind == "link":
                self.links.granted(session, entry.link)
                return
            position = self.links.before_entry(session)
            self._role.entry(session, kind, getattr(entry, kind))
            self.links.after_entry(session, position)
        except Exception as error:
            self.fail(session, self._host.faults.failure(error))

    def _open(self, owner: Owner, stream_id: int, entry: Any, current: SessionT | None) -> None:
        try:
            if current is not None and not self._replace(current, owner, entry):
                return
            session = self._role.open_session(owner, entry.session_id, entry.epoch, entry.open)
        except Exception as error:
            self._host.refuse(stream_id, entry.session_id, entry.epoch, self._host.faults.failure(error))
            return
        session.lease_generation, session.apart_until = entry.open.lease_generation, entry.open.apart_until
        if entry.open.HasField("deadline_ms"):
            session.deadline_s = self._clock() + entry.open.deadline_ms / 1000
        if self.traces and entry.open.traceparent:
            session.trace = SessionTrace.begin(entry.open.traceparent)
        self._sessions.add(session)
        if stream_id in self._full:
            session.is_held_back = True
            self._role.update_pause(session)
        self._host.emit(session, opened=pb.SessionOpened(position=self._role.position(session)))

    def _replace(self, current: SessionT, owner: Owner, entry: Any) -> bool:
        """End the held session for a new opening; False if the opening is an old one."""
        generation = entry.open.lease_generation
        if not may_replace(current, owner, entry.epoch, generation):
            return False
        if current.owner is owner:
            self.end(current, "reopened")
        else:
            message = f"taken over under lease generation {generation}"
            self.fail(current, SessionFailure(code_pb2.ABORTED, "SESSION_TAKEN_OVER", message))
        return True

    def _attach(self, stream_id: int, attach: pb.Attach) -> Owner | None:
        if len(attach.owner_id) > _MOST_ID_CHARS:
            self._refuse_id(stream_id, "attach.owner_id", attach.owner_id)
            return None
        try:
            owner, former = self._sessions.attach(stream_id, attach.owner_id, attach.lease_generation)
        except StaleLease as error:
            self._responses.abort(stream_id, code_pb2.FAILED_PRECONDITION, "STALE_LEASE", str(error))
            return None
        if former is not None and former != stream_id:
            self._responses.abort(former, code_pb2.ABORTED, "OWNER_REPLACED", "the owner attached on another stream")
        listed = {s.session_id: s for s in attach.sessions}
        held: dict[str, SessionT] = {}
        for session in self._sessions.of(owner):
            if (told := listed.get(session.session_id)) is not None and told.epoch == session.epoch:
                held[session.session_id] = session
            else:
                self.end(session, "not attached again")
        unknown = [session_id for session_id in listed if session_id not in held]
        owner.message_bytes = self._responses.opened(stream_id, attach.max_message_bytes)
        self._responses.attached(
            stream_id,
            pb.Attached(identity=self._info.identity, unknown_session_ids=unknown, instance_id=self._info.instance_id),
        )
        self._log.info("attached", owner=owner.owner_id, sessions=len(held), unknown=len(unknown))
        for session_id, session in held.items():
            self._resume(session, listed[session_id])
        return owner

    def _resume(self, session: SessionT, seen: pb.AttachedSession) -> None:
        session.is_held_back = False
        self._role.update_pause(session)
        try:
            self._role.resend(session, seen)
        except Exception as error:
            self.fail(session, self._host.faults.failure(error))

    def detach(self, stream_id: int) -> None:
        """The stream has ended: its sessions pause until their owner attaches again."""
        for session in self._sessions.detach(stream_id, self._clock()):
            self._role.update_pause(session)

    def abort_not_read(self, stream_id: int) -> None:
        """End a stream whose coordinator does not read what it is sent."""
        message = "the coordinator does not read its responses"
        self._responses.abort(stream_id, code_pb2.RESOURCE_EXHAUSTED, "STREAM_NOT_READ", message)
        self.detach(stream_id)  # STREAM_CLOSED comes only when the peer has read its queued responses

    def hold_back(self) -> None:
        """Pause the sessions whose owner must read first; resume them when it has."""
        full = self._responses.full
        if full == self._full:
            return
        for stream_id in full ^ self._full:
            owner = self._sessions.owner_of(stream_id)
            for session in () if owner is None else self._sessions.of(owner):
                session.is_held_back = stream_id in full
                self._role.update_pause(session)
        self._full = set(full)

    def end(self, session: SessionT, reason: str) -> None:
        """Close a session; `reason` is for its trace."""
        self._role.close_session(session)
        self._host.ended(session, reason)

    def fail(self, session: SessionT, failure: SessionFailure) -> None:
        """Close a session because of an error, and send the error to its owner."""
        self._role.close_session(session)
        self._host.failed(session, failure)

    def _refuse_id(self, stream_id: int, field: str, value: str) -> None:
        message = f"{field}: {len(value)} characters exceed the limit of {_MOST_ID_CHARS}"
        self._responses.abort(stream_id, code_pb2.INVALID_ARGUMENT, "MALFORMED_MESSAGE", message)
