"""A TCP proxy whose connections stay open in silence, as those to a machine that lost its power or network."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_READ_BYTES = 65536


class BlackHole:
    """Forwards to an address until `swallow`, after which no data arrives in either direction.

    Without an address it never forwards: connections are accepted, and never answered.
    """

    def __init__(self, upstream: str | None) -> None:
        self._upstream = upstream
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_open = asyncio.Event()
        self._drip_s: float | None = None
        if upstream is not None:
            self._is_open.set()
        self.address = ""
        self.num_accepted = 0

    def swallow(self) -> None:
        """Stop forwarding, also for new connections."""
        self._is_open.clear()

    def swallow_one_way(self, drip_s: float) -> None:
        """Swallow what clients send; what comes back to them comes a byte at a time, so that they hear no silence."""
        self._drip_s = drip_s

    def forward(self) -> None:
        """Forward the held data, and all later data."""
        self._is_open.set()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection."""
        self.num_accepted += 1
        self._writers.add(writer)
        await self._is_open.wait()
        assert self._upstream is not None
        host, _, port = self._upstream.rpartition(":")
        try:
            up_reader, up_writer = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.transport.abort()
            return
        self._writers.add(up_writer)
        for source, sink, is_back in ((reader, up_writer, False), (up_reader, writer, True)):
            task = asyncio.create_task(self._relay(source, sink, is_back=is_back))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _relay(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, is_back: bool) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(_READ_BYTES):
                await self._is_open.wait()
                if self._drip_s is not None:
                    await self._drip(data if is_back else b"", sink, self._drip_s)
                sink.write(data)
                await sink.drain()
        if self._drip_s is not None:
            await asyncio.Event().wait()
        await self._is_open.wait()  # A closed connection must not be noticed either.
        sink.close()

    async def _drip(self, data: bytes, sink: asyncio.StreamWriter, each_s: float) -> None:
        for byte in data:
            await asyncio.sleep(each_s)
            sink.write(bytes([byte]))
        await asyncio.Event().wait()

    def close(self) -> None:
        """Abort all connections."""
        for task in self._tasks:
            task.cancel()
        for writer in self._writers:
            writer.transport.abort()


@asynccontextmanager
async def black_hole(upstream: str | None = None) -> AsyncIterator[BlackHole]:
    """A proxy on a free port, closed at the end."""
    hole = BlackHole(upstream)
    server = await asyncio.start_server(hole.accept, "127.0.0.1", 0)
    hole.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield hole
    finally:
        server.close()
        hole.close()
