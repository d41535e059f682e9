"""Calls as they are on the way: two directions, each in order, each of which may lose its end when it is cut."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc

from tests.protocol.simulation.virtual_loop import Process, VirtualLoop

if TYPE_CHECKING:
    from tests.protocol.simulation.network import Network

_MOST_UNREAD = 8
"""Messages that a writer may be ahead of its reader: the windows of HTTP/2, in messages."""


@dataclass(frozen=True, slots=True)
class Message:
    """One encoded message."""

    payload: bytes


@dataclass(frozen=True, slots=True)
class HalfClose:
    """The client sends no more."""


@dataclass(frozen=True, slots=True)
class End:
    """Nothing follows. To a client: its status. To a server: its client has gone."""

    code: grpc.StatusCode
    details: str = ""
    trailing: tuple[tuple[str, str | bytes], ...] = ()


Item = Message | HalfClose | End
CANCELLED = End(grpc.StatusCode.CANCELLED, "Locally cancelled by application!")
RESET = End(grpc.StatusCode.UNAVAILABLE, "recvmsg:Connection reset by peer")
SILENCE = End(grpc.StatusCode.UNAVAILABLE, "ping timeout")
REFUSED = End(grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses; Connection refused")


class Pipe:
    """One direction of a call. What is delivered is what was sent, in order, up to a cut."""

    def __init__(self, network: Network, source: Process, sink: Process, on_end: Callable[[End], None]) -> None:
        self.source, self.sink = source, sink
        self.sent: deque[Item] = deque()
        """On their way."""
        self.inbox: deque[Item] = deque()
        """Delivered, and not read yet."""
        self.is_cut = False
        """What is sent from now on is lost."""
        self.has_end = False
        """An end is on its way, or has arrived."""
        self.is_over = False
        """It has arrived."""
        self.last_due_s = 0.0
        self.num_due = 0
        """How many of those on their way may arrive, as far as their delay goes."""
        self._network = network
        self._on_end = on_end
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None

    @property
    def has_room(self) -> bool:
        """The reader keeps up, or is gone."""
        return self.is_cut or len(self.sent) + len(self.inbox) < _MOST_UNREAD

    async def wait_room(self) -> None:
        """Wait until one more may be sent."""
        while not self.has_room:
            self._writer = _loop().create_future()
            await self._writer

    def put(self, item: Item) -> None:
        """Send."""
        if self.is_cut or self.has_end:
            return
        self.has_end = isinstance(item, End)
        self.sent.append(item)
        self._network.on_sent(self)

    def deliver(self) -> None:
        """The next one arrives."""
        item = self.sent.popleft()
        self.inbox.append(item)
        _wake(self._reader)
        if isinstance(item, End):
            self.is_over = True
            self._on_end(item)

    def cut(self, num_kept: int, end: End, notice_s: float = 0.0) -> None:
        """Lose what is on its way but for the first `num_kept`. The reader learns of it after `notice_s`."""
        if not self.is_cut and not self.is_over:
            self.is_cut = True
            while len(self.sent) > num_kept:
                self.sent.pop()
            self.has_end = False
            _wake(self._writer)
            self._network.after(notice_s, self.break_off, end)

    def break_off(self, end: End) -> None:
        """The reader learns that nothing follows."""
        if not self.has_end:
            self.is_cut = self.has_end = True
            self.sent.append(end)
            self._network.on_broken(self)

    def close(self) -> None:
        """The reader has gone."""
        self.is_cut = self.has_end = self.is_over = True
        self.sent.clear()
        self.inbox.clear()
        _wake(self._writer)
        _wake(self._reader)

    async def take(self) -> Item | None:
        """The next one, once it is there; None: the reader itself closed it."""
        while not self.inbox:
            if self.has_end and not self.sent:
                return None
            self._reader = _loop().create_future()
            await self._reader
        item = self.inbox.popleft()
        _wake(self._writer)
        return item


class Call:
    """One remote call between two processes."""

    def __init__(
        self,
        network: Network,
        method: str,
        client: Process,
        server: Process,
        metadata: tuple[tuple[str, str], ...],
        deadline_s: float | None,
    ) -> None:
        self.number = network.next_number()
        self.method = method
        self.client, self.server = client, server
        self.metadata = metadata
        self.deadline_s = deadline_s
        """On the virtual clock."""
        self.on_client_end: Callable[[End], None] = lambda _: None
        self.on_server_end: Callable[[End], None] = lambda _: None
        self.requests = Pipe(network, client, server, lambda end: self.on_server_end(end))
        self.responses = Pipe(network, server, client, lambda end: self.on_client_end(end))
        self.is_client_done = False
        self.is_server_done = False

    @property
    def pipes(self) -> tuple[Pipe, Pipe]:
        """There and back."""
        return self.requests, self.responses

    def is_between(self, first: str, second: str) -> bool:
        """Whether it joins these two, by their names; an empty one stands for anybody."""
        ends = (self.client.name, self.server.name)
        return any((not a or a == ends[0]) and (not b or b == ends[1]) for a, b in ((first, second), (second, first)))


def _loop() -> VirtualLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop


def _wake(future: asyncio.Future[None] | None) -> None:
    if future is not None and not future.done():
        future.set_result(None)
