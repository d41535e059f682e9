"""One tenant's waiting claims, in the order in which they are granted."""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

_LEAST_COMPACTED = 64
"""Entries of claims that left which are not worth removing."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A request's demand on a queue."""

    tenant: str = ""
    priority: int = 0
    """Orders the tenant's own claims only: lower first."""
    work: float = 1.0
    """Estimated work in tokens or bytes, the unit of tenants' shares."""
    num_places: int = 1
    is_divisible: bool = False
    """One place is enough to begin, others are taken as they become free, and its tenant cannot hold all."""
    weight: float = 1.0
    """The tenant's share, relative to others' weights."""
    deadline_s: float | None = None
    """Monotonic time after which a place is of no use."""


@dataclass(order=True, slots=True)
class Waiter:
    """A claim in line; the least of a tenant's is its next."""

    priority: int
    arrival: int
    claim: Claim = field(compare=False)
    admitted: asyncio.Future[Any] = field(compare=False)
    """Its result is what was granted."""
    is_in_line: bool = field(default=False, compare=False)

    @property
    def has_place(self) -> bool:
        """The claim was granted."""
        return self.admitted.done() and not self.admitted.cancelled() and self.admitted.exception() is None


class Line:
    """One tenant's claims. Each operation costs O(log n), except `before`.

    Claims that left stay in the heaps until they reach the top, or outnumber those that wait.
    """

    def __init__(self) -> None:
        self._firsts: list[Waiter] = []
        self._lasts: list[tuple[int, int, Waiter]] = []
        self._num_of: Counter[int] = Counter()
        self._places_of: Counter[int] = Counter()
        self.num_places = 0
        """Places that all claims in line need together."""
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def add(self, waiter: Waiter) -> None:
        """Put a claim in line."""
        waiter.is_in_line = True
        heapq.heappush(self._firsts, waiter)
        heapq.heappush(self._lasts, (-waiter.priority, -waiter.arrival, waiter))
        self._count(waiter, 1)

    def remove(self, waiter: Waiter) -> None:
        """Take a claim out of line; it must be in it."""
        waiter.is_in_line = False
        self._count(waiter, -1)
        if len(self._firsts) + len(self._lasts) > 4 * self._num + _LEAST_COMPACTED:
            self._firsts = [other for other in self._firsts if other.is_in_line]
            self._lasts = [entry for entry in self._lasts if entry[2].is_in_line]
            heapq.heapify(self._firsts)
            heapq.heapify(self._lasts)

    def first(self) -> Waiter:
        """The next claim. The line must not be empty."""
        while not self._firsts[0].is_in_line:
            heapq.heappop(self._firsts)
        return self._firsts[0]

    def last(self) -> Waiter:
        """The last claim. The line must not be empty."""
        while not self._lasts[0][2].is_in_line:
            heapq.heappop(self._lasts)
        return self._lasts[0][2]

    def before(self, priority: int) -> tuple[int, int]:
        """Claims ahead of a newcomer, and the places they need. Costs O(distinct priorities in line)."""
        ahead = [other for other in self._num_of if other <= priority]
        return sum(self._num_of[other] for other in ahead), sum(self._places_of[other] for other in ahead)

    def _count(self, waiter: Waiter, by: int) -> None:
        priority, places = waiter.priority, by * waiter.claim.num_places
        self._num += by
        self.num_places += places
        self._num_of[priority] += by
        self._places_of[priority] += places
        if not self._num_of[priority]:
            del self._num_of[priority], self._places_of[priority]
