"""Long texts take turns: few threads, fair to tenants, so that one tenant's texts do not hold up another's."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from specdec.coordinator.intake.admission import AdmissionQueue
from specdec.coordinator.intake.line import Claim

_T = TypeVar("_T")
_NUM_THREADS = 2
_UNIT_BYTES = 64 * 1024
_NUM_UNITS = 32
"""Of text at once: 2 MiB in units, or one text that is longer. While it is tokenised it takes 140 times its size."""


class TokenizingTurns:
    """Runs work on long texts in threads of its own. Who waits is bounded by the budgets of bytes, not here."""

    def __init__(self) -> None:
        self._turns = AdmissionQueue(_NUM_UNITS, sys.maxsize, None)
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="tokenize")

    @property
    def num_waiting(self) -> int:
        """Texts that wait for their turn."""
        return self._turns.num_waiting

    async def run(self, work: Callable[[], _T], num_bytes: int, tenant: str, weight: float) -> _T:
        """The result of `work`, which reads so many bytes. A turn lasts till its thread is done, even if cancelled."""
        num_units = -(-num_bytes // _UNIT_BYTES)
        claim = Claim(tenant, work=num_bytes, num_places=max(num_units, _NUM_UNITS // _NUM_THREADS), weight=weight)
        place = await self._turns.acquire(claim)
        running = asyncio.get_running_loop().run_in_executor(self._threads, work)
        running.add_done_callback(lambda _: place.release())
        return await asyncio.shield(running)

    def close(self) -> None:
        """End the threads; work that runs is not waited for."""
        self._threads.shutdown(wait=False, cancel_futures=True)
