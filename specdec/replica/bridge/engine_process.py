"""The engine process as the servicer sees it: started, watched, fed with frames, stopped."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import subprocess
from collections.abc import Callable
from typing import Protocol

import structlog
from google.protobuf.message import DecodeError
from google.rpc import status_pb2

from specdec.replica.bridge.engine_launch import describe_exit, launch_engine
from specdec.replica.bridge.engine_watch import END_REASONS, SILENCE_S, EndCause, EngineWatch
from specdec.replica.bridge.frame_codec import FIRST_DIALLED, NO_STREAM, Frame, FrameDecoder, FrameError, FrameKind
from specdec.replica.bridge.frame_writer import FrameWriter
from specdec.replica.bridge.pulse import BEAT_INTERVAL_S, Pulse, new_pulse_file
from specdec.replica.bridge.step_memory import StepMemory, new_step_file
from specdec.service.settings import ReplicaServiceSettings
from specdec.service.standstill import Starvation
from specdec.v1 import common_pb2
from specdec.wire.parsing.reading import abort_status

_RECEIVE_BYTES = 256 * 1024
# Bytes of requests queued for an engine in a long step, above which senders wait.
_HIGH_WATER_BYTES = 8 * 1024 * 1024
_EXIT_AFTER_CLOSE_S = 5.0
_log = structlog.get_logger(__name__)


class StreamSink(Protocol):
    """Receives the engine's frames of one stream. Called in the event loop; must not block."""

    def on_message(self, payload: bytes) -> None:
        """An encoded response came."""

    def on_abort(self, status: status_pb2.Status) -> None:
        """The engine ended the stream."""

    def on_engine_gone(self, end: common_pb2.EngineEnd, reason: str) -> None:
        """The engine has ended; `reason` is for people."""


class EngineProcess:
    """One engine process and the socket to it. Use it from one event loop; call `start` once.

    A frame costs one system call and no task; frames of closed streams are dropped.
    """

    def __init__(
        self,
        entry: str,
        settings: ReplicaServiceSettings,
        *,
        service: str,
        cores: frozenset[int] | None = None,
        on_session_span: Callable[[bytes], None] | None = None,
        on_look: Callable[[float], None] | None = None,
        on_dial: Callable[[EngineProcess, int, str], None] | None = None,
    ) -> None:
        """Prepare the process; see `launch_engine`.

        `on_session_span` is called with the encoded SessionSpan of each traced session that has ended; it must not
        block. `on_look` is called a few times a second with the seconds for which the engine has been silent. `on_dial`
        is called when the engine opens a stream to a target, with its id and the address; it calls `adopt`. None: the
        stream is closed at once.
        """
        self.instance_id = secrets.token_hex(8)
        """New for each start."""
        self._entry = entry
        self._settings = settings
        self._service = service
        self._cores = cores
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._decoder = FrameDecoder()
        self._sinks: dict[int, StreamSink] = {}
        self._next_stream_id = NO_STREAM + 1
        self._room = asyncio.Event()
        self._room.set()
        self._is_connected = False
        self._is_watching_writes = False
        self._is_stopping = False
        self._ready = asyncio.Event()
        self._drained = asyncio.Event()
        self._ended = asyncio.Event()
        self._exited = asyncio.Event()
        self._tokenizer_json: list[bytes] = []
        self.exit_reason = ""
        """Why the process ended or was given up, for people; empty while it lives."""
        self.end_cause = EndCause.EXITED
        """The cause of its end, once there is a reason."""
        self.how_ended: common_pb2.EngineEnd | None = None
        """Its end for coordinators, with the sessions of its last step."""
        self.fatal_reason = ""
        """The engine's own last message before it failed."""
        self.info: common_pb2.GetReplicaInfoResponse | None = None
        """Its model, with the latest load; None before it is ready."""
        self.tokenizer_config = ""
        self._on_session_span = on_session_span
        self._on_look = on_look
        self._on_dial = on_dial
        self._watch_timer: asyncio.TimerHandle | None = None

    @property
    def is_ready(self) -> bool:
        """Whether the model is loaded and warmed, and the process lives."""
        return self.info is not None and not self.exit_reason

    @property
    def pid(self) -> int | None:
        """Process id; None before `start`."""
        return None if self._process is None else self._process.pid

    def tokenizer_json(self) -> bytes:
        """The content of tokenizer.json; empty if the engine sent none."""
        return b"".join(self._tokenizer_json)

    def start(self) -> None:
        """Start the process. It is ready when `wait_ready` returns."""
        self._loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ours.setblocking(False)
        pulse_fd, step_fd = new_pulse_file(), new_step_file()
        self._pulse, self._steps = Pulse(pulse_fd), StepMemory(step_fd)
        with theirs, os.fdopen(pulse_fd), os.fdopen(step_fd), contextlib.ExitStack() as on_failure:
            on_failure.callback(ours.close)
            self._process = launch_engine(
                self._entry,
                self._settings,
                socket_fd=theirs.fileno(),
                pulse_fd=pulse_fd,
                step_fd=step_fd,
                service=self._service,
                cores=self._cores,
                instance_id=self.instance_id,
            )
            on_failure.pop_all()
        self._connection = ours
        self._writer = FrameWriter(ours)
        self._is_connected = True
        self._pidfd = os.pidfd_open(self._process.pid)
        self._loop.add_reader(ours, self._on_readable)
        self._loop.add_reader(self._pidfd, self._on_exit)
        _log.info("engine_started", pid=self._process.pid, cores=sorted(self._cores or ()))

    async def wait_ready(self) -> common_pb2.GetReplicaInfoResponse:
        """Wait until it is ready; returns its info. Raises RuntimeError with the reason if it exits instead."""
        waits = [asyncio.create_task(event.wait()) for event in (self._ready, self._exited)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if self.info is None or self.exit_reason:
            raise RuntimeError(self.exit_reason)
        return self.info

    async def wait_exited(self) -> str:
        """Wait for the end of the process; returns the reason."""
        await self._exited.wait()
        return self.exit_reason

    async def wait_ended(self) -> str:
        """Wait until the process ended or was given up; returns the reason.

        `wait_exited` follows if it can be killed.
        """
        await self._ended.wait()
        return self.exit_reason

    async def drain(self, timeout_s: float) -> bool:
        """Let it take no new sessions, and wait until none is left; False after `timeout_s`."""
        if not self.is_ready:
            return True
        self._write(FrameKind.DRAIN, NO_STREAM, b"")
        try:
            await asyncio.wait_for(self._drained.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    async def stop(self, grace_s: float) -> None:
        """Ask the entry to return and wait; kill the process after `grace_s`."""
        if self._process is None:
            return
        self._is_stopping = True
        self._write(FrameKind.SHUTDOWN, NO_STREAM, b"")
        try:
            await asyncio.wait_for(self._exited.wait(), grace_s)
        except TimeoutError:
            _log.warning("engine_killed", pid=self._process.pid, grace_s=grace_s)
            self._process.kill()
            await self._exited.wait()

    def open_stream(self, sink: StreamSink, peer: str, kind: FrameKind = FrameKind.STREAM_OPENED) -> int:
        """Open a stream, whose frames go to `sink`; returns its id. `kind`: LINK_OPENED for a draft's link."""
        return self._open(sink, kind, peer.encode())

    def adopt(self, stream_id: int, sink: StreamSink) -> None:
        """Send the frames of a stream that the engine has opened to `sink`."""
        self._sinks[stream_id] = sink

    def open_call(self, sink: StreamSink, request: bytes) -> int:
        """Send the engine a unary request, answered to `sink`; returns its id. Close it like a stream."""
        return self._open(sink, FrameKind.CALL, request)

    def _open(self, sink: StreamSink, kind: FrameKind, payload: bytes) -> int:
        stream_id = self._next_stream_id
        self._next_stream_id += 1
        self._sinks[stream_id] = sink
        self._write(kind, stream_id, payload)
        return stream_id

    def close_stream(self, stream_id: int, reason: str = "") -> None:
        """Tell the engine that the peer is gone, and why. A second call does nothing."""
        if self._sinks.pop(stream_id, None) is not None:
            self._write(FrameKind.STREAM_CLOSED, stream_id, reason.encode())

    def tell_taken(self, stream_id: int, num_bytes: int) -> None:
        """Tell the engine that the peer has read `num_bytes` more of its responses."""
        if stream_id in self._sinks:
            self._write(FrameKind.STREAM_TAKEN, stream_id, num_bytes.to_bytes(8, "little"))

    async def send_message(self, stream_id: int, payload: bytes) -> None:
        """Relay a request; wait while the engine is far behind."""
        if not self._room.is_set():
            await self._room.wait()
        self._write(FrameKind.MESSAGE, stream_id, payload)

    def _write(self, kind: FrameKind, stream_id: int, payload: bytes) -> None:
        if not self._is_connected:
            return
        try:
            self._writer.write(kind, stream_id, payload)
        except OSError:
            self._disconnect()
            return
        self._watch_writes()

    def _on_writable(self) -> None:
        try:
            self._writer.flush()
        except OSError:
            self._disconnect()
            return
        self._watch_writes()

    def _watch_writes(self) -> None:
        num_pending = self._writer.num_pending_bytes
        if (num_pending > 0) != self._is_watching_writes:
            self._is_watching_writes = num_pending > 0
            if num_pending:
                self._loop.add_writer(self._connection, self._on_writable)
            else:
                self._loop.remove_writer(self._connection)
        if num_pending > _HIGH_WATER_BYTES:
            self._room.clear()
        elif not self._room.is_set() and num_pending < _HIGH_WATER_BYTES // 2:
            self._room.set()

    def _on_readable(self) -> bool:
        """Handle arrived frames; False if there were none, or the connection is closed."""
        try:
            data = self._connection.recv(_RECEIVE_BYTES)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            data = b""
        if not data:
            self._disconnect()
            return False
        try:
            for frame in self._decoder.feed(data):
                self._on_frame(frame)
        except (FrameError, DecodeError) as error:
            self.fatal_reason = self.fatal_reason or f"the engine sent a malformed frame: {error}"
            self._disconnect()
        return self._is_connected

    def _on_frame(self, frame: Frame) -> None:
        match frame.kind:
            case FrameKind.MESSAGE:
                if (sink := self._sinks.get(frame.stream_id)) is not None:
                    sink.on_message(frame.payload)
            case FrameKind.STREAM_ABORT:
                if (sink := self._sinks.get(frame.stream_id)) is not None:
                    sink.on_abort(abort_status(frame.payload))
            case FrameKind.LINK_DIAL if self._on_dial is not None and frame.stream_id >= FIRST_DIALLED:
                self._on_dial(self, frame.stream_id, frame.payload.decode(errors="replace"))
            case FrameKind.LINK_DIAL:
                self._write(FrameKind.STREAM_CLOSED, frame.stream_id, b"the draft has no link_targets")
            case FrameKind.LOAD:
                if self.info is not None:
                    self._take_load(frame.payload)
            case FrameKind.TOKENIZER if not self._ready.is_set():
                piece = common_pb2.GetTokenizerResponse.FromString(frame.payload)
                self._tokenizer_json.append(piece.tokenizer_json)
                self.tokenizer_config = self.tokenizer_config or piece.tokenizer_config
            case FrameKind.READY if not self._ready.is_set():
                self.info = common_pb2.GetReplicaInfoResponse.FromString(frame.payload)
                _tell_drafters(self.info)
                self._ready.set()
                settings = self._settings
                self._watch = EngineWatch(SILENCE_S, settings.engine_stall_s, self._loop.time)
                assert self.pid is not None
                self._starvation = Starvation(self.pid)
                self._look()
            case FrameKind.FATAL:
                self.fatal_reason = frame.payload.decode(errors="replace")
            case FrameKind.DRAINED:
                self._drained.set()
            case FrameKind.SESSION_SPAN:
                if self._on_session_span is not None:
                    self._on_session_span(frame.payload)
            case _:
                _log.warning("unexpected_frame", kind=frame.kind.name)

    def _take_load(self, payload: bytes) -> None:
        assert self.info is not None
        try:
            self.info.load.CopyFrom(common_pb2.LoadReport.FromString(payload))
        except DecodeError:  # the next report comes soon
            _log.warning("unreadable_load", num_bytes=len(payload))
        _tell_drafters(self.info)

    def _look(self) -> None:
        if not self._watch.is_suspicious:
            self._starvation.reset()
        stall = self._watch.look(self._pulse.read(), self._starvation.take_s())
        if self._on_look is not None:
            self._on_look(self._watch.silent_s)
        if stall is None or self._is_stopping:
            self._watch_timer = self._loop.call_later(BEAT_INTERVAL_S, self._look)
            return
        assert self._process is not None
        _log.error("engine_stalled", pid=self._process.pid, cause=str(stall.cause), reason=stall.reason)
        # A process that waits for a device may outlive the signal; its streams must not wait for that.
        self._end(stall.cause, stall.reason)
        self._process.kill()

    def _disconnect(self) -> None:
        """Close the socket; the process gets some time to exit by itself."""
        if not self._is_connected:
            return
        self._is_connected = False
        self._loop.remove_reader(self._connection)
        self._loop.remove_writer(self._connection)
        self._connection.close()
        self._room.set()
        if not self._exited.is_set():
            self._loop.call_later(_EXIT_AFTER_CLOSE_S, self._kill_leftover)

    def _kill_leftover(self) -> None:
        if self._process is not None and not self._exited.is_set():
            self._process.kill()

    def _on_exit(self) -> None:
        assert self._process is not None
        code = self._process.wait()
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        while self._is_connected and self._on_readable():
            pass  # Its last frames, FATAL above all, are still in the socket.
        self._disconnect()
        if self._watch_timer is not None:
            self._watch_timer.cancel()
        reason = self.exit_reason or self.fatal_reason or describe_exit(code)
        _log.log(20 if self._is_stopping else 40, "engine_exited", pid=self._process.pid, exit_code=code, reason=reason)
        self._exited.set()
        was_killed = code in (-signal.SIGKILL, -signal.SIGTERM) and not self.fatal_reason
        self._end(EndCause.KILLED if was_killed else EndCause.EXITED, reason)

    def _end(self, cause: EndCause, reason: str) -> None:
        """Tell all streams of the engine's end; only the first call counts."""
        if self._ended.is_set():
            return
        self.exit_reason, self.end_cause = reason, cause
        keys = self._steps.read_keys()
        self.how_ended = end = common_pb2.EngineEnd(
            instance_id=self.instance_id, reason=END_REASONS[cause], is_told=keys is not None, session_keys=keys or b""
        )
        self._ended.set()
        self._drained.set()
        sinks, self._sinks = self._sinks, {}
        for sink in sinks.values():
            sink.on_engine_gone(end, reason)


def _tell_drafters(info: common_pb2.GetReplicaInfoResponse) -> None:
    """Copy the drafters from the load report, as they may change, to their older fields in the info."""
    if info.load.HasField("drafters"):
        info.drafters[:] = info.load.drafters.names
        info.drafter_options[:] = info.load.drafters.options
        info.load.ClearField("drafters")
