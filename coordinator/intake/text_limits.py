"""How much text a process takes on at once: bytes of requests that it holds, and turns of long texts at the tokenizer.

Bytes are counted when a request comes, before anything is made of it. Long texts take turns in few threads, fair to
tenants, so that one tenant's texts do not hold up another's.
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
"""When room will be free is not known; a second is cheap to wait and cheap to be asked for again."""
_T = TypeVar("_T")
_NUM_THREADS = 2
_UNIT_BYTES = 64 * 1024
_NUM_UNITS = 32
"""Of text at once: 2 MiB in units, or one text that is longer. While it is tokenised it takes 140 times its size."""


class PromptBytes:
    """Budgets of bytes, of each tenant and of all together. One of which nothing is held admits any request."""

    def __init__(self, total_bytes: int, tenant_bytes: int, on_refused: Callable[[], None] = lambda: None) -> None:
        """Nothing is held yet. `on_refused` is called for each request that is refused."""
        self.num_bytes = 0
        """Held now."""
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
            left = self._of_tenant.get(tenant, 0) - num_bytes  # forgotten where what is left are empty requests
            if left:
                self._of_tenant[tenant] = left
            else:
                self._of_tenant.pop(tenant, None)

    def _refusal(self, whose: str, held: int, most: int) -> Overloaded:
        self._on_refused()
        return Overloaded(
            f"{held} bytes of {whose} are held, {most} may be", retry_after_s=_RETRY_S, reason="PROMPT_BYTES_EXCEEDED"
        )


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
