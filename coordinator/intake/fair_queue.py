"""Whose turn it is: start-time fair queueing over tenants, priorities within each.

Every tenant has a tag, in tokens of work per unit of weight: how much it has been given. The tenant with the least tag
is next. Virtual time is the highest tag at which anything was given; a tenant that comes back starts there, so nobody
saves up turns while idle and nobody owes for work that no one else wanted.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field

_LEAST_SWEEP_TENANTS = 1024
"""Without API keys clients name their tenants, so there may be any number of them."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What is asked of a queue."""

    tenant: str = ""
    priority: int = 0
    """Orders the tenant's own claims only: lower first."""
    work: float = 1.0
    """An estimate, in tokens (or bytes): what the tenant's share is measured in."""
    num_places: int = 1
    weight: float = 1.0
    """The tenant's share, relative to others' weights."""
    deadline_s: float | None = None
    """On the monotonic clock: a place after that is of no use."""


@dataclass(order=True, slots=True)
class Waiter:
    """A claim in line; the least of a tenant's is its next."""

    priority: int
    arrival: int
    claim: Claim = field(compare=False)
    admitted: asyncio.Future[None] = field(compare=False)

    @property
    def has_place(self) -> bool:
        """The claim was granted."""
        return self.admitted.done() and not self.admitted.cancelled() and self.admitted.exception() is None


@dataclass(slots=True)
class _Tenant:
    tag: float
    weight: float
    arrived: int
    """Breaks ties: who has been in line for longer."""
    waiters: list[Waiter] = field(default_factory=list)
    """A heap."""


class FairQueue:
    """Claims of many tenants, and which one is next.

    Guarantee: of two tenants that both have claims in line all the while, what they are given, by estimate and per unit
    of weight, differs by at most one claim of each. Costs O(tenants in line) per claim.
    """

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}
        self._backlogged: dict[str, _Tenant] = {}
        self._virtual = 0.0
        self._num_arrived = 0
        self._num_waiting = 0
        self._sweep_at = _LEAST_SWEEP_TENANTS

    def __len__(self) -> int:
        return self._num_waiting

    def new_waiter(self, claim: Claim) -> Waiter:
        """A claim that has just come; not in line yet. Needs a running event loop."""
        self._num_arrived += 1
        return Waiter(claim.priority, self._num_arrived, claim, asyncio.get_running_loop().create_future())

    def push(self, waiter: Waiter) -> None:
        """Put a claim in line."""
        name = waiter.claim.tenant
        tenant = self._tenant(waiter.claim)
        if not tenant.waiters:
            tenant.tag = max(self._virtual, tenant.tag)
            tenant.arrived = waiter.arrival
            self._backlogged[name] = tenant
        heapq.heappush(tenant.waiters, waiter)
        self._num_waiting += 1

    def head(self) -> Waiter | None:
        """Who is next."""
        if not self._backlogged:
            return None
        return min(self._backlogged.values(), key=lambda t: (t.tag, t.arrived)).waiters[0]

    def pop(self, waiter: Waiter) -> None:
        """Take the head out of line: it is given what it asked for."""
        tenant = self._backlogged[waiter.claim.tenant]
        heapq.heappop(tenant.waiters)
        self._left(waiter.claim.tenant, tenant)
        self._give(tenant, waiter.claim)

    def remove(self, waiter: Waiter) -> bool:
        """Take a claim out of line that is given nothing; whether it was in line."""
        tenant = self._backlogged.get(waiter.claim.tenant)
        if tenant is None or not any(w is waiter for w in tenant.waiters):
            return False
        tenant.waiters = [w for w in tenant.waiters if w is not waiter]
        heapq.heapify(tenant.waiters)
        self._left(waiter.claim.tenant, tenant)
        return True

    def give(self, claim: Claim) -> None:
        """Count a claim that is granted without standing in line."""
        tenant = self._tenant(claim)
        tenant.tag = max(self._virtual, tenant.tag)
        self._give(tenant, claim)

    def correct(self, claim: Claim, used: float) -> None:
        """A granted claim has used this much, not what was estimated. No tenant gets before virtual time by it."""
        tenant = self._tenants.get(claim.tenant)
        if tenant is not None:
            tenant.tag = max(self._virtual, tenant.tag + (used - claim.work) / tenant.weight)

    def displaced_by(self, newcomer: Claim) -> Waiter | None:
        """Who leaves a full line for a newcomer: the last of the tenant that has most in it, by weight.

        None: the newcomer is of that tenant and would be its last.
        """
        own = self._backlogged.get(newcomer.tenant)
        num_own = 1 if own is None else len(own.waiters) + 1
        longest = max(self._backlogged.values(), key=lambda t: len(t.waiters) / t.weight, default=None)
        if (
            longest is not None
            and longest is not own
            and len(longest.waiters) / longest.weight > num_own / (newcomer.weight)
        ):
            return max(longest.waiters)
        last = max(own.waiters) if own is not None else None
        return last if last is not None and newcomer.priority < last.priority else None

    def num_places_before(self, newcomer: Claim) -> float:
        """Places that will have been given to others before a newcomer gets its own; an estimate."""
        own = self._backlogged.get(newcomer.tenant)
        own_before = [] if own is None else [w for w in own.waiters if w.priority <= newcomer.priority]
        num_turns = (len(own_before) + 1) / newcomer.weight
        others = (t for name, t in self._backlogged.items() if name != newcomer.tenant)
        return _places(own_before) + sum(
            _places(tenant.waiters) * min(1.0, num_turns * tenant.weight / len(tenant.waiters)) for tenant in others
        )

    def _give(self, tenant: _Tenant, claim: Claim) -> None:
        self._virtual = max(self._virtual, tenant.tag)
        tenant.tag += claim.work / tenant.weight
        tenant.arrived = self._num_arrived

    def _left(self, name: str, tenant: _Tenant) -> None:
        self._num_waiting -= 1
        if not tenant.waiters:
            del self._backlogged[name]

    def _tenant(self, claim: Claim) -> _Tenant:
        tenant = self._tenants.get(claim.tenant)
        if tenant is None:
            self._sweep()
            tenant = self._tenants[claim.tenant] = _Tenant(self._virtual, claim.weight, self._num_arrived)
        tenant.weight = claim.weight  # keys may change while the process runs
        return tenant

    def _sweep(self) -> None:
        if len(self._tenants) < self._sweep_at:
            return
        self._tenants = {
            name: t for name, t in self._tenants.items() if t.waiters or t.tag > self._virtual
        }  # a tenant at virtual time is like one that was never here
        self._sweep_at = max(_LEAST_SWEEP_TENANTS, 2 * len(self._tenants))


def _places(waiters: Iterable[Waiter]) -> int:
    return sum(waiter.claim.num_places for waiter in waiters)
