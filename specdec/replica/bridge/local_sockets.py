"""Sockets between engines of one host, beside their servicers: a link's frames without TCP, gRPC and two processes.

They are Unix sockets with random names in Linux's abstract namespace: they need no file, end with their process, and
lead nowhere outside the network namespace. Only processes of the same user get in, and a session is joined with its key
as on any link. A link's stream over gRPC, with its authentication, is always there first: it tells the name.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import select
import socket
import struct
from dataclasses import dataclass

from specdec.replica.bridge.frame_codec import FIRST_LOCAL, Frame, FrameDecoder, FrameError, FrameKind
from specdec.replica.bridge.frame_writer import FrameWriter
from specdec.wire.message_sizes import MOST_MESSAGE_BYTES

_RECEIVE_BYTES = 256 * 1024
_MOST_SOCKETS = 64
"""Connections at once, at most: one per draft or target of the host."""
_CREDENTIALS = struct.Struct("3i")
"""Linux's struct ucred: process, user, group."""
_PREFIX = "specdec-link-"


@dataclass(slots=True)
class _Connection:
    socket: socket.socket
    decoder: FrameDecoder
    writer: FrameWriter


class LocalSockets:
    """The listener and the connections of one engine, polled by its port. Nothing here waits or raises."""

    def __init__(self, poller: select.poll) -> None:
        """`poller` wakes the port when something arrives."""
        self._poller = poller
        self._listener: socket.socket | None = None
        self._connections: dict[int, _Connection] = {}
        self._ids = itertools.count(FIRST_LOCAL)

    def __contains__(self, stream_id: int) -> bool:
        return stream_id in self._connections

    def listen(self) -> str:
        """Take connections from now on; returns the name, or an empty one where that is not possible."""
        name = _PREFIX + secrets.token_hex(16)
        try:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(f"\0{name}")
            listener.listen(_MOST_SOCKETS)
        except OSError:
            return ""
        listener.setblocking(False)
        self._poller.register(listener, select.POLLIN)
        self._listener = listener
        return name

    def connect(self, name: str) -> int | None:
        """Connect to an engine of this host; returns the stream's id, None if there is no such engine."""
        if not name.startswith(_PREFIX) or not name.isascii() or len(name) > len(_PREFIX) + 32:
            return None
        connection: socket.socket | None = None
        try:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.setblocking(False)  # a listener without room refuses at once
            connection.connect(f"\0{name}")
        except OSError:
            if connection is not None:
                connection.close()
            return None
        return self._add(connection)

    def receive(self) -> list[Frame]:
        """What has arrived: LINK_OPENED for each new connection, its messages, STREAM_CLOSED at its end."""
        frames = [] if self._listener is None else self._accepted(self._listener)
        for stream_id in list(self._connections):
            frames += self._received(stream_id)
        return frames

    def send(self, kind: FrameKind, stream_id: int, payload: bytes) -> None:
        """Send a message, or close the connection after a STREAM_ABORT."""
        connection = self._connections[stream_id]
        if kind is not FrameKind.MESSAGE:
            self.close(stream_id)
            return
        with contextlib.suppress(OSError):  # its end is received
            connection.writer.write(kind, stream_id, payload)
            self._watch(connection)

    def flush(self) -> None:
        """Send kept bytes."""
        for connection in self._connections.values():
            if connection.writer.num_pending_bytes:
                with contextlib.suppress(OSError):
                    connection.writer.flush()
                    self._watch(connection)

    def pending_bytes(self, stream_id: int) -> int:
        """Bytes that the peer has no room for."""
        connection = self._connections.get(stream_id)
        return 0 if connection is None else connection.writer.num_pending_bytes

    def close(self, stream_id: int) -> None:
        """End a connection; a second call does nothing."""
        connection = self._connections.pop(stream_id, None)
        if connection is not None:
            self._poller.unregister(connection.socket)
            connection.socket.close()

    def _accepted(self, listener: socket.socket) -> list[Frame]:
        """LINK_OPENED for new connections, at most so many per call: any process of the host may connect on and on."""
        frames: list[Frame] = []
        for _ in range(_MOST_SOCKETS):
            try:
                connection, _address = listener.accept()
            except OSError:
                break
            if (stream_id := self._add(connection)) is not None:
                frames.append(Frame(FrameKind.LINK_OPENED, stream_id, b"local"))
        return frames

    def _add(self, connection: socket.socket) -> int | None:
        if len(self._connections) >= _MOST_SOCKETS or _user_of(connection) != os.geteuid():
            connection.close()
            return None
        connection.setblocking(False)
        stream_id = next(self._ids)
        self._connections[stream_id] = _Connection(
            connection, FrameDecoder(MOST_MESSAGE_BYTES), FrameWriter(connection)
        )
        self._poller.register(connection, select.POLLIN)
        return stream_id

    def _received(self, stream_id: int) -> list[Frame]:
        connection = self._connections[stream_id]
        try:
            data = connection.socket.recv(_RECEIVE_BYTES)
            frames = connection.decoder.feed(data)
        except (BlockingIOError, InterruptedError):
            return []
        except (OSError, FrameError):
            data, frames = b"", []
        messages = [Frame(frame.kind, stream_id, frame.payload) for frame in frames if frame.kind is FrameKind.MESSAGE]
        if not data or len(messages) < len(frames):
            self.close(stream_id)
            messages.append(Frame(FrameKind.STREAM_CLOSED, stream_id, b"the other engine closed the socket"))
        return messages

    def _watch(self, connection: _Connection) -> None:
        is_full = connection.writer.num_pending_bytes > 0
        self._poller.modify(connection.socket, select.POLLIN | (select.POLLOUT if is_full else 0))


def _user_of(connection: socket.socket) -> int:
    _, user, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(user)
