"""Tell the store which requests have ended."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine

from specdec.store.guarded import GuardedStore
from specdec.store.interface import Lease, RequestKey, StoreUnavailable

_MAX_UNHEARD = 1024
"""Ends kept for a store that is away; the leases of further ones expire."""


class Endings:
    """Tells the store which requests have ended, even if their calls are cancelled. Use it from one event loop."""

    def __init__(self, store: GuardedStore, keep_s: float, on_unheard: Callable[[], None]) -> None:
        """`keep_s`: seconds that ended records are kept. `on_unheard` is called when `tell_again` has work."""
        self._store = store
        self._keep_s = keep_s
        self._on_unheard = on_unheard
        self._running: dict[asyncio.Task[None], RequestKey] = {}
        self._unheard: deque[Lease] = deque(maxlen=_MAX_UNHEARD)
        """Ends that could not be stored."""

    def start(self, key: RequestKey, ending: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Run `ending`, which ends a request, as a task of its own."""
        task = asyncio.create_task(ending, name="journal-end")
        self._running[task] = key
        task.add_done_callback(self._running.pop)
        return task

    async def wait(self, tenant: str) -> None:
        """Wait for the tenant's endings that are running now."""
        if running := [task for task, key in self._running.items() if key.tenant == tenant]:
            await asyncio.wait(running)

    async def close(self) -> None:
        """Wait for all running endings."""
        while self._running:
            await asyncio.wait(list(self._running))

    async def tell(self, lease: Lease) -> None:
        """Tell the store that a request has ended; `tell_again` repeats it if the store is away."""
        try:
            await self._tell(lease)
        except StoreUnavailable:
            self._unheard.append(lease)
            self._on_unheard()

    async def tell_again(self) -> None:
        """Store the ends that could not be stored before. Raises StoreUnavailable."""
        for _ in range(len(self._unheard)):
            lease = self._unheard.popleft()
            try:
                await self._tell(lease)
            except StoreUnavailable:
                self._unheard.append(lease)  # the fault may be this record's: the others come first now
                raise

    async def _tell(self, lease: Lease) -> None:
        await self._store.end(lease.key, lease.owner_id, lease.generation, self._keep_s)
