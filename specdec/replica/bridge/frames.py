"""The engine's end of the bridge: frames and a port, without asyncio or grpc."""

from __future__ import annotations

import select
import socket
import time

from specdec.replica.bridge.frame_codec import (
    MAX_PAYLOAD_BYTES,
    NO_STREAM,
    Frame,
    FrameDecoder,
    FrameError,
    FrameKind,
    report_unit,
)
from specdec.replica.bridge.frame_writer import FrameWriter
from specdec.replica.bridge.local_sockets import LocalSockets
from specdec.replica.bridge.pulse import Pulse
from specdec.replica.bridge.step_memory import StepMemory

__all__ = [
    "MAX_PAYLOAD_BYTES",
    "NO_STREAM",
    "EnginePort",
    "Frame",
    "FrameError",
    "FrameKind",
    "PeerGone",
    "report_unit",
]

_RECEIVE_BYTES = 256 * 1024


class PeerGone(ConnectionError):
    """The servicer closed its end or died; the engine must exit."""


class EnginePort:
    """The engine's mailbox: `poll` receives frames, `send` sends them, and neither waits for the peer.

    Not thread-safe: only the engine's loop uses it. A call of `poll` or `send` costs about one system call (5 us) if
    the socket keeps up.
    """

    def __init__(
        self,
        connection: socket.socket,
        instance_id: str = "",
        pulse: Pulse | None = None,
        steps: StepMemory | None = None,
    ) -> None:
        """Use a connected socket. `instance_id`: id of this process, for coordinators."""
        self.pulse = pulse or Pulse()
        """Memory in which the loop shows its turns."""
        self.steps = steps or StepMemory()
        """Memory in which the loop notes the sessions of its current work."""
        connection.setblocking(False)
        self.instance_id = instance_id
        self._connection = connection
        self._decoder = FrameDecoder()
        self._writer = FrameWriter(connection)
        self._poller = select.poll()
        self._poller.register(connection, select.POLLIN)
        self.local = LocalSockets(self._poller)
        """Sockets to other engines of this host."""
        self._is_polling_writes = False
        self._peer_gone = False

    def poll(self, timeout_s: float | None) -> list[Frame]:
        """All frames that have arrived, in order; waits up to `timeout_s` for the first one.

        `timeout_s` 0 never waits, None waits for ever; kept output is flushed meanwhile. Returns [] after the
        time-out. Raises PeerGone if the servicer is gone, after the frames that arrived before its end.
        """
        frames = self._receive()
        if frames or timeout_s == 0:
            self._flush()
            return frames
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            self._flush()
            remaining_s = None if deadline is None else deadline - time.monotonic()
            if remaining_s is not None and remaining_s <= 0:
                return []
            # poll counts whole milliseconds; rounding up keeps short timeouts from spinning.
            self._poller.poll(None if remaining_s is None else max(1, round(remaining_s * 1000)))
            frames = self._receive()
            if frames:
                return frames

    def send(self, kind: FrameKind, stream_id: int = NO_STREAM, payload: bytes = b"") -> None:
        """Send a frame, or keep it for the next `poll` or `send` if the socket is full. Never blocks.

        If the peer is gone the frame is dropped, and the next `poll` raises. Raises FrameError if the payload is over
        the limit.
        """
        if stream_id in self.local:
            self.local.send(kind, stream_id, payload)
            return
        if self._peer_gone:
            return
        try:
            self._writer.write(kind, stream_id, payload)
        except OSError:
            self._peer_gone = True

    def pending_bytes(self, stream_id: int | None = None) -> int:
        """Bytes that the socket has not taken yet, of one stream or of all."""
        if stream_id is None:
            return self._writer.num_pending_bytes
        if stream_id in self.local:
            return self.local.pending_bytes(stream_id)
        return self._writer.pending_bytes_of(stream_id)

    def flush(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` until all kept bytes have left; False if some are left."""
        deadline = time.monotonic() + timeout_s
        writable = select.poll()
        writable.register(self._connection, select.POLLOUT)
        while not self._peer_gone:
            self._flush()
            remaining_s = deadline - time.monotonic()
            if not self._writer.num_pending_bytes:
                return True
            if remaining_s <= 0:
                return False
            writable.poll(max(1, round(remaining_s * 1000)))
        return False

    def close(self) -> None:
        """Close the socket; the servicer sees its end."""
        self._connection.close()

    def _receive(self) -> list[Frame]:
        frames = self.local.receive()
        while True:
            try:
                data = self._connection.recv(_RECEIVE_BYTES)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                data = b""
            if not data:
                self._peer_gone = True
                break
            frames += self._decoder.feed(data)
            if len(data) < _RECEIVE_BYTES and frames:
                return frames
        if self._peer_gone and not frames:
            raise PeerGone("the servicer process closed the connection")
        return frames

    def _flush(self) -> None:
        self.local.flush()
        if not self._writer.num_pending_bytes and not self._is_polling_writes:
            return
        try:
            is_empty = self._writer.flush()
        except OSError:
            self._peer_gone = True
            is_empty = True
        if is_empty == self._is_polling_writes:
            self._is_polling_writes = not is_empty
            events = select.POLLIN | (0 if is_empty else select.POLLOUT)
            self._poller.modify(self._connection, events)
