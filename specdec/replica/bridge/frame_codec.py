"""The frames that servicer and engine process exchange over their socket.

A frame is a 9 byte little-endian header (payload length u32, kind u8, stream id u32) and the payload.
Payloads are encoded protobuf messages that the servicer relays without decoding them.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

HEADER = struct.Struct("<IBI")
# Bytes of a payload, at most: more than any gRPC message (16 MiB by default) and any tokenizer in use (40 MB).
MAX_PAYLOAD_BYTES = 256 * 1024 * 1024
# Stream id of frames that belong to no stream; stream ids start at 1.
NO_STREAM = 0
# Lowest id of the streams that an engine opens; those that its servicer opens have lower ones.
FIRST_DIALLED = 1 << 31
# Lowest id of the streams between two engines of one host, which do not cross their servicers.
FIRST_LOCAL = 3 << 30
# Reports of read bytes per stream buffer: an engine that waits for room resumes before the buffer is empty.
_REPORTS_PER_BUFFER = 16
# Bytes of a payload that is joined with its header; copying a larger one costs more than a second buffer.
_JOIN_LIMIT_BYTES = 64 * 1024


class FrameKind(enum.IntEnum):
    """Kinds of frames."""

    STREAM_OPENED = 1
    """Servicer to engine: a peer opened a stream; payload: the peer's address."""
    STREAM_CLOSED = 2
    """Servicer to engine: the peer of this stream is gone."""
    MESSAGE = 3
    """Both ways: one encoded request or response of this stream."""
    STREAM_ABORT = 4
    """Engine to servicer: end this stream with the encoded google.rpc.Status in the payload."""
    DRAIN = 5
    """Servicer to engine: take no new sessions; answer DRAINED when none is left."""
    SHUTDOWN = 6
    """Servicer to engine: return from the entry now."""
    READY = 7
    """Engine to servicer: loaded and warmed; payload: encoded GetReplicaInfoResponse."""
    LOAD = 8
    """Engine to servicer, about four times a second: encoded LoadReport."""
    FATAL = 9
    """Engine to servicer: why the engine cannot work, for people; UTF-8 text."""
    TOKENIZER = 10
    """Engine to servicer, before READY: encoded GetTokenizerResponse, whole or in pieces."""
    DRAINED = 11
    """Engine to servicer: no session is left after a DRAIN."""
    SESSION_SPAN = 12
    """Engine to servicer, when a traced session has ended: encoded SessionSpan."""
    STREAM_TAKEN = 13
    """Servicer to engine, at intervals: bytes of this stream that the peer has read since the last report; 8 bytes,
    little-endian."""
    CALL = 14
    """Servicer to engine: the encoded request of a unary call, answered by one MESSAGE or STREAM_ABORT. It has an id
    like a stream, and STREAM_CLOSED follows."""
    LINK_OPENED = 15
    """Servicer to engine: a draft opened a stream of LinkFrames; payload: its address."""
    LINK_DIAL = 16
    """Engine to servicer: open a stream of LinkFrames to the target in the payload, under this id, which is at least
    FIRST_DIALLED. STREAM_CLOSED, with the reason in its payload, tells its end."""


class Frame(NamedTuple):
    """One frame."""

    kind: FrameKind
    stream_id: int
    payload: bytes


class FrameError(ValueError):
    """Bytes that are no frame, or a payload over the limit; the connection cannot be used any more."""


_KINDS: dict[int, FrameKind] = {int(kind): kind for kind in FrameKind}


def encode_frame(kind: FrameKind, stream_id: int, payload: bytes) -> list[bytes]:
    """The buffers of one frame: one, or header and payload if the payload is large.

    Raises FrameError if the payload is over MAX_PAYLOAD_BYTES.
    """
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise _too_long(kind, len(payload))
    header = HEADER.pack(len(payload), kind, stream_id)
    return [header + payload] if len(payload) <= _JOIN_LIMIT_BYTES else [header, payload]


def report_unit(stream_buffer_bytes: int) -> int:
    """Bytes that a peer reads between two STREAM_TAKEN reports."""
    return max(1, stream_buffer_bytes // _REPORTS_PER_BUFFER)


def _too_long(kind: FrameKind, num_bytes: int) -> FrameError:
    return FrameError(f"a {kind.name} frame of {num_bytes} bytes is over the limit of {MAX_PAYLOAD_BYTES}")


class FrameDecoder:
    """Splits a byte stream into frames; keeps an incomplete frame for the next call.

    Each byte is copied at most twice, and a frame in many pieces is not scanned again.
    """

    def __init__(self, most_payload_bytes: int = MAX_PAYLOAD_BYTES) -> None:
        self._buffer = bytearray()
        self._most_payload_bytes = most_payload_bytes

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that `data` completes, in order. Raises FrameError on an unknown kind or length."""
        buffer = self._buffer
        buffer += data
        available = len(buffer)
        frames: list[Frame] = []
        start = 0
        while available - start >= HEADER.size:
            length, kind_number, stream_id = HEADER.unpack_from(buffer, start)
            kind = _KINDS.get(kind_number)
            if kind is None:
                raise FrameError(f"unknown frame kind {kind_number}")
            if length > self._most_payload_bytes:
                raise _too_long(kind, length)
            payload_start = start + HEADER.size
            end = payload_start + length
            if end > available:
                break
            frames.append(Frame(kind, stream_id, bytes(memoryview(buffer)[payload_start:end])))
            start = end
        if start:
            del buffer[:start]
        return frames
