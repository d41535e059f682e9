"""Bytes between two ends of a link, forwarded as the link's state says."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from collections import deque
from dataclasses import dataclass, field

from bench.delay_proxy import SOCKET_NAME, SPOILT

READ_BYTES = 64 * 1024
MAX_PENDING_BYTES = 1024 * 1024
"""Of one direction of a connection; above, nothing more is read, as a full window would have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """How bytes travel in one direction. Order is kept always: TCP would."""

    held: bool = False
    """Nothing arrives. What is sent meanwhile, ends of connections too, arrives when this is over."""
    delay_s: float = 0.0
    jitter_s: float = 0.0
    """Added to the delay of each piece, at random up to this."""
    max_piece_bytes: int = 0
    """Pieces of at most this many bytes; 0: as they come."""
    piece_gap_s: float = 0.0
    """Between two pieces of one connection."""
    loss: float = 0.0
    """Share of pieces that get lost and are sent again, with all that follows waiting behind them."""
    resend_s: float = 0.2

    @property
    def is_plain(self) -> bool:
        """Bytes go on as they come."""
        return self == PLAIN


PLAIN = Flow()


class Direction:
    """One direction of all connections of a link; `flow` may be exchanged at any time."""

    def __init__(self) -> None:
        self._flow = PLAIN
        self._open = asyncio.Event()
        self._open.set()
        self._plain = asyncio.Event()
        self._plain.set()

    @property
    def flow(self) -> Flow:
        """How bytes travel now."""
        return self._flow

    @flow.setter
    def flow(self, flow: Flow) -> None:
        self._flow = flow
        if flow.held:
            self._open.clear()
        else:
            self._open.set()
        if flow.is_plain:
            self._plain.set()
        else:
            self._plain.clear()

    async def plain_within(self, wait_s: float) -> None:
        """Return after this long, or as soon as bytes go on as they come: that hurries what is under way."""
        if wait_s > 0 and not self._plain.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._plain.wait(), wait_s)

    async def unheld(self) -> None:
        """Return when bytes arrive."""
        await self._open.wait()


@dataclass(slots=True)
class Link:
    """From one source to one destination."""

    name: str
    to: tuple[str, int]
    forth: Direction = field(default_factory=Direction)
    """From the source to the destination."""
    back: Direction = field(default_factory=Direction)
    is_between_hosts: bool = False
    """Names of Unix sockets lead nowhere at the other end."""
    connections: set[Connection] = field(default_factory=set)
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def set_flow(self, forth: Flow, back: Flow) -> None:
        """Exchange both directions."""
        self.forth.flow, self.back.flow = forth, back

    def reset(self) -> int:
        """End all connections at once, at both ends; returns how many there were."""
        connections = list(self.connections)
        for connection in connections:
            connection.abort()
        return len(connections)

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one accepted connection to its end."""
        connection = Connection(self, writer)
        self.connections.add(connection)
        try:
            await connection.run(reader)
        finally:
            self.connections.discard(connection)
            connection.abort()


class Connection:
    """A connection of a link: the accepted end, and the one that was opened for it."""

    def __init__(self, link: Link, source: asyncio.StreamWriter) -> None:
        self._link = link
        self._source = source
        self._destination: asyncio.StreamWriter | None = None
        self._gone = asyncio.Event()

    async def run(self, from_source: asyncio.StreamReader) -> None:
        """Return when both directions have ended, or one was broken."""
        link = self._link
        # A SYN would not arrive, nor its answer; that the source's end is accepted already cannot be helped.
        await link.forth.unheld()
        await link.back.unheld()
        if self._gone.is_set():
            return
        try:
            from_destination, self._destination = await asyncio.open_connection(*link.to)
        except OSError:
            return
        for writer in (self._source, self._destination):
            writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        pumps = [
            asyncio.create_task(self._pump(link.forth).run(from_source, self._destination)),
            asyncio.create_task(self._pump(link.back).run(from_destination, self._source)),
        ]
        gone = asyncio.create_task(self._gone.wait())
        tasks = [*pumps, asyncio.create_task(asyncio.wait(pumps, return_when=asyncio.FIRST_EXCEPTION)), gone]
        try:
            await asyncio.wait(tasks[2:], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _pump(self, direction: Direction) -> Pump:
        return Pump(direction, self._link.rng, is_between_hosts=self._link.is_between_hosts)

    def abort(self) -> None:
        """Reset both ends."""
        self._gone.set()
        for writer in (self._source, self._destination):
            if writer is not None and not writer.transport.is_closing():
                with contextlib.suppress(OSError):
                    at_once = struct.pack("ii", 1, 0)
                    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
                writer.transport.abort()


class Pump:
    """Carries the bytes of one connection in one direction."""

    def __init__(self, direction: Direction, rng: random.Random, *, is_between_hosts: bool) -> None:
        self._direction = direction
        self._is_between_hosts = is_between_hosts
        self._rng = rng
        self._pending: deque[tuple[float, bytes]] = deque()
        self._num_pending_bytes = 0
        self._changed = asyncio.Event()

    async def run(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry until the end has arrived. Raises OSError when an end is broken."""
        delivering = asyncio.create_task(self._deliver(writer))
        try:
            while True:
                try:
                    data = await reader.read(READ_BYTES)
                except OSError:
                    # What was sent before a reset may arrive or not; that something broke does arrive.
                    await self._direction.unheld()
                    raise
                if self._is_between_hosts:
                    data = data.replace(SOCKET_NAME, SPOILT)
                if data and not self._pending and self._direction.flow.is_plain and not delivering.done():
                    writer.write(data)
                    await writer.drain()
                    continue
                self._add(data)
                if not data:
                    break
                while self._num_pending_bytes > MAX_PENDING_BYTES and not delivering.done():
                    self._changed.clear()
                    await self._changed.wait()
                if delivering.done():
                    break
            await delivering
        finally:
            delivering.cancel()
            await asyncio.gather(delivering, return_exceptions=True)

    def _add(self, data: bytes) -> None:
        flow, now = self._direction.flow, asyncio.get_running_loop().time()
        due_s = now + flow.delay_s + self._rng.uniform(0.0, flow.jitter_s)
        size = flow.max_piece_bytes or len(data) or 1
        for start in range(0, len(data), size):
            if flow.loss and self._rng.random() < flow.loss:
                due_s = max(due_s, now) + flow.resend_s
            self._pending.append((due_s, data[start : start + size]))
            due_s += flow.piece_gap_s
        if not data:
            self._pending.append((due_s, b""))
        self._num_pending_bytes += len(data)
        self._changed.set()

    async def _deliver(self, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while not self._pending:
                self._changed.clear()
                await self._changed.wait()
            due_s, data = self._pending[0]
            await self._direction.plain_within(due_s - loop.time())
            await self._direction.unheld()
            if not data:
                if writer.can_write_eof():
                    writer.write_eof()
                return
            writer.write(data)
            await writer.drain()
            # Only now: what comes meanwhile must not overtake it.
            self._pending.popleft()
            self._num_pending_bytes -= len(data)
            self._changed.set()
