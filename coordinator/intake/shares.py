"""Which part of the places each tenant may hold, and who is below its share of them."""

from __future__ import annotations

import time
from collections.abc import Callable

from specdec.coordinator.intake.fair_queue import FairQueue
from specdec.coordinator.intake.line import Claim

_LEAST_SHARED = 8
"""Places, at least, of which one tenant cannot take all; of fewer, each returns when its choice ends."""
_KEPT_ALONE = 16
"""Places per place that is kept for a tenant that has not come yet; at least one is kept."""
_KEPT_BESIDES = 4
"""Places per place that is kept for the others where a tenant is not alone."""
_RECENT_S = 600.0
"""Seconds after its last request in which a tenant counts as there."""


class PlaceShares:
    """The places that tenants hold. A tenant's share is the part of its weight in that of all that hold or wait."""

    def __init__(self, line: FairQueue, clock: Callable[[], float] = time.monotonic) -> None:
        """`line`: the tenants that wait."""
        self._line = line
        self._clock = clock
        self._held: dict[str, tuple[int, float]] = {}
        """Number of places and weight, by tenant."""
        self._latest = self._before = ("", -float("inf"))
        """The last two tenants that came, and when. No more are kept: names are the clients' choice."""

    def came(self, claim: Claim) -> None:
        """A claim has come."""
        if claim.tenant != self._latest[0]:
            self._before = self._latest
        self._latest = (claim.tenant, self._clock())

    def num_held(self, tenant: str) -> int:
        """Places that a tenant holds."""
        return self._held.get(tenant, (0, 1.0))[0]

    def count(self, claim: Claim, by: int) -> None:
        """Places of a claim were taken, or given back."""
        num_held = self.num_held(claim.tenant) + by
        if num_held:
            self._held[claim.tenant] = (num_held, claim.weight)
        else:
            self._held.pop(claim.tenant, None)

    def left(self, claim: Claim, num_places: int) -> int:
        """Of all `num_places`, those that the claim's tenant may have besides the ones that it holds."""
        kept = 0
        if num_places >= _LEAST_SHARED:
            kept = max(1, num_places // (_KEPT_ALONE if self._is_alone(claim.tenant) else _KEPT_BESIDES))
        return num_places - kept - self.num_held(claim.tenant)

    def per_weight(self, num_places: int) -> float:
        """Places of `num_places` that are a tenant's share, per unit of weight. Costs O(tenants that hold places)."""
        holding = sum(weight for tenant, (_, weight) in self._held.items() if not self._line.has(tenant))
        return num_places / (self._line.weight + holding or 1.0)

    def is_below(self, claim: Claim, per_weight: float) -> bool:
        """Whether the claim's tenant has no place, or one more leaves it within its share."""
        num_held = self.num_held(claim.tenant)
        return not num_held or num_held + 1 <= claim.weight * per_weight

    def _is_alone(self, tenant: str) -> bool:
        since_s = self._clock() - _RECENT_S
        return all(name == tenant or at_s < since_s for name, at_s in (self._latest, self._before))
