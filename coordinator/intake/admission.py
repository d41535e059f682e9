"""Admission: how many choices run at once, who waits for a place, and when a queue lasts too long to speculate."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from specdec.coordinator.intake.fair_queue import FairQueue
from specdec.coordinator.intake.line import Claim, Waiter
from specdec.wire.errors import Overloaded

_LEAST_RETRY_S = 0.1
"""Asking more often would cost more than it gains."""
_MOST_RETRY_S = 30.0
"""The estimate is a mean; a client that waits longer by its word may miss many places."""
_FIRST_GUESS_S = 1.0
"""How long a place is held, before any was given back."""
_SMOOTHING = 0.1
"""The mean is over about the last ten places given back."""
_LEAST_RETURNED = 10
"""No request is refused for what it would have to wait before the mean is of so many."""
_RECOVERED_S = 5.0
"""The queue must be empty for so long before speculation is back: it may be empty only because there is none."""


@dataclass(slots=True, eq=False)
class Place:
    """What a claim was granted; it is held until `release`."""

    claim: Claim
    _queue: AdmissionQueue = field(repr=False)
    _started_s: float = field(default_factory=time.monotonic)
    is_held: bool = True

    def release(self, used: float | None = None) -> None:
        """Give it back, and tell the work that was done, if it is known. Does nothing the second time."""
        if self.is_held:
            self.is_held = False
            self._queue.give_back(self.claim, time.monotonic() - self._started_s, used)


class AdmissionQueue:
    """A bounded waiting room, fair to tenants, in front of a bounded number of places.

    Who is next is decided by `FairQueue`. A claim of n places takes n, at most all of them, and nobody overtakes it
    while it waits for the last of them. When the room is full, the tenant that has most in it gives up its last: a
    tenant that has less is never refused for another's crowd.
    """

    def __init__(
        self,
        max_running: int,
        max_waiting: int,
        queue_timeout_s: float | None,
        on_change: Callable[[int, int], None] = lambda num_running, num_waiting: None,
    ) -> None:
        """Places, waiting claims, and the longest wait. `on_change` is told how many claims run and wait."""
        self.max_running = max_running
        self.max_waiting = max_waiting
        self.num_running = 0
        """Claims that were granted and not given back."""
        self.num_taken = 0
        """Places they take."""
        self._queue_timeout_s = queue_timeout_s
        self._queue = FairQueue()
        self._mean_held_s = _FIRST_GUESS_S
        self._num_returned = 0
        self._on_change = on_change

    @property
    def num_waiting(self) -> int:
        """Claims in line."""
        return len(self._queue)

    @property
    def num_wanted(self) -> int | None:
        """Places that the next in line needs; None: nobody waits."""
        head = self._queue.head()
        return None if head is None else self._need(head.claim)

    async def acquire(self, claim: Claim) -> Place:
        """Wait for places; whoever cancels this has none.

        Raises:
            Overloaded: the room is full (OVERLOADED), the wait was too long (QUEUE_TIMEOUT), or would end after the
                deadline (DEADLINE_UNREACHABLE); says when to retry.
        """
        if self.num_waiting or not self._fits(claim):
            self._check_deadline(claim)
            await self._wait(claim)
        else:
            self._queue.give(claim)
            self._take(claim)
        return Place(claim, self)

    def retry_after_s(self, claim: Claim) -> float:
        """When this claim is likely to be granted if it comes again."""
        return min(_MOST_RETRY_S, max(_LEAST_RETRY_S, self._wait_s(claim)))

    def give_back(self, claim: Claim, held_s: float, used: float | None) -> None:
        """For `Place`: it was held so long, for so much work."""
        self._num_returned += 1
        self._mean_held_s += _SMOOTHING * (held_s - self._mean_held_s)
        if used is not None:
            self._queue.correct(claim, used)
        self._free(claim)

    def _wait_s(self, claim: Claim) -> float:
        places = self._queue.num_places_before(claim) + self._need(claim)
        return self._mean_held_s * places / self.max_running

    def _check_deadline(self, claim: Claim) -> None:
        if claim.deadline_s is None or self._num_returned < _LEAST_RETURNED:
            return
        wait_s, left_s = self._wait_s(claim), claim.deadline_s - time.monotonic()
        if wait_s > left_s:
            raise Overloaded(
                f"a place is likely to be free in {wait_s:.1f} s, the deadline is in {max(0.0, left_s):.1f} s",
                retry_after_s=self.retry_after_s(claim),
                reason="DEADLINE_UNREACHABLE",
            )

    async def _wait(self, claim: Claim) -> None:
        waiter = self._queue.new_waiter(claim)
        self._make_room(claim)
        self._queue.push(waiter)
        self._changed()
        try:
            async with asyncio.timeout(self._queue_timeout_s):
                await waiter.admitted
        except TimeoutError:
            if waiter.has_place:  # it came in the same turn
                return
            self._leave(waiter)
            raise Overloaded(
                f"no place became free within {self._queue_timeout_s} s",
                retry_after_s=self.retry_after_s(claim),
                reason="QUEUE_TIMEOUT",
            ) from None
        except asyncio.CancelledError:
            if waiter.has_place:  # it came in the same turn
                self._queue.correct(claim, 0.0)
                self._free(claim)
            self._leave(waiter)
            raise

    def _make_room(self, claim: Claim) -> None:
        if self.num_waiting < self.max_waiting:
            return
        error = Overloaded(
            f"{self.num_running} requests run and {self.num_waiting} wait", retry_after_s=self.retry_after_s(claim)
        )
        displaced = self._queue.displaced_by(claim)
        if displaced is None:
            raise error
        self._leave(displaced)
        displaced.admitted.set_exception(error)

    def _leave(self, waiter: Waiter) -> None:
        if self._queue.remove(waiter):
            self._grant()  # it may have held up others that need fewer places
            self._changed()

    def _free(self, claim: Claim) -> None:
        self.num_running -= 1
        self.num_taken -= self._need(claim)
        self._grant()
        self._changed()

    def _grant(self) -> None:
        while (waiter := self._queue.head()) is not None:
            if waiter.admitted.done():  # cancelled this turn
                self._queue.remove(waiter)
            elif self._fits(waiter.claim):
                self._queue.pop(waiter)
                self._take(waiter.claim)
                waiter.admitted.set_result(None)
            else:
                return

    def _take(self, claim: Claim) -> None:
        self.num_running += 1
        self.num_taken += self._need(claim)
        self._changed()

    def _fits(self, claim: Claim) -> bool:
        return self.num_taken + self._need(claim) <= self.max_running

    def _need(self, claim: Claim) -> int:
        return min(claim.num_places, self.max_running)

    def _changed(self) -> None:
        self._on_change(self.num_running, self.num_waiting)


class LoadShedding:
    """Whether new sessions may speculate: not while requests have waited for longer than bursts last.

    Speculation goes first because it is the work that can be left out without losing a token.
    """

    def __init__(self, shed_after_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        """`shed_after_s`: how long the queue must be without a break; None: sessions may always speculate."""
        self._shed_after_s = shed_after_s
        self._clock = clock
        self._since_s = -float("inf")
        self._has_queue = False
        self._is_shedding = False

    def on_queue(self, num_waiting: int) -> None:
        """Another number of requests waits."""
        if (num_waiting > 0) != self._has_queue:
            self._update()
            self._has_queue = num_waiting > 0
            self._since_s = self._clock()

    @property
    def is_shedding(self) -> bool:
        """Sessions that open now are to decode plainly."""
        self._update()
        return self._is_shedding

    def _update(self) -> None:
        lasted_s = self._clock() - self._since_s
        if self._has_queue:
            if self._shed_after_s is not None and lasted_s >= self._shed_after_s:
                self._is_shedding = True
        elif lasted_s >= _RECOVERED_S:
            self._is_shedding = False
