"""Whose turn it is: start-time fair queueing over tenants, priorities within each.

Every tenant has a tag: the work it has been given, in tokens per unit of weight. The tenant with the least tag is
next. Virtual time is the highest tag at which a claim was granted; a tenant that comes back starts there, so nobody
saves up turns while idle and nobody owes for work that no one else wanted.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

from specdec.coordinator.intake.line import Claim, Line, Waiter

_LEAST_SWEEP_TENANTS = 1024
"""Tenants kept before idle ones are dropped: without API keys clients name them, so their number is unbounded."""
_MOST_IDLE_TENANTS = 16_384
"""Idle tenants kept for the work they owe; those that owe least are dropped first."""
_SAMPLED_TENANTS = 256
"""Tenants sampled to estimate a wait: a refused request must not cost more than a served one."""
_LEAST_COMPACTED = 64
"""Stale heap entries that are not worth removing."""


@dataclass(slots=True, eq=False)
class _Tenant:
    name: str
    tag: float
    weight: float
    arrived: int
    """Breaks ties: the tenant that has been in line for longer is next."""
    line: Line = field(default_factory=Line)

    @property
    def turn(self) -> tuple[float, int]:
        """The least is next."""
        return self.tag, self.arrived

    @property
    def crowd(self) -> float:
        """Claims in line per unit of weight."""
        return len(self.line) / self.weight


class FairQueue:
    """Claims of many tenants, and which one is next.

    Guarantee: while two tenants both have claims in line, the estimated work they are given, per unit of weight,
    differs by at most one claim of each. A claim that comes, is granted or leaves costs O(log n).
    """

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}
        self._backlogged: dict[str, _Tenant] = {}
        # Heaps with an entry for each change; only a tenant's latest counts.
        self._turns: list[tuple[tuple[float, int], int, _Tenant]] = []
        self._crowds: list[tuple[float, int, _Tenant]] = []
        self._num_noted = 0
        self._virtual = 0.0
        self._num_arrived = 0
        self._num_waiting = 0
        self.weight = 0.0
        """Weights of the tenants in line together."""
        self._sweep_at = _LEAST_SWEEP_TENANTS

    def __len__(self) -> int:
        return self._num_waiting

    def new_waiter(self, claim: Claim) -> Waiter:
        """A waiter for a new claim; not in line yet. Needs a running event loop."""
        self._num_arrived += 1
        return Waiter(claim.priority, self._num_arrived, claim, asyncio.get_running_loop().create_future())

    def push(self, waiter: Waiter) -> None:
        """Put a claim in line."""
        tenant = self._tenant(waiter.claim)
        if not tenant.line:
            tenant.tag = max(self._virtual, tenant.tag)
            tenant.arrived = waiter.arrival
            self._backlogged[tenant.name] = tenant
            self.weight += tenant.weight
        tenant.line.add(waiter)
        self._num_waiting += 1
        self._note(tenant)

    def has(self, tenant: str) -> bool:
        """Whether a tenant is in line."""
        return tenant in self._backlogged

    def head(self, may: Callable[[Claim], bool] = lambda claim: True) -> Waiter | None:
        """The next waiter, of the tenants whose first claim `may` be granted; None if there is none."""
        passed: list[tuple[tuple[float, int], int, _Tenant]] = []
        found: Waiter | None = None
        while self._turns and found is None:
            turn, _, tenant = self._turns[0]
            if not tenant.line or turn != tenant.turn:
                heapq.heappop(self._turns)
            elif not may(tenant.line.first().claim):
                passed.append(heapq.heappop(self._turns))
            else:
                found = tenant.line.first()
        for entry in passed:
            heapq.heappush(self._turns, entry)
        return found

    def pop(self, waiter: Waiter) -> None:
        """Take the head out of line; its claim is granted."""
        tenant = self._backlogged[waiter.claim.tenant]
        self._give(tenant, waiter.claim)
        self._left(tenant, waiter)

    def remove(self, waiter: Waiter) -> bool:
        """Take a claim out of line ungranted; False if it was not in line."""
        if not waiter.is_in_line:
            return False
        self._left(self._backlogged[waiter.claim.tenant], waiter)
        return True

    def give(self, claim: Claim) -> None:
        """Count a claim that is granted without standing in line."""
        tenant = self._tenant(claim)
        tenant.tag = max(self._virtual, tenant.tag)
        self._give(tenant, claim)
        self._note(tenant)

    def correct(self, claim: Claim, used: float) -> None:
        """Replace a granted claim's estimated work by the used work. No tag falls below virtual time."""
        tenant = self._tenants.get(claim.tenant)
        if tenant is not None:
            tenant.tag = max(self._virtual, tenant.tag + (used - claim.work) / tenant.weight)
            self._note(tenant)

    def displaced_by(self, newcomer: Claim) -> Waiter | None:
        """The waiter that leaves a full line for a newcomer: the last of the tenant with most claims per weight.

        None: the newcomer itself is the one to refuse.
        """
        own = self._backlogged.get(newcomer.tenant)
        num_own = 1 if own is None else len(own.line) + 1
        longest = self._longest()
        if longest is not None and longest is not own and longest.crowd > num_own / newcomer.weight:
            return longest.line.last()
        last = own.line.last() if own is not None else None
        return last if last is not None and newcomer.priority < last.priority else None

    def num_places_before(self, newcomer: Claim) -> float:
        """Estimated places that others are given before a newcomer gets its own."""
        own = self._backlogged.get(newcomer.tenant)
        num_before, own_places = (0, 0) if own is None else own.line.before(newcomer.priority)
        num_turns = (num_before + 1) / newcomer.weight
        num_others = len(self._backlogged) - (own is not None)
        looked_at = [t for t in islice(self._backlogged.values(), _SAMPLED_TENANTS) if t is not own]
        places = sum(t.line.num_places * min(1.0, num_turns * t.weight / len(t.line)) for t in looked_at)
        return own_places + (places * num_others / len(looked_at) if looked_at else 0.0)

    def _longest(self) -> _Tenant | None:
        while self._crowds:
            crowd, _, tenant = self._crowds[0]
            if tenant.line and -crowd == tenant.crowd:
                return tenant
            heapq.heappop(self._crowds)
        return None

    def _give(self, tenant: _Tenant, claim: Claim) -> None:
        self._virtual = max(self._virtual, tenant.tag)
        tenant.tag += claim.work / tenant.weight
        tenant.arrived = self._num_arrived

    def _left(self, tenant: _Tenant, waiter: Waiter) -> None:
        tenant.line.remove(waiter)
        self._num_waiting -= 1
        if tenant.line:
            self._note(tenant)
        else:
            del self._backlogged[tenant.name]
            self.weight = self.weight - tenant.weight if self._backlogged else 0.0

    def _note(self, tenant: _Tenant) -> None:
        """A tenant's tag or line has changed, and with it its rank in both heaps."""
        if not tenant.line:
            return
        self._num_noted += 1
        heapq.heappush(self._turns, (tenant.turn, self._num_noted, tenant))
        heapq.heappush(self._crowds, (-tenant.crowd, self._num_noted, tenant))
        if len(self._turns) + len(self._crowds) > 4 * len(self._backlogged) + _LEAST_COMPACTED:
            latest = list(enumerate(self._backlogged.values()))
            self._turns = [(t.turn, number, t) for number, t in latest]
            self._crowds = [(-t.crowd, number, t) for number, t in latest]
            heapq.heapify(self._turns)
            heapq.heapify(self._crowds)

    def _tenant(self, claim: Claim) -> _Tenant:
        tenant = self._tenants.get(claim.tenant)
        if tenant is None:
            self._sweep()
            tenant = self._tenants[claim.tenant] = _Tenant(claim.tenant, self._virtual, claim.weight, self._num_arrived)
        if tenant.line:
            self.weight += claim.weight - tenant.weight
        tenant.weight = claim.weight  # keys may change while the process runs
        return tenant

    def _sweep(self) -> None:
        if len(self._tenants) < self._sweep_at:
            return
        # A tenant at virtual time is like a new one. If each tenant comes only once, virtual time stands still.
        idle = [t for t in self._tenants.values() if not t.line and t.tag > self._virtual]
        if len(idle) > _MOST_IDLE_TENANTS:
            idle = heapq.nlargest(_MOST_IDLE_TENANTS, idle, key=lambda t: t.tag)
        self._tenants = {t.name: t for t in (*self._backlogged.values(), *idle)}
        self._sweep_at = max(_LEAST_SWEEP_TENANTS, 2 * len(self._tenants))
