"""Responses for coordinators: all results for one of them leave in one message, or in several bounded ones.

Two limits hold for each stream. No message exceeds its coordinator's message limit. And the servicer gets no more than
it has room for: it reports what the coordinator has read, and further messages wait here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from google.rpc import code_pb2

from specdec.replica.bridge.frames import EnginePort, FrameKind, report_unit
from specdec.replica.worker.errors import SessionFailure, stream_status
from specdec.replica.worker.role import Wire
from specdec.v1 import common_pb2 as pb
from specdec.wire.message_sizes import frame_bytes, frame_slices, most_bytes, most_entry_bytes


@dataclass(frozen=True, slots=True)
class ResponseLimits:
    """Limits in bytes; see the settings of the same names."""

    max_message_bytes: int = 16 * 2**20
    """Message limit of coordinators that report none."""
    stream_buffer_bytes: int = 32 * 2**20


@dataclass(frozen=True, slots=True)
class TooLarge:
    """A result above its coordinator's message limit. It was dropped, with the session's later results."""

    stream_id: int
    session_id: str
    epoch: int
    num_bytes: int
    most_bytes: int

    @property
    def failure(self) -> SessionFailure:
        """The failure that ends this session."""
        message = f"a result of {self.num_bytes} bytes exceeds the coordinator's limit of {self.most_bytes}"
        return SessionFailure(code_pb2.FAILED_PRECONDITION, "MESSAGE_TOO_LARGE", f"max_message_bytes: {message}")


@dataclass(slots=True)
class _Stream:
    message_bytes: int
    """Its coordinator's message limit."""
    response: Any
    """The next message, with the queued results: each is copied once, into it."""
    attached: pb.Attached | None = None
    waiting: deque[bytes] = field(default_factory=deque)
    """Messages that the servicer has no room for."""
    num_untaken_bytes: int = 0
    """Bytes handed to the servicer that are not reported as read."""
    num_waiting_bytes: int = 0
    full_since_s: float = 0.0
    """Loop time at which messages began to wait, or the coordinator last read some."""


class PendingResponses:
    """Results and answers to attaches, by stream."""

    def __init__(self, port: EnginePort, wire: Wire, limits: ResponseLimits) -> None:
        self.full: set[int] = set()
        """Streams whose coordinators must read before more is sent."""
        self._port = port
        self._wire = wire
        self.limits = limits
        self._window_bytes = limits.stream_buffer_bytes // 2
        self._unit_bytes = report_unit(limits.stream_buffer_bytes)
        self._streams: dict[int, _Stream] = {}

    def opened(self, stream_id: int, told_bytes: int) -> int:
        """A coordinator attached with a message limit (0: none reported); returns the limit that applies."""
        stream = self._stream(stream_id)
        stream.message_bytes = most_bytes(told_bytes, self.limits.max_message_bytes)
        return stream.message_bytes

    def add(self, stream_id: int, session_id: str, epoch: int, **body: Any) -> None:
        """Queue a result; `body` is the one field of its oneof."""
        self._stream(stream_id).response.results.add(session_id=session_id, epoch=epoch, **body)

    def attached(self, stream_id: int, answer: pb.Attached) -> None:
        """Queue the answer to an attach; it leads the stream's next message."""
        self._stream(stream_id).attached = answer

    @property
    def streams(self) -> set[int]:
        """Streams with queued results or answers."""
        return {stream_id for stream_id, s in self._streams.items() if s.response.results or s.attached is not None}

    @property
    def has_attached(self) -> bool:
        """Whether an attach waits for its answer, which carries a load report."""
        return any(stream.attached is not None for stream in self._streams.values())

    def drop(self, stream_id: int) -> None:
        """Drop everything queued for a stream that has ended."""
        self._streams.pop(stream_id, None)
        self.full.discard(stream_id)

    def abort(self, stream_id: int, code: int, reason: str, message: str) -> None:
        """End a stream with a status, and drop everything queued for it."""
        self.drop(stream_id)
        self._port.send(FrameKind.STREAM_ABORT, stream_id, stream_status(code, reason, message).SerializeToString())

    def taken(self, stream_id: int, num_bytes: int, now_s: float) -> None:
        """A coordinator has read `num_bytes` more of its stream: hand out as much as there is room for."""
        stream = self._streams.get(stream_id)
        if stream is None:
            return
        stream.num_untaken_bytes = max(0, stream.num_untaken_bytes - num_bytes)
        stream.full_since_s = now_s
        while stream.waiting and self._has_room(stream, len(stream.waiting[0])):
            message = stream.waiting.popleft()
            stream.num_waiting_bytes -= len(message)
            self._hand_out(stream_id, stream, message)
        if not stream.waiting:
            self.full.discard(stream_id)

    def waiting_bytes(self, stream_id: int) -> int:
        """Bytes of messages that the servicer has no room for."""
        stream = self._streams.get(stream_id)
        return 0 if stream is None else stream.num_waiting_bytes

    def not_read(self, now_s: float, patience_s: float) -> list[int]:
        """Full streams whose coordinators have read nothing for `patience_s`."""
        return [stream_id for stream_id in self.full if now_s - self._streams[stream_id].full_since_s >= patience_s]

    def flush(
        self,
        streams: Iterable[int],
        now_s: float,
        load: pb.LoadReport | None,
        load_on_attach: pb.LoadReport | None = None,
    ) -> list[TooLarge]:
        """Send each stream its queued results; returns the results that are too large.

        `load` goes along if there is a report; a stream that has just attached gets `load_on_attach`.
        """
        too_large: list[TooLarge] = []
        for stream_id in streams:
            stream = self._stream(stream_id)
            for message in self._messages(stream_id, stream, load, load_on_attach, too_large):
                if not stream.waiting and self._has_room(stream, len(message)):
                    self._hand_out(stream_id, stream, message)
                    continue
                if not stream.waiting:
                    stream.full_since_s = now_s
                    self.full.add(stream_id)
                stream.waiting.append(message)
                stream.num_waiting_bytes += len(message)
        return too_large

    def _messages(
        self,
        stream_id: int,
        stream: _Stream,
        load: pb.LoadReport | None,
        load_on_attach: pb.LoadReport | None,
        too_large: list[TooLarge],
    ) -> Iterable[bytes]:
        first, stream.response = stream.response, self._wire.response()
        told = load
        if stream.attached is not None:
            first.attached.CopyFrom(stream.attached)
            stream.attached, told = None, load_on_attach
        if told is not None:
            first.load.CopyFrom(told)
        message = first.SerializeToString()
        most = frame_bytes(stream.message_bytes)
        if len(message) <= most:
            return [message]
        kept, sizes = self._that_fit(stream_id, stream, first.results, too_large)
        messages = [self._wire.response(results=kept[piece]).SerializeToString() for piece in frame_slices(sizes, most)]
        first.ClearField("results")
        return [first.SerializeToString(), *messages] if first.ByteSize() else messages

    def _that_fit(
        self, stream_id: int, stream: _Stream, results: Iterable[Any], too_large: list[TooLarge]
    ) -> tuple[list[Any], list[int]]:
        """The results that fit, and their sizes; after one that does not fit, its session's results are dropped."""
        most = most_entry_bytes(stream.message_bytes)
        kept: list[Any] = []
        sizes: list[int] = []
        cut_off: set[tuple[str, int]] = set()
        for result in results:
            size = result.ByteSize()
            opening = (result.session_id, result.epoch)
            if opening in cut_off:
                continue
            if size > most:
                cut_off.add(opening)
                too_large.append(TooLarge(stream_id, *opening, size, most))
                continue
            kept.append(result)
            sizes.append(size)
        return kept, sizes

    def _has_room(self, stream: _Stream, num_bytes: int) -> bool:
        """Whether the servicer has room.

        Less than one unit may be read but not reported yet, so that much counts as read.
        """
        untaken = stream.num_untaken_bytes
        return untaken <= self._unit_bytes or untaken + num_bytes <= self._window_bytes

    def _hand_out(self, stream_id: int, stream: _Stream, message: bytes) -> None:
        stream.num_untaken_bytes += len(message)
        self._port.send(FrameKind.MESSAGE, stream_id, message)

    def _stream(self, stream_id: int) -> _Stream:
        stream = self._streams.get(stream_id)
        if stream is None:
            stream = self._streams[stream_id] = _Stream(self.limits.max_message_bytes, self._wire.response())
        return stream
