"""Requests that are being received. Each may hold a message of the full size, so only a number may be under way.

gRPC receives a message as a whole and tells nothing before. A short request takes a moment, so a large message or a
slow client is under way longest. Above the limit the oldest of the caller with the most is cut off, if it does not come
within a moment: many short requests may begin at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from specdec.wire.errors import Overloaded

_RETRY_S = 1.0
"""Seconds that a caller who was cut off is told to wait."""
_LEAST_READS = 8
"""Reads at once, whatever the memory: a short message does not reach its full size."""
_MOMENT_S = 0.25
"""Seconds that every read has, however many there are. What comes in that time is bounded by the network."""


class PendingReads:
    """The calls of one process that wait for their message."""

    def __init__(self, budget_bytes: int, max_message_bytes: int) -> None:
        """`budget_bytes`: for all messages that are under way."""
        self._most = max(_LEAST_READS, budget_bytes // max_message_bytes)
        self._of_caller: dict[str, dict[object, tuple[asyncio.Timeout, float]]] = {}
        """Reads by caller with the time of their beginning, the oldest first."""
        self._num = 0

    @asynccontextmanager
    async def reading(self, caller: str) -> AsyncIterator[None]:
        """Run a read. Raises Overloaded if it is cut off (TOO_MANY_UNREAD)."""
        key, limit = object(), asyncio.timeout(None)
        try:
            async with limit:
                self._of_caller.setdefault(caller, {})[key] = limit, asyncio.get_running_loop().time()
                self._num += 1
                if self._num > self._most:
                    self._cut_off()
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            message = f"more than {self._most} requests are being received: send the message at once"
            raise Overloaded(message, retry_after_s=_RETRY_S, reason="TOO_MANY_UNREAD") from None
        finally:
            self._forget(caller, key)

    def _cut_off(self) -> None:
        caller = max(self._of_caller, key=lambda each: len(self._of_caller[each]))
        key, (limit, began_s) = next(iter(self._of_caller[caller].items()))
        limit.reschedule(began_s + _MOMENT_S)
        self._forget(caller, key)

    def _forget(self, caller: str, key: object) -> None:
        reads = self._of_caller.get(caller, {})
        if reads.pop(key, None) is not None:
            self._num -= 1
        if not reads:
            self._of_caller.pop(caller, None)
