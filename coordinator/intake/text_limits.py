"""Limits of the text that a process works on at once: bytes of requests that it holds, and threads that tokenize.

Bytes are counted before a request is parsed further. Long texts are tokenized in few threads, in turns that are fair to
tenants.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from specdec.coordinator.intake.admission import AdmissionQueue
from specdec.coordinator.intake.line import Claim
from specdec.wire.errors import Overloaded

_RETRY_S = 1.0
"""Seconds that a refused client is told to wait: the time until room is free is unknown, and a retry is cheap."""
_T = TypeVar("_T")
_NUM_THREADS = 2
_UNIT_BYTES = 64 * 1024
_NUM_UNITS = 32
"""Units of text tokenized at once, 2 MiB together, or one longer text: tokenizing takes 140 times the text's memory."""


class PromptBytes:
    """Budgets of bytes, for each tenant and for all together. An empty budget admits a request of any size."""

    def __init__(self, total_bytes: int, tenant_bytes: int, on_refused: Callable[[], None] = lambda: None) -> None:
        """Nothing is held yet. `on_refused` is called for each request that is refused."""
        self.num_bytes = 0
        """Bytes held now."""
        self._total_bytes = total_bytes
        self._tenant_bytes = tenant_bytes
        self._of_tenant: dict[str, int] = {}
        self._on_refused = on_refused

    @contextmanager
    def hold(self, tenant: str, num_bytes: int) -> Iterator[None]:
        """Hold a request's bytes.

        Raises:
            Overloaded: the tenant's budget, or that of all, has no room (PROMPT_BYTES_EXCEEDED).
        """
        held = self._of_tenant.get(tenant, 0)
        if held and held + num_bytes > self._tenant_bytes:
            raise self._refusal("the tenant's requests", held, self._tenant_bytes)
        if self.num_bytes and self.num_bytes + num_bytes > self._total_bytes:
            raise self._refusal("all requests", self.num_bytes, self._total_bytes)
        self.num_bytes += num_bytes
        self._of_tenant[tenant] = held + num_bytes
        try:
            yield
        finally:
            self.num_bytes -= num_bytes
            left = self._of_tenant.get(tenant, 0) - num_bytes  # may be 0 while empty requests are left
            if left:
                self._of_tenant[tenant] = left
            else:
                self._of_tenant.pop(tenant, None)

    def _refusal(self, whose: str, held: int, most: int) -> Overloaded:
        self._on_refused()
        return Overloaded(
            f"{held} bytes of {whose} are held, the limit is {most}",
            retry_after_s=_RETRY_S,
            reason="PROMPT_BYTES_EXCEEDED",
        )


class TokenizingTurns:
    """Runs work on long texts in threads of its own. The budgets of bytes (`PromptBytes`) bound the waiting texts."""

    def __init__(self) -> None:
        self._turns = AdmissionQueue(_NUM_UNITS, sys.maxsize, None)
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="tokenize")

    @property
    def num_waiting(self) -> int:
        """Texts that wait for their turn."""
        return self._turns.num_waiting

    async def run(self, work: Callable[[], _T], num_bytes: int, tenant: str, weight: float) -> _T:
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
