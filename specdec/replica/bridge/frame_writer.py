"""The outgoing half of a frame connection, with a buffer that never blocks its writer."""

from __future__ import annotations

import socket
from collections import deque
from itertools import islice

from specdec.replica.bridge.frame_codec import FrameKind, encode_frame

# Buffers per system call, below the kernel's IOV_MAX (1024); a step rarely has more than a few.
_MAX_BUFFERS_PER_CALL = 64


class FrameWriter:
    """Writes frames to a non-blocking socket, in order, and keeps the bytes that the socket does not take.

    Both ends of the bridge use it: the engine flushes when it polls, the servicer when its event loop calls.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffers: deque[tuple[int, memoryview]] = deque()
        self._pending_by_stream: dict[int, int] = {}
        self._num_pending_bytes = 0

    @property
    def num_pending_bytes(self) -> int:
        """Bytes that wait for the socket."""
        return self._num_pending_bytes

    def pending_bytes_of(self, stream_id: int) -> int:
        """Bytes of one stream that wait for the socket."""
        return self._pending_by_stream.get(stream_id, 0)

    def write(self, kind: FrameKind, stream_id: int, payload: bytes) -> None:
        """Write as much as the socket takes, and keep the rest. Raises OSError if the peer is gone.

        Cost: one system call, for any number of kept bytes.
        """
        buffers = encode_frame(kind, stream_id, payload)
        if not self._buffers and len(buffers) == 1:
            num_sent = self._send_one(buffers[0])
            if num_sent == len(buffers[0]):
                return
            self._keep(stream_id, memoryview(buffers[0])[num_sent:])
            return
        for buffer in buffers:
            self._keep(stream_id, memoryview(buffer))
        self.flush()

    def flush(self) -> bool:
        """Write as much as the socket takes; True if nothing is left. Raises OSError if the peer is gone."""
        while self._buffers:
            batch = [buffer for _, buffer in islice(self._buffers, _MAX_BUFFERS_PER_CALL)]
            try:
                num_sent = self._connection.sendmsg(batch)
            except (BlockingIOError, InterruptedError):
                return False
            self._drop(num_sent)
        return True

    def _send_one(self, buffer: bytes) -> int:
        try:
            return self._connection.send(buffer)
        except (BlockingIOError, InterruptedError):
            return 0

    def _keep(self, stream_id: int, buffer: memoryview) -> None:
        self._buffers.append((stream_id, buffer))
        self._count(stream_id, len(buffer))

    def _drop(self, num_sent: int) -> None:
        while num_sent:
            stream_id, buffer = self._buffers[0]
            num_taken = min(num_sent, len(buffer))
            if num_taken == len(buffer):
                self._buffers.popleft()
            else:
                self._buffers[0] = (stream_id, buffer[num_taken:])
            num_sent -= num_taken
            self._count(stream_id, -num_taken)

    def _count(self, stream_id: int, num_bytes: int) -> None:
        self._num_pending_bytes += num_bytes
        pending = self._pending_by_stream.get(stream_id, 0) + num_bytes
        if pending:
            self._pending_by_stream[stream_id] = pending
        else:
            self._pending_by_stream.pop(stream_id, None)
