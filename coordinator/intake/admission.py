"""Admission: how many requests run at once, and who waits for a place."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from specdec.rpc.errors import Overloaded

_LEAST_RETRY_S = 0.1
"""Asking more often would cost more than it gains."""
_MOST_RETRY_S = 30.0
"""The estimate is a mean; a client that waits longer by its word may miss many places."""
_FIRST_GUESS_S = 1.0
"""How long a place is held, before any was given back."""
_SMOOTHING = 0.1
"""The mean is over about the last ten places given back."""


@dataclass(order=True, slots=True)
class _Waiter:
    priority: int
    arrival: int
    admitted: asyncio.Future[None] = field(compare=False)

    @property
    def has_place(self) -> bool:
        return self.admitted.done() and not self.admitted.cancelled() and self.admitted.exception() is None


class AdmissionQueue:
    """A bounded priority queue in front of a bounded number of places.

    Lower priorities first, then first come, first served. When the queue is full, a newcomer takes the place of the
    last in line if it goes before it; otherwise it is refused. Costs O(log waiting), and O(waiting) when full.
    """

    def __init__(
        self,
        max_running: int,
        max_waiting: int,
        queue_timeout_s: float | None,
        on_change: Callable[[int, int], None] = lambda num_running, num_waiting: None,
    ) -> None:
        """`on_change` is called with how many requests run and wait whenever that has changed."""
        self.max_running = max_running
        self.max_waiting = max_waiting
        self.num_running = 0
        self._queue_timeout_s = queue_timeout_s
        self._waiters: list[_Waiter] = []
        self._num_arrived = 0
        self._mean_held_s = _FIRST_GUESS_S
        self._on_change = on_change

    @property
    def num_waiting(self) -> int:
        """Requests in line."""
        return len(self._waiters)

    async def acquire(self, priority: int) -> Callable[[], None]:
        """Wait for a place; returns the function that gives it back (calling it again does nothing).

        Raises:
            Overloaded: the queue is full, or the wait was too long; says when to retry.
        """
        if self.num_running >= self.max_running or self._waiters:
            await self._wait(priority)
        else:
            self.num_running += 1
            self._changed()
        return self._releaser()

    def retry_after_s(self) -> float:
        """When a place is likely to be free for one more in line."""
        wait_s = self._mean_held_s * (len(self._waiters) + 1) / max(1, self.max_running)
        return min(_MOST_RETRY_S, max(_LEAST_RETRY_S, wait_s))

    async def _wait(self, priority: int) -> None:
        self._num_arrived += 1
        waiter = _Waiter(priority, self._num_arrived, asyncio.get_running_loop().create_future())
        self._make_room(waiter)
        heapq.heappush(self._waiters, waiter)
        self._changed()
        try:
            async with asyncio.timeout(self._queue_timeout_s):
                await waiter.admitted
        except TimeoutError:
            if waiter.has_place:  # it came in the same turn
                return
            self._remove(waiter)
            raise Overloaded(
                f"no place became free within {self._queue_timeout_s} s",
                retry_after_s=self.retry_after_s(),
                reason="QUEUE_TIMEOUT",
            ) from None
        except asyncio.CancelledError:
            if waiter.has_place:  # it came in the same turn
                self._give_back()
            self._remove(waiter)
            raise

    def _make_room(self, newcomer: _Waiter) -> None:
        if len(self._waiters) < self.max_waiting:
            return
        last = max(self._waiters, default=None)
        error = Overloaded(
            f"{self.num_running} requests run and {len(self._waiters)} wait",
            retry_after_s=self.retry_after_s(),
        )
        if last is None or last < newcomer:
            raise error
        self._remove(last)
        last.admitted.set_exception(error)

    def _remove(self, waiter: _Waiter) -> None:
        if waiter in self._waiters:
            self._waiters = [w for w in self._waiters if w is not waiter]
            heapq.heapify(self._waiters)
            self._changed()

    def _releaser(self) -> Callable[[], None]:
        started_s = time.monotonic()
        is_held = True

        def release() -> None:
            nonlocal is_held
            if is_held:
                is_held = False
                self._mean_held_s += _SMOOTHING * (time.monotonic() - started_s - self._mean_held_s)
                self._give_back()

        return release

    def _give_back(self) -> None:
        while self._waiters:
            waiter = heapq.heappop(self._waiters)
            if not waiter.admitted.done():
                waiter.admitted.set_result(None)
                self._changed()
                return
        self.num_running -= 1
        self._changed()

    def _changed(self) -> None:
        self._on_change(self.num_running, self.num_waiting)
