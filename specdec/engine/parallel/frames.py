"""Messages between ranks and between nodes: frames in a fixed layout.

A frame has nine little-endian 64-bit integers (kind, payload size in bytes, sizes of that kind) and a payload: of steps
64-bit integers followed by 32-bit ones, between nodes JSON. It cannot contain or name code.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from enum import IntEnum

_HEADER = struct.Struct("<9q")
_NUM_SIZES = 7
_MOST_PAYLOAD_BYTES = 1 << 30
"""Greatest payload in bytes; a thousand rows with contexts of a million tokens need less."""


class LeaderGone(ConnectionError):
    """The other side, of a step always rank 0, closed the connection."""


class BadFrame(ValueError):
    """Not a frame, or its sizes contradict its payload; the connection is unusable."""


class StepKind(IntEnum):
    """Kind of a frame."""

    FORWARD = 1
    COPY_BLOCKS = 2
    COPY_SLOTS = 3
    STOP = 4
    HELLO = 5
    """A node or a rank of it introduces itself to the leader."""
    WELCOME = 6
    REFUSED = 7
    """The leader's reason, after which it closes the connection."""
    BEAT = 8
    """A sign of life."""
    READY = 9
    """All ranks have loaded."""
    LOST = 10
    """A node's reason why it leaves."""
    LOADED = 11
    """A rank has loaded its part, and how it computes."""


@dataclass(frozen=True, slots=True)
class StepFrame:
    """A decoded frame."""

    kind: StepKind
    sizes: tuple[int, ...]
    payload: bytearray

    def encode(self) -> bytes:
        """The frame as bytes."""
        sizes = self.sizes + (0,) * (_NUM_SIZES - len(self.sizes))
        return _HEADER.pack(self.kind, len(self.payload), *sizes) + self.payload


def text_frame(kind: StepKind, text: str = "") -> StepFrame:
    """A frame between nodes."""
    return StepFrame(kind, (), bytearray(text.encode()))


def receive_frame(connection: socket.socket, most_bytes: int = _MOST_PAYLOAD_BYTES) -> StepFrame:
    """Wait for the next frame, without a time limit but the socket's. Raises ``LeaderGone`` or ``BadFrame``."""
    kind, num_bytes, *sizes = _HEADER.unpack(_receive(connection, _HEADER.size))
    try:
        known = StepKind(kind)
    except ValueError as error:
        raise BadFrame(str(error)) from error
    if not 0 <= num_bytes <= most_bytes:
        raise BadFrame(f"a {known.name} frame of {num_bytes} bytes")
    return StepFrame(known, tuple(sizes), _receive(connection, num_bytes))


def _receive(connection: socket.socket, num_bytes: int) -> bytearray:
    data = bytearray(num_bytes)
    view = memoryview(data)
    while view:
        count = connection.recv_into(view)
        if count == 0:
            raise LeaderGone("the other side closed the connection")
        view = view[count:]
    return data
