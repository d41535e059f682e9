"""Threads that tokenize long texts, in turns that are fair to tenants."""

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
"""Units of text tokenized at once, 2 MiB together, or one longer text: tokenizing takes 140 times the text's memory."""


class TokenizingTurns:
    """Runs work on long texts in threads of its own. `ByteBudget` bounds the waiting texts."""

    def __init__(self) -> None:
        self._turns = AdmissionQueue(_NUM_UNITS, sys.maxsize, None)
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="tokenize")

    @property
    def num_waiting(self) -> int:
        """Texts that wait for their turn."""
        return self._turns.num_waiting

    async def run_in_turn(self, work: Callable[[], _T], num_bytes: int, tenant: str, weight: float) -> _T:
        """Run `work`, which reads `num_bytes`, in a thread.

        The turn lasts until the thread is done, even if cancelled.
        """
        num_units = -(-num_bytes // _UNIT_BYTES)
        claim = Claim(tenant, work=num_bytes, num_places=max(num_units, _NUM_UNITS // _NUM_THREADS), weight=weight)
        place = await self._turns.acquire(claim)
        running = asyncio.get_running_loop().run_in_executor(self._threads, work)
        running.add_done_callback(lambda _: place.release())
        return await asyncio.shield(running)

    def close(self) -> None:
        """End the threads without waiting for running work."""
        self._threads.shutdown(wait=False, cancel_futures=True)
