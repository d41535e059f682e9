"""The loop of an engine process: take frames, run a step, send what it decided.

One thread, no locks. Frames that arrive during a step wait in the socket until the step is over; everything that a
step decides for one coordinator leaves in one message, whatever the number of sessions.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import structlog
from google.protobuf.message import DecodeError
from google.rpc import code_pb2

from specdec.rpc.bridge.frames import EnginePort, Frame, FrameKind, PeerGone
from specdec.v1 import common_pb2 as pb
from specdec.worker.errors import SessionFailure, stream_status
from specdec.worker.role import Role, Wire
from specdec.worker.sessions import Owner, Session, SessionTable, StaleLease
from specdec.worker.trace import SessionTrace

_LOAD_INTERVAL_S = 0.25
_MAX_PENDING_BYTES = 32 * 2**20


class EngineWorker:
    """Runs one role over one engine port until the servicer goes or tells it to stop."""

    def __init__(
        self,
        port: EnginePort,
        wire: Wire,
        info: pb.GetReplicaInfoResponse,
        session_ttl_s: float,
        clock: Callable[[], float] = time.monotonic,
        *,
        traces: bool = False,
    ) -> None:
        """`traces`: whether the servicer wants to know of sessions that are traced."""
        self.port = port
        self._traces = traces
        self._clock = clock
        self.sessions = SessionTable(session_ttl_s)
        self._wire = wire
        self._info = info
        self._outbox: dict[int, list[Any]] = defaultdict(list)
        self._attached: dict[int, pb.Attached] = {}
        self._next_load_s = 0.0
        self._told_load: pb.LoadReport | None = None
        self._draining = False
        self._leaving = False
        self._stopping = False
        self._log = structlog.get_logger("specdec.worker")
        self.role: Role

    def emit(self, session: Session, **body: Any) -> None:
        """Queue a result for the session's owner; dropped when its stream is broken (attach resends)."""
        if session.owner.stream_id is not None:
            result = self._wire.result(session_id=session.session_id, epoch=session.epoch, **body)
            self._outbox[session.owner.stream_id].append(result)

    def end(self, session: Session, reason: str = "closed") -> None:
        """Close a session from this side; `reason` is for its trace."""
        self.sessions.remove(session)
        self.role.close(session)
        if session.trace is not None:
            self._tell_trace(session, session.trace, reason)

    def fail(self, session: Session, failure: SessionFailure) -> None:
        """End a session with an error that its owner is told."""
        self._log.warning("session_failed", **session.log_fields, reason=failure.reason, error=str(failure))
        self.emit(session, error=_session_error(failure))
        if session.trace is not None:
            session.trace.attributes["error.type"] = failure.reason
        self.end(session, "failed")

    def run(self) -> None:
        """Loop until told to stop. Ends quietly when the servicer is gone."""
        try:
            while not self._stopping:
                self._turn()
        except PeerGone:
            self._log.info("servicer_gone")
        for session in list(self.sessions):
            if session.trace is not None:
                self._tell_trace(session, session.trace, "shutdown")

    def _turn(self) -> None:
        for frame in self.port.poll(0):
            self._handle(frame)
        now_s = self._clock()
        for session in self.sessions.expired(now_s):
            self._log.info("session_expired", **session.log_fields)
            self.end(session, "expired")
        for session in self.sessions.overdue(now_s):
            message = "the request's deadline has passed, and the session was not closed"
            self.fail(session, SessionFailure(code_pb2.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", message))
        # Asked after all that arrived is known: what is at hand now decides whether to wait at all.
        until_step_s = self.role.wait_s(now_s)
        if until_step_s == 0:
            self.role.step()
            self._flush()
            return
        self._flush()
        for frame in self.port.poll(self._timeout_s(until_step_s, now_s)):
            self._handle(frame)

    def _timeout_s(self, until_step_s: float | None, now_s: float) -> float:
        waits = [self._next_load_s - now_s]
        if until_step_s is not None:
            waits.append(until_step_s)
        if (expiry_s := self.sessions.next_expiry_s()) is not None:
            waits.append(expiry_s - now_s)
        return max(0.0, min(waits))

    def _flush(self) -> None:
        now_s = self._clock()
        load = None
        if now_s >= self._next_load_s:
            self._next_load_s = now_s + _LOAD_INTERVAL_S
            load = self._load()
            self.port.send(FrameKind.LOAD, 0, load.SerializeToString())
        streams = set(self._outbox) | set(self._attached)
        if load is not None and load != self._told_load:
            streams.update(self.sessions.streams)  # also those who have no session here, or none any more
            self._told_load = load
        for stream_id in streams:
            response = self._wire.response(results=self._outbox.pop(stream_id, ()))
            if (attached := self._attached.pop(stream_id, None)) is not None:
                response.attached.CopyFrom(attached)
                load = load or self._load()
            if load is not None:
                response.load.CopyFrom(load)
            self.port.send(FrameKind.MESSAGE, stream_id, response.SerializeToString())
        if self._draining and not len(self.sessions):
            self.port.send(FrameKind.DRAINED, 0, b"")
            self._draining = False

    def _load(self) -> pb.LoadReport:
        load = self.role.load()
        load.draining = self._leaving
        return load

    def _handle(self, frame: Frame) -> None:
        match frame.kind:
            case FrameKind.MESSAGE:
                self._handle_message(frame.stream_id, frame.payload)
            case FrameKind.STREAM_CLOSED:
                self._outbox.pop(frame.stream_id, None)
                self._attached.pop(frame.stream_id, None)
                for session in self.sessions.detach(frame.stream_id, self._clock()):
                    self.role.set_orphaned(session, True)
            case FrameKind.DRAIN:
                self._draining = self._leaving = True
                self._next_load_s = 0.0  # owners learn of it with the next flush
            case FrameKind.SHUTDOWN:
                self._stopping = True
            case _:
                pass

    def _handle_message(self, stream_id: int, payload: bytes) -> None:
        try:
            request = self._wire.request.FromString(payload)
        except DecodeError:
            self._abort(stream_id, code_pb2.INVALID_ARGUMENT, "MALFORMED_MESSAGE", "the message does not parse")
            return
        owner = self.sessions.owner_of(stream_id)
        if request.HasField("attach") == (owner is not None):
            reason = "NOT_ATTACHED" if owner is None else "ALREADY_ATTACHED"
            message = "the first message, and only that, must be an attach"
            self._abort(stream_id, code_pb2.FAILED_PRECONDITION, reason, message)
            return
        if owner is None and (owner := self._attach(stream_id, request.attach)) is None:
            return
        self.role.owner_message(owner, request)
        for entry in request.entries:
            self._handle_entry(owner, stream_id, entry)
        if self.port.pending_bytes(stream_id) > _MAX_PENDING_BYTES:
            self._abort(stream_id, code_pb2.RESOURCE_EXHAUSTED, "STREAM_NOT_READ", "responses are not being read")

    def _attach(self, stream_id: int, attach: pb.Attach) -> Owner | None:
        try:
            owner, former = self.sessions.attach(stream_id, attach.owner_id, attach.lease_generation)
        except StaleLease as error:
            self._abort(stream_id, code_pb2.FAILED_PRECONDITION, "STALE_LEASE", str(error))
            return None
        if former is not None and former != stream_id:
            self._abort(former, code_pb2.ABORTED, "OWNER_REPLACED", "the owner attached on another stream")
        listed = {s.session_id: s for s in attach.sessions}
        for session in [s for s in owner.sessions.values() if not _is_same(s, listed.get(s.session_id))]:
            self.end(session, "not attached again")
        unknown = [session_id for session_id in listed if session_id not in owner.sessions]
        self._attached[stream_id] = pb.Attached(
            identity=self._info.identity, unknown_session_ids=unknown, instance_id=self._info.instance_id
        )
        self._log.info("attached", owner=owner.owner_id, sessions=len(owner.sessions), unknown=len(unknown))
        for session in list(owner.sessions.values()):
            self.role.set_orphaned(session, False)
            self.role.resend(session, listed[session.session_id].committed_length)
        return owner

    def _handle_entry(self, owner: Owner, stream_id: int, entry: Any) -> None:
        kind = entry.WhichOneof("entry")
        session = self.sessions.get(entry.session_id)
        if kind == "open":
            self._open(owner, stream_id, entry, session)
            return
        if kind is None or session is None or session.owner is not owner or session.epoch != entry.epoch:
            return
        if kind == "close":
            self.end(session, entry.close.reason)
            return
        try:
            self.role.entry(session, kind, getattr(entry, kind))
        except SessionFailure as failure:
            self.fail(session, failure)

    def _open(self, owner: Owner, stream_id: int, entry: Any, current: Session | None) -> None:
        try:
            if current is not None and not self._replace(current, owner, entry):
                return
            session = self.role.open(owner, entry.session_id, entry.epoch, entry.open)
        except SessionFailure as failure:
            error = _session_error(failure)
            result = self._wire.result(session_id=entry.session_id, epoch=entry.epoch, error=error)
            self._outbox[stream_id].append(result)
            return
        session.lease_generation = entry.open.lease_generation
        if entry.open.HasField("deadline_ms"):
            session.deadline_s = self._clock() + entry.open.deadline_ms / 1000
        if self._traces and entry.open.traceparent:
            session.trace = SessionTrace.begin(entry.open.traceparent)
        self.sessions.add(session)
        self.emit(session, opened=pb.SessionOpened(position=self.role.position(session)))

    def _replace(self, current: Session, owner: Owner, entry: Any) -> bool:
        """Make way for a session that is opened again; false when the entry is an old one.

        The lease of a request decides between owners: a lower generation is refused, a higher one takes the session
        over.
        """
        generation = entry.open.lease_generation
        is_same_owner = current.owner is owner
        if generation < current.lease_generation or (generation == current.lease_generation and not is_same_owner):
            message = f"the session is held under lease generation {current.lease_generation}"
            raise SessionFailure(code_pb2.FAILED_PRECONDITION, "STALE_LEASE", message, field="open.lease_generation")
        if is_same_owner and entry.epoch <= current.epoch:
            return False
        if is_same_owner:
            self.end(current, "reopened")
        else:
            message = f"taken over under lease generation {generation}"
            self.fail(current, SessionFailure(code_pb2.ABORTED, "SESSION_TAKEN_OVER", message))
        return True

    def _tell_trace(self, session: Session, trace: SessionTrace, reason: str) -> None:
        trace.attributes.update(
            {
                "gen_ai.request.model": self._info.identity.name,
                "specdec.session_id": session.session_id,
                "specdec.epoch": session.epoch,
                "specdec.device": self._info.identity.device,
                "specdec.numerics_id": self._info.identity.numerics_id,
                "specdec.end_reason": reason,
            }
        )
        told = trace.encode(self._wire.span_name, self._wire.last_phase)
        self.port.send(FrameKind.SESSION_SPAN, payload=told)

    def _abort(self, stream_id: int, code: int, reason: str, message: str) -> None:
        self._outbox.pop(stream_id, None)
        self._attached.pop(stream_id, None)
        status = stream_status(code, reason, message)
        self.port.send(FrameKind.STREAM_ABORT, stream_id, status.SerializeToString())


def _is_same(session: Session, listed: pb.AttachedSession | None) -> bool:
    return listed is not None and listed.epoch == session.epoch


def _session_error(failure: SessionFailure) -> pb.SessionError:
    return pb.SessionError(status=failure.to_status(), expected_position=failure.expected_position)
