"""Whether the gateway can serve: it is not leaving, and some coordinator serves."""

from __future__ import annotations

import asyncio
import time

from specdec.gateway.upstream.coordinators import Coordinators

_BELIEVED_S = 0.5
"""Probes are many, and each answer takes a call of every coordinator."""


class Health:
    """Asks when it is asked, at most twice a second."""

    def __init__(self, coordinators: Coordinators) -> None:
        self._coordinators = coordinators
        self._lock = asyncio.Lock()
        self._asked_s = -_BELIEVED_S
        self._serves = False
        self.is_draining = False
        """New requests are refused."""

    async def is_ready(self) -> bool:
        """Whether a request that comes now can be served."""
        if self.is_draining:
            return False
        async with self._lock:
            if time.monotonic() - self._asked_s >= _BELIEVED_S:
                self._serves = await self._coordinators.any_serves()
                self._asked_s = time.monotonic()
        return self._serves
