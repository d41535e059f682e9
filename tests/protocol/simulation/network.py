"""The network: delays, cuts, partitions. Streams are ordered; nothing else is."""

from __future__ import annotations

import contextvars
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.protocol.simulation.pipes import REFUSED, RESET, SILENCE, Call, Pipe
from tests.protocol.simulation.virtual_loop import Process, VirtualLoop

if TYPE_CHECKING:
    from tests.protocol.simulation.server import Server

KEEPALIVE_S = 2.0
"""After so long each end of a connection notices that nothing comes through any more."""
_OUTSIDE = contextvars.Context()


class Network:
    """Carries calls between processes, which are known by their names: a restarted one has the name of the former."""

    def __init__(self, loop: VirtualLoop, rng: random.Random, *, is_manual: bool = False) -> None:
        """With `is_manual` nothing arrives, and nothing is lost, by itself: who explores decides (`Pipe.deliver`)."""
        self.loop = loop
        self.servers: dict[str, Server] = {}
        """By address."""
        self.calls: dict[Call, None] = {}
        """Those that one end at least takes for alive."""
        self.base_delay_s = 0.001
        self.delays: dict[tuple[str, str], float] = {}
        """Of links that are slower, by the names of source and sink."""
        self.is_manual = is_manual
        self._rng = rng
        self._blocked: dict[tuple[str, str], int] = {}
        self._num_blocks = 0
        self._num_calls = 0

    def next_number(self) -> int:
        """Of a call."""
        self._num_calls += 1
        return self._num_calls

    def open(
        self,
        client: Process,
        address: str,
        method: str,
        metadata: tuple[tuple[str, str], ...] = (),
        deadline_s: float | None = None,
    ) -> Call:
        """Begin a call; what becomes of it is seen on its pipes."""
        server = self.servers.get(address)
        name = address.partition(":")[0]
        life = server.process if server is not None else Process(self.loop, name)
        call = Call(self, method, client, life, metadata, deadline_s)
        self.calls[call] = None
        if server is None or not server.is_listening:
            call.is_server_done = True
            call.responses.cut(0, REFUSED)
        else:
            server.accept(call)
        if self._is_blocked(client.name, name) or self._is_blocked(name, client.name):
            self._expire_block(client.name, name)
        return call

    def forget(self, call: Call) -> None:
        """An end of a call is done with it."""
        if call.is_client_done and call.is_server_done:
            self.calls.pop(call, None)

    # --- what goes wrong

    def cut(self, first: str, second: str, *, late: str = "") -> int:
        """Cut all calls between two names; each direction loses a suffix of what is on its way.

        The end that is named `late` does not notice before its keepalive does. Returns how many there were.
        """
        calls = [call for call in self.calls if call.is_between(first, second)]
        for call in calls:
            for pipe in call.pipes:
                pipe.cut(self._num_kept(pipe), RESET, KEEPALIVE_S if pipe.sink.name == late else 0.0)
        return len(calls)

    def died(self, process: Process) -> None:
        """The kernel closes the connections of a process that has been killed."""
        for call in list(self.calls):
            for pipe, other in (call.pipes, call.pipes[::-1]):
                if pipe.source is process:
                    pipe.cut(self._num_kept(pipe), RESET)
                    other.close()
                    call.is_client_done |= call.client is process
                    call.is_server_done |= call.server is process
            self.forget(call)

    def block(self, source: str, sink: str) -> None:
        """Nothing arrives from `source` at `sink` until `unblock`; after a while the ends of their calls notice."""
        self._num_blocks += 1
        self._blocked[source, sink] = self._num_blocks
        self._expire_block(source, sink)

    def unblock(self) -> None:
        """All links carry what is sent, and what has waited."""
        self._blocked.clear()
        for call in list(self.calls):
            for pipe in call.pipes:
                self._flush(pipe)

    def frozen(self, process: Process) -> None:
        """A process answers no pings until it is thawed."""
        self.after(KEEPALIVE_S, self._silent, process)

    # --- what pipes tell

    def on_sent(self, pipe: Pipe) -> None:
        """Something is on its way."""
        if self.is_manual:
            return
        delay_s = self.delays.get((pipe.source.name, pipe.sink.name), self.base_delay_s)
        due_s = max(pipe.last_due_s, self.loop.time() + delay_s * self._rng.uniform(0.5, 1.5))
        pipe.last_due_s = due_s
        self.loop.call_at(due_s, self._due, pipe, context=_OUTSIDE)

    def on_broken(self, pipe: Pipe) -> None:
        """A pipe ended without its writer's doing: its reader learns it, after what arrives before."""
        if self.is_manual:
            return
        end = pipe.sent.pop()
        if self._is_blocked(pipe.source.name, pipe.sink.name):
            pipe.sent.clear()
        pipe.sent.append(end)
        while pipe.sent:
            pipe.deliver()

    def after(self, delay_s: float, callback: Callable[..., object], *args: Any) -> None:
        """Call back later, outside all processes."""
        if delay_s == 0:
            callback(*args)
        else:
            self.loop.call_at(self.loop.time() + delay_s, callback, *args, context=_OUTSIDE)

    def _due(self, pipe: Pipe) -> None:
        pipe.num_due += 1
        self._flush(pipe)

    def _flush(self, pipe: Pipe) -> None:
        while pipe.num_due and pipe.sent and not self._is_blocked(pipe.source.name, pipe.sink.name):
            pipe.num_due -= 1
            pipe.deliver()

    def _num_kept(self, pipe: Pipe) -> int:
        return len(pipe.sent) if self.is_manual else self._rng.randint(0, len(pipe.sent))

    def _is_blocked(self, source: str, sink: str) -> bool:
        return (source, sink) in self._blocked

    def _expire_block(self, first: str, second: str) -> None:
        numbers = [self._blocked.get(way) for way in ((first, second), (second, first))]

        def expire() -> None:
            now = [self._blocked.get(way) for way in ((first, second), (second, first))]
            if any(number is not None and number == then for number, then in zip(now, numbers, strict=True)):
                self._break(lambda call: call.is_between(first, second))

        self.after(KEEPALIVE_S, expire)

    def _silent(self, process: Process) -> None:
        if process.is_frozen:
            self._break(lambda call: process in (call.client, call.server))

    def _break(self, is_meant: Callable[[Call], bool]) -> None:
        for call in [call for call in self.calls if is_meant(call)]:
            for pipe in call.pipes:
                pipe.cut(0, SILENCE)
