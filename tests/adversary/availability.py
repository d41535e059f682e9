"""Since when there has been a target and a coordinator that nothing is wrong with."""

from __future__ import annotations

import math
import time
from collections import Counter

from tests.adversary.fleet import Fleet
from tests.adversary.plan import Fault
from tests.adversary.waiting import until


class Availability:
    """Streams can be expected to move from `since_s` on."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._cut: Counter[str] = Counter()
        self.since_s = 0.0
        """On the monotonic clock; infinite while all targets or all coordinators are cut off."""

    def cut(self, fault: Fault) -> None:
        """A fault begins."""
        if (name := fault.cuts_off()) is not None:
            self._cut[name] += 1
            self._update()

    async def mend(self, fault: Fault, timeout_s: float) -> bool:
        """A fault is over; returns when the service that it cut off is healthy again, or False if it is not in time."""
        name = fault.cuts_off()
        if name is None:
            return True
        is_healthy = await until(lambda: self._fleet.is_healthy(name), timeout_s)
        self._cut[name] -= 1
        self._update()
        return is_healthy

    def _update(self) -> None:
        topology = self._fleet.topology
        is_there = all(any(not self._cut[name] for name in topology.of(role)) for role in ("target", "coordinator"))
        if not is_there:
            self.since_s = math.inf
        elif math.isinf(self.since_s):
            self.since_s = time.monotonic()
