"""Admission: which choices run, and which wait for a place."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from specdec.coordinator.intake.fair_queue import FairQueue
from specdec.coordinator.intake.line import Claim, Waiter
from specdec.coordinator.intake.shares import PlaceShares
from specdec.wire.errors import Overloaded

_LEAST_RETRY_S = 0.1
"""Seconds, at least, that a refused client is told to wait: earlier retries only cost time."""
_MOST_RETRY_S = 30.0
"""Seconds, at most, that a refused client is told to wait: the estimate is a mean, and places may be free sooner."""
_FIRST_GUESS_S = 1.0
"""Seconds that a place is assumed to be held, before any was given back."""
_SMOOTHING = 0.1
"""Weight of the latest place in the mean holding time: about ten places count."""
_LEAST_RETURNED = 10
"""Places given back before the mean holding time may refuse a request by its deadline."""


@dataclass(slots=True, eq=False)
class Place:
    """The places granted to a claim, held until `release`. A divisible claim may have been granted a part of them."""

    claim: Claim
    num_held: int
    num_missing: int
    """Places that the claim still wants."""
    _queue: AdmissionQueue = field(repr=False)
    began_s: float
    """Monotonic time."""
    is_held: bool = True
    on_more: Callable[[], None] = field(default=lambda: None, repr=False)
    """Called when it gets one more of its missing places."""

    def want_only(self, num_places: int) -> None:
        """Give back all but this number of places, and want no more."""
        self.num_missing = min(self.num_missing, max(0, num_places - self.num_held))
        while self.num_held > max(1, num_places):
            self.end_one()

    def end_one(self) -> None:
        """What one of the places was for has ended. It goes to who is next, the last one to the claim itself."""
        if not self.is_held or not self.num_held:
            return
        if self.num_missing and self.num_held == 1:
            self.num_missing -= 1
            self.on_more()
        else:
            self.num_held -= 1
            self._queue.give_one_back(self.claim)

    def release(self, used: float | None = None) -> None:
        """Give the places back, with the work done in tokens if it is known. A second call does nothing."""
        if self.is_held:
            self.is_held = False
            self._queue.give_back(self, used)


class AdmissionQueue:
    """A bounded waiting room, fair to tenants, in front of a bounded number of places.

    `FairQueue` decides who is next. A claim of n places takes n, at most all of them, and nobody overtakes it while it
    waits for the last of them. A divisible claim begins with one and gets more as places come free; its tenant cannot
    hold all. Of divisible claims, those whose tenants are below their share of the places (`PlaceShares`) come first.
    When the room is full, the tenant that has most in it gives up its last claim: a tenant with fewer claims is never
    refused for another's crowd.
    """

    def __init__(
        self,
        max_running: int,
        max_waiting: int,
        queue_timeout_s: float | None,
        on_change: Callable[[int, int], None] = lambda num_running, num_waiting: None,
        capacity: Callable[[], int | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Set the bounds.

        `on_change` gets the numbers of running and waiting claims. `capacity` returns the places that there are behind
        this queue, if they are known: who waits here is served in turn, and who is sent there is refused. `clock`
        returns monotonic seconds, as the running event loop's does, which measures `queue_timeout_s`.
        """
        self._clock = clock
        self._capacity = capacity
        self.max_running = max_running
        self.max_waiting = max_waiting
        self.num_running = 0
        """Claims that hold places."""
        self.num_taken = 0
        """Places that they hold."""
        self._queue_timeout_s = queue_timeout_s
        self._growing: dict[Place, None] = {}
        self._queue = FairQueue()
        self._shares = PlaceShares(self._queue, clock)
        self._mean_held_s = _FIRST_GUESS_S
        self._num_returned = 0
        self._on_change = on_change
        self._limit = max_running
        """Places, as last counted."""

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
        """Wait for places; a cancelled wait holds none.

        Raises:
            Overloaded: the room is full (OVERLOADED), the wait was too long (QUEUE_TIMEOUT), or would end after the
                deadline (DEADLINE_UNREACHABLE); says when to retry.
        """
        self._shares.came(claim)
        self._count_limit()
        if not self._is_next(claim):
            self._check_deadline(claim)
            return await self._wait(claim)
        self._queue.give(claim)
        return self._take(claim)

    def retry_after_s(self, claim: Claim) -> float:
        """Seconds until this claim is likely to be granted if it comes again."""
        return min(_MOST_RETRY_S, max(_LEAST_RETRY_S, self._wait_s(claim)))

    def give_back(self, place: Place, used: float | None) -> None:
        """For `Place`: it is held no more, and did `used` tokens of work."""
        self._num_returned += 1
        self._mean_held_s += _SMOOTHING * (self._clock() - place.began_s - self._mean_held_s)
        if used is not None:
            self._queue.correct(place.claim, used)
        self._free(place)

    def give_one_back(self, claim: Claim) -> None:
        """For `Place`: one of its places is free."""
        self._count(claim, -1)
        self._grant()
        self._changed()

    def _wait_s(self, claim: Claim) -> float:
        places = self._queue.num_places_before(claim) + self._need(claim)
        return self._mean_held_s * places / self._limit

    def _check_deadline(self, claim: Claim) -> None:
        if claim.deadline_s is None or self._num_returned < _LEAST_RETURNED:
            return
        wait_s, left_s = self._wait_s(claim), claim.deadline_s - self._clock()
        if wait_s > left_s:
            raise Overloaded(
                f"a place is likely to be free in {wait_s:.1f} s, the deadline is in {max(0.0, left_s):.1f} s",
                retry_after_s=self.retry_after_s(claim),
                reason="DEADLINE_UNREACHABLE",
            )

    async def _wait(self, claim: Claim) -> Place:
        waiter = self._queue.new_waiter(claim)
        self._make_room(claim)
        self._queue.push(waiter)
        self._changed()
        try:
            async with asyncio.timeout(self._queue_timeout_s):
                return await waiter.admitted
        except TimeoutError:
            if waiter.has_place:  # granted in the same turn of the event loop
                return waiter.admitted.result()
            self._leave(waiter)
            raise Overloaded(
                f"no place became free within {self._queue_timeout_s} s",
                retry_after_s=self.retry_after_s(claim),
                reason="QUEUE_TIMEOUT",
            ) from None
        except asyncio.CancelledError:
            if waiter.has_place:  # granted in the same turn of the event loop
                self._queue.correct(claim, 0.0)
                waiter.admitted.result().is_held = False
                self._free(waiter.admitted.result())
            self._leave(waiter)
            raise

    def _make_room(self, claim: Claim) -> None:
        if self.num_waiting < self.max_waiting:
            return
        error = Overloaded(
            f"{self.num_running} requests run and {self.num_waiting} wait (max_waiting)",
            retry_after_s=self.retry_after_s(claim),
        )
        displaced = self._queue.displaced_by(claim)
        if displaced is None:
            raise error
        self._leave(displaced)
        displaced.admitted.set_exception(error)

    def _leave(self, waiter: Waiter) -> None:
        if self._queue.remove(waiter):
            self._grant()  # it may have blocked claims that need fewer places
            self._changed()

    def _free(self, place: Place) -> None:
        self._growing.pop(place, None)
        self.num_running -= 1
        self._count(place.claim, -place.num_held)
        self._grant()
        self._changed()

    def _grant(self) -> None:
        self._count_limit()
        while True:
            share = self._shares.per_weight(self._limit)
            waiter, place = self._next(share), self._next_to_grow()
            if waiter is not None and waiter.admitted.done():  # cancelled this turn
                self._queue.remove(waiter)
            elif place is not None and (waiter is None or self._is_before(place.claim, waiter.claim, share)):
                place.num_held += 1
                place.num_missing -= 1
                self._count(place.claim, 1)
                place.on_more()
            elif waiter is not None and self._fits(waiter.claim):
                self._queue.pop(waiter)
                waiter.admitted.set_result(self._take(waiter.claim))
            else:
                return

    def _is_before(self, growing: Claim, waiting: Claim, share: float) -> bool:
        """Whether a claim gets one more place before another begins: only its own tenant is below its share."""
        return self._shares.is_below(growing, share) and not self._shares.is_below(waiting, share)

    def _next_to_grow(self) -> Place | None:
        """Of the claims that may have one more place, the first of the tenant with the fewest places per weight."""
        self._growing = {place: None for place in self._growing if place.num_missing}
        if self.num_taken >= self._limit:
            return None
        may_grow = (place for place in self._growing if self._share_left(place.claim) > 0)
        held = self._shares.num_held
        return min(may_grow, key=lambda place: held(place.claim.tenant) / place.claim.weight, default=None)

    def _next(self, share: float | None = None) -> Waiter | None:
        """The next in line, of those whose tenants may have more places, first of those below their share."""
        per_weight = self._shares.per_weight(self._limit) if share is None else share

        def may_have(claim: Claim) -> bool:
            return not claim.is_divisible or not self.num_taken or self._share_left(claim) > 0

        def comes_first(claim: Claim) -> bool:
            return may_have(claim) and (not claim.is_divisible or self._shares.is_below(claim, per_weight))

        return self._queue.head(comes_first) or self._queue.head(may_have)

    def _is_next(self, claim: Claim) -> bool:
        return self._next() is None and self._fits(claim)

    def _take(self, claim: Claim) -> Place:
        num_held = max(1, min(claim.num_places, self._most(claim))) if claim.is_divisible else self._need(claim)
        num_missing = claim.num_places - num_held if claim.is_divisible else 0
        place = Place(claim, num_held, num_missing, self, self._clock())
        if place.num_missing:
            self._growing[place] = None
        self.num_running += 1
        self._count(claim, num_held)
        self._changed()
        return place

    def _count(self, claim: Claim, by: int) -> None:
        self.num_taken += by
        self._shares.count(claim, by)

    def _share_left(self, claim: Claim) -> int:
        """Places that the claim's tenant may have besides those it holds."""
        return self._shares.left(claim, self._limit)

    def _most(self, claim: Claim) -> int:
        """Free places that a divisible claim may have."""
        return min(self._limit - self.num_taken, self._share_left(claim))

    def _count_limit(self) -> None:
        """Count the places once for a change of the queue: that looks at every target."""
        self._limit = min(self.max_running, self._capacity() or self.max_running)

    def _fits(self, claim: Claim) -> bool:
        if self.num_taken == 0:
            return True
        return self._most(claim) > 0 if claim.is_divisible else self.num_taken + self._need(claim) <= self._limit

    def _need(self, claim: Claim) -> int:
        return 1 if claim.is_divisible else min(claim.num_places, self.max_running)

    def _changed(self) -> None:
        self._on_change(self.num_running, self.num_waiting)
