"""Streams of links: frames to peers, one per turn and peer, within the peer's limits."""

from __future__ import annotations

from dataclasses import dataclass, field

from google.rpc import code_pb2

from specdec.replica.bridge.frame_codec import FIRST_DIALLED, FIRST_LOCAL
from specdec.replica.bridge.frames import EnginePort, FrameKind
from specdec.replica.worker.errors import stream_status
from specdec.replica.worker.pending_responses import ResponseLimits
from specdec.v1 import common_pb2 as pb
from specdec.wire.message_sizes import MIN_MESSAGE_BYTES, frame_bytes, frame_slices, most_bytes, most_entry_bytes

_MOST_STRAYS = 4096
"""Entries for sessions that are not joined above which a peer's stream is aborted; some cross with a session's end."""


@dataclass(slots=True)
class _Stream:
    message_bytes: int = MIN_MESSAGE_BYTES
    """The peer's message limit."""
    entries: list[tuple[pb.LinkEntry, int]] = field(default_factory=list)
    """Entries with their sizes in bytes."""
    num_untaken_bytes: int = 0
    """Bytes handed to the servicer that are not reported as read."""
    num_strays: int = 0


class LinkStreams:
    """All open streams of links of one engine."""

    def __init__(self, port: EnginePort, limits: ResponseLimits) -> None:
        self._port = port
        self._limits = limits
        self._streams: dict[int, _Stream] = {}
        self._aborted: set[int] = set()
        """Aborted streams that a peer opened, until their end is told."""
        self.socket_name = ""
        """Name of the engine's socket for others of its host; empty: there is none."""

    def __contains__(self, stream_id: int) -> bool:
        """Whether a stream is a link's, open or not: what still comes on it must not become a coordinator's."""
        return stream_id >= FIRST_DIALLED or stream_id in self._streams or stream_id in self._aborted

    def is_open(self, stream_id: int) -> bool:
        """Whether a stream has neither ended nor been aborted."""
        return stream_id in self._streams

    def opened(self, stream_id: int) -> None:
        """A stream is open: say hello."""
        self._streams[stream_id] = _Stream()
        hello = pb.LinkHello(max_message_bytes=self._limits.max_message_bytes, socket_path=self.socket_name)
        self._port.send(FrameKind.MESSAGE, stream_id, pb.LinkFrame(hello=hello).SerializeToString())

    def greeted(self, stream_id: int, hello: pb.LinkHello) -> None:
        """The peer said hello."""
        self._streams[stream_id].message_bytes = most_bytes(hello.max_message_bytes, MIN_MESSAGE_BYTES)

    def taken(self, stream_id: int, num_bytes: int) -> None:
        """The peer has read `num_bytes` more."""
        if (stream := self._streams.get(stream_id)) is not None:
            stream.num_untaken_bytes = max(0, stream.num_untaken_bytes - num_bytes)

    def closed(self, stream_id: int) -> None:
        """Forget a stream that has ended."""
        self._streams.pop(stream_id, None)
        self._aborted.discard(stream_id)

    def put(self, stream_id: int | None, session_id: str, epoch: int, **action: object) -> bool:
        """Queue an entry; `action` is the one field of its oneof. False: the stream is gone, or the entry too large."""
        stream = None if stream_id is None else self._streams.get(stream_id)
        if stream is None:
            return False
        entry = pb.LinkEntry(session_id=session_id, epoch=epoch, **action)  # type: ignore[arg-type]
        size = entry.ByteSize()
        if size > most_entry_bytes(stream.message_bytes):
            return False
        stream.entries.append((entry, size))
        return True

    def is_flooded(self, stream_id: int) -> bool:
        """Count an entry for a session that is not joined; whether the peer sent too many of them."""
        stream = self._streams[stream_id]
        stream.num_strays += 1
        return stream.num_strays > _MOST_STRAYS

    def used(self, stream_id: int) -> None:
        """A session joined: its peer works."""
        self._streams[stream_id].num_strays = 0

    def flush(self) -> list[int]:
        """Send the queued entries; returns the streams whose peers do not read."""
        full = []
        for stream_id, stream in self._streams.items():
            if not stream.entries:
                continue
            entries, stream.entries = stream.entries, []
            for piece in frame_slices((size for _, size in entries), frame_bytes(stream.message_bytes)):
                frame = pb.LinkFrame(entries=[entry for entry, _ in entries[piece]]).SerializeToString()
                self._port.send(FrameKind.MESSAGE, stream_id, frame)
                if stream_id >= FIRST_LOCAL:
                    stream.num_untaken_bytes = self._port.pending_bytes(stream_id)
                else:
                    stream.num_untaken_bytes += len(frame)
            if stream.num_untaken_bytes > self._limits.stream_buffer_bytes // 2:
                full.append(stream_id)
        return full

    def abort(self, stream_id: int, reason: str, message: str) -> None:
        """End a stream with a status."""
        self.closed(stream_id)
        if stream_id < FIRST_DIALLED:
            self._aborted.add(stream_id)
        status = stream_status(code_pb2.FAILED_PRECONDITION, reason, message)
        self._port.send(FrameKind.STREAM_ABORT, stream_id, status.SerializeToString())
