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
from typing import Generic

import structlog
from google.rpc import code_pb2

from specdec.replica.bridge.frames import EnginePort, Frame, FrameKind, PeerGone
from specdec.replica.bridge.pulse import Pulse
from specdec.replica.worker.errors import SessionFailure
from specdec.replica.worker.host import SessionHost
from specdec.replica.worker.owner_streams import OwnerStreams
from specdec.replica.worker.pending_responses import TooLarge
from specdec.replica.worker.role import Role, Wire
from specdec.replica.worker.sessions import SessionT
from specdec.v1 import common_pb2 as pb

_LOAD_INTERVAL_S = 0.25
"""Seconds between two load reports."""
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
        self._host = host
        self._sessions = host.sessions
        self._responses = host.responses
        self._steps = host.steps
        self._role = role
        self._clock = clock
        self._next_load_s = 0.0
        self._told_load: pb.LoadReport | None = None
        self._rest: Iterator[None] | None = None
        """Arrived frames that are not handled yet."""
        self._draining = False
        self._leaving = False
        self._stopping = False
        self.owners = OwnerStreams(port, wire, info, host, role, clock, traces=traces)
        """The streams of coordinators."""
        self.links = self.owners.links
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
                yield from self.owners.message(frame.stream_id, frame.payload)
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
            self.owners.end(session, "expired")
        for session in self._sessions.overdue(now_s):
            message = "deadline_ms: the request's deadline has passed, and its coordinator did not close the session"
            self.owners.fail(session, SessionFailure(code_pb2.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", message))
        for stream_id in self._responses.not_read(now_s, _NOT_READ_S):
            self.owners.abort_not_read(stream_id)

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
        self.owners.hold_back()
        if self._draining and not len(self._sessions):
            self._port.send(FrameKind.DRAINED, 0, b"")
            self._draining = False

    def _fail_too_large(self, result: TooLarge) -> None:
        """End the one session whose result is larger than its owner's message limit."""
        session = self._sessions.get(result.session_id)
        if session is not None and session.epoch == result.epoch:
            self.owners.fail(session, result.failure)
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
                self.owners.detach(frame.stream_id)
                if self._role.calls is not None:
                    self._role.calls.call_ended(frame.stream_id)
            case FrameKind.CALL:
                self._call(frame.stream_id, frame.payload)
            case FrameKind.STREAM_TAKEN:
                num_bytes = int.from_bytes(frame.payload, "little")
                self._responses.taken(frame.stream_id, num_bytes, self._clock())
                self.owners.hold_back()
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
