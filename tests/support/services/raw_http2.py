"""HTTP/2 frames for requests that no gRPC client sends: unknown encodings, windows that never open."""

from __future__ import annotations

import asyncio
import itertools
from types import TracebackType

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
ACK = END_STREAM = 1
END_HEADERS = 4
INITIAL_WINDOW_SIZE = 4
FIRST_WINDOW_BYTES = 65_535
FRAME_BYTES = 16_384


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream_id.to_bytes(4, "big") + payload


def grpc_message(encoded: bytes, *, is_compressed: bool = False) -> bytes:
    """A gRPC message with its prefix, as in the body."""
    return bytes([is_compressed]) + len(encoded).to_bytes(4, "big") + encoded


class RawConnection:
    """A connection that calls gRPC methods and keeps responses undecoded.

    gRPC's C core writes names and values of headers in the clear, so that `b"grpc-status"` can be found.
    """

    def __init__(self, address: str, *, window_bytes: int = FIRST_WINDOW_BYTES) -> None:
        """`window_bytes`: bytes of each response that the peer may send; the window is never enlarged."""
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._window_bytes = window_bytes
        self._stream_ids = itertools.count(1, 2)
        self._peer_window_bytes = FIRST_WINDOW_BYTES
        self._peers_for_streams: dict[int, int] = {}
        self._connection_bytes = FIRST_WINDOW_BYTES
        self._changed = asyncio.Condition()
        self.is_closed = False
        self.headers: dict[int, bytes] = {}
        """Header blocks of each stream, trailers included."""
        self.body: dict[int, int] = {}
        """Bytes of each stream's response so far."""

    async def __aenter__(self) -> RawConnection:
        self._reader, self._writer = await asyncio.open_connection(self._host, self._port)
        window = INITIAL_WINDOW_SIZE.to_bytes(2, "big") + self._window_bytes.to_bytes(4, "big")
        self._writer.write(PREFACE + frame(SETTINGS, 0, 0, window))
        self._task = asyncio.create_task(self._read())
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._task.cancel()
        self._writer.transport.abort()
        await asyncio.gather(self._task, return_exceptions=True)

    def begin(self, path: str, **metadata: str) -> int:
        """Begin a call without its request; underscores in `metadata` become dashes. Returns the stream's id."""
        stream_id = next(self._stream_ids)
        fields = {
            ":method": "POST",
            ":scheme": "http",
            ":path": path,
            ":authority": "localhost",
            "te": "trailers",
            "content-type": "application/grpc",
            **{name.replace("_", "-"): value for name, value in metadata.items()},
        }
        block = b"".join(_literal(name, value) for name, value in fields.items())
        self._peers_for_streams[stream_id] = self._peer_window_bytes
        self._writer.write(frame(HEADERS, END_HEADERS, stream_id, block))
        return stream_id

    def send(self, data: bytes) -> None:
        """Send any bytes: frames, parts of frames, or none."""
        self._writer.write(data)

    async def call(self, path: str, body: bytes, **metadata: str) -> int:
        """Begin a call and send all of its request. Returns the stream's id."""
        stream_id = self.begin(path, **metadata)
        sent = 0
        while sent < len(body) or not body:
            room = min(FRAME_BYTES, self._connection_bytes, self._peers_for_streams[stream_id])
            if room <= 0 and body:
                async with self._changed:
                    await self._changed.wait_for(
                        lambda: (
                            self.is_closed
                            or stream_id in self.headers
                            or min(self._connection_bytes, self._peers_for_streams[stream_id]) > 0
                        )
                    )
                if self.is_closed or stream_id in self.headers:  # refused before the whole request was sent
                    return stream_id
                continue
            piece = body[sent : sent + room]
            sent += len(piece)
            self._connection_bytes -= len(piece)
            self._peers_for_streams[stream_id] -= len(piece)
            self._writer.write(frame(DATA, END_STREAM if sent == len(body) else 0, stream_id, piece))
            await self._writer.drain()
            if not body:
                break
        return stream_id

    def cancel(self, stream_id: int) -> None:
        self._writer.write(frame(RST_STREAM, 0, stream_id, (8).to_bytes(4, "big")))

    async def status(self, stream_id: int) -> int | None:
        """The gRPC status of a call, once it has ended; None when the connection ended without one."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.is_closed or b"grpc-status" in self.headers.get(stream_id, b""))
        _, name, rest = self.headers.get(stream_id, b"").partition(b"grpc-status")
        return int(rest[1 : 1 + rest[0]]) if name else None

    async def _read(self) -> None:
        try:
            while True:
                head = await self._reader.readexactly(9)
                payload = await self._reader.readexactly(int.from_bytes(head[:3], "big"))
                self._take(head[3], head[4], int.from_bytes(head[5:9], "big"), payload)
                async with self._changed:
                    self._changed.notify_all()
        except (asyncio.IncompleteReadError, ConnectionError):
            self.is_closed = True
            async with self._changed:
                self._changed.notify_all()

    def _take(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if kind == SETTINGS and not flags & ACK:
            for start in range(0, len(payload), 6):
                if int.from_bytes(payload[start : start + 2], "big") == INITIAL_WINDOW_SIZE:
                    size = int.from_bytes(payload[start + 2 : start + 6], "big")
                    for known in self._peers_for_streams:
                        self._peers_for_streams[known] += size - self._peer_window_bytes
                    self._peer_window_bytes = size
            self._writer.write(frame(SETTINGS, ACK, 0))
        elif kind == PING and not flags & ACK:
            self._writer.write(frame(PING, ACK, 0, payload))
        elif kind == WINDOW_UPDATE:
            more = int.from_bytes(payload, "big")
            if stream_id:
                self._peers_for_streams[stream_id] = self._peers_for_streams.get(stream_id, 0) + more
            else:
                self._connection_bytes += more
        elif kind == HEADERS:
            self.headers[stream_id] = self.headers.get(stream_id, b"") + payload
        elif kind == DATA:
            self.body[stream_id] = self.body.get(stream_id, 0) + len(payload)
        elif kind == RST_STREAM:
            self.headers.setdefault(stream_id, b"")


def _literal(name: str, value: str) -> bytes:
    """A header field in the clear, without indexing."""
    return b"\x00" + b"".join(_length(len(text)) + text for text in (name.encode(), value.encode()))


def _length(number: int) -> bytes:
    if number < 127:
        return bytes([number])
    rest, encoded = number - 127, b"\x7f"
    while rest >= 128:
        encoded += bytes([rest % 128 + 128])
        rest //= 128
    return encoded + bytes([rest])
