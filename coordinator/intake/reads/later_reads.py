"""Streams that wait for a message after their first: any number may, unless memory runs short.

A stream may idle for minutes, or send the next request while others of it run, so no number of reads can be set. gRPC
tells nothing before a message is complete. So while more streams wait than messages fit into memory, the process's
memory is looked at; when it runs short, those that do not fit are cut off, first those of the caller with the most.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import islice

from specdec.wire.errors import Overloaded

_LOOK_S = 0.02
"""Seconds between two looks at the memory: at 1 GB/s 20 MB arrive in that time."""
_RETRY_S = 1.0
"""Seconds that a caller who was cut off is told to wait."""


class LaterReads:
    """The streams of one process that wait for a message after their first."""

    def __init__(self, num_fitting: int, is_short: Callable[[], bool]) -> None:
        """`num_fitting`: messages of the largest size that fit into memory. `is_short`: whether memory runs short."""
        self._num_fitting = num_fitting
        self._is_short = is_short
        self._reads: dict[asyncio.Timeout, str] = {}
        """The caller of each; the oldest first."""
        self._watching: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def reading(self, caller: str) -> AsyncIterator[None]:
        """Run a read. Raises Overloaded if it is cut off (TOO_MANY_UNREAD)."""
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._reads[limit] = caller
                if len(self._reads) > self._num_fitting and self._watching is None:
                    self._watching = asyncio.create_task(self._watch())
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            message = f"memory is short, and more than {self._num_fitting} streams wait for a request: use fewer"
            raise Overloaded(message, retry_after_s=_RETRY_S, reason="TOO_MANY_UNREAD") from None
        finally:
            del self._reads[limit]

    async def _watch(self) -> None:
        try:
            while len(self._reads) > self._num_fitting:
                if self._is_short():
                    self._cut_off(len(self._reads) - self._num_fitting)
                await asyncio.sleep(_LOOK_S)
        finally:
            self._watching = None

    def _cut_off(self, num: int) -> None:
        nth, all_of = Counter[str](), Counter(self._reads.values())
        order = list[tuple[int, int, asyncio.Timeout]]()
        for limit, caller in self._reads.items():
            nth[caller] += 1
            order.append((nth[caller], all_of[caller], limit))
        order.sort(key=lambda entry: entry[:2], reverse=True)
        for *_, limit in islice(order, num):
            limit.reschedule(asyncio.get_running_loop().time())
