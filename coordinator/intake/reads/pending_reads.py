"""Requests that are being received. Each may hold a message of the full size, so only a number may be under way.

gRPC receives a message as a whole and tells nothing before. Until it is asked for the message, flow control holds the
sender back. So above the limit requests wait their turn: who has fewest under way is next, however many others wait. A
short request takes a moment, and a large message or a slow client longest: while others wait, the oldest of the caller
with the most is cut off if it does not come within a moment.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import islice

from specdec.wire.errors import Overloaded

_RETRY_S = 1.0
"""Seconds that a caller who was cut off is told to wait."""
_LEAST_READS = 8
"""Reads at once, whatever the memory: a short message does not reach its full size."""
_MOMENT_S = 0.25
"""Seconds that every read has, whoever waits."""
_LOOKED_AT = 256
"""Waiting callers at the head of the line among which the next one is chosen: a long line must not cost more."""
_MOST_WAIT_S = 10.0
"""Longest wait for a turn."""


@dataclass(eq=False, slots=True)
class _Read:
    caller: str
    turn: asyncio.Future[None]
    limit: asyncio.Timeout
    began_s: float = 0.0


class PendingReads:
    """The calls of one process that wait for their message."""

    def __init__(self, budget_bytes: int, max_message_bytes: int) -> None:
        """`budget_bytes`: for all messages that are under way."""
        self._most = max(_LEAST_READS, budget_bytes // max_message_bytes)
        self._under_way: dict[_Read, None] = {}
        """The oldest first."""
        self._waiting: dict[str, dict[_Read, None]] = {}
        """By caller, the first that came first. Whose turn it was is last."""
        self._num_waiting = 0
        self._num_of: Counter[str] = Counter()
        """Reads under way by caller."""

    @asynccontextmanager
    async def reading(self, caller: str) -> AsyncIterator[None]:
        """Run a read when it is its turn. Raises Overloaded if it is cut off, or waits too long (TOO_MANY_UNREAD)."""
        loop = asyncio.get_running_loop()
        read = _Read(caller, loop.create_future(), asyncio.timeout(_MOST_WAIT_S))
        try:
            async with read.limit:
                self._waiting.setdefault(caller, {})[read] = None
                self._num_waiting += 1
                self._let_begin()
                await read.turn
                yield
        except TimeoutError:
            if not read.limit.expired():
                raise
            message = f"more than {self._most} requests are being received: send the message at once"
            raise Overloaded(message, retry_after_s=_RETRY_S, reason="TOO_MANY_UNREAD") from None
        finally:
            self._forget(read)

    def _let_begin(self) -> None:
        while self._waiting and len(self._under_way) < self._most:
            caller = min(islice(self._waiting, _LOOKED_AT), key=self._num_of.__getitem__)
            read = next(iter(self._waiting[caller]))
            self._leave_line(read)
            if caller in self._waiting:
                self._waiting[caller] = self._waiting.pop(caller)
            if read.limit.expired():  # in this turn of the event loop, and its own task has not run
                continue
            read.began_s = asyncio.get_running_loop().time()
            read.limit.reschedule(None)
            self._under_way[read] = None
            self._num_of[read.caller] += 1
            if not read.turn.done():
                read.turn.set_result(None)
        for _ in range(min(self._num_waiting, len(self._under_way)) - self._num_cut_off()):
            self._cut_off()

    def _num_cut_off(self) -> int:
        return sum(read.limit.when() is not None for read in self._under_way)

    def _cut_off(self) -> None:
        left = [read for read in self._under_way if read.limit.when() is None]
        oldest = max(left, key=lambda read: self._num_of[read.caller])
        oldest.limit.reschedule(oldest.began_s + _MOMENT_S)

    def _forget(self, read: _Read) -> None:
        self._leave_line(read)
        if read in self._under_way:
            del self._under_way[read]
            self._num_of[read.caller] -= 1
            if not self._num_of[read.caller]:
                del self._num_of[read.caller]
        self._let_begin()

    def _leave_line(self, read: _Read) -> None:
        line = self._waiting.get(read.caller, {})
        if read in line:
            del line[read]
            self._num_waiting -= 1
            if not line:
                del self._waiting[read.caller]
