"""The loop of an engine process: take frames, run a step, send its results.

One thread, no locks. A turn (`EngineWorker._turn`):

    take the frames that have arrived          # role.open, entry, close, resend; frames of calls: role.calls
    end sessions that are overdue
    role.absorb_proposals                      # decides what the next step waits for
    if role.wait_s is 0:
        role.step(loop)
            send_results, take_frames          # while a device computes the pass, if one does
        send_results                           # unless the role defers that to the next step's pass
    else:
        send_results
        wait for frames, or until the step is due

    send_results: role.tell_results; direct links; role.before_send; load; one message per coordinator, whatever the
                  number of its sessions; answers

Frames that arrive while a CPU computes a step wait in the socket until it is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic

import structlog
from google.rpc import code_pb2

from specdec.replica.bridge.frames import EnginePort, Frame, FrameKind, PeerGone
from specdec.replica.bridge.pulse import Pulse
from specdec.replica.worker.errors import SessionFailure
from specdec.replica.worker.host import SessionHost
from specdec.replica.worker.links import DraftEnd, LinkEnd, TargetEnd
from specdec.replica.worker.pending_responses import TooLarge
from specdec.replica.worker.role import Role, Wire
from specdec.replica.worker.sessions import Owner, SessionT, StaleLease, may_replace
from specdec.replica.worker.trace import SessionTrace
from specdec.v1 import common_pb2 as pb
from specdec.wire.error_details import session_key
from specdec.wire.parsing.parts import MalformedFrame, read_frame

_LOAD_INTERVAL_S = 0.25
"""Seconds between two load reports."""
_MAX_PENDING_BYTES = 32 * 2**20
"""Bytes of a stream that the socket has not taken above which the stream is aborted."""
_MAX_WAITING_BYTES = 256 * 2**20
"""Bytes queued for a full servicer; enough for everything that a reattaching coordinator is sent again."""
_MOST_ID_CHARS = 512
"""Characters of a session's id, which every result repeats; our ids have some fifty."""
_LOOK_S = 0.001
"""Seconds between two looks at a computing device: the shortest wait of `EnginePort.poll`."""
_NOT_READ_S = 30.0
"""Seconds without reading after which a coordinator's stream is aborted: it hangs, and its sessions hold memory."""


class EngineWorker(Generic[SessionT]):
    """Runs one role over one engine port until the servicer goes or stops it."""

    most_taking_s = 0.1
    """Seconds per turn for arrived frames, so that steps go on and no turn looks stuck."""

    def __init__(
        self,
        port: EnginePort,
        wire: Wire,
        info: pb.GetReplicaInfoResponse,
        host: SessionHost[SessionT],
        role: Role[SessionT],
        *,
        traces: bool = False,
        pulse: Pulse | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`host`: the one that `role` was made with. `traces`: report traced sessions to the servicer. `pulse`: shows
        the servicer that turns end.
        """
        self._pulse = pulse or Pulse()
        self._port = port
        self._wire = wire
        self._info = info
        self._host = host
        self._sessions = host.sessions
        self._responses = host.responses
        self._steps = host.steps
        self._role = role
        self._traces = traces
        self._clock = clock
        self._next_load_s = 0.0
        self._told_load: pb.LoadReport | None = None
        self._full: set[int] = set()
        """Streams whose sessions are paused until their coordinators read."""
        self._rest: Iterator[None] | None = None
        """Arrived frames that are not handled yet."""
        self._draining = False
        self._leaving = False
        self._stopping = False
        self.links: LinkEnd[SessionT]
        if wire.joins_links:
            most = info.identity.max_model_len
            self.links = DraftEnd(port, host, role, self._fail, clock, max_model_len=most)
        else:
            self.links = TargetEnd(port, host, role, self._fail, clock)
        self._log = structlog.get_logger("specdec.replica.worker")

    def run(self) -> None:
        """Loop until stopped. Returns also when the servicer is gone."""
        try:
            while not self._stopping:
                self._turn()
        except PeerGone:
            self._log.info("servicer_gone")
        for session in self._sessions:
            self._host.tell_trace(session, "shutdown")

    def _turn(self) -> None:
        frames = self._port.poll(0) if self._rest is None else ()
        self._begin_turn()
        self._take(frames)
        now_s = self._clock()
        self._end_overdue(now_s)
        # After all arrived frames: they decide whether to wait at all.
        self._role.absorb_proposals(now_s)
        until_step_s = self._role.wait_s(now_s)
        if until_step_s == 0:
            self._role.step(self)
            self._steps.work()
            if not self._host.defer_results or self._stopping:
                self.send_results()
            self._end_turn()
            return
        self.send_results()
        self._end_turn()
        if self._rest is not None:
            return
        frames = self._port.poll(self._timeout_s(until_step_s, now_s))
        self._begin_turn()
        self._take(frames)
        self._end_turn()

    def _take(self, frames: Iterable[Frame], is_over: Callable[[], bool] | None = None) -> None:
        """Handle left-over frames, or else `frames`, until `is_over` or the turn's time is used up."""
        rest = self._rest = self._rest or self._handled(frames)
        until_s = time.monotonic() + self.most_taking_s
        for _ in rest:
            if time.monotonic() >= until_s if is_over is None else is_over():
                return
        self._rest = None

    def take_frames(self, until_s: float, is_done: Callable[[], bool]) -> None:
        """See `DuringPass`."""

        def is_over() -> bool:
            return time.monotonic() >= until_s or is_done()

        self._host.gpu_busy = True
        try:
            self._take(self._port.poll(0) if self._rest is None else (), is_over)
            while self._rest is None and time.monotonic() + _LOOK_S <= until_s and not is_done():
                self._take(self._port.poll(_LOOK_S), is_over)
        finally:
            self._host.gpu_busy = False
            self._steps.work()

    def _handled(self, frames: Iterable[Frame]) -> Iterator[None]:
        """Handle frames, entry by entry."""
        for frame in frames:
            if frame.kind is FrameKind.MESSAGE and frame.stream_id in self.links.streams:
                yield from self.links.message(frame.stream_id, frame.payload)
                continue
            if frame.kind is FrameKind.MESSAGE:
                yield from self._handle_message(frame.stream_id, frame.payload)
                continue
            while self._host.gpu_busy and frame.kind is FrameKind.CALL:
                yield  # a call may change the next steps, so it waits for this one
            self._handle(frame)
            yield

    def _begin_turn(self) -> None:
        self._pulse.begin_turn()
        self._steps.work()

    def _end_turn(self) -> None:
        self._steps.rest()
        self._pulse.end_turn()

    def _end_overdue(self, now_s: float) -> None:
        for session in self._sessions.expired(now_s):
            self._log.info("session_expired", **session.log_fields)
            self._end(session, "expired")
        for session in self._sessions.overdue(now_s):
            message = "deadline_ms: the request's deadline has passed, and its coordinator did not close the session"
            self._fail(session, SessionFailure(code_pb2.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", message))
        for stream_id in self._responses.not_read(now_s, _NOT_READ_S):
            self._abort_not_read(stream_id)

    def _end(self, session: SessionT, reason: str) -> None:
        self._role.close_session(session)
        self._host.ended(session, reason)

    def _fail(self, session: SessionT, failure: SessionFailure) -> None:
        self._role.close_session(session)
        self._host.failed(session, failure)

    def _timeout_s(self, until_step_s: float | None, now_s: float) -> float:
        waits = [self._next_load_s - now_s]
        if until_step_s is not None:
            waits.append(until_step_s)
        if (expiry_s := self._sessions.next_expiry_s()) is not None:
            waits.append(expiry_s - now_s)
        return max(0.0, min(waits))

    def send_results(self) -> None:
        """See `DuringPass`; also loads, answers and that a drain is over. Drafts come first: they compute meanwhile."""
        self._role.tell_results()
        self.links.flush()
        self._role.before_send()
        now_s = self._clock()
        load = None
        if now_s >= self._next_load_s or len(self._host.answers):
            self._next_load_s = now_s + _LOAD_INTERVAL_S
            load = self._load()
            self._port.send(FrameKind.LOAD, 0, load.SerializeToString())
        streams = self._responses.streams
        if load is not None and load != self._told_load:
            streams.update(self._sessions.streams)  # also coordinators without sessions here
            self._told_load = load
        on_attach = load if load is not None or not self._responses.has_attached else self._load()
        too_large = self._responses.flush(streams, now_s, load, on_attach)
        if too_large:
            for each in too_large:
                self._fail_too_large(each)
            self._responses.flush({each.stream_id for each in too_large}, now_s, None)
        self._host.answers.send(self._port)
        self._hold_back()
        if self._draining and not len(self._sessions):
            self._port.send(FrameKind.DRAINED, 0, b"")
            self._draining = False

    def _hold_back(self) -> None:
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

    def _fail_too_large(self, result: TooLarge) -> None:
        """End the one session whose result is larger than its owner's message limit."""
        session = self._sessions.get(result.session_id)
        if session is not None and session.epoch == result.epoch:
            self._fail(session, result.failure)
        else:
            self._host.refuse(result.stream_id, result.session_id, result.epoch, result.failure)

    def _load(self) -> pb.LoadReport:
        load = self._role.load()
        load.draining = self._leaving
        return load

    def _handle(self, frame: Frame) -> None:
        match frame.kind:
            case FrameKind.LINK_OPENED if self._sessions.owner_of(frame.stream_id) is None:
                self.links.streams.opened(frame.stream_id)
            case FrameKind.STREAM_CLOSED if frame.stream_id in self.links.streams:
                self.links.closed(frame.stream_id, frame.payload.decode(errors="replace"))
            case FrameKind.STREAM_TAKEN if frame.stream_id in self.links.streams:
                self.links.streams.taken(frame.stream_id, int.from_bytes(frame.payload, "little"))
            case FrameKind.STREAM_CLOSED:
                self._responses.drop(frame.stream_id)
                self._detach(frame.stream_id)
                if self._role.calls is not None:
                    self._role.calls.call_ended(frame.stream_id)
            case FrameKind.CALL:
                self._call(frame.stream_id, frame.payload)
            case FrameKind.STREAM_TAKEN:
                num_bytes = int.from_bytes(frame.payload, "little")
                self._responses.taken(frame.stream_id, num_bytes, self._clock())
                self._hold_back()
            case FrameKind.DRAIN:
                self._draining = self._leaving = True
                self._next_load_s = 0.0  # the next flush tells the owners
            case FrameKind.SHUTDOWN:
                self._stopping = True
            case _:
                pass

    def _call(self, call_id: int, request: bytes) -> None:
        answers = self._host.answers
        try:
            if self._role.calls is None:
                raise SessionFailure(code_pb2.UNIMPLEMENTED, "UNIMPLEMENTED", "this replica does not support the call")
            self._role.calls.call(call_id, request)
        except Exception as error:
            answers.refuse(call_id, self._host.faults.failure(error).to_status())

    def _handle_message(self, stream_id: int, payload: bytes) -> Iterator[None]:
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
            self._abort_not_read(stream_id)

    def _abort_not_read(self, stream_id: int) -> None:
        message = "the coordinator does not read its responses"
        self._responses.abort(stream_id, code_pb2.RESOURCE_EXHAUSTED, "STREAM_NOT_READ", message)
        self._detach(stream_id)  # STREAM_CLOSED comes only when the peer has read its queued responses

    def _detach(self, stream_id: int) -> None:
        for session in self._sessions.detach(stream_id, self._clock()):
            self._role.update_pause(session)

    def _refuse_id(self, stream_id: int, field: str, value: str) -> None:
        message = f"{field}: {len(value)} characters exceed the limit of {_MOST_ID_CHARS}"
        self._responses.abort(stream_id, code_pb2.INVALID_ARGUMENT, "MALFORMED_MESSAGE", message)

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
                self._end(session, "not attached again")
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
            self._fail(session, self._host.faults.failure(error))

    def _handle_entry(self, owner: Owner, stream_id: int, entry: Any) -> None:
        session_id = entry.session_id
        if len(session_id) > _MOST_ID_CHARS:
            self._refuse_id(stream_id, "session_id", session_id)
            self._detach(stream_id)
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
            self._end(session, entry.close.reason)
            return
        try:
            if kind == "link":
                self.links.granted(session, entry.link)
                return
            position = self.links.before_entry(session)
            self._role.entry(session, kind, getattr(entry, kind))
            self.links.after_entry(session, position)
        except Exception as error:
            self._fail(session, self._host.faults.failure(error))

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
        if self._traces and entry.open.traceparent:
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
            self._end(current, "reopened")
        else:
            message = f"taken over under lease generation {generation}"
            self._fail(current, SessionFailure(code_pb2.ABORTED, "SESSION_TAKEN_OVER", message))
        return True
